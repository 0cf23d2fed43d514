"""What is made of what is heard: how long a start takes."""

from __future__ import annotations

from dataclasses import replace

from scripted_worker import card

from fleet.ids import WorkerId
from fleet.member import MemberState, Role, WorkerCard
from fleet.targets import Desired, Mode
from planner.observe import Observer


def there(*names: str, state: MemberState = MemberState.READY) -> dict[WorkerId, WorkerCard]:
    found = [replace(card(name, Role.PREFILL), state=state) for name in names]
    return {one.id: one for one in found}


def test_a_cold_start_is_measured_of_workers_that_were_started_and_not_of_those_found_there() -> None:
    observer, routers = Observer(), frozenset[str]()
    two, three = Desired(2, 0, Mode.ACT), Desired(3, 0, Mode.ACT)
    assert observer.observe(two, 0.0).cold_start_s is None
    observer.apply_view(there("p0", "p1"), routers, 1.0, live=True)  # type: ignore[arg-type]
    # They were there before it looked: that took no five seconds.
    assert observer.observe(two, 5.0).cold_start_s is None
    observer.observe(three, 10.0)
    observer.apply_view(there("p0", "p1", "p2"), routers, 68.0, live=True)  # type: ignore[arg-type]
    assert observer.observe(three, 70.0).cold_start_s == 60.0
