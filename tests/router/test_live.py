"""What a router shows of its fleet to people: the snapshot, and what has changed since another."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from crowd import BLOCKS, Crowd

from fleet.ids import RequestId
from fleet.member import MemberState, Role
from fleet.stages import Stage
from router.live import WORKER_FIELDS, changes
from router.record import HandoffRecord, HandoffState
from router.roster import LinkState


def test_nothing_is_zero_that_nobody_has_told() -> None:
    crowd = Crowd(0)
    shown = crowd.live.snapshot(10.0)
    assert shown.router.trouble == "no worker is known"
    assert shown.workers == ()
    assert shown.slow == ()
    assert shown.history == {}
    assert shown.plan is None
    assert [one.name for one in shown.classes] == ["interactive", "standard", "batch"]
    for one in shown.classes:
        assert (one.goodput, one.attainment, one.ttft, one.tpot, one.burning) == (None,) * 5
        assert set(one.burn.values()) == {None}
    silent = Crowd(4).live.snapshot(10.0)
    assert {(w.state, w.running, w.waiting, w.used) for w in silent.workers} == {("silent", None, None, None)}


def test_goodput_and_attainment_are_those_of_the_last_minute() -> None:
    crowd = Crowd(4)
    for second in range(90):
        crowd.finish("interactive", float(second), ttft_s=3.0 if second >= 60 and second % 2 else 0.2)
    one = next(one for one in crowd.live.snapshot(90.0).classes if one.name == "interactive")
    assert one.goodput == pytest.approx(0.75, rel=0.05), "one a second, half of them late for half a minute"
    assert one.attainment == pytest.approx(0.75, abs=0.03)
    assert one.reasons == {"ttft": 15}
    assert one.ttft is not None
    assert one.ttft[0] == pytest.approx(0.2, rel=0.1)
    assert one.burn["5m"] == pytest.approx(15 / 90 / 0.05, rel=0.01)
    history = crowd.live.snapshot(90.0).history["interactive"]
    assert [point[1] for point in history] == [1.0] * 6 + [0.5] * 3, "of each ten seconds that are over"
    assert history == crowd.live.snapshot(90.5).history["interactive"], "what is over stays as it is"


def test_where_a_worker_stands_is_one_word() -> None:
    crowd = Crowd(8)
    crowd.report()

    def states() -> dict[str, str]:
        return {worker.id: worker.state for worker in crowd.live.snapshot(1.0).workers}

    assert set(states().values()) == {"ready"}
    gone, draining, turning, stalled = crowd.cards[1:5]
    crowd.roster.apply_link(gone.id, gone.incarnation, LinkState.LOST)
    cards = {one.id: one for one in crowd.cards}
    cards[draining.id] = replace(draining, state=MemberState.DRAINING)
    cards[turning.id] = replace(turning, state=MemberState.DRAINING, turning=Role.PREFILL)
    crowd.roster.apply_view(cards)
    report = crowd.roster.workers()[4].report
    assert report is not None
    crowd.roster.apply_load(replace(report, state=MemberState.STALLED), 1.0)
    said = states()
    assert [said[one.id] for one in (gone, draining, turning, stalled)] == [
        "lost", "draining", "turning", "stalled"
    ]  # fmt: skip


def test_requests_are_counted_where_they_are() -> None:
    crowd = Crowd(4)

    def under_way(name: str, state: HandoffState, *reached: Stage) -> None:
        record = HandoffRecord(RequestId(name), "toy", 100, 0.0, "standard")
        record.stages = dict.fromkeys(reached, 0.1)
        crowd.flow.records.open(record)
        path = [HandoffState.RESERVED, HandoffState.PREFILLING, HandoffState.READY, HandoffState.PULLING]
        for step in path[: path.index(state) + 1]:
            record.move(step, 0.1, "because")

    sent, first, pulled = Stage.PREFILL_SENT, Stage.FIRST_TOKEN, Stage.PULL_ENDED
    under_way("waits", HandoffState.RESERVED)
    under_way("computed", HandoffState.PREFILLING, sent)
    under_way("for a decode worker", HandoffState.READY, sent, first)
    under_way("comes", HandoffState.PULLING, sent, first)
    under_way("answered", HandoffState.PULLING, sent, first, pulled)
    under_way("answered where it was computed", HandoffState.PREFILLING, sent, first)
    shown = crowd.live.snapshot(1.0)
    flow = shown.flow
    assert (flow.waiting, flow.prefilling, flow.moving, flow.decoding) == (1, 1, 2, 2)
    assert {one.seconds for one in shown.slow} == {1.0}, "as long as they have taken so far"


def test_slow_are_those_that_missed_an_objective_then_the_slowest_of_late() -> None:
    crowd = Crowd(4)
    crowd.finish("interactive", 10.0, ttft_s=9.0, id="long ago")
    for number in range(30):
        crowd.finish("standard", 500.0 + number, ttft_s=0.1 + number / 10, id=f"in-time-{number}")
    crowd.finish("interactive", 520.0, ttft_s=2.5, id="late")
    slow = crowd.live.snapshot(600.0, {RequestId("in-time-29"): "mine"}).slow
    assert [one.id for one in slow[:3]] == ["late", "mine", "in-time-28"]
    assert len(slow) == 12
    assert (slow[0].attained, slow[0].why) == (False, "ttft 2500 ms > 2000 ms")
    assert slow[0].workers == (crowd.cards[0].id, crowd.cards[1].id)


def test_changes_make_the_old_snapshot_the_new_one() -> None:
    crowd = Crowd(40)
    crowd.report()
    before = crowd.live.snapshot(1.0)
    crowd.report(0.1, 2.0)
    crowd.finish("batch", 2.0)
    left = crowd.cards[5]
    crowd.roster.apply_view({one.id: one for one in crowd.cards if one is not left})
    crowd.roster.apply_link(left.id, left.incarnation, LinkState.LOST)
    after = crowd.live.snapshot(2.0)
    news = msgspec.json.decode(msgspec.json.encode(changes(before, after)))
    assert news["gone"] == [left.id]
    assert 1 <= len(news["workers"]) <= 5
    assert "router" not in news, "it is as it was"
    shown = msgspec.json.decode(msgspec.json.encode(before))
    workers = {row[0]: row for row in shown["workers"]} | {row[0]: row for row in news.pop("workers")}
    for id in news.pop("gone"):
        del workers[id]
    whole = msgspec.json.decode(msgspec.json.encode(after))
    assert {row[0]: row for row in whole.pop("workers")} == workers
    del shown["workers"]
    assert {**shown, **news} == whole


def test_what_workers_count_is_summed_up() -> None:
    crowd = Crowd(8)
    crowd.report()
    shown = crowd.live.snapshot(1.0)
    assert shown.totals["generated_tokens"] == 8 << 30
    row = dict(zip(WORKER_FIELDS, msgspec.json.decode(msgspec.json.encode(shown.workers[0])), strict=True))
    assert row["role"] == "decode"
    assert row["blocks"] == BLOCKS
