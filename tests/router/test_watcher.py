"""How a router keeps its picture: registry, bus and sessions in trouble, in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from router_fleet import REMOTE, Fleet, ask, in_fleet
from scripted_worker import PRINT, Script, ScriptedWorker, card, request

from fleet.bus import BusMessage
from fleet.card_codec import encode_card
from fleet.events import BlocksStored, RouterMoves, kv_subject, load_subject, moves_subject
from fleet.ids import Incarnation, WorkerId
from fleet.kv_log import PART_BLOCKS, KvLog
from fleet.member import MemberState, Role, worker_key
from fleet.registry.memory import MemoryHub as RegistryHub
from fleet.request import Request
from fleet.wire.codec import encode_router_moves
from router.settings import IndexSettings

D1, D2 = WorkerId("d1"), WorkerId("d2")


def index_is_true(fleet: Fleet) -> bool:
    """Every worker is proven, and its entries are what it caches."""
    index = fleet.router.index
    return not index.unproven() and all(index.holds(w) == fleet.workers[w].cached for w in fleet.router.links)


def test_a_removed_worker_gets_nothing_though_it_caches_the_prefix() -> None:
    async def body(fleet: Fleet) -> None:
        await ask(fleet, request("a", prompt=800))
        await fleet.until(lambda: index_is_true(fleet))
        holder = next(w for w in (D1, D2) if fleet.router.index.blocks(w))
        other = D2 if holder == D1 else D1
        fleet.registry.delete(worker_key("f", holder))
        await fleet.until(lambda: holder not in fleet.router.links)
        assert fleet.router.index.blocks(holder) == 0
        before = len(fleet.workers[holder].jobs)
        for n in range(5):
            assert len((await ask(fleet, request(f"b{n}", prompt=800))).tokens) == 8
        assert len(fleet.workers[holder].jobs) == before
        assert len(fleet.workers[other].jobs) == 5
        assert other in fleet.router.links

    in_fleet(body, decode=(Script(), Script()))


def test_decode_workers_are_matched_by_the_blocks_they_pulled() -> None:
    large = replace(PRINT, layers=64)

    async def body(fleet: Fleet) -> None:
        await fleet.add(card("p1", Role.PREFILL, fingerprint=large))
        await fleet.add(card("d1", fingerprint=large))
        await fleet.add(card("d2", fingerprint=large))
        await fleet.until(lambda: len(usable(fleet)) == 3)
        await ask(fleet, request("a", prompt=800))
        await fleet.until(lambda: index_is_true(fleet))
        holder = next(w for w in (D1, D2) if fleet.router.index.blocks(w))
        for n in range(5):
            await ask(fleet, request(f"b{n}", prompt=800))
        assert len(fleet.workers[holder].jobs) == 6

    in_fleet(body, prefill=(), decode=())


def test_lost_events_are_found_and_the_index_is_true_again() -> None:
    async def body(fleet: Fleet) -> None:
        lost = iter([False, True, True, False, True] * 20)
        fleet.bus.lose = lambda subject: ".kv." in subject and next(lost)
        for n in range(20):
            await ask(fleet, request(f"r{n}", prompt=100, salt=f"s{n}"))
        fleet.bus.lose = lambda subject: False
        await fleet.until(lambda: index_is_true(fleet))
        assert sum(w.snapshots for w in fleet.workers.values()) > 2
        await fleet.settle()
        assert index_is_true(fleet)
        fleet.check_idle()

    in_fleet(body)


def test_without_the_bus_workers_are_asked_and_the_index_stays_true() -> None:
    async def body(fleet: Fleet) -> None:
        fleet.bus.up = False
        for n in range(10):
            assert len((await ask(fleet, request(f"r{n}", prompt=100, salt=f"s{n}"))).tokens) == 8
        await asyncio.sleep(30)
        assert all(w.report is not None for w in fleet.router.roster.workers())
        assert index_is_true(fleet)
        fleet.bus.up = True
        await ask(fleet, request("z", salt="z"))
        await fleet.until(lambda: index_is_true(fleet))

    in_fleet(body)


def test_a_router_that_restarts_learns_what_is_cached() -> None:
    async def body(fleet: Fleet) -> None:
        await ask(fleet, request("a", prompt=800))
        await fleet.restart_router()
        await fleet.until(lambda: len(fleet.router.links) == 2 and index_is_true(fleet))
        assert fleet.router.index.blocks(D1) == 50
        await ask(fleet, request("b", prompt=900))
        await fleet.until(lambda: index_is_true(fleet))

    in_fleet(body)


def test_large_snapshots_are_taken_in_part_by_part_while_the_router_serves() -> None:
    """No more than one part of any worker in a turn of the loop, however many are asked at once."""
    parts, workers = 5, 4

    async def body(fleet: Fleet) -> None:
        index = fleet.router.index
        for number in range(workers):
            of = card(f"d{number}")
            worker = ScriptedWorker(of)
            worker.kv = KvLog(of.id, of.incarnation, parts * PART_BLOCKS)
            worker.cached = set(range(number << 32, (number << 32) + parts * PART_BLOCKS))
            worker.kv.record([BlocksStored(tuple(worker.cached))])
            await fleet.add(of, worker=worker)
        turns = 0
        while index.size < workers * parts * PART_BLOCKS:
            before = index.size
            await asyncio.sleep(0)
            assert index.size - before <= PART_BLOCKS
            turns += 1
        assert turns >= workers * parts
        await fleet.until(lambda: index_is_true(fleet) and fleet.router.counters["snapshots"] == workers)
        assert sum(w.snapshots for w in fleet.workers.values()) == workers * parts, "and each is asked once"

    in_fleet(body, prefill=(), decode=())


def test_a_worker_reborn_in_the_middle_of_its_snapshot_is_asked_again() -> None:
    async def body(fleet: Fleet) -> None:
        of = card("d1")
        first, again = ScriptedWorker(of), ScriptedWorker(replace(of, incarnation=Incarnation("d1.2")))
        for worker in (first, again):
            worker.kv = KvLog(of.id, worker.card.incarnation, 3 * PART_BLOCKS)
        first.cached = set(range(3 * PART_BLOCKS))
        again.cached = {5, 6}
        for worker in (first, again):
            worker.kv.record([BlocksStored(tuple(worker.cached))])
        fleet.wire.slow("router", of.address, 0.01)
        await fleet.add(of, worker=first)
        await fleet.until(lambda: fleet.router.index.size > 0)
        assert fleet.router.index.unproven()
        fleet.kill(D1)
        await fleet.add(again.card, worker=again)
        await fleet.until(lambda: index_is_true(fleet))
        assert fleet.router.index.holds(D1) == {5, 6}
        await fleet.settle()
        assert fleet.router.index.holds(D1) == {5, 6}

    in_fleet(body, prefill=(), decode=())


def test_a_worker_that_never_answers_holds_up_nobody() -> None:
    async def body(fleet: Fleet) -> None:
        dead = card("d9")
        fleet.registry.put(worker_key("f", dead.id), encode_card(dead), 0)
        silent = await fleet.add(card("d8"))
        fleet.wire.freeze(silent.card.address)
        await fleet.add(card("d7"))
        await fleet.until(lambda: WorkerId("d7") in usable(fleet))
        assert usable(fleet) == {"p1", "d1", "d7"}
        assert len((await ask(fleet, request())).tokens) == 8

    in_fleet(body)


def usable(fleet: Fleet) -> set[str]:
    return {w.id for w in fleet.router.roster.workers() if w.usable}


def test_keys_that_vanish_all_at_once_stop_nothing() -> None:
    async def body(fleet: Fleet) -> None:
        keys = dict(fleet.registry.values)
        fleet.registry.wipe()
        await asyncio.sleep(5)
        assert fleet.router.flow.ready() is None
        assert len((await ask(fleet, request("a"))).tokens) == 8
        for key, (value, _) in keys.items():
            fleet.registry.put(key, value, 0)
        await asyncio.sleep(5)
        assert len((await ask(fleet, request("b"))).tokens) == 8
        assert all(w.listed for w in fleet.router.roster.workers())

    in_fleet(body)


def test_a_registry_that_is_away_stops_nothing() -> None:
    async def body(fleet: Fleet) -> None:
        fleet.registry.up = False
        await asyncio.sleep(60)
        assert len((await ask(fleet, request("a"))).tokens) == 8
        fleet.registry.up = True
        await fleet.add(card("d2"))
        await fleet.until(lambda: "d2" in usable(fleet))

    in_fleet(body)


def test_a_broken_card_is_refused_aloud_and_served_when_mended() -> None:
    async def body(fleet: Fleet) -> None:
        good = card("d5")
        worker = ScriptedWorker(good)
        fleet.wire.serve(worker, good.address)
        fleet.registry.put(worker_key("f", good.id), b'{"id": "d5"}', 0)
        await fleet.until(lambda: good.id in fleet.router.roster.refused)
        assert len((await ask(fleet, request())).tokens) == 8
        fleet.registry.put(worker_key("f", good.id), encode_card(good), 0)
        await fleet.until(lambda: "d5" in usable(fleet))
        assert fleet.router.roster.refused == {}

    in_fleet(body)


def test_a_worker_that_names_blocks_differently_gets_nothing() -> None:
    async def body(fleet: Fleet) -> None:
        odd = await fleet.add(card("d5", fingerprint=replace(PRINT, hash_spec="builtin/0")))
        await fleet.until(lambda: odd.card.id in fleet.router.roster.refused)
        for n in range(5):
            await ask(fleet, request(f"r{n}"))
        assert odd.jobs == []

    in_fleet(body)


class Otherwise(ScriptedWorker):
    """Says that it names blocks as all do, and does not."""

    def store(self, of: Request) -> None:
        super().store(replace(of, salt="its own"))


def test_a_worker_that_never_tells_of_what_it_was_sent_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What it announced agrees, and no request fails: it only never is a hit."""

    async def body(fleet: Fleet) -> None:
        odd = await fleet.add(card("d5"), worker=Otherwise(card("d5")))
        right = await fleet.add(card("d6"))
        await fleet.until(lambda: len(fleet.router.index.unproven()) == 0 and len(fleet.router.links) == 4)
        for n in range(40):
            await ask(fleet, request(f"r{n}", prompt=100 + n))
            await asyncio.sleep(1.0)
        assert odd.jobs
        assert right.jobs
        assert fleet.router.index.unfound() == {odd.card.id}
        assert fleet.router.counters["names_unfound"] == 1
        assert [
            record.message.count("worker d5") for record in caplog.records if "tells" in record.message
        ] == [1]

    in_fleet(body, settings=replace(REMOTE, index=IndexSettings(told_s=2.0)))


def test_messages_that_cannot_be_read_are_counted_and_passed_over() -> None:
    async def body(fleet: Fleet) -> None:
        for subject in (kv_subject("f", "d1"), load_subject("f", "d1")):
            fleet.bus.send(BusMessage(subject, b"\xff\xff\xff"))
        await fleet.until(lambda: fleet.router.counters["bad_messages"] == 2)
        assert len((await ask(fleet, request())).tokens) == 8

    in_fleet(body)


def test_draining_workers_get_no_new_work_and_finish_what_they_have() -> None:
    async def body(fleet: Fleet) -> None:
        worker = fleet.workers[D1]
        job = asyncio.create_task(ask(fleet, request("a", max_tokens=200)))
        await fleet.until(lambda: bool(worker.jobs))
        worker.state = MemberState.DRAINING
        await fleet.add(card("d2"))
        await fleet.until(lambda: usable(fleet) == {"p1", "d2"})
        for n in range(5):
            await ask(fleet, request(f"r{n}"))
        assert len(worker.jobs) == 1
        assert len((await job).tokens) == 200

    in_fleet(body)


def test_a_restarted_worker_is_met_anew() -> None:
    async def body(fleet: Fleet) -> None:
        await ask(fleet, request("a", prompt=800))
        fleet.kill(D1)
        again = await fleet.add(card("d1", life="2"))
        await fleet.until(lambda: D1 in usable(fleet) and index_is_true(fleet))
        assert fleet.router.index.blocks(D1) == 0
        assert len((await ask(fleet, request("b"))).tokens) == 8
        assert len(again.jobs) == 1

    in_fleet(body)


def test_other_routers_count_as_unseen_until_they_are_heard() -> None:
    """One of another version says no life in its card, and is never heard."""

    async def body(fleet: Fleet) -> None:
        registry: RegistryHub = fleet.registry
        registry.put("/fleet/f/routers/r0", b'{"life": "%s"}' % fleet.router.life.encode(), 0)
        registry.put("/fleet/f/routers/r1", b'{"life": "one"}', 0)
        registry.put("/fleet/f/routers/r2", b"{}", 0)
        await fleet.until(lambda: fleet.router.roster.routers == 3)
        said = RouterMoves("r1", Incarnation("one"), 1, True, (), ())
        bus = fleet.bus.bus()
        await bus.publish(moves_subject("f", "one"), encode_router_moves(said))
        await bus.publish(moves_subject("f", "one"), b"\xff")
        await fleet.until(lambda: fleet.router.roster.routers == 2)
        assert fleet.router.counters["bad_messages"] == 1
        await fleet.until(lambda: fleet.router.roster.routers == 3)
        assert fleet.router.counters["peers_silent"] == 1

    in_fleet(body)


def test_a_defect_in_any_part_ends_the_whole() -> None:
    """Never a router that looks well and does not see."""

    async def body(fleet: Fleet) -> None:
        await fleet.bus_of_router.close()
        with pytest.raises(BaseExceptionGroup, match="unhandled"):
            await fleet.router_task

    in_fleet(body)
