"""Plays fault schedules by the thousand: `python tests/box/soak.py --schedules N [--seed S] [--minutes M]`.

Seeds S, S+1, … on all cores. Progress goes to stderr, one JSON line at the end to stdout; a failing seed is
printed when it is found. `--replay SEED` plays one and tells all of it; `--resume FILE` writes down there how
far it came, and goes on from there. Ctrl-C ends it, with its line. Exit code 1: a seed failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2])]

from drawing import draw  # noqa: E402
from playing import Outcome, play  # noqa: E402

_PORTION = 25
"""Seeds that a process takes at once: about two seconds of work."""


@dataclass(slots=True)
class Tally:
    """What a portion of seeds, or all of them, came to."""

    schedules: int = 0
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    ends: Counter[str] = field(default_factory=Counter)
    struck: Counter[str] = field(default_factory=Counter)
    damaged: int = 0
    mismatches: int = 0
    failed: dict[int, list[str]] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        self.schedules += 1
        self.virtual_s += outcome.seconds
        self.ends.update(outcome.ends)
        self.struck.update(outcome.struck)
        self.damaged += outcome.damaged
        self.mismatches += outcome.counters["checksum_mismatches"]
        if outcome.problems:
            self.failed[outcome.schedule.seed] = outcome.problems

    def join(self, other: Tally) -> None:
        self.schedules += other.schedules
        self.virtual_s += other.virtual_s
        self.cpu_s += other.cpu_s
        self.ends.update(other.ends)
        self.struck.update(other.struck)
        self.damaged += other.damaged
        self.mismatches += other.mismatches
        self.failed.update(other.failed)

    def line(self, first: int, next_seed: int, seconds: float) -> str:
        return json.dumps(
            {
                "case": "fault_schedules",
                "first_seed": first,
                "next_seed": next_seed,
                "schedules": self.schedules,
                "seconds": round(seconds, 1),
                "cpu_ms_each": round(1000 * self.cpu_s / max(1, self.schedules), 1),
                "virtual_s": round(self.virtual_s, 1),
                "clients": dict(self.ends.most_common()),
                "faults": dict(self.struck.most_common()),
                "kv_reads_damaged": self.damaged,
                "checksum_mismatches_counted": self.mismatches,
                "failed": {str(seed): problems for seed, problems in sorted(self.failed.items())},
            }
        )


def _leave_interrupts() -> None:
    """Ctrl-C is for the one that counts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def play_all(seeds: range) -> Tally:
    tally, began = Tally(), time.process_time()
    for seed in seeds:
        tally.add(play(draw(seed)))
    tally.cpu_s = time.process_time() - began
    return tally


def portions(first: int, schedules: int | None) -> Iterator[range]:
    for start in count(first, _PORTION):
        end = start + _PORTION if schedules is None else min(start + _PORTION, first + schedules)
        if start >= end:
            return
        yield range(start, end)


def soak(
    first: int, schedules: int | None, minutes: float | None, processes: int, resume: Path | None
) -> int:
    """Ends after so many schedules or minutes, whatever comes first."""
    began, total, next_seed = time.monotonic(), Tally(), first
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(processes, _leave_interrupts) as pool, suppress(KeyboardInterrupt):
        # Asked for a few at a time, or all seeds of a soak without an end would be queued at once.
        rounds = portions(first, schedules)
        while batch := list(islice(rounds, 4 * processes)):
            for tally in pool.imap(play_all, batch):
                for seed, problems in tally.failed.items():
                    print(f"\nseed {seed}: {problems[0]}\n  {how_to_replay(seed)}", file=sys.stderr)
                total.join(tally)
                next_seed += tally.schedules
                if resume is not None:
                    resume.write_text(json.dumps({"first_seed": first, "next_seed": next_seed}))
                seconds = time.monotonic() - began
                of = f" of {schedules}" if schedules else ""
                print(
                    f"\r{total.schedules}{of} schedules, {len(total.failed)} failed, "
                    f"{total.schedules / seconds:.0f} a second ",
                    end="", file=sys.stderr, flush=True,
                )  # fmt: skip
            if minutes is not None and time.monotonic() - began > 60 * minutes:
                break
    print(file=sys.stderr)
    print(total.line(first, next_seed, time.monotonic() - began))
    return 1 if total.failed else 0


def how_to_replay(seed: int) -> str:
    return f"python tests/box/soak.py --replay {seed}"


def replay(seed: int) -> int:
    """Tells the schedule, what happened, and what is wrong with it."""
    outcome = play(draw(seed))
    schedule = outcome.schedule
    print(
        f"seed {seed}: {schedule.prefill} prefill, {schedule.decode} decode, {schedule.routers} routers, "
        f"{schedule.blocks} blocks, safe: {schedule.safe}\n{schedule.engine}\nclocks: {schedule.clocks}"
    )
    for fault in schedule.faults:
        print(fault)
    for client in schedule.clients:
        print(client)
    for entry in outcome.trace:
        print(*entry)
    print(f"ends: {dict(outcome.ends)}, digest {outcome.digest()}")
    for problem in outcome.problems:
        print("WRONG:", problem)
    return 1 if outcome.problems else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--schedules", type=int, help="how many; without it and --minutes, 1000")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--minutes", type=float, help="for how long at most")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--resume", type=Path, metavar="FILE", help="go on from where FILE says")
    parser.add_argument("--replay", type=int, metavar="SEED", help="play one and tell all of it")
    options = parser.parse_args()
    if options.replay is not None:
        return replay(options.replay)
    first = options.seed
    if options.resume is not None and options.resume.exists():
        first = json.loads(options.resume.read_text())["next_seed"]
    schedules = options.schedules
    if schedules is None and options.minutes is None:
        schedules = 1000
    return soak(first, schedules, options.minutes, options.processes, options.resume)


if __name__ == "__main__":
    sys.exit(main())
