"""Log lines in both formats, and the page of metrics, read back as Prometheus does."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fleet.metrics import Buckets, Family, Kind, Labels, counter, gauge, histogram, value
from fleet.telemetry import LogFormat, LogLevel, LogSettings, page, set_up_logging


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


Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def written(*families: Family, vllm_names: bool = False) -> Samples:
    text = asyncio.run(page(families, vllm_names, "m")).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_kind_is_written() -> None:
    seconds = Buckets((0.1, 1.0))
    seconds.observe_all([0.05, 0.5, 0.5, 7.0])
    found = written(
        counter("a", "A.", ("x",), {("one",): 3}),
        gauge("b", "B.", (), {(): 2.5}),
        histogram("c_seconds", "C.", ("x",), {("one",): seconds}),
        value("d", "D.", Kind.GAUGE, None),
    )
    assert found["a_total", (("x", "one"),)] == 3
    assert found["b", ()] == 2.5
    counts = [found["c_seconds_bucket", (("le", bound), ("x", "one"))] for bound in ("0.1", "1.0", "+Inf")]
    assert counts == [1, 3, 4]
    assert found["c_seconds_sum", (("x", "one"),)] == pytest.approx(8.05)
    assert not any(name == "d" for name, _ in found), "what is unknown is absent, not zero"
    assert found["process_cpu_seconds_total", ()] > 0


def test_what_was_never_measured_spoils_no_sum() -> None:
    seconds = Buckets((0.1, 1.0))
    seconds.observe_all([-1e9, float("nan"), 0.5])
    assert (seconds.total, seconds.sum) == (1, 0.5)


def test_a_page_shows_the_moment_it_was_asked_for() -> None:
    seconds, counts = Buckets((0.1,)), {("one",): 1.0}
    families = [counter("a", "A.", ("x",), counts), histogram("b", "B.", (), {(): seconds})]
    counts[("one",)] = 9.0
    seconds.observe(0.05)
    found = written(*families)
    assert found["a_total", (("x", "one"),)] == 1
    assert found["b_count", ()] == 0


def test_the_page_is_written_off_the_loop() -> None:
    class Seen(dict[Labels, float]):
        def items(self) -> Any:
            threads.append(threading.get_ident())
            return super().items()

    threads: list[int] = []
    written(Family("a", Kind.GAUGE, "A.", (), Seen({(): 1.0})))
    assert threads
    assert threading.get_ident() not in threads


def test_vllms_names_are_told_when_asked_for() -> None:
    counts = {"stop": 2.0, "failed": 1.0, "timed_out": 4.0, "rejected": 9.0}
    ends = {("m", "standard", end): count for end, count in counts.items()}
    families = [
        counter("pdfleet_requests_ended", "E.", ("model", "slo_class", "end"), ends),
        gauge("pdfleet_worker_sequences", "S.", ("state",), {("running",): 3.0, ("waiting",): 1.0}),
    ]
    assert not any(name.startswith("vllm") for name, _ in written(*families))
    found = {key: number for key, number in written(*families, vllm_names=True).items() if "vllm" in key[0]}

    def success(reason: str) -> tuple[str, tuple[tuple[str, str], ...]]:
        labels = (("finished_reason", reason), ("model_name", "m"), ("slo_class", "standard"))
        return "vllm:request_success_total", labels

    assert found == {
        success("stop"): 2,
        success("error"): 5,
        ("vllm:num_requests_running", (("model_name", "m"),)): 3,
        ("vllm:num_requests_waiting", (("model_name", "m"),)): 1,
    }
