"""What a model asks of attention, and what each backend implements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from engine.step_plan import StepPlan

Prepared = TypeVar("Prepared")


@dataclass(frozen=True, slots=True)
class Look:
    """How one layer looks at its context."""

    scale: float
    """Of the scores, before the soft cap."""
    window: int | None = None
    """A token at position p sees keys of positions above p - window, itself among them; None: all."""
    soft_cap: float | None = None
    """Scores become cap * tanh(score / cap), as in Gemma 2; None: they stay."""


class Attention(Protocol[Prepared]):
    """A backend over one pool. Rows, in all of it, are those of the step's plan."""

    def prepare(self, plan: StepPlan) -> Prepared:
        """Once a step, before the first layer: all that its layers need, on the device."""
        ...

    def write(self, layer: int, keys_values: Tensor, prepared: Prepared) -> None:
        """Stores `[rows, 2 * kv_heads, head_dim]`, K heads first, where the plan says. Rows may be strided;
        the last two dimensions are contiguous."""
        ...

    def attend(self, layer: int, queries: Tensor, prepared: Prepared, look: Look) -> Tensor:
        """Softmax attention of `[rows, heads, head_dim]` over the KV up to each row's own: the same shape,
        contiguous. `queries` may be changed. The rows of this step were written before."""
        ...
