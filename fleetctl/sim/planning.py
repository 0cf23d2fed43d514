"""A plan in the making: what a workload needs by its work alone, and simulations of what is promising."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fleet.workload import Conversation
from fleetctl.bench.plan import Plan
from fleetctl.sim.advice import Arrangement, Found, arrangements, crossing, promising
from fleetctl.sim.estimate import Demand, Device
from fleetctl.sim.play import simulate
from fleetctl.sim.report import report
from fleetctl.sim.search import Search, Shape, Trial
from fleetctl.sim.words import Setup

Progress = Callable[[str, int, int], None]
"""Told what is played, how many requests have ended, and of how many."""
GPUS_PER_HOST = 8
LEAST_PLAYED = 100
"""Conversations of a simulation: of fewer a share says little."""
TRIALS = 10
"""Simulations for which an effort is to be enough."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a plan is to reach, and how hard it is looked for."""

    target: float = 0.95
    """Share of the requests that must attain."""
    most_gpus: int = 256
    step_tokens: int = 8192
    """Of prefill workers."""
    block_size: int = 64
    requests: int | None = None
    """Conversations of each simulation; None: as many as let answers end while others come."""
    warm_up_s: float = 0.0
    """Not judged, at least; a fifth of the time in any case."""
    effort_s: float = 60.0
    """Seconds that simulations may take a processor, all together; told from what they play (`Effort`): the
    same is found on every machine."""


@dataclass(frozen=True, slots=True)
class Effort:
    """What playing a workload once takes, in seconds of a processor: measured, and right within a factor of
    two on one like it."""

    requests: int
    prompt_tokens: float
    output_tokens: int
    sending_s: float

    @classmethod
    def of(cls, played: Sequence[Conversation], prompt: float) -> Effort:
        """`prompt`: tokens of a usual one."""
        turns = [turn for one in played for turn in one.turns]
        sending_s = float(played[-1].at_s - played[0].at_s)
        return cls(len(turns), prompt * len(turns), sum(turn.output_tokens for turn in turns), sending_s)

    def seconds(self, workers: int) -> float:
        asked = 3e-3 * self.requests + 1e-6 * self.prompt_tokens + 3e-5 * self.output_tokens
        return asked + 1e-3 * self.sending_s * workers


class Planning:
    """Raises `ValueError` for a workload that is none."""

    def __init__(
        self,
        plan: Plan,
        lines: Iterable[str],
        devices: Mapping[int, Device],
        kv_bytes: float,
        wanted: Wanted,
    ) -> None:
        """`lines` are those of the plan's trace, if any; `devices` by the GPUs of a worker; `kv_bytes` of a
        token."""
        self.plan = plan
        self.devices = devices
        self.kv_bytes = kv_bytes
        self.wanted = wanted
        # As many as are needed, however long the flags of a load test would go on.
        whole = replace(plan.source.shape, conversations=wanted.requests or 3000)
        if not plan.source.trace:
            whole = replace(whole, duration_s=math.inf)
        known = list(replace(plan.source, shape=whole).conversations(lines))
        self.demand = Demand.of(known, plan.of)
        self.considered = arrangements(self.demand, devices, wanted.step_tokens)
        self.crossing = crossing(self.demand, devices, wanted.step_tokens)
        self.played = known[: wanted.requests or self._usual_count(known)]
        self.one_run = Effort.of(self.played, self.demand.prompt)
        self.spent_s = 0.0
        """Of the effort."""
        # What the first ones find is an empty fleet.
        sending_s = self.played[-1].at_s - self.played[0].at_s
        self.warm_up_s = max(wanted.warm_up_s, sending_s / 5)
        self.founds: list[Found] = []
        self.tuned: list[tuple[int, Trial]] = []
        """Other tokens of a step for the best with prefill apart, and what came of them."""

    def _usual_count(self, known: Sequence[Conversation]) -> int:
        """So many that answers end while others come, if the effort is enough for some such simulations."""
        answer_s = self.demand.output * min(self.demand.tpot_s, 0.1)
        usual = min(len(known), max(300, math.ceil(self.demand.rate * 5 * answer_s)))
        workers = min((one.least.workers for one in self._promising() if one.least is not None), default=1)
        whole_s = Effort.of(known[:usual], self.demand.prompt).seconds(workers)
        affordable = math.floor(usual * self.wanted.effort_s / TRIALS / whole_s)
        return min(usual, max(LEAST_PLAYED, affordable))

    def _promising(self) -> list[Arrangement]:
        return promising(self.considered, self.wanted.target, self.wanted.most_gpus)

    def search(self, progress: Progress = lambda what, ended, of: None) -> None:
        least: int | None = None
        all_of_them = self._promising()
        for place, arrangement in enumerate(all_of_them):
            assert arrangement.least is not None, "what cannot be is not promising"
            most = self.wanted.most_gpus // arrangement.gpus
            found = Found(arrangement, Search(arrangement.least, most, self.wanted.target))
            # Which way is better is the question: the first of each way is always played.
            first = not any(one.arrangement.apart is arrangement.apart for one in self.founds)
            self.founds.append(found)
            # What one leaves is the others'.
            until_s = self.spent_s + (self.wanted.effort_s - self.spent_s) / (len(all_of_them) - place)
            while (step := found.search.next()).shape is not None:
                gpus = step.shape.workers * arrangement.gpus
                if least is not None and not first and gpus > least:
                    found.skipped = f"would need {gpus} GPUs or more, and {least} do"
                    break
                enough = self.spent_s + self.one_run.seconds(step.shape.workers) <= until_s
                if not enough and (found.search.trials or not first):
                    effort = f"--effort {self.wanted.effort_s:g}"
                    found.unfinished = f"not searched to its end, for {effort}; next was {step.shape}"
                    break
                found.search.apply(self._trial(arrangement, step.shape, arrangement.step_tokens, progress))
            if found.gpus is not None:
                least = found.gpus if least is None else min(least, found.gpus)
        self._tune(progress)

    def _tune(self, progress: Progress) -> None:
        apart = [one for one in self.founds if one.arrangement.apart and one.best is not None]
        if not apart:
            return
        found = min(apart, key=lambda one: one.gpus or 0)
        assert found.best is not None, "only those that have one were taken"
        steps = found.arrangement.step_tokens
        for tokens in (max(2, steps // 2), steps * 2):
            if self.spent_s + self.one_run.seconds(found.best.shape.workers) > self.wanted.effort_s:
                return
            trial = self._trial(found.arrangement, found.best.shape, tokens, progress)
            self.tuned.append((tokens, trial))

    def _trial(self, arrangement: Arrangement, shape: Shape, step_tokens: int, progress: Progress) -> Trial:
        setup = self.setup(arrangement, shape, step_tokens)
        title = f"{shape}, {arrangement.gpus} GPU{'s' * (arrangement.gpus > 1)} each"
        turns = self.one_run.requests
        self.spent_s += self.one_run.seconds(shape.workers)
        played = simulate(setup, self.played, lambda asked, ended, now: progress(title, ended, turns))
        said = report(setup, played)
        whole = said["all"]
        facts = {
            "goodput": whole.get("goodput"),
            "ttft_ms": whole.get("ttft_ms"),
            "tpot_ms": whole.get("tpot_ms"),
            "busy": {name: role["busy_share"] for name, role in said["roles"].items()},
            "cached_share": said["tokens"]["cached_share"],
        }
        return Trial(shape, whole.get("attainment", 0.0), whole.get("missed_by", {}), facts)

    def setup(self, arrangement: Arrangement, shape: Shape, step_tokens: int) -> Setup:
        device = self.devices[arrangement.gpus]
        usual = Setup(
            speed=device.speed,
            kv_bytes=self.kv_bytes,
            kv_tokens=device.kv_tokens,
            prefill=shape.prefill,
            decode=shape.decode,
            objectives={**self.plan.objectives, "default": self.plan.default},
            default_class="default",
            block_size=self.wanted.block_size,
            max_batch=device.max_batch,
            workers_per_host=max(1, GPUS_PER_HOST // arrangement.gpus),
            warm_up_s=self.warm_up_s,
            seed=self.plan.source.seed,
        )
        if arrangement.apart:
            return replace(usual, step_tokens=step_tokens)
        return replace(usual, decode_step_tokens=step_tokens)
