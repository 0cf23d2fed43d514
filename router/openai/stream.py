"""One HTTP request's answers on their way: runs in, text out, whole or frame by frame."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fleet.errors import BadConstraint, FleetError, Internal, Unavailable
from fleet.handoff import CancelReason
from fleet.request import FinishReason, Request, TokenLogprobs, Usage
from fleet.stages import Stage, Timeline
from router.openai.errors import defect, error_event
from router.run import Run, RunEnd
from router.text.answer import Answer, LoggedToken

DONE = b"data: [DONE]\n\n"
_TOGETHER = 64
"""Tokens shown without a flush: what a slow client has not taken must not be in one piece."""


@dataclass(slots=True)
class Choice:
    """One answer: of prompt `prompt`, at place `index` of the response."""

    index: int
    prompt: int
    first: bool
    """Whether it is the first answer to its prompt: what the prompt cost is counted there."""
    request: Request
    answer: Answer
    constrained_by: str = ""
    """The field of the body that says what the answer must form."""
    echo: str = ""
    """Text of the prompt, where it is to stand before the answer."""
    run: Run | None = None
    timeline: Timeline | None = None
    finish: str = ""
    usage: Usage | None = None
    text: list[str] = field(default_factory=list)
    """What was let through, where the answer is sent as a whole."""
    logged: list[LoggedToken] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of each token of the prompt but the first, where they were asked for."""
    silent: bool = False
    """Only the prompt is wanted: the one token that its computation draws is no answer."""


class Layout(Protocol):
    """How an endpoint writes answers as JSON. Frames are whole server-sent events."""

    def opening(self, choice: Choice) -> bytes:
        """What comes before the first text; may be empty."""
        ...

    def delta(self, choice: Choice, text: str, logged: Sequence[LoggedToken]) -> bytes: ...

    def closing(self, choice: Choice, logged: Sequence[LoggedToken]) -> bytes:
        """The frame that carries the finish reason, and no text."""
        ...

    def usage(self, usage: Usage) -> bytes: ...

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes: ...


@dataclass(slots=True)
class Job:
    """What a body asks for, checked and in tokens."""

    layout: Layout
    choices: list[Choice]
    stream: bool
    include_usage: bool
    done: bytes = DONE
    """What a stream that went well ends with."""
    failed: Callable[[FleetError], bytes] = error_event
    """What one that failed after its beginning ends with."""

    def usage(self) -> Usage:
        """Of the whole response: each prompt counted once."""
        prompt = completion = cached = 0
        for choice in self.choices:
            if choice.usage is None:
                continue
            completion += choice.usage.completion_tokens
            if choice.first:
                prompt += choice.usage.prompt_tokens
                cached += choice.usage.cached_tokens
        return Usage(prompt, completion, cached)

    def consumed(self) -> int:
        """Tokens of prompts and answers, also of answers that were left before their end."""
        return sum(
            choice.answer.tokens + (len(choice.request.prompt) if choice.first else 0)
            for choice in self.choices
        )


Show = Callable[[Choice, str, list[LoggedToken]], None]
"""Called at the first event, then with each text that is not empty, and last when `finish` is set."""
Flush = Callable[[], Awaitable[None]]
"""Called when what was shown is not to wait any longer: nothing more is there yet. Not after the end."""


async def follow(choice: Choice, show: Show, flush: Flush, now: Callable[[], float]) -> None:
    """One run to its end, all of whose text is shown. Sets `finish` and `usage`; raises FleetError."""
    run, answer = choice.run, choice.answer
    assert run is not None
    wants_logprobs = choice.request.sampling.logprobs >= 0
    opened = over = False
    waiting = 0
    """Tokens since the last flush."""
    events = aiter(run)
    try:
        async for event in events:
            if isinstance(event, RunEnd):
                _end(choice, event, show)
                if choice.timeline is not None:
                    choice.timeline.mark(Stage.ENDED, now())
                return
            if over:
                continue  # on its way when the run was stopped
            if wants_logprobs and event.logprobs is None:
                raise Internal("the worker sent no log-probabilities, which were asked for")
            if not opened and choice.request.sampling.prompt_logprobs >= 0:
                if len(event.prompt_logprobs) != len(choice.request.prompt) - 1:
                    raise Internal("the worker did not send all log-probabilities of the prompt")
                choice.prompt_logprobs = event.prompt_logprobs
            text = "" if choice.silent else answer.feed(event.token, event.logprobs)
            if text or not opened:
                opened = True
                show(choice, text, _take(answer, text))
            over = answer.matched
            if over:
                await run.stop(CancelReason.STOP_STRING)
            waiting += 1
            if waiting >= _TOGETHER or not run.more:
                waiting = 0
                await flush()
        raise Internal("the run ended without a word")
    except BadConstraint as error:
        # The worker knows no body.
        raise BadConstraint(error.message, param=choice.constrained_by) from error
    except Exception as error:
        # Where it is found here that the answer is none, the run does not know yet.
        await run.stop(CancelReason.CLIENT, _said(error))
        raise
    finally:
        # Left in the middle, a generator would clean up whenever it is collected.
        if isinstance(events, AsyncGenerator):
            await events.aclose()


def _take(answer: Answer, text: str) -> list[LoggedToken]:
    """Log-probabilities travel with the text that makes them visible."""
    if not text or not answer.logged:
        return []
    logged, answer.logged = answer.logged, []
    return logged


def _end(choice: Choice, event: RunEnd, show: Show) -> None:
    answer = choice.answer
    if answer.matched:
        choice.finish = "stop"
        show(choice, "", [])
    elif event.finish in (FinishReason.STOP, FinishReason.LENGTH):
        rest = answer.end(event.finish)
        choice.finish = "stop" if answer.matched else "length" if choice.silent else str(event.finish)
        show(choice, rest, _take(answer, rest))
    elif event.finish is FinishReason.CANCELLED:
        raise Unavailable("the server stopped this request before it was done; send it again")
    else:
        raise Internal(f"the run ended as {event.finish}")
    choice.usage = Usage(event.usage.prompt_tokens, answer.tokens, event.usage.cached_tokens)


async def follow_all(choices: Sequence[Choice], show: Show, flush: Flush, now: Callable[[], float]) -> None:
    """All runs at once. The first failure ends the others and is raised."""
    if len(choices) == 1:
        await follow(choices[0], show, flush, now)
        return

    async def one_of_several(choice: Choice) -> None:
        try:
            await follow(choice, show, flush, now)
        except Exception as error:
            for other in choices:
                if other.run is not None:
                    await other.run.stop(CancelReason.CLIENT, _said(error))
            raise
        await flush()

    try:
        async with asyncio.TaskGroup() as group:
            for choice in choices:
                group.create_task(one_of_several(choice))
    except BaseExceptionGroup as failures:
        known, unknown = failures.split(FleetError)
        if unknown is not None or known is None:
            raise
        raise _first(known) from failures


def _said(error: Exception) -> FleetError:
    """What it is to those who count it: a defect is a failure of ours, and no client's wish."""
    return error if isinstance(error, FleetError) else defect()


def _first(group: BaseExceptionGroup[FleetError]) -> FleetError:
    for failure in group.exceptions:
        return _first(failure) if isinstance(failure, BaseExceptionGroup) else failure
    return defect()
