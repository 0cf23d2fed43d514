"""The flow of one request through the fleet, top to bottom: the spine.

    admit → choose where the prompt is computed → PrefillJob → first token → choose where it is decoded
    → DecodeJob(ticket) → tokens → end

One *leg* is one job at one worker. After each leg the next one is chosen by what is known so far: nothing
yet, a first token and a ticket, or some tokens and no ticket. So a refusal, a lost worker and the ordinary
hand-off are the same step, and no token is said twice: those that were said go with the next job.

Of a prompt that takes several steps the next leg begins *early*: a decode worker brings what of the KV is
final while the rest is computed, and is told the first token when it is there. Whatever becomes of an early
leg, without it the request goes on as if there had been none.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import assert_never

from fleet.block_hash import HashKeys, PromptNames
from fleet.errors import (
    BadRequest,
    DeadlineExceeded,
    FleetError,
    Internal,
    NotFound,
    Overloaded,
    Unavailable,
    WorkerLost,
    error_named,
)
from fleet.goodput import End, Outcome, Rolling, Verdict, attains
from fleet.handoff import (
    CancelReason,
    DecodeJob,
    Ended,
    KvTicket,
    Lent,
    Prefilled,
    PrefillJob,
    Scored,
    Started,
    Token,
)
from fleet.ids import Incarnation, LeaseId, RequestId, WorkerId
from fleet.member import Role
from fleet.request import FinishReason, Request, TokenLogprobs, Usage
from fleet.stages import Stage, Timeline
from router.admission import Act, Admission, Decision
from router.cost import Ask, Choice, choose_decode, choose_prefill
from router.forecast import Forecast, forecast
from router.link import Link, Stream
from router.meters import Meters
from router.prefix_index import PrefixIndex
from router.record import HandoffRecord, HandoffState, Records
from router.roster import LinkState, Pool, Roster
from router.run import Run, RunEnd, RunToken, Terms
from router.sessions import Sessions
from router.settings import AdmissionMode, RouterSettings

log = logging.getLogger(__name__)

_STAGES = {stage.value: stage for stage in Stage}
_Found = tuple[Pool, Choice, PrefillJob | DecodeJob]
_TURN_S = 0.25
"""How often those who wait for their turn are looked at when nothing happens, seconds."""


class Flow:
    """Carries requests through the fleet. Implements `router.run.Spine`."""

    def __init__(
        self, settings: RouterSettings, roster: Roster, index: PrefixIndex, links: Mapping[WorkerId, Link]
    ) -> None:
        self.settings = settings
        self.roster = roster
        self.index = index
        self.links = links
        self.admission = Admission(settings.flow, settings.admission)
        self.mode = settings.admission.mode
        default = settings.admission.default_class
        self.terms = Terms(default, settings.objectives[default])
        """Of requests that bring none."""
        self.goodput: dict[str, Rolling] = {}
        """By class, from its first request that ended."""
        self.meters = Meters()
        self.records = Records(settings.flow.records)
        self.sessions = Sessions(settings.flow.sessions)
        self.counters: Counter[str] = Counter()
        """Totals since start: `requests`; of each, once, `finished_stop`, `finished_length`, `cancelled` or
        `failed_<error>`; beside them `prefills_remote`, `prefills_local`, `handoffs`, `early_legs`
        (begun while the prompt was being computed), `early_handoffs` (of those, gone on with), `borrows`
        (legs that were told who caches their beginning), `refusals` and `failovers`; and of admission
        `queued` and `shed`."""
        self._change = asyncio.Event()
        self._queued: dict[RequestId, _Run] = {}
        self._ticking: asyncio.TimerHandle | None = None

    def start(self, request: Request, timeline: Timeline, terms: Terms | None = None) -> Run:
        return _Run(self, request, timeline, terms or self.terms)

    def models(self) -> tuple[str, ...]:
        return self.roster.models()

    def ready(self) -> str | None:
        reasons = [self.roster.why_not(model) for model in self.roster.models()]
        if None in reasons:
            return None
        return "; ".join(reason for reason in reasons if reason) or "no worker is known"

    def wake(self) -> None:
        """Who could serve what has changed: those who wait for a worker look again."""
        change, self._change = self._change, asyncio.Event()
        change.set()
        self.turn()

    def wait(self, run: _Run) -> None:
        """Puts it into the queue, for `turn` to end its waiting."""
        self._queued[run.request.id] = run
        self.turn()

    def turn(self) -> None:
        """Sends on those whose turn it is, as long as there is room. Called whenever there may be more."""
        if not self._queued:
            return
        now = asyncio.get_running_loop().time()
        for request, decision in self.admission.expired(now):
            self.refuse(request, decision)
        for model in self.admission.models():
            while (head := self.admission.head(model, now)) is not None:
                if not self._queued[head].offered(now):
                    break
                del self._queued[head]
        if self._ticking is None and self._queued:
            self._ticking = asyncio.get_running_loop().call_later(_TURN_S, self._tick)

    def _tick(self) -> None:
        self._ticking = None
        self.turn()

    def refuse(self, request: RequestId, decision: Decision) -> None:
        """One that waits."""
        self._queued.pop(request).turned_away(decision)

    def forget(self, request: RequestId) -> None:
        """Its waiting is over, for whatever reason; idempotent."""
        self._queued.pop(request, None)

    def judged(self, terms: Terms, outcome: Outcome, verdict: Verdict, now: float) -> None:
        rolling = self.goodput.get(terms.slo_class)
        if rolling is None:
            rolling = self.goodput[terms.slo_class] = Rolling(now)
        rolling.add(outcome, verdict, now)

    async def changed(self, until: float) -> None:
        """Returns after the next `wake`, or at `until`."""
        change = self._change
        try:
            async with asyncio.timeout_at(until):
                await change.wait()
        except TimeoutError:
            pass


class _Stopped(Exception):
    """`Run.stop` was called while the run was being read."""


@dataclass(slots=True)
class _Leg:
    """One job at one worker."""

    link: Link
    stream: Stream
    choice: Choice
    spoke: bool = False
    """Whether a token of it was read."""


class _Run:
    """One request on its way. Implements `router.run.Run`."""

    def __init__(self, flow: Flow, request: Request, timeline: Timeline, terms: Terms) -> None:
        self.flow = flow
        self.request = request
        self.timeline = timeline
        self.terms = terms
        self.limits = flow.settings.flow
        self.loop = asyncio.get_running_loop()
        self.record = HandoffRecord(
            request.id,
            request.model,
            len(request.prompt),
            timeline.start,
            terms.slo_class,
            terms.tenant,
            timeline.marks,
        )
        self.tie = int.from_bytes(hashlib.blake2b(request.id.encode(), digest_size=8).digest(), "little")
        self.due = timeline.start + request.deadline_s
        self.generated: list[int] = []
        self.times = array("d")
        """When each of them was taken by the client, seconds since acceptance."""
        self.logged = {"request": request.id}
        """What its log lines are found by, here and at workers."""
        self.labels = flow.meters.labels(request.model, terms.slo_class)
        self.promised_ttft_s: float | None = None
        """As it was forecast when it came."""
        self.forecast: Forecast | None = None
        """Of the first leg, as it was dispatched; None: of another kind, or lost."""
        self.sent_at = 0.0
        self.waiting: asyncio.Future[None] | None = None
        """While it waits for its turn."""
        self.scores: list[TokenLogprobs] = []
        """Of the prompt's tokens after the first, until they are told with the first token."""
        self.cached_tokens = 0
        self.leg: _Leg | None = None
        self.early: _Leg | None = None
        """The next one, while this one computes the prompt."""
        self.early_ticket: KvTicket | None = None
        self.early_avoid: set[Incarnation] = set()
        """Lives of workers that did not take it early; they are asked again when the prompt is computed."""
        self.ticket: KvTicket | None = None
        """Given to a decode worker while it is fresh."""
        self.ticket_at = 0.0
        self.held: tuple[Link, LeaseId] | None = None
        """The lease to release, and where."""
        self.pool: Pool | None = None
        """Of the first leg: a request never goes on with other weights."""
        self.avoid: set[Incarnation] = set()
        self.refused: set[Incarnation] = set()
        """Of those, the ones that were only full."""
        self.lost = 0
        self.waiting_since: float | None = None
        """When a worker for the next leg was first looked for; None while one says tokens."""
        self.verdict: Exception | None = None
        """Set from outside the reading: stopped, or overdue."""
        self.stopped: CancelReason | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.begun = False
        self.over = False
        self._names: dict[tuple[str, int], PromptNames] = {}

    # -- the way of a request

    async def _events(self) -> AsyncGenerator[RunToken | RunEnd, None]:
        self._begin()
        try:
            if self.stopped is not None:
                raise _Stopped
            self.due = self.flow.admission.enter(self.request, self.timeline.start)
            leg = await self._first_leg()
            while True:
                following: _Leg | None = None
                failed: FleetError | None = None
                try:
                    async for said in leg.stream:
                        match said:
                            case Started(_, stage):
                                if stage in _STAGES:
                                    self.timeline.mark(_STAGES[stage], self.loop.time())
                            case Scored():
                                self._scored(said)
                            case Lent(_, ticket):
                                self.early_ticket = ticket
                                self._try_early()
                            case Token(_, token, logprobs):
                                yield self._token(leg, token, logprobs)
                                self._taken()
                            case Prefilled():
                                event = self._prefilled(leg, said)
                                if said.finish is not None:
                                    yield event
                                    self._taken()
                                    yield self._finished(said.finish)
                                    return
                                # The decode worker is asked before the client is served: a slow client
                                # must not keep KV waiting.
                                following = self._go_on_early() or self._try_leg()
                                yield event
                                self._taken()
                                break
                            case Ended():
                                yield self._ended(leg, said)
                                return
                            case _:
                                assert_never(said)
                    else:
                        raise Internal(f"worker {leg.link.card.id} ended a stream without its last word")
                except FleetError as error:
                    if (finish := self._after(leg, error)) is not None:
                        yield self._finished(finish)
                        return
                    failed = error
                leg = following or await self._next_leg(failed)
        except _Stopped:
            self._close(HandoffState.RELEASED, "stopped before it began")
            yield RunEnd(FinishReason.CANCELLED, self._usage())
        except FleetError as error:
            self._close(HandoffState.FAILED, error.message, error)
            raise
        finally:
            self._close(HandoffState.RELEASED, "the reader went away")

    def __aiter__(self) -> AsyncIterator[RunToken | RunEnd]:
        return self._events()

    @property
    def more(self) -> bool:
        return self.leg is not None and self.leg.stream.more

    async def stop(self, reason: CancelReason) -> None:
        if self.over or self.stopped is not None:
            return
        self.stopped = reason
        self._interrupt(_Stopped())
        if reason is CancelReason.STOP_STRING:
            self._close(HandoffState.DONE, f"stopped: {reason}", FinishReason.STOP)
        else:
            self._close(HandoffState.RELEASED, f"stopped: {reason}")

    # -- admission

    async def _first_leg(self) -> _Leg:
        """Through admission to a worker. Raises `Overloaded` for a request that is refused."""
        flow, now = self.flow, self.loop.time()
        self._check_pins()
        found = None if flow.mode is AdmissionMode.OFF else self._choose(set())
        if found is None:
            return await self._next_leg()
        cast = self._forecast(found)
        decision, gave_way = flow.admission.arrive(self.request, self.terms, cast, self.timeline.start, now)
        self._decided(decision)
        if gave_way is not None:
            flow.refuse(*gave_way)
        if flow.mode is AdmissionMode.ENFORCE:
            if decision.act is Act.REFUSE:
                raise self._shed(decision)
            if decision.act is Act.QUEUE:
                return await self._await_turn()
        return self._try_leg(found, cast) or await self._next_leg()

    def _check_pins(self) -> None:
        """Whoever pins wants to know what that worker does: no other one answers for it."""
        for worker in self.terms.pins:
            standing = self.flow.roster.get(worker)
            if standing is None:
                raise Unavailable(f"the request is pinned to worker {worker}, which is not here")
            if not standing.usable or standing.card.model != self.request.model:
                state, link = standing.card.state, standing.link
                raise Unavailable(
                    f"the request is pinned to worker {worker}, which is {state} with its session {link} "
                    f"and serves {standing.card.model}"
                )

    async def _await_turn(self) -> _Leg:
        self.flow.counters["queued"] += 1
        self.waiting = self.loop.create_future()
        try:
            self.flow.wait(self)
            await self.waiting
        finally:
            self.waiting = None
            self.flow.forget(self.request.id)
        if self.verdict is not None:
            raise self.verdict
        return self.leg or await self._next_leg()

    def offered(self, now: float) -> bool:
        """It is its turn: whether it went. It is dispatched here, so that the next one sees it."""
        found = self._choose(set())
        cast = None if found is None else self._forecast(found)
        decision = self.flow.admission.offer(self.request.id, cast, now)
        if decision.act is Act.QUEUE and found is not None and (other := self._elsewhere(found)) is not None:
            found, cast = other, self._forecast(other)
            decision = self.flow.admission.offer(self.request.id, cast, now)
        if decision.act is not Act.ADMIT:
            return False
        self._decided(decision)
        if found is not None:
            self._try_leg(found, cast)
        self._wake()
        return True

    def _elsewhere(self, found: _Found) -> _Found | None:
        """A worker with room that is worse than the one without, but better than as long a wait as there is:
        the cost model knows queues at workers only, and this one stands for what would be there."""
        limit = self.flow.admission.ahead_s(self.terms)
        crowded = {
            worker.card.incarnation
            for pool in self._pools()
            for worker in pool.prefill
            if worker.queued_tokens / worker.prefill_tokens_s > limit
        }
        other = self._choose(crowded)
        if other is None or other[1].worker == found[1].worker:
            return None
        wait_s = self.flow.admission.wait_s(self.request.model)
        advantage = self.flow.settings.cost.local_advantage if other[1].local else 1.0
        return other if other[1].seconds * advantage < found[1].seconds + wait_s else None

    def turned_away(self, decision: Decision) -> None:
        """While it waits."""
        self._decided(decision)
        self.verdict = self._shed(decision)
        self._wake()

    def _shed(self, decision: Decision) -> Overloaded:
        self.flow.counters["shed"] += 1
        return decision.error()

    def _wake(self) -> None:
        if self.waiting is not None and not self.waiting.done():
            self.waiting.set_result(None)

    def _forecast(self, found: _Found) -> Forecast:
        pool, choice, _ = found
        answer = self.flow.admission.answer(self.request, self.terms)
        return forecast(pool, choice, answer, self.flow.settings.cost)

    def _decided(self, decision: Decision) -> None:
        if not self.record.admission:
            self.promised_ttft_s = decision.ttft_s
        self.record.admission.append(
            {"at_s": round(self.loop.time() - self.timeline.start, 6), **decision.as_dict()}
        )

    # -- legs

    async def _next_leg(self, after: FleetError | None = None) -> _Leg:
        """Dispatches the next job, waiting for a worker as long as the settings allow.

        Raises what the client is to be told when there is none: `after`, if the last leg failed.
        """
        # What a client was given already it cannot ask for again: such a request waits for longer.
        wait_s = self.limits.resume_wait_s if self.generated or self.lost else 0.0
        # Counted from the last token on: asking again and being refused again is one wait.
        if self.waiting_since is None:
            self.waiting_since = self.loop.time()
        until = min(self.due, self.waiting_since + max(wait_s, self.limits.worker_wait_s))
        anew = self.loop.time() + self.limits.retry_after_s
        while True:
            if self.verdict is not None:
                raise self.verdict
            if (leg := self._try_leg()) is not None:
                return leg
            error, now = after or self._nobody(), self.loop.time()
            full = isinstance(error, Overloaded) and bool(self.generated)
            if now >= until or not (full or isinstance(error, Unavailable)):
                raise error
            # Who was full may have room soon, who was silent may speak again, and neither tells.
            again = min(until, now + self.limits.retry_after_s) if full or self.avoid else until
            if self.ticket is not None:
                again = min(again, now + self.ticket.lease_s / 3)
                self._renew(now)
            await self.flow.changed(again)
            self.avoid -= self.refused
            self.refused.clear()
            if self.loop.time() >= anew:
                self.avoid.clear()  # Not sooner, or one that fails at once would use up all failovers.

    def _try_leg(self, found: _Found | None = None, cast: Forecast | None = None) -> _Leg | None:
        """Chooses by what is known so far, or as was just `found`, and dispatches; None: nobody can take it
        now. `cast`: what was forecast of it there."""
        gone: set[Incarnation] = set()
        """Sessions that have just ended; not to be avoided when they are open again."""
        while (found := found or self._choose(gone)) is not None:
            pool, choice, job = found
            link = self.flow.links.get(choice.worker)
            try:
                if link is None or link.card.incarnation != choice.incarnation:
                    raise WorkerLost(f"worker {choice.worker} is gone")
                stream = link.dispatch(job)
            except WorkerLost:
                gone.add(choice.incarnation)
                found = cast = None
                continue
            now = self.loop.time()
            self.forecast, self.sent_at = cast if not self.generated else self.forecast, now
            self.flow.roster.sent(choice.worker, self.request.id, choice.tokens, choice.blocks)
            self.flow.index.sent(choice.worker, self._hashes(pool, self._needed()), now)
            self._note_dispatch(job, choice, now)
            if not self.generated:
                self.pool = pool
            self.leg = _Leg(link, stream, choice)
            self._arm()
            return self.leg
        return None

    def _renew(self, now: float) -> None:
        """The KV stays until somebody has room for it."""
        if self.held is not None:
            link, lease = self.held
            with contextlib.suppress(WorkerLost):
                link.renew(lease)
                self.ticket_at = now  # Where it did not stand any more, the reader is told so.

    def _try_early(self) -> None:
        """Lets a decode worker bring the KV that is final, if one has room now."""
        ticket, now = self.early_ticket, self.loop.time()
        pool = next((p for p in self._pools() if ticket and p.digest == ticket.fingerprint), None)
        while ticket is not None and pool is not None and self.leg is not None and not self.over:
            ask = self._ask(pool, now, self.early_avoid)
            choice = choose_decode(pool, ask, self.flow.settings.cost, ticket=True)
            if choice is None:
                return
            standing, link = self.flow.roster.get(choice.worker), self.flow.links.get(choice.worker)
            if standing is None or standing.blocks_free < choice.blocks:
                self.record.move(HandoffState.PREFILLING, now, f"not early: {choice.why}", choice.worker)
                return
            request = replace(self.request, deadline_s=max(0.0, self.due - now))
            try:
                if link is None or link.card.incarnation != choice.incarnation:
                    raise WorkerLost(f"worker {choice.worker} is gone")
                stream = link.dispatch(DecodeJob(0, request, (), ticket))
            except WorkerLost:
                self.early_avoid.add(choice.incarnation)
                continue
            stream.on_end = self._early_ended
            self.early = _Leg(link, stream, choice)
            self.flow.roster.sent(choice.worker, self.request.id, choice.tokens, choice.blocks)
            self.flow.index.sent(choice.worker, self._hashes(pool, self._needed()), now)
            self.flow.counters["early_legs"] += 1
            self.record.move(HandoffState.LENDING, now, choice.why, choice.worker, choice.considered)
            return

    def _early_ended(self) -> None:
        """Before the prompt was computed: another worker may take it early, or one will then."""
        early = self.early
        if early is None:
            return
        ends = [said for said in early.stream.unread() if isinstance(said, Ended)]
        why = (ends[0].message or str(ends[0].finish)) if ends else str(early.stream.error)
        self._drop_early(CancelReason.MOVED)
        self.early_avoid.add(early.choice.incarnation)
        self.record.move(HandoffState.PREFILLING, self.loop.time(), why, early.choice.worker)
        self._try_early()

    def _go_on_early(self) -> _Leg | None:
        """The prompt is computed: the early leg, if there is one, is told the first token."""
        early, now = self.early, self.loop.time()
        if early is None:
            return None
        try:
            early.link.proceed(early.stream, tuple(self.generated))
        except WorkerLost:
            self._drop_early(CancelReason.MOVED)
            return None
        # From here on it is a leg like any other: what it said so far is read now, so that the timeline
        # has the part of the pull that the client waits for.
        self.early, self.leg = None, early
        early.stream.on_end, early.stream.heard_at = None, now
        self.record.move(HandoffState.PULLING, now, "has begun early", early.choice.worker)
        self.timeline.mark(Stage.DECODE_SENT, now)
        self.flow.counters["handoffs"] += 1
        self.flow.counters["early_handoffs"] += 1
        self._went(Role.DECODE, early.choice)
        self._arm()
        return early

    def _drop_early(self, reason: CancelReason) -> None:
        if self.early is not None:
            early, self.early = self.early, None
            early.stream.on_end = None
            early.link.drop(early.stream, reason)
            self.flow.roster.settle(early.choice.worker, self.request.id)
            self.flow.turn()

    def _choose(self, gone: set[Incarnation]) -> _Found | None:
        now = self.loop.time()
        request = replace(self.request, deadline_s=max(0.0, self.due - now))
        cost, pools = self.flow.settings.cost, self._pools()
        if self.ticket is not None:
            stands = self.ticket_at + self.ticket.lease_s - now
            fresh = stands > (self.limits.lease_margin_s if self.lost else 0.0)
            for pool in pools:
                if fresh and pool.digest == self.ticket.fingerprint:
                    choice = choose_decode(pool, self._ask(pool, now, gone), cost, ticket=True)
                    if choice is not None:
                        return pool, choice, DecodeJob(0, request, tuple(self.generated), self.ticket)
            if not fresh:
                self._give_up_kv("the lease is too old")
        best: tuple[Pool, Choice] | None = None
        for pool in pools:
            ask = self._ask(pool, now, gone)
            choice = (
                choose_decode(pool, ask, cost, ticket=False)
                if self.generated
                else choose_prefill(pool, ask, cost)
            )
            if choice is not None and (best is None or choice.seconds < best[1].seconds):
                best = pool, choice
        if best is None:
            return None  # The KV, if there is any, stays for whoever has room soon.
        if self.ticket is not None:
            self._give_up_kv("nobody left can read the KV")
        if self.generated or best[1].local:
            return *best, DecodeJob(0, request, tuple(self.generated), None, best[1].holder)
        return *best, PrefillJob(0, request, self.limits.early_handoff, best[1].holder)

    def _give_up_kv(self, why: str) -> None:
        self._release()
        self.record.move(HandoffState.RESERVED, self.loop.time(), why)

    def _pools(self) -> tuple[Pool, ...]:
        pools = self.flow.roster.pools(self.request.model)
        if self.pool is None or not self.generated:
            return pools
        mine = self.pool.fingerprint
        return tuple(
            p for p in pools if (p.fingerprint.model, p.fingerprint.tokenizer) == (mine.model, mine.tokenizer)
        )

    def _ask(self, pool: Pool, now: float, gone: set[Incarnation]) -> Ask:
        tokens = self._needed()
        # A prompt that is scored is computed from its start, whoever holds it.
        scored = self.request.sampling.prompt_logprobs >= 0 and not self.generated
        return Ask(
            tokens=tokens,
            matched={} if scored else self.flow.index.match(self._hashes(pool, tokens), now),
            tie=self.tie,
            avoid=self.avoid | gone,
            routers=self.flow.roster.routers,
            lost=(self.avoid - self.refused) | gone,
            prefer=self.flow.sessions.last(self.terms.tenant, self.terms.session),
            only=self.terms.pins,
        )

    def _needed(self) -> int:
        """Tokens whose KV the next leg needs."""
        return len(self.request.prompt) + (0 if self.ticket is not None else len(self.generated))

    def _hashes(self, pool: Pool, tokens: int) -> PromptNames:
        """Index names of the full blocks among the first `tokens` tokens."""
        blocks = tokens // pool.block_size
        names = self._names.get((pool.digest, blocks))
        if names is None:
            request = self.request
            keys = HashKeys(pool.digest, pool.block_size, request.adapter, request.salt)
            known = request.prompt if tokens <= len(request.prompt) else (*request.prompt, *self.generated)
            names = PromptNames(known[:tokens], keys)
            self._names[pool.digest, blocks] = names
        return names

    def _note_dispatch(self, job: PrefillJob | DecodeJob, choice: Choice, now: float) -> None:
        if isinstance(job, PrefillJob):
            state, stage, count = HandoffState.PREFILLING, Stage.PREFILL_SENT, "prefills_remote"
        elif job.ticket is not None:
            state, stage, count = HandoffState.PULLING, Stage.DECODE_SENT, "handoffs"
        else:
            state, stage, count = HandoffState.PREFILLING, Stage.PREFILL_SENT, "prefills_local"
        self.record.move(state, now, choice.why, choice.worker, choice.considered)
        self.timeline.mark(stage, now)
        self.flow.counters[count] += 1
        if job.holder is not None:
            self.flow.counters["borrows"] += 1
        self._went(Role.PREFILL if isinstance(job, PrefillJob) else Role.DECODE, choice)
        log.debug(
            "request %s: %s at %s: %s", self.request.id, state, choice.worker, choice.why, extra=self.logged
        )

    def _went(self, role: Role, choice: Choice) -> None:
        self.flow.sessions.went(self.terms.tenant, self.terms.session, role, choice.worker)

    def _nobody(self) -> FleetError:
        """Why no worker can take the request now."""
        roster, model, length = self.flow.roster, self.request.model, len(self.request.prompt)
        why = roster.why_not(model)
        if why is not None:
            unknown = roster.models() and model not in roster.models()
            return NotFound(f"the model {model} does not exist here") if unknown else Unavailable(why)
        limit = max(pool.max_tokens for pool in roster.pools(model))
        if length >= limit:
            return BadRequest(
                f"the prompt has {length} tokens; {model} takes at most {limit - 1}, and one for the answer",
                code="context_length_exceeded",
            )
        return Unavailable(f"no worker of {model} that is left could go on with this request")

    # -- what a leg says

    def _scored(self, said: Scored) -> None:
        """A leg that follows a lost one begins again; what is known is not taken twice."""
        known = len(self.scores) + 1
        if said.start > known:
            raise Internal(f"the worker scored prompt tokens from {said.start} on; {known} was the next")
        self.scores += said.logprobs[known - said.start :]

    def _taken(self) -> None:
        """The client has the last token that was said."""
        self.times.append(self.loop.time() - self.timeline.start)

    def _told(self) -> tuple[TokenLogprobs, ...]:
        scores, self.scores = tuple(self.scores), []
        return scores

    def _token(self, leg: _Leg, token: int, logprobs: TokenLogprobs | None) -> RunToken:
        self.generated.append(token)
        self.waiting_since = None
        if len(self.generated) <= 2:
            stage = Stage.FIRST_TOKEN if len(self.generated) == 1 else Stage.SECOND_TOKEN
            self.timeline.mark(stage, self.loop.time())
        if len(self.generated) == 1:
            self._came(self.loop.time())
        if not leg.spoke:
            leg.spoke = True
            self._arm()  # From now on the limit is that between tokens.
        if self.ticket is not None:
            self._release()  # The decode worker goes on: the KV is there.
        return RunToken(token, logprobs, self._told() if self.scores else ())

    def _prefilled(self, leg: _Leg, said: Prefilled) -> RunToken:
        now = self.loop.time()
        self.cached_tokens = said.cached_tokens
        self.ticket, self.ticket_at = said.ticket, now
        if said.ticket is not None:
            self.held = (leg.link, said.ticket.lease)
            why = f"lease {said.ticket.lease} of incarnation {said.ticket.incarnation}"
            self.record.move(HandoffState.READY, now, why, leg.choice.worker)
        elif said.finish is None:
            self.record.move(HandoffState.RESERVED, now, "no KV was kept", leg.choice.worker)
        self._drop_leg(CancelReason.MOVED)
        self.generated.append(said.token)
        self.waiting_since = None
        self.timeline.mark(Stage.FIRST_TOKEN, now)
        self._came(now)
        return RunToken(said.token, said.logprobs, self._told())

    def _came(self, now: float) -> None:
        """The first token has come."""
        if self.forecast is not None:
            self.flow.admission.first_token(self.request, self.forecast, now - self.sent_at)

    def _ended(self, leg: _Leg, said: Ended) -> RunEnd:
        """Raises when it is no good end."""
        match said.finish:
            case FinishReason.STOP | FinishReason.LENGTH:
                if leg.choice.local and said.usage is not None:
                    self.cached_tokens = said.usage.cached_tokens
                return self._finished(said.finish)
            case FinishReason.FAILED:
                raise error_named(said.error, said.message, said.retry_after_s)
            case FinishReason.CANCELLED:
                raise WorkerLost(f"worker {leg.link.card.id} gave the request up")

    def _after(self, leg: _Leg, error: FleetError) -> FinishReason | None:
        """Settles a failed leg. None: to be tried elsewhere. Raises what cannot be."""
        self._drop_leg(CancelReason.MOVED)
        self._forget_early(CancelReason.MOVED)
        self.forecast = None
        if self.verdict is not None:
            raise self.verdict
        if not error.retryable:
            raise error
        if leg.link.state is LinkState.UP:
            self.avoid.add(
                leg.choice.incarnation
            )  # A lost one is no candidate until its session is open again.
        if isinstance(error, Overloaded):
            self.refused.add(leg.choice.incarnation)
            self.flow.counters["refusals"] += 1
        elif (finish := self._complete()) is not None:
            return finish
        else:
            self.lost += 1
            self.flow.counters["failovers"] += 1
            log.warning("request %s: %s", self.request.id, error.message, extra=self.logged)
            if self.lost > self.limits.max_failovers:
                raise error
        state = HandoffState.RESERVED if self.ticket is None else HandoffState.READY
        self.record.move(state, self.loop.time(), error.message, leg.choice.worker)
        return None

    def _complete(self) -> FinishReason | None:
        """Whether all tokens were said, so that only the end was lost."""
        sampling = self.request.sampling
        if not self.generated:
            return None
        if self.generated[-1] in sampling.stop_token_ids and len(self.generated) > sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.generated) >= sampling.max_tokens else None

    # -- beginning, limits, end

    def _begin(self) -> None:
        self.begun = True
        self.flow.counters["requests"] += 1
        self.flow.meters.began(self.labels)
        self.flow.records.open(self.record)
        self.record.move(HandoffState.RESERVED, self.loop.time(), "taken on")
        self._arm()

    def _arm(self) -> None:
        """Sets the timer to the next limit: the deadline, or the silence of the worker asked."""
        due = self.due
        if self.leg is not None and not self.leg.stream.over:
            due = min(due, self.leg.stream.heard_at + self._patience(self.leg))
        if self.timer is not None:
            self.timer.cancel()
        self.timer = self.loop.call_at(due, self._look)

    def _patience(self, leg: _Leg) -> float:
        return self.limits.token_timeout_s if leg.stream.spoke else self.limits.first_token_timeout_s

    def _look(self) -> None:
        now, leg = self.loop.time(), self.leg
        if now >= self.due:
            error = DeadlineExceeded(f"not done within the {self.request.deadline_s:g} s the request had")
            self._interrupt(error)
            self._close(HandoffState.FAILED, error.message, error)
            return
        if leg is not None and not leg.stream.over:
            patience = self._patience(leg)
            if now >= leg.stream.heard_at + patience:
                leg.stream.fail(WorkerLost(f"worker {leg.link.card.id} said nothing for {patience:g} s"))
                self._drop_leg(CancelReason.MOVED)
        self._arm()

    def _interrupt(self, verdict: Exception) -> None:
        self.verdict = verdict
        if self.leg is not None:
            self.leg.stream.interrupt(verdict)
        self._wake()
        self.flow.forget(self.request.id)
        self.flow.admission.leave(self.request.id)
        self.flow.wake()

    def _finished(self, finish: FinishReason) -> RunEnd:
        self._close(HandoffState.DONE, f"finished: {finish}", finish)
        return RunEnd(finish, self._usage())

    def _usage(self) -> Usage:
        return Usage(len(self.request.prompt), len(self.generated), self.cached_tokens)

    def _drop_leg(self, reason: CancelReason) -> None:
        if self.leg is not None:
            self.leg.link.drop(self.leg.stream, reason)
            self.flow.roster.settle(self.leg.choice.worker, self.request.id)
            self.leg = None
            self.flow.turn()

    def _forget_early(self, reason: CancelReason) -> None:
        """Nor is another one to begin."""
        self.early_ticket = None
        self.early_avoid.clear()
        self._drop_early(reason)

    def _release(self) -> None:
        self.ticket = None
        if self.held is not None:
            link, lease = self.held
            self.held = None
            link.release(lease)

    def _close(self, state: HandoffState, why: str, end: FinishReason | FleetError | None = None) -> None:
        """The one end of it, on every side: worker, lease, admission, record. Later calls do nothing.

        `end`: how it finished or failed; None: the client gave it up.
        """
        if self.over or not self.begun:
            return
        self.over = True
        now = self.loop.time()
        overdue = isinstance(self.verdict, DeadlineExceeded)
        reason = self.stopped or (CancelReason.DEADLINE if overdue else CancelReason.CLIENT)
        self._drop_leg(reason)
        self._forget_early(reason)
        self._release()
        if self.timer is not None:
            self.timer.cancel()
        self.flow.forget(self.request.id)
        self.flow.admission.leave(self.request.id)
        self.timeline.mark(Stage.ENDED, now)
        self.record.move(state, now, why)
        self._judge(end, now)
        self.flow.records.close(self.record)
        if isinstance(end, FleetError):
            self.flow.counters[f"failed_{type(end).__name__}"] += 1
        else:
            self.flow.counters["cancelled" if end is None else f"finished_{end}"] += 1
        self.flow.turn()

    def _judge(self, end: FinishReason | FleetError | None, now: float) -> None:
        """What became of it, by its objectives."""
        kind = _end_of(end, self.stopped)
        if kind is End.FINISHED and len(self.times) < len(self.generated):
            self._taken()  # The client ended it while it was given this one.
        outcome = Outcome.of(self.timeline, self.times, kind, now)
        verdict = attains(outcome, self.terms.objectives)
        self.flow.judged(self.terms, outcome, verdict, now)
        how = str(end if isinstance(end, FinishReason) else kind)
        self.flow.meters.ended(self.labels, how, outcome, verdict, self.record, self.promised_ttft_s)
        if self.generated:
            self.flow.meters.used(
                self.labels, len(self.request.prompt), self.cached_tokens, len(self.generated)
            )
        self.record.outcome = {
            "class": self.terms.slo_class,
            "tenant": self.terms.tenant,
            "attained": verdict.attained,
            "why": verdict.why,
            **outcome.as_dict(),
        }
        if kind is End.FINISHED and self.forecast is not None and (tpot_s := outcome.tpot_s) is not None:
            self.flow.admission.answered(self.request, self.terms, self.forecast, len(self.times), tpot_s)


def _end_of(end: FinishReason | FleetError | None, stopped: CancelReason | None) -> End:
    match end:
        case FinishReason():
            return End.FINISHED
        case None:
            # A process that leaves ends what still runs: that is not the client's wish.
            return End.FAILED if stopped is CancelReason.DEADLINE else End.CANCELLED
        case Overloaded():
            return End.REJECTED
        case DeadlineExceeded():
            return End.TIMED_OUT
        case _:
            return End.INVALID if end.http_status < 500 else End.FAILED
