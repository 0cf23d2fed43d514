"""The store as an HTTP server that real clients speak to: discovery, tables, watches. For tests."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web
from cluster_store import Kind, Store, at

from fleet.cluster import ClusterError, Object
from fleet.errors import Unavailable


class Front:
    """`kubeconfig` is what `kubectl` and the controller are given."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store = store
        self.kubeconfig = folder / "kubeconfig"
        self.url = ""

    async def start(self) -> None:
        app = web.Application(client_max_size=8 << 20)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{port}"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.url}}],
            "contexts": [
                {"name": "test", "context": {"cluster": "test", "user": "test", "namespace": "default"}}
            ],
            "users": [{"name": "test", "user": {"token": "t"}}],
        }
        self.kubeconfig.write_text(yaml.safe_dump(config))

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        path = request.path.rstrip("/")
        if not self._knows(path):
            # As the real one, which has no object to answer with there.
            return web.Response(status=404, text="404 page not found\n")
        try:
            if (found := self._discovery(path)) is not None:
                return web.json_response(found)
            if request.query.get("watch") in ("true", "1"):
                return await self._watch(request, path)
            text = await request.text()
            body = yaml.safe_load(text) if text else None
            content = request.content_type
            answer = self.store.handle(request.method, path, request.query, body, content)
            if "as=Table" in request.headers.get("Accept", "") and request.method == "GET":
                kind = self.store._where(path)[0]
                if not path.endswith(("/scale", "/status")):
                    answer = _table(
                        kind, answer.get("items", [answer]), answer["metadata"], self.store.clock()
                    )
            return web.json_response(answer, status=201 if request.method == "POST" else 200)
        except ClusterError as error:
            return web.json_response(_status(error), status=error.code)

    async def _watch(self, request: web.Request, path: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        tables = "as=Table" in request.headers.get("Accept", "")
        try:
            async for event in self.store.watch(path, request.query):
                if tables:
                    kind = self.store._where(path)[0]
                    one = event["object"]
                    event = {**event, "object": _table(kind, [one], one["metadata"], self.store.clock())}
                await response.write(json.dumps(event).encode() + b"\n")
        except ClusterError as error:
            await response.write(json.dumps({"type": "ERROR", "object": _status(error)}).encode() + b"\n")
        except Unavailable:
            if request.transport is not None:
                request.transport.abort()
        except (ConnectionError, asyncio.CancelledError):
            pass
        return response

    def _knows(self, path: str) -> bool:
        """Whether it has the path's group and version."""
        parts = path.strip("/").split("/")
        whole = 2 if parts[0] == "api" else 3
        root = "/" + "/".join(parts[:whole])
        return len(parts) < whole or any(kind.root == root for kind in self.store.kinds.values())

    def _discovery(self, path: str) -> Object | None:
        """Of kinds and versions, as far as kubectl asks."""
        if path == "/version":
            return {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        kinds = list(self.store.kinds.values())
        if path == "/apis":
            groups: dict[str, list[str]] = {}
            for kind in kinds:
                if "/" in kind.api_version:
                    group, _, version = kind.api_version.partition("/")
                    if version not in groups.setdefault(group, []):
                        groups[group].append(version)
            return {
                "kind": "APIGroupList",
                "apiVersion": "v1",
                "groups": [
                    {
                        "name": group,
                        "versions": [{"groupVersion": f"{group}/{v}", "version": v} for v in versions],
                        "preferredVersion": {
                            "groupVersion": f"{group}/{versions[0]}",
                            "version": versions[0],
                        },
                    }
                    for group, versions in groups.items()
                ],
            }
        mine = [kind for kind in kinds if kind.root == path]
        if not mine:
            return None
        resources: list[Object] = []
        verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
        for kind in mine:
            entry: Object = {
                "name": kind.plural, "singularName": kind.kind.lower(), "namespaced": kind.namespaced,
                "kind": kind.kind, "verbs": verbs, "shortNames": list(kind.short),
            }  # fmt: skip
            resources.append(entry)
            if kind.status:
                resources.append({**entry, "name": f"{kind.plural}/status", "shortNames": []})
            if kind.scale:
                scale = {"group": "autoscaling", "version": "v1", "kind": "Scale", "shortNames": []}
                resources.append({**entry, "name": f"{kind.plural}/scale", **scale})
        return {
            "kind": "APIResourceList", "apiVersion": "v1",
            "groupVersion": mine[0].api_version, "resources": resources,
        }  # fmt: skip


def _status(error: ClusterError) -> Object:
    return {
        "kind": "Status", "apiVersion": "v1", "status": "Failure",
        "reason": error.reason, "message": error.message, "code": error.code,
    }  # fmt: skip


def _table(kind: Kind, items: list[Object], meta: Object, now: float) -> Object:
    columns = [
        {"name": "Name", "type": "string", "format": "name", "jsonPath": ".metadata.name"},
        *kind.columns,
    ]
    if not kind.columns:
        columns.append({"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"})
    return {
        "kind": "Table", "apiVersion": "meta.k8s.io/v1",
        "metadata": {"resourceVersion": meta.get("resourceVersion", "")},
        "columnDefinitions": [
            {"name": one["name"], "type": one["type"], "format": one.get("format", ""), "description": "",
             "priority": 0} for one in columns
        ],
        "rows": [
            {"cells": [_cell(one, column, now) for column in columns], "object": one} for one in items
        ],
    }  # fmt: skip


def _cell(one: Object, column: Object, now: float) -> Any:
    path: str = column["jsonPath"]
    if "[?(@.type==" in path:
        wanted = path.split("'")[1]
        conditions = at(one, path.split("[")[0]) or []
        return next((each["status"] for each in conditions if each["type"] == wanted), "")
    value = at(one, path)
    if column["type"] == "date" and value:
        return f"{now - datetime.fromisoformat(value.replace('Z', '+00:00')).timestamp():.0f}s"
    return value


@asynccontextmanager
async def api_server(folder: Path, clock: Callable[[], float] = time.time) -> AsyncIterator[Front]:
    front = Front(Store(clock, kinds=()), folder)  # None but Kubernetes' own.
    await front.start()
    try:
        yield front
    finally:
        front.store.break_watches()
        await front.close()
