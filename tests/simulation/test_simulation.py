"""What the simulator runs before each merge: the same seeds, all that have failed, and some of this tree's own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FIXED, OF_TREE = 150, 30  # numbers of seeds
LEAST_POINTS = 59  # of the 63 crash points
FAILED = [line.split("#")[0].strip() for line in (HERE / "seeds_that_failed.txt").read_text().splitlines()]


def simulate(program: str, *words: str, timeout_s: float = 400.0) -> str:
    """Run the simulator, or another program beside it; what it printed, if nothing failed."""
    command = [sys.executable, str(HERE / program), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5000:]
    return done.stdout


def first_of_tree() -> int:
    """Where the seeds of this tree begin: what one of them finds, the author of the change learns."""
    command = ["git", "-C", str(HERE), "rev-parse", "HEAD^{tree}"]
    tree = subprocess.run(command, capture_output=True, text=True, timeout=20)
    return int(tree.stdout.strip() or "0", 16) % 10**9


@pytest.mark.timeout(420)
def test_no_seed_fails_and_nearly_all_crash_points_are_reached() -> None:
    of_tree = first_of_tree()
    printed = simulate(
        "",
        f"0:{FIXED}",
        f"{of_tree}:{of_tree + OF_TREE}",
        "0:40,special=light",
        "0:20,special=disk",
        "0:20,special=disk+whole+common",
        *FAILED,
    )
    reached = re.search(r"crash points: (\d+) of \d+", printed)
    assert reached is not None and int(reached[1]) >= LEAST_POINTS, printed


def test_the_same_seed_gives_the_same_trace() -> None:
    once, again = (re.findall("digest.*", simulate("", "0:5", "--digests", "--jobs", jobs)) for jobs in "12")
    assert len(once) == 5 and sorted(once) == sorted(again)


@pytest.mark.parametrize(("scheme", "transport"), [("copy", "rma"), ("rs:2+1", "p2p")])
def test_every_state_that_a_crash_of_a_save_can_leave_is_restored_from(scheme: str, transport: str) -> None:
    # A sample: all of them by hand, with --every 1.
    simulate("cuts.py", "--every", "32", "--set", f"scheme={scheme}", f"transport={transport}")
