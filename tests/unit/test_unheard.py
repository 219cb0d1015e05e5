"""Each place that reads a clock of another node, or takes a program's errors for itself, is listed with its answer.

A run was ended because the clocks of two nodes differed, and a node was called silent while its error was thrown away.
A new place fails here until it has an answer.
"""

from __future__ import annotations

import re
from pathlib import Path

import mlflash

_HOME = Path(mlflash.__file__).parent

# Where the errors of a program that mlflash runs go.
ERRORS = {
    "commands/template.py": "to nobody: it says that mpi4py cannot load MPI",
    "demo/run.py": "to the demo's log, of which a failure shows the end",
    "doctor/couriers.py": "its last words are in the finding",
    "launcher/first_node_guard.py": "its last words are logged, once",
    "launcher/host_agent.py": "to the ranks' own errors, through mlflash run",
    "launcher/on_hosts.py": "its last words are logged, once for each node",
    "launcher/on_slurm.py": "its last words are logged, once",
    "launcher/processes.py": "to callers of ask_within; mpiexec --version is asked for a word, and shows its errors "
                             "again when it starts ranks",
    "launcher/ranks_by_ssh.py": "to the errors of mlflash run, with the node's name",
    "placement/failure_domains.py": "to nobody: without a topology, doctor says that there are no failure domains",
    "wireup/zygote_client.py": "to the trainer's own errors",
}  # fmt: skip
# What is done with the time of day, which differs from node to node.
CLOCKS = {
    "demo/run.py": "one machine",
    "demo/train.py": "one machine",
    "doctor/mpi_checks.py": "clocks are compared, to report how far they differ",
    "draining/drain_queue.py": "a fresh start in an unreadable directory takes its first number from it",
    "draining/file_format.py": "shown; it decides between two runs that took the same number, which one job never has",
    "draining/write_checkpoint.py": "shown",
    "inspection/on_disk.py": "ages are shown; a time in the future is now",
    "launcher/launch_system.py": "shown",
    "launcher/supervisor.py": "parts of an outage in the log of a run",
    "live_monitor/rank_status.py": "ages are shown",
    "memory/inventory.py": "shown",
    "memory/slot.py": "shown",
    "redundancy/protection.py": "shown",
    "saving/commit.py": "shown",
    "telemetry/heartbeat.py": "mlflash run asks only whether it is another one than before; ages are shown",
    "telemetry/recorder.py": "compared with times of the same rank",
}


def found(pattern: str) -> set[str]:
    return {path.relative_to(_HOME).as_posix() for path in _HOME.rglob("*.py") if re.search(pattern, path.read_text())}


def test_each_program_whose_errors_are_taken_has_an_answer() -> None:
    assert found(r"\bstderr\"?[=:] ?subprocess|\bcapture_output=|stderr=(?:log|output)\b") == ERRORS.keys()


def test_each_use_of_the_time_of_day_has_an_answer() -> None:
    assert found(r"\btime\.time(?:_ns)?\(\)") == CLOCKS.keys()


def test_no_program_is_told_to_throw_its_errors_away() -> None:
    assert found(r"stderr=subprocess\.DEVNULL") == set()


def test_each_listener_is_in_the_table_of_guarantees() -> None:
    listens = found(r"\.listen\(|create_server\(")
    adapters = {f"adapters{name.partition('adapters')[2]}" for name in listens if name.startswith("adapters/")}
    page = (Path(__file__).parents[2] / "docs" / "guarantees.md").read_text()
    table = page.partition("### Listeners")[2].partition("###")[0]
    # One only tries whether an address can be listened at.
    assert (listens | adapters) - {"wireup/interfaces.py"} == set(re.findall(r"^\| `([\w/]+\.py)`", table, re.M))
