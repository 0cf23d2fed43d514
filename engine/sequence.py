"""The state of one sequence: what is known of it, what is computed, which blocks hold it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from engine.words import Matcher, NewSequence
from fleet.block_hash import BlockHash, BlockNamer, HashKeys
from fleet.request import FinishReason, Sampling


class State(StrEnum):
    WAITING = "waiting"
    """No blocks, no slot. Never started, or preempted."""
    FILLING = "filling"
    """Blocks and a slot; KV is being brought from elsewhere."""
    RUNNING = "running"
    """Blocks and a slot; takes part in steps."""
    HELD = "held"
    """Computed, or ended while it was lent; only its blocks stay, for others to read."""
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Every sequence has tokens known and tokens computed; there are no other phases.

    What is asked for each token is a method: a property is called by C, which takes five times as long.

    The KV of `tokens[:computed]` is in `blocks`, a block table in order. What is left to compute is one
    token for a decode, more for a prompt, a chunk of a prompt, or after a preemption.
    """

    id: str
    tokens: list[int]
    """Prompt, then generated tokens."""
    prompt_length: int
    sampling: Sampling
    keys: HashKeys
    priority: int
    hold: bool
    lend: bool
    """Its final blocks are told before its prompt is whole; False when nobody reads them any more."""
    fill: bool
    """True until filled."""
    arrival: int
    """Number in order of arrival; never changes."""
    state: State = State.WAITING
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    names: list[BlockHash] = field(default_factory=list)
    """Of the full blocks of `tokens`, as far as they were needed."""
    namer: BlockNamer | None = None
    """Goes on behind `names`; None without a prefix cache."""
    registered: int = 0
    """Leading blocks that the prefix cache knows by name."""
    lent: int = 0
    """Leading blocks that were told as final: others may read them until it is released."""
    slot: int = -1
    preemptions: int = 0
    furthest: int = 0
    """Tokens that were computed before a preemption threw them away."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache before the first start, or brought from elsewhere."""
    scored: int = 0
    """Prompt tokens whose log-probabilities were told or are not wanted; the first one has none."""
    started: bool = False
    ahead: int = 0
    """Tokens behind `computed` that the steps in flight compute."""
    coming: int = 0
    """Tokens that they draw, of which nothing else is known yet."""
    penalised: bool = False
    """Its draws need its history."""
    matcher: Matcher | None = None
    """Has accepted every generated token, also while the sequence waits, preempted."""
    cancelled: bool = False
    """Cancelled in flight: ends when the step does."""
    table: tuple[int, ...] = ()
    """`blocks`, frozen."""

    @classmethod
    def of(cls, new: NewSequence, arrival: int) -> Sequence:
        s = new.sampling
        return cls(
            id=new.id,
            tokens=[*new.prompt, *new.generated],
            prompt_length=len(new.prompt),
            sampling=new.sampling,
            keys=new.keys,
            priority=new.priority,
            hold=new.hold,
            lend=new.lend,
            fill=new.fill,
            arrival=arrival,
            matcher=new.matcher,
            scored=1 if s.prompt_logprobs >= 0 and not (new.generated or new.fill) else len(new.prompt),
            penalised=bool(s.presence_penalty or s.frequency_penalty or s.repetition_penalty != 1.0),
        )

    @property
    def pending(self) -> int:
        """Tokens left to compute before the next one can be drawn; at least 1 while it lives."""
        return len(self.tokens) - self.computed

    def left(self) -> int:
        """The same, as it will be when the steps in flight have ended."""
        return len(self.tokens) + self.coming - self.computed - self.ahead

    @property
    def in_flight(self) -> bool:
        return self.ahead > 0

    def scoring(self) -> bool:
        """Its prompt has to be computed, cached or not: log-probabilities come of it."""
        return self.scored < self.prompt_length

    def blocks_changed(self) -> None:
        self.table = tuple(self.blocks)

    def ends_with(self, max_tokens: int) -> FinishReason | None:
        """Whether the newest token is the last one; `max_tokens` is the longest sequence of the model."""
        if self.matcher is not None and self.matcher.finished:
            return FinishReason.STOP
        drawn = len(self.tokens) - self.prompt_length
        if drawn > self.sampling.min_tokens and self.tokens[-1] in self.sampling.stop_token_ids:
            return FinishReason.STOP
        if drawn >= self.sampling.max_tokens or len(self.tokens) >= max_tokens:
            return FinishReason.LENGTH
        return None

    def goes_on(self, max_tokens: int) -> bool | None:
        """Whether more of it is to be computed when the steps in flight have ended, unless they draw a token
        that stops it; None: it cannot be said before that token is known."""
        if self.cancelled:
            return False
        if not self.coming:
            return True
        length = len(self.tokens) + self.coming
        if self.hold or length - self.prompt_length >= self.sampling.max_tokens or length >= max_tokens:
            return False
        return None if self.penalised or self.matcher is not None else True
