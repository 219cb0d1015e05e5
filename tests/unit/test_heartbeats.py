"""The heartbeat of a rank, of which its trainer and its courier each write a part, in two processes, whichever dies."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console
from waiting import until

from mlflash import errors
from mlflash.launcher import node_watch
from mlflash.launcher.launch_system import NodeAssignment
from mlflash.launcher.node_watch import Looks, Watch
from mlflash.live_monitor.rank_status import look_here
from mlflash.live_monitor.screen import Page, state_of
from mlflash.memory.node_directory import NodeDirectory
from mlflash.telemetry import heartbeat, prometheus_metrics
from mlflash.telemetry.heartbeat import (
    FORMAT,
    PART_NBYTES,
    CourierHeartbeat,
    RankFacts,
    TrainerHeartbeat,
    encode,
    read_heartbeats,
    why_unread,
)
from mlflash.telemetry.recorder import CourierRecorder, EventLog, TrainerRecorder

GOLDEN = Path(__file__).with_name("golden-pulse-v1.bin")
FACTS = RankFacts(1, 4, 0, "n0", "r")

# A process that has the job's directory, the facts and a part, and does what lines on its standard input tell it.
PROCESS = """
import json, sys
from mlflash.memory.node_directory import NodeDirectory
from mlflash.telemetry import recorder as recorder_module
from mlflash.telemetry.recorder import EventLog
from mlflash.telemetry.heartbeat import CourierHeartbeat, RankFacts, TrainerHeartbeat
from mlflash.telemetry.recorder import CourierRecorder, TrainerRecorder

recorder_module._CLOSE_S = 60
memory, part, facts, log = sys.argv[1:]
facts, held = RankFacts(**json.loads(facts)), NodeDirectory(memory, "j")
if part == "courier":
    events = EventLog(log or None, run="r", rank=facts.rank, node=facts.node, by="courier")
    recorder = CourierRecorder(facts.rank, CourierHeartbeat(held, facts), events)
else:
    events = EventLog(log or None, run="r", rank=facts.rank, node=facts.node)
    recorder = TrainerRecorder(facts.rank, TrainerHeartbeat(held, facts), events, courier_is_thread=False)
print("ready", flush=True)
for line in sys.stdin:
    name, words = json.loads(line)
    if name == "many":
        for step in range(words[0]):
            recorder.committed(step, 0.5, step) if part == "courier" else recorder.posting(step)
    else:
        getattr(recorder, name)(*words)
    print("done", flush=True)
"""


class Process:
    """A trainer or a courier of its own."""

    def __init__(self, part: str, shm: Path, facts: RankFacts = FACTS, log: str = "", before: Sequence[str] = ()):
        argv = [*before, sys.executable, "-c", PROCESS, str(shm), part, json.dumps(dataclasses.asdict(facts)), log]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        self.hear()

    def tell(self, name: str, *words: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, words]) + "\n")
        self._process.stdin.flush()

    def hear(self) -> None:
        assert self._process.stdout is not None and self._process.stdout.readline()

    def does(self, name: str, *words: Any) -> None:
        self.tell(name, *words)
        self.hear()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(60)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def start(shm: Path) -> Iterator[Callable[..., Process]]:
    processes: list[Process] = []

    def begin(part: str, **arguments: Any) -> Process:
        processes.append(Process(part, shm, **arguments))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()


@pytest.fixture
def trainer(node_memory: NodeDirectory) -> Iterator[TrainerHeartbeat]:
    made = TrainerHeartbeat(node_memory, FACTS)
    yield made
    made.end("ended")


def heard(shm: Path) -> dict[str, Any]:
    """What the only rank says, which can be read."""
    (said,), unread = read_heartbeats(str(shm), "j")
    assert unread == [] and why_unread(said) == "" and why_unread(json.loads(json.dumps(said))) == ""
    return said


def shown(shm: Path) -> str:
    console = Console(width=200, highlight=False)
    with console.capture() as captured:
        console.print(Page("j", look_here(str(shm), "j")))
    return captured.get()


def metrics(shm: Path) -> str:
    registry = CollectorRegistry()
    registry.register(prometheus_metrics._Collector("j", lambda: read_heartbeats(str(shm), "j")))
    return generate_latest(registry).decode()


class Nodes:
    """A launcher of a node, which says what it hears."""

    def __init__(self, shm: Path):
        self._shm = shm
        self.kills: list[Sequence[str]] = []

    def on_each(self, hosts: list[str], argv: list[str], timeout_s: float, behind_s: float = 0) -> dict[str, str]:
        if argv[0] == "kill":
            self.kills.append(argv)
            return {}
        found = read_heartbeats(str(self._shm), "j")
        rest = {"free": 1, "gpus": 0, "gpu_error": "", "interface": None, "steps": []}
        return {"a": json.dumps(rest | {"heartbeats": found.heartbeats, "unread": found.unread})}


def test_two_processes_write_their_parts_at_the_same_time_and_readers_find_both_whole(
    shm: Path, start: Callable[..., Process]
) -> None:
    trainer, courier = start("trainer"), start("courier")
    for process in (trainer, courier):
        process.tell("many", 2000)
    seen: list[tuple[int, int]] = []

    def both_are_through() -> bool:
        said = heard(shm)
        seen.append((-1 if said["saved"] is None else said["saved"], said["committed"] or -1))
        return seen[-1] == (1999, 1999)

    until(both_are_through, lambda: f"the last step of both: {seen[-1]}")
    assert [one[0] for one in seen] == sorted(one[0] for one in seen)
    assert [one[1] for one in seen] == sorted(one[1] for one in seen)
    for process in (trainer, courier):
        process.hear()
    said = heard(shm)
    assert (said["pid"], said["alive"], said["courier_pid"], said["courier_alive"]) == (
        trainer.pid, True, courier.pid, True)  # fmt: skip
    assert said["saves"] == 2000 and said["times"].keys() == {"made", "saved", "committed"}
    trainer.does("saved", 1999, 0.25, 77, False, True)
    assert heard(shm)["nbytes"] == 77, "no courier in its process writes what it has noted"
    assert state_of(said) == "training" and "courier" not in shown(shm)
    assert 'mlflash_courier_up{job_name="j",node="n0",rank="1"} 1.0' in metrics(shm)


def test_a_courier_that_died_is_shown_as_such_and_is_no_dead_rank(
    shm: Path, trainer: TrainerHeartbeat, start: Callable[..., Process], caplog: pytest.LogCaptureFixture
) -> None:
    courier = start("courier")
    courier.does("committed", 5, 0.5, 1)
    trainer.beat("saved", saved=6)
    nodes = Nodes(shm)
    looks = Looks(nodes, str(shm), "j", 0, "")  # type: ignore[arg-type]
    watch = Watch(looks, "r", NodeAssignment(("a",), 4), 0)
    looks.look(["a"])
    looks.show_stacks(["a"], "r")
    assert nodes.kills == [["kill", f"-{heartbeat.SHOW_STACKS}", str(os.getpid()), str(courier.pid)]]
    assert watch.dead() == "" and "courier" not in caplog.text
    courier.kill()
    said = heard(shm)
    assert (said["alive"], said["courier_alive"], said["committed"]) == (True, False, 5)
    assert state_of(said) == "no courier"
    text = shown(shm)
    assert "no courier" in text and "no courier on rank 1: training continues" in text and "1 of 4 ranks" in text
    assert 'mlflash_courier_up{job_name="j",node="n0",rank="1"} 0.0' in metrics(shm)
    assert 'mlflash_up{job_name="j",node="n0",rank="1"} 1.0' in metrics(shm)
    for _ in range(3):
        looks.look(["a"])
        assert watch.dead() == ""
    assert caplog.text.count(f"a: the courier of rank 1 (pid {courier.pid}) died, and its trainer goes on") == 1
    looks.show_stacks(["a"], "r")
    assert nodes.kills[-1][2:] == [str(os.getpid())]


@pytest.mark.skipif(os.geteuid() != 0, reason="a container is made by root")
def test_a_rank_in_a_container_of_its_own_is_not_called_dead_and_nobody_gets_its_signals(
    shm: Path, start: Callable[..., Process]
) -> None:
    start("trainer", before=["unshare", "--pid", "--fork", "--kill-child"])
    said = heard(shm)
    assert (said["pid"], said["alive"], said["courier_pid"]) == (0, True, None)
    nodes = Nodes(shm)
    looks = Looks(nodes, str(shm), "j", 0, "")  # type: ignore[arg-type]
    watch = Watch(looks, "r", NodeAssignment(("a",), 4), 0)
    for _ in range(3):
        looks.look(["a"])
        assert watch.dead() == ""
    looks.show_stacks(["a"], "r")
    assert nodes.kills == [], "its pid is that of another process here"


def test_what_a_courier_commits_after_its_trainer_died_is_heard(shm: Path, start: Callable[..., Process]) -> None:
    trainer, courier = start("trainer"), start("courier")
    trainer.does("posting", 7)
    trainer.kill()
    before = heard(shm)["beat"]
    courier.does("committed", 7, 0.5, 1)
    courier.does("drained", 7, 0.5, 1, "/d", None)
    said = heard(shm)
    assert (said["alive"], said["courier_alive"], said["committed"], said["drained"]) == (False, True, 7, 7)
    assert said["beat"] == before <= said["courier_beat"] and state_of(said) == "gone"
    looks = Looks(Nodes(shm), str(shm), "j", 0, "")  # type: ignore[arg-type]
    watch = Watch(looks, "r", NodeAssignment(("a",), 2), 0)
    for _ in range(2):
        looks.look(["a"])
        dead = watch.dead()
    assert dead == "ranks [1] died" and looks.newest() == 7


@pytest.mark.parametrize("ahead_s", [-1e6, 0, 1e6])
def test_a_trainer_that_hangs_is_seen_to_hang_though_its_courier_gets_on_whatever_its_clock_says(
    shm: Path,
    node_memory: NodeDirectory,
    start: Callable[..., Process],
    monkeypatch: pytest.MonkeyPatch,
    ahead_s: float,
) -> None:
    now, here_s = time.time(), 0.0
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(time=lambda: now + ahead_s))
    monkeypatch.setattr(node_watch, "time", SimpleNamespace(monotonic=lambda: here_s))
    trainer = TrainerHeartbeat(node_memory, FACTS)
    trainer.beat("saved", saved=4)
    looks = Looks(Nodes(shm), str(shm), "j", 0, "")  # type: ignore[arg-type]
    seats = NodeAssignment(("a",), 4)
    watch, patient = Watch(looks, "r", seats, 900), Watch(looks, "r", seats, 100_000)
    looks.look(["a"])
    assert not watch.hangs() and not patient.hangs()
    courier = start("courier")
    courier.does("committed", 4, 0.5, 1)
    now, here_s = now + 1000, 1000.0
    trainer.flush()
    looks.look(["a"])
    said = heard(shm)
    assert said["alive"] and said["courier_alive"] and watch.hangs() and not patient.hangs()
    looks.look([])
    looks._said.clear()
    assert not watch.hangs(), "no node answers: nothing is known"
    trainer.beat("saved", saved=5)
    looks.look(["a"])
    assert not watch.hangs()
    here_s = 2000.0
    looks.look(["a"])
    assert watch.hangs()
    trainer.end("ended")


def test_parts_that_are_torn_hostile_or_of_another_version_cost_what_they_say_and_no_more(
    shm: Path, node_memory: NodeDirectory, trainer: TrainerHeartbeat
) -> None:
    courier = CourierHeartbeat(node_memory, FACTS)
    courier.beat("committed", committed=3)
    file = Path(node_memory.path) / "pulse-0000"
    good = json.loads(file.read_bytes()[PART_NBYTES:])
    bad = [
        json.dumps(good)[:90], "[" * 4096, "\xff" * 10, "[1]", "7", '{"committed": 9}', json.dumps(good) + "}",
        *(json.dumps({**good, **wrong}) for wrong in (
            {"format": 2}, {"format": 3, "version": "9.9"}, {"format": True}, {"committed": "9"}, {"committed": True},
            {"pid": -1}, {"pid": 0}, {"beat": float("nan")}, {"beat": 10**400}, {"committed": 10**400}, {"saves": None},
            {"times": {"made": "x"}}, {"times": []}, {"state": "asleep"}, {"unrestorable": 7}, {"start": None},
        )),
    ]  # fmt: skip
    for text in bad:
        with file.open("r+b") as part:
            part.seek(PART_NBYTES)
            part.write(text.encode("latin-1").ljust(PART_NBYTES))
        (said,), (why,) = read_heartbeats(str(shm), "j")
        assert "pulse-0000 cannot be read: " in why and why.endswith(" in what the courier says"), (text, why)
        assert said["committed"] is said["courier_pid"] is None and said["alive"] and why_unread(said) == "", text
        assert "starting" in shown(shm) and "mlflash_courier_up" not in metrics(shm)
    lies = {"alive": False, "pid": 1, "beat": 1e12, "run": "x", "saved": 99, "rank": 1, "version": "9.9",
            "restored": 5, "times": {"made": 1.0, "restored": 2.0}}  # fmt: skip
    with file.open("r+b") as part:
        part.seek(PART_NBYTES)
        part.write(encode({**good, **lies}))
    said = heard(shm)
    assert (said["alive"], said["pid"], said["run"], said["saved"], said["restored"]) == (
        True, os.getpid(), "r", None, None)  # fmt: skip
    assert said["beat"] < 1e12 and said["version"] != "9.9" and said["times"]["made"] > 1 and said["committed"] == 3
    with file.open("r+b") as part:
        part.seek(PART_NBYTES)
        part.write(encode({**good, "rank": 2}))
    assert heard(shm)["committed"] is None, "of another rank"
    with file.open("r+b") as part:
        part.truncate(PART_NBYTES)
    assert heard(shm)["courier_pid"] is None


def test_the_format_is_the_golden_one(shm: Path, node_memory: NodeDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "__version__", "0.1.0")
    monkeypatch.setattr(heartbeat.time, "time", lambda: 1_700_000_000.25)
    monkeypatch.setattr(heartbeat.os, "getpid", lambda: 4321)
    monkeypatch.setattr(heartbeat, "_pid_namespace", lambda: 4026531836)
    facts = RankFacts(1, 4, 0, "node-a", "", "0123456789abcdef")
    log = EventLog(None)
    trainer = TrainerRecorder(1, TrainerHeartbeat(node_memory, facts), log)
    monkeypatch.setattr(heartbeat.os, "getpid", lambda: 4322)
    courier = CourierRecorder(1, CourierHeartbeat(node_memory, facts), log, trainer.flush)
    trainer.started({"redundancy": "copy", "nodes": ["node-a", "node-b"]}, str)
    courier.unrestorable(errors.Unrestorable("none of them"))
    trainer.restored(11, 0.5, "/d/step-00000011", "", 1000)
    trainer.posting(12)
    trainer.saved(12, 0.25, 1000, False, True)
    courier.holds(4096)
    courier.protected(12, 0.125, 1000, [1, 3])
    courier.committed(12, 0.5, 1)
    courier.failed(13, errors.SaveFailed("no"))
    courier.drained(12, 0.5, 1000, "/d", None)
    monkeypatch.undo()
    raw = (Path(node_memory.path) / "pulse-0000").read_bytes()
    if not GOLDEN.exists():
        GOLDEN.write_bytes(raw)
    assert raw == GOLDEN.read_bytes(), "the format of heartbeats changed: raise FORMAT and write a new golden file"


def test_the_golden_file_reads_as_documented_and_one_of_another_format_is_refused(
    shm: Path, node_memory: NodeDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "_is_alive", lambda pid: pid == 4322)
    monkeypatch.setattr(heartbeat, "_pid_namespace", lambda: 4026531836)
    file = Path(node_memory.path) / "pulse-0000"
    file.touch(0o600)
    file.write_bytes(GOLDEN.read_bytes())
    when = 1_700_000_000.25
    assert heard(shm) == {
        "format": FORMAT, "version": "0.1.0", "run": "", "rank": 1, "ranks": 4, "node": "node-a", "pid": 4321,
        "state": "started", "alive": False, "beat": when, "restored": 11, "source": "/d/step-00000011", "saved": 12,
        "times": dict.fromkeys(("made", "saved", "restored", "committed", "unrestorable"), when), "redundancy": "copy",
        "nodes": 2, "stall_s": 0.25, "stalled_s": 0.25, "nbytes": 1000, "committed": 12, "commit_s": 0.5,
        "protect_s": 0.125, "held": 4096, "saves": 1, "failed": 1, "drained": 12, "courier_pid": 4322,
        "courier_alive": True, "courier_beat": when, "courier_state": "started",
    }  # fmt: skip
    other = GOLDEN.read_bytes().replace(b'"format":1', b'"format":2')
    file.write_bytes(other)
    (found, (why,)) = read_heartbeats(str(shm), "j")
    assert found == [] and "cannot be read: written by version 0.1.0 (this is" in why and "format 2 and not 1" in why
    said = json.loads(other[:PART_NBYTES]) | {"alive": True, "committed": None}
    assert "format 2 and not 1" in why_unread(said), "as another node sends"
