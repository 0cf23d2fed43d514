"""The router's index benchmark on another system's radix tree. Runs under that system's python, alone.

Standard input: the cases of `router.py` as JSON. Standard output: microseconds of each run, in their order.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any


def stored(names: list[int]) -> bytes:
    blocks = [{"block_hash": name, "tokens_hash": name} for name in names]
    return _event({"stored": {"parent_hash": None, "blocks": blocks}})


def removed(names: list[int]) -> bytes:
    return _event({"removed": {"block_hashes": names}})


def _event(data: dict[str, Any]) -> bytes:
    return json.dumps({"event_id": 1, "data": data, "dp_rank": 0}).encode()


def measure(work: Callable[[], object], runs: int) -> list[float]:
    times = []
    for _ in range(runs):
        start = time.perf_counter_ns()
        work()
        times.append((time.perf_counter_ns() - start) / 1000)
    return times


def match(tree: Any, case: dict[str, Any]) -> list[float]:
    for worker, (names, others) in enumerate(case["held"]):
        for some in (names, others):
            if some:
                tree.apply_event(worker, stored(some))
    names = case["names"]
    got = {worker: depth for (worker, _), depth in tree.find_matches(names).scores.items()}
    assert got == {worker: len(held) for worker, (held, _) in enumerate(case["held"]) if held}
    return measure(lambda: tree.find_matches(names).scores, case["runs"])


def apply(tree: Any, case: dict[str, Any]) -> list[float]:
    """Each run is one event stored and dropped again."""
    events = [(worker, stored(names), removed(names)) for worker, names in case["messages"]]

    def both(worker: int, put: bytes, drop: bytes) -> None:
        tree.apply_event(worker, put)
        tree.apply_event(worker, drop)

    return [measure(lambda event=event: both(*event), 1)[0] for event in events]  # type: ignore[misc]


def run() -> None:
    from dynamo.llm import RadixTree  # type: ignore[import-not-found, unused-ignore]

    kinds = {"match": match, "apply": apply}
    json.dump([kinds[case["kind"]](RadixTree(), case) for case in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    run()
