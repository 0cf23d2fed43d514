"""Who goes first, who gives way, and how a step is shared between prompts. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.sequence import Sequence

LOOK_AHEAD = 32
"""Waiting sequences considered in a step: bounds its cost, not the queue."""


def turn(sequence: Sequence) -> tuple[int, bool, int]:
    """Sort key of the queue, smallest first: priority, then the preempted, then the oldest.

    The preempted go before the never-started, or their place would be taken again and again.
    """
    return (-sequence.priority, sequence.preemptions == 0, sequence.arrival)


@dataclass(frozen=True, slots=True)
class Victim:
    sequence: Sequence
    why: str


def victim(running: Iterable[Sequence], *, needed: int, available: int) -> Victim:
    """The running sequence to be preempted: of the lowest priority the youngest, whose loss is smallest
    and who cannot keep an older one from finishing."""
    last = max(running, key=lambda s: (-s.priority, s.arrival))
    return Victim(
        last,
        f"preempt {last.id}: youngest of priority {last.priority}; "
        f"{needed} blocks needed, {available} available",
    )


def spare_blocks(growing: int, preemptions: int) -> int:
    """Blocks that must stay available beside a newly admitted sequence.

    One for each running sequence that will still grow, or the newcomer would be preempted at once.
    Doubled with each preemption after its second, so that it is preempted a bounded number of times
    (doubling at once costs more steps, in a smaller batch, than it saves recomputation).
    None when nothing else grows: then waiting could not help.
    """
    return growing << min(max(preemptions - 2, 0), 6)


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """The prompts of a step: one that must progress, and the others, shortest first."""

    first: Sequence
    others: tuple[Sequence, ...]
    share: int
    """Tokens the others may take before the first one has had its part."""


def prompt_order(prompts: list[tuple[Sequence, int]], budget: int, share: float) -> PromptOrder:
    """`prompts`: sequences, with the tokens each has left to compute; not empty.

    The first in turn gets most of every step, so that it ends within 1 / (1 - share) of its time alone
    and each sequence becomes the first some day. The shortest of the others use the rest, so that none of
    them waits for a long one to end.
    """
    first = min(prompts, key=lambda pair: turn(pair[0]))[0]
    others = sorted(
        (pair for pair in prompts if pair[0] is not first), key=lambda pair: (pair[1], turn(pair[0]))
    )
    return PromptOrder(first, tuple(sequence for sequence, _ in others), int(budget * share))
