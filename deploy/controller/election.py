"""One of several controllers acts: who holds a Lease of coordination.k8s.io."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from fleet.cluster import Api, ClusterError, Object, Resource
from fleet.errors import FleetError, Unavailable

log = logging.getLogger(__name__)

LEASES = Resource("coordination.k8s.io/v1", "Lease", "leases")


class Deposed(FleetError):
    """It is not leader any more: another may act by now."""


@dataclass(frozen=True, slots=True)
class ElectionSettings:
    """How a leader is found; the usual figures of Kubernetes' own controllers."""

    name: str = "pdfleet-controller"
    """Of the Lease."""
    lease_s: float = 15.0
    """Seconds without a renewal after which another may take it."""
    renew_s: float = 2.0
    """Seconds between two renewals, and between two looks of those that wait."""
    deadline_s: float = 10.0
    """Seconds without a successful renewal after which the leader stops acting; less than `lease_s`."""

    def __post_init__(self) -> None:
        if not 0 < self.renew_s < self.deadline_s < self.lease_s:
            raise ValueError("0 < renew_s < deadline_s < lease_s is needed")


class Election:
    """`lead` takes part, and acts while it leads. Times of others' clocks are never compared with one's own:
    a lease has run out when it has not changed for as long as it lasts."""

    def __init__(self, api: Api, namespace: str, identity: str, settings: ElectionSettings) -> None:
        self._api, self._identity, self._settings = api, identity, settings
        self._path = LEASES.path(namespace, settings.name)
        self._all = LEASES.path(namespace)
        self._seen = ""
        self._seen_at = 0.0
        self.leads = False
        self.asked_at: float | None = None
        """When the API server last said who holds the lease, on the loop's clock; None: never yet."""

    async def lead(self, work: Callable[[], Awaitable[None]]) -> None:
        """Until `work` ends, or is cancelled. Deposed: somebody else leads, or nobody could be asked."""
        loop = asyncio.get_running_loop()
        while not await self._try():
            await asyncio.sleep(self._settings.renew_s)
        self.leads = True
        log.info("%s leads", self._identity)
        acting = asyncio.ensure_future(work())
        renewed = loop.time()
        try:
            while not acting.done():
                await asyncio.wait((acting,), timeout=self._settings.renew_s)
                if acting.done():
                    break
                asked = loop.time()
                async with asyncio.timeout(max(0.01, renewed + self._settings.deadline_s - asked)):
                    if await self._try():
                        renewed = asked
                    elif self._held_by_another():
                        raise Deposed("another controller leads")
                if loop.time() - renewed >= self._settings.deadline_s:
                    raise TimeoutError
            await acting
        except TimeoutError:
            raise Deposed(f"the lease could not be renewed for {self._settings.deadline_s:g} s") from None
        finally:
            self.leads = False
            acting.cancel()
            await asyncio.gather(acting, return_exceptions=True)
            await self._let_go()

    def _held_by_another(self) -> bool:
        return self._holder not in ("", self._identity)

    async def _try(self) -> bool:
        """Whether it holds the lease now."""
        now = asyncio.get_running_loop().time()
        try:
            try:
                lease = await self._api.ask("GET", self._path)
            except ClusterError as error:
                if not error.missing:
                    raise
                body = {
                    "apiVersion": LEASES.api_version,
                    "kind": LEASES.kind,
                    "metadata": {"name": self._settings.name},
                    "spec": self._spec(None),
                }
                await self._api.ask("POST", self._all, body=body)
                self._holder, self.asked_at = self._identity, now
                return True
            self.asked_at = now
            spec = lease.get("spec", {})
            self._holder = spec.get("holderIdentity") or ""
            mark = f"{self._holder} {spec.get('renewTime')} {spec.get('leaseTransitions')}"
            if mark != self._seen:
                self._seen, self._seen_at = mark, now
            lasts = float(spec.get("leaseDurationSeconds") or self._settings.lease_s)
            if self._held_by_another() and now - self._seen_at < lasts:
                return False
            lease["spec"] = self._spec(spec)
            await self._api.ask("PUT", self._path, body=lease)
            self._holder = self._identity
            return True
        except ClusterError as error:
            if not error.conflict:
                log.warning("lease %s: %s", self._settings.name, error.message)
            return False
        except Unavailable as error:
            log.warning("lease %s: %s", self._settings.name, error.message)
            return False

    _holder = ""

    def _spec(self, before: Object | None) -> Object:
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        same = before is not None and before.get("holderIdentity") == self._identity
        turns = int(before.get("leaseTransitions") or 0) if before else 0
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": max(1, round(self._settings.lease_s)),
            "acquireTime": before.get("acquireTime", stamp) if before and same else stamp,
            "renewTime": stamp,
            "leaseTransitions": turns if same or before is None else turns + 1,
        }

    async def _let_go(self) -> None:
        """So that the next one need not wait; that it may fail is what the duration is for."""
        try:
            lease = await self._api.ask("GET", self._path)
            if lease.get("spec", {}).get("holderIdentity") == self._identity:
                lease["spec"]["holderIdentity"] = ""
                await self._api.ask("PUT", self._path, body=lease)
        except FleetError as error:
            log.info("lease %s was not let go: %s", self._settings.name, error.message)
