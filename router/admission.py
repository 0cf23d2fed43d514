"""Admission: which requests go to a worker now, which wait here in which order, which are refused. Pure.

A request is sent on at once while its worker has room: few prompts queued there, and a batch in which the
objectives of those who run still hold. Else it waits, in one queue for each model. The next one is of the
highest priority; of its tenants the one that has had least (start-time fair queueing over estimated tokens:
Goyal et al., "Start-time Fair Queuing", 1996); of that tenant's requests the one that must start first to be
in time. Where not all can be, those that take most step back, so that as many as possible are. Those that may
be late come after those that will not be, and those that would be late anyway come last: served first they
would make the others late too. Requests of lower priority that have waited for long
get a fixed share all the same.

Refused is, in this order: a sheddable request that would miss its objectives; in a full queue one that is
late already, then the youngest of the lowest priority. Nothing is refused while there is room.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from msgspec import Struct

from fleet.errors import Overloaded
from fleet.ids import RequestId
from fleet.request import Request
from router.forecast import Forecast, Ratio
from router.run import Terms
from router.settings import AdmissionMode, AdmissionSettings, FlowSettings


class Act(StrEnum):
    ADMIT = "admitted"
    QUEUE = "queued"
    REFUSE = "refused"


class Decision(Struct, frozen=True):
    act: Act
    why: str
    ttft_s: float | None = None
    """Forecast, from acceptance on; None: nothing to forecast by."""
    tpot_s: float | None = None
    retry_after_s: float = 0.0
    """Where refused: when what is ahead will have drained."""

    def error(self) -> Overloaded:
        return Overloaded(f"refused to keep others in time: {self.why}", retry_after_s=self.retry_after_s)

    def as_dict(self) -> dict[str, Any]:
        forecasts = {"ttft_s": self.ttft_s, "tpot_s": self.tpot_s}
        shown = {name: round(value, 6) for name, value in forecasts.items() if value is not None}
        return {"verdict": self.act.value, "why": self.why, "forecast": shown}


Refused = tuple[RequestId, Decision]


@dataclass(slots=True, eq=False)
class _Entry:
    """One request under way, as far as admission decides about it."""

    request: Request
    terms: Terms
    accepted: float
    order: int
    cost: float
    """Tokens it is expected to take: uncached ones of the prompt, and the answer's."""
    latest_start: float
    """To be in time nine times of ten, it must start by then: what those who wait are ordered by."""
    lost_at: float
    """Later it would likely miss an objective, or its deadline."""
    queued_at: float
    queued: bool = False

    @property
    def priority(self) -> int:
        return self.terms.objectives.priority

    @property
    def charge(self) -> float:
        """What it costs its tenant."""
        return self.cost / (self.terms.objectives.weight * self.terms.weight)

    @property
    def promise(self) -> tuple[int, float] | None:
        """Its priority, and the time per token that it relies on, ms."""
        tpot_ms = self.terms.objectives.tpot_ms
        return None if tpot_ms is None else (self.priority, tpot_ms)


_SURPRISE = 8
"""As many new ones one counts that was to be in time and was not: more of them will not be."""


@dataclass(slots=True)
class _Backlog:
    """What one tenant has waiting in one level."""

    timely: list[tuple[float, int, _Entry]] = field(default_factory=list)
    """A heap by latest start. Those that left stay in it until they come up."""
    doubtful: list[tuple[float, int, _Entry]] = field(default_factory=list)
    """Those that are past it and may still be in time: a heap by when they would be lost."""
    late: OrderedDict[int, _Entry] = field(default_factory=OrderedDict)
    count: int = 0
    cost: float = 0.0
    changed: int = 0
    """How many came since it was last seen who has to yield."""

    def settle(
        self, now: float, begins: float, rate: float, level: _Level, emptier: bool
    ) -> Iterator[_Entry]:
        """Moves those that have become late; yields the sheddable ones of them, to be refused. The turn of
        its level comes at `begins`, and then so many tokens a second. `emptier`: who stepped back for want of
        room may have it now."""
        while self.timely and (self.timely[0][0] < now or not self.timely[0][2].queued):
            entry = heapq.heappop(self.timely)[2]
            if entry.queued:
                self.changed += _SURPRISE
                heapq.heappush(self.doubtful, (entry.lost_at, entry.order, entry))
        # Looked at again once an eighth has changed, so that one of many costs no more than one of few.
        if (emptier and self.doubtful) or self.changed * 8 > len(self.timely) + len(self.doubtful):
            self.changed = 0
            self._yield(now, begins, rate, level)
        while self.doubtful and (self.doubtful[0][0] < now or not self.doubtful[0][2].queued):
            entry = heapq.heappop(self.doubtful)[2]
            if entry.queued:
                self.late[entry.order] = entry
                if entry.terms.objectives.sheddable:
                    yield entry

    def _yield(self, now: float, begins: float, rate: float, level: _Level) -> None:
        """Where not all can be in time, those that take most become the doubtful ones, so that as many as can
        are: whenever one would be late, the costliest of all up to it steps back (Moore, "An n job, one
        machine sequencing algorithm", 1968). Those that stepped back before are no exception: what was
        before them may have gone away."""
        tenants, others = len(level.backlogs), level.cost - self.cost
        kept: list[tuple[float, int, _Entry]] = []
        doubtful: list[_Entry] = []
        own = 0.0
        """Tokens of those kept. With each the other tenants get as much, but no more than they wait for."""
        waiting = [entry for *_, entry in self.timely + self.doubtful if entry.queued]
        for entry in sorted(waiting, key=lambda entry: (entry.latest_start, entry.order)):
            if entry.latest_start < now:
                doubtful.append(entry)
                continue
            heapq.heappush(kept, (-entry.cost, entry.order, entry))
            if begins + min(own * tenants, own + others) / rate > entry.latest_start:
                dearest = heapq.heappop(kept)[2]
                doubtful.append(dearest)
                own -= dearest.cost
            own += entry.cost
        self.timely = [(entry.latest_start, entry.order, entry) for *_, entry in kept]
        self.doubtful = [(entry.lost_at, entry.order, entry) for entry in doubtful]
        heapq.heapify(self.timely)
        heapq.heapify(self.doubtful)

    def first(self) -> tuple[int, _Entry]:
        """Who it is; 0: it can be in time, 1: perhaps, 2: it would be late."""
        for rank, heap in enumerate((self.timely, self.doubtful)):
            while heap and not heap[0][2].queued:
                heapq.heappop(heap)
            if heap:
                return rank, heap[0][2]
        return 2, next(iter(self.late.values()))


class _Level:
    """All that wait with one priority, shared out between tenants."""

    def __init__(self) -> None:
        self.backlogs: dict[str, _Backlog] = {}
        """Of tenants that have something waiting."""
        self.count = 0
        self.cost = 0.0
        self.oldest: OrderedDict[int, _Entry] = OrderedDict()
        self._virtual = 0.0
        self._finish: dict[str, float] = {}

    def add(self, entry: _Entry) -> None:
        backlog = self.backlogs.setdefault(entry.terms.tenant, _Backlog())
        heapq.heappush(backlog.timely, (entry.latest_start, entry.order, entry))
        backlog.changed += 1
        self.oldest[entry.order] = entry
        for held in (self, backlog):
            held.count += 1
            held.cost += entry.cost

    def remove(self, entry: _Entry) -> None:
        backlog = self.backlogs[entry.terms.tenant]
        backlog.late.pop(entry.order, None)
        del self.oldest[entry.order]
        for held in (self, backlog):
            held.count -= 1
            held.cost -= entry.cost
        if not backlog.count:
            del self.backlogs[entry.terms.tenant]

    def charge(self, entry: _Entry) -> None:
        """It goes to a worker, from here or at once."""
        start = self._start(entry.terms.tenant)
        self._virtual = max(self._virtual, start)
        self._finish[entry.terms.tenant] = start + entry.charge
        if len(self._finish) > 2 * len(self.backlogs) + 1024:
            self._finish = {name: at for name, at in self._finish.items() if at > self._virtual}

    def _start(self, tenant: str) -> float:
        return max(self._virtual, self._finish.get(tenant, 0.0))

    def next(self) -> _Entry:
        """Of those who can still be in time, if there are any, the one whose tenant has had least."""
        firsts = (backlog.first() for backlog in self.backlogs.values())
        return min(firsts, key=lambda first: (first[0], self._start(first[1].terms.tenant)))[1]

    def ahead(self, terms: Terms, cost: float) -> float:
        """Tokens that will go before one more request of these terms, by and large."""
        mine = self.backlogs.get(terms.tenant)
        tenants = len(self.backlogs) + (mine is None)
        return min(self.cost, ((mine.cost if mine else 0.0) + cost) * tenants)


_RATE_S = 10.0
"""Over how long the drain of a queue is measured, seconds."""


class _Lane:
    """The queue of one model, and how fast it drains."""

    def __init__(self) -> None:
        self.levels: dict[int, _Level] = {}
        self.count = 0
        self.fifo: OrderedDict[int, _Entry] = OrderedDict()
        self.nominal = 1.0
        """Prompt tokens a second that its workers say they compute."""
        self.owed = 0.0
        """Tokens that old requests of lower priority have a right to."""
        self._dropped = 0
        """How many left as they waited, since those who stepped back were last looked at."""
        self._drained = self._draining_s = 0.0
        self._since: float | None = None

    def level(self, priority: int) -> _Level:
        return self.levels.setdefault(priority, _Level())

    def waiting(self) -> list[tuple[int, _Level]]:
        """Levels in which somebody waits, the highest first."""
        levels = ((priority, level) for priority, level in self.levels.items() if level.count)
        return sorted(levels, key=lambda pair: -pair[0])

    def add(self, entry: _Entry, now: float) -> None:
        if not self.count:
            self._since = now
        entry.queued, entry.queued_at = True, now
        self.count += 1
        self.fifo[entry.order] = entry
        self.level(entry.priority).add(entry)

    def remove(self, entry: _Entry) -> None:
        entry.queued = False
        self.count -= 1
        del self.fifo[entry.order]
        self.level(entry.priority).remove(entry)

    def drop(self, entry: _Entry) -> None:
        """It leaves and takes none of the time that it was to have."""
        self._dropped += 1
        self.remove(entry)

    def settle(self, now: float) -> list[_Entry]:
        """Those that became late and are to be refused."""
        late: list[_Entry] = []
        rate, begins, emptier = self.rate, now, self._dropped * 8 > self.count
        if emptier:
            self._dropped = 0
        for _, level in self.waiting():
            for backlog in level.backlogs.values():
                late += backlog.settle(now, begins, rate, level, emptier)
            begins += level.cost / rate
        return late

    def drained(self, cost: float, now: float) -> None:
        """One has gone from the queue to a worker."""
        if self._since is not None:
            keep = math.exp((self._since - now) / _RATE_S)
            self._drained = self._drained * keep + cost
            self._draining_s = self._draining_s * keep + now - self._since
        self._since = now if self.count else None

    @property
    def rate(self) -> float:
        """Tokens a second: as measured while the queue drained; `nominal` while that is not known well."""
        return (self.nominal + self._drained) / (1.0 + self._draining_s)

    def ahead(self, terms: Terms, cost: float) -> float:
        """Tokens before one more request of these terms."""
        priority = terms.objectives.priority
        above = sum(level.cost for of, level in self.levels.items() if of > priority)
        level = self.levels.get(priority)
        return above + (level.ahead(terms, cost) if level else 0.0)

    def aged(self, now: float, aging_s: float) -> _Entry | None:
        """The oldest that waits behind a higher priority, if for longer than that."""
        lower = [next(iter(level.oldest.values())) for _, level in self.waiting()[1:]]
        oldest = min(lower, key=lambda entry: entry.order, default=None)
        return oldest if oldest is not None and now - oldest.queued_at >= aging_s else None

    def victim(self, priority: int) -> _Entry | None:
        """Who gives way to a timely newcomer in a full queue."""
        levels = [(of, level) for of, level in reversed(self.waiting()) if of <= priority]
        for _, level in levels:
            late = [entry for backlog in level.backlogs.values() for entry in backlog.late.values()]
            if late:
                return max(late, key=lambda entry: entry.order)
        for of, level in levels:
            if of < priority:
                return next(reversed(level.oldest.values()))
        return None


_ANSWER = 128.0
"""Tokens of an answer, until some of its class are known."""


class Admission:
    """The requests under way in one router: a bounded set, and who of them has to wait."""

    def __init__(self, limits: FlowSettings, settings: AdmissionSettings | None = None) -> None:
        self._limits = limits
        self._settings = settings or AdmissionSettings()
        self._due: dict[RequestId, float] = {}
        self._entries: dict[RequestId, _Entry] = {}
        self._lanes: dict[str, _Lane] = {}
        self._promised: dict[str, Counter[tuple[int, float]]] = {}
        """Of each model what those who run rely on."""
        self._answers: dict[str, float] = {}
        """Of each class the tokens of an answer, on average of late."""
        self._count = 0
        self.ratios: dict[tuple[str, str, bool], Ratio] = {}
        """By `ttft` or `tpot`, the model, and whether a decode worker computed the prompt by choice."""

    def __len__(self) -> int:
        return len(self._due)

    @property
    def queued(self) -> int:
        return sum(lane.count for lane in self._lanes.values())

    def waiting(self) -> Counter[str]:
        """How many wait, by class."""
        return Counter(entry.terms.slo_class for entry in self._entries.values() if entry.queued)

    def enter(self, request: Request, accepted: float) -> float:
        """Takes it on; returns when it is overdue, on the clock of `accepted`.

        Raises `Overloaded` when the router is full, at once.
        """
        if len(self._due) >= self._limits.max_requests:
            raise Overloaded(
                f"{len(self._due)} requests are under way here, the limit (setting flow.max_requests)",
                retry_after_s=self._limits.retry_after_s,
            )
        assert request.id not in self._due, f"request {request.id} is under way already"
        self._due[request.id] = accepted + request.deadline_s
        return self._due[request.id]

    def leave(self, request: RequestId) -> None:
        """However it ended, waiting or not; idempotent."""
        self._due.pop(request, None)
        entry = self._entries.pop(request, None)
        if entry is None:
            return
        if entry.queued:
            self._lanes[entry.request.model].drop(entry)
        elif (promise := entry.promise) is not None:
            promised = self._promised[entry.request.model]
            promised[promise] -= 1
            if not promised[promise]:
                del promised[promise]

    def overdue(self, now: float) -> tuple[RequestId, ...]:
        """Those that should have ended by now: always empty, or something hangs."""
        return tuple(request for request, due in self._due.items() if due < now)

    # -- decisions

    def arrive(
        self, request: Request, terms: Terms, forecast: Forecast, accepted: float, now: float
    ) -> tuple[Decision, Refused | None]:
        """What is to be done with a request that has entered; and who is refused in its place, if any.

        QUEUE: it is in the queue; ask `head`. In the mode `observe` it never is, whatever the decision.
        """
        entry = self._entry(request, terms, forecast, accepted, now)
        lane = self._lanes.setdefault(request.model, _Lane())
        lane.nominal = forecast.rate
        full = self._no_room(entry, forecast)
        if not full and (not lane.count or forecast.elsewhere):
            self._run(entry, lane)
            return self._decision(Act.ADMIT, f"room: {_shown(forecast)}", entry, forecast, now), None
        ahead = lane.ahead(terms, entry.cost)
        wait_s = ahead / lane.rate + max(0.0, forecast.ahead_s - self.ahead_s(terms))
        late = now + wait_s > entry.lost_at
        act, why = Act.QUEUE, full or f"{lane.count} requests wait before it"
        victim: _Entry | None = None
        if late and terms.objectives.sheddable:
            act = Act.REFUSE
            why = f"it would be late ({terms.slo_class} is sheddable): {ahead:.0f} tokens are ahead, {why}"
        elif self.queued >= self._settings.max_queued:
            victim = None if late else lane.victim(entry.priority)
            if victim is None:
                act, why = Act.REFUSE, f"{self.queued} requests wait here (setting admission.max_queued)"
        decision = self._decision(act, why, entry, forecast, now, wait_s)
        if self._settings.mode is AdmissionMode.OBSERVE:
            self._run(entry, lane)
            return decision, None
        refused: Refused | None = None
        if act is Act.QUEUE:
            if victim is not None:
                why = f"it gave way to {request.id} in a full queue (setting admission.max_queued)"
                refused = self._give_up(lane, victim, why)
            lane.add(entry, now)
            self._entries[request.id] = entry
        return decision, refused

    def wait_s(self, model: str) -> float:
        """How long it will take until all who wait now have gone, seconds."""
        lane = self._lanes[model]
        return sum(level.cost for level in lane.levels.values()) / lane.rate

    def models(self) -> tuple[str, ...]:
        """Those with somebody waiting."""
        return tuple(model for model, lane in self._lanes.items() if lane.count)

    def expired(self, now: float) -> list[Refused]:
        """Takes out of the queue and returns those that have waited in vain."""
        ended: list[Refused] = []
        for lane in self._lanes.values():
            for entry in lane.settle(now):
                waited = f"{now - entry.queued_at:.3g} s of waiting"
                why = f"it would be late ({entry.terms.slo_class} is sheddable), after {waited}"
                ended.append(self._give_up(lane, entry, why))
            while lane.count:
                entry = next(iter(lane.fifo.values()))
                if now - entry.queued_at < self._settings.max_wait_s:
                    break
                why = f"it waited for {now - entry.queued_at:.3g} s (setting admission.max_wait_s)"
                ended.append(self._give_up(lane, entry, why))
        return ended

    def head(self, model: str, now: float) -> RequestId | None:
        """Whose turn it is; None: nobody waits. `expired` was asked before."""
        lane = self._lanes.get(model)
        if lane is None or not lane.count:
            return None
        aged = lane.aged(now, self._settings.aging_s)
        if aged is not None and lane.owed >= aged.cost:
            return aged.request.id
        return lane.waiting()[0][1].next().request.id

    def offer(self, request: RequestId, forecast: Forecast | None, now: float) -> Decision:
        """Whether the head goes now: ADMIT, and it has left the queue; or QUEUE, and nobody goes.

        No forecast: nobody could take it; that is not for admission to tell.
        """
        entry = self._entries[request]
        lane = self._lanes[entry.request.model]
        aged = lane.aged(now, self._settings.aging_s)
        full = "" if forecast is None else self._no_room(entry, forecast, turn=entry is aged)
        if full:
            return Decision(Act.QUEUE, full)
        if aged is None:
            lane.owed = 0.0
        elif aged is entry:
            lane.owed = max(0.0, lane.owed - entry.cost)
        else:
            lane.owed += self._settings.aged_share * entry.cost
        lane.remove(entry)
        lane.drained(entry.cost, now)
        self._run(entry, lane)
        waited = f"after {now - entry.queued_at:.3g} s in the queue"
        if forecast is None:
            return Decision(Act.ADMIT, f"{waited}: no worker is left")
        return self._decision(Act.ADMIT, f"{waited}: {_shown(forecast)}", entry, forecast, now)

    # -- what is learnt

    def first_token(self, request: Request, forecast: Forecast, seconds: float) -> None:
        """It came so long after the dispatch."""
        self._ratio("ttft", request.model, forecast).learn(forecast.ahead_s + forecast.work_s, seconds)

    def answered(
        self, request: Request, terms: Terms, forecast: Forecast, tokens: int, tpot_s: float
    ) -> None:
        """A whole answer of at least two tokens."""
        self._ratio("tpot", request.model, forecast).learn(forecast.tpot_s, tpot_s)
        mean = self._answers.get(terms.slo_class, _ANSWER)
        self._answers[terms.slo_class] = mean + (tokens - mean) / 16

    # -- how

    def _entry(
        self, request: Request, terms: Terms, forecast: Forecast, accepted: float, now: float
    ) -> _Entry:
        promised, keep = terms.objectives, 1 - self._settings.margin
        answer = self.answer(request, terms)
        first_s = self.ahead_s(terms) + forecast.work_s
        ttft = self._ratio("ttft", request.model, forecast)
        tpot = self._ratio("tpot", request.model, forecast)

        def start_by(first_s: float, token_s: float, share: float) -> float:
            """To have so much of each objective suffice."""
            whole_s = first_s + answer * token_s
            by = accepted + request.deadline_s - whole_s
            if promised.ttft_ms is not None:
                by = min(by, accepted + share * promised.ttft_ms / 1000 - first_s)
            if promised.e2e_ms is not None:
                by = min(by, accepted + share * promised.e2e_ms / 1000 - whole_s)
            return by

        latest = start_by(ttft.safe(first_s), tpot.safe(forecast.tpot_s), keep)
        # What may still succeed is not given up for what is promised by nine times out of ten.
        lost_at = max(latest, start_by(ttft.likely(first_s), tpot.likely(forecast.tpot_s), 1.0))
        self._count += 1
        cost = forecast.tokens + answer
        return _Entry(request, terms, accepted, self._count, cost, latest, lost_at, now)

    def answer(self, request: Request, terms: Terms) -> float:
        """Tokens that its answer is expected to have."""
        return min(request.sampling.max_tokens, self._answers.get(terms.slo_class, _ANSWER))

    def ahead_s(self, terms: Terms) -> float:
        """How much may be queued at a worker for it to be sent more: of a short TTFT only a part."""
        ttft_ms = terms.objectives.ttft_ms
        return min(self._settings.ahead_s, math.inf if ttft_ms is None else ttft_ms / 4000)

    def _no_room(self, entry: _Entry, forecast: Forecast, *, turn: bool = False) -> str:
        """Why it cannot go now; empty: it can. `turn`: of an old one, which regards nobody any more."""
        limit = self.ahead_s(entry.terms)
        if forecast.ahead_s > limit:
            return f"{forecast.ahead_s:.3g} s of prompts are queued at its worker, more than {limit:.3g} s"
        if forecast.idle or forecast.sequences < self._settings.least_running:
            return ""
        promised = () if turn else self._promised.get(entry.request.model, ())
        limits = [tpot_ms for priority, tpot_ms in promised if priority >= entry.priority]
        if (own := entry.terms.objectives.tpot_ms) is not None:
            limits.append(own)
        tpot_ms = 1000 * self._ratio("tpot", entry.request.model, forecast).safe(forecast.tpot_s)
        most = min(limits, default=math.inf) * (1 - self._settings.margin)
        if tpot_ms > most:
            return (
                f"with {forecast.sequences:.0f} sequences a token would take {tpot_ms:.3g} ms, "
                f"more than {most:.3g} ms"
            )
        return ""

    def _run(self, entry: _Entry, lane: _Lane) -> None:
        """It goes to a worker."""
        self._entries[entry.request.id] = entry
        lane.level(entry.priority).charge(entry)
        if (promise := entry.promise) is not None:
            self._promised.setdefault(entry.request.model, Counter())[promise] += 1

    def _give_up(self, lane: _Lane, entry: _Entry, why: str) -> Refused:
        lane.drop(entry)
        del self._entries[entry.request.id]
        retry_after_s = _drain_s(lane.ahead(entry.terms, entry.cost) / lane.rate)
        return entry.request.id, Decision(Act.REFUSE, why, retry_after_s=retry_after_s)

    def _decision(
        self, act: Act, why: str, entry: _Entry, forecast: Forecast, now: float, wait_s: float = 0.0
    ) -> Decision:
        model = entry.request.model
        ttft, tpot = self._ratio("ttft", model, forecast), self._ratio("tpot", model, forecast)
        # Who waits for its turn meets a shorter queue at its worker then.
        ahead_s = min(forecast.ahead_s, self.ahead_s(entry.terms)) if wait_s else forecast.ahead_s
        return Decision(
            act,
            why,
            now - entry.accepted + wait_s + ttft.likely(ahead_s + forecast.work_s),
            tpot.likely(forecast.tpot_s),
            _drain_s(wait_s) if act is Act.REFUSE else 0.0,
        )

    def _ratio(self, kind: str, model: str, forecast: Forecast) -> Ratio:
        ratio = self.ratios.get((kind, model, forecast.elsewhere))
        if ratio is None:
            ratio = self.ratios[kind, model, forecast.elsewhere] = Ratio()
        return ratio


def _drain_s(seconds: float) -> float:
    """What a refused client is told to wait: at least a second, or it would only add to the load."""
    return min(300.0, max(1.0, seconds))


def _shown(forecast: Forecast) -> str:
    return f"{forecast.ahead_s * 1000:.0f} ms of prompts ahead, {forecast.sequences:.0f} sequences"
