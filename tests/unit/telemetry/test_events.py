"""The event log: whole lines, whatever the file system does, and never in the way."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlflash.telemetry import recorder
from mlflash.telemetry.recorder import EventLog, file_of_node
from mlflash.tools.report_log import files_of


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `close` wait for the writer as long as it takes, where a test does not say otherwise."""
    assert recorder._CLOSE_S <= 2, "a moment"
    monkeypatch.setattr(recorder, "_CLOSE_S", 60.0)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_of_several_writers_are_whole_lines_in_the_order_of_each(tmp_path: Path) -> None:
    path = tmp_path / "not" / "there" / "run.jsonl"
    logs = [EventLog(str(path), run="r", rank=rank, node="n") for rank in range(3)]
    before = time.time()
    for step in range(200):
        for log in logs:
            log.add("save", step=step, seconds=0.5, nbytes=10**12)
    for log in logs:
        log.close()
        log.close()
    found = lines(path)
    assert len(found) == 600
    for rank in range(3):
        assert [line["step"] for line in found if line["rank"] == rank] == list(range(200))
    assert all(line.keys() == {"event", "time", "run", "rank", "node", "step", "seconds", "nbytes"} for line in found)
    assert all(before - 1 < float(str(line["time"])) < time.time() + 1 for line in found)


def test_a_file_system_that_hangs_holds_up_nothing_and_what_did_not_fit_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)  # to open it waits for a reader: whoever waited for it would wait for ever
    log = EventLog(str(path), run="r", rank=0, node="n")
    for step in range(10_100):
        log.add("save", step=step)
    with path.open() as reader:  # it gets on
        got = [json.loads(reader.readline()) for _ in range(10_001)]
        missing = [line["text"] for line in got if line["event"] == "warning"]
        assert len(missing) == 1 and "events are missing" in missing[0]
        assert [line["step"] for line in got if line["event"] == "save"] == list(range(10_000))
        log.close()
    hangs = tmp_path / "hangs"
    os.mkfifo(hangs)
    log = EventLog(str(hangs), run="r", rank=0, node="n")
    log.add("start")
    writer = log._thread
    monkeypatch.setattr(recorder, "_CLOSE_S", 0.05)
    log.close()
    assert writer is not None and writer.is_alive(), "it was waited for no longer"
    assert '"start"' in hangs.read_text(), "its thread gets on, and ends"


def test_a_file_that_cannot_be_written_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(str(tmp_path), run="r", rank=0, node="n")  # a directory
    log.add("start")
    log.close()
    log.add("end")
    assert caplog.text.count("events are not written any more") == 1


def test_warnings_are_events_and_still_go_where_they_went(tmp_path: Path) -> None:
    program = f"""
import logging
from mlflash.telemetry import recorder
recorder._CLOSE_S = 60
from mlflash.telemetry.recorder import EventLog
log = EventLog({str(tmp_path / "run.jsonl")!r}, run="r", rank=0, node="n")
logging.getLogger("mlflash").warning("it is %s", "so")
logging.getLogger("mlflash").info("not this")
log.close()
logging.getLogger("mlflash").warning("after it")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=tmp_path,
                          check=True)  # fmt: skip
    assert done.stderr.splitlines() == ["it is so", "after it"], "Python's own last resort must still print them"
    (line,) = lines(tmp_path / "run.jsonl")
    assert (line["event"], line["level"], line["text"]) == ("warning", "WARNING", "it is so")
    assert logging.getLogger("mlflash").filters == []


def test_each_node_has_a_file_and_one_names_all(tmp_path: Path) -> None:
    first = tmp_path / "run[1].jsonl"
    names = [Path(file_of_node(str(first), node)) for node in range(12)]
    assert [name.name for name in names[:2]] == ["run[1].jsonl", "run[1].node1.jsonl"]
    for name in (*names, tmp_path / "run[1].nodes.jsonl", tmp_path / "run1.node3.jsonl"):
        name.touch()
    assert files_of([str(first)]) == names
    assert files_of([str(first), str(names[3])]) == names
