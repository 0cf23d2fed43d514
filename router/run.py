"""The seam between the ingress and the spine: one request set going, its events, its end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from fleet.errors import FleetError
from fleet.handoff import CancelReason
from fleet.ids import WorkerId
from fleet.objectives import Objectives
from fleet.request import FinishReason, Request, TokenLogprobs, Usage
from fleet.stages import Timeline


class RunToken(Struct, frozen=True):
    """The next token of the answer, end tokens included; never one twice, whatever failed behind it."""

    token: int
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """With the first token, where they were asked for: of each token of the prompt but the first."""


class RunEnd(Struct, frozen=True):
    """The last event of a run that ended well: STOP or LENGTH, or CANCELLED after `Run.stop`."""

    finish: FinishReason
    usage: Usage


@dataclass(frozen=True, slots=True)
class Terms:
    """On whose account a request runs, and what it was promised."""

    slo_class: str
    objectives: Objectives
    """Of the class, tightened by what the request asked for."""
    tenant: str = ""
    """From authentication; requests of one tenant share what is its part of the fleet."""
    weight: float = 1.0
    """Of the tenant, against others."""
    session: str = ""
    """The tenant's name for the conversation: where all else is equal, it goes where the last turn went."""
    pins: tuple[WorkerId, ...] = ()
    """Of the roles that these workers have, no others are taken while they can be; an operator's wish."""


class Run(Protocol):
    def __aiter__(self) -> AsyncIterator[RunToken | RunEnd]:
        """Tokens, then one `RunEnd`; or raises a `FleetError`. To be iterated once."""
        ...

    @property
    def more(self) -> bool:
        """Whether the next event is there already: then it comes without waiting, and may be shown together
        with the last one. False where that is not known."""
        ...

    async def stop(self, reason: CancelReason, because: FleetError | None = None) -> None:
        """End it now, wherever it is, on both legs; idempotent, also after its end. Always called last.

        `because`: how its HTTP request failed, be it by another answer. This one counts as failed by it, too,
        and raises it: no client gave it up."""
        ...


class Spine(Protocol):
    """What carries a request through the fleet; the ingress knows no more of it."""

    def start(self, request: Request, timeline: Timeline, terms: Terms | None = None) -> Run:
        """Begins to work when first iterated. Raises nothing. No `terms`: those of the default class."""
        ...

    def models(self) -> tuple[str, ...]:
        """Names that live workers serve."""
        ...

    def ready(self) -> str | None:
        """None if a request could be served now, end to end; else why not."""
        ...
