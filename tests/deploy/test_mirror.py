"""A copy of what a cluster has: never behind for good, and without ghosts."""

from __future__ import annotations

import asyncio

from cluster_store import Store, StoreApi
from scene import EPOCH

from deploy.controller.mirror import Mirror
from deploy.controller.render import FLEET_LABEL, SERVICES
from fleet.cluster import JSON, MERGE, Object
from fleet.virtual_time import run


def test_the_answer_to_a_write_that_comes_after_the_word_of_a_deletion_brings_nothing_back() -> None:
    """The answer and the watch are two connections: nobody says which is read first."""

    async def go() -> None:
        store = Store(lambda: EPOCH + asyncio.get_running_loop().time())
        mirror = Mirror(StoreApi(store), SERVICES, "", lambda one: None, labelled=True)
        running = asyncio.ensure_future(mirror.run())
        await mirror.synced.wait()
        body: Object = {"metadata": {"name": "one", "labels": {FLEET_LABEL: "demo"}}}
        path = SERVICES.path("default", "one")
        early = store.handle("POST", SERVICES.path("default"), {}, body, JSON)
        mirror.wrote(early)
        assert mirror.get("default", "one") is not None, "known at once"
        patched = store.handle("PATCH", path, {}, {"metadata": {"annotations": {"a": "b"}}}, MERGE)
        store.handle("DELETE", path, {}, None, JSON)
        await asyncio.sleep(1)
        assert mirror.get("default", "one") is None
        mirror.wrote(patched)
        assert mirror.get("default", "one") is None
        running.cancel()

    run(go(), horizon_s=1e3)


def test_watches_that_end_at_once_are_not_asked_for_all_the_time() -> None:
    class Ends(StoreApi):
        asked = 0

        async def follow(self, path: str, query: object) -> object:  # type: ignore[override]
            self.asked += 1
            for event in ():
                yield event

    async def go() -> None:
        api = Ends(Store(lambda: EPOCH + asyncio.get_running_loop().time()))
        mirror = Mirror(api, SERVICES, "", lambda one: None, labelled=True)
        running = asyncio.ensure_future(mirror.run())
        await asyncio.sleep(60)
        assert 10 < api.asked <= 130
        running.cancel()

    run(go(), horizon_s=1e3)
