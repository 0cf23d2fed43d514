"""The engine's loop: plan a step, let the runner compute it, tell what came of it; and its own speed."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from msgspec import Struct

from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.settings import EngineSettings
from engine.words import (
    Batch,
    BatchResult,
    CancelledSequence,
    EngineLoad,
    Matcher,
    NewSequence,
    Reservation,
    StepReport,
)
from fleet.block_hash import BlockHash
from fleet.errors import BadConstraint, FleetError, Internal, Unavailable
from fleet.kv_layout import Fingerprint, KvLayout
from fleet.metrics import BETWEEN_S, SEQUENCES, TOKENS, Buckets, Family, Labels, gauge, histogram
from fleet.request import Constraint

log = logging.getLogger(__name__)

Constrain = Callable[[Constraint, Sequence[int]], Awaitable[Matcher]]
"""`engine.grammar.Grammars.matcher`."""


@dataclass(slots=True)
class Speeds:
    """Recent speed, exponentially averaged over steps. Sums are averaged, not rates, so that a step counts
    by the time it took."""

    weight: float = 0.1
    """Of the newest step."""
    most: float = 4.0
    """A step counts for at most so many times what it should have taken by the steps before: a process that
    stood still for seconds is not a model that takes seconds, and routers would send it nothing for long."""
    _prompt: tuple[float, float] | None = None
    """Prompt tokens, seconds: of steps with prompt tokens."""
    _decode: tuple[float, float] | None = None
    """Sequences, seconds: of steps without."""

    def add(self, batch: Batch, seconds: float) -> None:
        prompt = sum([len(chunk.tokens) for chunk in batch.chunks if len(chunk.tokens) > 1])
        if prompt:
            self._prompt = self._mix(self._prompt, prompt, seconds)
        else:
            self._decode = self._mix(self._decode, len(batch.chunks), seconds)

    def _mix(self, old: tuple[float, float] | None, count: float, seconds: float) -> tuple[float, float]:
        if old is None:
            return (count, seconds)
        if old[1] > 0:
            seconds = min(seconds, self.most * old[1] * max(1.0, count / old[0]))
        return (old[0] + self.weight * (count - old[0]), old[1] + self.weight * (seconds - old[1]))

    @property
    def prefill_tokens_s(self) -> float | None:
        return self._prompt[0] / self._prompt[1] if self._prompt and self._prompt[1] > 0 else None

    @property
    def decode_step_s(self) -> float | None:
        return self._decode[1] if self._decode else None

    @property
    def decode_batch(self) -> float | None:
        return self._decode[0] if self._decode else None


class _Flight(Struct, frozen=True):
    """A step that the runner was asked for."""

    batch: Batch
    result: Awaitable[BatchResult]
    since: float
    """It is computed from then on, or since the step before it has ended."""


def overlaps(setting: str, runner: Runner) -> bool:
    """Whether the next step is planned and asked for while one runs."""
    return runner.asynchronous if setting == "auto" else setting == "on"


_NOTHING = StepReport()


class Engine:
    """Tokens in, tokens out. All methods are called on the event loop that `run` runs on."""

    def __init__(
        self,
        runner: Runner,
        settings: EngineSettings,
        sink: Callable[[StepReport], None],
        constrain: Constrain | None = None,
        memory: Mapping[str, int] | None = None,
        vocabulary: int = 1 << 32,
    ) -> None:
        """`sink` is called by `run` only, once or twice a step, and must not raise. A sequence's last word
        is `Finished`, or `Held` for a `hold` sequence that was computed. Without `constrain`, constraints
        are refused. `memory`: where the device's bytes go (`MemoryBudget.counters`), told with the load.
        `vocabulary`: token ids are below this."""
        self._runner = runner
        self._constrain = constrain
        self._memory = dict(memory or {})
        self._sink = sink
        self._scheduler = Scheduler(
            blocks=runner.blocks,
            block_size=runner.layout.block_size,
            max_tokens=self.max_tokens,
            settings=settings,
            vocabulary=vocabulary,
        )
        self._in_flight = 2 if overlaps(settings.overlap, runner) else 1
        """Steps at most."""
        self._wake = asyncio.Event()
        self._grants: dict[str, asyncio.Future[Reservation]] = {}
        self._speeds = Speeds()
        self._progress_at = 0.0
        self._step_ended = float("-inf")
        self._step_s: dict[Labels, Buckets] = {(kind,): Buckets(BETWEEN_S) for kind in ("prompt", "decode")}
        self._step_sequences = Buckets(SEQUENCES)
        self._step_tokens = Buckets(TOKENS)

    @property
    def layout(self) -> KvLayout:
        return self._runner.layout

    @property
    def fingerprint(self) -> Fingerprint:
        return self._runner.fingerprint

    @property
    def max_tokens(self) -> int:
        """Longest sequence: what the model allows, and all blocks hold; of the last token no KV is kept."""
        return min(self._runner.max_tokens, self._runner.blocks * self._runner.layout.block_size + 1)

    @property
    def blocks(self) -> int:
        return self._runner.blocks

    @property
    def staged(self) -> bool:
        """Whether blocks are copied to and from the memory that other workers read: see `Runner.staged`."""
        return self._runner.staged

    async def to_host(self, blocks: Sequence[int]) -> None:
        """Before blocks of a held sequence are lent."""
        await self._runner.to_host(blocks)

    async def from_host(self, blocks: Sequence[int]) -> None:
        """Before `filled`, of blocks that were brought."""
        await self._runner.from_host(blocks)

    async def matcher(self, constraint: Constraint, generated: Sequence[int]) -> Matcher:
        """For a `NewSequence` with these tokens generated. BadConstraint says why there can be none."""
        if self._constrain is None:
            raise BadConstraint("this model cannot be constrained in what it generates: it has no vocabulary")
        return await self._constrain(constraint, generated)

    def add(self, new: NewSequence) -> None:
        """Queues a sequence that needs nothing from elsewhere. Raises `BadRequest` when it could never run
        here (code `context_length_exceeded` when it is too long), `Overloaded` when the queue is full."""
        if new.fill:
            raise ValueError(f"{new.id}: a sequence to be filled is reserved, not added")
        self._progress(only_if_idle=True)
        self._scheduler.add(new)
        self._wake.set()

    async def reserve(self, new: NewSequence) -> Reservation:
        """Queues a `fill` sequence; returns when it has its blocks. Raises like `add`, `CancelledSequence`
        when it is cancelled meanwhile. Cancelling the await cancels the sequence."""
        if not new.fill:
            raise ValueError(f"{new.id}: only a sequence to be filled is reserved")
        self._progress(only_if_idle=True)
        self._scheduler.add(new)
        grant: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        self._grants[new.id] = grant
        self._settle()
        self._wake.set()
        try:
            return await grant
        except asyncio.CancelledError:
            # Granted, but the caller will never know: nobody writes to the blocks.
            unheard = grant.done() and not grant.cancelled() and grant.exception() is None
            self.cancel(new.id)
            if unheard:
                self._scheduler.filled(new.id, 0)
            raise

    def filled(
        self, id: str, tokens: int, generated: Sequence[int] = (), matcher: Matcher | None = None
    ) -> None:
        """The KV of the first `tokens` tokens is proven valid, and nobody writes to the reserved blocks any
        more; the rest is computed here, and the sequence runs. Fewer tokens than the reservation had cached
        mean those. Exactly once for each reservation, also after `cancel`: until then its blocks are in
        quarantine. ValueError when there is no such reservation or it has fewer tokens.

        `generated`: drawn elsewhere since it was reserved (KV of the last of them is not there); `matcher`
        has accepted it."""
        self._scheduler.filled(id, tokens, tuple(generated), matcher)
        self._progress()
        self._wake.set()

    def cancel(self, id: str) -> bool:
        """Ends a sequence in any phase; its `Finished(CANCELLED)` comes within one step. False when there is
        none, it is cancelled already, or it is held (`release` is then what lets it go). One that was told
        as `Ready` keeps its blocks until `release`."""
        ended = self._scheduler.cancel(id)
        grant = self._grants.pop(id, None)
        if grant is not None and not grant.done():
            grant.set_exception(CancelledSequence(f"{id} was cancelled while it waited for blocks"))
        if ended:
            self._wake.set()
        return ended

    def release(self, id: str) -> None:
        """Nobody reads the blocks of a held or lent sequence any more: they go, at once or when it ends, and
        it is not told as `Ready` again. Idempotent."""
        self._scheduler.release(id)
        self._progress()
        self._wake.set()

    async def lend(self, loan: str, names: Sequence[BlockHash], have: int) -> Sequence[int]:
        """Pins the cached blocks of these names, from a sequence's first on, for others to read until
        `take_back(loan)`: as many in a row as are here and may be lent (setting `lend_share`). Returns those
        after the first `have`, where others can read them; none: nothing is pinned, nor when it is cancelled
        or raises."""
        blocks = self._scheduler.lend(loan, names, have)
        if blocks and self.staged:
            try:
                await self.to_host(blocks)
            except BaseException as error:
                self.take_back(loan)
                if isinstance(error, Exception):
                    # Whatever a device breaks of costs who asked only.
                    log.exception("cached blocks cannot be copied from the device")
                    return ()
                raise
        return blocks

    def take_back(self, loan: str) -> None:
        """Nobody reads the blocks of a loan any more. Idempotent."""
        if self._scheduler.take_back(loan):
            self._progress()
            self._wake.set()

    @property
    def loans(self) -> int:
        """That others have not given back yet."""
        return self._scheduler.loans

    def load(self) -> EngineLoad:
        scheduler = self._scheduler
        return EngineLoad(
            running=scheduler.running,
            waiting=scheduler.waiting,
            queued_tokens=scheduler.queued_tokens,
            blocks_total=self.blocks,
            blocks_free=scheduler.pool.available,
            prefill_tokens_s=self._speeds.prefill_tokens_s,
            decode_step_s=self._speeds.decode_step_s,
            decode_batch=self._speeds.decode_batch,
            stalled_s=self._now() - self._progress_at if self._owes_progress else 0.0,
            counters=scheduler.totals() | self._memory,
        )

    def families(self) -> list[Family]:
        """Beside `load` for Prometheus: blocks by state, and what steps were like."""
        blocks = self._scheduler.pool.states()
        states: dict[Labels, float] = {(state,): count for state, count in blocks.items()}
        return [
            gauge("pdfleet_worker_blocks", "KV blocks by state; together all.", ("state",), states),
            histogram("pdfleet_worker_step_seconds", "Engine steps with and without prompt tokens.",
                      ("kind",), self._step_s),
            histogram("pdfleet_worker_step_sequences", "Sequences in a step.", (),
                      {(): self._step_sequences}),
            histogram("pdfleet_worker_step_tokens", "Tokens in a step.", (), {(): self._step_tokens}),
        ]  # fmt: skip

    def retune(self, settings: EngineSettings) -> None:
        """From the next step on: `max_batch`, `max_step_tokens`, `short_prompt_share` and `max_waiting`. What
        was measured of the steps before tells nothing of these."""
        self._scheduler.retune(settings)
        self._speeds = Speeds()
        self._wake.set()

    @property
    def _owes_progress(self) -> bool:
        """A step that is under way is to end. Work that waits is to be stepped, unless it may be waiting
        for blocks that only others can give back."""
        scheduler = self._scheduler
        return scheduler.in_flight or (scheduler.has_work and not scheduler.others_have_blocks)

    def cached(self) -> tuple[int, ...]:
        """`short()` names of all blocks that can be found: what the events of all reports add up to."""
        return self._scheduler.pool.cached()

    def validate(self, idle: bool = False) -> None:
        """AssertionError on any broken invariant; `idle`: also when a block or a sequence is left over."""
        self._scheduler.validate(idle)
        if idle:
            assert not self._grants, f"never granted: {sorted(self._grants)}"

    async def run(self) -> None:
        """Until cancelled. A failure of the runner ends the sequences of its batch, and nothing else."""
        flights: deque[_Flight] = deque()
        try:
            while True:
                self._wake.clear()
                while len(flights) < self._in_flight:
                    batch = self._plan()
                    if not batch.chunks:
                        break
                    flights.append(self._launch(batch))
                if flights:
                    self._tell(await self._end(flights.popleft()))
                else:
                    await self._wake.wait()
        finally:
            for flight in flights:
                if isinstance(flight.result, asyncio.Task):
                    flight.result.cancel()
            for grant in self._grants.values():
                if not grant.done():
                    grant.set_exception(Unavailable("the engine has stopped"))
            self._grants.clear()

    async def close(self) -> None:
        """Lets the device go; after `run` has ended."""
        await self._runner.close()

    def _plan(self) -> Batch:
        plan = self._scheduler.plan()
        for why in plan.why:
            log.debug("%s", why)
        self._settle()
        self._tell(plan.report)
        return plan.batch

    def _launch(self, batch: Batch) -> _Flight:
        running: Awaitable[BatchResult] = self._runner.run(batch)
        if self._in_flight > 1:
            running = asyncio.ensure_future(running)
        return _Flight(batch, running, self._now())

    async def _end(self, flight: _Flight) -> StepReport:
        batch = flight.batch
        error: FleetError
        try:
            result = await flight.result
            report = self._scheduler.apply(result)
        except FleetError as failure:
            error = failure
        except Exception as failure:
            # Whatever a runner breaks of, the sequences of other batches go on.
            log.exception("the runner failed; the %d sequences of its batch end", len(batch.chunks))
            error = Internal(f"the runner failed: {type(failure).__name__}")
        else:
            seconds = self._now() - max(flight.since, self._step_ended)
            tokens, sequences = sum([len(chunk.tokens) for chunk in batch.chunks]), len(batch.chunks)
            self._speeds.add(batch, seconds)
            self._step_s[("prompt" if tokens > sequences else "decode",)].observe(seconds)
            self._step_sequences.observe(sequences)
            self._step_tokens.observe(tokens)
            return report
        finally:
            self._step_ended = self._progress_at = self._now()
        return self._scheduler.fail(error)

    def _tell(self, report: StepReport) -> None:
        if report != _NOTHING:
            self._sink(report)

    def _settle(self) -> None:
        """Hands out the reservations that were granted."""
        for reservation in self._scheduler.take_reservations():
            grant = self._grants.pop(reservation.id, None)
            if grant is None or grant.done():
                self._scheduler.cancel(reservation.id)
                self._scheduler.filled(reservation.id, 0)
            else:
                grant.set_result(reservation)

    def _progress(self, *, only_if_idle: bool = False) -> None:
        if not (only_if_idle and self._scheduler.has_work):
            self._progress_at = self._now()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
