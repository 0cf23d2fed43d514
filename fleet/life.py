"""The life of a process: signals, one task group, and an exit code that says how it went.

The first SIGTERM or SIGINT asks to drain, the second to hurry, the third ends the process where it is.
A root task that ends before it was asked to ends the process with code 1: nothing dies unnoticed while
the rest looks healthy. SIGUSR1 prints all stacks; SIGUSR2 logs how many tasks of each kind there are.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import os
import resource
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, NoReturn

from fleet.errors import FleetError
from fleet.settings import SettingsError, load
from fleet.telemetry import LogSettings, set_up_logging

log = logging.getLogger(__name__)

_NEW_OBJECTS = 20_000
"""Objects made, and not gone, before the youngest are looked through."""
TIDY_S = 600.0
"""Seconds between full collections: each a millisecond or less, 30 where 100,000 conversations are known.
Nothing else empties the interpreter's lists of freed tuples, 2,000 of each length: 4 MB that come within
hours and look like a leak."""

DESCRIPTORS = 1 << 16
"""A process may have as many open as the system allows, up to this: a client each, and what else there is."""


class Life:
    """What a process's main coroutine is given."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self.stopping = asyncio.Event()
        """Asked to leave: take no new work, finish what runs."""
        self.hurrying = asyncio.Event()
        """Asked twice: leave what runs."""
        self._group = group
        self._roots: list[asyncio.Task[None]] = []

    def root(self, name: str, work: Coroutine[Any, Any, object]) -> None:
        """Runs as long as the process. Its end ends the process, unless that is stopping already."""
        self._roots.append(self._group.create_task(self._watched(name, work), name=name))

    async def _watched(self, name: str, work: Coroutine[Any, Any, object]) -> None:
        await work
        if not self.stopping.is_set():
            raise RuntimeError(f"{name} has ended by itself")

    @staticmethod
    def settled() -> None:
        """Start-up is over. What lives now lives as long as the process: modules alone are hundreds of
        thousands of objects, which every full collection would walk, for a tenth of a second. And garbage in
        cycles is rare here: it is looked for less often."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(_NEW_OBJECTS, 20, 20)
        asyncio.get_running_loop().call_later(TIDY_S, _tidy)

    def signalled(self, number: int) -> None:
        """A signal came. The third does not return."""
        name = signal.Signals(number).name
        if not self.stopping.is_set():
            log.info("%s: stopping; once more to hurry", name)
            self.stopping.set()
        elif not self.hurrying.is_set():
            log.warning("%s again: hurrying; once more to end here and now", name)
            self.hurrying.set()
        else:
            log.error("%s for the third time: ended", name)
            logging.shutdown()
            os._exit(128 + number)

    def abort(self, why: str) -> NoReturn:
        """Ends the process here and now, as a failure: an orderly end would wait for threads that hang."""
        log.critical("ended: %s", why)
        logging.shutdown()
        os._exit(1)

    async def live(self, main: Callable[[Life], Awaitable[None]]) -> None:
        await main(self)
        for task in self._roots:
            task.cancel()


def run_process(main: Callable[[Life], Awaitable[None]], log_settings: LogSettings | None = None) -> NoReturn:
    """Runs `main` and exits: 0 when it returned, 1 when it or a root task failed, with the reason logged.

    Without `log_settings`, `PDFLEET_LOG_LEVEL` and `PDFLEET_LOG_FORMAT` say how to log. Runs on uvloop
    where there is one.
    """
    set_up_logging(log_settings or _log_settings())
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    _allow_descriptors()
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_live(main))
    except Exception as error:  # noqa: BLE001 — the root of the process
        _explain(error)
        raise SystemExit(1) from None
    raise SystemExit(0)


def _allow_descriptors() -> None:
    """Shells and init systems give 1,024, so that programs with `select` keep working; beyond them, whoever
    connects would be cut off without a word."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


async def _live(main: Callable[[Life], Awaitable[None]]) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        life = Life(group)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, life.signalled, number)
        loop.add_signal_handler(signal.SIGUSR2, _tell_tasks, loop)
        await life.live(main)


def _tidy() -> None:
    gc.collect()
    asyncio.get_running_loop().call_later(TIDY_S, _tidy)


def _tell_tasks(loop: asyncio.AbstractEventLoop) -> None:
    kinds = Counter(getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks(loop))
    said = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    log.info("tasks: %d: %s", kinds.total(), said)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


@dataclass(frozen=True, slots=True)
class _FromEnvironment:
    log: LogSettings = field(default_factory=LogSettings)


def _log_settings() -> LogSettings:
    try:
        return load(_FromEnvironment, [], os.environ).log
    except SettingsError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


def _explain(error: Exception) -> None:
    causes = _flat(error)
    if all(isinstance(cause, FleetError | SettingsError | OSError) for cause in causes):
        # Its text is all that helps: a port in use, a model that is not there.
        for cause in causes:
            log.error("ended: %s: %s", type(cause).__name__, cause)
    else:
        log.critical("ended by a defect", exc_info=error)


def _flat(error: Exception) -> list[Exception]:
    if isinstance(error, ExceptionGroup):
        return [cause for one in error.exceptions for cause in _flat(one)]
    return [error]
