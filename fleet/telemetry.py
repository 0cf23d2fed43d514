"""What a process tells about itself: log lines as text or JSON, and a page of metrics for Prometheus."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TextIO

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from fleet.metrics import Buckets, Family, Kind
from fleet.vllm_names import aliases


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What is logged, and how; always to standard error."""

    level: LogLevel = LogLevel.INFO
    """Least weight of a line that is shown."""
    format: LogFormat = LogFormat.TEXT
    """text for eyes; json, one object a line, for collectors."""


_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""Fields every record has; any other came with `extra=` and is shown."""


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        line = f"{time} {record.levelname[0]} {record.name}: {record.getMessage()}"
        line += "".join(f" {name}={value}" for name, value in _extra(record).items())
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
            **_extra(record),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def _extra(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _PLAIN}


def set_up_logging(settings: LogSettings, stream: TextIO | None = None) -> None:
    """Replaces whatever the root logger did before. Libraries speak from warnings on."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Json() if settings.format is LogFormat.JSON else _Text())
    logging.basicConfig(handlers=[handler], level=settings.level.upper(), force=True)
    for name in ("asyncio", "grpc", "nats", "httpx", "uvicorn.access"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


async def page(families: Sequence[Family], vllm_names: bool = False, model: str = "") -> bytes:
    """The page in Prometheus' text format, with what it knows of any process; `vllm_names`: with the names
    that vLLM has for the same, too, of this model. Made in a thread: hundreds of series take tens of ms."""
    return await asyncio.to_thread(_write, families, vllm_names, model)


def _write(families: Sequence[Family], vllm_names: bool, model: str) -> bytes:
    shown = [*families, *aliases(families, model)] if vllm_names else families
    written: bytes = generate_latest(_Page(shown))
    return written


class _Page(Collector):
    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        for family in self._families:
            yield _metric(family)
        yield from _PROCESS.collect()
        yield from _GARBAGE.collect()


_PROCESS = ProcessCollector(registry=None)
_GARBAGE = GCCollector(registry=CollectorRegistry())


_KINDS = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
}


def _metric(family: Family) -> Metric:
    metric: Any = _KINDS[family.kind](family.name, family.help, labels=family.labels)
    for labels, number in family.series.items():
        if isinstance(number, Buckets):
            metric.add_metric(labels, number.cumulative(), number.sum)
        else:
            metric.add_metric(labels, number)
    written: Metric = metric
    return written
