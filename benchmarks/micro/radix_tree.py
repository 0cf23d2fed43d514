"""The router's index benchmark on another system's radix tree. Runs under that system's python, alone.

Standard input: a case of `router.py` as one line of JSON, then an empty line for each round of it that is to
be run, then the next case. Standard output: of each round its samples, as one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any


def stored(names: list[int]) -> bytes:
    blocks = [{"block_hash": name, "tokens_hash": name} for name in names]
    return _event({"stored": {"parent_hash": None, "blocks": blocks}})


def removed(names: list[int]) -> bytes:
    return _event({"removed": {"block_hashes": names}})


def _event(data: dict[str, Any]) -> bytes:
    return json.dumps({"event_id": 1, "data": data, "dp_rank": 0}).encode()


def measure(work: Callable[[], object], runs: int) -> float:
    """Microseconds of processor time a run, of all threads: the tree has one of its own."""
    start = time.process_time_ns()
    for _ in range(runs):
        work()
    return (time.process_time_ns() - start) / 1000 / runs


def match(tree: Any, case: dict[str, Any]) -> Callable[[], list[float]]:
    for worker, (names, others) in enumerate(case["held"]):
        for some in (names, others):
            if some:
                tree.apply_event(worker, stored(some))
    names = case["names"]
    got = {worker: depth for (worker, _), depth in tree.find_matches(names).scores.items()}
    assert got == {worker: len(held) for worker, (held, _) in enumerate(case["held"]) if held}
    return lambda: [measure(lambda: tree.find_matches(names).scores, case["batch"])]


def apply(tree: Any, case: dict[str, Any]) -> Callable[[], list[float]]:
    """Each run is one event stored and dropped again."""
    events = iter([(worker, stored(names), removed(names)) for worker, names in case["messages"]])

    def both() -> None:
        worker, put, drop = next(events)
        tree.apply_event(worker, put)
        tree.apply_event(worker, drop)

    def some() -> list[float]:
        start = time.process_time_ns()
        for _ in range(case["batch"]):
            both()
        tree.find_matches([1])  # Waits, should an event be taken in behind its call.
        return [(time.process_time_ns() - start) / 1000 / case["batch"]]

    return some


def run(lines: Iterator[str]) -> None:
    from dynamo.llm import RadixTree  # type: ignore[import-not-found, unused-ignore]

    kinds = {"match": match, "apply": apply}
    once: Callable[[], list[float]] = list
    for line in lines:
        if line.strip():
            case = json.loads(line)
            once = kinds[case["kind"]](RadixTree(), case)
            once()
        else:
            print(json.dumps(once()), flush=True)


if __name__ == "__main__":
    run(iter(sys.stdin))
