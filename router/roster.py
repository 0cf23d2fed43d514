"""The roster: which workers could serve what now, and how loaded each is. Pure.

A fold of what the registry shows, what the workers report, how their sessions fare and what this router
and the others sent there. A figure nobody gave is a documented guess (`UnknownSettings`), never zero.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from fleet.block_hash import HASH_SPEC
from fleet.events import Dispatch, LoadReport, Settled
from fleet.ids import Incarnation, LeaseId, RequestId, WorkerId
from fleet.kv_layout import Fingerprint, KvLayout
from fleet.member import MemberState, Role, WorkerCard
from router.settings import CostSettings, UnknownSettings
from router.step_line import StepLine


class LinkState(StrEnum):
    """How this router's session with a worker fares."""

    OPENING = "opening"
    """Never opened yet."""
    UP = "up"
    LOST = "lost"
    """Broken, or could not be opened; being tried again."""


@dataclass(slots=True)
class _Sent:
    """One request at a worker, of this router or another."""

    tokens: int
    blocks: int
    counted: bool = False
    """The worker's report includes it, or would if it were there."""
    missed: bool = False
    at: float = 0.0
    """When another router's was heard of."""


@dataclass(slots=True)
class Standing:
    """One worker as this router knows it; the figures are those a choice reads, kept current."""

    card: WorkerCard
    listed: bool = True
    """Whether the registry shows it; one that vanished in a crowd is kept while its session lives."""
    parted: bool = False
    """It vanished alone and gets nothing new; what it runs and keeps for us stays while its session lives:
    that a lease lapsed is no reason to tear a stream from a worker that speaks."""
    link: LinkState = LinkState.OPENING
    report: LoadReport | None = None
    """The last one, while it is young enough to count."""
    reported_at: float = 0.0
    worked_at: float = 0.0
    """When a report last showed work there; long after that its measured speeds are old news."""
    sent: dict[RequestId, _Sent] = field(default_factory=dict)
    kept: set[LeaseId] = field(default_factory=set)
    """KV there that requests of this router wait to have read."""
    own_tokens: int = 0
    """Of all in `sent`."""
    others: dict[tuple[Incarnation, RequestId], _Sent] = field(default_factory=dict)
    """What other routers sent there, by their lives."""
    new: int = 0
    """How many in `sent` and `others` the report does not count."""
    new_tokens: int = 0
    new_blocks: int = 0
    settled: int = 0
    """Requests counted in the last report and ended since."""
    settled_tokens: int = 0
    queued_tokens: float = 0.0
    sequences: float = 0.0
    waiting: float = 0.0
    blocks_free: float = 0.0
    prefill_tokens_s: float = 1.0
    decode_step_s: float = 1.0
    decode_batch: float = 1.0
    decode_each_s: float | None = None
    """By how much each sequence more makes a step of its like longer. None: not known yet."""
    pull_bytes_s: float = 1.0
    weighed: tuple[CostSettings, float, float, float, float] | None = None
    """What `router.cost` makes of these figures by themselves; None: they have changed since."""

    @property
    def id(self) -> WorkerId:
        return self.card.id

    @property
    def usable(self) -> bool:
        """Whether a request could be sent there now."""
        return (
            self.link is LinkState.UP
            and not self.parted
            and self.card.state is MemberState.READY
            and (self.report is None or self.report.state == MemberState.READY)
        )


@dataclass(frozen=True, slots=True)
class Pool:
    """Usable workers of one model whose KV means the same to each other: only they are ever paired."""

    fingerprint: Fingerprint
    digest: str
    block_size: int
    block_bytes: int
    prefill: tuple[Standing, ...]
    decode: tuple[Standing, ...]
    max_tokens: int
    """Longest sequence that any decode worker here can hold."""


@dataclass(frozen=True, slots=True)
class Change:
    """What a view or a lost session changed in the roster."""

    joined: tuple[WorkerCard, ...] = ()
    left: tuple[WorkerCard, ...] = ()
    """Gone, at once and wholly; a new incarnation is one left and one joined."""
    doubted: tuple[WorkerId, ...] = ()
    """Vanished in a crowd: kept while their sessions live."""
    turned: tuple[WorkerCard, ...] = ()
    """Have another role in the same life: their sessions, their streams and what they cache stay."""


class _Usual:
    """What workers of one role and model have measured of late. One that has measured nothing yet is
    supposed to be as they are: taken for slower it would never be sent anything to measure. So is one that
    has been idle for long: by what it measured in a bad moment it would stay idle for ever."""

    def __init__(self, unknown: UnknownSettings) -> None:
        self.prefill_tokens_s = unknown.prefill_tokens_s
        self.decode_step_s = unknown.decode_step_s
        self.decode_batch = 1.0
        self.pull_bytes_s = unknown.pull_bytes_s
        self.steps = StepLine()
        self._known: set[str] = set()

    def learn(self, report: LoadReport, *, worked: bool) -> None:
        """`worked`: the figures are of now; others count only where nothing better is known."""
        if worked and report.decode_step_s and report.decode_batch:
            self.steps.learn(report.decode_batch, report.decode_step_s)
        for name in _MEASURED:
            said = getattr(report, name)
            if said and (worked or name not in self._known):
                # The first one replaces a guess.
                weight = _USUAL_WEIGHT if name in self._known else 1.0
                self._known.add(name)
                setattr(self, name, getattr(self, name) + weight * (said - getattr(self, name)))


_MEASURED = ("prefill_tokens_s", "decode_step_s", "decode_batch", "pull_bytes_s")
_USUAL_WEIGHT = 0.05
"""Of one report among those of all workers."""


class Roster:
    def __init__(self, unknown: UnknownSettings, *, mass_share: float = 0.5, grace_s: float = 1.0) -> None:
        """`grace_s`: see `PeerSettings`."""
        self._unknown = unknown
        self._usual: dict[tuple[str, Role], _Usual] = {}
        self._mass_share = mass_share
        self._grace_s = grace_s
        self._workers: dict[WorkerId, Standing] = {}
        self._pools: dict[str, tuple[Pool, ...]] = {}
        self.refused: dict[WorkerId, str] = {}
        """Listed workers that are never used, and why."""
        self.routers = 1
        """Routers that choose without seeing each other's choices, this one included."""
        self.tell: Callable[[Dispatch | Settled], None] = lambda move: None
        """Is told what this router sends and what of it is over, for the others."""

    # -- what is known

    def get(self, worker: WorkerId) -> Standing | None:
        return self._workers.get(worker)

    def workers(self) -> tuple[Standing, ...]:
        return tuple(self._workers.values())

    def models(self) -> tuple[str, ...]:
        """Names that known workers serve, whether one of them is usable now or not."""
        return tuple(sorted({worker.card.model for worker in self._workers.values()}))

    def pools(self, model: str) -> tuple[Pool, ...]:
        """One for each fingerprint with a usable decode worker; those with prefill workers first."""
        pools = self._pools.get(model)
        if pools is None:
            pools = self._pools[model] = self._make_pools(model)
        return pools

    def why_not(self, model: str) -> str | None:
        """None if `model` could be served now, end to end; else what is missing."""
        if self.pools(model):
            return None
        known = [worker for worker in self._workers.values() if worker.card.model == model]
        if not known:
            return f"no worker serves {model}" + "".join(f"; {w}: {why}" for w, why in self.refused.items())
        usable = [worker for worker in known if worker.usable]
        if usable:
            return f"{model} has no decode worker that is ready, only {len(usable)} for prefill"
        states = ", ".join(
            f"{worker.id} is {worker.card.state} with its session {worker.link}" for worker in known[:4]
        )
        return f"no worker of {model} is ready: {states}"

    # -- what happens

    def apply_view(
        self,
        cards: Mapping[WorkerId, WorkerCard],
        *,
        live: bool = True,
        emptied: bool = False,
        refused: Mapping[WorkerId, str] = {},
    ) -> Change:
        """The registry's whole picture. Not `live`: the last one known, in which absence means nothing.

        `emptied`: the registry itself saw many keys vanish at once.
        `refused` are listed workers whose card could not be read, and why.
        """
        self.refused = dict(refused)
        joined: list[WorkerCard] = []
        left: list[WorkerCard] = []
        turned: list[WorkerCard] = []
        for id, card in cards.items():
            if card.fingerprint.hash_spec != HASH_SPEC:
                self.refused[id] = f"hash_spec: {card.fingerprint.hash_spec} != {HASH_SPEC}"
                continue
            old = self._workers.get(id)
            if old is not None and old.card.incarnation == card.incarnation:
                if old.card.role is not card.role:
                    turned.append(card)
                old.card, old.listed, old.parted = card, True, False
                continue
            if old is not None:
                left.append(old.card)
            self._workers[id] = Standing(card)
            self._refresh(self._workers[id])
            joined.append(card)
        doubted = self._absent(cards, left, emptied) if live else ()
        self._pools.clear()
        return Change(tuple(joined), tuple(left), doubted, tuple(turned))

    def _absent(
        self, cards: Mapping[WorkerId, WorkerCard], left: list[WorkerCard], emptied: bool
    ) -> tuple[WorkerId, ...]:
        """Drops the workers that are not listed any more, unless so many went at once that it is the
        registry that is to be doubted (emptied, or all leases revoked by a stalled leader)."""
        gone = [w for w in self._workers.values() if w.id not in cards or w.id in self.refused]
        vanished = [w for w in gone if w.listed and w.id not in self.refused]
        before = sum(w.listed for w in self._workers.values())
        suspect = emptied or len(vanished) > self._mass_share * before
        doubted: list[WorkerId] = []
        for worker in gone:
            alive = worker.link is LinkState.UP and worker.card.state is MemberState.READY
            if worker.id not in self.refused and alive:
                doubtful = suspect if worker.listed else not worker.parted
                if doubtful or worker.sent or worker.kept:
                    if worker.listed and doubtful:
                        doubted.append(worker.id)
                    worker.listed, worker.parted = False, not doubtful
                    continue
            del self._workers[worker.id]
            left.append(worker.card)
        return tuple(doubted)

    def apply_link(self, worker: WorkerId, incarnation: Incarnation, state: LinkState) -> Change:
        """A worker that is no longer listed goes with its session."""
        standing = self._workers.get(worker)
        if standing is None or standing.card.incarnation != incarnation:
            return Change()
        standing.link = state
        self._pools.clear()
        if state is LinkState.LOST and not standing.listed:
            del self._workers[worker]
            return Change(left=(standing.card,))
        return Change()

    def apply_load(self, report: LoadReport, now: float) -> bool:
        """False if it is not of a worker known here, or of another life of it."""
        standing = self._workers.get(report.worker)
        if standing is None or standing.card.incarnation != report.incarnation:
            return False
        if standing.report is None or standing.report.state != report.state:
            self._pools.clear()
        worked = _worked(standing.report, report)
        if worked:
            standing.worked_at = now
        standing.report, standing.reported_at = report, now
        self._usual_of(standing).learn(report, worked=worked)
        standing.settled = standing.settled_tokens = 0
        standing.new = standing.new_tokens = standing.new_blocks = 0
        listed = frozenset(report.streams)
        for request, sent in standing.sent.items():
            # A report may have been written before the dispatch arrived: absence counts the second time.
            sent.counted = sent.counted or request in listed or sent.missed
            sent.missed = request not in listed
            if not sent.counted:
                self._count(standing, sent)
        for (_, request), sent in standing.others.items():
            if request in listed:
                sent.counted, sent.missed = True, False
            elif sent.counted or now - sent.at > self._grace_s:
                # Over, or never come: kept until its router says so too, lest it is counted once more.
                sent.counted = sent.missed = True
            else:
                self._count(standing, sent)
        self._refresh(standing)
        return True

    def expire(self, now: float, max_age_s: float) -> tuple[WorkerId, ...]:
        """Workers whose last report is too old: from now on their load is unknown."""
        stale = [
            worker
            for worker in self._workers.values()
            if worker.report is not None and now - worker.reported_at > max_age_s
        ]
        for worker in stale:
            worker.report = None
            self._refresh(worker)
            self._pools.clear()
        return tuple(worker.id for worker in stale)

    def sent(self, worker: WorkerId, request: RequestId, tokens: int, blocks: int) -> None:
        """This router dispatched a request there: `tokens` to compute, `blocks` to hold. Counts at once."""
        standing = self._workers.get(worker)
        if standing is None:
            return
        self.settle(worker, request)
        standing.sent[request] = sent = _Sent(tokens, blocks)
        standing.own_tokens += tokens
        self._count(standing, sent)
        self._refresh(standing)
        self.tell(Dispatch(worker, standing.card.incarnation, request, tokens, blocks))

    def settle(self, worker: WorkerId, request: RequestId) -> None:
        """That dispatch is over, however it ended; idempotent."""
        standing = self._workers.get(worker)
        sent = standing.sent.pop(request, None) if standing is not None else None
        if standing is None or sent is None:
            return
        standing.own_tokens -= sent.tokens
        self._discount(standing, sent)
        self._refresh(standing)
        self.tell(Settled(worker, request))

    def keeps(self, worker: WorkerId, lease: LeaseId) -> None:
        """It has KV for a request of this router, which nobody reads yet."""
        if (standing := self._workers.get(worker)) is not None:
            standing.kept.add(lease)

    def keeps_no_more(self, worker: WorkerId, lease: LeaseId) -> None:
        if (standing := self._workers.get(worker)) is not None:
            standing.kept.discard(lease)

    # -- what other routers do

    def unreported(self) -> tuple[Dispatch, ...]:
        """All that this router sent and no report counts, the oldest of each worker first."""
        return tuple(
            Dispatch(worker.id, worker.card.incarnation, request, sent.tokens, sent.blocks)
            for worker in self._workers.values()
            for request, sent in worker.sent.items()
            if not sent.counted
        )

    def other_sent(self, router: Incarnation, dispatch: Dispatch, now: float) -> None:
        """Another router sent this. Counts at once; what is known already stays as it is."""
        standing = self._workers.get(dispatch.worker)
        key = (router, dispatch.request)
        if standing is None or standing.card.incarnation != dispatch.incarnation or key in standing.others:
            return
        standing.others[key] = sent = _Sent(dispatch.tokens, dispatch.blocks, at=now)
        self._count(standing, sent)
        self._refresh(standing)

    def other_settled(self, router: Incarnation, settled: Settled) -> None:
        standing = self._workers.get(settled.worker)
        sent = standing.others.pop((router, settled.request), None) if standing is not None else None
        if standing is None or sent is None:
            return
        self._discount(standing, sent)
        self._refresh(standing)

    def other_sent_only(self, router: Incarnation, kept: Collection[tuple[WorkerId, RequestId]]) -> None:
        """Nothing of that router is under way and unreported but these."""
        for worker in self._workers.values():
            gone = [
                key
                for key, sent in worker.others.items()
                if key[0] == router and (not sent.counted or sent.missed) and (worker.id, key[1]) not in kept
            ]
            for _, request in gone:
                self.other_settled(router, Settled(worker.id, request))

    def forget_other(self, router: Incarnation) -> None:
        """What it sent is counted as far as the workers' reports count it."""
        for worker in self._workers.values():
            gone = [key for key in worker.others if key[0] == router]
            for key in gone:
                sent = worker.others.pop(key)
                if not sent.counted:
                    self._discount(worker, sent)
            if gone:
                self._refresh(worker)

    # -- how

    @staticmethod
    def _count(worker: Standing, sent: _Sent) -> None:
        worker.new += 1
        worker.new_tokens += sent.tokens
        worker.new_blocks += sent.blocks

    @staticmethod
    def _discount(worker: Standing, sent: _Sent) -> None:
        """It is over."""
        if not sent.counted:
            worker.new -= 1
            worker.new_tokens -= sent.tokens
            worker.new_blocks -= sent.blocks
        elif not sent.missed:
            worker.settled += 1
            worker.settled_tokens += sent.tokens

    def _refresh(self, worker: Standing) -> None:
        """The figures a choice reads: the worker's own, corrected by what was sent and ended since."""
        worker.weighed = None
        unknown, usual, report = self._unknown, self._usual_of(worker), worker.report
        worker.decode_each_s = usual.steps.each_s
        if report is None:
            others = [sent for sent in worker.others.values() if not sent.missed]
            count = len(worker.sent) + len(others)
            worker.queued_tokens = unknown.queued_tokens + worker.own_tokens
            worker.queued_tokens += sum([sent.tokens for sent in others])
            worker.sequences = unknown.sequences + count
            worker.waiting = count
            worker.blocks_free = worker.card.blocks / 2
            worker.prefill_tokens_s = usual.prefill_tokens_s
            worker.decode_step_s = usual.decode_step_s
            worker.decode_batch = usual.decode_batch
            worker.pull_bytes_s = usual.pull_bytes_s
            return
        worker.queued_tokens = max(0, report.queued_tokens - worker.settled_tokens) + worker.new_tokens
        worker.sequences = max(0, report.running + report.waiting - worker.settled) + worker.new
        worker.waiting = report.waiting + worker.new
        worker.blocks_free = max(0, report.blocks_free - worker.new_blocks)
        fresh = worker.reported_at - worker.worked_at <= unknown.fresh_s
        worker.prefill_tokens_s = (fresh and report.prefill_tokens_s) or usual.prefill_tokens_s
        worker.decode_step_s = (fresh and report.decode_step_s) or usual.decode_step_s
        worker.decode_batch = (fresh and report.decode_batch) or usual.decode_batch
        worker.pull_bytes_s = (fresh and report.pull_bytes_s) or usual.pull_bytes_s

    def _usual_of(self, worker: Standing) -> _Usual:
        key = (worker.card.model, worker.card.role)
        usual = self._usual.get(key)
        if usual is None:
            usual = self._usual[key] = _Usual(self._unknown)
        return usual

    def _make_pools(self, model: str) -> tuple[Pool, ...]:
        groups: dict[Fingerprint, list[Standing]] = {}
        for worker in self._workers.values():
            if worker.card.model == model and worker.usable:
                groups.setdefault(worker.card.fingerprint, []).append(worker)
        pools = [_pool(fingerprint, workers) for fingerprint, workers in groups.items()]
        return tuple(sorted((pool for pool in pools if pool.decode), key=lambda pool: not pool.prefill))


def _worked(before: LoadReport | None, report: LoadReport) -> bool:
    """Whether a worker worked since its last report, or does now."""
    if before is None or report.running or report.waiting:
        return True
    return any(getattr(before, name) != getattr(report, name) for name in _MEASURED)


def _pool(fingerprint: Fingerprint, workers: Iterable[Standing]) -> Pool:
    layout = KvLayout(
        layers=fingerprint.layers,
        kv_heads=fingerprint.kv_heads,
        head_dim=fingerprint.head_dim,
        block_size=fingerprint.block_size,
        dtype=fingerprint.dtype,
    )
    by_role: dict[Role, list[Standing]] = {role: [] for role in Role}
    for worker in workers:
        by_role[worker.card.role].append(worker)
    return Pool(
        fingerprint=fingerprint,
        digest=fingerprint.digest(),
        block_size=fingerprint.block_size,
        block_bytes=layout.block_bytes,
        prefill=tuple(by_role[Role.PREFILL]),
        decode=tuple(by_role[Role.DECODE]),
        max_tokens=max((worker.card.max_tokens for worker in by_role[Role.DECODE]), default=0),
    )
