"""The etcd registry when its server is killed, emptied, compacted, paused, or needs a password."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from servers import Etcd, Proxy, eventually

from fleet.errors import Unavailable
from fleet.registry import Registry, View
from fleet.registry.etcd_registry import EtcdRegistry
from fleet.registry.store import Compacted

pytestmark = pytest.mark.live

TTL_S = 2.0
ALL = {f"/w/{i}": b"%d" % i for i in range(3)}


class Eye:
    """Watches a prefix and keeps every view."""

    def __init__(self, registry: Registry, prefix: str = "/w/") -> None:
        self.views: list[View] = []
        self.task = asyncio.create_task(self._look(registry, prefix))

    async def _look(self, registry: Registry, prefix: str) -> None:
        async for view in registry.watch(prefix):
            self.views.append(view)

    @property
    def live(self) -> bool:
        return bool(self.views) and self.views[-1].live

    def sees(self, values: dict[str, bytes]) -> bool:
        return bool(self.views) and self.views[-1].live and self.views[-1].values == values


class Fleet:
    """Three members with a key each, and somebody who watches; each with a connection of its own."""

    def __init__(self, address: str, **access: object) -> None:
        self.registries = [EtcdRegistry(address, **access) for _ in range(4)]  # type: ignore[arg-type]
        self.eye = Eye(self.registries[3])

    async def start(self) -> None:
        self.leases = [await registry.lease(TTL_S) for registry in self.registries[:3]]
        for (key, value), lease in zip(ALL.items(), self.leases, strict=True):
            await lease.put(key, value)

    def whole(self) -> bool:
        return self.eye.sees(ALL) and all(lease.registered for lease in self.leases)

    async def close(self) -> None:
        for registry in self.registries:
            await registry.close()
        await self.eye.task


def play(etcd: Etcd, scene: Callable[[Fleet], object]) -> None:
    async def main() -> None:
        fleet = Fleet(etcd.address)
        await fleet.start()
        await eventually(fleet.whole)
        await scene(fleet)  # type: ignore[misc]
        await fleet.close()

    asyncio.run(main())


def test_killed_and_restarted(etcd: Etcd) -> None:
    async def scene(fleet: Fleet) -> None:
        for _ in range(3):
            await asyncio.to_thread(etcd.kill)
            await eventually(lambda: not fleet.eye.live)
            assert fleet.eye.views[-1].values == ALL  # the last picture stands
            with pytest.raises(Unavailable):
                await fleet.registries[0].get("/w/0")
            await asyncio.to_thread(etcd.start)
            await eventually(fleet.whole)

    play(etcd, scene)


def test_restarted_empty(etcd: Etcd) -> None:
    async def scene(fleet: Fleet) -> None:
        for _ in range(3):
            await asyncio.to_thread(etcd.restart_empty)
            await eventually(lambda: not fleet.whole())
            await eventually(fleet.whole)

    play(etcd, scene)


def test_restarted_empty_is_told_from_deaths(etcd: Etcd) -> None:
    async def scene(fleet: Fleet) -> None:
        fleet.leases[1]._task.cancel()  # nobody puts this key again
        await asyncio.to_thread(etcd.restart_empty)
        await eventually(lambda: fleet.eye.sees({"/w/0": b"0", "/w/2": b"2"}))
        seen = fleet.eye.views[next(i for i, view in enumerate(fleet.eye.views) if view.values == ALL) :]
        vanished = next(view for view in seen if view.live and "/w/1" not in view.values)
        assert vanished.emptied
        assert not fleet.eye.views[-1].emptied or fleet.eye.views[-1] is vanished

    play(etcd, scene)


def test_compacted_with_a_death_in_the_gap(etcd: Etcd) -> None:
    async def scene(fleet: Fleet) -> None:
        # The watcher is cut off by a stopped server; it misses a deletion whose history is then compacted.
        await asyncio.to_thread(etcd.kill)
        await eventually(lambda: not fleet.eye.live)
        fleet.leases[1]._task.cancel()  # its process is dead: nobody puts the key again
        await asyncio.to_thread(etcd.start)
        await asyncio.to_thread(etcd.ctl, "del", "/w/1")
        for i in range(100):
            await fleet.registries[0].put("/unrelated", b"%d" % i)
        revision = json.loads(await asyncio.to_thread(etcd.ctl, "get", "/w/0", "-w", "json"))["header"][
            "revision"
        ]
        await asyncio.to_thread(etcd.ctl, "compact", str(revision))
        await eventually(lambda: fleet.eye.sees({"/w/0": b"0", "/w/2": b"2"}))

    play(etcd, scene)


def test_watching_from_a_compacted_revision_is_told(etcd: Etcd) -> None:
    async def scene(fleet: Fleet) -> None:
        store = fleet.registries[0]._store
        old = (await store.list("/w/")).revision
        for i in range(10):
            await fleet.registries[0].put("/unrelated", b"%d" % i)
        now = (await store.list("/w/")).revision
        await asyncio.to_thread(etcd.ctl, "compact", str(now))
        with pytest.raises(Compacted):
            await anext(store.watch("/w/", old))

    play(etcd, scene)


def test_paused_for_two_ttls_and_resumed(etcd: Etcd) -> None:
    async def scene(fleet: Fleet) -> None:
        clock = asyncio.get_running_loop().time
        etcd.pause()
        paused = clock()
        beats = 0
        while clock() < paused + 2 * TTL_S or fleet.eye.live:
            await asyncio.sleep(0.05)  # the process goes on serving
            beats += 1
        assert beats > 10
        assert fleet.eye.views[-1].values == ALL
        etcd.resume()
        await eventually(fleet.whole)

    play(etcd, scene)


def test_a_lease_revoked_by_hand(etcd: Etcd) -> None:
    async def scene(fleet: Fleet) -> None:
        for _ in range(3):
            held = [lease._lease for lease in fleet.leases]
            for lease in (await asyncio.to_thread(etcd.ctl, "lease", "list")).split("\n")[1:]:
                if lease.strip():
                    await asyncio.to_thread(etcd.ctl, "lease", "revoke", lease.strip())
            await eventually(lambda held=held: {lease._lease for lease in fleet.leases}.isdisjoint(held))  # type: ignore[misc]
            await eventually(fleet.whole)

    play(etcd, scene)


def test_keys_deleted_by_hand(etcd: Etcd) -> None:
    async def scene(fleet: Fleet) -> None:
        await asyncio.to_thread(etcd.ctl, "del", "--prefix", "/w/")
        await eventually(lambda: any(view.emptied for view in fleet.eye.views))
        await eventually(fleet.whole)

    play(etcd, scene)


def test_a_server_that_comes_later(etcd: Etcd) -> None:
    async def main() -> None:
        etcd.kill()
        fleet = Fleet(etcd.address)
        await fleet.start()
        await eventually(lambda: bool(fleet.eye.views))
        assert fleet.eye.views[-1] == View({}, live=False)
        assert not any(lease.registered for lease in fleet.leases)
        await asyncio.to_thread(etcd.start)
        await eventually(fleet.whole)
        await fleet.close()

    asyncio.run(main())


def test_the_next_address_is_tried(etcd: Etcd, tmp_path: Path) -> None:
    async def main() -> None:
        dead = Etcd(tmp_path / "dead")  # never started
        fleet = Fleet(f"{dead.address},{etcd.address}")
        await fleet.start()
        await eventually(fleet.whole)
        await fleet.close()

    asyncio.run(main())


def test_a_connection_that_went_silent_is_replaced(etcd: Etcd) -> None:
    async def main() -> None:
        proxy = Proxy(etcd.port)
        await proxy.start()
        fleet = Fleet(proxy.address)
        await fleet.start()
        await eventually(fleet.whole)
        for _ in range(2):
            proxy.silence()
            await eventually(lambda: not fleet.eye.live)
            await eventually(fleet.whole)
        await fleet.close()
        await proxy.close()

    asyncio.run(main())


_MEMBER = """
import asyncio, sys
from fleet.registry.etcd_registry import EtcdRegistry
async def main():
    lease = await EtcdRegistry(sys.argv[1]).lease(float(sys.argv[2]))
    await lease.put("/w/process", b"here")
    await asyncio.Event().wait()
asyncio.run(main())
"""


def test_a_process_paused_for_two_ttls_is_gone_and_then_back(etcd: Etcd) -> None:
    async def main() -> None:
        registry = EtcdRegistry(etcd.address)
        eye = Eye(registry)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _MEMBER, etcd.address, str(TTL_S)
        )
        try:
            await eventually(lambda: eye.sees({"/w/process": b"here"}))
            os.kill(process.pid, signal.SIGSTOP)
            await eventually(lambda: eye.sees({}))
            os.kill(process.pid, signal.SIGCONT)
            await eventually(lambda: eye.sees({"/w/process": b"here"}))
            assert process.returncode is None
            process.kill()
            await eventually(lambda: eye.sees({}))
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
        await registry.close()
        await eye.task

    asyncio.run(main())


def test_user_and_password_also_after_a_restart(etcd: Etcd) -> None:
    async def main() -> None:
        for words in (
            ("user", "add", "root:secret"),
            ("user", "grant-role", "root", "root"),
            ("auth", "enable"),
        ):
            await asyncio.to_thread(etcd.ctl, *words)
        stranger = EtcdRegistry(etcd.address)
        with pytest.raises(Unavailable, match="user name is empty"):
            await stranger.get("/w/0")
        wrong = EtcdRegistry(etcd.address, user="root", password="guess")
        with pytest.raises(Unavailable, match="authentication failed"):
            await wrong.get("/w/0")
        fleet = Fleet(etcd.address, user="root", password="secret")
        await fleet.start()
        await eventually(fleet.whole)
        await asyncio.to_thread(etcd.restart)  # simple tokens are forgotten
        await eventually(lambda: not fleet.whole())
        await eventually(fleet.whole)
        assert await fleet.registries[0].get("/w/0") == b"0"
        for registry in (stranger, wrong):
            await registry.close()
        await fleet.close()

    asyncio.run(main())


def test_tls(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=127.0.0.1",
    ]
    files = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*words, *files], check=True, capture_output=True)
    etcd = Etcd(tmp_path / "etcd", tls=(certificate, key))

    async def main() -> None:
        fleet = Fleet(etcd.address, ca=certificate)
        await fleet.start()
        await eventually(fleet.whole)
        plain = EtcdRegistry(etcd.address)
        with pytest.raises(Unavailable):
            await plain.get("/w/0")
        await plain.close()
        await fleet.close()

    try:
        etcd.start()
        asyncio.run(main())
    finally:
        etcd.kill()
