"""Feed-forwards: a dense one, and a mixture of experts.

Tokens are sorted by expert, so that each expert is one product. Experts are chosen by the largest of a
softmax over all (Shazeer et al., 2017; Jiang et al., 2024).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, linear

from engine.linear import Linear
from engine.models.architecture import Experts
from engine.weights import Checkpoint

Activation = Callable[[Tensor], Tensor]
"""`[n, 2 * width]` to `[n, width]`: an operation of `engine.ops.Ops`."""


class Dense:
    """Gate and up as one product, then down."""

    def __init__(self, gate_up: Linear, down: Linear, activate: Activation) -> None:
        self._gate_up, self._down, self._activate = gate_up, down, activate

    def __call__(self, rows: Tensor) -> Tensor:
        """`[n, hidden]` to the same."""
        return self._down(self._activate(self._gate_up(rows)))


class Mixture:
    """Each row is the weighted sum of what its chosen experts make of it."""

    def __init__(
        self, experts: Experts, checkpoint: Checkpoint, at: str, hidden: int, activate: Activation
    ) -> None:
        """`at`: the layer's place in the checkpoint."""
        names, module = experts.names, f"{at}.{experts.names.module}"
        self._experts = experts
        # Not among the matrices that int8 may narrow: a rounded choice of experts is another model.
        self._router = checkpoint.take(f"{module}.gate.weight", (experts.count, hidden))
        both, down = [], []
        for index in range(experts.count):
            expert = f"{module}.experts.{index}"
            both.append([f"{expert}.{names.gate}", f"{expert}.{names.up}"])
            down.append([f"{expert}.{names.down}"])
        inner = experts.inner
        self._of_each: Grouped | Looped
        if groups(checkpoint.device, checkpoint.dtype, hidden, inner):
            self._of_each = Grouped(
                checkpoint.stacked(both, (inner, inner), hidden),
                checkpoint.stacked(down, (hidden,), inner),
                activate,
            )
        else:
            self._of_each = Looped(
                [
                    Dense(
                        checkpoint.linear(above, (inner, inner), hidden),
                        checkpoint.linear(below, (hidden,), inner),
                        activate,
                    )
                    for above, below in zip(both, down, strict=True)
                ]
            )

    @property
    def capturable(self) -> bool:
        return isinstance(self._of_each, Grouped)

    def __call__(self, rows: Tensor) -> Tensor:
        """`[n, hidden]` to the same."""
        count, chosen = rows.shape[0], self._experts.chosen
        likely = torch.softmax(linear(rows, self._router).float(), dim=-1)
        weights, experts = likely.topk(chosen, dim=-1)
        if self._experts.normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        experts = experts.view(-1)
        order = experts.argsort(stable=True)
        made = self._of_each(rows[order // chosen], torch.bincount(experts, minlength=self._experts.count))
        back = torch.empty_like(made)
        back[order] = made
        mixed = back.view(count, chosen, -1).float() * weights.unsqueeze(-1)
        return mixed.sum(dim=1).to(rows.dtype)


class Looped:
    """One product after the other, for devices where each has a layout of its own."""

    def __init__(self, experts: list[Dense]) -> None:
        self._experts = experts

    def __call__(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows `[n, hidden]` sorted by expert, `counts[i]` of them for expert i, to the same."""
        made, first = [], 0
        for expert, count in zip(self._experts, counts.tolist(), strict=True):
            if count:
                made.append(expert(rows[first : first + count]))
                first += count
        return torch.cat(made)


class Grouped:
    """All experts in one launch, whose numbers of rows are read on the device: graphs can hold it."""

    def __init__(self, gate_up: Tensor, down: Tensor, activate: Activation) -> None:
        """`[experts, 2 * width, hidden]` and `[experts, hidden, width]`."""
        self._gate_up, self._down, self._activate = gate_up.mT, down.mT, activate

    def __call__(self, rows: Tensor, counts: Tensor) -> Tensor:
        ends = counts.cumsum(0).to(torch.int32)
        both: Tensor = grouped_mm(rows, self._gate_up, offs=ends)
        made: Tensor = grouped_mm(self._activate(both), self._down, offs=ends)
        return made


def groups(device: torch.device, dtype: torch.dtype, hidden: int, inner: int) -> bool:
    """Whether grouped products are there: on CUDA, in bfloat16, each row of a multiple of 16 bytes."""
    return device.type == "cuda" and dtype == torch.bfloat16 and hidden % 8 == 0 and inner % 8 == 0
