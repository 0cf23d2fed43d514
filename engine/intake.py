"""From a job to a sequence in the engine, where something takes its time before; the same for every role."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine

from msgspec.structs import replace

from engine.loop import Engine
from engine.words import NewSequence
from fleet.chassis import Stream
from fleet.errors import FleetError, Internal
from fleet.request import FinishReason, Usage

log = logging.getLogger(__name__)


class Intake:
    """Streams whose sequence is not in the engine yet: a constraint is being compiled, or KV is brought."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, stream: Stream, new: NewSequence) -> None:
        """Queues it: at once, or when its constraint is compiled. Raises like `Engine.add`, or says the
        stream's last word."""
        if stream.job.request.constraint is None:
            self._engine.add(new)
        else:
            self.start(stream, self._add_constrained(stream, new))

    async def constrained(self, stream: Stream, new: NewSequence) -> NewSequence | None:
        """With the matcher its request asks for. None: what was generated before is whole already, and the
        stream has been told so. Raises BadRequest when the constraint cannot be compiled."""
        constraint = stream.job.request.constraint
        if constraint is None:
            return new
        matcher = await self._engine.matcher(constraint, new.generated)
        if matcher.finished:
            stream.finished(FinishReason.STOP, Usage(len(new.prompt), len(new.generated)))
            return None
        return replace(new, matcher=matcher)

    async def _add_constrained(self, stream: Stream, new: NewSequence) -> None:
        if (ready := await self.constrained(stream, new)) is not None:
            self._engine.add(ready)

    def start(self, stream: Stream, work: Coroutine[None, None, None]) -> None:
        """Until it ends, the stream counts. A FleetError is the stream's end; so is a defect, and nothing
        else ends with it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[stream.id] = task
        task.add_done_callback(lambda done: self._ended(stream, done))

    def _ended(self, stream: Stream, task: asyncio.Task[None]) -> None:
        del self._tasks[stream.id]
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, FleetError):
            id = stream.job.request.id
            log.error("request %s: taking it on broke", id, exc_info=error, extra={"request": id})
            self._engine.cancel(stream.id)
            error = Internal(f"taking the request on broke: {type(error).__name__}")
        stream.failed(error)

    def cancel(self, stream: Stream) -> None:
        """In any phase, also in the engine."""
        self._engine.cancel(stream.id)
        if (task := self._tasks.get(stream.id)) is not None:
            task.cancel()
