"""How `fleetctl top` looks, from what real routers tell."""

from __future__ import annotations

import pytest
from crowd import Crowd
from msgspec import json
from rich.console import Console

from fleet.targets import LastDecision
from fleetctl.glance import Said, draw_glance
from router.roster import LinkState


def said(crowd: Crowd, now: float) -> Said:
    """As it comes over HTTP."""
    return json.decode(json.encode(crowd.live.snapshot(now)), type=Said)


def drawn(
    pictures: list[Said], before: list[Said], sort: str = "queue", silent: tuple[str, ...] = ()
) -> list[str]:
    console = Console(width=80, height=24, color_system=None, highlight=False)
    with console.capture() as captured:
        console.print(draw_glance(pictures, before, sort, 24, silent))
    lines = captured.get().splitlines()
    assert len(lines) <= 24
    assert all(len(line.rstrip()) <= 80 for line in lines)
    return lines


@pytest.mark.parametrize("sort", ["queue", "kv", "running", "state", "name"])
def test_a_thousand_workers_fit_into_a_small_terminal(sort: str) -> None:
    crowd = Crowd(1000)
    crowd.report()
    lost = crowd.cards[777]
    crowd.roster.apply_link(lost.id, lost.incarnation, LinkState.LOST)
    for number in range(40):
        crowd.finish("interactive", 100.0 + number, ttft_s=2.5 if number > 30 else 0.2)
    picture = "\n".join(lines := drawn([said(crowd, 140.0)], [], sort))
    assert "decode 749/750 ready" in lines[0]
    assert "more, " in picture
    assert "ttft 2500 ms > 2000 ms" in picture
    assert ("lost" in picture) == (sort == "state")
    assert "interactive" in picture
    assert "77.5%" in picture


def test_routers_are_put_together_and_workers_counted_once() -> None:
    one, two = Crowd(4, seed=1), Crowd(4, seed=1)
    for crowd in (one, two):
        crowd.report()
    before = [said(one, 100.0), said(two, 100.0)]
    for crowd, count in ((one, 30), (two, 60)):
        crowd.flow.counters["requests"] += count
        for number in range(count):
            crowd.finish("standard", 100.0 + number / 10)
    after = [said(one, 110.0), said(two, 110.0)]
    for pictures in (before, after):
        pictures[1].router.id = "router-2"
    lines = drawn(after, before, silent=("router router-3 does not answer",))
    assert "2 routers" in lines[0]
    assert lines[1].startswith("9 req/s →")
    assert any("router-3 does not answer" in line for line in lines)
    assert sum(line.startswith(("prefill-", "decode-")) for line in lines) == 4


def test_nothing_there_is_said_to_be_nothing() -> None:
    lines = drawn([said(Crowd(0), 1.0)], [])
    assert any("no worker is there" in line for line in lines)
    assert lines[1].startswith("–"), "no rate is known from one look"


def test_what_a_planner_decided_takes_one_line() -> None:
    crowd = Crowd(1000)
    crowd.report()
    crowd.live.planned(LastDecision(3, 9, "more is asked " * 20, "advise", False, 1.0), 90.0)
    lines = drawn([said(crowd, 100.0)], [])
    assert lines[2].startswith("planner prefill 3, decode 9 (10.0 s ago): (advise) more is asked")
    assert lines[2].endswith("…")
