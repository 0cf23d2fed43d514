"""The messages of one hand-off, in the order in which they flow between router and workers.

`PrefillJob → Prefilled → DecodeJob → Token… → Ended`, with `Cancel`, `Release` and `Renew` at any time.
Of a long prompt the KV goes over while it is computed:
`PrefillJob → Lent → DecodeJob → Prefilled → Proceed → Token… → Ended`.
A stream number names a request on one session; the router chooses it and never uses it twice.
Durations cross the wire, never instants.

What is made for each token or request is a `Struct`: frozen like a dataclass, made in a tenth of its time.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from msgspec import Struct

from fleet.ids import Incarnation, LeaseId, WorkerId
from fleet.request import FinishReason, Request, TokenLogprobs, Usage


@dataclass(frozen=True, slots=True)
class KvTicket:
    """Where the KV of a prompt waits, and on what terms. The router carries it, unread."""

    worker: WorkerId
    incarnation: Incarnation
    address: str
    """Of the source's transfer layer, with its scheme: `shm:…`, `ucx:HOST:PORT`, several joined by `,`."""
    lease: LeaseId
    fingerprint: str
    """`Fingerprint.digest()` of the source."""
    tokens: int
    """Tokens whose KV is in the leased blocks; the last block may be part full."""
    lease_s: float
    """Seconds the lease had left when the ticket was written."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A worker that is believed to cache the beginning of a sequence: a hint, and no promise. Whoever gets it
    asks there for the blocks by their whole names, and computes what does not come."""

    worker: WorkerId
    incarnation: Incarnation
    address: str
    """Of its transfer layer; see `KvTicket.address`."""
    fingerprint: str
    blocks: int
    """Leading full blocks of the sequence that are there."""
    compute_s: float
    """What it is expected to take to compute those that are lacking; bringing them must not take longer."""


class PrefillJob(Struct, frozen=True):
    """Compute the prompt, draw one token, keep the KV under a lease."""

    stream: int
    request: Request
    lend: bool = False
    """Whether to say `Lent` as soon as a part of the KV is final and more of the prompt is left."""
    holder: Holder | None = None
    """Whom to ask for the beginning, instead of computing it."""


class DecodeJob(Struct, frozen=True):
    """Continue a request whose first tokens are `generated`. Without a ticket, compute all KV here.

    With a ticket and no tokens the prompt is still being computed: reserve room, bring its KV as it becomes
    final, and go on when `Proceed` says the first tokens.
    """

    stream: int
    request: Request
    generated: tuple[int, ...] = ()
    ticket: KvTicket | None = None
    holder: Holder | None = None
    """Without a ticket: whom to ask for the beginning, instead of computing it."""


class Proceed(Struct, frozen=True):
    """The first tokens of a stream whose `DecodeJob` came without any: the prompt is computed."""

    stream: int
    generated: tuple[int, ...]


class CancelReason(StrEnum):
    CLIENT = "client"
    """The client went away."""
    STOP_STRING = "stop_string"
    """The text reached a stop string, which only the router sees."""
    DEADLINE = "deadline"
    MOVED = "moved"
    """The request goes on elsewhere."""


class Cancel(Struct, frozen=True):
    """End a stream now, wherever it is; idempotent, answered by `Ended` if the stream still ran."""

    stream: int
    reason: CancelReason


class Release(Struct, frozen=True):
    """The leased KV is no longer wanted; idempotent. Said to prefill on every terminal path."""

    lease: LeaseId


class Renew(Struct, frozen=True):
    """The leased KV is still wanted: the router waits for a decode worker that can take it."""

    lease: LeaseId


ToWorker = PrefillJob | DecodeJob | Proceed | Cancel | Release | Renew


class Started(Struct, frozen=True):
    """The first tokens of a stream were scheduled; or its KV came. Feeds the timeline."""

    stream: int
    stage: str
    """A `Stage` value: prefill_started, pull_started, pull_ended."""


class Scored(Struct, frozen=True):
    """Log-probabilities of prompt tokens, as a step computed them: said before the first token."""

    stream: int
    start: int
    """Position in the prompt of the first of them; the token at 0 has none."""
    logprobs: tuple[TokenLogprobs, ...]


class Lent(Struct, frozen=True):
    """A part of the prompt's KV is final and can be pulled, and more will be; once a stream at most.

    The ticket is that of the `Prefilled` to come, unless nobody reads the KV any more by then. Until
    then its lease lasts as long as the stream.
    """

    stream: int
    ticket: KvTicket


class Prefilled(Struct, frozen=True):
    """The prompt is computed; the first token; where its KV waits (None: the request ended with it).

    The last word on a prefill stream that goes well: no `Ended` follows.
    """

    stream: int
    token: int
    logprobs: TokenLogprobs | None
    ticket: KvTicket | None
    cached_tokens: int
    finish: FinishReason | None = None
    """Set when the first token was also the last."""


class Token(Struct, frozen=True):
    stream: int
    token: int
    logprobs: TokenLogprobs | None = None


class Ended(Struct, frozen=True):
    """The last word on a stream; exactly one each, unless the session itself broke."""

    stream: int
    finish: FinishReason
    usage: Usage | None = None
    error: str = ""
    """Name in `fleet.errors.ERRORS` when finish is FAILED."""
    message: str = ""
    retry_after_s: float = 0.0
    """Seconds after which to come back, where the error is `Overloaded`."""


class Frame(Struct, frozen=True):
    """All that one engine step has to say to one router; sent as one message.

    Order within: started, scored, lent, prefilled, tokens, ended.
    """

    started: tuple[Started, ...] = ()
    prefilled: tuple[Prefilled, ...] = ()
    tokens: tuple[Token, ...] = ()
    ended: tuple[Ended, ...] = ()
    scored: tuple[Scored, ...] = ()
    lent: tuple[Lent, ...] = ()
