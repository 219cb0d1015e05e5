"""Metrics of real ranks: Prometheus reads them, nobody from outside can, and nothing they need stops training."""

from __future__ import annotations

import json
import re
import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mlflash import Checkpointer
from mlflash.adapters.tensorboard import Scalars
from mlflash.telemetry import metrics
from mlflash.telemetry.heartbeat import NodeReports

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the end wait for what is written last, as long as it takes."""
    monkeypatch.setattr(metrics, "_CLOSE_S", 60.0)


def samples(text: str) -> dict[str, float]:
    """Values by name; each sample must have the labels that say whose it is."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation.endswith(".")
        for sample in family.samples:
            assert sample.labels.keys() == {"job_name", "node", "rank"} and sample.labels["job_name"] == "j"
            values[sample.name] = sample.value
    return values


@pytest.fixture
def port() -> Iterator[int]:
    """A port that nobody listens on and that the kernel gives to no other process; a server may still take it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def saved(ckpt: Checkpointer, steps: range) -> dict[str, Any]:
    for step in steps:
        ckpt.save(step, {"w": np.zeros(10_000)}).wait()
    return ckpt.report()


def test_the_endpoint_says_what_the_report_says_and_is_on_loopback_only(shm: Path, port: int) -> None:
    with Checkpointer(job="j", memory=str(shm), redundancy="none", metrics=f":{port}") as ckpt:
        report = saved(ckpt, range(3))
        url = f"http://127.0.0.1:{port}/metrics"
        values = samples(urllib.request.urlopen(url, timeout=60).read().decode())
        listening = {line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
                     if line.split()[3] == "0A"}  # fmt: skip
        assert f"0100007F:{port:04X}" in listening and f"00000000:{port:04X}" not in listening
    assert values["mlflash_up"] == 1 and values["mlflash_checkpoints_total"] == 3
    assert values["mlflash_committed_step"] == values["mlflash_saved_step"] == 2
    assert values["mlflash_failed_saves_total"] == 0
    assert values["mlflash_stalled_seconds_total"] == pytest.approx(report["seconds"]["stall"], abs=1e-5)
    assert values["mlflash_memory_bytes"] == sum(slot["nbytes"] for slot in report["slots"])
    assert {"mlflash_stall_seconds", "mlflash_commit_seconds", "mlflash_slot_bytes"} <= values.keys()
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=60)


def test_what_another_version_left_there_is_a_warning_and_so_is_memory_that_cannot_be_read(
    shm: Path, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(job="j", memory=str(shm), redundancy="none", metrics=f":{port}") as ckpt:
        directory = Path(ckpt.report()["memory"])
        leftover = directory / "pulse-0009"
        leftover.touch(0o600)
        leftover.write_text('{"version": "9.9", "rank": 9, "pid": 1}')
        url = f"http://127.0.0.1:{port}/metrics"
        for _ in range(2):
            values = samples(urllib.request.urlopen(url, timeout=60).read().decode())
            assert values["mlflash_up"] == 1
        assert caplog.text.count("pulse-0009 cannot be read: written by version 9.9") == 1
        directory.chmod(0o755)
        assert samples(urllib.request.urlopen(url, timeout=60).read().decode()) == {}
        directory.chmod(0o700)
        assert "the metrics of this node cannot be read: UnsafePath" in caplog.text


def test_a_port_that_is_taken_and_a_folder_that_is_gone_are_warnings(
    shm: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for where in (f":{taken.getsockname()[1]}", str(tmp_path / "gone" / "mlflash.prom")):
            with Checkpointer(job="j", memory=str(shm), redundancy="none", metrics=where) as ckpt:
                assert saved(ckpt, range(1))["counts"]["committed"] == 1
    assert re.search(r"no metrics at 127\.0\.0\.1:\d+: .*Address already in use", caplog.text)
    assert caplog.text.count("metrics cannot be written") == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "mlflash-metrics"]


def test_tensorboard_has_the_scalars_of_each_checkpoint(shm: Path, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from torch.utils.tensorboard import SummaryWriter

    writer, snapshots = SummaryWriter(str(tmp_path)), []
    with Checkpointer(job="j", memory=str(shm), redundancy="none") as ckpt:
        scalars = Scalars(writer)
        for step in (3, 4):
            snapshots.append(ckpt.save(step, {"w": np.zeros(10_000)}))
            scalars.add(snapshots[-1])
        ckpt.wait()
        scalars.write()
    writer.close()
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert sorted(events.Tags()["scalars"]) == [
        f"mlflash/{name}" for name in ("commit_s", "failed", "nbytes", "stall_s")
    ]
    stalls = events.Scalars("mlflash/stall_s")
    assert [(stall.step, stall.value) for stall in stalls] == [(s.step, pytest.approx(s.stall_s)) for s in snapshots]


def test_the_dashboard_asks_for_metrics_that_exist_and_the_page_has_all_of_them() -> None:
    heartbeat = {"rank": 0, "pid": 1, "courier_pid": 2}
    names = {f"{metric.name}_total" if metric.is_counter else metric.name
             for metric in metrics.NodeMetrics("j", lambda: NodeReports([heartbeat], [])).read()}  # fmt: skip
    dashboard = json.loads((DOCS / "assets/grafana.json").read_text())
    assert {"title", "uid", "schemaVersion", "time", "refresh"} <= dashboard.keys()
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource", "job"]
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels) > 9
    asked = set()
    for panel in panels:
        assert panel["type"] in ("stat", "timeseries") and panel["datasource"]["uid"] == "${datasource}"
        assert panel["gridPos"].keys() == {"x", "y", "w", "h"} and panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        assert panel["fieldConfig"]["defaults"]["unit"] and panel["description"].endswith(".") and panel["options"]
        assert [target["refId"] for target in panel["targets"]] == sorted({t["refId"] for t in panel["targets"]})
        for target in panel["targets"]:
            assert target["expr"].count("mlflash_") == target["expr"].count('{job_name=~"$job"}') > 0
            assert target["legendFormat"] and target["datasource"] == panel["datasource"]
            asked |= {*re.findall(r"mlflash_\w+", target["expr"])}
    places = [(p["x"] + x, p["y"] + y) for p in (panel["gridPos"] for panel in panels)
              for x in range(p["w"]) for y in range(p["h"])]  # fmt: skip
    assert len(places) == len({*places}), "no panel is on another one"
    assert asked <= names, asked - names
    page = (DOCS / "watching.md").read_text()
    assert not [name for name in names if f"`{name}`" not in page]


@pytest.mark.parametrize(
    ("setting", "where", "is_otlp"),
    [("", "", False), (":9464", ":9464", False), ("otlp", "", True), (":9464,otlp", ":9464", True),
     ("otlp, /m/a.prom", "/m/a.prom", True), ("/m/otlp", "/m/otlp", False)],
)  # fmt: skip
def test_one_setting_names_prometheus_and_opentelemetry(setting: str, where: str, is_otlp: bool) -> None:
    assert metrics.targets_of(setting) == (where, is_otlp)
