"""The story of a request as a terminal picture: where it went, when, why, and who else was weighed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_BAR = 36
_REST = "rest of the answer"
_PHASES = (
    ("read and tokenized", "accepted", "tokenized", "cyan"),
    ("waits for its turn", "tokenized", "prefill_sent", "yellow"),
    ("queued at the worker", "prefill_sent", "prefill_started", "yellow"),
    ("prompt computed", "prefill_started", "first_token", "green"),
    ("waits for a decode worker", "first_token", "decode_sent", "yellow"),
    ("queued there", "decode_sent", "pull_started", "yellow"),
    ("KV brought", "pull_started", "pull_ended", "magenta"),
    ("to the second token", "pull_ended", "second_token", "blue"),
    (_REST, "second_token", "ended", "blue"),
)
"""Name, first and last stage, colour. One of which a stage was not reached is left out."""


class Candidate(msgspec.Struct):
    worker: str
    role: str
    seconds: float
    queue_s: float
    compute_s: float
    transfer_s: float
    decode_s: float
    queued_tokens: float
    sequences: float
    blocks_free: float
    cached: int
    tokens: int
    borrowed: int = 0


class Considered(msgspec.Struct):
    best: tuple[Candidate, ...]
    others: int
    near: int
    near_s: float
    left_out: int


class Step(msgspec.Struct):
    state: str
    at_s: float
    why: str
    worker: str | None = None
    considered: Considered | None = None


class Story(msgspec.Struct):
    """A record as `GET /fleet/requests/{id}` gives it; what a newer router says besides is passed over."""

    id: str
    request: str
    model: str
    prompt_tokens: int
    slo_class: str = msgspec.field(name="class")
    tenant: str
    state: str
    seconds: float
    stages: Mapping[str, float]
    admission: tuple[dict[str, Any], ...]
    outcome: dict[str, Any] | None
    transitions: tuple[Step, ...]


class Row(msgspec.Struct):
    """A line of `GET /fleet/requests`."""

    id: str
    model: str
    prompt_tokens: int
    slo_class: str = msgspec.field(name="class")
    state: str
    seconds: float
    ttft_s: float | None
    attained: bool | None
    workers: tuple[str, ...]
    router: str = ""


def draw_story(story: Story, router: str) -> RenderableType:
    parts: list[RenderableType] = [_head(story, router), _verdict(story), Text(), _timeline(story)]
    for decision in story.admission:
        parts += [Text(), _admission(decision)]
    parts += [Text(), *_steps(story)]
    return Group(*parts)


def _head(story: Story, router: str) -> Text:
    head = Text.assemble(("request ", "bold"), (story.id, "bold cyan"))
    if story.id != story.request:
        head.append(f"  ({story.request})", "dim")
    head.append(f"  {story.model}, {story.prompt_tokens} prompt tokens, {story.slo_class}")
    if story.tenant:
        head.append(f", of {story.tenant}")
    return head.append(f"  asked at {router}", "dim")


def _verdict(story: Story) -> Text:
    outcome = story.outcome
    if outcome is None:
        return Text(f"◐ {story.state} for {_time(story.seconds)} so far", "cyan")
    attained = outcome["attained"]
    sign, style = {True: ("●", "green"), False: ("✗", "red"), None: ("○", "dim")}[attained]
    said = Text(f"{sign} {str(outcome['end']).replace('_', ' ')}", style)
    figures = [f"{outcome['tokens']} tokens"]
    figures += [
        f"{name.removesuffix('_s').upper()} {_time(outcome[name])}"
        for name in ("ttft_s", "tpot_s", "e2e_s")
        if outcome.get(name) is not None
    ]
    said.append(f"  {', '.join(figures)}", "default")
    if attained is not True or outcome["why"]:
        said.append(f"  {'missed: ' if attained is False else ''}{outcome['why']}", style)
    return said


def phases(stages: Mapping[str, float]) -> Iterator[tuple[str, float, float, str]]:
    """(name, start s, end s, colour) of what a request went through, in order."""
    for name, first, last, style in _PHASES:
        start, end = stages.get(first), stages.get(last)
        if first == "second_token" and start is None:
            start = stages.get("first_token")
        if start is not None and end is not None and end >= start:
            yield name, start, end, style


def _timeline(story: Story) -> Table:
    """Bars to one scale; but where the rest of the answer is the most of it, the bars are of what was before,
    or nothing of that would be seen."""
    found = list(phases(story.stages))
    whole = max([end for _, _, end, _ in found], default=0.0)
    apart = bool(found) and found[-1][0] == _REST and found[-1][1] < whole / 2 and len(found) > 1
    scale = (found[-1][1] if apart else whole) or 1.0
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column()
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(style="dim", justify="right", no_wrap=True)
    for name, start, end, style in found:
        if apart and name == _REST:
            bar = Text("·" * (_BAR - 2), "dim").append("█▸", style)
        else:
            # Whatever lasted at all is seen: at least one cell.
            begin = min(_BAR - 1, int(start / scale * _BAR))
            cells = min(_BAR - begin, max(1, round(end / scale * _BAR) - begin)) if end > start else 0
            bar = Text("·" * begin, "dim").append("█" * cells, style)
            bar.append("·" * (_BAR - begin - cells), "dim")
        grid.add_row(name, bar, _time(end - start), f"from {_time(start)}")
    return grid


def _admission(decision: dict[str, Any]) -> Text:
    said = Text.assemble((str(decision["verdict"]), "bold"), f" at {_time(decision['at_s'])}")
    said.append(f": {decision['why']}")
    forecast = decision.get("forecast") or {}
    expected = [f"{name.removesuffix('_s').upper()} {_time(value)}" for name, value in forecast.items()]
    return said.append(f"; expected were {' and '.join(expected)}", "dim") if expected else said


def _steps(story: Story) -> Iterator[RenderableType]:
    for step in story.transitions:
        style = {"done": "green", "failed": "red", "released": "yellow"}.get(step.state, "bold")
        line = Text.assemble((f"{_time(step.at_s):>9}  ", "dim"), (f"{step.state:<10} ", style))
        line.append(f"{step.worker}  " if step.worker else "", "bold").append(step.why)
        yield line
        if step.considered is not None and step.considered.best:
            yield Padding(_candidates(step), (0, 0, 0, 4))


def _candidates(step: Step) -> RenderableType:
    considered = step.considered
    assert considered is not None
    # 79 characters with a worker's name of 12: what stands in a narrow terminal.
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("weighed", overflow="fold")
    for title in ("expect", "= queue", "+ prompt", "+ KV", "+ decode", "queued", "seqs", "cached"):
        table.add_column(title, justify="right", no_wrap=True)
    for candidate in considered.best:
        taken = candidate.worker == step.worker
        table.add_row(
            Text(f"{'▸' if taken else ' '} {candidate.worker}", "bold" if taken else "default"),
            Text(_time(candidate.seconds), "bold" if candidate.seconds <= considered.near_s else "default"),
            *(
                _time(part) if part >= 5e-7 else Text("–", "dim")
                for part in (
                    candidate.queue_s, candidate.compute_s, candidate.transfer_s, candidate.decode_s,
                )
            ),
            f"{candidate.queued_tokens:.0f}",
            f"{candidate.sequences:.0f}",
            f"{candidate.cached}+{candidate.borrowed}" if candidate.borrowed else f"{candidate.cached}",
        )  # fmt: skip
    notes = []
    if considered.near > 1:
        notes.append(f"{considered.near} were as good as equal: of two of them the less loaded was taken")
    if considered.others:
        notes.append(f"{considered.others} more {'were' if considered.others > 1 else 'was'} no better")
    if considered.left_out:
        notes.append(f"{considered.left_out} had refused or lost it, or were too small")
    return Group(table, Text("; ".join(notes), "dim")) if notes else table


_WIDE = 120
"""Columns of a terminal in which a line has room for the model and the workers, too."""


def draw_list(rows: list[Row], width: int) -> RenderableType:
    """One line each, with what there is room for: ids are there to be copied."""
    if not rows:
        return Text("no requests are remembered", "dim")
    wide = width >= _WIDE
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("request", overflow="fold")
    table.add_column("state", no_wrap=True)
    for title in ("class", *(["model"] if wide else [])):
        table.add_column(title, overflow="fold")
    for title in ("prompt", "TTFT", "whole"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("judged", no_wrap=True)
    if wide:
        table.add_column("workers", overflow="fold")
    for row in rows:
        met = {True: Text("met", "green"), False: Text("missed", "red"), None: Text("–", "dim")}[row.attained]
        ttft = "–" if row.ttft_s is None else _time(row.ttft_s)
        table.add_row(
            Text(row.id, "bold"), row.state, row.slo_class, *([row.model] if wide else []),
            str(row.prompt_tokens), ttft, _time(row.seconds), met,
            *([" → ".join(row.workers)] if wide else []),
        )  # fmt: skip
    return table


def event_line(event: dict[str, Any], router: str) -> Text:
    """One line of news."""
    if event["event"] == "missed":
        return Text(f"{event['count']} news of {router} came too fast and are missing", "yellow")
    line = Text(f"{event['id']:<24}  ", "cyan")
    if event["event"] == "end":
        outcome = event.get("outcome") or {}
        attained = outcome.get("attained")
        style = {True: "green", False: "red"}.get(attained, "dim")  # type: ignore[arg-type]
        line.append(f"{_time(event['seconds']):>9}  ", "dim").append(f"{outcome.get('end', 'ended')} ", style)
        tokens = outcome.get("tokens", 0)
        return line.append(f"after {tokens} tokens: {outcome.get('why', '')}")
    line.append(f"{_time(event['at_s']):>9}  ", "dim").append(f"{event['state']:<10} ", "bold")
    return line.append(f"{event['worker']}  " if event.get("worker") else "").append(str(event["why"]))


def _time(seconds: float) -> str:
    if seconds < 1.0:
        return f"{seconds * 1000:.1f} ms" if seconds < 0.1 else f"{seconds * 1000:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 100 else f"{seconds:.0f} s"
