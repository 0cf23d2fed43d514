"""Virtual time: an event loop whose clock jumps to the next timer when nothing is ready to run.

Hours of a fleet's life pass in seconds, and every run takes the same steps in the same order: ready
callbacks run first in, first out; timers by time, and those of equal time in the order in which they were
made. There is no I/O and there are no threads: `run_in_executor` (so `asyncio.to_thread`) runs inline.

Several processes can be played on one loop (`Process`): each with its own clock, each can be stopped
between any two of its callbacks, as by SIGSTOP, and goes on later or never.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from asyncio.base_events import BaseEventLoop
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Executor
from contextvars import Context, ContextVar, copy_context
from functools import partial
from itertools import count
from typing import Any, TypeVar, TypeVarTuple, Unpack

from msgspec import Struct

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_SPIN_LIMIT = 200_000
"""Turns of the loop without the clock moving, after which something polls without ever sleeping."""


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set: what the tasks wait for can never happen."""


class HorizonReached(RuntimeError):
    """The coroutine had not ended when virtual time reached the horizon."""


class _OrderedTask(asyncio.Task[Any]):
    """Hashes by age. `asyncio` cancels the tasks of a group in the order of a set, and the default
    hash is an address: it would differ from run to run."""

    _ages = count()

    def __init__(self, coro: Coroutine[Any, Any, Any] | Generator[Any, None, Any], **keywords: Any) -> None:
        loop = keywords["loop"]
        self._age = loop.next_age() if isinstance(loop, VirtualTimeLoop) else next(self._ages)
        context: Context | None = keywords.get("context")
        self.process = _PROCESS.get(None) if context is None else context.get(_PROCESS)
        super().__init__(coro, **keywords)

    def __hash__(self) -> int:
        return self._age


class Process:
    """What runs as one process of those that share a loop: all that is started in its context, and all that
    this starts. Its clock is `offset_s` ahead of the loop's."""

    def __init__(self, name: str, offset_s: float = 0.0) -> None:
        self.name = name
        self.offset_s = offset_s
        self.context = Context()
        self.context.run(_PROCESS.set, self)
        self.held: deque[_Soon | _Timer] | None = None
        """What waits to run while it is stopped; None: it runs."""

    def true(self, when: float) -> float:
        """When its clock says `when` on the loop's clock; rounded so that it has said so by then."""
        if not self.offset_s:
            return when
        due = when - self.offset_s
        while due + self.offset_s < when:
            due = math.nextafter(due, math.inf)
        return due

    @property
    def stopped(self) -> bool:
        return self.held is not None

    def stop(self) -> None:
        """As SIGSTOP: nothing of it runs, its timers fall due and wait. What it sent before is on its way."""
        if self.held is None:
            self.held = deque()

    def resume(self) -> None:
        """As SIGCONT: what waited runs, in order."""
        held, self.held = self.held, None
        if held:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualTimeLoop), "only a virtual clock can hold a process"
            loop.put_back(held)

    def call(self, function: Callable[[Unpack[Ts]], T], *args: *Ts) -> T:
        """Calls it now, as this process."""
        return self.context.copy().run(function, *args)

    def start(self, coro: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task of this process."""
        return asyncio.get_running_loop().create_task(coro, context=self.context.copy())

    def tasks(self) -> list[asyncio.Task[Any]]:
        """Those of it that have not ended."""
        tasks = (task for task in asyncio.all_tasks() if isinstance(task, _OrderedTask))
        return sorted((task for task in tasks if task.process is self), key=hash)


_PROCESS: ContextVar[Process] = ContextVar("process")


def current() -> Process | None:
    """The process as which this runs; None: as nobody's."""
    return _PROCESS.get(None)


def outside(function: Callable[[Unpack[Ts]], T], *args: *Ts) -> T:
    """Calls it as nobody's: timers made in it are on the loop's own clock, and no process that is stopped
    holds them. For what lies between processes: networks, brokers."""
    return Context().run(function, *args)


def true_time() -> float:
    """The loop's clock, whatever the clock of the process that asks says."""
    loop = asyncio.get_running_loop()
    return loop.true_time() if isinstance(loop, VirtualTimeLoop) else loop.time()


async def true_sleep_until(when: float) -> None:
    """Until the loop's clock says `when`, exactly: on a process's own clock a wait is rounded."""
    due: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    timer = outside(asyncio.get_running_loop().call_at, when, _settle, due)
    try:
        await due
    finally:
        timer.cancel()


async def first_of(*futures: asyncio.Future[Any], seconds: float | None = None) -> None:
    """As `asyncio.wait` for the first of them, in a third of its time: a pull alone waits ten times."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()
    timer = None if seconds is None else loop.call_later(seconds, _settle, waiter)

    def wake(_: object) -> None:
        _settle(waiter)

    for future in futures:
        future.add_done_callback(wake)
    try:
        await waiter
    finally:
        if timer is not None:
            timer.cancel()
        for future in futures:
            future.remove_done_callback(wake)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class _Soon(Struct, eq=False):
    """What stands for an `asyncio.Handle`: C makes it, hundreds of times a request."""

    callback: Callable[..., object]
    args: tuple[Any, ...]
    context: Context
    dropped: bool = False

    def cancel(self) -> None:
        self.dropped = True

    def cancelled(self) -> bool:
        return self.dropped


class _Timer(Struct, eq=False):
    """As `_Soon`, for an `asyncio.TimerHandle`."""

    callback: Callable[..., object]
    args: tuple[Any, ...]
    context: Context
    at: float
    """On the clock of the process that set it."""
    loop: VirtualTimeLoop | None
    """None once it is due."""
    dropped: bool = False

    def cancel(self) -> None:
        if not self.dropped:
            self.dropped = True
            self.callback, self.args = _nothing, ()
            if self.loop is not None:
                self.loop.timer_dropped()

    def cancelled(self) -> bool:
        return self.dropped

    def when(self) -> float:
        return self.at


def _nothing() -> None:
    """Of a timer that was cancelled: what it held is let go at once."""


class VirtualTimeLoop(BaseEventLoop):
    """`time()` starts at `start` seconds and moves only by jumps to the next timer."""

    _ready: deque[_Soon | _Timer]
    _stopping: bool
    _closed: bool

    def __init__(self, start: float = 0.0, horizon_s: float | None = None) -> None:
        super().__init__()
        self._now = start
        self._end = None if horizon_s is None else start + horizon_s
        self._timers: list[tuple[float, int, _Timer]] = []
        self._made = 0
        self._tasks_made = 0
        self._cancelled = 0
        self._spins = 0
        # Asked for a hundred times a request, and so by C alone: a debug mode would find nothing here.
        self.create_future = partial(asyncio.Future, loop=self)  # type: ignore[method-assign]
        self.get_debug = bool  # type: ignore[method-assign]

    def time(self) -> float:
        """On the clock of the process that asks."""
        process = _PROCESS.get(None)
        return self._now if process is None else self._now + process.offset_s

    def true_time(self) -> float:
        return self._now

    def put_back(self, handles: deque[_Soon | _Timer]) -> None:
        """They run before what is ready now."""
        self._ready.extendleft(reversed(handles))

    def next_age(self) -> int:
        self._tasks_made += 1
        return self._tasks_made

    def create_task(
        self,
        coro: Coroutine[Any, Any, T] | Generator[Any, None, T],
        *,
        name: object = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        return _OrderedTask(coro, loop=self, name=name, context=context)

    def call_soon(  # type: ignore[override]
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> _Soon:
        if self._closed:
            raise RuntimeError("Event loop is closed")
        handle = _Soon(callback, args, copy_context() if context is None else context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> _Timer:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> _Timer:
        if self._closed:
            raise RuntimeError("Event loop is closed")
        timer = _Timer(callback, args, copy_context() if context is None else context, when, self)
        process = _PROCESS.get(None)
        self._made += 1
        due = when if process is None else process.true(when)
        heapq.heappush(self._timers, (due, self._made, timer))
        return timer

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 — as an executor does, it is handed to whoever awaits
            future.set_exception(error)
        return future

    def close(self) -> None:
        self._timers.clear()
        super().close()

    def _run_once(self) -> None:
        """Turns of the loop until it is stopped: at least one."""
        ready, timers, pop = self._ready, self._timers, self._ready.popleft
        while True:
            while timers and timers[0][2].dropped:
                heapq.heappop(timers)
                self._cancelled -= 1
            if ready or self._stopping:
                self._spins += 1
                if self._spins > _SPIN_LIMIT:
                    raise Deadlock(f"at {self._now:.6f} s something polls and never sleeps{self._pending()}")
            else:
                self._jump()
            now = self._now
            while timers and timers[0][0] <= now:
                timer = heapq.heappop(timers)[2]
                if timer.dropped:
                    self._cancelled -= 1
                else:
                    timer.loop = None
                    ready.append(timer)
            for _ in range(len(ready)):
                handle = pop()
                if handle.dropped:
                    continue
                context = handle.context
                process = context.get(_PROCESS)
                if process is not None and process.held is not None:
                    process.held.append(handle)
                    continue
                try:
                    context.run(handle.callback, *handle.args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:  # noqa: BLE001 — as any loop, it tells its handler and goes on
                    told = f"Exception in callback {handle!r}"
                    self.call_exception_handler({"message": told, "exception": error, "handle": handle})
            if self._stopping:
                return

    def _jump(self) -> None:
        """To the next timer."""
        if not self._timers:
            raise Deadlock(f"at {self._now:.6f} s nothing is ready and no timer is set{self._pending()}")
        when = self._timers[0][0]
        if self._end is not None and when > self._end:
            raise HorizonReached(f"not ended by {self._end:.6f} s{self._pending()}")
        if when > self._now:
            self._now = when
            self._spins = 0

    def timer_dropped(self) -> None:
        # Most timers are timeouts that never fire; unswept they would pile up until they are due.
        self._cancelled += 1
        if self._cancelled > 1000 and self._cancelled * 2 > len(self._timers):
            self._timers[:] = [entry for entry in self._timers if not entry[2].dropped]
            heapq.heapify(self._timers)
            self._cancelled = 0

    def _write_to_self(self) -> None:
        """Nobody sleeps in a selector, so nobody needs to be woken."""

    def _pending(self) -> str:
        lines = []
        for task in sorted(asyncio.all_tasks(self), key=hash):
            lines.append(f"\n  {task.get_name()}: {_where(task.get_coro())}")
        return "; pending:" + "".join(lines) if lines else ""


def _where(coro: Any) -> str:
    """The lines that await each other, from the task's own to the innermost."""
    frames = []
    while (frame := getattr(coro, "cr_frame", None)) is not None:
        frames.append(f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})")
        coro = coro.cr_await
    return " > ".join(frames) or repr(coro)


def run(coro: Coroutine[Any, Any, T], *, start: float = 0.0, horizon_s: float | None = None) -> T:
    """What `coro` returns, run in virtual time from `start` seconds.

    Raises `Deadlock` when nothing can ever happen again, and `HorizonReached` when more than `horizon_s`
    virtual seconds would pass; both name the tasks that are pending and where they wait.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(start, horizon_s)) as runner:
        return runner.run(coro)
