"""What a request would meet if it were sent now, and how far such forecasts have been off. Pure.

From the cost model's choice and what the roster knows: prompts queued before it, its own uncached tokens,
measured speeds. What that leaves out (a worker's own order, pulls, memory) shows as a ratio of actual to
forecast, which is learnt as outcomes come in and corrects the next forecasts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fleet.goodput import Histogram, Percentiles
from router.cost import Choice
from router.roster import Pool, Standing
from router.settings import CostSettings


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of one request at the worker that the cost model chose for it. Seconds, not corrected."""

    ahead_s: float
    """Of prompts queued there before it."""
    work_s: float
    """Of its own prompt."""
    tpot_s: float
    """Of an answer, at the decode worker that would take it soonest, prompts computed in between included."""
    sequences: float
    """There, with its share of those whose prompts are still computed."""
    tokens: int
    """Prompt tokens to compute."""
    rate: float
    """Prompt tokens a second that the pool computes."""
    elsewhere: bool
    """A decode worker computes the prompt though there are prefill workers: it needs none of these."""
    idle: bool = False
    """Decode workers stand idle that could take it and, where its prompt needs one, prefill workers, too."""


_SLOTS = 8
"""Running sequences below which those that wait are on their way, not for want of a place."""


def forecast(pool: Pool, choice: Choice, answer: float, settings: CostSettings) -> Forecast:
    """`answer`: how many tokens it is expected to have."""
    workers = pool.decode if choice.local else pool.prefill
    worker = next(worker for worker in workers if worker.card.id == choice.worker)
    speed = worker.prefill_tokens_s
    work = choice.tokens / speed
    if choice.local:
        work *= 1 + settings.disturbance * worker.sequences
    work += choice.borrow_s
    coming = sum(one.sequences for one in pool.prefill) / len(pool.decode)
    gaps = max(1.0, answer - 1)
    if choice.local:
        # Its prompt is computed between the tokens of those who run there: what that costs them is its own.
        tpot, sequences = _tpot(worker, coming, work, gaps, settings)
    else:
        tpot, sequences = min(_tpot(one, coming, 0.0, gaps, settings) for one in pool.decode)
    return Forecast(
        # Of a worker that has told nothing only what was sent there is known: no request waits for a guess.
        ahead_s=(worker.own_tokens if worker.report is None else worker.queued_tokens) / speed,
        work_s=work,
        tpot_s=tpot,
        sequences=sequences,
        tokens=choice.tokens,
        rate=sum(one.prefill_tokens_s for one in pool.prefill or pool.decode),
        elsewhere=choice.local and bool(pool.prefill),
        idle=_idle(worker) if choice.local else _any_idle(pool.prefill) and _any_idle(pool.decode),
    )


def _any_idle(workers: Iterable[Standing]) -> bool:
    return any(_idle(worker) for worker in workers)


def _idle(worker: Standing) -> bool:
    """As far as is known: of a worker that has told nothing, nothing was sent there."""
    return not (worker.sent if worker.report is None else worker.sequences or worker.queued_tokens)


def step_s(worker: Standing, batch: float, settings: CostSettings) -> float:
    """Of a decode step of so many sequences: as it was measured there with another number, and by what each
    one more or less takes among its like. A worker whose batch has ended is not as slow as that batch was."""
    step, measured = worker.decode_step_s, worker.decode_batch
    each = worker.decode_each_s
    if each is not None:
        return step + min(each, step / max(1.0, measured)) * (max(1.0, batch) - measured)
    if batch >= measured:
        return step * (1 + settings.crowding * (batch - measured))
    return step / (1 + settings.crowding * (measured - max(1.0, batch)))


def _tpot(
    worker: Standing, coming: float, work_s: float, gaps: float, settings: CostSettings
) -> tuple[float, float]:
    """A step of the batch it would join; longer in proportion where sequences wait for a place in it, and by
    its part of the prompts computed there."""
    sequences = coming + (len(worker.sent) if worker.report is None else worker.sequences)
    waiting = running = 0
    if worker.report is not None:
        waiting, running = worker.report.waiting, worker.report.running
    step = step_s(worker, sequences + 1, settings)
    queued = worker.own_tokens if worker.report is None else worker.queued_tokens
    stall = (queued / worker.prefill_tokens_s + work_s) / gaps
    return step * (1 + waiting / max(running, _SLOTS)) + stall, sequences


_PRIOR = 4
"""Outcomes that a new ratio counts as if they had been as forecast: the first real one moves it little."""
_MEMORY = 32
"""Outcomes after which an old one has lost most of its weight."""
_JUMP = math.log(2)
"""By how much one outcome may seem to differ from the rest: a stalled client moves nothing much."""
_BOUND = math.log(8)
_FLOOR_S = 1e-3
"""Added to both sides: between microseconds there is no ratio to learn."""
_SAFE = 1.2816
"""Standard deviations above the mean below which nine in ten of a normal distribution lie."""


class Ratio:
    """Actual over forecast, as learnt: in logarithms, with outliers cut, from 1 at the beginning."""

    __slots__ = ("_log", "_seen", "_variance", "errors")

    def __init__(self) -> None:
        self._log = self._variance = 0.0
        self._seen = 0
        self.errors = Histogram()
        """How far likely forecasts were off, seconds."""

    def likely(self, seconds: float) -> float:
        """The forecast, corrected by how it has come out on average of late."""
        return seconds * math.exp(self._log)

    def safe(self, seconds: float) -> float:
        """Corrected so that it is enough nine times out of ten: to promise by. From the spread of outcomes,
        not by counting those above: those who run in one batch come out late together, and counted one by
        one a single bad batch would look like many."""
        return seconds * math.exp(_bounded(self._log + _SAFE * math.sqrt(self._variance)))

    def learn(self, forecast_s: float, actual_s: float) -> None:
        """`forecast_s` as it was before any correction."""
        self.errors.add(abs(actual_s - self.likely(forecast_s)))
        actual = math.log((actual_s + _FLOOR_S) / (forecast_s + _FLOOR_S))
        self._seen = min(self._seen + 1, _MEMORY)
        surprise = max(-_JUMP, min(_JUMP, actual - self._log))
        weight = 1 / (self._seen + _PRIOR)
        self._log = _bounded(self._log + weight * surprise)
        # Mean and variance with older outcomes weighing less and less (West, "Updating Mean and Variance
        # Estimates: An Improved Method", 1979).
        self._variance = (1 - weight) * (self._variance + weight * surprise**2)

    def error(self) -> Percentiles | None:
        """None: nothing was forecast yet that has come to pass."""
        return Percentiles.of(self.errors)


def _bounded(log: float) -> float:
    return max(-_BOUND, min(_BOUND, log))
