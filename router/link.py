"""A link: one session with one life of a worker, kept open; its frames dealt out to the requests' streams."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable

from msgspec.structs import replace

from fleet.errors import FleetError, WorkerLost
from fleet.handoff import (
    Cancel,
    CancelReason,
    DecodeJob,
    Ended,
    Frame,
    Lent,
    Prefilled,
    PrefillJob,
    Proceed,
    Release,
    Renew,
    Scored,
    Started,
    Token,
    ToWorker,
)
from fleet.ids import LeaseId
from fleet.member import WorkerCard
from fleet.request import FinishReason
from fleet.wire import Session, Wire
from router.roster import LinkState
from router.settings import WatchSettings

log = logging.getLogger(__name__)

Said = Started | Scored | Lent | Prefilled | Token | Ended
_LAST = (Prefilled, Ended)
_GOOD = (FinishReason.STOP, FinishReason.LENGTH)


class Stream:
    """What one worker says about one request, in order; ends after `Prefilled` or `Ended`.

    To be read by one reader. A loss is raised after all that was said before it has been read.
    """

    __slots__ = (
        "_loop", "_said", "_urgent", "_waiter", "error", "heard_at", "number", "on_end", "over", "spoke",
    )  # fmt: skip

    def __init__(self, number: int) -> None:
        self._loop = asyncio.get_running_loop()
        self.number = number
        self.heard_at = self._loop.time()
        """When the worker last said anything about it; at first, when it was asked."""
        self.spoke = False
        """Whether a token came."""
        self.over = False
        """The worker has had its last word, or is not there to have it."""
        self.error: Exception | None = None
        """Why it is not there."""
        self.on_end: Callable[[], None] | None = None
        """Called when it ends, for whoever does not read it yet."""
        self._said: deque[Said] = deque()
        self._urgent: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        """Who waited last; done when there was something for it, or it has gone."""

    def put(self, said: Said, now: float) -> None:
        self.heard_at = now
        self._said.append(said)
        if isinstance(said, Token):
            self.spoke = True
        elif isinstance(said, _LAST):
            self.over = True
        self._wake()
        if self.over and self.on_end is not None:
            self.on_end()

    def fail(self, error: Exception) -> None:
        """The reader gets it when it has read the rest; the first error stays."""
        if self.error is None:
            self.error = error
            self._wake()
            if self.on_end is not None:
                self.on_end()

    def interrupt(self, error: Exception) -> None:
        """The reader gets it next; what it has not read it never will."""
        self._urgent = error
        self._wake()

    def unread(self) -> tuple[Said, ...]:
        """Takes out what the reader has not read."""
        unread = tuple(self._said)
        self._said.clear()
        return unread

    @property
    def more(self) -> bool:
        """Whether a token or a good end is there to be read next."""
        if not self._said or self._urgent is not None:
            return False
        said = self._said[0]
        return isinstance(said, Token) or (isinstance(said, Ended) and said.finish in _GOOD)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Said:
        while self._urgent is not None or not self._said:
            if (error := self._urgent or self.error) is not None:
                raise error
            if self.over:
                raise StopAsyncIteration
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._said.popleft()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class Link:
    """`run` keeps the session; the rest is called by the flow, never waits, and works on what is open now."""

    def __init__(
        self,
        card: WorkerCard,
        wire: Wire,
        settings: WatchSettings,
        moved: Callable[[Link, LinkState, str], None],
    ) -> None:
        self.card = card
        self.state = LinkState.OPENING
        self._wire = wire
        self._settings = settings
        self._moved = moved
        self._session: Session | None = None
        self._streams: dict[int, Stream] = {}
        self._count = 0
        self._owed: deque[LeaseId] = deque(maxlen=4096)
        """Leases to release when the session is open again."""

    def __len__(self) -> int:
        """Streams under way."""
        return len(self._streams)

    async def run(self) -> None:
        """Opens the session, and again when it is lost, with growing pauses; until cancelled."""
        loop = asyncio.get_running_loop()
        pause = self._settings.retry_min_s
        try:
            while True:
                try:
                    async with asyncio.timeout(self._settings.open_timeout_s):
                        session = await self._wire.open(self.card.sessions)
                except (FleetError, TimeoutError) as error:
                    self._move(LinkState.LOST, f"not reached at {self.card.sessions}: {error or 'no answer'}")
                else:
                    pause = self._settings.retry_min_s
                    try:
                        self._begin(session)
                        async for frame in session:
                            self._take(frame, loop.time())
                        self._lose("the session ended")
                    except FleetError as error:
                        self._lose(error.message)
                    finally:
                        self._session = None
                        await session.close()
                await asyncio.sleep(pause)
                pause = min(2 * pause, self._settings.retry_max_s)
        finally:
            self._lose("this router let go of it", asked_for=True)

    def dispatch(self, job: PrefillJob | DecodeJob) -> Stream:
        """Sends a job under a stream number of its own (`job.stream` is replaced).

        Raises `WorkerLost` when no session is open.
        """
        self._count += 1
        self._send(replace(job, stream=self._count))
        stream = Stream(self._count)
        self._streams[stream.number] = stream
        return stream

    def drop(self, stream: Stream, reason: CancelReason) -> None:
        """Nobody reads it any more: cancelled if the worker still has it; a lease that came unread is let go.

        Idempotent.
        """
        for said in stream.unread():
            if isinstance(said, Prefilled) and said.ticket is not None:
                self.release(said.ticket.lease)
        if self._streams.pop(stream.number, None) is not None and not stream.over:
            stream.over = True
            with contextlib.suppress(WorkerLost):  # A worker cancels all that a lost session held.
                self._send(Cancel(stream.number, reason))

    def proceed(self, stream: Stream, generated: tuple[int, ...]) -> None:
        """The first tokens of a job that was dispatched without. Raises `WorkerLost` when its session is
        gone."""
        if self._streams.get(stream.number) is not stream:
            raise WorkerLost(f"worker {self.card.id} does not have the request any more")
        self._send(Proceed(stream.number, generated))

    def renew(self, lease: LeaseId) -> None:
        """Raises `WorkerLost` when no session is open."""
        self._send(Renew(lease))

    def release(self, lease: LeaseId) -> None:
        """Now, or when the session is open again."""
        try:
            self._send(Release(lease))
        except WorkerLost:
            self._owed.append(lease)

    def _send(self, message: ToWorker) -> None:
        if self._session is None:
            raise WorkerLost(f"no session with worker {self.card.id}")
        self._session.send(message)

    def _begin(self, session: Session) -> None:
        self._session = session
        while self._owed:
            session.send(Release(self._owed.popleft()))
        self._move(LinkState.UP, "session open")

    def _take(self, frame: Frame, now: float) -> None:
        streams = self._streams
        for started in frame.started:
            if (stream := streams.get(started.stream)) is not None:
                stream.put(started, now)
        for scored in frame.scored:
            if (stream := streams.get(scored.stream)) is not None:
                stream.put(scored, now)
        for lent in frame.lent:
            if (stream := streams.get(lent.stream)) is not None:
                stream.put(lent, now)
        for prefilled in frame.prefilled:
            if (stream := streams.pop(prefilled.stream, None)) is not None:
                stream.put(prefilled, now)
            elif prefilled.ticket is not None:
                self.release(prefilled.ticket.lease)  # It crossed our Cancel.
        for token in frame.tokens:
            if (stream := streams.get(token.stream)) is not None:
                stream.put(token, now)
        for ended in frame.ended:
            if (stream := streams.pop(ended.stream, None)) is not None:
                stream.put(ended, now)

    def _lose(self, why: str, asked_for: bool = False) -> None:
        self._session = None
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.over = True
            stream.fail(WorkerLost(f"worker {self.card.id} was lost: {why}"))
        self._move(LinkState.LOST, why, asked_for)

    def _move(self, state: LinkState, why: str, asked_for: bool = False) -> None:
        if state is not self.state:
            log.log(
                logging.INFO if state is LinkState.UP or asked_for else logging.WARNING,
                "link to %s is %s: %s", self.card.id, state, why,
            )  # fmt: skip
            self.state = state
            self._moved(self, state, why)
