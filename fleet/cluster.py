"""The Kubernetes API: objects as plain dicts, by path. The one place of kubernetes-asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fleet.errors import FleetError, Unavailable

Object = dict[str, Any]
"""One Kubernetes object, or the body of an answer, as JSON has it."""

MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"
JSON = "application/json"

ASK_S = 30.0
"""Longest an answer may take, seconds."""
WATCH_S = 300
"""Seconds after which a watch is opened anew, from where it was."""


class ClusterError(FleetError):
    """What the API server refused. `code` is its HTTP status, `reason` its word for it."""

    http_status = 502

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason

    @property
    def missing(self) -> bool:
        return self.code == 404

    @property
    def conflict(self) -> bool:
        """Somebody wrote meanwhile: read again."""
        return self.code == 409

    @property
    def expired(self) -> bool:
        """The resourceVersion is too old to go on from: list again."""
        return self.code == 410

    @property
    def refused(self) -> bool:
        """The object is too large, or against a rule, a schema or a right: the same request will be refused
        again."""
        return self.code in (400, 403, 413, 422)


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object, and where it is found."""

    api_version: str
    """`apps/v1`, or `v1` of the core group."""
    kind: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str = "", name: str = "", sub: str = "") -> str:
        """Of one object, or of all where `name` is empty; of all namespaces where that is empty too."""
        root = "api" if "/" not in self.api_version else "apis"
        parts = [root, self.api_version]
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        if name:
            parts.append(name)
        if sub:
            parts.append(sub)
        return "/" + "/".join(parts)


GROUP = "pdfleet.dev"
VERSION = "v1alpha1"
FLEETS = Resource(f"{GROUP}/{VERSION}", "InferenceFleet", "inferencefleets")
POOLS = Resource(f"{GROUP}/{VERSION}", "FleetPool", "fleetpools")


class Api(Protocol):
    """The API server."""

    async def ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content: str = JSON,
    ) -> Object:
        """The answer's body. ClusterError: it refused; Unavailable: it did not answer."""
        ...

    def follow(self, path: str, query: Mapping[str, str]) -> AsyncIterator[Object]:
        """Events of a watch, until it ends. ClusterError as an `ERROR` event or a refusal; Unavailable."""
        ...

    async def close(self) -> None: ...


def _object(text: bytes) -> Object | None:
    """None: no object. Of a group that it does not know the API server says so in plain text."""
    try:
        found = json.loads(text or b"{}")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


class KubernetesApi:
    """A real one; `connect` finds it."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._host: str = client.configuration.host

    @classmethod
    async def connect(cls, context: str | None = None, kubeconfig: Path | None = None) -> KubernetesApi:
        """A pod's own; else by kubeconfig, of `context` or the current one. Unavailable: neither."""
        from kubernetes_asyncio import client, config

        settings = client.Configuration()
        try:
            if context is None and kubeconfig is None:
                with contextlib.suppress(config.ConfigException):
                    config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
                    return cls(client.ApiClient(settings))
            await config.load_kube_config(
                config_file=str(kubeconfig) if kubeconfig else None,
                context=context,
                client_configuration=settings,
            )
        except (config.ConfigException, OSError) as error:
            raise Unavailable(
                f"no Kubernetes cluster is configured ({error}); set KUBECONFIG or give --context"
            ) from None
        return cls(client.ApiClient(settings))

    async def ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content: str = JSON,
    ) -> Object:
        from aiohttp import ClientError

        response = await self._send(method, path, query, body, content, ASK_S)
        try:
            async with asyncio.timeout(ASK_S):
                text = await response.read()
        except (ClientError, TimeoutError, OSError) as error:
            raise Unavailable(f"{self._host} broke off: {error!r}") from None
        finally:
            response.release()
        found = _object(text)
        if response.status >= 400:
            status = found or {}
            said = status.get("message") or text[:500].decode(errors="replace").strip()
            raise ClusterError(response.status, str(status.get("reason", "")), str(said))
        if found is None:
            raise Unavailable(
                f"{self._host} answers {text[:100]!r}: something else is there than an API server"
            )
        return found

    async def follow(self, path: str, query: Mapping[str, str]) -> AsyncIterator[Object]:
        from aiohttp import ClientError

        asked = {**query, "watch": "true", "timeoutSeconds": str(WATCH_S)}
        response = await self._send("GET", path, asked, None, JSON, WATCH_S + ASK_S)
        try:
            if response.status >= 400:
                text = await response.read()
                said = (_object(text) or {}).get("message") or text[:500].decode(errors="replace").strip()
                raise ClusterError(response.status, "", str(said))
            while line := await response.content.readline():
                event: Object = json.loads(line)
                if event["type"] == "ERROR":
                    status = event["object"]
                    raise ClusterError(
                        int(status.get("code", 500)), str(status.get("reason", "")),
                        str(status.get("message", "")),
                    )  # fmt: skip
                yield event
        except (ClientError, TimeoutError, OSError, ValueError) as error:
            raise Unavailable(f"a watch at {self._host} broke off: {error!r}") from None
        finally:
            response.close()

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Object | None,
        content: str,
        limit_s: float,
    ) -> Any:
        headers = {"Accept": "application/json", "Content-Type": content}
        settings = self._client.configuration
        # Tokens run out: kubernetes-asyncio renews them in a hook, which its own calls run too.
        await self._client.update_params_for_auth(headers, [], ["BearerToken"])
        from aiohttp import ClientError, ClientTimeout

        try:
            return await self._client.rest_client.pool_manager.request(
                method,
                settings.host + path,
                params=dict(query or {}),
                data=None if body is None else json.dumps(body).encode(),
                headers=headers,
                timeout=ClientTimeout(total=limit_s, sock_connect=10.0),
                proxy=settings.proxy,
                server_hostname=settings.tls_server_name,
            )
        except (ClientError, TimeoutError, OSError) as error:
            raise Unavailable(f"the API server {self._host} does not answer: {error}") from None

    async def close(self) -> None:
        await self._client.close()
