"""The router's own part of a request: hash, match, choose; how it takes in KV events and snapshots, and what
other routers send; memory.

With `--peer PYTHON`, a python that has Dynamo's bindings, the same matches and events run on its radix tree,
a batch here and a batch there in turn, and each line says how many times more that took (`peer_ratio`, of
medians). Times are the processor's, of all threads of a process: other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import PIPE
from typing import Any

from benchmarks.report import emit, percentile
from fleet.block_hash import HashKeys, block_hashes, short_names
from fleet.bus.memory import MemoryHub as BusHub
from fleet.card_codec import encode_card
from fleet.events import BlocksDropped, BlocksStored, KvDigest, KvEvents, KvSnapshot, LoadReport
from fleet.ids import Incarnation, RequestId, WorkerId
from fleet.kv_layout import Fingerprint
from fleet.kv_log import KvLog
from fleet.member import MemberState, Role, WorkerCard, worker_key
from fleet.registry.memory import MemoryHub as RegistryHub
from fleet.wire.codec import (
    decode_kv_events,
    decode_router_moves,
    encode_kv_events,
    encode_router_moves,
)
from fleet.wire.memory import MemoryHub as WireHub
from router.cost import Ask, choose_decode, choose_prefill
from router.peers import Heard, Outbox, Peers
from router.prefix_index import Outcome, PrefixIndex
from router.roster import LinkState, Roster
from router.settings import RouterSettings
from router.watcher import Router

SETTINGS = RouterSettings()
PRINT = Fingerprint("m", "t", layers=32, kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
KEYS = HashKeys(PRINT.digest(), PRINT.block_size)
WORKERS = (1, 16, 128)
DEPTHS = ("equal", "half", "staggered")
BLOCKS = 512
PROMPT = BLOCKS * 16


def measure(work: Callable[[], object], runs: int) -> list[float]:
    """Microseconds of the processor's time of each run."""
    for _ in range(runs // 10 + 1):
        work()
    times = []
    for _ in range(runs):
        start = time.thread_time_ns()
        work()
        times.append((time.thread_time_ns() - start) / 1000)
    return times


def names(chance: random.Random, count: int) -> list[int]:
    """63 bits, which is what the peer takes."""
    return [chance.getrandbits(63) for _ in range(count)]


def life(number: int) -> tuple[WorkerId, Incarnation]:
    return WorkerId(f"w{number}"), Incarnation(f"w{number}.1")


def filled(held: Sequence[tuple[Sequence[int], Sequence[int]]]) -> PrefixIndex:
    """An index in which worker i holds both of `held[i]`."""
    index = PrefixIndex(SETTINGS.index)
    for number, (prefix, others) in enumerate(held):
        worker, incarnation = life(number)
        index.add_worker(worker, incarnation)
        index.load_snapshot(KvSnapshot(worker, incarnation, 0, (*others, *prefix)))
    return index


def held(kind: str, workers: int, prompt: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Of each worker: what it holds of the prompt, and 5,000 blocks of its own.

    `equal`: all hold all of it. `half`: one does, the others half of it. `staggered`: each another part.
    """
    chance = random.Random(1)
    depths = {
        "equal": [len(prompt)] * workers,
        "half": [len(prompt)] + [len(prompt) // 2] * (workers - 1),
        "staggered": [chance.randint(1, len(prompt)) for _ in range(workers)],
    }
    return [(list(prompt[:depth]), names(chance, 5000)) for depth in depths[kind]]


@dataclass
class Case:
    """One that the peer runs too, on the work that `task` describes."""

    name: str
    once: Callable[[], float]
    """Microseconds a run, of a batch of them."""
    settings: dict[str, Any]
    task: dict[str, Any]


def match_cases(batch: int) -> Iterator[Case]:
    prompt = names(random.Random(2), BLOCKS)
    for workers in WORKERS:
        for kind in DEPTHS:
            holds = held(kind, workers, prompt)
            index = filled(holds)

            def once(index: PrefixIndex = index) -> float:
                start = time.process_time_ns()
                for _ in range(batch):
                    index.match(prompt, 0.0)
                return (time.process_time_ns() - start) / 1000 / batch

            settings = {"workers": workers, "blocks": BLOCKS, "depths": kind}
            task = {"kind": "match", "held": holds, "names": prompt, "batch": batch}
            yield Case("router_match", once, settings, task)


def apply_cases(batch: int, rounds: int) -> Iterator[Case]:
    """Events of 16 workers in turn, from their bytes on; each block is stored and dropped again."""
    for size in (1, 32, BLOCKS):
        index, chance = filled([((), ())] * 16), random.Random(3)
        tasks, told = [], []
        for step in range(batch * (rounds + 1)):
            worker, incarnation = life(step % 16)
            some = tuple(names(chance, size))
            tasks.append((step % 16, some))
            first = 2 * (step // 16) + 1
            put = KvEvents(worker, incarnation, first, (BlocksStored(some),))
            drop = KvEvents(worker, incarnation, first + 1, (BlocksDropped(some),))
            told.append((encode_kv_events(put), encode_kv_events(drop)))
        coming = iter(told)

        def once(index: PrefixIndex = index, coming: Iterator[tuple[bytes, bytes]] = coming) -> float:
            start = time.process_time_ns()
            for _ in range(batch):
                for data in next(coming):  # As `router.watcher` does it.
                    assert index.follow(data) or index.apply(decode_kv_events(data)) is Outcome.APPLIED
            return (time.process_time_ns() - start) / 1000 / batch

        task = {"kind": "apply", "messages": tasks, "batch": batch}
        yield Case("router_apply", once, {"blocks_per_event": size, "events": 2}, task)


class Peer:
    def __init__(self, python: str) -> None:
        script = str(Path(__file__).with_name("radix_tree.py"))
        self._process = subprocess.Popen([python, script], stdin=PIPE, stdout=PIPE, text=True)

    def tell(self, task: dict[str, Any] | None) -> None:
        assert self._process.stdin is not None
        print("" if task is None else json.dumps(task), file=self._process.stdin, flush=True)

    def once(self) -> float:
        assert self._process.stdout is not None
        self.tell(None)
        (sample,) = json.loads(self._process.stdout.readline())
        return float(sample)

    def close(self) -> None:
        self._process.communicate()


def compare(rounds: int, batch: int, python: str) -> None:
    peer = Peer(python) if python else None
    try:
        for case in (*match_cases(batch), *apply_cases(batch, rounds)):
            ours, theirs = list[float](), list[float]()
            if peer is not None:
                peer.tell(case.task)
            case.once()
            for _ in range(rounds):
                if peer is not None:
                    theirs.append(peer.once())
                ours.append(case.once())
            beside: dict[str, object] = {}
            if theirs:
                median = percentile(sorted(theirs), 0.5)
                beside = {
                    "peer": "dynamo RadixTree",
                    "peer_min": round(min(theirs), 2),
                    "peer_p50": round(median, 2),
                    "peer_ratio": round(median / percentile(sorted(ours), 0.5), 2),
                }
            emit(case.name, "µs", ours, clock="processor", batch=batch, **case.settings, **beside)
    finally:
        if peer is not None:
            peer.close()


def card(number: int, blocks: int = 20_000) -> WorkerCard:
    worker, incarnation = life(number)
    return WorkerCard(
        id=worker,
        incarnation=incarnation,
        role=Role.PREFILL if number % 2 else Role.DECODE,
        state=MemberState.READY,
        address=worker,
        sessions=worker,
        transfer="",
        model="m",
        fingerprint=PRINT,
        blocks=blocks,
        max_tokens=32_768,
        version="",
        pid=1,
        host="",
    )


def load(of: WorkerCard, chance: random.Random, kv: KvDigest) -> LoadReport:
    return LoadReport(
        worker=of.id,
        incarnation=of.incarnation,
        state=MemberState.READY,
        running=chance.randint(0, 32),
        waiting=0,
        queued_tokens=chance.randint(0, 20_000),
        blocks_total=of.blocks,
        blocks_free=chance.randint(1000, of.blocks),
        kv=kv,
        prefill_tokens_s=20_000.0,
        decode_step_s=0.02,
        decode_batch=16.0,
        pull_bytes_s=1e10,
    )


def fleet(workers: int) -> Roster:
    roster = Roster(SETTINGS.unknown)
    cards = [card(number) for number in range(workers)]
    roster.apply_view({of.id: of for of in cards})
    chance = random.Random(4)
    for of in cards:
        roster.apply_link(of.id, of.incarnation, LinkState.UP)
        roster.apply_load(load(of, chance, KvDigest(0, 0, 0)), 0.0)
    return roster


def bench_decision(runs: int) -> None:
    """Everything the router decides for one request: hash, match and both choices."""
    chance = random.Random(5)
    prompt = tuple(chance.randrange(50_000) for _ in range(PROMPT))
    whole = measure(lambda: PrefixIndex(SETTINGS.index).names(prompt, KEYS)[-1], runs)
    emit("router_names", "µs", whole, tokens=PROMPT)
    known = short_names(block_hashes(prompt, KEYS))
    for workers in (2, 16, 128):
        for kind in ("cold", *DEPTHS):
            roster = fleet(workers)
            index = filled([((), ())] * workers if kind == "cold" else held(kind, workers, known))
            tie = iter(range(10**9))

            def decide(roster: Roster = roster, index: PrefixIndex = index, tie: Any = tie) -> None:
                (pool,) = roster.pools("m")
                ask = Ask(PROMPT, index.match(index.names(prompt, KEYS), 0.0), next(tie) * 7919)
                choose_prefill(pool, ask, SETTINGS.cost)
                choose_decode(pool, ask, SETTINGS.cost, ticket=True)

            samples = measure(decide, runs)
            emit("router_decision", "µs", samples, tokens=PROMPT, workers=workers, depths=kind)


def bench_peers(runs: int) -> None:
    """What a request costs besides: the router that sends it in telling of it, each other one in hearing. A
    message tells of so many requests sent and as many that ended."""
    for size in (1, 16):
        ours, theirs = fleet(128), fleet(128)
        outbox = Outbox("r", Incarnation("ours"), ours, SETTINGS.peers)
        peers = Peers(Incarnation("theirs"), theirs, SETTINGS.peers)
        ours.tell = outbox.add
        outbox.take(0.0)
        telling, hearing = [], []
        for step in range(runs):
            for number in range(size):
                at = (step * size + number) % 128
                ours.sent(life(at)[0], RequestId(f"{step:018x}{number:06x}"), 500, 40)
                if step:
                    ours.settle(life((at - size) % 128)[0], RequestId(f"{step - 1:018x}{number:06x}"))
            start = time.perf_counter_ns()
            data = encode_router_moves(outbox.take(0.1))
            told = time.perf_counter_ns()
            heard = peers.apply(decode_router_moves(data), 0.1)
            hearing.append((time.perf_counter_ns() - told) / 1000 / size)
            telling.append((told - start) / 1000 / size)
            assert heard is Heard.APPLIED
        emit("router_peers", "µs", telling, moves=2 * size, side="tells", a="request")
        emit("router_peers", "µs", hearing, moves=2 * size, side="hears", a="request")


class Holder:
    """A `WorkerService` that holds blocks and computes nothing."""

    def __init__(self, of: WorkerCard, chance: random.Random) -> None:
        self.card = of
        kv = KvLog(of.id, of.incarnation, of.blocks)
        kv.record([BlocksStored(tuple(names(chance, of.blocks)))])
        self.kv = kv.digest()
        self.parts = [kv.snapshot(part) for part in range(kv.snapshot().parts)]

    def opened(self, end: object) -> None: ...

    def received(self, end: object, message: object) -> None: ...

    def closed(self, end: object) -> None: ...

    def snapshot(self, part: int) -> KvSnapshot:
        return self.parts[part]

    def status(self) -> LoadReport:
        return load(self.card, random.Random(0), self.kv)

    async def drain(self, limit_s: float) -> MemberState:
        return MemberState.DRAINING

    async def take_role(self, role: Role, limit_s: float) -> MemberState:
        return MemberState.READY


def memory() -> int:
    """Bytes resident."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def bench_recovery(workers: int, blocks: int) -> None:
    """A router that starts beside full workers: until all are proven, and what its loop does meanwhile.

    The workers answer in this process: what they encode is counted too. A turn is the CPU time that
    the loop takes between two looks of a task that always has something to do, as a request would.
    """
    chance = random.Random(6)
    wire, registry = WireHub(), RegistryHub()
    for number in range(workers):
        holder = Holder(card(number, blocks), chance)
        wire.serve(holder, holder.card.address)
        registry.put(worker_key("f", holder.card.id), encode_card(holder.card), 0)

    patient = replace(SETTINGS, watch=replace(SETTINGS.watch, load_s=60.0))  # Nobody reports load here.

    async def recover() -> tuple[float, float, list[float], PrefixIndex]:
        router = Router(patient, "f", registry.registry(), BusHub().bus(), wire.wire())
        running = asyncio.create_task(router.run())
        turns: list[float] = []
        start, cpu = time.perf_counter(), time.process_time()
        while len(router.index.unproven()) or router.index.size < workers * blocks:
            before = time.thread_time_ns()
            await asyncio.sleep(0)
            turns.append((time.thread_time_ns() - before) / 1000)
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return wall, cpu, turns, router.index

    gc.collect()
    gc.freeze()  # What the workers hold would be in other processes, and not be looked through in this one.
    before = memory()
    wall, cpu, turns, index = asyncio.run(recover())
    size = {"workers": workers, "blocks": index.size}
    emit("router_recovery", "s", [wall], **size, cpu_s=round(cpu, 3))
    emit("router_recovery_turn", "µs", turns, **size)
    emit("router_index_memory", "MiB", [(memory() - before) / 2**20], **size)


def main(argv: Sequence[str] = ()) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few runs: numbers mean little")
    parser.add_argument("--peer", default="", metavar="PYTHON", help="python with Dynamo's bindings")
    asked = parser.parse_args(argv)
    runs = 50 if asked.quick else 2000
    compare(3 if asked.quick else 60, 5 if asked.quick else 20, asked.peer)
    bench_decision(runs)
    bench_peers(runs)
    bench_recovery(*(10, 5_000) if asked.quick else (100, 30_000))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
