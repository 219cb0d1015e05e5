"""The heartbeat of a rank, of which trainer and courier each write a part, and what `mlflash top` makes of it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import needs
import pytest
from harness import own_memory
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console
from waiting import until

from mlflash.memory.node_directory import NodeDirectory
from mlflash.run import node_watch
from mlflash.run.node_watch import Looks, Watch
from mlflash.run.processes import mpiexec, signal_group, spawn
from mlflash.telemetry import heartbeat
from mlflash.telemetry.heartbeat import (
    PART_NBYTES,
    CourierHeartbeat,
    RankFacts,
    TrainerHeartbeat,
    encode,
    live_jobs,
    read_heartbeats,
    why_unread,
)
from mlflash.telemetry.metrics import Collector, NodeMetrics
from mlflash.tools.top import Look, Page, look_here, state_of

MLFLASH = str(Path(sys.executable).with_name("mlflash"))
WATCHED_RANKS = 4
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
    recorder = TrainerRecorder(facts.rank, TrainerHeartbeat(held, facts), events)
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
    (report,), unread = read_heartbeats(str(shm), "j")
    assert unread == [] and why_unread(report) == "" and why_unread(json.loads(json.dumps(report))) == ""
    return report


def page(look: Look, width: int = 120) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        console.print(Page("job", look))
    return captured.get()


def shown(shm: Path) -> str:
    return page(look_here(str(shm), "j"), width=200)


def metrics(shm: Path) -> str:
    registry = CollectorRegistry()
    registry.register(Collector(NodeMetrics("j", lambda: read_heartbeats(str(shm), "j"))))
    return generate_latest(registry).decode()


class Nodes:
    """A launcher of a node, which says what it hears."""

    def __init__(self, shm: Path):
        self._shm = shm
        self.kills: list[list[int]] = []

    def ask(self, hosts: list[str], what: str, timeout_s: float, behind_s: float = 0, **fields: Any) -> dict[str, Any]:
        if what == "stacks":
            self.kills.append(fields["pids"])
            return {}
        reports = read_heartbeats(str(self._shm), "j")
        rest = {"free": 1, "memory_error": "", "gpus": 0, "gpu_error": "", "interface": None, "steps": []}
        return {"a": rest | {"heartbeats": reports.heartbeats, "unread": reports.unread}}


def test_two_processes_write_their_parts_at_the_same_time_and_readers_find_both_whole(
    shm: Path, start: Callable[..., Process]
) -> None:
    trainer, courier = start("trainer"), start("courier")
    for process in (trainer, courier):
        process.tell("many", 2000)
    seen: list[tuple[int, int]] = []

    def both_are_through() -> bool:
        report = heard(shm)
        seen.append((-1 if report["saved"] is None else report["saved"], report["committed"] or -1))
        return seen[-1] == (1999, 1999)

    until(both_are_through, lambda: f"the last step of both: {seen[-1]}")
    assert [steps[0] for steps in seen] == sorted(steps[0] for steps in seen)
    assert [steps[1] for steps in seen] == sorted(steps[1] for steps in seen)
    for process in (trainer, courier):
        process.hear()
    report = heard(shm)
    assert (report["pid"], report["alive"], report["courier_pid"], report["courier_alive"]) == (
        trainer.pid, True, courier.pid, True)  # fmt: skip
    assert report["saves"] == 2000 and report["times"].keys() == {"made", "saved", "committed"}
    trainer.does("saved", 1999, 0.25, 77, False, True)
    assert heard(shm)["nbytes"] == 77, "no courier in its process writes what it has noted"
    assert state_of(report) == "training" and "courier" not in shown(shm)
    assert 'mlflash_courier_up{job_name="j",node="n0",rank="1"} 1.0' in metrics(shm)


def test_a_courier_that_died_is_shown_as_such_and_is_no_dead_rank(
    shm: Path, trainer: TrainerHeartbeat, start: Callable[..., Process], caplog: pytest.LogCaptureFixture
) -> None:
    courier = start("courier")
    courier.does("committed", 5, 0.5, 1)
    trainer.beat("saved", saved=6)
    nodes = Nodes(shm)
    looks = Looks(nodes, str(shm), "j", 0, "")  # type: ignore[arg-type]
    watch = Watch(looks, "r", ["a"], 4, 0)
    looks.look(["a"])
    looks.show_stacks(["a"], "r")
    assert nodes.kills == [[os.getpid(), courier.pid]]
    assert watch.dead() == "" and "courier" not in caplog.text
    courier.kill()
    report = heard(shm)
    assert (report["alive"], report["courier_alive"], report["committed"]) == (True, False, 5)
    assert state_of(report) == "no courier"
    text = shown(shm)
    assert "no courier" in text and "no courier on rank 1: training continues" in text and "1 of 4 ranks" in text
    assert 'mlflash_courier_up{job_name="j",node="n0",rank="1"} 0.0' in metrics(shm)
    assert 'mlflash_up{job_name="j",node="n0",rank="1"} 1.0' in metrics(shm)
    for _ in range(3):
        looks.look(["a"])
        assert watch.dead() == ""
    assert caplog.text.count(f"a: the courier of rank 1 (pid {courier.pid}) died, and its trainer goes on") == 1
    looks.show_stacks(["a"], "r")
    assert nodes.kills[-1] == [os.getpid()]


@pytest.mark.skipif(os.geteuid() != 0, reason="a container is made by root")
def test_a_rank_in_a_container_of_its_own_is_not_called_dead_and_nobody_gets_its_signals(
    shm: Path, start: Callable[..., Process]
) -> None:
    start("trainer", before=["unshare", "--pid", "--fork", "--kill-child"])
    report = heard(shm)
    assert (report["pid"], report["alive"], report["courier_pid"]) == (0, True, None)
    nodes = Nodes(shm)
    looks = Looks(nodes, str(shm), "j", 0, "")  # type: ignore[arg-type]
    watch = Watch(looks, "r", ["a"], 4, 0)
    for _ in range(3):
        looks.look(["a"])
        assert watch.dead() == ""
    looks.show_stacks(["a"], "r")
    assert nodes.kills == [], "its pid is that of another process here"


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
    watch, patient = (Watch(looks, "r", ["a"], 4, patience_s) for patience_s in (900, 100_000))
    looks.look(["a"])
    assert not watch.hangs() and not patient.hangs()
    courier = start("courier")
    courier.does("committed", 4, 0.5, 1)
    now, here_s = now + 1000, 1000.0
    trainer.flush()
    looks.look(["a"])
    report = heard(shm)
    assert report["alive"] and report["courier_alive"] and watch.hangs() and not patient.hangs()
    looks.look([])
    looks._status.clear()
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
    bad = [json.dumps(good)[:90], "\xff" * 10, "7", *(json.dumps({**good, **wrong}) for wrong in (
        {"format": 3, "version": "9.9"}, {"committed": True}, {"pid": 0}, {"beat": float("nan")}, {"beat": 10**400},
        {"times": {"made": "x"}}, {"start": None},
    ))]  # fmt: skip
    for text in bad:
        with file.open("r+b") as part:
            part.seek(PART_NBYTES)
            part.write(text.encode("latin-1").ljust(PART_NBYTES))
        (report,), (why,) = read_heartbeats(str(shm), "j")
        assert "pulse-0000 cannot be read: " in why and why.endswith(" in what the courier says"), (text, why)
        assert report["committed"] is report["courier_pid"] is None and report["alive"] and why_unread(report) == "", (
            text
        )
        assert "starting" in shown(shm) and "mlflash_courier_up" not in metrics(shm)
    lies = {"alive": False, "pid": 1, "beat": 1e12, "run": "x", "saved": 99, "rank": 1, "version": "9.9",
            "restored": 5, "times": {"made": 1.0, "restored": 2.0}}  # fmt: skip
    with file.open("r+b") as part:
        part.seek(PART_NBYTES)
        part.write(encode({**good, **lies}))
    report = heard(shm)
    assert (report["alive"], report["pid"], report["run"], report["saved"], report["restored"]) == (
        True, os.getpid(), "r", None, None)  # fmt: skip
    assert (
        report["beat"] < 1e12
        and report["version"] != "9.9"
        and report["times"]["made"] > 1
        and report["committed"] == 3
    )
    with file.open("r+b") as part:
        part.seek(PART_NBYTES)
        part.write(encode({**good, "rank": 2}))
    assert heard(shm)["committed"] is None, "of another rank"
    with file.open("r+b") as part:
        part.truncate(PART_NBYTES)
    assert heard(shm)["courier_pid"] is None


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
        "format": 1, "version": "0.1.0", "run": "", "rank": 1, "ranks": 4, "node": "node-a", "pid": 4321,
        "state": "started", "alive": False, "beat": when, "restored": 11, "source": "/d/step-00000011", "saved": 12,
        "times": dict.fromkeys(("made", "saved", "restored", "committed", "unrestorable"), when), "redundancy": "copy",
        "nodes": 2, "stall_s": 0.25, "stalled_s": 0.25, "nbytes": 1000, "restored_at": when, "committed": 12,
        "commit_s": 0.5, "protect_s": 0.125, "held": 4096, "saves": 1, "failed": 1, "drained": 12, "courier_pid": 4322,
        "courier_alive": True, "courier_beat": when, "courier_state": "started",
    }  # fmt: skip
    other = GOLDEN.read_bytes().replace(b'"format":1', b'"format":2')
    file.write_bytes(other)
    (reports, (why,)) = read_heartbeats(str(shm), "j")
    assert reports == [] and "cannot be read: written by version 0.1.0 (this is" in why and "$.format" in why
    report = json.loads(other[:PART_NBYTES]) | {"alive": True, "committed": None}
    assert "$.format" in why_unread(report), "as another node sends"


# mlflash top: the page, and the command in a real terminal, beside a real job that is killed


def reported(rank: int, **changes: Any) -> dict[str, Any]:
    report = {"format": 1, "run": "", "rank": rank, "ranks": 4, "node": f"n{rank // 2}", "nodes": 2, "pid": 7,
            "alive": True, "state": "started", "restored": None, "source": "", "saved": 20, "committed": 10,
            "beat": 100.0, "redundancy": "xor:4", "times": {"made": 1.0, "restored": 40.0, "committed": 90.0},
            "saves": 6, "failed": 0, "stall_s": 0.02, "commit_s": 0.5, "nbytes": 1 << 30, "protect_s": 0.5,
            "held": 4 << 30}  # fmt: skip
    return {**report, **changes}


def test_the_page_says_who_is_alive_how_far_they_are_and_what_it_costs() -> None:
    text = page(Look(102.0, tuple(map(reported, range(4))), (("vm", 1 << 34),)))
    for part in ("4 of 4 ranks alive on 2 of 2 nodes; redundancy xor:4", "checkpoint step 10, every 2 s, last sign 2 s",
                 "memory of vm: 16 GiB held, 16 GiB free"):  # fmt: skip
        assert part in text, text
    assert len(re.findall(r"n\d +\d  training +20 +10 +2 s  20 ms  500 ms +-   4 GiB", text)) == 4, text
    assert "restored" not in text and "/s" not in text, "how fast copies are made says nothing of a job without any"


def test_what_needs_a_person_is_said() -> None:
    heartbeats = (
        reported(0, failed=3, restored=7, source="memory"),
        reported(1, alive=False),
        reported(2, state="failed"),
    )
    text = page(Look(200.0, heartbeats, silent=("n9",), wrong="Slurm does not answer"))
    for part in ("1 of 4 ranks alive", "gone", "failed", "Slurm does not answer", "no answer from n9",
                 "3 saves of this run did not become checkpoints",
                 "restored step 7 from memory 2.7 min ago"):  # fmt: skip
        assert part in text, text
    nothing = page(Look(1.0))
    assert "no rank of this job" in nothing and "0 of 0" not in nothing
    ended = tuple(reported(rank, state="ended") for rank in range(4))
    assert "4 of 4 ranks have ended on 2 of 2 nodes" in page(Look(1.0, ended))
    assert "1 other node not asked: use --slurm-job ID or --hosts A,B" in page(Look(1.0, (reported(0), reported(1))))
    assert "checkpoint none yet" in page(Look(1.0, (reported(0), reported(1, committed=None))))
    assert "checkpoint step 5," in page(Look(1.0, (reported(0), reported(1, committed=5))))
    changes: list[dict[str, Any]] = [{"saved": None}, {}, {"alive": False}, {"state": "ended"}]
    assert [state_of(reported(0, **change)) for change in changes] == ["starting", "training", "gone", "ended"]


def test_pulses_of_another_version_and_torn_ones_are_said_to_be_so_and_the_others_are_shown(shm: Path) -> None:
    memory = NodeDirectory(str(shm), "j")
    own = TrainerHeartbeat(memory, RankFacts(0, 1, 0, "n0", ""))
    own.beat("saved", saved=3)
    directory = Path(memory.path)
    good = json.loads((directory / "pulse-0000").read_bytes()[:PART_NBYTES])
    strange = {"version": "9.9", "rank": 1}, [1], {**good, "restored": 7}, {**good, "stall_s": "long"}
    texts = [*map(json.dumps, strange), json.dumps(good)[:90], "[" * 4096, "\0" * 4096]  # the last is blank
    for number, text in enumerate(texts, 1):
        file = directory / f"pulse-{number:04d}"
        file.touch(0o600)
        file.write_text(text)
    try:
        heard = read_heartbeats(str(shm), "j")
        assert [report["saved"] for report in heard.heartbeats] == [3] and len(heard.unread) == len(texts) - 1
        assert all(f"pulse-{number:04d} cannot be read: " in text for number, text in enumerate(heard.unread, 1))
        assert "cannot be read: written by version 9.9 (this is" in heard.unread[0] and live_jobs(str(shm)) == ["j"]
        for words in (["--once"], ["--json"]):
            command = [MLFLASH, "top", "--here", "--memory", str(shm), "--job", "j", *words]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
            assert "version 9.9" in " ".join(done.stdout.split()), done.stdout
            assert ("1 of 1 ranks alive" in done.stdout) == (words == ["--once"])
    finally:
        own.end("ended")
        memory.close()


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """A terminal of 110 columns and 30 lines; the function types, and gives what it shows."""
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    socket = str(tmp_path / "tmux")

    def tmux(*words: str) -> str:
        return subprocess.run(
            ["tmux", "-S", socket, *words], capture_output=True, text=True, timeout=60, check=True
        ).stdout

    def use(*typed: str, start: str = "") -> str:
        if start:
            tmux("-f", "/dev/null", "new-session", "-d", "-x", "110", "-y", "30", start)
        if typed:
            tmux("send-keys", *typed)
        return tmux("capture-pane", "-p")

    yield use
    tmux("kill-server")


@pytest.mark.slow
@needs.MPI
def test_in_a_terminal_beside_a_job_that_saves_and_then_is_killed(terminal: Callable[..., str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("""
import sys
import numpy as np
from waiting import take
import mlflash
with mlflash.Checkpointer(job="watched", memory=sys.argv[1]) as ckpt:
    for step in range(1_000_000):
        ckpt.save(step, {"w": np.zeros(100_000)})
        take(0.1)
""")

    def is_shown(pattern: str, word: str) -> bool:
        """Whether the terminal shows this, and a word for each rank. It may be looked at in the middle of a drawing."""
        page = terminal()
        return re.search(pattern, page, re.S) is not None and page.count(word) == WATCHED_RANKS

    with own_memory() as memory:
        command, env = mpiexec(WATCHED_RANKS, [sys.executable, "-m", "mpi4py", str(script), str(memory)])
        job = spawn(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path)
        try:
            ready = tmp_path / "ended"
            until(lambda: len(list(memory.rglob("pulse-*"))) == WATCHED_RANKS, "a pulse of each rank")
            terminal(start=f"{MLFLASH} top --memory {memory} && touch {ready}; sleep infinity")
            page = r"mlflash watched.*4 of 4 ranks alive on 1 of 1 node.*step (\d+), every "
            until(lambda: is_shown(page, "training"), terminal)
            match = re.search(r"step (\d+)", terminal())
            first = int(match[1]) if match else 0
            until(lambda: any(int(step) >= first + 10 for step in re.findall(r"step (\d+)\b", terminal())), terminal)
        finally:
            signal_group(job, signal.SIGKILL)
            job.wait(60)
        until(lambda: is_shown("0 of 4 ranks alive", "gone"), terminal)
        terminal("q")
        until(ready.exists, "the end of mlflash top")
        done = subprocess.run([MLFLASH, "top", "--memory", str(memory)], capture_output=True, text=True, timeout=60,
                              check=True)  # fmt: skip
        assert done.stdout.count("gone") == WATCHED_RANKS and "\x1b" not in done.stdout, (
            "no terminal: one page, no colours"
        )
