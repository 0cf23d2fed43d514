"""The router's own part of a request: hash, match, choose; and how fast it takes in KV events."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence

from benchmarks.report import emit
from fleet.block_hash import HashKeys, block_hashes, short_names
from fleet.events import BlocksDropped, BlocksStored, KvDigest, KvEvent, KvEvents, KvSnapshot, LoadReport
from fleet.ids import Incarnation, WorkerId
from fleet.kv_layout import Fingerprint
from fleet.member import MemberState, Role, WorkerCard
from router.cost import Ask, choose_decode, choose_prefill
from router.prefix_index import PrefixIndex
from router.roster import LinkState, Roster
from router.settings import RouterSettings

SETTINGS = RouterSettings()
PRINT = Fingerprint("m", "t", layers=32, kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
WORKERS = (1, 16, 128)
PROMPT = 8192


def measure(work: Callable[[], object], runs: int) -> list[float]:
    """Microseconds of each run."""
    for _ in range(runs // 10 + 1):
        work()
    times = []
    for _ in range(runs):
        start = time.perf_counter_ns()
        work()
        times.append((time.perf_counter_ns() - start) / 1000)
    return times


def filled(workers: int, hashes: list[int], depths: list[int], others: int = 20_000) -> PrefixIndex:
    """An index in which worker i holds `depths[i]` leading blocks, and blocks of other prompts."""
    index = PrefixIndex(SETTINGS.index)
    chance = random.Random(0)
    noise = [chance.getrandbits(64) for _ in range(others)]
    for n in range(workers):
        worker, life = WorkerId(f"w{n}"), Incarnation(f"w{n}.1")
        index.add_worker(worker, life)
        names = tuple(chance.sample(noise, others // 4)) + tuple(hashes[: depths[n]])
        index.load_snapshot(KvSnapshot(worker, life, 0, names))
    return index


def depths(kind: str, workers: int, blocks: int) -> list[int]:
    """`shared`: all hold half of it, one all. `ragged`: each another part of it."""
    chance = random.Random(1)
    if kind == "ragged":
        return [chance.randint(0, blocks) for _ in range(workers)]
    return [blocks] + [blocks // 2] * (workers - 1)


def bench_match(runs: int) -> None:
    chance = random.Random(2)
    hashes = [chance.getrandbits(64) for _ in range(512)]
    for workers in WORKERS:
        for kind in ("shared", "ragged"):
            index = filled(workers, hashes, depths(kind, workers, len(hashes)))
            samples = measure(lambda index=index: index.match(hashes, 0.0), runs)  # type: ignore[misc]
            emit("router_match", "µs", samples, workers=workers, blocks=len(hashes), depths=kind)


def bench_apply(runs: int) -> None:
    """Events of 16 workers in turn; each block is stored and later dropped."""
    for size in (1, 32, 512):
        index = PrefixIndex(SETTINGS.index)
        workers = [(WorkerId(f"w{n}"), Incarnation(f"w{n}.1")) for n in range(16)]
        for worker, life in workers:
            index.add_worker(worker, life)
            index.load_snapshot(KvSnapshot(worker, life, 0, ()))
        chance = random.Random(3)
        messages = []
        for step in range(max(40, 20 * runs // size)):
            worker, life = workers[step % 16]
            names = tuple(chance.getrandbits(64) for _ in range(size))
            events: tuple[KvEvent, KvEvent] = (BlocksStored(names), BlocksDropped(names))
            for half, event in enumerate(events):
                messages.append(KvEvents(worker, life, 2 * (step // 16) + half + 1, (event,)))
        rates = []
        for start in range(0, len(messages), len(messages) // 20):
            part = messages[start : start + len(messages) // 20]
            begin = time.perf_counter()
            for message in part:
                index.apply(message)
            rates.append(len(part) * size / (time.perf_counter() - begin))
        emit("router_apply", "blocks/s", rates, blocks_per_event=size)


def fleet(workers: int) -> Roster:
    roster = Roster(SETTINGS.unknown)
    cards = {}
    for n in range(workers):
        role = Role.PREFILL if n % 2 else Role.DECODE
        worker = WorkerId(f"w{n}")
        cards[worker] = WorkerCard(
            id=worker,
            incarnation=Incarnation(f"w{n}.1"),
            role=role,
            state=MemberState.READY,
            address="",
            transfer="",
            model="m",
            fingerprint=PRINT,
            blocks=20_000,
            max_tokens=32_768,
            version="",
            pid=1,
            host="",
        )
    roster.apply_view(cards)
    chance = random.Random(4)
    for card in cards.values():
        roster.apply_link(card.id, card.incarnation, LinkState.UP)
        roster.apply_load(
            LoadReport(
                worker=card.id,
                incarnation=card.incarnation,
                state=MemberState.READY,
                running=chance.randint(0, 32),
                waiting=0,
                queued_tokens=chance.randint(0, 20_000),
                blocks_total=20_000,
                blocks_free=chance.randint(1000, 20_000),
                kv=KvDigest(0, 0, 0),
                prefill_tokens_s=20_000.0,
                decode_step_s=0.02,
                decode_batch=16.0,
                pull_bytes_s=1e10,
            ),
            0.0,
        )
    return roster


def bench_decision(runs: int) -> None:
    """Everything the router decides for one request: hash, match and both choices."""
    chance = random.Random(5)
    prompt = tuple(chance.randrange(50_000) for _ in range(PROMPT))
    keys = HashKeys(PRINT.digest(), PRINT.block_size)
    hashes = short_names(block_hashes(prompt, keys))
    emit("router_hash", "µs", measure(lambda: short_names(block_hashes(prompt, keys)), runs), tokens=PROMPT)
    for workers in (2, 16, 128):
        roster = fleet(workers)
        index = filled(workers, hashes, depths("shared", workers, len(hashes)))
        number = iter(range(10**9))

        def decide(
            hashed: bool, roster: Roster = roster, index: PrefixIndex = index, number: object = number
        ) -> None:
            names = hashes if hashed else short_names(block_hashes(prompt, keys))
            (pool,) = roster.pools("m")
            ask = Ask(PROMPT, index.match(names, 0.0), next(number) * 7919)  # type: ignore[call-overload]
            choose_prefill(pool, ask, SETTINGS.cost)
            choose_decode(pool, ask, SETTINGS.cost, ticket=True)

        emit("router_choose", "µs", measure(lambda: decide(True), runs), tokens=PROMPT, workers=workers)
        emit("router_decision", "µs", measure(lambda: decide(False), runs), tokens=PROMPT, workers=workers)


def main(argv: Sequence[str] = ()) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few runs: numbers mean little")
    runs = 50 if parser.parse_args(argv).quick else 2000
    bench_match(runs)
    bench_apply(runs)
    bench_decision(runs)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
