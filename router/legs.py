"""The legs of one request: jobs at workers, one after another, the next one perhaps begun early.

Of a prompt that takes several steps the next leg begins *early*: a decode worker brings what of the KV is
final while the rest is computed, and is told the first token when it is there. Whatever becomes of an early
leg, without it the request goes on as if there had been none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fleet.errors import FleetError, Overloaded, Unavailable, WorkerLost
from fleet.handoff import CancelReason, Ended, KvTicket
from fleet.ids import Incarnation, LeaseId
from fleet.member import Role
from fleet.stages import Stage
from router.account import Account
from router.choosing import Found, Known
from router.cost import Choice
from router.forecast import Forecast
from router.link import Link, Stream
from router.record import HandoffState

if TYPE_CHECKING:
    from router.flow import Flow

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Leg:
    """One job at one worker."""

    link: Link
    stream: Stream
    choice: Choice
    spoke: bool = False
    """Whether a token of it was read."""


class Legs:
    """The leg that runs, the one that begins early, the KV between two of them, and how long each may be
    silent."""

    def __init__(self, flow: Flow, known: Known, account: Account, overdue: Callable[[], None]) -> None:
        """`overdue` is called when the request's time is over."""
        self._flow = flow
        self._known = known
        self._account = account
        self._overdue = overdue
        self._limits = flow.settings.flow
        self._loop = asyncio.get_running_loop()
        self.now: Leg | None = None
        """The one that runs."""
        self._early: Leg | None = None
        """The next one, while this one computes the prompt."""
        self._early_ticket: KvTicket | None = None
        self._early_avoid: set[Incarnation] = set()
        """Lives of workers that did not take it early; they are asked again when the prompt is computed."""
        self._ticket_at = 0.0
        self._held: tuple[Link, LeaseId] | None = None
        """The lease to release, and where."""
        self._waiting_since: float | None = None
        """When a worker for the next leg was first looked for; None while one says tokens."""
        self._timer: asyncio.Handle | None = None
        self._look_at = 0.0
        """When it goes off. It cannot be asked: uvloop gives one that is due at once no time."""

    # -- the next one

    async def next(self, after: FleetError | None = None) -> Leg:
        """Dispatches the next job, waiting for a worker as long as the settings allow.

        Raises what the client is to be told when there is none: `after`, if the last leg failed.
        """
        known, limits, clock = self._known, self._limits, self._loop.time
        # What a client was given already it cannot ask for again: such a request waits for longer.
        wait_s = limits.resume_wait_s if known.generated or known.lost else 0.0
        # Counted from the last token on: asking again and being refused again is one wait.
        if self._waiting_since is None:
            self._waiting_since = clock()
        until = min(known.due, self._waiting_since + max(wait_s, self._flow.worker_wait_s))
        anew = clock() + limits.retry_after_s
        while True:
            if known.verdict is not None:
                raise known.verdict
            if (leg := self.try_next()) is not None:
                return leg
            error, now = after or self._flow.chooser.nobody(known.request), clock()
            full = isinstance(error, Overloaded) and bool(known.generated)
            if now >= until or not (full or isinstance(error, Unavailable)):
                raise error
            # Who was full may have room soon, who was silent may speak again, and neither tells.
            again = min(until, now + limits.retry_after_s) if full or known.avoid else until
            if known.ticket is not None:
                again = min(again, now + known.ticket.lease_s / 3)
                self._renew(now)
            self.arm()
            if after is None and not known.generated:
                self._flow.demand.hold(known.request.id, limits)
            try:
                await self._flow.changed(again)
            finally:
                self._flow.demand.held.discard(known.request.id)
            known.avoid -= known.refused
            known.refused.clear()
            if clock() >= anew:
                known.avoid.clear()  # Not sooner, or one that fails at once would use up all failovers.

    def try_next(self, found: Found | None = None, cast: Forecast | None = None) -> Leg | None:
        """Chooses by what is known so far, or as was just `found`, and dispatches; None: nobody can take it
        now. `cast`: what was forecast of it there."""
        flow, known = self._flow, self._known
        gone: set[Incarnation] = set()
        """Sessions that have just ended; not to be avoided when they are open again."""
        while (found := found or self._choose(gone)) is not None:
            pool, choice, job = found
            link = flow.links.get(choice.worker)
            try:
                if link is None or link.card.incarnation != choice.incarnation:
                    raise WorkerLost(f"worker {choice.worker} is gone")
                stream = link.dispatch(job)
            except WorkerLost:
                gone.add(choice.incarnation)
                found = cast = None
                continue
            now = self._loop.time()
            self._tell_picture(found, now)
            self._account.sent(job, choice, cast, now)
            log.debug("request %s: sent to %s: %s", known.request.id, choice.worker, choice.why,
                      extra=self._account.logged)  # fmt: skip
            if not known.generated:
                known.pool = pool
            self.now = Leg(link, stream, choice)
            self.arm()
            return self.now
        return None

    def _choose(self, gone: set[Incarnation]) -> Found | None:
        chooser, known, now = self._flow.chooser, self._known, self._loop.time()
        if known.ticket is not None:
            stands = self._ticket_at + known.ticket.lease_s - now
            if stands > (self._limits.lease_margin_s if known.lost else 0.0):
                if (found := chooser.reader(known, now, gone)) is not None:
                    return found
            else:
                self._give_up_kv("the lease is too old", now)
        found = chooser.computer(known, now, gone)
        # Where there is nobody, the KV, if there is any, stays for whoever has room soon.
        if found is not None and known.ticket is not None:
            self._give_up_kv("nobody left can read the KV", now)
        return found

    def _tell_picture(self, found: Found, now: float) -> None:
        """What is sent to a worker counts at once, before it reports it."""
        flow, choice = self._flow, found.choice
        flow.roster.sent(choice.worker, self._known.request.id, choice.tokens, choice.blocks)
        flow.index.sent(choice.worker, flow.chooser.names(self._known, found.pool), now)

    # -- the KV between two legs

    def keep(self, ticket: KvTicket | None, link: Link, now: float) -> None:
        """The prompt's KV waits for who reads it."""
        self.release()
        self._known.ticket, self._ticket_at = ticket, now
        if ticket is not None:
            self._held = (link, ticket.lease)
            self._flow.roster.keeps(link.card.id, ticket.lease)

    def release(self) -> None:
        """Nobody wants it any more. Idempotent."""
        self._known.ticket = None
        if self._held is not None:
            link, lease = self._held
            self._held = None
            self._flow.roster.keeps_no_more(link.card.id, lease)
            link.release(lease)

    def _give_up_kv(self, why: str, now: float) -> None:
        self.release()
        self._account.moved(HandoffState.RESERVED, now, why)

    def _renew(self, now: float) -> None:
        """The KV stays until somebody has room for it."""
        if self._held is not None:
            link, lease = self._held
            with contextlib.suppress(WorkerLost):
                link.renew(lease)
                self._ticket_at = now  # Where it did not stand any more, the reader is told so.

    # -- the early one

    def lent(self, ticket: KvTicket) -> None:
        """A part of the KV is final: a decode worker that has room now may bring it."""
        self._early_ticket = ticket
        self._try_early()

    def _try_early(self) -> None:
        flow, known, now = self._flow, self._known, self._loop.time()
        ticket = self._early_ticket
        while ticket is not None and self.now is not None:
            found = flow.chooser.early(known, ticket, now, self._early_avoid)
            if found is None:
                return
            choice = found.choice
            standing, link = flow.roster.get(choice.worker), flow.links.get(choice.worker)
            if standing is None or standing.blocks_free < choice.blocks:
                why = f"not early: {choice.why}"
                self._account.moved(HandoffState.PREFILLING, now, why, choice.worker)
                return
            try:
                if link is None or link.card.incarnation != choice.incarnation:
                    raise WorkerLost(f"worker {choice.worker} is gone")
                stream = link.dispatch(found.job)
            except WorkerLost:
                self._early_avoid.add(choice.incarnation)
                continue
            stream.on_end = self._early_ended
            self._early = Leg(link, stream, choice)
            self._tell_picture(found, now)
            flow.counters["early_legs"] += 1
            self._account.moved(HandoffState.LENDING, now, choice.why, choice.worker, choice.considered)
            return

    def _early_ended(self) -> None:
        """Before the prompt was computed: another worker may take it early, or one will then."""
        early = self._early
        if early is None:
            return
        ends = [said for said in early.stream.unread() if isinstance(said, Ended)]
        why = (ends[0].message or str(ends[0].finish)) if ends else str(early.stream.error)
        self._drop_early(CancelReason.MOVED)
        self._early_avoid.add(early.choice.incarnation)
        self._account.moved(HandoffState.PREFILLING, self._loop.time(), why, early.choice.worker)
        self._try_early()

    def go_on_early(self) -> Leg | None:
        """The prompt is computed: the early leg, if there is one, is told the first token."""
        early, now, account = self._early, self._loop.time(), self._account
        if early is None:
            return None
        lent, ticket = self._early_ticket, self._known.ticket
        if lent is None or ticket is None or lent.lease != ticket.lease:
            # Its path to the KV broke, and the loan with it: one that begins now can read all of it.
            self._drop_early(CancelReason.MOVED)
            return None
        try:
            early.link.proceed(early.stream, tuple(self._known.generated))
        except WorkerLost:
            self._drop_early(CancelReason.MOVED)
            return None
        # From here on it is a leg like any other: what it said so far is read now, so that the timeline
        # has the part of the pull that the client waits for.
        self._early, self.now = None, early
        early.stream.on_end, early.stream.heard_at = None, now
        account.moved(HandoffState.PULLING, now, "has begun early", early.choice.worker)
        account.timeline.mark(Stage.DECODE_SENT, now)
        self._flow.counters["handoffs"] += 1
        self._flow.counters["early_handoffs"] += 1
        account.went(Role.DECODE, early.choice)
        self.arm()
        return early

    def forget_early(self, reason: CancelReason) -> None:
        """Nor is another one to begin."""
        self._early_ticket = None
        self._early_avoid.clear()
        self._drop_early(reason)

    def _drop_early(self, reason: CancelReason) -> None:
        if self._early is not None:
            early, self._early = self._early, None
            early.stream.on_end = None
            self._let_go(early, reason)

    # -- their limits and ends

    def spoke(self, leg: Leg) -> None:
        """It said its first token."""
        self._waiting_since = None
        leg.spoke = True
        self.arm()  # From now on the limit is that between tokens.
        if self._known.ticket is not None:
            self.release()  # The decode worker goes on: the KV is there.

    def prefilled(self) -> None:
        """It said the first token, and its last word with it."""
        self._waiting_since = None

    def arm(self) -> None:
        """Looks at the next limit: the deadline, or the silence of the worker asked. A timer that is due
        before is left as it is: it will look, and be set again."""
        due = self._known.due
        if self.now is not None and not self.now.stream.over:
            due = min(due, self.now.stream.heard_at + self._patience(self.now))
        if self._timer is not None:
            if self._look_at <= due:
                return
            self._timer.cancel()
        self._look_at = due
        self._timer = self._loop.call_at(due, self._look)

    def _patience(self, leg: Leg) -> float:
        return self._limits.token_timeout_s if leg.stream.spoke else self._limits.first_token_timeout_s

    def _look(self) -> None:
        self._timer = None
        now, leg = self._loop.time(), self.now
        if now >= self._known.due:
            self._overdue()
            return
        if leg is not None and not leg.stream.over:
            patience = self._patience(leg)
            if now >= leg.stream.heard_at + patience:
                leg.stream.fail(WorkerLost(f"worker {leg.link.card.id} said nothing for {patience:g} s"))
                self.drop(CancelReason.MOVED)
        self.arm()

    def interrupt(self, verdict: Exception) -> None:
        """Whoever reads the leg that runs gets it next."""
        if self.now is not None:
            self.now.stream.interrupt(verdict)

    def drop(self, reason: CancelReason) -> None:
        """The one that runs; idempotent."""
        if self.now is not None:
            leg, self.now = self.now, None
            self._let_go(leg, reason)

    def _let_go(self, leg: Leg, reason: CancelReason) -> None:
        leg.link.drop(leg.stream, reason)
        self._flow.roster.settle(leg.choice.worker, self._known.request.id)
        self._flow.turn()

    def close(self, reason: CancelReason) -> None:
        """Whatever is left of it at workers."""
        self.drop(reason)
        self.forget_early(reason)
        self.release()
        if self._timer is not None:
            self._timer.cancel()
        # The request holds its legs: it would wait, prompt and all, for somebody to look for cycles.
        self._overdue = lambda: None
