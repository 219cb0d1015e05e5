"""`mlflash top`: what the page says of looks, and the command in a real terminal, beside a real job that is killed."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import needs
import pytest
from harness import own_memory
from rich.console import Console
from waiting import until

from mlflash.launcher.processes import mpiexec, signal_group, spawn
from mlflash.live_monitor.history import History, committed, spark
from mlflash.live_monitor.rank_status import Look, Watch, look_everywhere, look_here
from mlflash.live_monitor.screen import page, state_of
from mlflash.memory.node_directory import NodeDirectory
from mlflash.telemetry.heartbeat import RankFacts, TrainerHeartbeat, all_heartbeats, live_jobs
from mlflash.telemetry.heartbeat_format import PART_NBYTES

MLFLASH = str(Path(sys.executable).with_name("mlflash"))
RANKS = 4


def heartbeat(rank: int, **changes: Any) -> dict[str, Any]:
    said = {"format": 2, "run": "", "rank": rank, "ranks": 4, "node": f"n{rank // 2}", "nodes": 2, "pid": 7,
            "alive": True, "state": "started", "restored": None, "source": "", "saved": 20, "committed": 10,
            "beat": 100.0, "redundancy": "xor:4", "times": {"made": 1.0, "restored": 40.0}, "saves": 2, "failed": 0,
            "stall_s": 0.02,
            "commit_s": 0.5, "nbytes": 1 << 30, "protect_s": 0.5, "held": 4 << 30}  # fmt: skip
    return {**said, **changes}


def shown(look: Look, history: History | None = None, height: int = 40, width: int = 100) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        console.print(page("job", look, history or History(), width, height))
    return captured.get()


def test_the_page_says_who_is_alive_how_far_they_are_and_what_it_costs() -> None:
    history = History()
    for at, step, stall in ((100.0, 10, 0.02), (102.0, 20, 0.04)):
        news = {"committed": step, "beat": at, "saves": step // 10, "stall_s": stall}
        look = Look(at, tuple(heartbeat(rank, **news) for rank in range(4)), (("vm", 1 << 34),))
        history.add(look)
        history.add(look)
    text = shown(look, history)
    for part in ("4 of 4 ranks alive on 2 of 2 nodes", "xor:4", "step 20", "every 2 s", "40 ms  ▄█", "500 ms  ██",
                 "2 GiB/s", "16 GiB  of vm; 16 GiB free"):  # fmt: skip
        assert part in text, text
    assert text.count("training") == 4 and "restored" not in text


def test_what_needs_a_person_is_said() -> None:
    heartbeats = (
        heartbeat(0, failed=3, restored=7, source="memory"),
        heartbeat(1, alive=False),
        heartbeat(2, state="failed"),
    )
    text = shown(Look(200.0, heartbeats, silent=("n9",), wrong="Slurm does not answer"))
    for part in ("1 of 4 ranks alive", "gone", "failed", "Slurm does not answer", "no answer from n9",
                 "3 saves of this run did not become checkpoints", "step 7  from memory, 2.7 min ago"):  # fmt: skip
        assert part in text, text
    nothing = shown(Look(1.0))
    assert "no rank of this job" in nothing and "0 of 0" not in nothing
    assert "4 of 4 ranks have ended on 2 of 2 nodes" in shown(
        Look(1.0, tuple(heartbeat(n, state="ended") for n in range(4)))
    )
    assert "1 other node not asked: use --slurm-job ID or --hosts A,B" in shown(Look(1.0, (heartbeat(0), heartbeat(1))))


def test_the_rank_that_the_last_commit_waited_for_is_named_with_its_phase_and_noise_is_not() -> None:
    job = {"slowest": 3, "slowest_on": "n1", "slowest_s": 2.25, "slowest_in": "copy", "commit_s": 3.0}
    late = [(0.01, "copy"), (0.02, "training"), (0.01, "transfer"), (2.25, "copy")]
    heartbeats = tuple(heartbeat(n, late_s=late_s, late_in=phase, **job) for n, (late_s, phase) in enumerate(late))
    text = shown(Look(100.0, heartbeats), width=120)
    assert "waited for" in text and re.search(r"rank 3 +2\.2 s late in copy, on n1", text), text
    assert text.count("2.2 s copy") == 1 and "20 ms training" not in text
    here = shown(Look(100.0, heartbeats[:2]), width=120)
    assert "late in copy, on n1" in here and "2.2 s copy" not in here, "the ranks of one node know it, too"
    noise = job | {"slowest_s": 0.1, "late_s": 0.1, "late_in": "copy"}
    few = shown(Look(100.0, tuple(heartbeat(rank, **noise) for rank in range(4))), width=120)
    assert "waited for" not in few and "ms copy" not in few
    assert "waited for" not in shown(Look(100.0, (heartbeat(0),))), "a version that does not say so"
    many = [heartbeat(n, node=f"n{n // 64}", late_s=0.5 * (n == 70), late_in="checksums") for n in range(512)]
    lines = shown(Look(100.0, tuple(many)), height=30, width=120).splitlines()
    assert [line.split()[0] for line in lines if "500 ms checksums" in line] == ["n1"]


def test_where_there_are_more_ranks_than_lines_a_line_is_a_node_and_shows_its_worst_rank() -> None:
    heartbeats = tuple(
        heartbeat(rank, node=f"n{rank // 64}", ranks=512, nodes=8, alive=rank != 100) for rank in range(512)
    )
    text = shown(Look(100.0, heartbeats), height=30)
    lines = [line.split() for line in text.splitlines() if line.strip().startswith("n")]
    assert [line[:2] for line in lines if line[1:2] == ["64"]] == [[f"n{node}", "64"] for node in range(8)]
    assert text.count("1 gone") == 1 and len(text.splitlines()) <= 30


def test_words_and_bars() -> None:
    changes: list[dict[str, Any]] = [{"saved": None}, {}, {"alive": False}, {"state": "ended"}]
    assert [state_of(heartbeat(0, **one)) for one in changes] == ["starting", "training", "gone", "ended"]
    assert committed(Look(1.0, (heartbeat(0), heartbeat(1, committed=None)))) is None
    assert committed(Look(1.0, (heartbeat(0), heartbeat(1, committed=5)))) == 5
    assert (spark([1, 2, 4], 10), spark([0, 0], 5), spark([], 5), spark(range(9), 2)) == ("▂▄█", "▁▁", "", "▇█")


def test_nodes_that_say_nonsense_or_nothing_are_named() -> None:
    class Nodes:
        def on_each(self, hosts: Any, argv: Any, timeout_s: float, behind_s: float) -> dict[str, str]:
            rest = {"gpus": 0, "gpu_error": "", "interface": None, "steps": []}
            gone = heartbeat(0, beat=9.0, node="a", alive=False)  # by a clock that is ahead
            good = {"heartbeats": [gone, heartbeat(1), heartbeat(2, beat=3.0, node="a")], "free": 3, **rest}
            both = [heartbeat(0, beat=5.0, node="b"), heartbeat(2, beat=4.0, node="b")]
            moved = {"heartbeats": both, "free": 4, **rest}
            return {"a": json.dumps(good), "b": json.dumps(moved), "c": "Killed"}

    look = look_everywhere(Nodes(), ["a", "b", "c", "d"], "/dev/shm", "j")  # type: ignore[arg-type]
    assert look.silent == ("c", "d") and look.free == (("a", 3), ("b", 4))
    assert [(one["rank"], one["node"]) for one in look.heartbeats] == [(0, "b"), (1, "n0"), (2, "b")]


def test_a_look_that_fails_is_shown_and_the_next_one_comes_all_the_same() -> None:
    again = threading.Event()
    looks = iter([lambda: Look(1.0, (heartbeat(0),)), fail, lambda: Look(2.0) if again.wait(60) else fail()])
    watch = Watch(lambda: next(looks)(), 0.001)
    try:
        until(lambda: watch.last.wrong, "a word of the look that failed")
        assert "the last look failed: RuntimeError('the cable')" in shown(watch.last) and watch.last.heartbeats
        again.set()
        until(lambda: watch.last.at == 2.0, "the look after it")
    finally:
        watch.end()


def fail() -> Look:
    raise RuntimeError("the cable")


def test_pulses_of_another_version_and_torn_ones_are_said_to_be_so_and_the_others_are_shown(shm: Path) -> None:
    memory = NodeDirectory(str(shm), "j", None)
    mine = TrainerHeartbeat(memory, RankFacts(0, 1, 0, "n0", ""))
    mine.beat("saved", saved=3)
    directory = Path(memory.path)
    good = json.loads((directory / "pulse-0000").read_bytes()[:PART_NBYTES])
    strange = {
        "other": {"version": "9.9", "rank": 1}, "older": {"rank": 2}, "list": [1], "state": {**good, "state": "asleep"},
        "restored": {**good, "restored": 7}, "stall": {**good, "stall_s": "long"},
        "times": {**good, "times": {"a": "b"}},
    }  # fmt: skip
    texts = {**{name: json.dumps(said) for name, said in strange.items()}, "torn": json.dumps(good)[:90],
             "deep": "[" * 4096, "empty": "\0" * 4096}  # fmt: skip
    for number, text in enumerate(texts.values(), 1):
        file = directory / f"pulse-{number:04d}"
        file.touch(0o600)
        file.write_text(text)
    try:
        heard = all_heartbeats(str(shm), "j")
        assert [one["saved"] for one in heard.heartbeats] == [3] and len(heard.unread) == len(texts) - 1
        assert all(f"pulse-{number:04d} cannot be read: " in text for number, text in enumerate(heard.unread, 1))
        assert "cannot be read: written by version 9.9 (this is" in heard.unread[0] and live_jobs(str(shm)) == ["j"]
        console = " ".join(shown(look_here(str(shm), "j"), width=300).split())
        assert "1 of 1 ranks alive" in console and "written by version 9.9" in console
        for words in (["--once"], ["--json"]):
            command = [MLFLASH, "top", "--here", "--memory", str(shm), "--job", "j", *words]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
            assert "version 9.9" in " ".join(done.stdout.split()), done.stdout
    finally:
        mine.end("ended")
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


def wait_for_page(show: Callable[[], str], *texts: str, ranks: str) -> str:
    """Wait until the terminal shows a page with these texts, and this word for each rank.

    It may be looked at in the middle of being drawn.
    """
    seen = ""

    def is_there() -> bool:
        nonlocal seen
        seen = show()
        return all(text in seen for text in texts) and seen.count(ranks) == RANKS

    until(is_there, lambda: f"{texts} did not come:\n{seen}")
    return seen


def step_of(page: str) -> int:
    """The step that a page says; -1 where it is being drawn."""
    found = re.search(r"step (\d+)\b", page)
    return int(found[1]) if found else -1


@pytest.mark.slow
@needs.MPI
def test_in_a_terminal_beside_a_job_that_saves_and_then_is_killed(terminal: Callable[..., str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("""
import sys
import numpy as np
from waiting import take
import mlflash
with mlflash.Checkpointer(job="watched", memory=sys.argv[1], ranks_per_node=2) as ckpt:
    for step in range(1_000_000):
        ckpt.save(step, {"w": np.zeros(100_000)})
        take(0.1)
""")
    with own_memory() as memory:
        command, env = mpiexec(RANKS, [sys.executable, "-m", "mpi4py", str(script), str(memory)])
        job = spawn(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path)
        try:
            ready = tmp_path / "ended"
            until(lambda: len(list(memory.rglob("pulse-*"))) == RANKS, "a pulse of each rank")
            terminal(start=f"{MLFLASH} top --memory {memory} && touch {ready}; sleep infinity")
            texts = ("every ", "mlflash watched", "4 of 4 ranks alive on 2 of 2 nodes", "copy")
            page = wait_for_page(terminal, *texts, ranks="training")
            until(lambda: step_of(terminal()) >= step_of(page) + 10, "ten steps more: the page stands still")
        finally:
            signal_group(job, signal.SIGKILL)
            job.wait(60)
        wait_for_page(terminal, "0 of 4 ranks alive", ranks="gone")
        terminal("q")
        until(ready.exists, "the end of mlflash top")
        done = subprocess.run([MLFLASH, "top", "--memory", str(memory)], capture_output=True, text=True, timeout=60,
                              check=True)  # fmt: skip
        assert done.stdout.count("gone") == RANKS and "\x1b" not in done.stdout, "no terminal: one page, no colours"
