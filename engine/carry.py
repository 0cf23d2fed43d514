"""Tokens that go from one step to the next without the host: those drawn last, by slot, on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.settings import MOST_SLOTS


class Carry:
    """In order with the device's work: what one step keeps, the steps asked for later find."""

    def __init__(self, device: torch.device) -> None:
        self._drawn = torch.zeros(MOST_SLOTS, dtype=torch.int64, device=device)

    def into(self, tokens: Tensor, sources: Tensor) -> Tensor:
        """`tokens`, int64 `[rows]`, or what was drawn last in the slot that `sources` says; -1: in none."""
        return torch.where(sources >= 0, self._drawn[sources.clamp(min=0)], tokens)

    def keep(self, slots: Tensor, tokens: Tensor, vocabulary: int) -> None:
        """`tokens` were drawn in these slots. The last thing that a step does: one that fails and is computed
        again must find what it found the first time."""
        # Of logits that are no numbers a token is none of the model's; nobody is told it, but it is embedded.
        self._drawn.index_copy_(0, slots, tokens.clamp(0, vocabulary - 1))
