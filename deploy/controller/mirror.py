"""A copy of all objects of one kind, kept by list and watch; never silently dead."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from deploy.controller.render import FLEET_LABEL
from fleet.cluster import Api, ClusterError, Object, Resource
from fleet.errors import Unavailable

log = logging.getLogger(__name__)

_FIRST_S = 0.5
_MOST_S = 30.0
ABSENT_S = 60.0
"""Between two looks whether a kind that the cluster did not know has come."""
PAGE = 500


class Mirror:
    """Of the kind's objects with the fleet's label; of fleets themselves all."""

    def __init__(
        self,
        api: Api,
        resource: Resource,
        namespace: str,
        changed: Callable[[Object], None],
        *,
        labelled: bool,
    ) -> None:
        self.resource = resource
        self.synced = asyncio.Event()
        """Set once it was listed, or is known to be absent."""
        self.absent = False
        self._api = api
        self._path = resource.path(namespace)
        self._changed = changed
        self._query = {"labelSelector": FLEET_LABEL} if labelled else {}
        self._objects: dict[tuple[str, str], Object] = {}
        self._told = 0
        """Version up to which list or watch has told all."""

    def get(self, namespace: str, name: str) -> Object | None:
        return self._objects.get((namespace, name))

    def of(self, namespace: str, fleet: str) -> list[Object]:
        return [
            one
            for (space, _), one in self._objects.items()
            if space == namespace and one["metadata"].get("labels", {}).get(FLEET_LABEL) == fleet
        ]

    def all(self) -> Iterable[Object]:
        return self._objects.values()

    def wrote(self, written: Object) -> None:
        """What the API server answered to a write: the watch may tell it later. Or it has told already that
        the object is gone, and would not do so again."""
        if _key(written) in self._objects or _number(written) > self._told:
            self._put(written, tell=False)

    async def run(self) -> None:
        """Does not end."""
        wait_s, loop = _FIRST_S, asyncio.get_running_loop()
        while True:
            try:
                version = await self._list()
                wait_s = _FIRST_S
                while True:
                    began = loop.time()
                    version = await self._watch(version)
                    # One that ends at once, as while a definition changes, is not asked for all the time.
                    await asyncio.sleep(max(0.0, _FIRST_S - (loop.time() - began)))
            except ClusterError as error:
                if error.missing:
                    self._gone_absent()
                    await asyncio.sleep(ABSENT_S)
                    continue
                if error.expired:
                    log.info(
                        "%s: the watch is too old (%s): listing again", self.resource.kind, error.message
                    )
                    continue
                log.warning("%s: %s", self.resource.kind, error.message)
            except Unavailable as error:
                log.warning("%s: %s", self.resource.kind, error.message)
            await asyncio.sleep(wait_s)
            wait_s = min(_MOST_S, wait_s * 2)

    def _gone_absent(self) -> None:
        if not self.absent:
            log.info("this cluster does not know %s", self.resource.kind)
        self.absent = True
        self._objects.clear()
        self.synced.set()

    async def _list(self) -> str:
        found: dict[tuple[str, str], Object] = {}
        more, version = "", ""
        while True:
            query = {**self._query, "limit": str(PAGE)}
            if more:
                query["continue"] = more
            page = await self._api.ask("GET", self._path, query)
            for one in page.get("items") or ():
                one.setdefault("kind", self.resource.kind)
                one.setdefault("apiVersion", self.resource.api_version)
                found[_key(one)] = one
            meta = page.get("metadata", {})
            version, more = str(meta.get("resourceVersion", "")), str(meta.get("continue", ""))
            if not more:
                break
        before, self._objects = self._objects, found
        self._told = int(version) if version.isdigit() else 0
        self.absent = False
        self.synced.set()
        for key in before.keys() | found.keys():
            old, new = before.get(key), found.get(key)
            if old is None or new is None or _version(old) != _version(new):
                self._changed(new or old or {})
        return version

    async def _watch(self, version: str) -> str:
        """Until the server ends it; the version to go on from."""
        query = {**self._query, "resourceVersion": version, "allowWatchBookmarks": "true"}
        async for event in self._api.follow(self._path, query):
            one: Object = event["object"]
            version = _version(one)
            self._told = _number(one)
            if event["type"] == "BOOKMARK":
                continue
            if event["type"] == "DELETED":
                # Who lost its label is gone from this watch, and only the copy says whose it was.
                self._changed(self._objects.pop(_key(one), one))
            else:
                self._put(one, tell=True)
        return version

    def _put(self, one: Object, tell: bool) -> None:
        old = self._objects.get(_key(one))
        # Versions are opaque but for this: of one object, who has the greater number is the newer.
        if old is not None and _number(old) > _number(one):
            return
        self._objects[_key(one)] = one
        if tell and (old is None or _version(old) != _version(one)):
            self._changed(one)
            if old is not None and _fleet(old) != _fleet(one):
                self._changed(old)


def _fleet(one: Object) -> str | None:
    found: str | None = one["metadata"].get("labels", {}).get(FLEET_LABEL)
    return found


def _key(one: Object) -> tuple[str, str]:
    return one["metadata"].get("namespace", ""), one["metadata"]["name"]


def _version(one: Object) -> str:
    return str(one["metadata"].get("resourceVersion", ""))


def _number(one: Object) -> int:
    version = _version(one)
    return int(version) if version.isdigit() else 0
