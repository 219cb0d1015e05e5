"""`mlflash doctor` on several ranks: what it finds, what it says where ranks die or hang, and that it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE_S

from mlflash.launcher.processes import find_mpiexec, mpiexec

MLFLASH = str(Path(sys.executable).with_name("mlflash"))

# The command, after something was changed; `here` is this rank. No speed and no clock is a warning here, as that would
# tell how busy the machine is: tests/unit/test_doctor_checks.py has what is.
PROGRAM = """
import ctypes, os, signal, sys
here = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
from mlflash.commands import doctor
from mlflash.doctor import examination, mpi_ranks, rma, software, transports, watchdog
transports._CLEARLY, transports._AT_MOST_S = float("inf"), 0.2
rma._SLOW_GBS = rma._SLOW_RDMA_GBS = 0
mpi_ranks._SKEW_S = float("inf")
{change}
from mlflash.cli import main
main()
"""
# Others are waited for with patience, but for one check.
HURRY = """
def hurry(self, subject, check, *more, old=examination.Examination._together, **how):
    if check == "failure domains":
        self._timeout_s = self._world.timeout_s = 2
    old(self, subject, check, *more, **how)
examination.Examination._together = hurry
"""
# The checks before this one may take as long as they take.
WATCH_LIBRARY_ONLY = """
class Watch(watchdog.Watch):
    def __init__(self, *given):
        self.given = given
    def doing(self, pending, known):
        if pending.check == "library":
            super().__init__(*self.given)
            super().doing(pending, known)
watchdog.Watch = Watch
"""
# What saves go through is looked at while they do.
SAID = """
from mlflash.checkpointer.checkpointer import Checkpointer
def prepare(self, state, old=Checkpointer.prepare):
    assert self.report()["courier"].startswith("process (pid "), self.report()["courier"]
    old(self, state)
transports.Checkpointer.prepare = prepare
"""


@pytest.fixture(autouse=True)
def nothing_of_mpi_stays() -> Iterator[None]:
    """Delete what MPI left in /dev/shm because its processes were killed; nothing that another test has mapped."""

    def files() -> set[str]:
        return {str(path) for name in ("mpich_shm_*", "sm_segment.*") for path in Path("/dev/shm").glob(name)}

    before = files()
    yield
    left = files() - before
    for maps in Path("/proc").glob("[0-9]*/maps") if left else ():
        try:
            left -= {line.split()[-1] for line in maps.read_text().splitlines() if "/dev/shm/" in line}
        except OSError:  # it ended meanwhile
            continue
    for path in left:
        Path(path).unlink(missing_ok=True)


def environment(memory: Path, per_node: int) -> dict[str, str]:
    given = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLASH_", "SLURM_"))}
    emulated = {"MLFLASH_RANKS_PER_NODE": str(per_node)} if per_node else {}
    return {**given, **emulated, "MLFLASH_MEMORY": str(memory), "PYTHONWARNINGS": "error"}


def run(command: Sequence[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
                          stdin=subprocess.DEVNULL)  # fmt: skip


def examine(memory: Path, ranks: int, *arguments: object, per_node: int = 1, code: int = 0,
            change: str | None = "") -> Any:  # fmt: skip
    """Run the command under mpiexec; its JSON. ``change`` is what is different in the program; None: as installed."""
    line = [MLFLASH] if change is None else [sys.executable, "-c", PROGRAM.format(change=change)]
    done = run(*mpiexec(ranks, [*line, "doctor", "--json", *map(str, arguments)], environment(memory, per_node)))
    assert (done.returncode != 0) == bool(code), f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    # A launcher may print something of its own behind it.
    return json.JSONDecoder().raw_decode(done.stdout[done.stdout.index("{") :])[0]


def lines_of(found: Any, check: str) -> list[Any]:
    return [line for line in found["lines"] if line["check"] == check]


def is_at(found: Any, check: str) -> str:
    (line,) = lines_of(found, check)
    level: str = line["level"]
    return level


@pytest.mark.parametrize(("ranks", "per_node"), [(4, 2), (3, 2)])
def test_all_ranks_are_looked_at_and_nothing_is_left(shm: Path, ranks: int, per_node: int) -> None:
    found = examine(shm, ranks, "--need", "1MiB", per_node=per_node)
    assert (found["well"], found["errors"]) == (True, 0)
    nodes = -(-ranks // per_node)
    assert {name: len(its) for name, its in found["nodes"].items()} == {
        f"node{number}": min(per_node, ranks - number * per_node) for number in range(nodes)
    }
    (library,) = lines_of(found, "library")
    assert (len(library["nodes"]), library["ranks"]) == (nodes, list(range(ranks))), "equal results are one line"
    within, between = lines_of(found, "RMA within a node"), lines_of(found, "RMA between nodes")
    assert len(within) == (per_node > 1) and len(between) == (nodes > 1)
    for line in (*within, *between):
        assert line["values"]["put_gbs"][0] > 0 and "all bytes compared" in line["text"]
    if between:
        assert len(between[0]["nodes"]) == nodes
    (saves,) = lines_of(found, "transport")
    assert saves["level"] == "ok" and saves["text"].endswith("auto takes p2p (one host)")
    assert all(saves["values"][f"{which}_{how}_s"][0] > 0 for which in ("taken", "other") for how in ("waits", "works"))
    assert is_at(found, "nodes") == is_at(found, "world") == is_at(found, "clocks" if nodes > 1 else "nodes") == "ok"
    (wanted,) = lines_of(found, "need")
    assert f"{min(per_node, ranks)} rank" in wanted["text"]
    assert list(shm.iterdir()) == []


def test_two_ranks_of_a_real_node_share_its_memory(shm: Path) -> None:
    found = examine(shm, 2, per_node=0, change=None)
    assert len(found["nodes"]) == 1 and is_at(found, "RMA within a node") in ("ok", "warning")
    assert "1 node by MPI" in lines_of(found, "nodes")[0]["text"]


def test_two_ranks_that_do_not_see_the_same_memory_are_an_error(shm: Path, tmp_path: Path) -> None:
    other = f"if here: os.environ['MLFLASH_MEMORY'] = {str(tmp_path)!r}"
    found = examine(shm, 2, per_node=0, code=1, change=other)
    (line,) = lines_of(found, "nodes")
    assert line["level"] == "error" and "do not see the same" in line["text"] and "rank 1" in line["text"]


def test_of_worlds_of_one_rank_only_the_first_speaks_and_all_fail(shm: Path) -> None:
    env = environment(shm, 0)
    for task in range(2):
        slurm = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(task), "SLURM_NODEID": "0"}
        done = run([MLFLASH, "doctor"], {**env, **slurm})
        assert done.returncode == 1, done.stderr
        if task:
            assert done.stdout == ""
            continue
        flag = {"mpich": "--mpi=pmi2", "openmpi": "--mpi=pmix"}[find_mpiexec()[1]]
        assert "srun started 2 tasks, but each is alone in its MPI world" in done.stdout
        assert f"start with srun {flag}" in done.stdout
        assert "XXH3-64" in done.stdout, "the other checks are made all the same"


def test_a_check_that_raises_on_one_rank_is_a_line_of_that_rank(shm: Path) -> None:
    change = "if here == 1: software.checksums = lambda: 1 / 0"
    found = examine(shm, 2, per_node=2, code=1, change=change)
    bad, good = lines_of(found, "checksums")
    assert (bad["level"], bad["ranks"], good["level"], good["ranks"]) == ("error", [1], "ok", [0])
    assert bad["text"] == "ZeroDivisionError: division by zero"
    assert is_at(found, "RMA within a node") == is_at(found, "library") == "ok"


def test_what_mpi_refuses_is_an_error_on_all_ranks(shm: Path) -> None:
    found = examine(
        shm, 2, code=1, change="def refuse(self): raise RuntimeError('MPI_ERR_WIN')\nrma.Trial._open = refuse"
    )
    (line,) = lines_of(found, "RMA between nodes")
    assert line["level"] == "error" and "MPI_ERR_WIN" in line["text"] and "p2p" in line["advice"]
    assert is_at(found, "library") == "ok"


def test_bytes_that_arrive_changed_are_an_error(shm: Path) -> None:
    found = examine(
        shm, 2, code=1, change="if here == 1: rma.pattern = lambda rank, nbytes, old=rma.pattern: old(rank + 1, nbytes)"
    )
    assert [line["level"] for line in lines_of(found, "RMA between nodes")] == ["error"]


@pytest.mark.skipif(os.environ.get("MLFLASH_TEST_MPI") == "openmpi", reason="couriers need MPICH: no PMI-1 otherwise")
def test_saves_go_through_processes_where_a_job_has_them(shm: Path) -> None:
    change = 'os.environ["MLFLASH_COURIER"] = "process"'
    found = examine(shm, 2, change=change + "\n" + SAID)
    (saves,) = lines_of(found, "transport")
    assert saves["level"] == "ok" and "p2p" in saves["text"], saves
    (kind,) = lines_of(found, "courier")
    assert "a process for each trainer (MLFLASH_COURIER=process)" in kind["text"]
    assert len(lines_of(found, "courier cores")) == 1
    assert list(shm.iterdir()) == []


def test_the_transport_that_is_clearly_faster_is_named(shm: Path) -> None:
    measured = """
def measured(world, memory, transport, *more):
    return transports.Measured(*({"p2p": (0.2, 0.4), "rma": (0.1, 0.2)}[transport]))
transports.measure, transports._CLEARLY = measured, 1.25
"""
    found = examine(shm, 2, code=0, change=measured)
    (line,) = lines_of(found, "transport")
    assert (
        line["level"] == "warning" and line["advice"] == "set MLFLASH_TRANSPORT=rma: rma was 2.0 times as fast here"
    ), line
    assert list(shm.iterdir()) == []


@pytest.mark.in_thread
def test_a_transport_that_does_not_work_is_an_error_and_nothing_is_left(shm: Path) -> None:
    refuse = """
from mlflash.mpi import rma_windows
def refuse(self, *given): raise RuntimeError("MPI_ERR_RMA_SYNC")
rma_windows.OpenMemory.put = refuse
"""
    found = examine(shm, 2, code=1, change=refuse)
    (line,) = lines_of(found, "transport")
    assert line["level"] == "error" and "MPI_ERR_RMA_SYNC" in line["text"] and "p2p" in line["advice"], line
    assert list(shm.iterdir()) == []


@pytest.mark.parametrize(
    "hang",
    [
        pytest.param("os.kill(os.getpid(), signal.SIGSTOP)", id="stopped"),
        pytest.param("signal.pause()", id="asleep"),
    ],
)
def test_a_rank_that_hangs_is_named_in_time(shm: Path, hang: str) -> None:
    change = f"{HURRY}\nif here == 1: mpi_ranks.domains = lambda *_: {hang}"
    # Any other wait would outlast the test, and so would the watch.
    found = examine(shm, 2, "--timeout", 1000, code=1, change=change)
    (line,) = lines_of(found, "failure domains")
    assert line["level"] == "error" and line["text"].startswith("waited 2 s for rank 1 on node1")
    assert len(lines_of(found, "library")[0]["nodes"]) == 2, "what was found before is there, of all ranks"
    assert lines_of(found, "RMA between nodes") == []


@pytest.mark.parametrize(
    ("end", "text"),
    [
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", "this check ended the process", id="killed"),
        pytest.param(
            "ctypes.PyDLL(None).sleep(1000)", "this check did not end within 3 s", id="hangs, nor lets Python run"
        ),
    ],
)
def test_where_the_process_that_prints_ends_its_child_prints(shm: Path, end: str, text: str) -> None:
    change = f"{WATCH_LIBRARY_ONLY}\ndoctor._GRACE_S = 2\nmpi_ranks.library = lambda mpi: {end}"
    program = PROGRAM.format(change=change)
    done = run([sys.executable, "-c", program, "doctor", "--json", "--timeout", "1"], environment(shm, 0))
    assert done.returncode == -9, done.stderr
    found = json.loads(done.stdout)
    (line,) = lines_of(found, "library")
    assert line["level"] == "error" and line["text"].startswith(text)
    assert is_at(found, "checksums") == "ok", "what was found before is there"


@pytest.mark.skipif(find_mpiexec()[1] != "mpich", reason="this is how MPICH fails to start")
def test_where_mpi_ends_the_process_when_it_starts_the_rest_is_said(shm: Path) -> None:
    env = {**environment(shm, 0), "PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": "77"}
    done = run([MLFLASH, "doctor", "--json"], env)
    assert done.returncode != 0
    found = json.loads(done.stdout)
    (line,) = lines_of(found, "start")
    assert line["level"] == "error" and "srun --mpi=list" in line["advice"]
    assert is_at(found, "versions") == is_at(found, "writing") == "ok"


def test_a_full_memory_file_system_is_an_error(small_memory: Callable[[int], Path]) -> None:
    found = examine(small_memory(8 << 20), 2, "--need", "3MiB", per_node=2, code=1)
    assert is_at(found, "writing") == is_at(found, "space") == "error"
    assert "No space left on device" in lines_of(found, "writing")[0]["text"]
    assert is_at(found, "RMA within a node") == "ok", "with less than it takes elsewhere"


def test_a_limit_of_a_cgroup_is_compared(small_cgroup: Callable[[int], Path], shm: Path) -> None:
    group = small_cgroup(600 << 20)
    into = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    done = run([*into, MLFLASH, "doctor", "--json", "--need", "300MiB", "--nodes", "2"], environment(shm, 0))
    assert done.returncode == 1, done.stderr
    (line,) = lines_of(json.loads(done.stdout), "cgroup")
    assert line["level"] == "error" and line["values"]["left_nbytes"][0] < 600 << 20
