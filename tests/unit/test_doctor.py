"""`mlflash doctor`: how results become lines, and the command alone on this node."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import needs
import pytest
from click.testing import CliRunner

from mlflash.cli import main
from mlflash.doctor.findings import Diagnosis, Finding, Level, fine, merge, show, warning, wrong

pytestmark = pytest.mark.slow  # a tool beside the engine

MLFLASH = str(Path(sys.executable).with_name("mlflash"))
GIB = 1 << 30


def at(finding: Finding, node: str, rank: int, subject: str = "memory") -> Finding:
    return dataclasses.replace(finding, subject=subject, nodes=(node,), ranks=(rank,))


def test_what_is_the_same_is_one_line_and_numbers_become_ranges() -> None:
    text = "{free_nbytes} free of {kind}"
    lines = merge(
        [
            at(fine("space", text, free_nbytes=3 * GIB, kind="tmpfs"), "a", 0),
            at(warning("clock", "late", "set it"), "a", 0),
            at(fine("space", text, free_nbytes=5 * GIB, kind="tmpfs"), "b", 1),
            at(fine("space", text, free_nbytes=3 * GIB, kind="disk"), "b", 2),
            at(fine("space", text, free_nbytes=3 * GIB, kind="tmpfs"), "b", 2, subject="other"),
            at(wrong("space", "full", "delete"), "c", 3),
        ]
    )
    assert [(line.check, line.fill(line.text), line.nodes, line.ranks) for line in lines] == [
        ("space", "full", ("c",), (3,)),  # the worst of a check first
        ("space", "3 to 5 GiB free of tmpfs", ("a", "b"), (0, 1)),
        ("space", "3 GiB free of disk", ("b",), (2,)),
        ("clock", "late", ("a",), (0,)),
        ("space", "3 GiB free of tmpfs", ("b",), (2,)),
    ]
    assert merge(lines) == lines, "lines of nodes are merged again on rank 0"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("free_nbytes", (GIB, 3 << 20), "1 GiB to 3 MiB"),
        ("saved_gbs", (4.04, 5.5), "4.0 to 5.5 GB/s"),
        ("saved_gbs", (0.012, 0.012), "0.012 GB/s"),
        ("apart_s", (0.5, 0.5), "500 ms"),
        ("ranks", (4.0, 4.0), "4"),
        ("host", "n1", "n1"),
    ],
)
def test_values_have_their_units(name: str, value: str | tuple[float, float], text: str) -> None:
    assert show(name, value) == text


def test_a_line_says_which_nodes_or_ranks_it_is_of() -> None:
    def where(ranks_on: dict[str, tuple[int, ...]], nodes: tuple[str, ...], ranks: tuple[int, ...]) -> str:
        return Diagnosis("", ranks_on, ()).where(Finding("x", Level.OK, "", nodes=nodes, ranks=ranks))

    three = {"a": (0, 1), "b": (2, 3), "c": (4, 5)}
    assert where(three, ("a", "b", "c"), (0, 1, 2, 3, 4, 5)) == "all 3 nodes"
    assert where(three, ("b",), (2, 3)) == "b"
    assert where(three, ("b",), (3,)) == "rank 3 on b"
    assert where(three, ("a", "b"), (1, 2)) == "ranks 1-2"
    assert where({"a": (0, 1)}, ("a",), (0, 1)) == ""
    many = {f"n{number}": (number,) for number in range(70)}
    assert where(many, tuple(many)[:64], tuple(range(64))) == "n0, n1, n2, n3 and 60 more"


# The command


def doctor(*arguments: object, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own: it starts and ends MPI."""
    given = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLASH_", "SLURM_"))}
    done = subprocess.run([MLFLASH, "doctor", *map(str, arguments)], env={**given, "PYTHONWARNINGS": "error", **env},
                          capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL)  # fmt: skip
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def levels(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    return {line["check"]: line["level"] for line in json.loads(done.stdout)["lines"]}


@needs.MPI
def test_alone_it_looks_at_this_node_and_leaves_nothing(shm: Path) -> None:
    done = doctor("--memory", shm, "--need", "1MiB", "--json")
    found = json.loads(done.stdout)
    assert found["well"] and found["errors"] == 0 and found["started"] == "started alone", done.stderr
    assert {"library", "thread level", "world", "space", "cgroup", "RAM", "memlock", "lifetime", "writing", "job",
            "versions", "parity", "GPU", "need", "nodes"} <= levels(done).keys()  # fmt: skip
    assert [list(ranks) for ranks in found["nodes"].values()] == [[0]]
    assert list(shm.iterdir()) == [] and done.stderr == ""


@needs.MPI
def test_for_people_it_prints_a_line_for_each_check(shm: Path) -> None:
    text = doctor("--memory", shm).stdout
    assert text.startswith("1 rank on 1 node, started alone\n\nMPI\nok       library            ")
    assert "no GPU here" in text or "x NVIDIA" in text
    assert text.splitlines()[-1].startswith("0 errors, ")


@needs.MPI
def test_a_job_that_does_not_fit_is_an_error_with_what_to_do(shm: Path) -> None:
    done = doctor("--memory", shm, "--need", "1PB", "--nodes", 2, "--json", code=1)
    (space,) = [line for line in json.loads(done.stdout)["lines"] if line["check"] == "space"]
    assert space["level"] == "error" and space["values"]["need_nbytes"][0] > 4e15 and "remount" in space["advice"]
    assert levels(done)["RAM"] == "error" and levels(done)["library"] == "ok"


@needs.MPI
def test_one_failing_check_leaves_the_others_alone() -> None:
    found = levels(doctor("--memory", "/proc", "--json", code=1))
    assert (found["file system"], found["writing"]) == ("warning", "error")
    assert (found["library"], found["memlock"], found["versions"]) == ("ok", "ok", "ok")


def test_without_an_mpi_library_it_says_how_to_get_one(shm: Path) -> None:
    nowhere = {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
    alone = json.loads(doctor("--memory", shm, "--json", **nowhere).stdout)
    (line,) = [line for line in alone["lines"] if line["check"] == "library"]
    assert line["level"] == "warning" and "mlflash[mpich]" in line["advice"]
    launched = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", **nowhere}
    assert levels(doctor("--memory", shm, "--json", code=1, **launched))["library"] == "error"


@pytest.mark.parametrize(
    "arguments",
    [("--need", "much"), ("--redundancy", "raid"), ("--timeout", "0"), ("--memory", "shm"), ("--nodes", "0")],
)
def test_what_makes_no_sense_is_refused(arguments: tuple[str, ...]) -> None:
    assert CliRunner().invoke(main, ["doctor", *arguments]).exit_code == 2
