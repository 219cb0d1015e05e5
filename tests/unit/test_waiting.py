"""How the tests wait, and that none of them depends on how busy the machine is."""

from __future__ import annotations

import ast
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import waiting
from waiting import is_in, until

TESTS = Path(__file__).parents[1]
DEADLINES = ("timeout", "timeout_s", "wait_s")
SHORT_S = 10.0
STUCK_S = 60.0  # what plays stuck does so for as long at least

# Lines, with their file, that wait for less, and why they may.
MEANT = {
    ("cluster/slurm/test_couriers.py", 'BY_HAND = f\"\"\"{FUNCTIONS}'): "is between two looks",
    ("cluster/slurm/test_couriers.py", 'BY_RUN = f\"\"\"{FUNCTIONS}'): "is between two looks",
    ("cluster/slurm/test_daemons.py", 'GO_ON = f\"\"\"#!/bin/sh'): "is between two looks",
    ("cluster/slurm/test_daemons.py", 'slurm.sbatch("#!/bin/sh\\nexec sleep 1000").wait("COMPLETED", timeout=0.1)'):
        "is meant to pass",
    ("cluster/slurm/test_daemons.py", 'slurm.wait_for_nodes("down", "host1", timeout=0.1)'): "is meant to pass",
    ("programs/test_deaths.py", 'job.start(timeout_s=6.0, who="trainer", how="stopped", patient=True)'):
        "is meant to pass",
    ("programs/test_megatron_request.py", "process.wait(0.3)"): "is meant to pass, and later where the machine is busy",
    ("programs/test_megatron_request.py", "made, start = Save().request(timeout_s=0.2), time.monotonic()"):
        "is meant to pass",
    ("unit/test_node_memory.py", "memory.lock(0, 1, wait_s=0.1)"): "is meant to pass",
    ("unit/test_node_memory.py", "beside.lock(1, 2, wait_s=0.1)  # another local rank of the same job"):
        "nobody else wants it: the first try succeeds",
    ("unit/test_package.py",
     'assert config.from_environment({"MLFLASH_TIMEOUT_S": "7.5"}, "/a", timeout_s=3.0).timeout_s == 3.0'):
        "is a setting, which nothing waits for",
    ("unit/test_rendezvous.py", "rendezvous(environment, me, None, None, timeout_s=0.1)"): "is meant to pass",
    ("unit/test_torch_store.py", 'first, *_ = meet(connect, "text", 3, lost=2, timeout_s=1.0)'): "is meant to pass",
    ("unit/test_torch_store.py", 'late = meet(connect, "text", 2, lost=0, timeout_s=0.5)[1]'): "is meant to pass",
    ("unit/test_slurm_topology.py", "assert ask_slurm(timeout_s=0.2) is None"): "is meant to pass",
}  # fmt: skip


def test_until_gives_what_was_found() -> None:
    found = iter(["", "", "this"])
    assert until(lambda: next(found), "something") == "this"
    assert until(lambda: 7, "something", timeout_s=0) == 7


def test_until_says_what_did_not_come() -> None:
    with pytest.raises(AssertionError, match=r"^not within 0\.05 s: the moon$"):
        until(lambda: False, "the moon", timeout_s=0.05)
    looks: list[int] = []
    with pytest.raises(AssertionError, match=r"^not within 0 s: after 1 look$"):
        until(lambda: looks.append(1), lambda: f"after {len(looks)} look", timeout_s=0)


def test_a_thread_is_in_what_it_has_called_and_not_returned_from() -> None:
    go_on = threading.Event()

    def outer() -> None:
        go_on.wait(60)

    thread = threading.Thread(target=outer)
    assert not is_in(thread, outer)
    thread.start()
    until(lambda: is_in(thread, outer) and is_in(thread, threading.Event.wait), "it waits")
    assert not is_in(thread, threading.Thread.join)
    go_on.set()
    thread.join(60)
    assert not is_in(thread, outer)


def number(node: ast.expr | None) -> float | None:
    """The number that stands there."""
    value = node.value if isinstance(node, ast.Constant) else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def short_waits(call: ast.Call) -> Iterator[tuple[int, str]]:
    """What a call waits for that a busy machine may not have done by then."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    given = [(keyword.arg or "", keyword.value) for keyword in call.keywords if keyword.arg in DEADLINES]
    if name in ("wait", "join") and call.args:
        given.append((name, call.args[0]))
    for what, value in given:
        seconds = number(value)
        if seconds is not None and 0 < seconds < SHORT_S:
            yield value.lineno, f"{what}: {seconds:g} s end before a busy machine has done it"


def naps(text: str) -> Iterator[str]:
    """The sleeps of a program that stands in a string: Python's, or a shell's."""
    for what in re.finditer(r"(?:\btime\.|(?<![\w.]))sleep[ (]\s*([\d.]+(?:e-?\d+)?)", text):
        if float(what[1].rstrip(".")) < STUCK_S:
            yield f"{what[0]!r} in a program: it cannot be known what has happened by then"


def findings(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file that wait for a time, and what is wrong with that."""
    for node in ast.walk(ast.parse(path.read_text())):
        if (name := getattr(node, "attr", getattr(node, "id", ""))) in ("sleep", "wait_for_timeout"):
            yield node.lineno, f"{name} waits for a time: until(), take() and hang() of tests/support/waiting.py do not"
        if isinstance(node, ast.Call):
            yield from short_waits(node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from ((node.lineno, what) for what in naps(node.value))


def test_nothing_waits_for_a_time() -> None:
    found, used = [], set()
    for path in sorted(TESTS.rglob("*.py")):
        name, lines = str(path.relative_to(TESTS)), path.read_text().splitlines()
        is_simulated = name.startswith("simulation/")  # its time is virtual
        if is_simulated or path in (Path(waiting.__file__), Path(__file__)):
            continue
        for at, what in findings(path):
            place = (name, lines[at - 1].strip())
            used.add(place)
            if place not in MEANT:
                found.append(f"tests/{name}:{at}: {what}")
    assert not found, "\n".join(found)
    assert used == set(MEANT), "a line of the table is not there any more"


@pytest.mark.parametrize(
    "line",
    ["time.sleep(0.1)", "sleep(100)", "Thread(target=time.sleep)", "page.wait_for_timeout(300)", "process.wait(5)",
     "thread.join(0.5)", "f(timeout=9)", "f(1, timeout_s=0.5)", "run('time.sleep(4)')", "run('sleep 0.5; true')",
     "run('exec sleep 5')", 'run(f"import time; time.sleep(1e-3) {x}")'],
)  # fmt: skip
def test_what_waits_for_a_time_is_found(line: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(f"x = 1\n{line}\n")
    assert [at for at, _ in findings(tmp_path / "program.py")] == [2]


@pytest.mark.parametrize(
    "line",
    ["until(ready, 'it')", "hang()", "process.wait()", "process.wait(0)", "process.wait(60)", "thread.join(10)",
     "f(timeout=10)", "f(timeout_s=patience)", "','.join(words)",
     "run('time.sleep(1000)')", "run('sleep 60')", "run('sleep infinity')"],
)  # fmt: skip
def test_what_waits_for_a_condition_is_not(line: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(f"{line}\n")
    assert list(findings(tmp_path / "program.py")) == []
