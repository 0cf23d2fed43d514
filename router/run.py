"""The seam between the ingress and the spine: one request set going, its events, its end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from fleet.handoff import CancelReason
from fleet.request import FinishReason, Request, TokenLogprobs, Usage
from fleet.stages import Timeline


@dataclass(frozen=True, slots=True)
class RunToken:
    """The next token of the answer, end tokens included; never one twice, whatever failed behind it."""

    token: int
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """With the first token, where they were asked for: of each token of the prompt but the first."""


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The last event of a run that ended well: STOP or LENGTH, or CANCELLED after `Run.stop`."""

    finish: FinishReason
    usage: Usage


class Run(Protocol):
    def __aiter__(self) -> AsyncIterator[RunToken | RunEnd]:
        """Tokens, then one `RunEnd`; or raises a `FleetError`. To be iterated once."""
        ...

    async def stop(self, reason: CancelReason) -> None:
        """End it now, wherever it is, on both legs; idempotent, also after its end. Always called last."""
        ...


class Spine(Protocol):
    """What carries a request through the fleet; the ingress knows no more of it."""

    def start(self, request: Request, timeline: Timeline) -> Run:
        """Begins to work when first iterated. Raises nothing."""
        ...

    def models(self) -> tuple[str, ...]:
        """Names that live workers serve."""
        ...

    def ready(self) -> str | None:
        """None if a request could be served now, end to end; else why not."""
        ...
