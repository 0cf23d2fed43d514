"""What routers tell each other: counted at once, and never for long when it is not there."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest
from scripted_worker import card, report

from fleet.events import Dispatch, RouterMoves, Settled
from fleet.ids import Incarnation, RequestId
from fleet.member import Role, WorkerCard
from router.peers import Heard, Outbox, Peers
from router.roster import LinkState, Roster, Standing
from router.settings import PeerSettings, UnknownSettings

SETTINGS = PeerSettings()
P1, P2 = card("p1", Role.PREFILL), card("p2", Role.PREFILL)
CARDS = (P1, P2)


class Replica:
    """One life of a router, as far as it tells and hears."""

    def __init__(self, life: str, cards: Iterable[WorkerCard] = CARDS) -> None:
        self.life = Incarnation(life)
        self.roster = Roster(UnknownSettings(), grace_s=SETTINGS.grace_s)
        self.peers = Peers(self.life, self.roster, SETTINGS)
        self.outbox = Outbox(life, self.life, self.roster, SETTINGS)
        self.roster.tell = self.outbox.add
        self.roster.apply_view({of.id: of for of in cards})
        for of in cards:
            self.roster.apply_link(of.id, of.incarnation, LinkState.UP)

    def send(self, request: str, to: WorkerCard = P1, tokens: int = 100, blocks: int = 7) -> None:
        self.roster.sent(to.id, RequestId(request), tokens, blocks)

    def of(self, worker: WorkerCard = P1) -> Standing:
        standing = self.roster.get(worker.id)
        assert standing is not None
        return standing

    def reported(self, now: float, of: WorkerCard = P1, **figures: object) -> None:
        self.roster.apply_load(report(of, **figures), now)


def pair() -> tuple[Replica, Replica]:
    """Two that know each other and idle workers."""
    a, b = Replica("a"), Replica("b")
    for one in (a, b):
        one.peers.listed({a.life, b.life})
        for of in CARDS:
            one.reported(0.0, of)
    b.peers.apply(a.outbox.take(0.0), 0.0)
    a.peers.apply(b.outbox.take(0.0), 0.0)
    return a, b


def test_what_another_sent_counts_at_once_and_until_it_is_over() -> None:
    a, b = pair()
    a.send("r")
    assert b.peers.apply(a.outbox.take(0.1), 0.1) is Heard.APPLIED
    worker = b.of()
    assert (worker.queued_tokens, worker.sequences, worker.waiting, worker.blocks_free) == (100, 1, 1, 1017)
    a.roster.settle(P1.id, RequestId("r"))
    b.peers.apply(a.outbox.take(0.2), 0.2)
    assert (worker.queued_tokens, worker.sequences, worker.waiting, worker.blocks_free) == (0, 0, 0, 1024)


def test_what_the_worker_reports_is_not_counted_twice_and_goes_when_it_is_over() -> None:
    a, b = pair()
    a.send("r")
    b.peers.apply(a.outbox.take(0.1), 0.1)
    b.reported(0.3, running=1, queued_tokens=60, blocks_free=1000, streams=("r",))
    worker = b.of()
    assert (worker.queued_tokens, worker.sequences, worker.blocks_free) == (60, 1, 1000)
    a.roster.settle(P1.id, RequestId("r"))
    b.peers.apply(a.outbox.take(0.4), 0.4)
    assert (worker.queued_tokens, worker.sequences) == (0, 0), "it was in the report, and has ended"


def test_one_that_the_worker_lists_is_never_too_old_and_one_it_never_lists_is() -> None:
    a, b = pair()
    a.send("listed")
    a.send("lost")
    b.peers.apply(a.outbox.take(0.1), 0.1)
    for tick in range(1, 5):
        b.reported(0.25 * tick, running=1, streams=("listed",))
    assert b.of().sequences == 2, "it may still be on its way"
    for tick in range(5, 400):
        b.reported(0.25 * tick, running=1, streams=("listed",))
        assert b.of().sequences == 1
    # What is not heard of again by reports is not counted again by its router's word either.
    b.peers.apply(a.outbox.take(101.0), 101.0)
    assert b.of().sequences == 1
    b.reported(101.1, running=0)
    assert b.of().sequences == 0


def test_the_end_of_a_router_is_the_end_of_what_it_sent() -> None:
    for how in ("card", "silence"):
        a, b = pair()
        a.send("r")
        b.peers.apply(a.outbox.take(0.1), 0.1)
        assert (b.of().sequences, b.roster.routers) == (1, 1)
        if how == "card":
            b.peers.listed({b.life})
            assert b.roster.routers == 1
        else:
            assert b.peers.expire(3.0) == ()
            assert b.peers.expire(3.2) == ("a",)
            assert b.roster.routers == 2, "it is there and not seen"
            assert b.peers.expire(3.3) == ()
        assert b.of().sequences == 0, how


def test_a_router_that_only_its_card_left_is_counted_again_when_it_speaks() -> None:
    a, b = pair()
    a.send("r")
    b.peers.apply(a.outbox.take(0.1), 0.1)
    b.peers.listed({b.life})
    assert b.of().sequences == 0
    b.peers.apply(a.outbox.take(1.2), 1.2)
    assert (b.of().sequences, b.peers.others) == (1, 1)


def test_messages_that_come_twice_late_or_not_at_all() -> None:
    a, b = pair()
    a.send("one")
    first = a.outbox.take(0.1)
    a.send("two")
    lost = a.outbox.take(0.2)
    a.roster.settle(P1.id, RequestId("one"))
    third = a.outbox.take(0.3)
    assert b.peers.apply(first, 0.1) is Heard.APPLIED
    assert b.peers.apply(first, 0.1) is Heard.LATE
    assert b.peers.apply(third, 0.3) is Heard.GAP
    assert b.peers.apply(lost, 0.4) is Heard.LATE
    assert b.of().sequences == 0, "one is over, two was not heard of"
    whole = a.outbox.take(1.1)
    assert whole.whole
    b.peers.apply(whole, 1.1)
    assert b.of().sequences == 1
    assert b.peers.apply(b.outbox.take(1.2), 1.2) is Heard.OWN


def test_sent_there_once_more_it_counts_as_sent_now() -> None:
    a, b = pair()
    a.send("r")
    b.peers.apply(a.outbox.take(0.1), 0.1)
    b.reported(0.2, running=1, streams=("r",))
    a.roster.settle(P1.id, RequestId("r"))
    a.send("r", tokens=40)
    b.peers.apply(a.outbox.take(0.3), 0.3)
    assert (b.of().sequences, b.of().queued_tokens) == (1, 40)


def test_a_worker_s_other_life_has_nothing_of_what_was_sent_to_the_one_before() -> None:
    a, b = pair()
    a.send("r")
    told = a.outbox.take(0.1)
    b.roster.apply_view({P1.id: card("p1", Role.PREFILL, life="2"), P2.id: P2})
    b.peers.apply(told, 0.1)
    assert not b.of().others


def test_a_message_has_a_bound_and_the_newest_are_in_it() -> None:
    a = Replica("a")
    for number in range(SETTINGS.max_dispatches + 10):
        a.send(f"r{number}")
    told = a.outbox.take(0.0)
    assert len(told.sent) == SETTINGS.max_dispatches
    assert told.sent[-1].request == f"r{SETTINGS.max_dispatches + 9}"


def test_alone_nothing_is_kept_to_be_told() -> None:
    a = Replica("a")
    a.send("r")
    a.outbox.clear()
    assert len(a.outbox) == 0
    assert a.outbox.take(5.0).sent == (Dispatch(P1.id, P1.incarnation, RequestId("r"), 100, 7),)


# -- anything can happen to messages, routers and reports


@dataclass
class World:
    """Routers and workers; between them messages that are lost, come twice and overtake each other."""

    chance: random.Random
    reports: bool
    """Whether workers report before all is quiet."""
    now: float = 0.0
    lives: int = 0
    replicas: list[Replica] = field(default_factory=list)
    under_way: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    held: dict[str, dict[RequestId, tuple[Replica, int, int]]] = field(default_factory=dict)
    """Of each worker what has reached it: whose, tokens, blocks."""
    requests: int = 0

    def __post_init__(self) -> None:
        self.held = {of.id: {} for of in CARDS}

    def add(self) -> None:
        self.lives += 1
        self.replicas.append(Replica(f"life{self.lives}"))
        self.list()

    def list(self) -> None:
        for one in self.replicas:
            one.peers.listed({other.life for other in self.replicas})

    def later(self, most_s: float, do: Callable[[], None]) -> None:
        self.under_way.append((self.now + self.chance.uniform(0, most_s), do))

    def dispatch(self) -> None:
        of, to = self.chance.choice(self.replicas), self.chance.choice(CARDS)
        self.requests += 1
        request, tokens, blocks = RequestId(f"r{self.requests}"), self.chance.randrange(1, 900), 3
        of.send(request, to, tokens, blocks)

        def arrive() -> None:
            # One that ended, or whose router died, on the way never comes.
            if of in self.replicas and request in of.of(to).sent:
                self.held[to.id][request] = (of, tokens, blocks)

        self.later(0.2, arrive)

    def end(self) -> None:
        of, to = self.chance.choice(self.replicas), self.chance.choice(CARDS)
        if sent := list(of.of(to).sent):
            request = self.chance.choice(sent)
            self.held[to.id].pop(request, None)
            of.roster.settle(to.id, request)

    def report(self, to: Replica, of: WorkerCard) -> None:
        held = self.held[of.id]
        to.reported(
            self.now,
            of,
            running=len(held),
            queued_tokens=sum(tokens for _, tokens, _ in held.values()),
            blocks_free=of.blocks - sum(blocks for *_, blocks in held.values()),
            streams=tuple(held),
        )

    def tell(self, of: Replica, *, faulty: bool) -> None:
        if of.outbox.due(self.now) > self.now:
            return
        moves = of.outbox.take(self.now)
        for to in self.replicas:
            fate = self.chance.random() if faulty else 1.0
            for _ in range(0 if fate < 0.25 else 2 if fate < 0.4 else 1):
                most_s = 2.0 if fate < 0.6 else 0.01
                self.later(most_s, lambda to=to: to.peers.apply(moves, self.now))  # type: ignore[misc]

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        due = sorted((at, number) for number, (at, _) in enumerate(self.under_way) if at <= self.now)
        ready = [self.under_way[number][1] for _, number in due]
        self.under_way = [later for later in self.under_way if later[0] > self.now]
        for do in ready:
            do()
        for one in self.replicas:
            one.peers.expire(self.now)

    def restart(self) -> None:
        """A router is killed; what it had at workers ends; another life begins, at once or not."""
        if len(self.replicas) > 1:
            dead = self.replicas.pop(self.chance.randrange(len(self.replicas)))
            for held in self.held.values():
                for request in [request for request, (of, *_) in held.items() if of is dead]:
                    del held[request]
            if self.chance.random() < 0.5:
                self.list()
        if self.chance.random() < 0.7:
            self.add()

    def play(self) -> None:
        for _ in range(self.chance.randrange(2, 5)):
            self.add()
        for _ in range(self.chance.randrange(20, 250)):
            self.pass_time(self.chance.choice([0.0, 0.01, 0.02, 0.3]))
            kind = self.chance.random()
            if kind < 0.45:
                self.dispatch()
            elif kind < 0.75:
                self.end()
            elif kind < 0.77:
                self.restart()
            elif self.reports:
                self.report(self.chance.choice(self.replicas), self.chance.choice(CARDS))
            for one in self.replicas:
                self.tell(one, faulty=True)
        self.list()

    def quiet(self, seconds: float) -> None:
        """Nothing more is sent or ends; no message is lost any more."""
        end = self.now + seconds
        while self.now < end:
            self.pass_time(0.02)
            for one in self.replicas:
                self.tell(one, faulty=False)


@pytest.mark.parametrize("seeds", [range(100), range(100, 200)])
def test_without_any_report_all_count_the_same_after_quiet(seeds: range) -> None:
    """Each counts exactly what the others, as they live now, have under way."""
    for seed in seeds:
        world = World(random.Random(seed), reports=False)
        world.play()
        world.quiet(2.0 + SETTINGS.silent_s + 0.5)  # A dead one's last message may come 2 s late.
        for one in world.replicas:
            for of in CARDS:
                there = {(o.life, r) for o in world.replicas if o is not one for r in o.of(of).sent}
                assert set(one.of(of).others) == there, f"seed {seed}, {one.life}, {of.id}"
                tokens = sum(s.tokens for o in world.replicas for s in o.of(of).sent.values())
                assert one.of(of).queued_tokens == UnknownSettings().queued_tokens + tokens


@pytest.mark.parametrize("seeds", [range(1000, 1100), range(1100, 1200)])
def test_with_reports_all_see_what_workers_hold_after_quiet(seeds: range) -> None:
    for seed in seeds:
        world = World(random.Random(seed), reports=True)
        world.play()
        world.quiet(2.5)
        for one in world.replicas:
            for of in CARDS:
                world.report(one, of)
                worker, held = one.of(of), world.held[of.id]
                assert worker.sequences == len(held), f"seed {seed}, {one.life}, {of.id}"
                assert worker.queued_tokens == sum(tokens for _, tokens, _ in held.values())
                assert worker.blocks_free == of.blocks - sum(blocks for *_, blocks in held.values())


def test_a_phantom_lasts_no_longer_than_the_grace_whatever_is_said() -> None:
    """A router insists that it sent something the worker never had."""
    a, b = pair()
    phantom = Dispatch(P1.id, P1.incarnation, RequestId("never"), 10_000, 50)
    counted = 0
    for tick in range(1, 40):
        now = 0.25 * tick
        said = (phantom,) if tick % 4 == 0 else ()
        b.peers.apply(RouterMoves("a", a.life, 100 + tick, bool(said), said, ()), now)
        b.reported(now)
        counted += b.of().sequences > 0
    assert 0 < counted <= 5
    b.peers.apply(RouterMoves("a", a.life, 999, False, (), (Settled(P1.id, RequestId("never")),)), 20.0)
    assert not b.of().others
