"""What a hand-off adds between the first and the second token: KV pulled early, against after the prompt.

Two worker processes (engine, service, transfer, wire as in production; only the device is a latency model,
whose blocks weigh what the demo model's do in float32) and this process in the router's place. A sample is
the time from `Prefilled` to the second token, less the decode step that draws it. Early and whole-prompt
pulls take turns, so that a slow minute of the machine hits both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import uvloop

from benchmarks.report import emit, percentile
from decode_worker.service import DecodeService
from engine.latency_runner import LatencyModel, LatencyRunner
from engine.loop import Engine
from engine.settings import EngineSettings
from fleet.bus.memory import MemoryHub as BusHub
from fleet.chassis import Chassis, ChassisSettings
from fleet.handoff import DecodeJob, Ended, Frame, KvTicket, PrefillJob, Proceed
from fleet.ids import RequestId, WorkerId, new_incarnation
from fleet.member import MemberState, Role, WorkerCard
from fleet.registry.memory import MemoryHub as RegistryHub
from fleet.request import Request, Sampling
from fleet.wire import Session
from fleet.wire.network import NetworkWire, serve
from kv_transfer.region import Region
from kv_transfer.settings import TransferSettings
from kv_transfer.transfer import Transfer
from prefill_worker.service import PrefillService

_ROOT = Path(__file__).resolve().parents[2]
PROMPTS = (512, 1024, 2048, 4096, 8192)
BLOCK_SIZE, BLOCK_BYTES = 16, 720 << 10
"""SmolLM2-135M in float32: 45 KiB a token."""
BLOCKS = max(PROMPTS) // BLOCK_SIZE + 8
STEP_TOKENS = 512
TOKENS_S = 4_000
LATENCY = LatencyModel(base_s=0.002, per_prompt_token_s=1 / TOKENS_S, per_decode_s=0.003)
DECODE_STEP_S = LATENCY.base_s + LATENCY.per_decode_s


class _Heavy(LatencyRunner):
    """Its tokens' 8 bytes lie at the beginning of blocks of a real model's size, which go over whole."""

    host: Region

    @property
    def staged(self) -> bool:
        return True

    async def to_host(self, blocks: Sequence[int]) -> None:
        self.host.array[list(blocks), : self.layout.block_bytes] = self.memory[list(blocks)]

    async def from_host(self, blocks: Sequence[int]) -> None:
        self.memory[list(blocks)] = self.host.array[list(blocks), : self.layout.block_bytes]


async def _worker(role: Role, transport: str) -> None:
    """One worker process: prints its address, serves until its standard input ends."""
    region = Region.allocate(BLOCKS, BLOCK_BYTES)
    region.array[:] = np.random.default_rng(1).integers(0, 256, region.array.shape, dtype=np.uint8)
    layout = LatencyRunner.layout_of(BLOCK_SIZE)
    runner = _Heavy(np.zeros((BLOCKS, layout.block_bytes), dtype=np.uint8), layout, LATENCY)
    runner.host = region
    settings = EngineSettings(block_size=BLOCK_SIZE, max_step_tokens=STEP_TOKENS, prefix_cache=False)
    engine = Engine(runner, settings, lambda report: service.stepped(report))
    chassis = Chassis("bench", ChassisSettings(), RegistryHub().registry(), BusHub().bus())
    card = WorkerCard(
        id=WorkerId(role),
        incarnation=new_incarnation(),
        role=role,
        state=MemberState.STARTING,
        address="",
        sessions="",
        transfer="",
        model="bench",
        fingerprint=runner.fingerprint,
        blocks=BLOCKS,
        max_tokens=runner.max_tokens,
        version="bench",
        pid=0,
        host="bench",
    )
    transfer = await Transfer.start(
        worker=card.id,
        incarnation=card.incarnation,
        fingerprint=runner.fingerprint.digest(),
        region=region,
        settings=TransferSettings(transport=transport),
        on_end=lambda lease, why: service.lease_ended(lease, why),
    )
    service: PrefillService | DecodeService
    if role is Role.PREFILL:
        service = PrefillService(chassis, engine, transfer)
    else:
        service = DecodeService(chassis, engine, transfer, pull_limit_s=60)
    tasks = [asyncio.create_task(engine.run()), asyncio.create_task(chassis.run(card, service, 60))]
    server = await serve(chassis)
    print(server.sessions, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.close(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await transfer.close()


class _Router:
    """The two sessions, and the way of one request over them."""

    def __init__(self, prefill: Session, decode: Session) -> None:
        self._prefill, self._decode = prefill, decode
        self._frames: asyncio.Queue[Frame] = asyncio.Queue()
        self._readers = [asyncio.create_task(self._read(session)) for session in (prefill, decode)]
        self._number = 0

    async def _read(self, session: Session) -> None:
        async for frame in session:
            self._frames.put_nowait(frame)

    async def close(self) -> None:
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def request(self, length: int, early: bool) -> float:
        """Seconds from the first token to the second."""
        self._number += 1
        number, clock = self._number, asyncio.get_running_loop().time
        prompt = tuple((number * 31 + position) % 50_000 for position in range(length))
        request = Request(RequestId(f"r{number}"), "bench", prompt, Sampling(max_tokens=3))
        self._prefill.send(PrefillJob(number, request, lend=early))
        asked, first_at, second_at = False, 0.0, 0.0

        def decode(generated: tuple[int, ...], ticket: KvTicket | None) -> None:
            self._decode.send(DecodeJob(number, request, generated, ticket))

        while True:
            frame = await self._frames.get()
            for lent in frame.lent:
                decode((), lent.ticket)
                asked = True
            for prefilled in frame.prefilled:
                first_at = clock()
                if asked:
                    self._decode.send(Proceed(number, (prefilled.token,)))
                else:
                    decode((prefilled.token,), prefilled.ticket)
            if frame.tokens and not second_at:
                second_at = clock()
            if frame.ended:
                assert frame.ended == (Ended(number, frame.ended[0].finish, frame.ended[0].usage),), frame
                return second_at - first_at


@contextlib.asynccontextmanager
async def _process(role: Role, transport: str):  # type: ignore[no-untyped-def]
    code = "import sys; from benchmarks.micro.handoff import main; main(sys.argv[1:])"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, "--worker", f"{role},{transport}",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=_ROOT,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.stdin.close()
        await process.wait()


async def _measure(transport: str, repeats: int) -> None:
    wire = NetworkWire()
    async with _process(Role.PREFILL, transport) as prefill, _process(Role.DECODE, transport) as decode:
        router = _Router(await wire.open(prefill), await wire.open(decode))
        for length in PROMPTS:
            samples: dict[bool, list[float]] = {False: [], True: []}
            for turn in range(repeats + 1):
                for early in (False, True):
                    added = await router.request(length, early) - DECODE_STEP_S
                    if turn:  # The first of each touches pages and opens paths.
                        samples[early].append(added)
            whole = percentile(sorted(samples[False]), 0.5)
            for early, seconds in samples.items():
                emit(
                    f"handoff {transport} {length} {'early' if early else 'whole'}",
                    "ms",
                    [value * 1e3 for value in seconds],
                    transport=transport,
                    prompt_tokens=length,
                    early=early,
                    block_bytes=BLOCK_BYTES,
                    step_tokens=STEP_TOKENS,
                    prefill_tokens_s=TOKENS_S,
                    ratio_p50=round(percentile(sorted(seconds), 0.5) / whole, 3),
                )
        await router.close()
    await wire.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few repeats: numbers mean little")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        role, transport = options.worker.split(",")
        uvloop.run(_worker(Role(role), transport))  # as workers do
        return 0
    for transport in ("shm", "ucx"):
        uvloop.run(_measure(transport, 2 if options.quick else 15))
    return 0


if __name__ == "__main__":
    sys.exit(main())
