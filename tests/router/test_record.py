"""The hand-off record, and the bound on requests under way."""

from __future__ import annotations

import pytest
from scripted_worker import request

from fleet.errors import Overloaded
from fleet.ids import RequestId, WorkerId
from fleet.stages import Stage
from router.admission import Admission
from router.record import HandoffRecord, HandoffState, Records
from router.settings import FlowSettings


def record(id: str = "r") -> HandoffRecord:
    return HandoffRecord(RequestId(id), "m", 100, accepted=10.0)


def test_a_record_tells_each_step_with_its_reason_and_time() -> None:
    made = record()
    made.move(HandoffState.RESERVED, 10.0, "taken on")
    made.move(HandoffState.PREFILLING, 10.5, "10 queued tokens", WorkerId("p1"))
    made.move(HandoffState.READY, 11.0, "lease x", WorkerId("p1"))
    made.move(HandoffState.PULLING, 11.25, "idle", WorkerId("d1"))
    made.move(HandoffState.DONE, 12.0, "finished: stop")
    assert made.ended
    assert made.as_dict(12.0)["state"] == "done"
    assert made.as_dict(12.0)["transitions"][1] == {
        "state": "prefilling",
        "at_s": 0.5,
        "why": "10 queued tokens",
        "worker": "p1",
    }


def test_one_that_runs_tells_where_it_is_and_for_how_long_whatever_its_last_transition_was() -> None:
    made = record()
    assert (made.place, made.took(10.25)) == ("waiting", 0.25)
    made.move(HandoffState.RESERVED, 10.0, "taken on")
    made.move(HandoffState.PREFILLING, 10.5, "computed where it is decoded", WorkerId("d1"))
    made.stages = {Stage.PREFILL_SENT: 0.5}
    assert (made.place, made.summary(13.0)["seconds"]) == ("prefilling", 3.0)
    made.stages = {Stage.PREFILL_SENT: 0.5, Stage.FIRST_TOKEN: 1.0}
    assert (made.summary(40.0)["state"], made.as_dict(40.0)["seconds"]) == ("decoding", 30.0)
    made.move(HandoffState.DONE, 50.0, "finished: stop")
    assert (made.place, made.took(99.0)) == ("done", 40.0)


def test_a_record_ends_once_and_steps_that_make_no_sense_are_errors() -> None:
    made = record()
    made.move(HandoffState.RESERVED, 10.0, "taken on")
    with pytest.raises(ValueError, match="from reserved to pulling"):
        made.move(HandoffState.PULLING, 10.0, "no ticket yet")
    made.move(HandoffState.FAILED, 11.0, "no worker")
    with pytest.raises(ValueError, match="from failed to done"):
        made.move(HandoffState.DONE, 11.0, "late")


def test_only_so_many_ended_records_are_kept_and_running_ones_all() -> None:
    kept = Records(2)
    records = [record(f"r{n}") for n in range(5)]
    for made in records:
        kept.open(made)
    for made in records[:4]:
        kept.close(made)
        kept.close(made)
    assert [made.request for made in kept.ended] == ["r2", "r3"]
    assert [made.request for made in kept.running] == ["r4"]
    assert kept.get(RequestId("r0")) is None
    assert kept.get(RequestId("r4")) is records[4]


def test_beyond_the_limit_requests_are_refused_at_once_with_when_to_come_back() -> None:
    made = Admission(FlowSettings(max_requests=2, retry_after_s=3.0))
    assert made.enter(request("a", deadline_s=5.0), 10.0) == 15.0
    made.enter(request("b"), 10.0)
    with pytest.raises(Overloaded) as refused:
        made.enter(request("c"), 10.0)
    assert refused.value.retry_after_s == 3.0
    made.leave(RequestId("a"))
    made.leave(RequestId("a"))
    made.enter(request("c"), 10.0)
    assert len(made) == 2
    assert made.overdue(611.0) == ("b", "c")
