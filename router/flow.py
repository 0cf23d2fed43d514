"""The flow of one request through the fleet, top to bottom: the spine.

    admit → choose where the prompt is computed → PrefillJob → first token → choose where it is decoded
    → DecodeJob(ticket) → tokens → end

One *leg* is one job at one worker. After each leg the next one is chosen by what is known so far: nothing
yet, a first token and a ticket, or some tokens and no ticket. So a refusal, a lost worker and the ordinary
hand-off are the same step, and no token is said twice: those that were said go with the next job.

What a request does on its way is in files of their own: its turn (`turn.py`), where it goes next
(`choosing.py`), its jobs at workers (`legs.py`), and what is written down of it (`account.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import assert_never

from fleet.errors import DeadlineExceeded, FleetError, Internal, Overloaded, WorkerLost, error_named
from fleet.goodput import Outcome, Rolling, Verdict
from fleet.handoff import CancelReason, Ended, Lent, Prefilled, Scored, Started, Token
from fleet.ids import WorkerId
from fleet.request import FinishReason, Request, TokenLogprobs, Usage
from fleet.stages import Stage, Timeline
from router.account import Account
from router.admission import Admission
from router.choosing import Chooser, Known
from router.demand import Ledger
from router.legs import Leg, Legs
from router.link import Link
from router.meters import Meters
from router.prefix_index import PrefixIndex
from router.record import HandoffState, Records
from router.roster import LinkState, Roster
from router.run import Run, RunEnd, RunToken, Terms
from router.sessions import Sessions
from router.settings import RouterSettings
from router.turn import Turn, Turns

log = logging.getLogger(__name__)

_STAGES = {stage.value: stage for stage in Stage}


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
        self.turns = Turns(self.admission)
        self.mode = settings.admission.mode
        default = settings.admission.default_class
        self.terms = Terms(default, settings.objectives[default])
        """Of requests that bring none."""
        self.goodput: dict[str, Rolling] = {}
        """By class, from its first request that ended."""
        self.meters = Meters()
        self.demand = Ledger()
        self.records = Records(settings.flow.records)
        self.sessions = Sessions(settings.flow.sessions)
        self.chooser = Chooser(settings, roster, index, self.sessions)
        self.counters: Counter[str] = Counter()
        """Totals since start: `requests`; of each, once, `finished_stop`, `finished_length`, `cancelled` or
        `failed_<error>`; beside them `prefills_remote`, `prefills_local`, `handoffs`, `early_legs`
        (begun while the prompt was being computed), `early_handoffs` (of those, gone on with), `borrows`
        (legs that were told who caches their beginning), `refusals` and `failovers`; and of admission
        `queued` and `shed`."""
        self._change = asyncio.Event()

    @property
    def worker_wait_s(self) -> float:
        """For which a request waits for a first worker: longer where somebody is to bring one."""
        limits = self.settings.flow
        return max(limits.worker_wait_s, limits.scale_wait_s if self.demand.scaling else 0.0)

    def start(self, request: Request, timeline: Timeline, terms: Terms | None = None) -> Run:
        return _Run(self, request, timeline, terms or self.terms)

    def models(self) -> tuple[str, ...]:
        return self.roster.models()

    def serves(self) -> bool:
        """Whether there are workers for a request, of one model at least."""
        return any(self.roster.why_not(model) is None for model in self.roster.models())

    def ready(self) -> str | None:
        """A fleet that was let go to zero is: who comes is held, and wakes it."""
        reasons = [self.roster.why_not(model) for model in self.roster.models()]
        if None in reasons or self.demand.resting:
            return None
        return "; ".join(reason for reason in reasons if reason) or "no worker is known"

    def wake(self) -> None:
        """Who could serve what has changed: those who wait for a worker look again."""
        change, self._change = self._change, asyncio.Event()
        change.set()
        self.turns.look()

    def turn(self) -> None:
        """There may be more room: those who wait for their turn look again."""
        self.turns.look()

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


class _Run:
    """One request on its way. Implements `router.run.Run`."""

    def __init__(self, flow: Flow, request: Request, timeline: Timeline, terms: Terms) -> None:
        self.flow = flow
        self.request = request
        self.known = Known.of(request, terms, timeline.start)
        self.account = Account(flow, self.known, timeline)
        self.legs = Legs(flow, self.known, self.account, self._overdue)
        self.turn = Turn(flow, self.known, self.account, self.legs)
        self.now = asyncio.get_running_loop().time
        self.scores: list[TokenLogprobs] = []
        """Of the prompt's tokens after the first, until they are told with the first token."""
        self.stopped: CancelReason | None = None
        self.begun = False
        self.over = False

    # -- the way of a request

    async def _events(self) -> AsyncGenerator[RunToken | RunEnd, None]:
        account, legs = self.account, self.legs
        self.begun = True
        account.begin(self.now())
        try:
            if self.known.verdict is not None:
                raise self.known.verdict
            self.flow.admission.enter(self.request, account.timeline.start)
            leg = await self.turn.first_leg()
            while True:
                following: Leg | None = None
                failed: FleetError | None = None
                try:
                    async for said in leg.stream:
                        match said:
                            case Token():
                                yield self._token(leg, said)
                                account.taken(self.now())
                            case Started(_, stage):
                                if stage in _STAGES:
                                    account.timeline.mark(_STAGES[stage], self.now())
                            case Scored():
                                self._scored(said)
                            case Lent(_, ticket):
                                legs.lent(ticket)
                            case Prefilled():
                                event = self._prefilled(leg, said)
                                if said.finish is not None:
                                    yield event
                                    account.taken(self.now())
                                    yield self._finished(said.finish)
                                    return
                                # The decode worker is asked before the client is served: a slow client
                                # must not keep KV waiting.
                                following = legs.go_on_early() or legs.try_next()
                                yield event
                                account.taken(self.now())
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
                leg = following or await legs.next(failed)
        except _Stopped:
            self._close(HandoffState.RELEASED, "stopped before it began")
            yield RunEnd(FinishReason.CANCELLED, self._usage())
        except FleetError as error:
            self._close(HandoffState.FAILED, error.message, error)
            raise
        except (GeneratorExit, asyncio.CancelledError):
            self._close(HandoffState.RELEASED, "the reader went away")
            raise
        finally:
            # Only a defect leaves it open: no client's wish, and to be counted as what it is.
            self._close(HandoffState.FAILED, "a defect", Internal("a defect of the router"))

    def __aiter__(self) -> AsyncIterator[RunToken | RunEnd]:
        return self._events()

    @property
    def more(self) -> bool:
        return self.legs.now is not None and self.legs.now.stream.more

    async def stop(self, reason: CancelReason, because: FleetError | None = None) -> None:
        if self.over or self.stopped is not None:
            return
        self.stopped = reason
        self._interrupt(because or _Stopped())
        if because is not None:
            self._close(HandoffState.FAILED, f"the request failed: {because.message}", because)
        elif reason is CancelReason.STOP_STRING:
            self._close(HandoffState.DONE, f"stopped: {reason}", FinishReason.STOP)
        else:
            self._close(HandoffState.RELEASED, f"stopped: {reason}")

    # -- what a leg says

    def _scored(self, said: Scored) -> None:
        """A leg that follows a lost one begins again; what is known is not taken twice."""
        known = len(self.scores) + 1
        if said.start > known:
            raise Internal(f"the worker scored prompt tokens from {said.start} on; {known} was the next")
        self.scores += said.logprobs[known - said.start :]

    def _told(self) -> tuple[TokenLogprobs, ...]:
        scores, self.scores = tuple(self.scores), []
        return scores

    def _token(self, leg: Leg, said: Token) -> RunToken:
        generated = self.known.generated
        generated.append(said.token)
        if len(generated) <= 2:
            self.account.said(self.now())
        if not leg.spoke:
            self.legs.spoke(leg)
        return RunToken(said.token, said.logprobs, self._told() if self.scores else ())

    def _prefilled(self, leg: Leg, said: Prefilled) -> RunToken:
        now, account, ticket = self.now(), self.account, said.ticket
        account.cached_tokens = said.cached_tokens
        self.legs.keep(ticket, leg.link, now)
        if ticket is not None:
            why = f"lease {ticket.lease} of incarnation {ticket.incarnation}"
            account.moved(HandoffState.READY, now, why, leg.choice.worker)
        elif said.finish is None:
            account.moved(HandoffState.RESERVED, now, "no KV was kept", leg.choice.worker)
        self.legs.drop(CancelReason.MOVED)
        self.known.generated.append(said.token)
        self.legs.prefilled()
        account.said(now)
        return RunToken(said.token, said.logprobs, self._told())

    def _ended(self, leg: Leg, said: Ended) -> RunEnd:
        """Raises when it is no good end."""
        match said.finish:
            case FinishReason.STOP | FinishReason.LENGTH:
                if leg.choice.local and said.usage is not None:
                    self.account.cached_tokens = said.usage.cached_tokens
                return self._finished(said.finish)
            case FinishReason.FAILED:
                raise error_named(said.error, said.message, said.retry_after_s)
            case FinishReason.CANCELLED:
                raise WorkerLost(f"worker {leg.link.card.id} gave the request up")

    def _after(self, leg: Leg, error: FleetError) -> FinishReason | None:
        """Settles a failed leg. None: to be tried elsewhere. Raises what cannot be."""
        known, account, counters = self.known, self.account, self.flow.counters
        self.legs.drop(CancelReason.MOVED)
        self.legs.forget_early(CancelReason.MOVED)
        account.forecast = None
        if known.verdict is not None:
            raise known.verdict
        if not error.retryable:
            raise error
        if leg.link.state is LinkState.UP:
            # A lost one is no candidate until its session is open again.
            known.avoid.add(leg.choice.incarnation)
        if isinstance(error, Overloaded):
            known.refused.add(leg.choice.incarnation)
            counters["refusals"] += 1
        elif (finish := known.complete()) is not None:
            return finish
        else:
            known.lost += 1
            counters["failovers"] += 1
            log.warning("request %s: %s", self.request.id, error.message, extra=account.logged)
            if known.lost > self.flow.settings.flow.max_failovers:
                raise error
        state = HandoffState.RESERVED if known.ticket is None else HandoffState.READY
        account.moved(state, self.now(), error.message, leg.choice.worker)
        return None

    # -- its end

    def _overdue(self) -> None:
        error = DeadlineExceeded(f"not done within the {self.request.deadline_s:g} s the request had")
        self._interrupt(error)
        self._close(HandoffState.FAILED, error.message, error)

    def _interrupt(self, verdict: Exception) -> None:
        """Ends the reading, wherever it waits."""
        self.known.verdict = verdict
        self.legs.interrupt(verdict)
        self.turn.wake()
        self.flow.turns.forget(self.request.id)
        self.flow.admission.leave(self.request.id)
        self.flow.wake()

    def _finished(self, finish: FinishReason) -> RunEnd:
        self._close(HandoffState.DONE, f"finished: {finish}", finish)
        return RunEnd(finish, self._usage())

    def _usage(self) -> Usage:
        prompt, generated = len(self.request.prompt), len(self.known.generated)
        return Usage(prompt, generated, self.account.cached_tokens)

    def _close(self, state: HandoffState, why: str, end: FinishReason | FleetError | None = None) -> None:
        """The one end of it, on every side: worker, lease, admission, record. Later calls do nothing.

        `end`: how it finished or failed; None: the client gave it up.
        """
        if self.over or not self.begun:
            return
        self.over = True
        overdue = isinstance(self.known.verdict, DeadlineExceeded)
        self.legs.close(self.stopped or (CancelReason.DEADLINE if overdue else CancelReason.CLIENT))
        self.flow.turns.forget(self.request.id)
        self.flow.admission.leave(self.request.id)
        self.account.close(state, why, end, self.stopped, self.now())
        self.flow.turn()
