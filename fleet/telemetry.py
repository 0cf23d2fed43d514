"""What a process tells about itself: log lines as text or JSON, and a page of metrics for Prometheus."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import TextIO

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


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


class Totals(Collector):
    """Shows numbers that are kept elsewhere: read when the page is asked for, at no cost before.

    `read` gives name → number; names in `gauges` may fall, all others are totals since start.
    """

    def __init__(
        self, prefix: str, read: Callable[[], Mapping[str, float]], gauges: Iterable[str] = ()
    ) -> None:
        self._prefix = prefix
        self._read = read
        self._gauges = frozenset(gauges)

    def collect(self) -> Iterable[Metric]:
        for name, value in self._read().items():
            family = GaugeMetricFamily if name in self._gauges else CounterMetricFamily
            yield family(f"{self._prefix}_{name}", name.replace("_", " "), value=value)


def new_metrics() -> CollectorRegistry:
    """A registry of its own for each process, with what Prometheus knows of any process."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


async def metrics_page(registry: CollectorRegistry) -> bytes:
    """The page in Prometheus' text format; made in a thread, as many histograms take tens of ms."""
    return await asyncio.to_thread(generate_latest, registry)
