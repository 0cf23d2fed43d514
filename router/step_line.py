"""How long a decode step takes by the size of its batch, as workers of one role report it. Pure.

A line by least squares, in which older reports weigh less and less. One worker that reports one batch tells
nothing of other sizes: then there is no line yet.
"""

from __future__ import annotations

_WEIGHT = 0.05
"""Of one report."""
_SPREAD = 0.2
"""Least spread of the batches that were seen, as a share of their mean, for a line through them."""


class StepLine:
    """Of all workers of one role and model together."""

    __slots__ = ("_batch", "_both", "_seen", "_square", "_step")

    def __init__(self) -> None:
        self._batch = self._step = self._square = self._both = self._seen = 0.0
        """Means of the batch, the step, the batch squared and their product; how much they rest on."""

    def learn(self, batch: float, step_s: float) -> None:
        self._seen = (1 - _WEIGHT) * self._seen + _WEIGHT
        weight = _WEIGHT / self._seen
        self._batch += weight * (batch - self._batch)
        self._step += weight * (step_s - self._step)
        self._square += weight * (batch * batch - self._square)
        self._both += weight * (batch * step_s - self._both)

    @property
    def each_s(self) -> float | None:
        """Seconds by which each sequence more makes a step longer. None: not known yet."""
        variance = self._square - self._batch**2
        if not self._seen or variance <= (_SPREAD * self._batch) ** 2:
            return None
        each = (self._both - self._batch * self._step) / variance
        return min(max(0.0, each), self._step / self._batch)
