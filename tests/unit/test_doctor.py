"""What `mlflash doctor` makes of what it reads, and the command alone on this node."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import needs
import pytest
from click.testing import CliRunner

from mlflash.cli import main
from mlflash.doctor import launch_environment, watchdog
from mlflash.doctor.findings import Diagnosis, Finding, Level, fine, merge, show, warning, wrong
from mlflash.doctor.launch_environment import Launch

pytestmark = pytest.mark.slow  # a tool beside the engine

MLFLASH = str(Path(sys.executable).with_name("mlflash"))
GIB = 1 << 30


def at(finding: Finding, node: str, rank: int, subject: str = "memory") -> Finding:
    import dataclasses

    return dataclasses.replace(finding, subject=subject, nodes=(node,), ranks=(rank,))


# Findings


def test_what_is_the_same_is_one_line_and_numbers_become_ranges() -> None:
    text = "{free_nbytes} free"
    lines = merge(
        [
            at(fine("space", text, free_nbytes=3 * GIB), "a", 0),
            at(warning("clock", "late", "set it"), "a", 0),
            at(fine("space", text, free_nbytes=5 * GIB), "b", 1),
            at(fine("space", text, free_nbytes=3 * GIB), "b", 2, subject="other"),
            at(wrong("space", "full", "delete"), "c", 3),
        ]
    )
    assert [(line.check, line.words, line.nodes, line.ranks) for line in lines] == [
        ("space", "full", ("c",), (3,)),  # the worst of a check first
        ("space", "3 to 5 GiB free", ("a", "b"), (0, 1)),
        ("clock", "late", ("a",), (0,)),
        ("space", "3 GiB free", ("b",), (2,)),
    ]
    assert merge(lines) == lines, "lines of nodes are merged again on rank 0"


def test_other_words_are_other_lines() -> None:
    lines = merge([at(fine("library", "{version}", version=v), n, r) for v, n, r in (("1", "a", 0), ("2", "b", 1))])
    assert [line.words for line in lines] == ["1", "2"]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("free_nbytes", (GIB, GIB), "1 GiB"),
        ("free_nbytes", (GIB, 3 << 20), "1 GiB to 3 MiB"),
        ("put_gbs", (4.04, 5.5), "4.0 to 5.5 GB/s"),
        ("put_gbs", (0.012, 0.012), "0.012 GB/s"),
        ("apart_s", (0.5, 0.5), "500 ms"),
        ("ranks", (4.0, 4.0), "4"),
        ("host", "n1", "n1"),
    ],
)
def test_values_have_their_units(name: str, value: str | tuple[float, float], text: str) -> None:
    assert show(name, value) == text


def test_a_line_says_which_nodes_or_ranks_it_is_of() -> None:
    found = Diagnosis("", {"a": (0, 1), "b": (2, 3), "c": (4, 5)}, ())

    def where(nodes: tuple[str, ...], ranks_: tuple[int, ...]) -> str:
        return found.where(Finding("x", Level.OK, "", nodes=nodes, ranks=ranks_))

    assert where((), ()) == ""
    assert where(("a", "b", "c"), ()) == where(("a", "b", "c"), (0, 1, 2, 3, 4, 5)) == "all 3 nodes"
    assert where(("b",), ()) == where(("b",), (2, 3)) == "b"
    assert where(("b",), (3,)) == "rank 3 on b"
    assert where(("a", "b"), (1, 2)) == "ranks 1-2"
    many = Diagnosis("", {f"n{i}": (i,) for i in range(70)}, ())
    line = Finding("x", Level.OK, "", nodes=tuple(many.ranks_on)[:64])
    assert many.where(line) == "n0, n1, n2, n3 and 60 more nodes"
    assert Diagnosis("", {"a": (0, 1)}, ()).where(Finding("x", Level.OK, "", nodes=("a",), ranks=(0, 1))) == ""


# Who started what


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, Launch("", 0, None)),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, Launch("", 0, None)),  # a batch script
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}, Launch("srun", 3, 4)),
        (
            {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "PMI_RANK": "3", "PMI_SIZE": "4"},
            Launch("srun", 3, 4),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, Launch("mpiexec", 1, 2)),
        ({"RANK": "3", "WORLD_SIZE": "4"}, Launch("torchrun", 3, 4)),
        (
            {
                "RANK": "3",
                "WORLD_SIZE": "4",
                "TORCHELASTIC_RUN_ID": "x",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_PROCID": "1",
            },
            Launch("torchrun", 3, 4),
        ),
        # mpiexec inside a job: its daemons are the tasks of the step.
        (
            {
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_PROCID": "1",
                "HYDI_CONTROL_FD": "9",
                "PMI_RANK": "5",
                "PMI_SIZE": "8",
            },
            Launch("mpiexec", 5, 8),
        ),
        (
            {
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_PROCID": "1",
                "OMPI_COMM_WORLD_RANK": "5",
                "OMPI_COMM_WORLD_SIZE": "8",
            },
            Launch("mpiexec", 5, 8),
        ),
    ],
)
def test_the_launcher_is_known_by_its_environment(env: dict[str, str], expected: Launch) -> None:
    assert launch_environment.read(env) == expected


@pytest.mark.parametrize(
    ("said", "name", "flag"),
    [
        ("MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25", "MPICH 5.0.2", "--mpi=pmi2"),
        ("Open MPI v5.0.11, package: Open MPI user@localhost\0", "Open MPI v5.0.11", "--mpi=pmix"),
        (
            "MPI VERSION    : CRAY MPICH version 8.1.27.26 (ANL base 3.4a2)\n",
            "CRAY MPICH 8.1.27.26",
            "--mpi=cray_shasta",
        ),
        ("Intel(R) MPI Library 2021.18 for Linux* OS\n", "Intel", "--mpi=pmi2, with I_MPI_PMI_LIBRARY"),
        ("MVAPICH Version:\t4.0\nMVAPICH Release date", "MVAPICH 4.0", "--mpi=pmi2"),
    ],
)
def test_each_mpi_has_its_flag(said: str, name: str, flag: str) -> None:
    assert launch_environment.tidy_version(said).startswith(name)
    assert launch_environment.mpi_flag(launch_environment.tidy_version(said)).startswith(flag)


@pytest.mark.parametrize(
    ("started", "size", "level", "text"),
    [
        (Launch("", 0, None), 1, Level.OK, "1 rank, because this process was started alone"),
        (Launch("srun", 0, 4), 4, Level.OK, "4 ranks, as SLURM_STEP_NUM_TASKS says"),
        (Launch("mpiexec", 0, 4), 4, Level.OK, "4 ranks, as mpiexec says"),
        (Launch("mpiexec", 0, None), 4, Level.OK, "4 ranks"),
        (Launch("srun", 0, 4), 1, Level.ERROR, "srun started 4 tasks, but each is alone in its MPI world"),
        (Launch("mpiexec", 0, 4), 1, Level.ERROR, "mpiexec started 4 processes, but each is alone in its MPI world"),
        (Launch("srun", 0, 4), 2, Level.WARNING, "2 ranks, but SLURM_STEP_NUM_TASKS says 4"),
        (Launch("torchrun", 0, 4), 1, Level.ERROR, "WORLD_SIZE says 4 ranks, but each is alone in its MPI world"),
    ],
)
def test_a_world_of_another_size_is_an_error(started: Launch, size: int, level: Level, text: str) -> None:
    found = launch_environment.judge_size(started, size, "Open MPI v5.0.11")
    assert (found.level, found.words.startswith(text)) == (level, True), found
    if level is Level.ERROR:
        assert ("srun --mpi=pmix" in found.remedy) == (started.by == "srun") and "Open MPI v5.0.11" in found.remedy
        meets = launch_environment.judge_size(started, size, "MPICH 5.0.2", "MASTER_ADDR and MASTER_PORT")
        assert meets.level is Level.OK
        assert meets.words == "4 ranks, which meet by MASTER_ADDR and MASTER_PORT; this command looks at this node only"


# The watch


def listen(speak: Callable[[Any], None], patience_s: float = 30) -> list[Diagnosis]:
    heard, speaker = multiprocessing.Pipe(duplex=False)
    shown: list[Diagnosis] = []
    speak(speaker)
    watchdog.stand_by(heard, 0, patience_s, shown.append)
    heard.close()
    speaker.close()
    return shown


def test_the_child_prints_only_without_a_farewell() -> None:
    known = Diagnosis("alone", {"a": (0,)}, (fine("x", "y"),))
    pending = wrong("start", "", "do this")

    def farewell(speaker: Any) -> None:
        speaker.send((pending, known))
        speaker.send(None)

    def die(speaker: Any) -> None:
        speaker.send((pending, known))
        speaker.close()

    assert listen(farewell) == []
    (found,) = listen(die)
    assert [line.check for line in found.lines] == ["x", "start"] and not found.is_well
    assert found.lines[-1].words.startswith("this check ended the process") and found.lines[-1].advice == "do this"


def test_the_child_prints_what_takes_too_long(capsys: pytest.CaptureFixture[str]) -> None:
    pending = wrong("start", "", "do this")
    (found,) = listen(lambda speaker: speaker.send((pending, Diagnosis("alone", {}, ()))), 0.05)
    assert found.lines[-1].words.startswith("this check did not end within 0.05 s")
    assert listen(lambda speaker: speaker.send((pending, None)), 0.05) == []  # all was printed before
    assert "start: this check did not end within" in capsys.readouterr().err


def test_a_child_that_hangs_does_not_keep_the_doctor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hung = tmp_path / "python"
    hung.write_text("#!/bin/sh\nexec sleep 1000\n")
    hung.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(hung))
    watching = watchdog.Watch(True, False, 0.2)
    child = watching._child
    watching.over()
    assert child is not None and child.wait(30) == -9


# The command


def doctor(*arguments: object, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own: it starts and ends MPI."""
    given = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLASH_", "SLURM_"))}
    done = subprocess.run([MLFLASH, "doctor", *map(str, arguments)], env={**given, "PYTHONWARNINGS": "error", **env},
                          capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)  # fmt: skip
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def levels(document: dict[str, Any]) -> dict[str, str]:
    return {line["check"]: line["level"] for line in document["lines"]}


@needs.MPI
def test_alone_it_looks_at_this_node_and_leaves_nothing(shm: Path) -> None:
    done = doctor("--memory", shm, "--need", "1MiB", "--json")
    found = json.loads(done.stdout)
    assert found["well"] and found["errors"] == 0 and found["started"] == "started alone", done.stderr
    assert {"library", "thread level", "world", "RMA", "space", "cgroup", "memlock", "lifetime", "writing", "job",
            "versions", "checksums", "parity", "threads", "GPU", "need"} <= levels(found).keys()  # fmt: skip
    assert [list(ranks_) for ranks_ in found["nodes"].values()] == [[0]]
    assert list(shm.iterdir()) == [] and done.stderr == ""


@needs.MPI
def test_for_people_it_prints_a_line_for_each_check(shm: Path) -> None:
    text = doctor("--memory", shm).stdout
    assert text.startswith("1 rank on 1 node, started alone\n\nMPI\nok       library            ")
    assert "no GPU here" in text or "x NVIDIA" in text
    assert text.splitlines()[-1].startswith("0 errors, ")


@needs.MPI
def test_a_job_that_does_not_fit_is_an_error_with_what_to_do(shm: Path) -> None:
    found = json.loads(doctor("--memory", shm, "--need", "1PB", "--nodes", 2, "--json", code=1).stdout)
    (space,) = [line for line in found["lines"] if line["check"] == "space"]
    assert space["level"] == "error" and space["values"]["need_nbytes"][0] > 4e15 and "remount" in space["advice"]
    assert levels(found)["RAM"] == "error" and levels(found)["library"] == "ok"


@needs.MPI
def test_one_failing_check_leaves_the_others_alone() -> None:
    found = json.loads(doctor("--memory", "/proc", "--json", code=1).stdout)
    is_at = levels(found)
    assert (is_at["file system"], is_at["writing"], is_at["RMA"]) == ("warning", "error", "error")
    assert (is_at["library"], is_at["memlock"], is_at["versions"]) == ("ok", "ok", "ok")


def test_without_an_mpi_library_it_says_how_to_get_one(shm: Path) -> None:
    alone = json.loads(doctor("--memory", shm, "--json", MPI4PY_LIBMPI="/nowhere/libmpi.so").stdout)
    (line,) = [line for line in alone["lines"] if line["subject"] == "MPI"]
    assert line["level"] == "warning" and "mlflash[mpich]" in line["advice"]
    launched = doctor("--memory", shm, "--json", code=1, MPI4PY_LIBMPI="/nowhere/libmpi.so",
                      SLURM_STEP_NUM_TASKS="2", SLURM_PROCID="0")  # fmt: skip
    assert levels(json.loads(launched.stdout))["library"] == "error"


@pytest.mark.parametrize(
    "arguments",
    [("--need", "much"), ("--redundancy", "raid"), ("--timeout", "0"), ("--memory", "shm"), ("--nodes", "0")],
)
def test_what_makes_no_sense_is_refused(arguments: tuple[str, ...]) -> None:
    assert CliRunner().invoke(main, ["doctor", *arguments]).exit_code == 2
