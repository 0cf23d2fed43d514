"""One tree of spans a request, sampled and sent by OTLP; made when it is over, from its timeline.

Spans cost 20 µs each: there are a few a request, none a token, and none at all where nothing is sampled.
OpenTelemetry is an extra (`tracing`) and is imported only when an endpoint is set.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fleet.settings import SettingsError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

Attributes = Mapping[str, str | bool | int | float]
TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Where traces go, and of how many requests there are any."""

    endpoint: str = ""
    """URL of an OTLP collector over HTTP, such as http://127.0.0.1:4318/v1/traces; empty: no traces."""
    ratio: float = 0.01
    """Share of requests that are traced, of those that bring no `traceparent`; the others are traced if
    their parent is."""
    service: str = "pdfleet"
    """Name of the service in the traces."""

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"ratio is {self.ratio}; 0 to 1 is possible")
        if self.endpoint and not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"endpoint is {self.endpoint!r}; a URL of http or https is needed")


class Tracer:
    """Begins traces. `close` sends what is left."""

    def __init__(
        self, settings: TraceSettings, exporter: SpanExporter | None = None, instance: str = ""
    ) -> None:
        """Without `exporter`, to `settings.endpoint`, in batches, by a thread. SettingsError: the extra is
        not installed."""
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise SettingsError("trace.endpoint: install the extra: pip install 'pdfleet[tracing]'") from None
        resource = Resource({"service.name": settings.service, "service.instance.id": instance})
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(settings.ratio)),
            resource=resource,
            shutdown_on_exit=False,
        )
        processor: SpanProcessor
        if exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            self._exporter: SpanExporter = OTLPSpanExporter(endpoint=settings.endpoint)
            processor = BatchSpanProcessor(self._exporter)
        else:
            self._exporter = exporter
            processor = SimpleSpanProcessor(exporter)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("pdfleet")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, headers: Iterable[tuple[bytes, bytes]], now: float) -> Trace:
        """The root of a request's tree, below its `traceparent` where it brings a good one. `now`: this
        moment on the clock of its times."""
        from opentelemetry.trace import SpanKind

        carried = {
            one.decode(): [value.decode("latin-1") for key, value in headers if key == one]
            for one in (TRACEPARENT, TRACESTATE)
        }
        context = self._propagator.extract(carried) if carried["traceparent"] else None
        return Trace(self._tracer, name, context, SpanKind.SERVER, now)

    def close(self, limit_s: float = 3.0) -> None:
        """Blocks until what is left was sent, or for so long: a collector that is slow or away must not keep
        a process from leaving. The exporter itself would wait for 30 s."""
        sending = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        sending.start()
        sending.join(limit_s)
        if sending.is_alive():
            self._exporter.shutdown()  # It tries no more: nothing of it is left behind.


class Trace:
    """One request's."""

    __slots__ = ("_context", "_offset_ns", "_over", "_span", "_tracer")

    def __init__(self, tracer: Any, name: str, context: Any, kind: Any, now: float) -> None:
        self._tracer = tracer
        # The wall clock is asked once: what is set meanwhile must not tear parts from their whole.
        self._offset_ns = time.time_ns() - int(now * 1e9)
        self._span = tracer.start_span(name, context, kind, start_time=self._at(now))
        self._context: Any = None
        self._over = now

    @property
    def sampled(self) -> bool:
        return bool(self._span.is_recording())

    @property
    def traceparent(self) -> bytes:
        """To be passed on."""
        from opentelemetry.trace import format_span_id, format_trace_id

        context = self._span.get_span_context()
        trace, span = format_trace_id(context.trace_id), format_span_id(context.span_id)
        return f"00-{trace}-{span}-{context.trace_flags:02x}".encode()

    def over(self, now: float) -> None:
        """It was over then; from here on spans are added."""
        from opentelemetry.trace import set_span_in_context

        self._over = now
        self._context = set_span_in_context(self._span)

    def span(self, name: str, begin: float, end: float, attributes: Attributes, parent: Any = None) -> Any:
        """A part of the request, of any depth; returns what stands for it as a parent."""
        from opentelemetry.trace import set_span_in_context

        span = self._tracer.start_span(
            name, parent or self._context, attributes=attributes, start_time=self._at(begin)
        )
        span.end(self._at(max(begin, end)))
        return set_span_in_context(span)

    def end(self, attributes: Attributes, error: str = "") -> None:
        """`error`: what went wrong on our side, in few words."""
        if self._span.is_recording():
            from opentelemetry.trace import Status, StatusCode

            self._span.set_attributes(attributes)
            if error:
                self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(self._at(self._over))

    def _at(self, seconds: float) -> int:
        return int(seconds * 1e9) + self._offset_ns
