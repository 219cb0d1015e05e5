"""Events of a rank → spans, and metrics of its node, to an OpenTelemetry collector by OTLP/HTTP (docs/watching.md).

The OTEL_* variables of OpenTelemetry's SDK configure it. Each trainer and each courier sends its own spans, so that one
goes on where the other is dead. All of it, imports included, happens on one thread, which nothing waits for.
"""

from __future__ import annotations

import collections
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..errors import pip_install
from ..events import Event
from ..version import __version__
from .metrics import Metric, NodeMetrics

log = logging.getLogger("mlflash")

_SPANS_EVERY_S, _METRICS_EVERY_S = 1.0, 5.0
_CLOSE_S = 2.0  # to send what remains at the end
_WAITING = 10_000  # events that may wait; older ones are dropped
_AT_ONCE = 512  # spans in one message
_NAMES = {"fail": "commit", "unrestorable": "restore"}  # what failed, by the event that says so
_EXPORTERS = "opentelemetry.exporter.otlp.proto.http"


class Exporter:
    """Sends spans of what happens to this process, and with ``metrics`` those of its node; not collective.

    What cannot be sent is dropped, with one warning by the process that has ``metrics``: others would say the same.
    """

    def __init__(self, job: str, metrics: NodeMetrics | None = None):
        self._job, self._metrics = job, metrics
        self._events: collections.deque[Mapping[str, Any]] = collections.deque(maxlen=_WAITING)
        self._over = Event()
        self._has_warned = self._is_failing = False
        self._thread: threading.Thread | None = threading.Thread(target=self._run, name="mlflash-otlp", daemon=True)
        self._thread.start()

    def add(self, event: Mapping[str, Any]) -> None:
        """Make a span of an event that has a duration or is an error; return at once."""
        if "seconds" in event or "why" in event:
            self._events.append(event)

    def close(self) -> None:
        self._over.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(0 if self._is_failing else _CLOSE_S)  # if the collector hangs, it ends with the process
            if thread.is_alive():
                self._warn("the collector did not take them in time")

    def leave(self) -> None:
        """Send nothing from a forked process."""
        self._thread = None
        self._events.clear()

    def _run(self) -> None:
        try:
            senders = self._senders()
        except ImportError as error:
            self._warn(f"{error}: {pip_install('opentelemetry')}")
            return
        except Exception as error:  # a variable has a value that the SDK refuses
            self._warn(str(error))
            return
        over, due = False, dict.fromkeys(senders, 0.0)
        while not over:
            over = self._over.wait(_SPANS_EVERY_S)
            for send, every_s in senders.items():
                if over or time.monotonic() >= due[send]:
                    self._try(send)
                    due[send] = time.monotonic() + every_s

    def _try(self, send: Callable[[], bool]) -> None:
        thread, said = threading.get_ident(), list[str]()

        def hear(record: logging.LogRecord) -> bool:
            if record.thread != thread:
                return True
            said.append(record.getMessage())
            return False

        loggers = [logging.getLogger(f"{_EXPORTERS}.{kind}_exporter") for kind in ("trace", "metric")]
        for logger in loggers:  # they log each failure, and again and again
            logger.addFilter(hear)
        try:
            self._is_failing = not send()
            if self._is_failing:
                self._warn(said[0] if said else "it failed")
        except Exception as error:  # any error: the next time may succeed
            self._is_failing = True
            self._warn(str(error))
        finally:
            for logger in loggers:
                logger.removeFilter(hear)

    def _warn(self, why: str) -> None:
        if self._metrics is not None and not self._has_warned:
            log.warning("spans and metrics cannot be sent to OpenTelemetry: %s", why)
        self._has_warned = True

    def _senders(self) -> dict[Callable[[], bool], float]:
        """What sends all that waits, and returns whether it was taken; and every how many seconds it is called."""
        from opentelemetry import context
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        # Programs that trace all their HTTP requests do not want these.
        context.attach(context.set_value(context._SUPPRESS_INSTRUMENTATION_KEY, True))
        resource = Resource({SERVICE_NAME: "mlflash"}).merge(OTELResourceDetector().detect())
        scope = InstrumentationScope("mlflash", __version__)
        senders = {}
        if os.environ.get("OTEL_TRACES_EXPORTER") != "none":
            senders[self._span_sender(resource, scope)] = 0.0
        if self._metrics is not None and os.environ.get("OTEL_METRICS_EXPORTER") != "none":
            senders[_metric_sender(self._metrics.read, resource, scope)] = _METRICS_EVERY_S
        return senders

    def _span_sender(self, resource: Any, scope: Any) -> Callable[[], bool]:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import SpanExportResult

        exporter = OTLPSpanExporter()

        def send() -> bool:
            while events := [self._events.popleft() for _ in range(min(len(self._events), _AT_ONCE))]:
                spans = [_span(self._job, event, resource, scope) for event in events]
                if exporter.export(spans) is not SpanExportResult.SUCCESS:
                    return False
            return True

        return send


def _span(job: str, event: Mapping[str, Any], resource: Any, scope: Any) -> Any:
    """All spans of a step and run are one trace. In it, a save and its protection are parts of the rank's commit."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    name = _NAMES.get(event["event"], event["event"])
    trace = (job, event["run"], event.get("step"))
    trace_id, commit_id = _number(16, *trace), _number(8, *trace, event["rank"], "commit")

    def context_of(span_id: int) -> Any:
        return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    error = event.get("why") or event.get("error")
    end_ns = round(event["time"] * 1e6) * 1000
    return ReadableSpan(
        f"mlflash.{name}",
        context=context_of(commit_id if name == "commit" else int.from_bytes(os.urandom(8), "big") or 1),
        parent=context_of(commit_id) if name in ("save", "protect") else None,
        resource=resource,
        attributes={"mlflash.job": job} | {f"mlflash.{key}": value for key, value in event.items()
                    if value is not None and key not in ("event", "time", "seconds", "why", "error")},
        kind=SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR, error) if error else Status(StatusCode.OK),
        start_time=end_ns - round(event.get("seconds", 0.0) * 1e6) * 1000,
        end_time=end_ns,
        instrumentation_scope=scope,
    )  # fmt: skip


def _number(nbytes: int, *names: object) -> int:
    """A number that all processes make alike, of this many bytes; not 0."""
    return int.from_bytes(hashlib.sha256(repr(names).encode()).digest()[:nbytes], "big") or 1


def _metric_sender(read: Callable[[], Iterable[Metric]], resource: Any, scope: Any) -> Callable[[], bool]:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics.export import (
        AggregationTemporality,
        Gauge,
        MetricExportResult,
        MetricsData,
        NumberDataPoint,
        ResourceMetrics,
        ScopeMetrics,
        Sum,
    )
    from opentelemetry.sdk.metrics.export import Metric as Exported

    exporter = OTLPMetricExporter()

    def exported(metric: Metric, now_ns: int) -> Exported:
        points = [NumberDataPoint(dict(zip(metric.label_names, labels, strict=True)), 0, now_ns, value)
                  for labels, value in metric.values]  # fmt: skip
        kind = Sum(points, AggregationTemporality.CUMULATIVE, True) if metric.is_counter else Gauge(points)
        return Exported(metric.name, metric.text, "", kind)

    def send() -> bool:
        now_ns = time.time_ns()
        metrics = [exported(metric, now_ns) for metric in read() if metric.values]
        data = MetricsData([ResourceMetrics(resource, [ScopeMetrics(scope, metrics, "")], "")])
        return exporter.export(data) is MetricExportResult.SUCCESS

    return send
