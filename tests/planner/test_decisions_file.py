"""The file of decisions: whole and replayable whatever happens to who writes it, and to the disk."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from test_properties import SETTINGS, STORIES

from fleet import virtual_time
from fleet.bus.memory import MemoryHub as BusHub
from fleet.errors import BadRequest
from fleet.registry.memory import MemoryHub
from fleet.targets import Desired, Mode
from planner.__main__ import PlannerProcessSettings, replayed
from planner.decide import State, decide
from planner.decisions import DecisionsFile
from planner.memory import recalled, remembered
from planner.record import Line, encode_line, replay
from planner.run import Planner
from planner.words import Fence, Observation, Plan, Targets

MUCH = 1 << 30


@contextlib.contextmanager
def room(limit: int) -> Iterator[None]:
    """No file may become longer than that: a write beyond it is cut short, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Life:
    """A planner that decides what is observed, and keeps it."""

    def __init__(self, path: Path, most: int = MUCH, waiting: int = MUCH) -> None:
        self.state = State(SETTINGS)
        self.file = DecisionsFile(path, most, SETTINGS, waiting)
        self.file.state = lambda: self.state
        self.file.keep(encode_line(Line(0.0, SETTINGS)))
        self.tick = 0

    def decide(self, story: list[Observation], times: int = 1) -> None:
        for seen in story * times:
            self.tick += 1
            at = 3.3 * self.tick
            self.file.keep(encode_line(Line(at, None, seen, decide(seen, self.state, at), leading=True)))


def decisions(path: Path) -> list[bool]:
    with path.open("rb") as lines:
        return [one.same for one in replay(lines)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    return (tmp_path_factory.mktemp("file") for _ in iter(int, 1))  # type: ignore[return-value]


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(STORIES)
def test_what_was_learnt_comes_back_from_its_json(story: list[Observation]) -> None:
    import msgspec

    state = State(SETTINGS)
    for tick, seen in enumerate(story):
        decide(seen, state, 3.3 * tick)
    again = recalled(msgspec.json.decode(msgspec.json.encode(remembered(state))))
    for tick, seen in enumerate(story, len(story)):
        assert decide(seen, again, 3.3 * tick) == decide(seen, state, 3.3 * tick)


@pytest.mark.parametrize("change", ["lacks", "has more"])
def test_what_another_version_learnt_is_refused_with_its_line(change: str) -> None:
    memory: Any = remembered(State(SETTINGS))
    learnt = memory[1]["load"][1]["arrivals"][1]
    if change == "lacks":
        del learnt["_rises"]
    else:
        learnt["_falls"] = 0.0
    story = [encode_line(Line(0.0, SETTINGS, memory=memory))]
    with pytest.raises(ValueError, match="line 1: what was learnt cannot be read"):
        list(replay(story))


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(story=STORIES)
def test_a_file_that_is_begun_anew_is_decided_again_by_itself(
    folders: Iterator[Path], story: list[Observation]
) -> None:
    path = next(folders) / "d.jsonl"
    life = Life(path, most=20_000)
    life.decide(story, 200 // len(story) + 1)
    before = path.with_name("d.jsonl.1")
    assert before.exists()
    assert all(decisions(path)), "the newer half"
    assert all(decisions(before)), "the older half"


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(story=STORIES)
def test_lines_wait_while_the_disk_is_full(folders: Iterator[Path], story: list[Observation]) -> None:
    path = next(folders) / "d.jsonl"
    life = Life(path)
    life.decide(story)
    with room(path.stat().st_size + 50):
        life.decide(story, 2)
        assert len(decisions(path)) == len(story), "whole lines only"
    life.decide(story)
    assert decisions(path) == [True] * 4 * len(story)


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(story=STORIES)
def test_after_a_gap_what_is_there_is_decided_again(
    folders: Iterator[Path], story: list[Observation]
) -> None:
    path = next(folders) / "d.jsonl"
    life = Life(path, waiting=0)
    life.decide(story)
    with room(path.stat().st_size + 50):
        life.decide(story)
    life.decide(story)
    # The first line after the gap was decided by what was learnt in it: it belongs to the gap.
    assert decisions(path) == [True] * (2 * len(story) - 1)


def test_half_a_line_is_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    whole = encode_line(Line(1.0, SETTINGS))
    path.write_bytes(whole + b'{"at":2.0,"obser')
    DecisionsFile(path, MUCH, SETTINGS).keep(encode_line(Line(3.0, SETTINGS)))
    assert path.read_bytes() == whole + encode_line(Line(3.0, SETTINGS))
    assert replayed(str(path)) == 0


def test_a_place_where_nothing_can_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "decisions"):
        with pytest.raises(BadRequest, match=f"decisions cannot be written to {path}: "):
            DecisionsFile(path, MUCH, SETTINGS)


def test_two_planners_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    one = DecisionsFile(path, MUCH, SETTINGS)
    with pytest.raises(BadRequest, match="another planner"):
        DecisionsFile(path, MUCH, SETTINGS)
    one.close()
    DecisionsFile(path, MUCH, SETTINGS).close()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"decisions_bytes": 0}, "decisions_bytes is 0"),
        ({"kubernetes": "demo"}, "NAMESPACE/NAME"),
        ({"kubernetes": "/demo"}, "NAMESPACE/NAME"),
        ({"kubernetes": "a/b/c"}, "NAMESPACE/NAME"),
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PlannerProcessSettings(**wrong)  # type: ignore[arg-type]


class Stuck:
    """Who keeps the counts: budgets smaller than what runs, and a write that does not come back."""

    def __init__(self) -> None:
        self.asked: list[Plan] = []

    async def current(self) -> Targets | None:
        return Targets(Desired(4, 4, Mode.ACT, 2), 1)

    async def apply(self, plan: Plan, seen: Targets, fence: Fence | None) -> bool:
        self.asked.append(plan)
        await asyncio.Event().wait()
        return True

    tell = apply


def test_a_decision_is_in_the_file_before_it_is_carried_out(tmp_path: Path) -> None:
    """The planner ends, however hard, while it writes: what it decided is known, and so is that nothing came
    of it."""

    async def body() -> list[bytes]:
        lines: list[bytes] = []
        planner = Planner(
            SETTINGS, "f", MemoryHub(delay_s=0.001).registry(), BusHub().bus(),
            name="one", card=b"one", keep=lines.append,
        )  # fmt: skip
        stuck = Stuck()
        planner.actuator = stuck
        running = asyncio.ensure_future(planner.run())
        async with asyncio.timeout(60):
            while not stuck.asked:
                await asyncio.sleep(0.1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return lines

    lines = virtual_time.run(body(), horizon_s=3600)
    found = list(replay(lines))
    assert found
    assert found[-1].line.leading
    assert all(one.same for one in found)
