"""`mlflash doctor` on several ranks: what it finds, what it says where ranks die or hang, and that it ends."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import SUPPORT, remove_segments, segments
from processes import plain_environment, ran

from mlflash.run.processes import mpiexec

MLFLASH = str(Path(sys.executable).with_name("mlflash"))

# The command, after something was changed; `here` is this rank. No speed and no clock is a warning here, as that would
# tell how busy the machine is: tests/unit/tools/test_doctor.py has what is.
PROGRAM = """
import ctypes, os, signal, sys
here = int(os.environ.get("PMI_RANK", "0"))
from mlflash.tools import doctor, doctor_checks, doctor_findings
doctor_checks._SLOW_GBS = doctor_checks._SLOW_RDMA_GBS = 0
doctor_checks._SKEW_S = float("inf")
def put(subject, name, check):
    checks = getattr(doctor, name)
    new = tuple(check if old.__name__ == check.__name__ else old for old in checks[subject])
    assert new != checks[subject]
    checks[subject] = new
{change}
from mlflash.cli import main
main()
"""
# A check of all ranks that is not patient, and in which rank 1 does something else.
HURRY = """
def clocks(context, old=doctor_checks.clocks):
    context.world.timeout_s = 2
    context.world.start_job(doctor.raise_deadline)
    if here == 1:
        {hang}
    return list(old(context))
put("MPI", "_CHECKS_OF_ALL_RANKS", clocks)
"""
# The checks before this one may take as long as they take.
WATCH_PARITY_ONLY = """
class Watch(doctor_findings.Watch):
    def __init__(self, *given):
        self.given, self._child = given, None
    def begin(self, pending, known):
        if pending.check == "parity":
            super().__init__(*self.given)
            super().begin(pending, known)
doctor.Watch, doctor_findings._GRACE_S = Watch, 2
def parity(context):
    {end}
put("software", "_CHECKS", parity)
"""


@pytest.fixture(autouse=True)
def nothing_of_mpi_stays() -> Iterator[None]:
    """Delete what MPI left in /dev/shm because its processes were killed; nothing that another test has mapped."""

    before = segments()
    yield
    remove_segments(before)


def examine(memory: Path, ranks: int, *words: object, per_node: int = 1, well: bool = True, change: str = "") -> Any:
    """Run the command under mpiexec; its JSON. ``change`` is what is different in the program."""
    line = [sys.executable, "-c", PROGRAM.format(change=change), "doctor", "--json", *map(str, words)]
    env = plain_environment(MLFLASH_MEMORY=memory, PYTHONWARNINGS="error", RANKS_PER_NODE=per_node,
                            PYTHONPATH=os.environ["PYTHONPATH"])  # fmt: skip
    command, env = mpiexec(ranks, [sys.executable, str(SUPPORT / "on_node.py"), *line] if per_node else line, env)
    printed = ran(*command, env=env, code=0 if well else None).stdout
    # A launcher may print something of its own behind it.
    return json.JSONDecoder().raw_decode(printed[printed.index("{") :])[0]


def lines_of(found: Any, check: str) -> list[Any]:
    return [line for line in found["lines"] if line["check"] == check]


def is_at(found: Any, check: str) -> str:
    (line,) = lines_of(found, check)
    return str(line["level"])


def test_all_ranks_are_looked_at_and_nothing_is_left(shm: Path) -> None:
    found = examine(shm, 3, "--need", "1MiB", per_node=2)
    assert (found["well"], found["errors"]) == (True, 0)
    assert {name: len(ranks) for name, ranks in found["nodes"].items()} == {"node0": 2, "node1": 1}
    (library,) = lines_of(found, "library")
    assert (library["nodes"], library["ranks"]) == (["node0", "node1"], [0, 1, 2]), "equal results are one line"
    (network,) = lines_of(found, "network")
    assert network["level"] == "ok" and "by p2p (one host)" in network["text"] and len(network["nodes"]) == 2
    assert network["values"]["saved_gbs"][0] > 0
    assert is_at(found, "nodes") == is_at(found, "world") == is_at(found, "clocks") == "ok"
    assert "2 ranks" in lines_of(found, "need")[0]["text"]
    assert [list(node.iterdir()) for node in shm.iterdir()] == [[], []]


def test_two_ranks_that_do_not_see_the_same_memory_are_an_error(shm: Path, tmp_path: Path) -> None:
    other = f"if here: os.environ['MLFLASH_MEMORY'] = {str(tmp_path)!r}"
    found = examine(shm, 2, per_node=0, well=False, change=other)
    for line in lines_of(found, "nodes"):
        assert line["level"] == "error" and "do not see the same" in line["text"] and "rank 1" in line["text"]


def test_of_worlds_of_one_rank_only_the_first_speaks_and_all_fail(shm: Path) -> None:
    for task in range(2):
        slurm = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(task), "SLURM_NODEID": "0"}
        printed = ran(MLFLASH, "doctor", code=1, MLFLASH_MEMORY=shm, PYTHONWARNINGS="error", **slurm).stdout
        if task:
            assert printed == ""
            continue
        assert "srun started 2 processes, but each is alone in its MPI world" in printed
        assert "start with srun --mpi=pmi2" in printed
        assert "computed by" in printed, "the other checks are made all the same"


def test_a_broken_transport_is_an_error_and_leaves_nothing(shm: Path) -> None:
    refuse = f"""
sys.path.append({str(SUPPORT)!r})
import in_couriers
in_couriers.reach_into_couriers()
os.environ.update(MLFLASH_TRANSPORT="rma", MLFLASH_TEST_REPLACED="put_fails", PYTHONPATH={str(SUPPORT)!r})
"""
    found = examine(shm, 2, well=False, change=refuse)
    (line,) = lines_of(found, "network")
    assert line["level"] == "error" and "MPI_ERR_RMA_SYNC" in line["text"] and "p2p" in line["advice"], line
    assert [list(node.iterdir()) for node in shm.iterdir()] == [[], []]


@pytest.mark.parametrize("hang", ["os.kill(os.getpid(), signal.SIGSTOP)", "signal.pause()"], ids=["stopped", "asleep"])
def test_a_rank_that_hangs_is_named_in_time(shm: Path, hang: str) -> None:
    # Any other wait would outlast the test, and so would the watch.
    found = examine(shm, 2, "--timeout", 1000, well=False, change=HURRY.format(hang=hang))
    (line,) = lines_of(found, "clocks")
    assert line["level"] == "error" and "for rank 1 on node1" in line["text"]
    assert len(lines_of(found, "library")[0]["nodes"]) == 2, "what was found before is there, of all ranks"
    assert lines_of(found, "network") == []


@pytest.mark.parametrize(("end", "text"), [
    pytest.param("os.kill(os.getpid(), signal.SIGKILL)", "this check ended the process", id="killed"),
    pytest.param("ctypes.PyDLL(None).sleep(1000)", "this check did not end within 3 s", id="hangs"),
])  # fmt: skip
def test_where_the_process_that_prints_ends_its_child_prints(shm: Path, end: str, text: str) -> None:
    program = PROGRAM.format(change=WATCH_PARITY_ONLY.format(end=end))
    words = [sys.executable, "-c", program, "doctor", "--json", "--timeout", "1"]
    found = json.loads(ran(*words, code=-9, MLFLASH_MEMORY=shm, PYTHONWARNINGS="error").stdout)
    (line,) = lines_of(found, "parity")
    assert line["level"] == "error" and line["text"].startswith(text) and not found["well"]
    assert is_at(found, "versions") == "ok", "what was found before is there"
