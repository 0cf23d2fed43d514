"""Log lines in both formats, and numbers kept elsewhere on the metrics page."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest

from fleet.telemetry import (
    LogFormat,
    LogLevel,
    LogSettings,
    Totals,
    metrics_page,
    new_metrics,
    set_up_logging,
)


@pytest.fixture(autouse=True)
def _root_logger_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(settings: LogSettings) -> list[str]:
    stream = io.StringIO()
    set_up_logging(settings, stream)
    log = logging.getLogger("fleet.test")
    log.debug("hidden")
    log.info("chose %s", "decode-1", extra={"request": "r1", "cost": 0.5})
    try:
        raise ValueError("bad\nthing")
    except ValueError:
        log.exception("failed")
    logging.getLogger("nats").info("chatter of a library")
    return stream.getvalue().splitlines()


def test_text_lines() -> None:
    first, second, *trace = lines(LogSettings())
    assert first.endswith(" I fleet.test: chose decode-1 request=r1 cost=0.5")
    assert second.endswith(" E fleet.test: failed")
    assert trace[0].startswith("Traceback")
    assert "chatter" not in "".join(trace)


def test_json_lines_are_one_object_each() -> None:
    first, second = map(json.loads, lines(LogSettings(format=LogFormat.JSON)))
    assert (first["level"], first["logger"], first["message"]) == ("info", "fleet.test", "chose decode-1")
    assert (first["request"], first["cost"]) == ("r1", 0.5)
    assert first["time"].endswith("+00:00")
    assert "ValueError: bad\nthing" in second["error"]


def test_the_level_holds() -> None:
    assert len(lines(LogSettings(level=LogLevel.ERROR, format=LogFormat.JSON))) == 1
    assert "hidden" in lines(LogSettings(level=LogLevel.DEBUG))[0]


def test_numbers_kept_elsewhere_are_read_when_asked() -> None:
    numbers = {"pulls": 1.0, "blocks_free": 9.0}
    registry = new_metrics()
    registry.register(Totals("pdfleet_worker", lambda: numbers, gauges=["blocks_free"]))
    numbers["pulls"] = 5.0
    page = asyncio.run(metrics_page(registry)).decode()
    assert "# TYPE pdfleet_worker_pulls_total counter\npdfleet_worker_pulls_total 5.0\n" in page
    assert "# TYPE pdfleet_worker_blocks_free gauge\npdfleet_worker_blocks_free 9.0\n" in page
    assert "process_cpu_seconds_total" in page
