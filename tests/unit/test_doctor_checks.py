"""What the checks of `mlflash doctor` make of what they read on nodes, recorded or made here."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from mlflash.config import from_environment
from mlflash.doctor import (
    copying,
    couriers,
    gpu,
    logind,
    memory,
    memory_need,
    mounts,
    mpi_ranks,
    rma,
    slurm,
    software,
    transports,
)
from mlflash.doctor.findings import Level
from mlflash.memory.memory_limits import headroom
from mlflash.memory.mounts import Mount, find_mount, mounted
from mlflash.planning import scheme_comparison
from mlflash.protocol.loaded_versions import not_run_with
from mlflash.wireup.courier_cores import Domains, Seat, from_list

GIB = 1 << 30
SPARE = 64 << 20  # what must stay free when so much is allocated

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
523 500 259:2 /var/slurm/71/.71/_tmp /tmp rw,relatime - ext4 /dev/nvme0n1p2 rw
530 510 0:151 / /dev/shm rw,relatime - tmpfs tmpfs rw
"""
# Lines of Slurm 22.05, and of 23.11.
CONFIG = """Configuration data as of 2025-11-22T03:25:12
AccountingStorageType   = accounting_storage/none
Epilog                  = (null)
EpilogMsgTime           = 2000 usec
JobContainerType        = job_container/none
MpiDefault              = none
TaskEpilog              = (null)

Slurmctld(primary) at head is UP
"""
NEWER_CONFIG = """Configuration data as of 2025-11-22T03:25:12
Epilog[0]               = /etc/slurm/epilog.sh
Epilog[1]               = /etc/slurm/epilog.d/*
JobContainerType        = job_container/tmpfs
TaskEpilog              = (null)
"""


# Memory


def test_the_last_of_several_mounts_counts() -> None:
    found = find_mount(MOUNTINFO, "/dev/shm")
    assert found == Mount("0:27", "/dev/shm", "tmpfs", "rw,size=24684092k")
    assert find_mount(MOUNTINFO, "/dev/shm/mlflash-0") == found
    assert find_mount(MOUNTINFO, "/dev/shmoo") == Mount(
        "0:6", "/dev", "devtmpfs", "rw,size=12334492k,nr_inodes=3083623,mode=755"
    )
    other = find_mount(MOUNTINFO, "/mnt/my disk/x")
    assert other is not None and (other.point, other.kind, other.device) == ("/mnt/my disk", "xfs", "0:28")
    assert find_mount("garbage\n\n1 2 3 - \n", "/dev/shm") is None
    assert mounted("/dev/shm") is not None


@pytest.mark.parametrize(
    ("mine", "first", "container", "env", "level", "text"),
    [
        (MOUNTINFO, MOUNTINFO, "", {}, Level.OK, "/dev/shm is that of the node: it outlives job steps and jobs"),
        (MOUNTINFO, MOUNTINFO, "docker", {}, Level.OK, "/dev/shm is that of process 1 in docker"),
        (IN_A_JOB, MOUNTINFO, "", {"SLURM_JOB_ID": "71"}, Level.WARNING, "it outlives a job step, but not the job"),
        (
            IN_A_JOB,
            MOUNTINFO,
            "docker",
            {"SLURM_JOB_ID": "71"},
            Level.WARNING,
            "it outlives a job step, but not the job",
        ),
        (
            MOUNTINFO,
            MOUNTINFO,
            "apptainer",
            {},
            Level.OK,
            "/dev/shm is that of the node: it outlives job steps and jobs",
        ),
        (IN_A_JOB, MOUNTINFO, "apptainer", {"SLURM_JOB_ID": "71"}, Level.WARNING, "/dev/shm belongs to apptainer"),
        (IN_A_JOB, MOUNTINFO, "", {}, Level.WARNING, "a private mount namespace"),
        (MOUNTINFO, "", "", {}, Level.OK, "unknown whether"),
    ],
)
def test_whether_memory_outlives_a_step_and_a_job(
    mine: str, first: str, container: str, env: dict[str, str], level: Level, text: str
) -> None:
    here, there = (find_mount(part, "/dev/shm") for part in (mine, first))
    found = mounts.lasting(here, there, "/dev/shm", container, env)
    assert (found.level, text in found.words) == (level, True), found.words
    assert bool(found.remedy) == (level is Level.WARNING)


def test_containers_are_known_by_their_marks(tmp_path: Path) -> None:
    root = str(tmp_path)
    assert mounts.container_of({}, root) == ""
    assert mounts.container_of({"APPTAINER_CONTAINER": "/x.sif"}, root) == "apptainer"
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.containerenv").touch()
    assert mounts.container_of({}, root) == "podman"
    (tmp_path / ".dockerenv").touch()
    assert mounts.container_of({}, root) == "docker"


def test_a_logout_that_deletes_shared_memory_is_worth_a_warning(tmp_path: Path) -> None:
    def level(uid: int = 1000, memory_: str = "/dev/shm") -> list[Level]:
        return [one.level for one in logind.removal(memory_, uid, str(tmp_path))]

    assert level() == [], "no logind, no word"
    (tmp_path / "run/systemd/users").mkdir(parents=True)
    assert (level(), level(0), level(memory_="/mnt/x")) == ([Level.WARNING], [Level.OK], [])
    conf = tmp_path / "etc/systemd/logind.conf"
    conf.parent.mkdir(parents=True)
    conf.write_text("[Login]\n#RemoveIPC=no\n")  # as Red Hat ships it
    assert level() == [Level.OK]
    conf.write_text("[Login]\n#RemoveIPC=no\nRemoveIPC=yes\n")
    assert level() == [Level.WARNING]
    own = tmp_path / "etc/systemd/logind.conf.d/10-site.conf"
    own.parent.mkdir()
    own.write_text("[Login]\nRemoveIPC = no\n")
    assert level() == [Level.OK]


def test_a_disk_is_no_memory() -> None:
    found = mounts.kind(find_mount(MOUNTINFO, "/home"), "/home")
    assert found.level is Level.WARNING and found.words == "/home is ext4, which is not memory"
    assert mounts.kind(find_mount(MOUNTINFO, "/dev/shm"), "/dev/shm").level is Level.OK


@pytest.mark.parametrize(
    ("size", "free", "held", "needed", "level", "text"),
    [
        (100 * GIB, 90 * GIB, 0, None, Level.OK, "90 GiB free of 100 GiB"),
        (64 << 20, 64 << 20, 0, None, Level.WARNING, "64 MiB free of 64 MiB"),
        (100 * GIB, 90 * GIB + SPARE, 0, 90 * GIB, Level.OK, "the job takes 90 GiB, and 64 MiB must stay free"),
        (100 * GIB, 90 * GIB + SPARE, 5 * GIB, 95 * GIB, Level.WARNING, "held by mlflash jobs; the job takes 95 GiB"),
        (100 * GIB, 90 * GIB + SPARE - 1, 5 * GIB, 95 * GIB, Level.ERROR, "the job takes 95 GiB"),
        (100 * GIB, 100 * GIB, 0, 100 * GIB, Level.ERROR, "the job takes 100 GiB"),
        (100 * GIB, 100 * GIB, 0, 101 * GIB, Level.ERROR, "the job takes 101 GiB"),
    ],
)
def test_free_space_against_what_the_job_takes(
    size: int, free: int, held: int, needed: int | None, level: Level, text: str
) -> None:
    wanted = None if needed is None else memory_need.Need(needed, "")
    found = memory.judge_space("/dev/shm", size, free, held, wanted)
    assert (found.level, text in found.words) == (level, True), found.words
    assert bool(found.remedy) == (level > Level.OK)


@pytest.mark.parametrize(("needed", "level"), [(None, 0), (70, 0), (90, 1), (100, 1), (101, 2)])
def test_what_a_cgroup_leaves_against_what_the_job_takes(needed: int | None, level: int) -> None:
    wanted = None if needed is None else memory_need.Need(needed * GIB, "")
    found = memory.judge_limit("cgroup", 100 * GIB + SPARE, wanted, "ask")
    assert found.level == level
    assert ("ask" in found.remedy) == (level > 0)


def test_slots_of_this_users_jobs_are_counted(shm: Path) -> None:
    assert memory.held_by_jobs(str(shm)) == 0
    node = shm / f"mlflash-{os.getuid()}" / "j" / "node0"
    node.mkdir(parents=True)
    (node / "slot-0000").write_bytes(b"x" * 8192)
    (node / "lock").write_bytes(b"x" * 8192)
    assert memory.held_by_jobs(str(shm)) == 8192


def test_writing_leaves_nothing_and_a_directory_open_to_others_is_named(shm: Path) -> None:
    assert [(one.check, one.level) for one in memory.writing(str(shm), 1 << 20)] == [("writing", Level.OK)]
    assert list(shm.iterdir()) == []
    (shm / f"mlflash-{os.getuid()}").mkdir(mode=0o755)
    found = list(memory.writing(str(shm), 1 << 20))
    assert [one.level for one in found] == [Level.ERROR, Level.OK] and "not a private directory" in found[0].words


def test_whoever_has_the_name_of_this_users_directory_is_named(shm: Path) -> None:
    (shm / f"mlflash-{os.getuid()}").write_text("mine")
    found = list(memory.writing(str(shm), 1 << 20))
    assert [one.level for one in found] == [Level.WARNING, Level.OK], found
    assert f"{shm}/mlflash-{os.getuid()} does not belong to this user: -rw-" in found[0].words


@pytest.mark.parametrize(
    ("limit", "rdma", "root", "level"),
    [
        (resource.RLIM_INFINITY, True, False, Level.OK),
        (8 << 20, False, False, Level.OK),
        (8 << 20, True, True, Level.OK),
        (8 << 20, True, False, Level.WARNING),
        (2 * GIB, True, False, Level.OK),
    ],
)
def test_locked_memory_counts_with_rdma(limit: int, rdma: bool, root: bool, level: Level) -> None:
    assert memory.judge_memlock(limit, rdma, root).level is level


def test_what_a_job_takes_is_what_plan_says() -> None:
    found = memory_need.count(GIB, "xor:4", 3, 2, nodes=4, ranks_per_node=8)
    job = scheme_comparison.Job(("a", "b", "c", "d"), 8, GIB, own_slots=3)
    ((scheme, placed),), _ = scheme_comparison.consider(job, ["xor:4"])
    planned = scheme_comparison.scheme_costs(job, scheme, placed, 1, None)
    assert found.nbytes == planned.memory_nbytes > 24 * GIB
    assert found.spare_nbytes == planned.spare_nbytes == headroom(found.nbytes) == SPARE
    assert found.words == "8 ranks of 1 GiB, 3 slots each, xor:4 over 4 nodes"
    assert "protects nothing on one node" in memory_need.count(GIB, "copy", 2, 2, 1, 1).words
    assert memory_need.shape({}) == (1, 1)
    assert memory_need.shape({"SLURM_JOB_NUM_NODES": "4", "SLURM_NTASKS_PER_NODE": "8"}) == (4, 8)
    assert memory_need.shape({"SLURM_JOB_NUM_NODES": "4", "SLURM_NTASKS": "30"}) == (4, 8)


# Slurm


def test_slurms_configuration_is_read_in_both_forms() -> None:
    found = slurm.parse(CONFIG)
    assert (found["Epilog"], found["JobContainerType"], found["TaskEpilog"]) == (
        "(null)",
        "job_container/none",
        "(null)",
    )
    assert {one.level for one in slurm.judge_configuration(found)} == {Level.OK}
    newer = slurm.parse(NEWER_CONFIG)
    assert newer["Epilog"] == "/etc/slurm/epilog.sh /etc/slurm/epilog.d/*"
    container, epilog, task = slurm.judge_configuration(newer)
    assert (container.level, epilog.level, task.level) == (Level.WARNING, Level.WARNING, Level.OK)
    assert "relaunch inside the job" in container.remedy
    assert "cannot be read here" in epilog.words and "scontrol show config" in epilog.remedy


def test_an_epilog_that_wipes_memory_is_quoted(tmp_path: Path) -> None:
    script = tmp_path / "epilog.sh"
    script.write_text("#!/bin/sh\n# spares /dev/shm\nfind /dev/shm -user $SLURM_JOB_UID -delete\n")
    found = slurm.script("epilog", f"{tmp_path}/*.sh", "at the end of a job", "")
    assert found.level is Level.WARNING and "find /dev/shm -user $SLURM_JOB_UID -delete" in found.words
    script.write_text("#!/bin/sh\n# spares /dev/shm\nlogger the end\n")
    found = slurm.script("epilog", str(script), "at the end of a job", "")
    assert (found.level, "does not mention shm" in found.words) == (Level.OK, True)
    assert slurm.script("epilog", f"{tmp_path}/none", "at the end of a job", "").level is Level.WARNING


def test_no_answer_of_slurm_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho 'error: one' >&2\necho 'fatal: no controller' >&2\nexit 1\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert [one.words for one in slurm.configuration({})] == ["not in a Slurm job"]
    job, answer = slurm.configuration(
        {"SLURM_JOB_ID": "71", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_RESTART_COUNT": "2"}
    )
    assert job.words == "job 71 on n[1-4], restarted 2 times"
    assert answer.level is Level.WARNING and answer.words.endswith("does not answer: fatal: no controller")


# Ranks and nodes


def places(*of: tuple[int, str, str, str]) -> list[mpi_ranks.Place]:
    return [mpi_ranks.Place(*one) for one in of]


@pytest.mark.parametrize(
    ("of", "level", "text"),
    [
        (places((0, "b 1", "a", "")), Level.OK, "1 node by MPI"),
        (places((0, "b 1", "a", "0"), (1, "c 1", "b", "1")), Level.OK, "2 nodes by MPI, as by Slurm"),
        (places((0, "b 1", "a", ""), (1, "c 1", "b", "")), Level.OK, "each with its own memory"),
        (places((0, "b 1", "a", "0"), (1, "", "c", "1")), Level.ERROR, "c has no /dev/shm"),
        (places((0, "b 1", "a", "0"), (0, "b 2", "a", "0")), Level.ERROR, "ranks on a do not see the same /dev/shm"),
        (places((0, "b 1", "a", "0"), (1, "b 1", "a2", "1")), Level.ERROR, "two of them are one node: a and a2"),
        (places((0, "b 1", "a", "0"), (1, "c 1", "b", "0")), Level.WARNING, "but 1 by SLURM_NODEID"),
        (places((0, "b 1", "a", "0"), (0, "b 1", "a", "1")), Level.WARNING, "but 2 by SLURM_NODEID"),
    ],
)
def test_nodes_are_told_apart_by_their_memory(of: list[mpi_ranks.Place], level: Level, text: str) -> None:
    found = mpi_ranks.judge_nodes(of, "/dev/shm", emulated=False)
    assert (found.level, text in found.words) == (level, True), found.words
    assert mpi_ranks.judge_nodes(of, "/dev/shm", emulated=True).level is Level.OK


def test_clocks_and_unknown_domains() -> None:
    assert mpi_ranks.judge_clocks(0.01).level is Level.OK
    assert mpi_ranks.judge_clocks(61.0).words == "61 s apart" and mpi_ranks.judge_clocks(61.0).level is Level.WARNING
    assert mpi_ranks.unknown_domains(2).level is Level.OK and mpi_ranks.unknown_domains(3).level is Level.WARNING


def test_the_library_is_found_among_the_mapped_files() -> None:
    maps = (
        "7f0-7f1 r-xp 00000000 fe:00 13 /usr/lib/libmpdec.so.3\n"
        "7f1-7f2 r-xp 00000000 fe:00 14 /opt/cray/lib/libmpi_gnu_123.so.12\n"
        "7f2-7f3 r-xp 00000000 fe:00 15 /opt/cray/lib/libmpi_gnu_123.so.12\n"
    )
    assert mpi_ranks.loaded_from(maps) == "/opt/cray/lib/libmpi_gnu_123.so.12"
    assert mpi_ranks.loaded_from("x /a/libmpich.so.12\n") == "/a/libmpich.so.12"
    assert mpi_ranks.loaded_from("x /a/libmpifort.so.12\n") == ""


@pytest.mark.parametrize(
    ("of", "level", "text", "advice"),
    [
        ([(1, {0, 1}), (1, {0, 1})], Level.OK, "2 ranks with 2 OpenMP threads on 2 cores", ""),
        ([(2, {0, 1}), (2, {2, 3})], Level.OK, "2 ranks with 4 OpenMP threads on 4 cores", ""),
        ([(None, {0, 1}), (None, {2, 3})], Level.OK, "4 OpenMP threads on 4 cores", ""),
        ([(None, {0, 1}), (None, {0, 1})], Level.WARNING, "4 OpenMP threads on 2 cores", "export OMP_NUM_THREADS"),
        ([(4, {0, 1})], Level.WARNING, "1 rank with 4 OpenMP threads on 2 cores", "lower OMP_NUM_THREADS"),
        ([(1, {0, 1})] * 3, Level.WARNING, "3 ranks with 3 OpenMP threads on 2 cores", "start fewer ranks"),
    ],
)
def test_threads_against_cores(of: list[tuple[int | None, set[int]]], level: Level, text: str, advice: str) -> None:
    found = software.judge_threads([(told, frozenset(cores)) for told, cores in of])
    assert (found.level, text in found.words, advice in found.remedy) == (level, True, True), found


@pytest.mark.parametrize(
    ("put", "get", "same", "rdma", "level"),
    [
        (5.0, 5.0, True, False, Level.OK),
        (1.0, 1.0, True, False, Level.OK),
        (1.0, 1.0, True, True, Level.WARNING),
        (0.01, 1.0, True, False, Level.WARNING),
        (5.0, 5.0, False, False, Level.ERROR),
    ],
)
def test_speeds_are_judged(put: float, get: float, same: bool, rdma: bool, level: Level) -> None:
    (found,) = rma.judge("RMA between nodes", rma.Measured(put, get, 10.0, same), rdma)
    assert found.level is level
    assert list(rma.judge("RMA between nodes", rma.Measured(0.0, 0.0, 0.0, True), rdma)) == []


@pytest.mark.parametrize(
    ("p2p", "rma_", "taken", "asked", "between", "advice"),
    [
        ((1.0, 2.0), (0.9, 1.9), "p2p", "auto", "network", ""),  # as good as alike
        ((1.0, 2.0), (1.0, 1.0), "p2p", "auto", "network", "set MLFLASH_TRANSPORT=rma: rma was 1.4 times"),
        ((1.0, 1.0), (1.0, 2.0), "rma", "auto", "RDMA", "set MLFLASH_TRANSPORT=p2p: p2p was 1.4 times"),
        ((1.0, 1.0), (2.0, 2.0), "rma", "rma", "network", "unset MLFLASH_TRANSPORT: p2p was 2.0 times"),
        ((9.0, 9.0), (1.0, 1.0), "p2p", "p2p", "RDMA", "unset MLFLASH_TRANSPORT: rma was 9.0 times"),
        ((1.0, 1.0), (1.0, 9.0), "p2p", "p2p", "network", ""),
    ],
)
def test_the_transport_that_is_clearly_faster_is_advised(
    p2p: tuple[float, float], rma_: tuple[float, float], taken: str, asked: str, between: str, advice: str
) -> None:
    times = {"p2p": transports.Measured(*p2p), "rma": transports.Measured(*rma_)}
    found = transports.judge(times, taken, asked, between, 16 << 20)
    assert found.level == (Level.WARNING if advice else Level.OK)
    assert found.remedy.startswith(advice)
    assert "saves of 16 MiB" in found.words and ("auto takes" in found.words) == (asked == "auto")


def test_each_rank_has_bytes_of_its_own() -> None:
    one, other = rma.pattern(0, 1 << 16), rma.pattern(1, 1 << 16)
    assert not (one == other).any() and len(set(one[:4096].tolist())) > 200


# Software and GPUs


def test_what_is_installed_is_named() -> None:
    (versions,) = software.versions()
    assert versions.level is Level.OK and "mpi4py" in versions.words and "xxhash" in versions.words
    (checksums,) = software.checksums()
    assert checksums.level is Level.OK


@pytest.mark.parametrize("version", ["2.12.0a0+nv", "2.16.0", "3.0", "a build of my own"])
def test_a_pytorch_with_which_nothing_was_run_is_named(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software.importlib.metadata, "version", lambda name: version if name == "torch" else "1")
    names, warned = software.versions()
    assert version in names.words and warned.level is Level.WARNING
    assert warned.words == f"mlflash was run with PyTorch 2.13 to 2.15, and not with {version}"
    for known in ("2.13.0+cpu", "2.14.1", "2.15.2+cu132"):
        assert not_run_with(known) is None


def test_parity_by_numpy_is_worth_a_warning_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflash.redundancy import erasure_codes

    monkeypatch.setenv("MLFLASH_ISAL", "0")
    erasure_codes._isal.cache_clear()
    try:
        assert [one.level for one in software.parity("xor:8")] == [Level.WARNING]
        assert [one.level for one in software.parity("copy")] == [Level.OK]
    finally:
        erasure_codes._isal.cache_clear()


def test_without_a_gpu_that_is_said(tmp_path: Path, shm: Path) -> None:
    (tmp_path / "nvram").touch()
    (found,) = gpu.gpus(str(shm), str(tmp_path))
    assert (found.level, found.words) == (Level.OK, "no GPU here")
    (tmp_path / "nvidiactl").touch()
    found = next(iter(gpu.gpus(str(shm), str(tmp_path))))
    assert found.level is Level.WARNING or "x" in found.words  # this machine may have one


class Cudart:
    """Stands in for CUDA, which is not here."""

    def __init__(self, status: int):
        self.status, self.pinned = status, 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.pinned += nbytes if self.status == 0 else 0
        return self.status

    def cudaHostUnregister(self, address: int) -> None:
        self.pinned = 0


def test_memory_that_cannot_be_pinned_is_worth_a_warning(shm: Path) -> None:
    for status, level in ((0, Level.OK), (2, Level.WARNING)):
        cudart = Cudart(status)
        found = gpu.pinning(cudart, str(shm))
        assert (found.level, cudart.pinned, list(shm.iterdir())) == (level, 0, [])
    assert found.words.endswith("CUDA error 2")


def test_huge_pages_are_recommended_where_there_are_none(tmp_path: Path) -> None:
    assert copying.judge_pages(True).words == "huge pages"
    assert "Linux 6.1 or newer" in copying.judge_pages(False).words
    assert copying.pages("/dev/shm") in (copying.judge_pages(True), copying.judge_pages(False))


def test_copies_past_the_caches_are_recommended_where_they_are_faster() -> None:
    assert copying.judge_copying(10.0, 11.0).words == "10.0 GB/s in pieces of 8 MiB"
    assert "GLIBC_TUNABLES=glibc.cpu.x86_non_temporal_threshold=1048576" in copying.judge_copying(5.0, 10.0).words


def test_copies_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=0")
    found = copying.copying()
    low, high = found.values["now_gbs"]
    assert 1e-3 < low <= high < 1000, "in GB/s; a slower machine would not be through within the deadline"


# Couriers


def seats(*trainers: str, may_have: str = "0-7") -> list[Seat]:
    return [Seat(from_list(cores), from_list(may_have)) for cores in trainers]


@pytest.mark.parametrize(
    ("trainers", "threads", "level", "text"),
    [
        (["0-2", "3-5"], [3, 3], Level.OK, "6-7, on which no trainer runs"),
        (
            ["0-7"],
            [1],
            Level.OK,
            "the cores of the trainers (0-7), because the job has no others; 7 of them have no training thread",
        ),
        (
            ["0-3", "4-7"],
            [3, 3],
            Level.OK,
            "the cores of the trainers (0-7), because the job has no others; 2 of them have no training thread",
        ),
        (["0-3", "4-7"], [4, 3], Level.WARNING, "training threads use all of them"),
        (["0-3", "4-7"], [None, None], Level.WARNING, "training threads use all of them"),
    ],
)
def test_where_couriers_would_run(trainers: list[str], threads: list[int | None], level: Level, text: str) -> None:
    alike = Domains(lambda core: frozenset(), lambda core: frozenset({core}))
    found = couriers.judge_cores(seats(*trainers), threads, alike)
    assert found.level is level and text in found.words and bool(found.remedy) == (level is Level.WARNING)


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_which_kind_of_courier_a_job_has_and_why(mode: str) -> None:
    found = couriers.kind(from_environment({"MLFLASH_COURIER": mode}, None, job="j"), {"MLFLASH_COURIER": mode})
    assert found.words.startswith(f"a {mode} ") and f"(MLFLASH_COURIER={mode})" in found.words
    assert "(as by default)" in couriers.kind(from_environment({}, None, job="j"), {}).words


def test_couriers_that_run_and_those_that_are_left_over() -> None:
    running = [couriers.Running(11, 10, 10), couriers.Running(12, 11, 10, ("j",))]
    left = [couriers.Running(21, 1, 20), couriers.Running(22, 21, 20, ("k",))]
    assert not list(couriers.judge_running([]))
    assert [found.level for found in couriers.judge_running(running)] == [Level.OK]
    (found,) = couriers.judge_running([*running, *left])
    assert found.level is Level.WARNING and "21 22 remain, but their trainers have ended; they lock k" in found.words
    assert "kill -9 21 22" in found.remedy
