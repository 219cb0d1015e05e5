"""What the simulator runs before each merge: the same seeds, all that have failed, and some of this tree's own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FIXED, OF_TREE = 260, 40  # numbers of seeds
LEAST_POINTS = 58  # of the 62 crash points
FOUND = [
    line.split("#")[0].split() for line in (HERE / "seeds_that_failed.txt").read_text().splitlines() if line.strip()
]


def simulate(program: str, *words: str, timeout_s: float = 170.0) -> str:
    """Run the simulator, or another program beside it; what it printed, if nothing failed."""
    command = [sys.executable, str(HERE / program), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5000:]
    return done.stdout


@pytest.mark.timeout(180)
def test_no_fixed_seed_fails_and_nearly_all_crash_points_are_reached() -> None:
    printed = simulate("", f"0:{FIXED}")
    reached = re.search(r"crash points: (\d+) of \d+", printed)
    assert reached is not None and int(reached[1]) >= LEAST_POINTS, printed


def test_no_seed_of_this_tree_fails() -> None:
    # Other seeds for each change: what one of them finds, its author learns, and puts it into seeds_that_failed.txt.
    command = ["git", "-C", str(HERE), "rev-parse", "HEAD^{tree}"]
    tree = subprocess.run(command, capture_output=True, text=True, timeout=20)
    first = int(tree.stdout.strip() or "0", 16) % 10**9
    simulate("", f"{first}:{first + OF_TREE}")


@pytest.mark.parametrize("words", FOUND, ids=" ".join)
def test_no_seed_fails_any_more_that_once_did(words: list[str]) -> None:
    seed, *settings = words
    simulate("", seed, *(["--set", *settings] if settings else []))


def test_the_same_seed_gives_the_same_trace() -> None:
    simulate("", "0:12", "--twice")
    one, other = (simulate("", "7", "--trace") for _ in range(2))  # in processes of their own
    assert one.rpartition("\n1 seeds")[0] == other.rpartition("\n1 seeds")[0] and len(one.splitlines()) > 1000


@pytest.mark.parametrize("scheme", ["copy", "rs:2+1"])
@pytest.mark.parametrize("transport", ["p2p", "rma"])
def test_every_state_that_a_crash_of_a_save_can_leave_is_restored_from(scheme: str, transport: str) -> None:
    # A sample: all of them by hand, with --every 1.
    simulate("cuts.py", "--every", "19", "--set", f"scheme={scheme}", f"transport={transport}")
