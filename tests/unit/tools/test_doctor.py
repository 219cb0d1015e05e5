"""`mlflash doctor`: what checks make of what they read, how results become lines, and the command on this node."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import needs
import pytest
from click.testing import CliRunner

from mlflash.cli import main
from mlflash.config import SlotCounts, from_environment
from mlflash.launch.launcher_variables import Launched, launched
from mlflash.memory.memory_limits import headroom
from mlflash.placement.topology import Node
from mlflash.run.launch_systems import LaunchFailed
from mlflash.tools import doctor_checks, plan
from mlflash.tools.doctor_findings import Context, Diagnosis, Finding, Level, fine, merge, warning, wrong

pytestmark = pytest.mark.slow  # a tool beside the engine

MLFLASH = str(Path(sys.executable).with_name("mlflash"))
GIB = 1 << 30
SPARE = 64 << 20  # what must stay free when so much is allocated
OK, NOTE, WARNING, ERROR = Level

# /dev/shm is mounted twice, the second time over the first; a directory with a blank in its name.
MOUNTINFO = r"""24 27 0:6 / /dev rw,relatime - devtmpfs devtmpfs rw,size=12334492k,nr_inodes=3083623,mode=755
25 24 0:23 / /dev/shm rw,relatime - tmpfs tmpfs rw,size=24684092k
26 24 0:24 / /dev/pts rw,relatime - devpts devpts rw,mode=600,ptmxmode=000
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard,resv_strict
30 25 0:27 / /dev/shm rw,relatime - tmpfs tmpfs rw,size=24684092k
31 23 0:28 / /mnt/my\040disk rw,relatime master:1 propagate_from:2 - xfs /dev/vdb rw
"""
# Of a step under job_container/tmpfs: a tmpfs without a size of its own, in a mount namespace of the job.
IN_A_JOB = """500 499 259:2 / / rw,relatime - ext4 /dev/nvme0n1p2 rw
510 500 0:5 / /dev rw,nosuid - devtmpfs udev rw,size=131072k,mode=755
530 510 0:151 / /dev/shm rw,relatime - tmpfs tmpfs rw
"""
# Lines of Slurm 22.05, and of 23.11.
CONFIG = """Configuration data as of 2025-11-22T03:25:12
AccountingStorageType   = accounting_storage/none
Epilog                  = (null)
EpilogMsgTime           = 2000 usec
JobContainerType        = job_container/none
TaskEpilog              = (null)

Slurmctld(primary) at head is UP
"""
NEWER_CONFIG = """Configuration data as of 2025-11-22T03:25:12
Epilog[0]               = {0}/epilog.sh
Epilog[1]               = {0}/epilog.d/*
JobContainerType        = job_container/tmpfs
TaskEpilog              =
"""
Check = Callable[[Context], Iterable[Finding]]


def context(env: dict[str, str] | None = None, memory: str = "/dev/shm", **more: Any) -> Context:
    env = env or {}
    return Context(from_environment(env, None, job="any", memory=memory), env, launched(env), **more)


def results(check: Check, *arguments: Any, **more: Any) -> list[tuple[Level, str, str]]:
    return [(found.level, found.fill(found.text), found.fill(found.advice)) for found in check(*arguments, **more)]


def result(finding: Finding) -> tuple[Level, str, str]:
    ((level, text, advice),) = results(lambda: [finding])
    assert bool(advice) == (level > NOTE), "advice, if something is wrong"
    return level, text, advice


# Memory


@pytest.mark.parametrize(
    ("own", "init", "mark", "env", "level", "text"),
    [
        (MOUNTINFO, MOUNTINFO, "", {}, OK, "/dev/shm is that of the node: it outlives job steps and jobs"),
        (MOUNTINFO, MOUNTINFO, "", {"APPTAINER_CONTAINER": "/x.sif"}, OK, "/dev/shm is that of the node"),
        (MOUNTINFO, MOUNTINFO, ".dockerenv", {}, NOTE, "that of this container; unknown whether"),
        (MOUNTINFO, "", "", {}, NOTE, "unknown whether"),
        (IN_A_JOB, MOUNTINFO, "", {"SLURM_JOB_ID": "71"}, WARNING, "it outlives a job step, but not the job"),
        (IN_A_JOB, MOUNTINFO, "run/.containerenv", {"SLURM_JOB_ID": "71"}, WARNING, "job step, but not the job"),
        (IN_A_JOB, MOUNTINFO, "", {"APPTAINER_CONTAINER": "x", "SLURM_JOB_ID": "71"}, WARNING, "this container and"),
        (IN_A_JOB, MOUNTINFO, "", {}, WARNING, "a private mount namespace"),
    ],
)
def test_whether_memory_outlives_a_step_and_a_job(
    own: str, init: str, mark: str, env: dict[str, str], level: Level, text: str, tmp_path: Path
) -> None:
    for pid, mountinfo in (("self", own), ("1", init)):
        (tmp_path / "proc" / pid).mkdir(parents=True)
        if mountinfo:
            (tmp_path / "proc" / pid / "mountinfo").write_text(mountinfo)
    if mark:
        (tmp_path / mark).parent.mkdir(exist_ok=True)
        (tmp_path / mark).touch()
    ((found, words, advice),) = results(doctor_checks.lifetime, context(env, root=str(tmp_path)))
    assert found == level and text in words and bool(advice) == (level is WARNING)
    ((kind, words, _),) = results(doctor_checks.file_system, context(env, "/home", root=str(tmp_path)))
    assert kind is WARNING and words == "/home is ext4, which is not memory"


def test_a_logout_that_deletes_shared_memory_is_worth_a_warning(tmp_path: Path) -> None:
    def levels(memory: str = "/dev/shm", uid: int = 1000) -> list[Level]:
        return [found.level for found in doctor_checks.logout(context(memory=memory, uid=uid, root=str(tmp_path)))]

    assert levels() == [], "no logind, no word"
    (tmp_path / "run/systemd/users").mkdir(parents=True)
    assert (levels(), levels(uid=0), levels("/mnt/x")) == ([WARNING], [OK], [])
    conf = tmp_path / "etc/systemd/logind.conf"
    own = tmp_path / "etc/systemd/logind.conf.d/10-site.conf"
    own.parent.mkdir(parents=True)
    for file, text, level in (
        (conf, "[Login]\n#RemoveIPC=no\n", OK),  # as Red Hat ships it
        (conf, "[Login]\n#RemoveIPC=no\nRemoveIPC=yes\n", WARNING),
        (own, "[Login]\nRemoveIPC = no\n", OK),
    ):
        file.write_text(text)
        assert levels() == [level]


@pytest.mark.parametrize(
    ("check", "left", "held", "need", "level"),
    [
        ("space", 90 * GIB, 0, None, OK),
        ("space", 90 * GIB + SPARE, 0, 90 * GIB, OK),
        ("space", 90 * GIB + SPARE, 5 * GIB, 95 * GIB, WARNING),
        ("space", 90 * GIB + SPARE - 1, 5 * GIB, 95 * GIB, ERROR),
        ("cgroup", 100 * GIB + SPARE, 0, None, OK),
        ("cgroup", 100 * GIB + SPARE, 0, 70 * GIB, OK),
        ("cgroup", 100 * GIB + SPARE, 0, 90 * GIB, WARNING),
        ("RAM", 100 * GIB + SPARE, 0, 101 * GIB, ERROR),
    ],
)
def test_what_is_left_against_what_the_job_takes(
    check: str, left: int, held: int, need: int | None, level: Level
) -> None:
    found, text, _ = result(doctor_checks.judge_room(check, left, held, need))
    assert found == level and ("the job takes" in text) == (need is not None) and ("held by" in text) == (held > 0)


def test_writing_leaves_nothing_and_a_directory_that_is_not_private_is_named(shm: Path) -> None:
    own = shm / f"mlflash-{os.getuid()}"

    def found() -> list[tuple[Level, str]]:
        return [(level, text) for level, text, _ in results(doctor_checks.writing, context(memory=str(shm)))]

    written = OK, "16 MiB can be written"
    assert found() == [written] and list(shm.iterdir()) == []
    own.mkdir(mode=0o755)
    ((level, text), last) = found()
    assert (level, last) == (ERROR, written) and "not a private directory" in text
    own.rmdir()
    own.write_text("somebody's")
    ((level, text), last) = found()
    assert (level, last) == (WARNING, written) and f"{own} does not belong to this user: -rw-" in text


def test_what_a_job_takes_is_what_plan_says() -> None:
    need, words = doctor_checks.count_need(
        context({"MLFLASH_REDUNDANCY": "xor:4"}, nbytes=GIB, slots=SlotCounts(3, 2, 0), nodes=4, ranks_per_node=8)
    )
    job = plan.Job(("a", "b", "c", "d"), 8, GIB, own_slots=3)
    ((scheme, placed),), _ = plan.consider(job, ["xor:4"])
    planned = plan.scheme_costs(job, scheme, placed, 1, None)
    assert need == planned.memory_nbytes > 24 * GIB and headroom(need) == planned.spare_nbytes == SPARE
    assert words == "8 ranks of 1 GiB, 3 slots each, xor:4 over 4 nodes"
    assert "protects nothing on one node" in doctor_checks.count_need(context(nbytes=GIB))[1]


# Slurm


def test_slurms_configuration_is_read_in_both_forms(tmp_path: Path) -> None:
    assert {level for level, *_ in results(doctor_checks.judge_configuration, CONFIG)} == {OK}
    newer = NEWER_CONFIG.format(tmp_path)
    container, epilog, task = results(doctor_checks.judge_configuration, newer)
    assert (container[0], epilog[0], task[0]) == (WARNING, WARNING, OK) and "relaunch inside the job" in container[2]
    assert f"{tmp_path}/epilog.sh {tmp_path}/epilog.d/* runs at the end of a job, but cannot be read" in epilog[1]
    script = tmp_path / "epilog.d" / "1.sh"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\n# spares /dev/shm\nlogger the end\n")
    _, epilog, _ = results(doctor_checks.judge_configuration, newer)
    assert epilog[0] is OK and "does not mention shm" in epilog[1]
    script.write_text("#!/bin/sh\nfind /dev/shm -user $SLURM_JOB_UID -delete\n")
    _, epilog, _ = results(doctor_checks.judge_configuration, newer)
    assert epilog[0] is WARNING and "find /dev/shm -user $SLURM_JOB_UID -delete" in epilog[1]


def test_no_answer_of_slurm_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(command: list[str]) -> str:
        raise LaunchFailed("scontrol show config failed", found="fatal: no controller")

    monkeypatch.setattr(doctor_checks, "ask", ask)
    assert [text for _, text, _ in results(doctor_checks.slurm, context())] == ["not in a Slurm job"]
    env = {"SLURM_JOB_ID": "71", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_RESTART_COUNT": "2"}
    job, answer = results(doctor_checks.slurm, context(env))
    assert job[1] == "job 71 on n[1-4], restarted 2 times"
    assert answer[0] is WARNING and "does not answer" in answer[1] and "fatal: no controller" in answer[1]


# Ranks and nodes


@pytest.mark.parametrize(
    ("started", "size", "level", "text"),
    [
        (Launched(0, 1, 0, "none"), 1, OK, "1 rank, because this process was started alone"),
        (Launched(0, 4, 0, "srun"), 4, OK, "4 ranks, as SLURM_STEP_NUM_TASKS says"),
        (Launched(0, 4, 0, "hydra"), 4, OK, "4 ranks, as mpiexec says"),
        (Launched(0, 4, 0, "srun"), 1, ERROR, "srun started 4 processes, but each is alone in its MPI world"),
        (Launched(0, 4, 0, "prterun"), 1, ERROR, "mpiexec started 4 processes, but each is alone in its MPI world"),
        (Launched(0, 4, 0, "srun"), 2, WARNING, "2 ranks, but SLURM_STEP_NUM_TASKS says 4"),
        (Launched(0, 4, 0, "torchrun"), 1, ERROR, "torchrun started 4 processes, but each is alone in its MPI world"),
    ],
)
def test_a_world_of_another_size_is_an_error(started: Launched, size: int, level: Level, text: str) -> None:
    found, words, advice = result(doctor_checks.judge_size(started, size, "Open MPI 5.0.11"))
    assert found == level and words.startswith(text)
    if level is ERROR:
        assert ("srun --mpi=pmix" in advice) == (started.launcher == "srun") and "Open MPI 5.0.11" in advice
        _, words, _ = result(doctor_checks.judge_size(started, size, "MPICH 5.0.2", "MASTER_ADDR and MASTER_PORT"))
        assert words.startswith("4 ranks, which meet by MASTER_ADDR and MASTER_PORT; ")


def test_each_mpi_has_its_flag_of_srun() -> None:
    for library, flag in (
        ("MPICH 5.0.2", "--mpi=pmi2,"), ("Open MPI 5.0.11", "--mpi=pmix,"), ("Cray MPICH 8.1.27", "--mpi=cray_shasta,"),
        ("Intel MPI 2021.18", "--mpi=pmi2, with I_MPI_PMI_LIBRARY="), ("MVAPICH 4.0", "--mpi=pmi2,"),
    ):  # fmt: skip
        assert flag in doctor_checks.judge_size(Launched(0, 4, 0, "srun"), 1, library).advice


@pytest.mark.parametrize(
    ("other", "are_named", "level", "text"),
    [
        (("a boot", "1", "a"), False, OK, "1 node"),
        (("b other", "1", "b"), False, OK, "2 nodes, each with its own memory"),
        (("c other", "", "c"), False, ERROR, "c has no /dev/shm"),
        (("a boot", "2", "a"), False, ERROR, "ranks on a do not see the same /dev/shm: rank 1 has"),
        (("a boot", "2", "b"), True, OK, "2 nodes"),  # the user has named them, and they may be on one host
        (("a2 boot", "1", "a2"), False, ERROR, "two of them are one node: a and a2"),
    ],
)
def test_nodes_are_told_apart_by_their_memory(
    other: tuple[str, str, str], are_named: bool, level: Level, text: str
) -> None:
    nodes = [Node("a boot", "1", "a"), Node(*other)]
    judged, words, _ = result(doctor_checks.judge_nodes(nodes, "/dev/shm", are_named))
    assert judged == level and text in words


def test_a_slow_network_is_worth_a_warning() -> None:
    speeds = (("network", 0.4), ("network", 0.01), ("RDMA", 2.0), ("RDMA", 0.4))
    found = [result(doctor_checks.judge_network("p2p", between, saved_gbs))[0] for between, saved_gbs in speeds]
    assert found == [OK, WARNING, OK, WARNING]


# Software and GPUs


@pytest.mark.parametrize("version", ["2.12.0a0+nv", "2.16.0", "a build of my own", "2.13.0+cpu", "2.15.2+cu132"])
def test_a_pytorch_with_which_nothing_was_run_is_named(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks.importlib.metadata, "version", lambda name: version if name == "torch" else "1")
    names, *warned = results(doctor_checks.versions, context())
    assert names[0] is OK and version in names[1] and "mpi4py 1" in names[1]
    was_run = version.startswith(("2.13", "2.15"))
    texts = [] if was_run else [f"mlflash was run with PyTorch 2.13 to 2.15, and not with {version}"]
    assert [text for _, text, _ in warned] == texts


def test_a_gpu_that_pytorch_does_not_see_is_worth_a_warning(tmp_path: Path, shm: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvram").touch()
    here = context(memory=str(shm), root=str(tmp_path))
    assert [text for _, text, _ in results(doctor_checks.gpus, here)] == ["no GPU here"]
    (tmp_path / "dev" / "nvidiactl").touch()
    level, text, _ = results(doctor_checks.gpus, here)[0]
    assert level is WARNING or " x " in text  # this machine may have one


# Lines


def at(finding: Finding, node: str, rank: int, subject: str = "memory") -> Finding:
    return dataclasses.replace(finding, subject=subject, nodes=(node,), ranks=(rank,))


def test_what_is_the_same_is_one_line_and_numbers_become_ranges() -> None:
    text = "{free_nbytes} free of {kind}"
    lines = merge([
        at(fine("space", text, free_nbytes=3 * GIB, kind="tmpfs"), "a", 0),
        at(warning("clock", "late", "set it"), "a", 0),
        at(fine("space", text, free_nbytes=5 * GIB, kind="tmpfs"), "b", 1),
        at(fine("space", text, free_nbytes=3 * GIB, kind="disk"), "b", 2),
        at(fine("space", text, free_nbytes=3 * GIB, kind="tmpfs"), "b", 2, subject="other"),
        at(wrong("space", "full", "delete"), "c", 3),
    ])  # fmt: skip
    assert [(line.check, line.fill(line.text), line.nodes, line.ranks) for line in lines] == [
        ("space", "full", ("c",), (3,)),  # the worst of a check first
        ("space", "3 to 5 GiB free of tmpfs", ("a", "b"), (0, 1)),
        ("space", "3 GiB free of disk", ("b",), (2,)),
        ("clock", "late", ("a",), (0,)),
        ("space", "3 GiB free of tmpfs", ("b",), (2,)),
    ]
    assert merge(lines) == lines, "lines of nodes are merged again on rank 0"


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
    assert {"library", "world", "space", "cgroup", "RAM", "memlock", "lifetime", "writing", "job",
            "versions", "parity", "GPU", "need", "nodes"} <= levels(done).keys()  # fmt: skip
    assert [list(ranks) for ranks in found["nodes"].values()] == [[0]]
    assert list(shm.iterdir()) == [] and done.stderr == ""

    text = doctor("--memory", shm).stdout
    assert text.startswith("1 rank on 1 node, started alone\n\nMPI\nok       library            ")
    assert ("no GPU here" in text or "x NVIDIA" in text) and text.splitlines()[-1].startswith("0 errors, ")


@needs.MPI
def test_a_disk_for_copies_is_written_and_left_empty(shm: Path, tmp_path: Path) -> None:
    done = doctor("--memory", shm, "--need", "1MiB", "--nodes", 2, "--json", MLFLASH_COPIES=str(tmp_path))
    (disk,) = [line for line in json.loads(done.stdout)["lines"] if line["check"] == "disk"]
    assert disk["level"] == "ok" and "so it can do a save every" in str(disk), disk
    assert [path for path in tmp_path.rglob("*") if path.is_file() or path.name.startswith("doctor")] == []
    nowhere = doctor("--memory", shm, "--json", MLFLASH_COPIES=str(tmp_path / "nowhere"))
    assert levels(nowhere)["disk"] == "warning"


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
