"""The account of one request: its record, timeline and figures, from its beginning to its one end."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from fleet.errors import DeadlineExceeded, FleetError, Overloaded
from fleet.goodput import End, Outcome, attains
from fleet.handoff import CancelReason, DecodeJob, PrefillJob
from fleet.ids import WorkerId
from fleet.member import Role
from fleet.request import FinishReason
from fleet.stages import Stage, Timeline
from router.admission import Decision
from router.choosing import Known
from router.cost import Choice, Considered
from router.forecast import Forecast
from router.record import HandoffRecord, HandoffState

if TYPE_CHECKING:
    from router.flow import Flow


class Account:
    """Times are the loop's."""

    def __init__(self, flow: Flow, known: Known, timeline: Timeline) -> None:
        request, terms = known.request, known.terms
        self._flow = flow
        self._known = known
        self.timeline = timeline
        self.record = HandoffRecord(
            request.id,
            request.model,
            len(request.prompt),
            timeline.start,
            terms.slo_class,
            terms.tenant,
            timeline.marks,
        )
        self.labels = flow.meters.labels(request.model, terms.slo_class)
        self.logged = {"request": request.id}
        """What its log lines are found by, here and at workers."""
        self.times = array("d")
        """When each token was taken by the client, seconds since acceptance."""
        self.cached_tokens = 0
        """Of the prompt, where it was computed."""
        self.forecast: Forecast | None = None
        """Of the first leg, as it was dispatched; None: of another kind, or lost."""
        self._revisions: set[str] = set()
        """Of the workers that it was sent to."""
        self._promised: Decision | None = None
        """When it came, with what was forecast of it."""
        self._sent_at = 0.0

    def begin(self, now: float) -> None:
        flow = self._flow
        flow.counters["requests"] += 1
        flow.meters.began(self.labels)
        flow.demand.began(self._known.terms, len(self._known.request.prompt))
        flow.records.open(self.record)
        self.record.move(HandoffState.RESERVED, now, "taken on")

    def decided(self, decision: Decision, now: float) -> None:
        """By admission."""
        if not self.record.admission:
            self._promised = decision
        at_s = round(now - self.timeline.start, 6)
        self.record.admission.append({"at_s": at_s, **decision.as_dict()})

    def moved(
        self,
        state: HandoffState,
        now: float,
        why: str,
        worker: WorkerId | None = None,
        considered: Considered | None = None,
    ) -> None:
        self.record.move(state, now, why, worker, considered)

    def sent(self, job: PrefillJob | DecodeJob, choice: Choice, cast: Forecast | None, now: float) -> None:
        """A leg was dispatched. `cast`: what was forecast of it there."""
        flow = self._flow
        if isinstance(job, PrefillJob):
            state, stage, count = HandoffState.PREFILLING, Stage.PREFILL_SENT, "prefills_remote"
        elif job.ticket is not None:
            state, stage, count = HandoffState.PULLING, Stage.DECODE_SENT, "handoffs"
        else:
            state, stage, count = HandoffState.PREFILLING, Stage.PREFILL_SENT, "prefills_local"
        if not self._known.generated:
            self.forecast = cast
        self._sent_at = now
        if (standing := flow.roster.get(choice.worker)) is not None and standing.card.revision:
            self._revisions.add(standing.card.revision)
        self.record.move(state, now, choice.why, choice.worker, choice.considered)
        self.timeline.mark(stage, now)
        flow.counters[count] += 1
        if job.holder is not None:
            flow.counters["borrows"] += 1
        self.went(Role.PREFILL if isinstance(job, PrefillJob) else Role.DECODE, choice)

    def went(self, role: Role, choice: Choice) -> None:
        terms = self._known.terms
        self._flow.sessions.went(terms.tenant, terms.session, role, choice.worker)

    def said(self, now: float) -> None:
        """The first token has come, or the second one."""
        count = len(self._known.generated)
        self.timeline.mark(Stage.FIRST_TOKEN if count == 1 else Stage.SECOND_TOKEN, now)
        if count == 1 and self.forecast is not None:
            self._flow.admission.first_token(self._known.request, self.forecast, now - self._sent_at)

    def taken(self, now: float) -> None:
        """The client has the last token that was said."""
        self.times.append(now - self.timeline.start)

    def close(
        self,
        state: HandoffState,
        why: str,
        end: FinishReason | FleetError | None,
        stopped: CancelReason | None,
        now: float,
    ) -> None:
        """`end`: how it finished or failed; None: the client gave it up. To be called once."""
        flow = self._flow
        self.timeline.mark(Stage.ENDED, now)
        self.record.move(state, now, why)
        self._judge(end, stopped, now)
        flow.records.close(self.record)
        if isinstance(end, FleetError):
            flow.counters[f"failed_{type(end).__name__}"] += 1
        else:
            flow.counters["cancelled" if end is None else f"finished_{end}"] += 1

    def _judge(self, end: FinishReason | FleetError | None, stopped: CancelReason | None, now: float) -> None:
        """What became of it, by its objectives."""
        flow, known = self._flow, self._known
        terms, prompt, generated = known.terms, len(known.request.prompt), len(known.generated)
        kind = _end_of(end, stopped)
        if kind is End.FINISHED and len(self.times) < generated:
            self.taken(now)  # The client ended it while it was given this one.
        outcome = Outcome.of(self.timeline, self.times, kind, now)
        verdict = attains(outcome, terms.objectives)
        flow.judged(terms, outcome, verdict, now)
        flow.demand.ended(terms, outcome, verdict, prompt, self.cached_tokens, generated)
        how = str(end if isinstance(end, FinishReason) else kind)
        flow.meters.ended(self.labels, how, outcome, verdict, self.record, self._promised)
        flow.meters.served(self._revisions, verdict)
        if generated:
            flow.meters.used(self.labels, prompt, self.cached_tokens, generated)
        self.record.outcome = {
            "class": terms.slo_class,
            "tenant": terms.tenant,
            "attained": verdict.attained,
            "why": verdict.why,
            **outcome.as_dict(),
        }
        if kind is End.FINISHED and self.forecast is not None and (tpot_s := outcome.tpot_s) is not None:
            flow.admission.answered(known.request, terms, self.forecast, len(self.times), tpot_s)


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
