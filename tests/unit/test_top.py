"""`mlflash top`: what the page says of looks, and the command in a real terminal, beside a real job that is killed."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import needs
import pytest
from harness import own_memory
from rich.console import Console
from waiting import until

from mlflash.launcher.processes import mpiexec, signal_group, spawn
from mlflash.live_monitor.rank_status import Look
from mlflash.live_monitor.screen import Page, state_of
from mlflash.memory.node_directory import NodeDirectory
from mlflash.telemetry.heartbeat import PART_NBYTES, RankFacts, TrainerHeartbeat, live_jobs, read_heartbeats

MLFLASH = str(Path(sys.executable).with_name("mlflash"))
RANKS = 4


def heartbeat(rank: int, **changes: Any) -> dict[str, Any]:
    said = {"format": 1, "run": "", "rank": rank, "ranks": 4, "node": f"n{rank // 2}", "nodes": 2, "pid": 7,
            "alive": True, "state": "started", "restored": None, "source": "", "saved": 20, "committed": 10,
            "beat": 100.0, "redundancy": "xor:4", "times": {"made": 1.0, "restored": 40.0, "committed": 90.0},
            "saves": 6, "failed": 0, "stall_s": 0.02, "commit_s": 0.5, "nbytes": 1 << 30, "protect_s": 0.5,
            "held": 4 << 30}  # fmt: skip
    return {**said, **changes}


def shown(look: Look, width: int = 120, height: int | None = None) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        console.print(Page("job", look), height=height)
    return captured.get()


def test_the_page_says_who_is_alive_how_far_they_are_and_what_it_costs() -> None:
    text = shown(Look(102.0, tuple(map(heartbeat, range(4))), (("vm", 1 << 34),)))
    for part in ("4 of 4 ranks alive on 2 of 2 nodes; redundancy xor:4", "checkpoint step 10, every 2 s, last sign 2 s",
                 "memory of vm: 16 GiB held, 16 GiB free"):  # fmt: skip
        assert part in text, text
    assert len(re.findall(r"n\d +\d  training +20 +10 +2 s  20 ms  500 ms +-   4 GiB", text)) == 4, text
    assert "restored" not in text and "/s" not in text, "how fast copies are made says nothing of a job without any"


def test_what_needs_a_person_is_said() -> None:
    heartbeats = (
        heartbeat(0, failed=3, restored=7, source="memory"),
        heartbeat(1, alive=False),
        heartbeat(2, state="failed"),
    )
    text = shown(Look(200.0, heartbeats, silent=("n9",), wrong="Slurm does not answer"))
    for part in ("1 of 4 ranks alive", "gone", "failed", "Slurm does not answer", "no answer from n9",
                 "3 saves of this run did not become checkpoints",
                 "restored step 7 from memory 2.7 min ago"):  # fmt: skip
        assert part in text, text
    nothing = shown(Look(1.0))
    assert "no rank of this job" in nothing and "0 of 0" not in nothing
    ended = tuple(heartbeat(rank, state="ended") for rank in range(4))
    assert "4 of 4 ranks have ended on 2 of 2 nodes" in shown(Look(1.0, ended))
    assert "1 other node not asked: use --slurm-job ID or --hosts A,B" in shown(Look(1.0, (heartbeat(0), heartbeat(1))))
    assert "checkpoint none yet" in shown(Look(1.0, (heartbeat(0), heartbeat(1, committed=None))))
    assert "checkpoint step 5," in shown(Look(1.0, (heartbeat(0), heartbeat(1, committed=5))))
    changes: list[dict[str, Any]] = [{"saved": None}, {}, {"alive": False}, {"state": "ended"}]
    assert [state_of(heartbeat(0, **change)) for change in changes] == ["starting", "training", "gone", "ended"]


def test_pulses_of_another_version_and_torn_ones_are_said_to_be_so_and_the_others_are_shown(shm: Path) -> None:
    memory = NodeDirectory(str(shm), "j")
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
        heard = read_heartbeats(str(shm), "j")
        assert [one["saved"] for one in heard.heartbeats] == [3] and len(heard.unread) == len(texts) - 1
        assert all(f"pulse-{number:04d} cannot be read: " in text for number, text in enumerate(heard.unread, 1))
        assert "cannot be read: written by version 9.9 (this is" in heard.unread[0] and live_jobs(str(shm)) == ["j"]
        for words in (["--once"], ["--json"]):
            command = [MLFLASH, "top", "--here", "--memory", str(shm), "--job", "j", *words]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
            assert "version 9.9" in " ".join(done.stdout.split()), done.stdout
            assert ("1 of 1 ranks alive" in done.stdout) == (words == ["--once"])
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
        return re.search(pattern, page, re.S) is not None and page.count(word) == RANKS

    with own_memory() as memory:
        command, env = mpiexec(RANKS, [sys.executable, "-m", "mpi4py", str(script), str(memory)])
        job = spawn(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path)
        try:
            ready = tmp_path / "ended"
            until(lambda: len(list(memory.rglob("pulse-*"))) == RANKS, "a pulse of each rank")
            terminal(start=f"{MLFLASH} top --memory {memory} && touch {ready}; sleep infinity")
            page = r"mlflash watched.*4 of 4 ranks alive on 1 of 1 node.*step (\d+), every "
            until(lambda: is_shown(page, "training"), terminal)
            found = re.search(r"step (\d+)", terminal())
            first = int(found[1]) if found else 0
            until(lambda: any(int(step) >= first + 10 for step in re.findall(r"step (\d+)\b", terminal())), terminal)
        finally:
            signal_group(job, signal.SIGKILL)
            job.wait(60)
        until(lambda: is_shown("0 of 4 ranks alive", "gone"), terminal)
        terminal("q")
        until(ready.exists, "the end of mlflash top")
        done = subprocess.run([MLFLASH, "top", "--memory", str(memory)], capture_output=True, text=True, timeout=60,
                              check=True)  # fmt: skip
        assert done.stdout.count("gone") == RANKS and "\x1b" not in done.stdout, "no terminal: one page, no colours"
