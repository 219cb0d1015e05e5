"""A spare that is forked again with the rank that it needs: what it keeps, and that its seed ends as it does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from processes import killed_in_the_end
from unit.kept_job import is_gone
from waiting import PATIENCE_S, until

from mlflash.launch.rank_processes import is_stopped
from mlflash.run import forked_spare

PROGRAM = """
import os, random, signal, sys, threading, time
from pathlib import Path
from mlflash.run.forked_spare import begin_anew, fork_spares
random.seed(1)
started = os.getpid()
def say(*words): print(*words, flush=True)
say("imports")
{before}
fork_spares(lambda: {fits})
presumed = os.environ.get("MLFLASH_PRESUMED")
{after_fork}
name = Path("/proc/self/comm").read_text().strip()
say("presumes", presumed, round(random.random(), 3), os.getpid() == started, name)
if presumed != "2" and {anew}:
    begin_anew(2 if presumed else 1)
{after}
"""


def run(**parts: str) -> tuple[int, list[str]]:
    """Give how the program ends, and what it has printed."""
    text = PROGRAM.format(**{"before": "", "fits": "True", "anew": "False", "after": "", "after_fork": "", **parts})
    ran = subprocess.run([sys.executable, "-W", "error", "-c", text], capture_output=True, text=True, timeout=60)
    assert not ran.stderr, ran.stderr
    return ran.returncode, ran.stdout.splitlines()


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A seed and its child, which waits."""
    text = PROGRAM.format(before="", fits="True", anew="False", after_fork="", after="""
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
say(os.getpid())
while True: signal.pause()""")  # fmt: skip
    with killed_in_the_end(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as seed:
        assert seed.stdout is not None
        lines = [seed.stdout.readline() for _ in range(3)]
        yield seed, int(lines[-1])


def test_who_needs_another_rank_imports_nothing_again() -> None:
    """Nor draws other numbers: Python seeds its generator anew in a child."""
    code, printed = run(anew="True")
    name = printed[1].split()[-1]
    assert name != forked_spare.SEED
    said = [f"presumes {rank} 0.134 False {name}" for rank in (None, 1, 2)]
    assert (code, printed) == (0, ["imports", *said])


@pytest.mark.parametrize(("after", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", 137)])
def test_its_seed_ends_as_it_does(after: str, code: int) -> None:
    assert run(after=after)[0] == code


@pytest.mark.parametrize("why", [{"before": "threading.Thread(target=signal.pause, daemon=True).start()"},
                                 {"fits": "False"}])  # fmt: skip
def test_who_cannot_be_forked_begins_its_program_anew(why: dict[str, str]) -> None:
    """In the process that was started: it has threads, or its device cannot be used in a child."""
    code, printed = run(anew="True", **why)
    assert code == 0 and printed.count("imports") == 3
    assert [line.split()[1:4:2] for line in printed if "presumes" in line] == [
        [rank, "True"] for rank in ("None", "1", "2")
    ]


def test_a_signal_is_for_the_child_and_the_seed_ends_with_it(child: tuple[subprocess.Popen[str], int]) -> None:
    seed, _ = child
    os.killpg(seed.pid, signal.SIGTERM)
    assert seed.wait(PATIENCE_S) == 7


def test_who_kills_the_seed_kills_the_child(child: tuple[subprocess.Popen[str], int]) -> None:
    seed, pid = child
    seed.kill()
    until(lambda: is_gone(pid), "the end of the child")


def test_a_stopped_child_counts_as_its_seed_does(child: tuple[subprocess.Popen[str], int]) -> None:
    seed, pid = child
    assert not is_stopped(seed.pid)
    os.kill(pid, signal.SIGSTOP)
    until(lambda: is_stopped(seed.pid), "the agent to see that it is stopped")
    os.kill(pid, signal.SIGCONT)
    until(lambda: not is_stopped(seed.pid), "the agent to see that it goes on")
