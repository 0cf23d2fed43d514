"""How the story of a request looks in a terminal."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from rich.console import Console, RenderableType

from fleetctl.story import Row, Story, draw_list, draw_story, event_line
from fleetctl.view import terminal


def candidate(worker: str, seconds: float, **fields: Any) -> dict[str, Any]:
    base = {
        "worker": worker, "role": "prefill", "seconds": seconds, "queue_s": seconds - 0.06, "compute_s": 0.05,
        "transfer_s": 0.0, "decode_s": 0.01, "queued_tokens": 1200.0, "sequences": 3.0, "blocks_free": 90.0,
        "cached": 4, "tokens": 500,
    }  # fmt: skip
    return base | fields


RECORD: dict[str, Any] = {
    "id": "mine-1",
    "request": "0123456789abcdef01234567",
    "model": "smollm2",
    "prompt_tokens": 564,
    "class": "interactive",
    "tenant": "acme",
    "state": "done",
    "seconds": 1.0,
    "stages": {
        "accepted": 0.0, "tokenized": 0.002, "prefill_sent": 0.1, "prefill_started": 0.3, "first_token": 0.6,
        "decode_sent": 0.6, "pull_started": 0.61, "pull_ended": 0.63, "second_token": 0.65, "ended": 1.0,
    },
    "admission": [
        {"at_s": 0.002, "verdict": "queued", "why": "3 requests wait before it", "forecast": {"ttft_s": 0.4}},
        {"at_s": 0.1, "verdict": "admitted", "why": "after 0.098 s in the queue", "forecast": {}},
    ],
    "outcome": {
        "class": "interactive", "tenant": "acme", "attained": False, "why": "ttft 600 ms > 500 ms",
        "end": "finished", "tokens": 30, "ttft_s": 0.6, "tpot_s": 0.0138, "e2e_s": 1.0, "stages": {},
    },
    "transitions": [
        {"state": "reserved", "at_s": 0.001, "why": "taken on", "worker": None},
        {
            "state": "prefilling", "at_s": 0.1, "why": "1200 queued tokens, 4/36 blocks cached",
            "worker": "prefill-1",
            "considered": {
                "best": [candidate(f"prefill-{n}", at) for n, at in ((1, 0.25), (0, 0.26), (2, 1.5))],
                "others": 5, "near": 2, "near_s": 0.3, "left_out": 1,
            },
        },
        {"state": "done", "at_s": 1.0, "why": "finished: length", "worker": None},
    ],
    "something_newer": 1,
}  # fmt: skip


def drawn(picture: RenderableType, width: int = 100) -> list[str]:
    console = Console(width=width, record=True, file=None, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(picture)
    return [line.rstrip() for line in capture.get().splitlines()]


def story(**changed: Any) -> Story:
    return msgspec.convert(RECORD | changed, Story)


def bar(lines: list[str], phase: str) -> str:
    (line,) = (line for line in lines if line.startswith(phase))
    return line.removeprefix(phase).split()[0]


def test_it_says_where_it_went_why_and_what_was_missed() -> None:
    text = "\n".join(lines := drawn(draw_story(story(), "router-0"), 160))
    assert lines[0].startswith("request mine-1  (0123456789abcdef01234567)  smollm2, 564 prompt tokens")
    assert "of acme" in lines[0]
    assert lines[1].startswith(
        "✗ finished  30 tokens, TTFT 600 ms, TPOT 13.8 ms, E2E 1.00 s  missed: ttft 600"
    )
    assert "queued at 2.0 ms: 3 requests wait before it; expected were TTFT 400 ms" in text
    figures = " ".join(next(line for line in lines if "▸" in line).split())
    assert figures == "▸ prefill-1 250 ms 190 ms 50.0 ms – 10.0 ms 1200 3 4"
    assert "2 were as good as equal" in text
    assert "5 more were no better" in text
    assert "1 had refused or lost it, or were too small" in text


def test_time_is_bars_to_scale() -> None:
    lines = drawn(draw_story(story(), "r"))
    assert bar(lines, "queued at the worker") == "·" * 3 + "█" * 8 + "·" * 25
    assert bar(lines, "prompt computed") == "·" * 10 + "█" * 12 + "·" * 14
    assert bar(lines, "waits for a decode worker") == "·" * 36, "no time at all"
    assert bar(lines, "rest of the answer").endswith("█")


def test_a_long_answer_does_not_hide_what_was_before_it() -> None:
    stages = RECORD["stages"] | {"ended": 60.0}
    lines = drawn(draw_story(story(stages=stages, seconds=60.0), "r"))
    assert bar(lines, "prompt computed").count("█") > 10
    assert bar(lines, "rest of the answer").endswith("█▸")


def test_one_under_way_and_one_that_was_never_sent_are_drawn_too() -> None:
    under_way = story(state="prefilling", outcome=None, stages={"accepted": 0.0, "tokenized": 0.01})
    assert "◐ prefilling for 1.00 s so far" in drawn(draw_story(under_way, "r"))
    refused = story(state="failed", stages={}, transitions=[], admission=[])
    assert drawn(draw_story(refused, "r"))


def test_pictures_fit_a_narrow_terminal() -> None:
    for width in (80, 100, 160):
        lines = drawn(draw_story(story(), "router-0"), width)
        assert max(map(len, lines)) <= width
        assert any("▸ prefill-1" in line and "10.0 ms" in line for line in lines), "no figure is cut"
        assert not any("…" in line for line in lines)


def test_brackets_in_names_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "id": "mine-1", "model": "org/m[red]x[/no]", "prompt_tokens": 12, "class": "[/batch]",
        "state": "done", "seconds": 2.5, "ttft_s": None, "attained": None, "workers": ["[b]w"],
    }  # fmt: skip
    console = terminal()
    console.width = 160
    console.print(draw_list([msgspec.convert(row, Row)], 160))
    shown = capsys.readouterr().out
    assert "[/batch]" in shown
    assert "org/m[red]x[/no]" in shown
    assert "[b]w" in shown


def test_lists_and_news_are_one_line_each() -> None:
    row = {
        "id": "mine-1", "model": "m", "prompt_tokens": 12, "class": "batch", "state": "done", "seconds": 2.5,
        "ttft_s": None, "attained": None, "workers": ["prefill-0", "decode-1"],
    }  # fmt: skip
    lines = drawn(draw_list([msgspec.convert(row, Row)], 120), 120)
    assert lines[1].split() == [
        "mine-1",
        "done",
        "batch",
        "m",
        "12",
        "–",
        "2.50",
        "s",
        "–",
        "prefill-0",
        "→",
        "decode-1",
    ]
    assert drawn(draw_list([], 80)) == ["no requests are remembered"]
    long = row | {
        "id": "ef65f2c685aec5717d6cbb4c", "class": "interactive", "state": "released", "attained": False,
        "prompt_tokens": 120_000, "ttft_s": 0.0123, "workers": ["prefill-43b1cf", "decode-effcb1"],
    }  # fmt: skip
    lines = drawn(draw_list([msgspec.convert(long, Row)], 80), 80)
    assert len(lines) == 2
    assert lines[1].startswith("ef65f2c685aec5717d6cbb4c  released  interactive")
    assert lines[1].endswith("missed")
    step = {"event": "step", "id": "a", "state": "ready", "at_s": 0.25, "why": "lease x", "worker": "p"}
    assert event_line(step, "r").plain.split() == ["a", "250", "ms", "ready", "p", "lease", "x"]
    end = {
        "event": "end",
        "id": "a",
        "seconds": 3.0,
        "outcome": {"end": "finished", "tokens": 5, "why": "ok"},
    }
    assert event_line(end, "r").plain.split() == ["a", "3.00", "s", "finished", "after", "5", "tokens:", "ok"]
    assert "7 news of r" in event_line({"event": "missed", "count": 7}, "r").plain
