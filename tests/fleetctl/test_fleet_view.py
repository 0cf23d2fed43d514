"""The terminal picture, read as text."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

from rich.console import Console

from fleet.targets import Desired
from fleetctl.view import draw, try_line
from fleetctl.words import FleetPicture, RouterRow, ServerRow, WorkerRow


def console_text(console: Console, picture: FleetPicture) -> str:
    with console.capture() as captured:
        console.print(draw(picture))
    return captured.get()


PICTURE = FleetPicture(
    fleet="blue",
    model="smollm2",
    workers=(
        WorkerRow(
            "prefill-aaaaaa", "prefill", "ready", 11, running=2, waiting=1, blocks_free=60, blocks_total=80
        ),
        WorkerRow("decode-bbbbbb", "decode", "starting", 12),
        WorkerRow("decode-cccccc", "decode", "crashed", None, restarts=2, note="crash: ended, exit code 1"),
    ),
    routers=(RouterRow("router", "http://127.0.0.1:8000", "ready", 10),),
    desired=Desired(1, 2),
    etcd=ServerRow("127.0.0.1:2379", "ready", 8),
    nats=ServerRow("nats://127.0.0.1:4222", "ready", 9),
    supervisor=7,
)


def test_every_worker_has_its_line() -> None:
    console = Console(width=120)
    lines = console_text(console, PICTURE).splitlines()
    assert "blue" in lines[0]
    assert "prefill 1/1" in lines[0]
    assert "decode 0/2" in lines[0]
    (prefill,) = [line for line in lines if line.startswith("prefill-aaaaaa")]
    assert prefill.split() == [
        "prefill-aaaaaa",
        "prefill",
        "●",
        "ready",
        "2",
        "1",
        "██░░░░",
        "20/80",
        "11",
    ]
    crashed, why = [line for line in lines if line.startswith("decode-cccccc")]
    assert "crashed" in crashed
    assert why == "decode-cccccc  crash: ended, exit code 1; started again 2×"


def test_unknown_is_not_shown_as_zero() -> None:
    console = Console(width=120)
    (starting,) = [
        line for line in console_text(console, PICTURE).splitlines() if line.startswith("decode-bbbbbb")
    ]
    assert starting.split() == ["decode-bbbbbb", "decode", "◌", "starting", "–", "–", "–", "12"]


def test_it_fits_a_narrow_terminal() -> None:
    lines = console_text(Console(width=80), PICTURE).splitlines()
    assert max(len(line) for line in lines) <= 80
    assert any("http://127.0.0.1:8000/v1" in line for line in lines)


def test_in_eighty_columns_nothing_is_cut_and_long_names_go_on_below() -> None:
    long = "big-prefill-7f9c4d5b6d-x2x4q"
    rows = [
        WorkerRow(
            name,
            "prefill",
            "draining",
            4_194_303,
            running=2,
            blocks_free=1000,
            blocks_total=8_388_608,
            restarts=1,
        )
        for name in ("prefill-43b1cf", long)
    ]
    picture = FleetPicture("blue", "m", tuple(rows), (), None, PICTURE.etcd, None, None)
    text = console_text(Console(width=80), replace(picture, workers=(rows[0],)))
    assert "prefill-43b1cf  prefill  ◐ draining" in text
    assert "8.4M/8.4M  4194303" in text
    text = console_text(Console(width=80), picture)
    assert "…" not in text
    lines = [line[:14].strip() for line in text.splitlines()]
    assert long in "".join(lines)


def test_counts_are_whole_in_eighty_columns() -> None:
    row = WorkerRow(
        "prefill-aaaaaa",
        "prefill",
        "draining",
        12345,
        running=2,
        waiting=1,
        blocks_free=1000,
        blocks_total=1456,
    )
    text = console_text(
        Console(width=80), FleetPicture("blue", "m", (row,), (), None, PICTURE.etcd, None, None)
    )
    assert "456/1456" in text


def test_the_line_to_try_can_be_pasted() -> None:
    words = shlex.split(try_line("http://127.0.0.1:8000", "it's a model"))
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == "it's a model"
