"""What the engine is asked, what it says after each step, and what a step asks of a runner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from fleet.block_hash import HashKeys
from fleet.errors import FleetError
from fleet.events import KvEvent
from fleet.request import FinishReason, Sampling, TokenLogprobs


class Matcher(Protocol):
    """How far one sequence is in what its constraint allows; always that of all its tokens so far."""

    @property
    def vocabulary(self) -> int:
        """Tokens that `fill` speaks of; bits beyond are 0."""
        ...

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens that `fill` allows where the sequence may end."""
        ...

    @property
    def finished(self) -> bool:
        """An end token was accepted: nothing may follow."""
        ...

    def fill(self, mask: NDArray[np.int32], row: int) -> None:
        """Sets `mask[row]`, int32 `[ceil(vocabulary / 32)]`, to one bit a token, the lowest first: 1 where
        the token may come next. Never called once it is finished."""
        ...

    def accept(self, token: int) -> bool:
        """The next token was drawn; False, changing nothing, where the constraint does not allow it."""
        ...


class NewSequence(Struct, frozen=True):
    """A sequence to be continued. Roles are data: the flags below are all the engine knows of them."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    keys: HashKeys
    generated: tuple[int, ...] = ()
    """Tokens drawn already, elsewhere or before; never said again, counted in `max_tokens`."""
    priority: int = 0
    hold: bool = False
    """End after one drawn token and keep the blocks until `Engine.release(id)`: a prefill."""
    fill: bool = False
    """Reserve blocks, then wait for `Engine.filled`: KV is being brought from elsewhere. Without
    `generated`, the first token may be told with it: the prompt is still being computed elsewhere."""
    matcher: Matcher | None = None
    """What the generated tokens must form; has accepted `generated`, and belongs to this sequence alone."""
    lend: bool = False
    """With `hold`: tell its final blocks as `Ready` while more of the prompt is left to compute. Once told
    they stay until `Engine.release(id)`, however the sequence ends."""


class Reservation(Struct, frozen=True):
    """Blocks of a `fill` sequence. `blocks[:cached]` hold their KV already; the rest wait to be filled."""

    id: str
    blocks: tuple[int, ...]
    """Block table: covers the prompt and all generated tokens but the last, whose KV is not computed yet."""
    cached: int
    tokens: int
    """Tokens that may be filled: all that are known but the last. Of a prompt alone, all of it, when the
    first token comes with it."""


class Drawn(Struct, frozen=True):
    """One new token of a sequence."""

    id: str
    token: int
    logprobs: TokenLogprobs | None = None


class Scored(Struct, frozen=True):
    """Log-probabilities of prompt tokens from position `start` on; each position is told once, in order."""

    id: str
    start: int
    logprobs: tuple[TokenLogprobs, ...]


class Ready(Struct, frozen=True):
    """A `lend` sequence whose prompt is not whole yet: its blocks so far that never change any more."""

    id: str
    blocks: tuple[int, ...]
    """The first of its block table, all of them full; the next time there are more, never others."""


class Held(Struct, frozen=True):
    """A `hold` sequence is computed: its blocks stay until released. Its `Drawn` is in the same step."""

    id: str
    blocks: tuple[int, ...]
    tokens: int
    """Tokens with KV in them: the prompt."""
    cached_tokens: int
    finish: FinishReason | None
    """Set when the drawn token ends the sequence anyway."""


class Finished(Struct, frozen=True):
    id: str
    finish: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    error: str = ""
    """Name in `fleet.errors.ERRORS` when FAILED."""
    message: str = ""


class StepReport(Struct, frozen=True):
    """All that happened in one step, in order: started, scored, drawn, ready, held, finished; and what
    changed in the cache."""

    started: tuple[str, ...] = ()
    """Sequences whose first tokens were scheduled in this step."""
    drawn: tuple[Drawn, ...] = ()
    held: tuple[Held, ...] = ()
    finished: tuple[Finished, ...] = ()
    events: tuple[KvEvent, ...] = ()
    scored: tuple[Scored, ...] = ()
    ready: tuple[Ready, ...] = ()


class Chunk(Struct, frozen=True):
    """One sequence's part of a step: tokens `[start, start + len(tokens))` are computed.

    The runner writes their KV to the blocks of `blocks` and reads all KV before them.
    """

    slot: int
    """Small number that stays with the sequence while it is in the batch: the runner may keep state by it."""
    tokens: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]
    """Block table, in order; covers `start + len(tokens)` tokens at least."""
    draw: bool
    """Whether the chunk ends at the last known token, so that the next one is to be drawn."""
    sampling: Sampling
    history: tuple[int, ...] = ()
    """Prompt and generated tokens; given only where penalties need them."""
    prompt_length: int = 0
    """How many of `history` are prompt. Position of the token drawn is `start + len(tokens)`."""
    targets: tuple[int, ...] = ()
    """Prompt tokens whose log-probabilities are wanted: the first follows the first of `tokens`."""
    matcher: Matcher | None = None
    """Given where a draw has to obey it. The runner asks it, and changes nothing in it."""
    carried: bool = False
    """Its one token is the one that was drawn last in this slot, in the step before, which only the runner
    knows yet: `tokens` is a 0 in its place."""


class Batch(Struct, frozen=True):
    """One step: decodes and prompt chunks together, at most one chunk a sequence."""

    chunks: tuple[Chunk, ...]


class BatchResult(Struct, frozen=True):
    """One entry a chunk; None where nothing was to be drawn, or where a matcher allows no token at all."""

    tokens: tuple[int | None, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """Empty when no chunk asked."""
    scores: tuple[tuple[TokenLogprobs, ...], ...] = ()
    """One entry a chunk, as long as its `targets`; empty when no chunk has any."""


class CancelledSequence(FleetError):
    """A reservation will never be: its sequence was cancelled while it waited."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """An engine's state of work. None is unknown, never zero."""

    running: int
    """Sequences in the batch."""
    waiting: int
    """Sequences queued, or with blocks that are being filled."""
    queued_tokens: int
    """Tokens accepted and not computed yet, decodes not counted."""
    blocks_total: int
    blocks_free: int
    """Free or evictable at once."""
    prefill_tokens_s: float | None
    """Prompt tokens a second in recent steps that had any."""
    decode_step_s: float | None
    """Time of a recent step of decodes only."""
    decode_batch: float | None
    """Sequences in those steps, on average."""
    stalled_s: float
    """Seconds since a step was last finished while one was owed: one is under way, or work waits for nothing
    that others have. 0 when none is."""
    counters: dict[str, int]
    """Totals since start; see `engine.scheduler.Counters`."""
