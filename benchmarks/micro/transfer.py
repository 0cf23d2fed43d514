"""KV pulls between two processes: each transport beside an in-process copy, ucx beside a bare ucxx tag loop.

The cases are measured in turns within one run, so that a slow minute of the machine hits them alike;
`ratio_p50` in the settings is the speed relative to the baseline named there.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import numpy as np
import uvloop

from benchmarks.report import emit, percentile
from fleet.handoff import KvTicket
from fleet.ids import Incarnation, WorkerId
from kv_transfer.region import Region
from kv_transfer.settings import TransferSettings
from kv_transfer.transfer import Transfer

_ROOT = Path(__file__).resolve().parents[2]
POOL_BLOCKS = 256
CASES = {"64Kx128": (64 << 10, 128), "1Mx16": (1 << 20, 16), "360Kx32": (360 << 10, 32)}
"""Block bytes and blocks a pull; the last is 512 tokens of SmolLM2-135M in float32 blocks of 16."""
HANDOFF = "360Kx32"


def _pool(block_bytes: int, seed: int) -> Region:
    region = Region.allocate(POOL_BLOCKS, block_bytes)
    region.array[:] = np.random.default_rng(seed).integers(0, 256, region.array.shape, dtype=np.uint8)
    return region


async def _transfer(name: str, region: Region, transport: str, checksum: bool) -> Transfer:
    return await Transfer.start(
        worker=WorkerId(name),
        incarnation=Incarnation("bench"),
        fingerprint="bench",
        region=region,
        settings=TransferSettings(transport=transport, checksum=checksum, lease_s=60),
        on_end=lambda lease, why: None,
    )


async def _source(transport: str, block_bytes: int, checksum: bool) -> None:
    """The other process: grants what a line asks for (`bare PORT` serves a bare tag loop instead)."""
    region = _pool(block_bytes, 1)
    transfer = await _transfer("source", region, transport, checksum)
    print("ready", flush=True)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        if line.startswith(b"bare"):
            await asyncio.to_thread(_bare_source, region, int(line.split()[1]))
            continue
        blocks = msgspec.json.decode(line, type=list[int])
        ticket = transfer.grant(blocks, len(blocks) * 16)
        print(msgspec.json.encode(ticket).decode(), flush=True)
    await transfer.close()


class _Bare:
    """A ucxx worker and endpoint with nothing around them, progressed in a tight loop."""

    def __init__(self, sock: socket.socket) -> None:
        import ucxx  # noqa: F401
        from ucxx._lib import arr, libucxx

        self.array, self.tag = arr.Array, libucxx.UCXXTag
        context = libucxx.UCXContext(
            {"NET_DEVICES": "lo"}, feature_flags=(libucxx.Feature.TAG, libucxx.Feature.WAKEUP)
        )
        self.worker = libucxx.UCXWorker(context)
        self.worker.init_blocking_progress_mode()
        mine = bytes(self.worker.address)
        sock.sendall(len(mine).to_bytes(4, "little") + mine)
        size = int.from_bytes(sock.recv(4, socket.MSG_WAITALL), "little")
        peer = libucxx.UCXAddress.create_from_buffer(sock.recv(size, socket.MSG_WAITALL))
        self.endpoint = self.worker.create_endpoint_from_worker_address(peer, True)

    def finish(self, requests: list[object]) -> None:
        for request in requests:
            while not request.completed:  # type: ignore[attr-defined]
                self.worker.progress_once()


def _bare_source(region: Region, port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bare = _Bare(sock)
        number = 0
        while size := sock.recv(4, socket.MSG_WAITALL):
            count = int.from_bytes(size, "little")
            blocks = np.frombuffer(sock.recv(count * 4, socket.MSG_WAITALL), "<u4")
            requests = []
            for block in blocks:
                requests.append(
                    bare.endpoint.tag_send(bare.array(region.array[int(block)]), bare.tag(number))
                )
                number += 1
            bare.finish(requests)


class _BareReader:
    def __init__(self, region: Region, sock: socket.socket) -> None:
        self._region, self._sock, self._bare, self._number = region, sock, _Bare(sock), 0

    def pull(self, blocks: list[int], own: list[int]) -> None:
        self._sock.sendall(len(blocks).to_bytes(4, "little") + np.array(blocks, "<u4").tobytes())
        requests = []
        for block in own:
            array = self._bare.array(self._region.array[block])
            requests.append(self._bare.endpoint.tag_recv(array, self._bare.tag(self._number)))
            self._number += 1
        self._bare.finish(requests)


async def _measure(case: str, transport: str, checksum: bool, repeats: int) -> None:
    block_bytes, count = CASES[case]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import sys; from benchmarks.micro.transfer import main; main(sys.argv[1:])",
        "--source",
        f"{transport},{block_bytes},{int(checksum)}",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=_ROOT,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    region, local = _pool(block_bytes, 2), _pool(block_bytes, 3)
    reader = await _transfer("reader", region, transport, checksum)
    chance = random.Random(7)

    async def grant(blocks: list[int]) -> KvTicket:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(blocks) + b"\n")
        return msgspec.json.decode(await process.stdout.readline(), type=KvTicket)

    everything = await grant(list(range(POOL_BLOCKS)))

    async def pull(blocks: list[int], own: list[int]) -> None:
        await reader.pull(everything, list(zip(blocks, own, strict=True)), 60)

    async def copy(blocks: list[int], own: list[int]) -> None:
        for block, target in zip(blocks, own, strict=True):
            region.array[target] = local.array[block]

    async def handoff(blocks: list[int], own: list[int]) -> None:
        ticket = await grant(blocks)
        async with reader.keep(ticket):
            await reader.pull(ticket, list(enumerate(own)), 60)

    ways: dict[str, Callable[[list[int], list[int]], Awaitable[None]]] = {"pull": pull, "copy": copy}
    if case == HANDOFF:
        ways["handoff"] = handoff
    bare_sock: socket.socket | None = None
    if transport == "ucx":
        with socket.create_server(("127.0.0.1", 0)) as server:
            process.stdin.write(f"bare {server.getsockname()[1]}\n".encode())
            accepted, _ = await asyncio.to_thread(server.accept)
        bare_sock = accepted
        bare_sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A reader maps a source's pool once and for long: first touches of its pages are not what is measured.
    for start in range(0, POOL_BLOCKS, count):
        part = list(range(start, min(start + count, POOL_BLOCKS)))
        await pull(part, part)
    samples: dict[str, list[float]] = {name: [] for name in (*ways, "bare")}

    def scattered() -> tuple[list[int], list[int]]:
        return chance.sample(range(POOL_BLOCKS), count), chance.sample(range(POOL_BLOCKS), count)

    async def turns(which: dict[str, Callable[[list[int], list[int]], Awaitable[None]]], times: int) -> None:
        for turn in range(times + 3):
            for name, way in which.items():
                blocks, own = scattered()
                began = time.perf_counter()
                await way(blocks, own)
                if turn >= 3:
                    samples[name].append(time.perf_counter() - began)

    if bare_sock is not None:
        bare = _BareReader(region, bare_sock)

        async def bare_pull(blocks: list[int], own: list[int]) -> None:
            bare.pull(blocks, own)

        # The source's event loop goes on while its bare loop runs in a thread; only grants have to wait.
        await turns({"pull": pull, "copy": copy, "bare": bare_pull}, repeats)
        bare_sock.close()
        if case == HANDOFF:
            await turns({"handoff": handoff}, repeats)
    else:
        await turns(ways, repeats)

    size = block_bytes * count
    base = "bare" if samples["bare"] else "copy"
    for name, seconds in samples.items():
        if not seconds:
            continue
        middle = percentile(sorted(seconds), 0.5)
        emit(
            f"transfer {transport} {case} {name}",
            "us",
            [value * 1e6 for value in seconds],
            transport=transport,
            block_bytes=block_bytes,
            blocks=count,
            checksum=checksum,
            gb_s_p50=round(size / middle / 1e9, 3),
            baseline=base,
            ratio_p50=round(percentile(sorted(samples[base]), 0.5) / middle, 3),
        )
    process.stdin.close()
    await reader.close()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), 10)
    region.close()
    local.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few repeats: numbers mean little")
    parser.add_argument("--source", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.source:
        transport, block_bytes, checksum = options.source.split(",")
        uvloop.run(_source(transport, int(block_bytes), bool(int(checksum))))  # as workers do
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    repeats = 5 if options.quick else 60
    for case in CASES:
        for transport, checksum in (("shm", True), ("shm", False), ("ucx", True), ("ucx", False)):
            uvloop.run(_measure(case, transport, checksum, repeats))
    return 0


if __name__ == "__main__":
    sys.exit(main())
