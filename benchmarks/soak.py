"""`python -m benchmarks live-soak`: a fleet of processes under load and faults for minutes or hours.

Every answer is compared with what an undisturbed fleet says. Beside that it measures what processes that live
through all of it hold (memory, descriptors, threads, tasks): after a warm-up and at the end, and the slope.
Prints progress to stderr, and one JSON line. Exit code 1: an answer was wrong, or something grew.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_LIVE = Path(__file__).resolve().parent.parent / "tests" / "live"
sys.path.insert(0, str(_LIVE))

from chaos import CalmOracle, Chaos, LatencyOracle, Load, Oracle, Trouble  # noqa: E402
from processes import Fleet, Holdings, Plan, holdings, running  # noqa: E402

from benchmarks.report import emit  # noqa: E402

STEADY = ("router-0", "prefill-0", "decode-0")
"""Frozen at times, never ended: the others come and go around them."""
SMALL = ("--flow.records", "128", "--index.max-hints", "2000")
"""Of what a router remembers, and `--kv-bytes`: so little that all of it is full after the warm-up."""
WARM_UP = 0.2
"""Share of the run before growth is measured."""
MAY_GROW = {"rss_bytes": 6 << 20, "descriptors": 8, "threads": 2, "tasks": 16}
"""From the first to the last quarter after the warm-up, by medians: noise of a load that comes and goes."""


@dataclass
class Gauges:
    """Samples of the steady processes, by name: (seconds since start, what it held)."""

    samples: dict[str, list[tuple[float, Holdings]]] = field(default_factory=dict)

    async def watch(self, fleet: Fleet, every_s: float) -> None:
        clock = asyncio.get_running_loop().time
        begun = clock()
        while True:
            for name in STEADY:
                if (held := await holdings(fleet.processes[name])) is not None:
                    self.samples.setdefault(name, []).append((clock() - begun, held))
            await asyncio.sleep(every_s)

    def table(self, seconds: float) -> dict[str, dict[str, dict[str, float]]]:
        """For each process and figure: `begin` and `end` (medians of a quarter), `slope_h` an hour."""
        told: dict[str, dict[str, dict[str, float]]] = {}
        for name, samples in self.samples.items():
            warm = [(at, asdict(held)) for at, held in samples if at >= WARM_UP * seconds]
            if len(warm) < 4:
                continue
            quarter = max(1, len(warm) // 4)
            told[name] = {
                figure: {
                    "begin": statistics.median(held[figure] for _, held in warm[:quarter]),
                    "end": statistics.median(held[figure] for _, held in warm[-quarter:]),
                    "slope_h": round(slope([(at, held[figure]) for at, held in warm]) * 3600, 1),
                }
                for figure in MAY_GROW
            }
        return told


def slope(points: list[tuple[float, float]]) -> float:
    """Least squares; units a second."""
    at, held = statistics.fmean(x for x, _ in points), statistics.fmean(y for _, y in points)
    spread = sum((x - at) ** 2 for x, _ in points)
    return sum((x - at) * (y - held) for x, y in points) / spread if spread else 0.0


def grown(table: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    return [
        f"{name}: {figure} grew from {row['begin']:.0f} to {row['end']:.0f}"
        for name, figures in table.items()
        for figure, row in figures.items()
        if row["end"] - row["begin"] > MAY_GROW[figure]
    ]


async def soak(given: argparse.Namespace, folder: Path) -> int:
    seconds = given.minutes * 60
    wait = ("--flow.worker-wait-s", "60", "--flow.resume-wait-s", "60")
    memory = ("--engine.kv-memory-bytes", str(given.kv_bytes))
    flags = {"router": (*wait, *SMALL), "prefill": memory, "decode": memory}
    plan = Plan(given.model, given.prefill, given.decode, given.routers, flags, nice=given.nice)
    faults = tuple(given.faults.split(","))
    trouble = Trouble(
        every_s=given.every,
        spared=frozenset(STEADY),
        worker_faults=tuple(kind for kind in faults if kind != "servers"),
        server_faults="servers" in faults,
    )
    load = Load(0, seconds, given.rate, limit_s=300.0)
    async with running(folder, plan) as (fleet, watcher):
        oracle: Oracle
        if given.model.startswith("latency"):
            oracle = LatencyOracle(given.seed, given.tokens)
        else:
            oracle = CalmOracle(given.served, given.tokens, kinds=12)
            await oracle.learn(fleet.address("router-0"))
        chaos = Chaos(fleet, watcher, oracle, load, trouble, given.seed)
        gauges = Gauges()
        beside = [
            asyncio.create_task(gauges.watch(fleet, max(2.0, seconds / 120))),
            asyncio.create_task(progress(chaos, gauges, seconds)),
        ]
        try:
            result = await chaos.run()
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
    table = gauges.table(seconds)
    growth = grown(table)
    settings: dict[str, Any] = {"fault_kinds": given.faults} | {
        name: getattr(given, name) for name in ("minutes", "model", "rate", "every", "tokens")
    }
    emit("live_soak/longest_gap", "s", chaos.gaps or [0.0], **settings, **result.line(), holdings=table)
    for told in [*result.wrong[:20], *growth]:
        print(told, file=sys.stderr)
    return 1 if result.wrong or growth else 0


async def progress(chaos: Chaos, gauges: Gauges, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    begun = loop.time()
    while True:
        await asyncio.sleep(min(15.0, seconds / 10))
        line = {"s": round(loop.time() - begun), "of": seconds, "under_way": chaos.under_way}
        last = {name: asdict(samples[-1][1]) for name, samples in gauges.samples.items()}
        print(json.dumps({**line, **chaos.result.line(), "holdings": last}), file=sys.stderr, flush=True)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks live-soak", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="half a minute: shows that it works")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--model", default="latency:base=10")
    parser.add_argument("--served", default="smollm2-135m-instruct", help="name of a real model")
    parser.add_argument("--kv-bytes", type=int, default=1 << 17, help="of each worker; of a real model more")
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second")
    parser.add_argument("--tokens", type=int, default=80, help="of the longest answer")
    parser.add_argument("--every", type=float, default=8.0, help="seconds between faults; 0: none")
    parser.add_argument(
        "--faults", default="kill,freeze,drain,scale,turn,servers",
        help="which: kill, freeze, drain, scale, turn of workers; servers: etcd and NATS too",
    )  # fmt: skip
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=3)
    parser.add_argument("--routers", type=int, default=2)
    parser.add_argument("--nice", type=int, default=0, help="of the fleet's processes")
    parser.add_argument("--logs", type=Path, help="folder to keep their logs in")
    given = parser.parse_args(argv)
    if given.quick:
        given.minutes = 0.5
    os.environ.setdefault("PDFLEET_LOG_LEVEL", "info")
    if given.logs is not None:
        given.logs.mkdir(parents=True, exist_ok=True)
        return asyncio.run(soak(given, given.logs))
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(soak(given, Path(folder)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
