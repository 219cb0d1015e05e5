"""Spans and metrics by OTLP: a receiver gets what the event log and Prometheus have, and a dead one stops nothing."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from waiting import until

from mlflash import Checkpointer
from mlflash.errors import SaveFailed
from mlflash.memory.node_directory import NodeDirectory
from mlflash.telemetry import otlp
from mlflash.telemetry.heartbeat import CourierHeartbeat, RankFacts, read_heartbeats
from mlflash.telemetry.metrics import Metric, NodeMetrics
from mlflash.telemetry.recorder import CourierRecorder, EventLog


class Receiver(ThreadingHTTPServer):
    """Takes what OTLP exporters send by HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.traces: list[ExportTraceServiceRequest] = []
        self.metrics: list[ExportMetricsServiceRequest] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def spans(self) -> list[Span]:
        return [span for message in self.traces for resource in message.resource_spans
                for scope in resource.scope_spans for span in scope.spans]  # fmt: skip

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == f"mlflash.{name}"]

    def values(self) -> list[Metric]:
        """The metrics of the newest message."""
        (resource,) = self.metrics[-1].resource_metrics
        (scope,) = resource.scope_metrics
        values = []
        for metric in scope.metrics:
            points = getattr(metric, metric.WhichOneof("data")).data_points
            names, is_counter = tuple(attributes(points[0])), metric.sum.is_monotonic
            labelled = [(tuple(attributes(point).values()), point.as_double) for point in points]
            values.append(Metric(metric.name, metric.description, is_counter, names, labelled))
        return values


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/v1/traces":
            self.server.traces.append(ExportTraceServiceRequest.FromString(body))
        else:
            assert self.path == "/v1/metrics"
            self.server.metrics.append(ExportMetricsServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def attributes(of: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in of.attributes}


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.endpoint)
        yield server
        server.shutdown()
        thread.join(60)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch, in_couriers: Callable[[str], None]) -> None:
    """Send often, and let the end wait for what is sent last, as long as it takes; in couriers, too."""
    for name, seconds in {"_SPANS_EVERY_S": 0.1, "_METRICS_EVERY_S": 0.1, "_CLOSE_S": 60.0}.items():
        monkeypatch.setattr(otlp, name, seconds)
    in_couriers("from mlflash.telemetry import otlp; otlp._CLOSE_S = 60.0")


def test_a_collector_gets_a_span_of_each_event_and_the_metrics_of_prometheus(
    shm: Path, tmp_path: Path, receiver: Receiver, patience: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "trainings")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "cluster=c1")
    log = tmp_path / "events.jsonl"
    state = {"w": np.zeros(10_000)}
    of_node = NodeMetrics("j", lambda: read_heartbeats(str(shm), "j"))
    shown = lambda: [metric for metric in of_node.read() if metric.values]
    for found in (None, 3):
        with Checkpointer(str(tmp_path / "d"), job="j", memory=str(shm), redundancy="none", drain_every=3,
                          metrics="otlp", log=str(log)) as ckpt:  # fmt: skip
            assert ckpt.restore(state) == found
            for step in range((found or 0) + 1, (found or 0) + 4):
                state["w"] += 1
                ckpt.save(step, state).wait()
            ckpt.drain().wait()
            until(lambda: receiver.metrics and receiver.values() == shown(), lambda: f"{shown()}")
    metrics = {metric.name: metric.values[0][1] for metric in receiver.values()}
    assert metrics["mlflash_committed_step"] == metrics["mlflash_drained_step"] == 6
    assert metrics["mlflash_restored_step"] == metrics["mlflash_checkpoints"] == 3
    assert metrics["mlflash_restore_timestamp_seconds"] < metrics["mlflash_commit_timestamp_seconds"] <= time.time()

    events = [json.loads(line) for line in log.read_text().splitlines()]
    timed = [event for event in events if "seconds" in event]
    assert {event["event"] for event in timed} >= {"save", "protect", "commit", "drain", "restore"}
    assert len(receiver.spans) == len(timed)
    for event in timed:
        (span,) = [span for span in receiver.named(event["event"])
                   if abs(span.end_time_unix_nano / 1e9 - event["time"]) < 1e-5
                   and attributes(span)["mlflash.step"] == event["step"]]  # fmt: skip
        assert (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 == pytest.approx(event["seconds"], abs=2e-6)
        has = attributes(span)
        assert (has["mlflash.job"], has["mlflash.rank"], has["mlflash.node"]) == ("j", 0, event["node"])
        assert has.get("mlflash.nbytes") == event.get("nbytes") and span.status.code == span.status.STATUS_CODE_OK
    by_step = {attributes(span)["mlflash.step"]: span for span in receiver.named("commit")}
    assert len({span.trace_id for span in by_step.values()}) == len(by_step) == 6, "a trace for each step"
    for name in ("save", "protect", "drain"):
        for span in receiver.named(name):
            commit = by_step[attributes(span)["mlflash.step"]]
            assert span.trace_id == commit.trace_id
            assert span.parent_span_id == (b"" if name == "drain" else commit.span_id)
    for message in [*receiver.traces, *receiver.metrics]:
        for resource in getattr(message, "resource_spans", None) or message.resource_metrics:
            assert attributes(resource.resource) == {"service.name": "trainings", "cluster": "c1"}


def test_all_ranks_have_one_trace_for_a_step_and_what_failed_is_an_error(
    node_memory: NodeDirectory, receiver: Receiver, patience: None
) -> None:
    for rank in range(2):
        exporter = otlp.Exporter("j")
        events = EventLog(None, exporter, run="r", rank=rank, node=f"n{rank}")
        recorder = CourierRecorder(rank, CourierHeartbeat(node_memory, RankFacts(rank, 2, rank, "n0", "", "s")), events)
        recorder.committed(7, 0.5, 1)
        recorder.failed(8, 0.25, SaveFailed("no room"))
        recorder.drained(7, 1.0, 10, "/d/step-7", SaveFailed("disk full"))
        recorder.end()
    by_step: dict[int, set[bytes]] = {}
    for span in receiver.spans:
        by_step.setdefault(attributes(span)["mlflash.step"], set()).add(span.trace_id)
    assert by_step.keys() == {7, 8} and all(len(ids) == 1 for ids in by_step.values()) and by_step[7] != by_step[8]
    assert len({span.span_id for span in receiver.spans}) == 6
    good, bad = [[span for span in receiver.named("commit") if attributes(span)["mlflash.step"] == step]
                 for step in (7, 8)]  # fmt: skip
    assert [span.status.code for span in good] == [Span().status.STATUS_CODE_OK] * 2
    for span, why in [*((span, "no room") for span in bad), *((span, "disk full") for span in receiver.named("drain"))]:
        assert span.status.code == span.status.STATUS_CODE_ERROR and why in span.status.message
    assert bad[0].end_time_unix_nano - bad[0].start_time_unix_nano == 250_000_000


@pytest.mark.parametrize("answers", ["refuses", "hangs"])
def test_a_dead_collector_is_a_warning_and_training_goes_on(
    answers: str,
    shm: Path,
    in_couriers: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    in_couriers("pass")  # new ones, which have these variables, too
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if answers == "hangs":
            listening.listen()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{listening.getsockname()[1]}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60" if answers == "hangs" else "1")
        with Checkpointer(job="j", memory=str(shm), redundancy="none", metrics="otlp") as ckpt:
            snapshots = [ckpt.save(0, {"w": np.zeros(1000)})]
            accepted = []
            if answers == "hangs":
                listening.settimeout(60)
                accepted.append(listening.accept()[0])  # a message is under way, and nobody answers
            snapshots += [ckpt.save(step, {"w": np.zeros(1000)}) for step in range(1, 6)]
            for snapshot in snapshots:
                snapshot.wait()
            warnings = lambda: caplog.text.count("cannot be sent to OpenTelemetry")
            if answers == "refuses":
                until(warnings, "a warning")
            assert ckpt.report()["counts"]["committed"] == 6
            began = time.monotonic()
        assert time.monotonic() - began < 3 * otlp._CLOSE_S, "it gives up what it could not send"
        for connection in accepted:
            connection.close()
    assert warnings() == 1 and "opentelemetry" not in {record.name.split(".")[0] for record in caplog.records}
    assert all(snapshot.stall_s < 3 for snapshot in snapshots)


def test_without_the_packages_it_is_a_warning_that_names_the_extra(
    shm: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with Checkpointer(job="j", memory=str(shm), redundancy="none", metrics="otlp") as ckpt:
        ckpt.save(1, {"w": np.zeros(10)}).wait()
        until(lambda: "pip install 'mlflash[opentelemetry]'" in caplog.text, "the warning")


def test_nothing_of_it_is_imported_where_it_is_off(shm: Path) -> None:
    program = """
import sys, numpy as np, mlflash, mlflash.launch.agent, mlflash.courier.main
with mlflash.Checkpointer(job="j", redundancy="none") as ckpt:
    ckpt.save(1, {"w": np.zeros(10)}).wait()
assert not [name for name in sys.modules if name.split(".")[0] in ("opentelemetry", "google", "requests")]
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env={"MLFLASH_MEMORY": str(shm)})
