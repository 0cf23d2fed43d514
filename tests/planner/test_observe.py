"""What is made of what is heard: how long a start takes."""

from __future__ import annotations

from scripted_worker import card

from fleet.ids import WorkerId
from fleet.member import Role, WorkerCard
from fleet.targets import Desired, Mode
from planner.observe import Observer


def there(*names: str, decode: tuple[str, ...] = ()) -> dict[WorkerId, WorkerCard]:
    found = [card(name, Role.PREFILL) for name in names] + [card(name, Role.DECODE) for name in decode]
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


def test_each_start_is_measured_from_when_it_was_wanted_however_many_are_under_way() -> None:
    observer, ready = Observer(), ["p0"]

    def seen(prefill: int, now: float, *came: str, decode: int = 1) -> float | None:
        ready.extend(came)
        cards = there(*ready, decode=("d0", "d1")[:decode])
        observer.apply_view(cards, frozenset[str](), now, live=True)  # type: ignore[arg-type]
        return observer.observe(Desired(prefill, decode, Mode.ACT), now).cold_start_s

    assert seen(1, 0.0) is None
    assert [seen(2, 10.0), seen(3, 40.0), seen(4, 65.0)] == [None] * 3
    # It is ready five seconds after another one was wanted, and the next one half a minute after it.
    assert seen(4, 70.0, "p1") == 60.0
    assert seen(4, 100.0, "p2") == 60.0
    # The one that was wanted last is given up, and another one wanted later.
    assert seen(3, 105.0, decode=2) == 60.0
    assert seen(4, 110.0, decode=2) == 60.0
    # What changes its role meanwhile has not been started.
    assert seen(5, 130.0, "d1") == 60.0
    assert seen(5, 170.0, "p3") == 60.0
