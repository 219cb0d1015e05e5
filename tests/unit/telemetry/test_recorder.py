"""The recorder: events are whole lines, whatever the file system does; and who a commit waits for."""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from mlflash.telemetry import recorder
from mlflash.telemetry.recorder import (
    NUMBERS,
    PHASES,
    EventLog,
    Late,
    Lateness,
    PhaseSample,
    Straggler,
    Stragglers,
    file_of_node,
    is_notable,
)
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
    events = lines(path)
    assert len(events) == 600
    for rank in range(3):
        assert [line["step"] for line in events if line["rank"] == rank] == list(range(200))
    assert all(line.keys() == {"event", "time", "run", "rank", "node", "step", "seconds", "nbytes"} for line in events)
    assert all(before - 1 < float(str(line["time"])) < time.time() + 1 for line in events)


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


# Who a commit waits for, by what all ranks bring to its agreement; and when that is worth a word in the log

USUAL = {"training": 0.5, "copy": 1.0, "deferred": 0.2, "checksums": 2.0, "transfer": 3.0}
FINE, LATE = Late(5, "copy", 0.01), Late(3, "copy", 2.0)


def heard_by_all(ranks: Sequence[Mapping[str, float]], generation: int = 7) -> list[Lateness | None]:
    """What each rank makes of what all of them bring; minimum of each number, as MPI takes it."""
    size = len(ranks)
    samples = [PhaseSample(rank, size, generation, phase_s) for rank, phase_s in enumerate(ranks)]
    brought = np.array([sample.numbers for sample in samples], dtype=np.int64)
    assert brought.shape == (size, NUMBERS)
    least = [int(number) for number in brought.min(axis=0)]
    return [sample.merge(least, lambda rank: f"n{rank}") for sample in samples]


def job_of(size: int, **late: tuple[int, float]) -> list[dict[str, float]]:
    """Ranks that differ by up to 10 ms, and for each phase one that takes longer by so many seconds."""
    dice = random.Random(size)
    ranks = [{phase: seconds + dice.uniform(0, 0.01) for phase, seconds in USUAL.items()} for _ in range(size)]
    for phase, (rank, seconds) in late.items():
        ranks[rank][phase] += seconds
    return ranks


@pytest.mark.parametrize("phase", ["copy", "deferred", "checksums", "transfer"])
@pytest.mark.parametrize("size", [2, 3, 4, 200])
def test_all_ranks_know_who_is_late_in_which_phase_and_by_how_much(size: int, phase: str) -> None:
    for generation in range(2 if size > 4 else 20):
        latenesses = heard_by_all(job_of(size, **{phase: (1, 1.5)}), generation)
        for rank, lateness in enumerate(latenesses):
            assert lateness is not None and lateness.slowest[:2] == (1, phase) and lateness.node == "n1"
            assert lateness.slowest.seconds == pytest.approx(1.5, abs=0.05)
            assert lateness.own.rank == rank
            assert lateness.own.seconds == pytest.approx(1.5 if rank == 1 else 0.0, abs=0.05)


def stragglers_in(commits: Sequence[Late], commit_s: float = 3.0) -> list[Straggler | None]:
    stragglers = Stragglers()
    return [stragglers.add(late, commit_s) for late in commits]


def test_a_straggler_is_told_of_once_when_it_has_been_late_again_and_again() -> None:
    reports = stragglers_in([LATE, FINE, LATE, LATE._replace(seconds=8.0), *[LATE] * 100])
    assert [at for at, straggler in enumerate(reports) if straggler is not None] == [3]
    assert reports[3] == Straggler(LATE, 3, 4)


def test_the_noise_of_saves_is_not_told_of() -> None:
    dice = random.Random(1)
    noise = [Late(dice.randrange(64), dice.choice([*PHASES]), dice.expovariate(1 / 0.5)) for _ in range(1000)]
    assert not any(stragglers_in(noise))
    assert not any(stragglers_in([LATE, FINE, FINE, FINE, FINE, FINE] * 50)), "late now and then"
    assert not any(stragglers_in([Late(3, "copy", 0.2)] * 50, 0.3)), "too short to matter"
    assert not any(stragglers_in([LATE] * 50, 20.0)), "a small part of a long commit"
    assert is_notable(0.25, 1.25) and not is_notable(0.25, 1.26) and not is_notable(0.24, 0.3)
