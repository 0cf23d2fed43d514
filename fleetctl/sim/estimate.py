"""How many workers a workload needs by its work alone, before any queue: where a search begins. Pure.

Nothing waits for anything here, and every prefix that was ever asked is found; so these are the fewest
workers that could do, and what is simulated needs as many or more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import fmean

from fleet.objectives import Objectives
from fleet.workload import Conversation
from fleetctl.sim.speed import Speed, Work

FULL = 0.95
"""Of a worker's time: more is no plan."""

MOST_NEEDS = 1000
"""Of a workload, from which the rest is concluded."""


@dataclass(frozen=True, slots=True)
class Need:
    """One request, as a device sees it. Tokens."""

    prompt: int
    cached: int
    """Of those, the beginning that was asked before."""
    output: int
    objectives: Objectives


@dataclass(frozen=True, eq=False)
class Demand:
    """What is asked of a fleet. One is only equal to itself, so that what is worked out of it can be kept."""

    needs: tuple[Need, ...]
    rate: float
    """Requests a second."""

    @classmethod
    def of(cls, conversations: Iterable[Conversation], objectives: Callable[[str], Objectives]) -> Demand:
        """Raises `ValueError` where there are too few for a rate."""
        needs: list[Need] = []
        seen: set[int] = set()
        first = last = 0.0
        count = 0
        for count, one in enumerate(conversations, 1):  # noqa: B007 — it is the number of all
            first, last = (one.at_s if not needs else first), one.at_s
            for turn in range(len(one.turns)):
                cached = total = chain = 0
                known = True
                for piece in one.prompt(turn):
                    chain = hash((chain, piece.key, piece.tokens))
                    total += piece.tokens
                    known = known and chain in seen
                    cached = total if known else cached
                    seen.add(chain)
                output = one.turns[turn].output_tokens
                needs.append(Need(total, min(cached, total - 1), output, objectives(one.service_class)))
        if count < 2 or last <= first:
            raise ValueError("the workload has too few requests for a rate")
        # Between so many beginnings lies one gap fewer.
        rate = len(needs) * (1 - 1 / count) / (last - first)
        # Every so many of them say the same of the rest.
        return cls(tuple(needs[:: -(-len(needs) // MOST_NEEDS)]), rate)

    @cached_property
    def prompt(self) -> float:
        return fmean(need.prompt for need in self.needs)

    @cached_property
    def cached_share(self) -> float:
        return sum(need.cached for need in self.needs) / sum(need.prompt for need in self.needs)

    @cached_property
    def output(self) -> float:
        return fmean(need.output for need in self.needs)

    @cached_property
    def context(self) -> float:
        """Tokens whose KV a step reads for a sequence, on average over its life."""
        tokens = sum(need.output for need in self.needs)
        return sum(need.output * (need.prompt + need.output / 2) for need in self.needs) / tokens

    @cached_property
    def tpot_s(self) -> float:
        """The tightest objective; inf: none."""
        return min((one.objectives.tpot_ms or math.inf) for one in self.needs) / 1e3


@dataclass(frozen=True, eq=False)
class Device:
    """One worker: its speed, and what its settings let it do."""

    speed: Speed
    kv_tokens: int
    max_batch: int

    def prompt_s(self, need: Need, step_tokens: int, decodes: int = 0, context: float = 0.0) -> float:
        """To compute a prompt alone, beside so many running sequences."""
        seconds, start = 0.0, need.cached
        while start < need.prompt:
            count = min(max(1, step_tokens - decodes), need.prompt - start)
            pairs = count * start + count * (count + 1) // 2
            seconds += self.speed.step_s(Work(count, pairs, decodes, round(decodes * context), start))
            start += count
        return seconds

    def batch(self, demand: Demand) -> int:
        """Most sequences that decode together within the objective, and have room; 0: not even one."""
        room = int(self.kv_tokens / max(1.0, demand.context))
        return _most(min(self.max_batch, room), lambda size: self.decode_s(size, demand) <= demand.tpot_s)

    def decode_s(self, size: int, demand: Demand) -> float:
        return self.speed.step_s(Work(decodes=size, context=round(size * demand.context)))

    @lru_cache(maxsize=64)  # noqa: B019 — a plan has a handful of devices, and lives as long as they
    def prompts_s(self, demand: Demand, step_tokens: int) -> tuple[float, ...]:
        """Of each request."""
        return tuple(self.prompt_s(need, step_tokens) for need in demand.needs)

    def alone(self, demand: Demand, step_tokens: int) -> float:
        """Share of the requests that meet their TTFT and TPOT where nobody else asks anything."""
        step_s = self.speed.step_s(Work(decodes=1, context=round(demand.context)))
        good = 0
        for need, first_s in zip(demand.needs, self.prompts_s(demand, step_tokens), strict=True):
            limits = need.objectives
            late = limits.ttft_ms is not None and first_s * 1e3 > limits.ttft_ms
            slow = limits.tpot_ms is not None and step_s * 1e3 > limits.tpot_ms
            good += not late and not slow
        return good / len(demand.needs)


def _most(high: int, holds: Callable[[int], bool]) -> int:
    """The largest number up to `high` for which it holds, 0 if there is none; it holds of all below it."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def apart(demand: Demand, device: Device, step_tokens: int, rate: float) -> tuple[int, int] | None:
    """(prefill, decode) workers at so many requests a second; None: not with any number of such workers."""
    batch = device.batch(demand)
    if not batch:
        return None
    prefill_s = rate * fmean(device.prompts_s(demand, step_tokens))
    decode_s = rate * max(0.0, demand.output - 1) * device.decode_s(batch, demand) / batch
    return max(1, math.ceil(prefill_s / FULL)), max(1, math.ceil(decode_s / FULL))


def together(demand: Demand, device: Device, step_tokens: int, rate: float, most: int = 4096) -> int | None:
    """Aggregated workers whose steps hold so many tokens; None: not with `most`."""
    if not device.batch(demand) or not _bears(demand, device, step_tokens, rate / most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        bears = _bears(demand, device, step_tokens, rate / middle)
        low, high = (low, middle) if bears else (middle, high)
    return high


def _bears(demand: Demand, device: Device, step_tokens: int, rate: float) -> bool:
    """Whether one worker bears so many requests a second. Its running sequences get a token a step; some
    steps hold a piece of another's prompt, too, and take longer."""
    tokens_s = rate * max(0.0, demand.output - 1)
    fresh = demand.prompt * (1 - demand.cached_share)
    before = demand.prompt * demand.cached_share + fresh / 2
    room = min(device.max_batch, int(device.kv_tokens / max(1.0, demand.context)), step_tokens - 1)
    size = 1
    while size <= room:
        piece = min(fresh, step_tokens - size)
        pieces_s = rate * fresh / piece
        both = Work(round(piece), round(piece * before), size, round(size * demand.context), round(before))
        mixed_s, decode_s = device.speed.step_s(both), device.decode_s(size, demand)
        stalled = pieces_s * max(0.0, mixed_s - decode_s)
        if pieces_s * mixed_s > FULL or stalled >= 1:
            return False
        gap_s = decode_s / (1 - stalled)
        # As many run as begin while one runs (Little, 1961); more of them make steps longer.
        running = math.ceil(tokens_s * gap_s)
        if running <= size:
            return gap_s <= demand.tpot_s
        size = running
    return False
