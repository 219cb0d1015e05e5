"""What the ranks of a node report about themselves → metrics, and these → Prometheus: a file, or an endpoint.

The first rank of each node does it for all of them, on a thread that calls no MPI; see docs/watching.md. `otlp` sends
the same metrics to an OpenTelemetry collector.
"""

from __future__ import annotations

import functools
import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ..errors import pip_install
from ..events import Event
from .heartbeat import NodeReports, has_own_courier

log = logging.getLogger("mlflash")

_EVERY_S = 5.0
_CLOSE_S = 2.0
_LOOPBACK = "127.0.0.1"
_PORT = re.compile(r":(\d{1,5})")

OTLP = "otlp"
"""What the setting ``metrics`` has for an OpenTelemetry collector."""

# Name, description, key in the heartbeat (see `recorder`).
_GAUGES = (
    ("saved_step", "Newest step that was staged.", "saved"),
    ("committed_step", "Newest step that is a checkpoint.", "committed"),
    ("drained_step", "Newest step that was drained.", "drained"),
    ("suspect_step", "Newest step whose values were suspect on this rank.", "suspect"),
    ("certified_step", "Newest step that is certified.", "certified"),
    ("restored_step", "Step that this run began from.", "restored"),
    ("stall_seconds", "How long the last save kept training waiting.", "stall_s"),
    ("protect_seconds", "How long the redundancy of the last save took.", "protect_s"),
    ("commit_seconds", "From the call of the last save to its commit.", "commit_s"),
    ("slot_bytes", "State of this rank in the last save.", "nbytes"),
    ("memory_bytes", "Memory of the node that slots of this rank take.", "held"),
    ("heartbeat_timestamp_seconds", "When the training of the rank last made progress.", "beat"),
    ("commit_timestamp_seconds", "When the newest checkpoint was committed.", "committed_at"),
    ("restore_timestamp_seconds", "When this run last restored a step.", "restored_at"),
)
_COUNTERS = (
    ("checkpoints", "Checkpoints committed by this run.", "saves"),
    ("failed_saves", "Saves of this run that did not become checkpoints.", "failed"),
    ("damaged_files", "Files of this run that were found damaged at rest.", "damaged"),
    ("stalled_seconds", "How long saves of this run kept training waiting.", "stalled_s"),
)
_LATE = "How much longer than most ranks this one took in the last commit, in the phase in which it was latest."


class Metric(NamedTuple):
    """One metric of the ranks of a node."""

    name: str
    text: str  # what its value is
    is_counter: bool
    label_names: tuple[str, ...]
    values: list[tuple[tuple[str, ...], float]]  # the labels of a rank, and its value


class NodeMetrics:
    """The metrics of the ranks of a node; what cannot be read is a warning, once.

    Args:
        job: name of the job, a label of each value.
    """

    def __init__(self, job: str, read_reports: Callable[[], NodeReports]):
        self._job, self._read_reports = job, read_reports
        self._warned: set[str] = set()

    def read(self) -> Iterator[Metric]:
        heartbeats = self._reports().heartbeats
        yield self._metric("up", "Whether the process of the rank is alive.", "alive", heartbeats)
        if own := [heartbeat for heartbeat in heartbeats if has_own_courier(heartbeat)]:
            yield self._metric("courier_up", "Whether the courier of the rank is alive.", "courier_alive", own)
        for name, text, key in _GAUGES:
            yield self._metric(name, text, key, heartbeats)
        for name, text, key in _COUNTERS:
            yield self._metric(name, text, key, heartbeats, is_counter=True)
        yield self._metric("late_seconds", _LATE, "late_s", heartbeats, phase="late_in")

    def _metric(self, name: str, text: str, key: str, heartbeats: Sequence[dict[str, Any]], is_counter: bool = False,
                **more_labels: str) -> Metric:  # fmt: skip
        labels = {"node": "node", "rank": "rank", **more_labels}
        values = [
            ((self._job, *(str(heartbeat.get(label, "")) for label in labels.values())), float(heartbeat[key]))
            for heartbeat in heartbeats
            if heartbeat.get(key) is not None
        ]
        return Metric(f"mlflash_{name}", text, is_counter, ("job_name", *labels), values)

    def _reports(self) -> NodeReports:
        try:
            reports = self._read_reports()
        except Exception as error:  # the next request tries again
            reports = NodeReports([], [f"the metrics of this node cannot be read: {error!r}"])
        for text in reports.unread:
            if text not in self._warned:
                log.warning("%s", text)
        self._warned = {*reports.unread}
        return reports


class Metrics:
    """Shows the metrics of one node until it is closed. Where that fails, it is a warning, and training continues.

    Args:
        where: name of a file, which is written every few seconds; or ":PORT", served on loopback only.
    """

    def __init__(self, where: str, metrics: NodeMetrics):
        self._over = Event()
        self._thread: threading.Thread | None = None
        self._server: Any = None
        try:
            import prometheus_client
        except ImportError:
            log.warning("there are no metrics without the package prometheus-client: %s", pip_install("prometheus"))
            return
        registry = prometheus_client.CollectorRegistry()
        registry.register(Collector(metrics))
        if port := port_of(where):
            try:
                self._server, self._thread = prometheus_client.start_http_server(port, _LOOPBACK, registry)
            except OSError as error:
                log.warning("there are no metrics at %s:%d: %s", _LOOPBACK, port, error)
            return
        write = functools.partial(prometheus_client.write_to_textfile, where, registry)
        self._thread = threading.Thread(target=self._keep_up, args=(write,), name="mlflash-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)
        self._thread = self._server = None

    def leave(self) -> None:
        """Show nothing in a forked process, and keep no port open that the parent may close."""
        if self._server is not None:
            self._server.socket.close()
        self._thread = self._server = None

    def _keep_up(self, write: Callable[[], None]) -> None:
        before, over = "", False
        while not over:
            over, wrong = self._over.wait(_EVERY_S), ""
            try:
                write()
            except Exception as error:  # any error: the next time may succeed
                wrong = str(error)
                if not before:
                    log.warning("metrics cannot be written: %s", wrong)
            before = wrong


class Collector:
    """What prometheus_client collects metrics from."""

    def __init__(self, metrics: NodeMetrics):
        self._metrics = metrics

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for metric in self._metrics.read():
            kind = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
            family = kind(metric.name, metric.text, labels=metric.label_names)
            for labels, value in metric.values:
                family.add_metric(labels, value)
            yield family


def targets_of(setting: str) -> tuple[str, bool]:
    """Split the setting ``metrics``: a file or port of Prometheus, "" for none, and whether it names OTLP, too."""
    names = [name.strip() for name in setting.split(",")]
    return ",".join(name for name in names if name != OTLP), OTLP in names


def port_of(where: str) -> int:
    """The port in ":9464"; 0 if it is the name of a file."""
    match = _PORT.fullmatch(where)
    return int(match[1]) if match else 0
