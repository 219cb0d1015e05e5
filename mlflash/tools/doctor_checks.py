"""The checks: of MPI and the nodes, of the memory of a node, of what is installed, of Slurm, and of couriers."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import glob
import importlib.metadata
import mmap
import os
import platform
import re
import resource
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpointer.checkpointer import Checkpointer
from ..config import DISABLE, is_enabled, unknown_variables
from ..errors import LaunchFailed, MlflashError, UnsafePath, WorldMismatch, pip_install, text_of
from ..launch.courier_mpi import LIBRARY
from ..launch.launcher_variables import Launched, as_torchrun, without_rank
from ..launch.rendezvous import free_port, meeting_of
from ..memory import node_directory
from ..memory.disk_slot import MOST_BUSY, DiskFile, aligned
from ..memory.memory_limits import MEMORY_KINDS, available, headroom, mapped_files, mounted, other_files
from ..memory.node_directory import NodeDirectory
from ..memory.process_names import trainer_of, works_for
from ..mpi.fabric import between_nodes, choose_transport, has_rdma
from ..mpi.world import World
from ..placement.redundancy import Placement, parse
from ..placement.topology import Node
from ..run.launch_systems import ask
from ..state import copy_kernel
from ..text import last_words, many, show_bytes, show_seconds
from ..version import not_run_with
from .doctor_findings import Context, Finding, fine, note, warning, wrong
from .plan import Job, consider, disk_nbytes, node_nbytes

_SKEW_S = 1.0
_SAVED_NBYTES, _SAVES = 16 << 20, 4
_SLOW_RDMA_GBS, _SLOW_GBS = 0.5, 0.05
_ENDS_S = 6  # a courier ends within this time after its trainer
_TRIAL_RANKS, _TRIAL_S, _TRIAL_LOOK_S = 2, 45.0, 0.02  # of couriers
_TRIAL_SHOWN = 200  # characters of its output
_TRIAL_PROGRAM = """
import sys
import numpy
from mlflash import Checkpointer
try:
    with Checkpointer(job="doctor", copies="", redundancy="none", timeout_s=40, strict=True, log="", metrics="",
                      drain_every=0) as checkpointer:
        checkpointer.save(1, {"numbers": numpy.ones(8)}).wait()
        print(checkpointer.report()["mpi"])
except Exception as error:
    sys.exit(" ".join(str(error).split()))
"""
_TRIED_NBYTES, _PINNED_NBYTES = 16 << 20, 1 << 20
_WRITES = 8  # of so many bytes, to a disk
_TINY_NBYTES = 1 << 30  # Docker's /dev/shm has 64 MiB by default
_LOCKED_NBYTES = 1 << 30
_LEFT_NBYTES, _LEFT_NAMED = 16 << 20, 5
_SHARE = 0.8  # the share of a cgroup's free memory, or of RAM, that slots may take: training needs some, too
_MORE = {
    "space": "delete other files there, or as root mount -o remount,size=... (docker run --shm-size)",
    "cgroup": "ask for more memory (sbatch --mem=0), because the kernel kills processes at the limit",
    "RAM": "take nodes with more memory",
}
_CONTAINER_MARKS = ".dockerenv", "run/.containerenv"  # of Docker and Podman, which have a process 1 of their own
_CONTAINER_VARIABLES = "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER", "ENROOT_ROOTFS", "container"
_FIRST_USER = 1000  # system users have smaller numbers, and logind does not touch their files
_GPU_DEVICES = ("nvidia[0-9]*", "nvidiactl", "kfd", "dxg")
_NONE = ("", "(null)", "none", "job_container/none")


# MPI


def library(context: Context) -> Iterator[Finding]:
    """Name the MPI library of this program, and its path. Not collective."""
    maps = Path("/proc/self/maps").read_text()
    mapped = re.search(r"/\S*/libmpi(?:ch)?(?:_\w+)?\.so[.\d]*(?=\s*$)", maps, re.MULTILINE)
    path = mapped[0] if mapped else ""  # it may have another name
    yield fine("library", "{version}" + (" ({path})" if path else ""), version=version_of(context.mpi), path=path)


def version_of(mpi: Any) -> str:
    """Return name and version of an MPI library: "MPICH 5.0.2"."""
    name, version = mpi.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def name_of(launched: Launched) -> str:
    """Return the program that started a process: mpiexec, srun or torchrun; "" if it was started alone."""
    return {"hydra": "mpiexec", "prterun": "mpiexec", "none": ""}.get(launched.launcher, launched.launcher)


def world_size(context: Context) -> Iterator[Finding]:
    """Compare the size of MPI's world with the number of processes that were started. Then try couriers."""
    try:
        place = Path(context.settings.memory, f"mlflash-{os.getuid()}")
        meeting = meeting_of(context.environment, context.launched, place, 0.0).how
    except WorldMismatch:
        meeting = ""
    yield judge_size(context.launched, context.mpi.COMM_WORLD.size, version_of(context.mpi), meeting)
    if context.rank == 0 and os.path.isdir(context.settings.memory):  # `nodes` reports a missing one
        yield try_couriers(context.environment, context.settings.memory)


def judge_size(launched: Launched, size: int, library: str, meeting: str = "") -> Finding:
    """Judge the size of MPI's world. ``meeting`` says how the ranks find each other without MPI; "": not at all."""
    launcher, started = name_of(launched), launched.size
    if not launcher:
        return fine("world", f"{many(size, 'rank')}, because this process was started alone")
    source = {"srun": "SLURM_STEP_NUM_TASKS", "torchrun": "WORLD_SIZE"}.get(launcher, "mpiexec")
    if size == started:
        return fine("world", f"{many(size, 'rank')}, as {source} says")
    if size > 1:
        return warning("world", f"{many(size, 'rank')}, but {source} says {started}",
                       "start one process per rank, with one launcher only")  # fmt: skip
    if meeting:
        return fine("world", f"{many(started, 'rank')}, which meet by {meeting}; this command looks at this node only")
    paths = ", with I_MPI_PMI_LIBRARY=/path/to/libpmi2.so" if library.startswith("Intel") else ""
    pmi = "pmix" if library.startswith("Open MPI") else "cray_shasta" if library.startswith("Cray") else "pmi2"
    advice = {
        "srun": f"start with srun --mpi={pmi}{paths}, which {library} needs; srun --mpi=list shows what "
                "this Slurm has",
        "torchrun": f"{library} needs its launcher: start with mpiexec or srun, or {pip_install('mpich')}, which needs "
                    "none",
    }.get(launcher, f"use the mpiexec of {library}, which mpi4py loads here; or let mpi4py load the library of that "
                    "mpiexec (MPI4PY_LIBMPI=/path/to/libmpi.so)")  # fmt: skip
    return wrong("world", f"{launcher} started {started} processes, but each is alone in its MPI world: only the first "
                 "reports here", advice)  # fmt: skip


# Nodes


def nodes(context: Context) -> Iterator[Finding]:
    """Compare the memory and the hosts of the nodes. Collective over the world."""
    settings = context.settings
    yield judge_nodes(context.ranks.gather(settings.here), settings.memory, bool(settings.node))


def judge_nodes(of_ranks: Sequence[Node], memory: str, are_named: bool) -> Finding:
    """Judge whether each node has a host and a memory of its own.

    Args:
        are_named: whether the user has named the nodes, and so knows of several on one host.
    """
    count = len({(node.host, node.memory) for node in of_ranks})
    text = many(count, "node")
    for node in of_ranks:
        if not node.memory:
            return wrong("nodes", f"{text}; {node.name} has no {memory}", "make it there, or name another one with "
                         "--memory")  # fmt: skip
    memory_of: dict[str, Node] = {}
    node_of: dict[tuple[str, str], Node] = {}
    for rank, node in enumerate(of_ranks):
        other = node_of.setdefault((node.host.split()[-1], node.memory), node)
        if other.host != node.host:
            return wrong("nodes", f"{text}, but two of them are one node: {other.name} and {node.name} have the same "
                         f"{memory}", "give all containers of a host one host name")  # fmt: skip
        if memory_of.setdefault(node.host, node).memory != node.memory and not are_named:
            return wrong("nodes", f"{text}, but ranks on {node.name} do not see the same {memory}: rank {rank} has "
                         "its own, and a slot and its copy would be lost together", "start all ranks of a node in one "
                         "container, or give all containers the node's /dev/shm")  # fmt: skip
    return fine("nodes", text + ", each with its own memory" * (count > 1))


def clocks(context: Context) -> Iterator[Finding]:
    """Compare the clocks of the nodes. Collective over the world."""
    context.ranks.barrier()  # all leave it at about the same time
    times = context.ranks.gather(time.time())
    apart_s = max(times) - min(times)
    if apart_s >= _SKEW_S:
        yield warning("clocks", "{apart_s} apart", "ages of checkpoints will be wrong: set the clocks (chrony, NTP)",
                      apart_s=apart_s)  # fmt: skip
    elif len(context.ranks.topology.node_names) > 1:
        yield fine("clocks", "at most {apart_s} apart", apart_s=apart_s)


def failure_domains(context: Context) -> Iterator[Finding]:
    """Find the failure domains of the nodes, as a Checkpointer does. Collective over the world."""
    from ..commit.start import find_domains

    setting, names = context.settings.domains, context.ranks.topology.node_names
    domains = find_domains(context.ranks, setting)
    if domains is None and len(names) > 2:
        yield warning("failure domains", "unknown: Slurm knows no switches or blocks", "groups may share a rack: list "
                      "the nodes of each rack in MLFLASH_DOMAINS=FILE (n[01-16] rack1)")  # fmt: skip
    elif domains is None:
        yield fine("failure domains", "unknown, and not useful for so few nodes")
    elif unlisted := [name for name in names if not domains.knows(name)]:
        yield warning("failure domains", f"{len(unlisted)} nodes are not listed, for example {unlisted[0]}",
                      "each of them counts as its own domain: add them to the file of MLFLASH_DOMAINS")  # fmt: skip
    else:
        kinds = [f"{len({domains.names(name)[level] for name in names})} x {kind}"
                 for level, kind in enumerate(domains.kinds)]  # fmt: skip
        yield fine("failure domains", f"{many(len(names), 'node')} in {', '.join(kinds)}, by "
                   + ("Slurm" if setting is None else "MLFLASH_DOMAINS"))  # fmt: skip


def network(context: Context) -> Iterator[Finding]:
    """Save some bytes to the memory of the next node, which compares their checksums. Collective over the world."""
    world = context.ranks
    if len(world.topology.node_names) == 1 or not is_enabled(context.environment):
        return
    some_have_rdma = world.any_of(has_rdma())
    if some_have_rdma and not has_rdma():
        yield warning("fabric", "this node has no RDMA device, but others have one", "ask your site about its network "
                      "card (/sys/class/infiniband, /sys/class/cxi)")  # fmt: skip
    between, transport = between_nodes(world), choose_transport(world, context.settings.transport)
    memory = os.path.join(context.settings.memory, "mlflash-doctor-" + world.broadcast(secrets.token_hex(4), 0))
    seconds = _save(world, memory, transport) if world.local_rank == 0 else 0.0
    yield judge_network(transport, between, _SAVED_NBYTES / world.tell_node(seconds) / 1e9)


def _save(world: World, memory: str, transport: str) -> float:
    """Save a few times, and return the seconds of the fastest save. Collective over the leaders."""
    os.makedirs(memory, 0o700, exist_ok=True)
    try:
        with Checkpointer(
            job="doctor", copies="", memory=memory, comm=world.leaders, transport=transport, redundancy="copy",
            strict=True, timeout_s=world.timeout_s, when_busy="wait", log="",
            metrics="", drain_every=0, send_rate=0.0, fresh=False,
        ) as checkpointer:  # fmt: skip
            state = {"bytes": np.ones(_SAVED_NBYTES, np.uint8)}
            saves = [checkpointer.save(step, state).wait() for step in range(_SAVES)]
        world.meet(world.leaders)  # afterwards no rank has it open
    finally:
        shutil.rmtree(memory, ignore_errors=True)
    return min(save.commit_s or 0.0 for save in saves)


def judge_network(transport: str, between: str, saved_gbs: float) -> Finding:
    """Judge how fast a save came to the next node."""
    text = f"saves come to the next node at {{saved_gbs}} by {transport} ({between})"
    if saved_gbs < (_SLOW_RDMA_GBS if between == "RDMA" else _SLOW_GBS):
        return warning("network", text + ": slow", "check which network MPI uses: MPIR_CVAR_CH4_NETMOD, "
                       "UCX_TLS, UCX_NET_DEVICES, FI_PROVIDER, FI_TCP_IFACE; RDMA needs memlock, too",
                       saved_gbs=saved_gbs)  # fmt: skip
    return fine("network", text, saved_gbs=saved_gbs)


# Couriers: those that run on this node, and whether this MPI can start some without a launcher


def running() -> dict[int, int]:
    """Find the couriers of this user on this node, and for whom each works: itself, if its trainer has ended."""
    couriers = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            if path.stat().st_uid == os.getuid() and trainer_of(path) is not None:
                couriers[int(path.name)] = works_for(int(path.name))
    return couriers


def couriers_here(_: object) -> Iterator[Finding]:
    """Look for couriers on this node that have lost their trainer."""
    if left := [pid for pid, trainer in running().items() if trainer == pid]:
        yield warning("couriers here", "processes {pids} remain, but their trainers have ended",
                      f"they end within {_ENDS_S} s after they have committed the last save; if not: kill -9 {{pids}}",
                      pids=" ".join(map(str, sorted(left))))  # fmt: skip


def try_couriers(environment: Mapping[str, str], memory: str) -> Finding:
    """Let two ranks on this host save with couriers that no launcher started. Not collective."""
    start = time.monotonic()
    port = free_port()
    with (
        tempfile.TemporaryDirectory(prefix="mlflash-doctor-", dir=memory, ignore_cleanup_errors=True) as own_memory,
        open(os.path.join(own_memory, "output"), "w+") as output,
    ):
        given = {**without_rank(environment), "MLFLASH_MEMORY": own_memory, DISABLE: ""}
        ranks = [
            subprocess.Popen([sys.executable, "-c", _TRIAL_PROGRAM], cwd="/", stdin=subprocess.DEVNULL, stdout=output,
                             stderr=subprocess.STDOUT,
                             env=as_torchrun(given, rank, _TRIAL_RANKS, rank, "127.0.0.1", port))
            for rank in range(_TRIAL_RANKS)
        ]  # fmt: skip
        while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
            if time.monotonic() > start + _TRIAL_S:
                break
            time.sleep(_TRIAL_LOOK_S)
        for rank in ranks:  # what it would print later follows from the failure of another rank
            rank.kill()
            rank.wait()
        output.seek(0)
        printed = output.read()
    last = last_words(printed, "it does not end and prints nothing")
    if not any(rank.returncode for rank in ranks):
        return fine("couriers", "two ranks saved without a launcher after {seconds}, by {mpi}",
                    seconds=f"{time.monotonic() - start:.1f} s", mpi=last[:_TRIAL_SHOWN])  # fmt: skip
    advice = f"{pip_install('mpich')} into this environment, or name the library of your cluster's MPI in {LIBRARY}"
    if "pidfd_open" in printed:
        advice = "allow pidfd_open and pidfd_send_signal in the container's profile"
    return warning("couriers", "couriers could not save: {last}", advice, last=last[:_TRIAL_SHOWN])


def mapped_file(context: Context, nbytes: int) -> np.ndarray:
    """Map a file of the memory file system. It has no name, and is gone with the array. Not collective."""
    with tempfile.TemporaryFile(dir=context.settings.memory) as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return np.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=np.uint8)


# What the memory file system is, and what deletes files in it


def file_system(context: Context) -> Iterator[Finding]:
    """Check that the memory file system is in memory."""
    mount = mounted(context.settings.memory, root=context.root)
    text = "{memory} is " + (mount.kind if mount else "on an unknown file system")
    if mount is None or mount.kind in MEMORY_KINDS:
        yield (fine if mount else note)("file system", text, memory=context.settings.memory)
    else:
        yield warning("file system", f"{text}, which is not memory", "saves will be as slow as this file system: give "
                      "--memory /dev/shm", memory=context.settings.memory)  # fmt: skip


def lifetime(context: Context) -> Iterator[Finding]:
    """Say whether files in memory outlive a job step and a job, as far as a process inside can know."""
    own, init = (mounted(context.settings.memory, pid, context.root) for pid in ("self", "1"))
    has_own_init = any(Path(context.root, mark).exists() for mark in _CONTAINER_MARKS)
    memory = context.settings.memory
    if own is None or init is None:
        yield note("lifetime", "unknown whether {memory} is private to this job: /proc/1/mountinfo is hidden",
                   memory=memory)  # fmt: skip
    elif own.device == init.device and has_own_init:
        yield note("lifetime", "{memory} is that of this container; unknown whether it is that of the node",
                   memory=memory)  # fmt: skip
    elif own.device == init.device:
        yield fine("lifetime", "{memory} is that of the node: it outlives job steps and jobs", memory=memory)
    elif not has_own_init and any(context.environment.get(variable) for variable in _CONTAINER_VARIABLES):
        yield warning("lifetime", "{memory} belongs to this container and is deleted with it", "give the container the "
                      "node's /dev/shm (apptainer without --contain; pyxis --container-mounts=/dev/shm), or keep one "
                      "container for all relaunches", memory=memory)  # fmt: skip
    elif "SLURM_JOB_ID" in context.environment:
        yield warning("lifetime", "{memory} is private to this job: it outlives a job step, but not the job",
                      "relaunch inside the job (mlflash run, or a loop in the batch script): after a requeue memory is "
                      "empty. As root, set Dirs=/tmp in job_container.conf: jobs then use the node's /dev/shm",
                      memory=memory)  # fmt: skip
    else:
        yield warning("lifetime", "{memory} is in a private mount namespace and is deleted with it",
                      "start all relaunches in this namespace", memory=memory)  # fmt: skip


def logout(context: Context) -> Iterator[Finding]:
    """Say whether systemd-logind deletes this user's files in shared memory when the user logs out of a node.

    Source: logind.conf(5), RemoveIPC.
    """
    root = Path(context.root)
    if not context.settings.memory.startswith("/dev/shm") or not (root / "run/systemd/users").is_dir():
        return
    tops = [root / top / "systemd" for top in ("usr/lib", "etc")]
    parts = sorted((part for top in tops for part in top.glob("logind.conf.d/*.conf")), key=lambda part: part.name)
    built_in, setting = "yes", ""
    for file in filter(Path.exists, [*(top / "logind.conf" for top in tops), *parts]):
        text = file.read_text(errors="replace")
        for comment, value in re.findall(r"^\s*([#;]?)\s*RemoveIPC\s*=\s*(\S*)", text, re.MULTILINE):
            if comment:  # it shows the built-in value
                built_in = value
            else:  # later files win
                setting = value
    if context.uid < _FIRST_USER:
        yield fine("logout", "does not delete files of this system user")
    elif (setting or built_in).lower() in ("yes", "1", "true", "on", "y", "t"):
        yield warning("logout", "systemd-logind deletes this user's files in /dev/shm after the last logout",
                      "do not ssh into nodes of a job, or run loginctl enable-linger; as root, set RemoveIPC=no in "
                      "/etc/systemd/logind.conf")  # fmt: skip
    else:
        yield fine("logout", "does not touch /dev/shm (RemoveIPC=no)")


# Room


def writing(context: Context) -> Iterator[Finding]:
    """Write a small file, and look at this user's directory."""
    memory = context.settings.memory
    try:
        NodeDirectory(memory, "doctor-looks-only", make=False).close()
    except FileNotFoundError:
        pass
    except UnsafePath as error:
        yield wrong("private directory", "{error}, {found}", "delete it, or ask its owner to", error=error.message,
                    found=str(error.found))  # fmt: skip
    for path, reason in node_directory.scan_user_directories(memory)[1].items():
        yield warning("private directory", "{path} does not belong to this user: {found}", "nothing is lost, because "
                      "jobs use the next name, mlflash-UID.1; ask its owner to delete it", path=path,
                      found=reason)  # fmt: skip
    mapped_file(context, _TRIED_NBYTES)[:] = 1
    yield fine("writing", "{tried_nbytes} can be written", tried_nbytes=_TRIED_NBYTES)


def disk(context: Context) -> Iterator[Finding]:
    """Write to the directory for copies, and compute how often it can take those of a save."""
    path = context.settings.copies
    if not path:
        return
    pages = aligned(_TRIED_NBYTES)
    pages[:] = np.frombuffer(secrets.token_bytes(pages.nbytes), dtype=np.uint8)
    try:
        directory = NodeDirectory(path, f"doctor-{secrets.token_hex(4)}")
        with contextlib.closing(directory):
            file = DiskFile(directory)
            start = time.perf_counter()
            for number in range(_WRITES):
                file.write(number * pages.nbytes, pages)
            file.sync()
            rate = _WRITES * pages.nbytes / (time.perf_counter() - start)
            file.close()
            directory.wipe()
    except (OSError, MlflashError) as error:
        why = error.message if isinstance(error, MlflashError) else text_of(error)
        yield warning("disk", "{why}; copies would be in memory", "make it on each node, or name another directory "
                      "(MLFLASH_COPIES)", why=why)  # fmt: skip
        return
    text = "{path} takes {rate} a second from this process, while the others of the node write, too"
    if context.nbytes is None:
        yield fine("disk", text, path=path, rate=show_bytes(int(rate)))
        return
    job, placement, _ = _job_of(context)
    written = disk_nbytes(dataclasses.replace(job, light=0), placement) / job.copy_slots  # by a node, of whole saves
    seconds = written / job.ranks_per_node / rate
    yield fine("disk", f"{text}; so it can do a save every {{every}}", path=path, rate=show_bytes(int(rate)),
               every=show_seconds(seconds / MOST_BUSY))  # fmt: skip


def memlock(context: Context) -> Iterator[Finding]:
    """Look at the limit of locked memory, which RDMA needs for windows and buffers."""
    limit_nbytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit_nbytes == resource.RLIM_INFINITY or context.uid == 0:
        yield fine("memlock", "unlimited")
    elif limit_nbytes >= _LOCKED_NBYTES or not has_rdma():
        yield fine("memlock", "{limit_nbytes} of locked memory, which is enough", limit_nbytes=limit_nbytes)
    else:
        yield warning("memlock", "{limit_nbytes} of locked memory, but the node's RDMA device needs to lock memory",
                      "set LimitMEMLOCK=infinity for slurmd, and PropagateResourceLimitsExcept=MEMLOCK in slurm.conf; "
                      "without Slurm use ulimit -l unlimited", limit_nbytes=limit_nbytes)  # fmt: skip


def left_over(context: Context) -> Iterator[Finding]:
    """Look for large files of others that no process uses, such as those that NCCL leaves when it is killed."""
    memory = context.settings.memory
    large = [files for files in other_files(memory) if files.nbytes >= _LEFT_NBYTES]
    mapped = mapped_files(memory) if large else set()
    left = [(files, unmapped) for files in large if (unmapped := files.unmapped(mapped))]
    for files, unmapped in left[:_LEFT_NAMED]:
        yield warning(
            "left over", "{unmapped} of {count} files {name} of user {user} are mapped by no process that can be seen "
            "here; together they take {taken_nbytes}", "delete them if none of that user's jobs runs on this node, in "
            "a container or outside", unmapped=unmapped, count=files.count, name=files.name, user=files.user,
            taken_nbytes=files.nbytes,
        )  # fmt: skip


def room(context: Context) -> Iterator[Finding]:
    """Compare what the job takes with the free space, the limits of cgroups, and RAM."""
    memory, need_nbytes = context.settings.memory, None
    if context.nbytes is not None:
        need_nbytes, words = count_need(context)
        yield fine("need", f"{{need_nbytes}} on a node: {words}", need_nbytes=need_nbytes)
    stat = os.statvfs(memory)
    if need_nbytes is None and stat.f_blocks * stat.f_frsize < _TINY_NBYTES:
        yield warning("space", "{size_nbytes} in total, which is little", "use docker run --shm-size, or as root mount "
                      "-o remount,size=...", size_nbytes=stat.f_blocks * stat.f_frsize)  # fmt: skip
    held_nbytes, limits = sum(node_directory.held_by_jobs(memory).values()), available(memory)
    for check, words in (("space", "free space"), ("cgroup", "cgroup"), ("RAM", "MemAvailable")):
        left_nbytes = [nbytes for name, nbytes in limits.items() if words in name]
        if left_nbytes:
            yield judge_room(check, min(left_nbytes), held_nbytes, need_nbytes)
        elif check == "cgroup":
            yield fine("cgroup", "no memory limit, in v1 or v2")


def _job_of(context: Context) -> tuple[Job, Placement, int]:
    """The job that is planned, where its redundancy is placed, and its nodes."""
    assert context.nbytes is not None
    (nodes, ranks_per_node), settings = context.shape, context.settings
    job = Job(tuple(f"node{number}" for number in range(nodes)), ranks_per_node, context.nbytes,
              own_slots=context.slots.own, copy_slots=context.slots.copies, kept_slots=context.slots.kept,
              light=context.light, gradients_nbytes=context.gradients_nbytes,
              on_disk=bool(settings.copies))  # fmt: skip
    ((_, placement),), _ = consider(job, [settings.redundancy])
    return job, placement, nodes


def count_need(context: Context) -> tuple[int, str]:
    """Count the bytes that the job takes on the node with the most of it, as `mlflash plan` does, and say why."""
    job, placement, nodes = _job_of(context)
    scheme = context.settings.redundancy
    ranks = f"{many(job.ranks_per_node, 'rank')} of {show_bytes(job.nbytes)}, {job.own_slots} slots each"
    if job.light:
        ranks += f" and {job.light_slots} light ones of {show_bytes(job.light_nbytes)}"
    made = f"{scheme} over {nodes} nodes" if nodes > 1 else f"{scheme} protects nothing on one node"
    return node_nbytes(job, placement), f"{ranks}, {made}"


def judge_room(check: str, left_nbytes: int, held_nbytes: int, need_nbytes: int | None) -> Finding:
    """Compare what is left, and what this user's jobs hold, with what the job takes. ``check`` is the limit's name."""
    text = "{left_nbytes} left" + ", {held_nbytes} held by mlflash jobs" * bool(held_nbytes)
    values = {"left_nbytes": left_nbytes, "held_nbytes": held_nbytes}
    if need_nbytes is None:
        return fine(check, text, **values)
    text += "; the job takes {need_nbytes}, and {spare_nbytes} must stay free"
    values |= {"need_nbytes": need_nbytes, "spare_nbytes": headroom(need_nbytes)}
    wanted_nbytes = need_nbytes + headroom(need_nbytes)
    if wanted_nbytes > left_nbytes + held_nbytes:
        other = "use more nodes, another scheme (mlflash plan --memory) or fewer slots"
        return wrong(check, text, f"{_MORE[check]}; or {other}", **values)
    if wanted_nbytes > left_nbytes:
        return warning(check, text, "only a relaunch of the job that holds this memory can use it: free it with "
                       "mlflash clean for another job", **values)  # fmt: skip
    if check != "space" and need_nbytes > _SHARE * left_nbytes:
        return warning(check, text, f"the training itself needs memory, too: {_MORE[check]}", **values)
    return fine(check, text, **values)


# GPUs


def gpus(context: Context) -> Iterator[Finding]:
    """Count the GPUs that PyTorch sees, and pin some memory for them. PyTorch is imported only if there are GPUs."""
    if not any(path for pattern in _GPU_DEVICES for path in Path(context.root, "dev").glob(pattern)):
        yield fine("GPU", "no GPU here")
        return
    try:
        import torch
    except ImportError as error:
        yield warning("GPU", "this node has a GPU, but PyTorch cannot be imported: {error}", "install PyTorch",
                      error=str(error))  # fmt: skip
        return
    if torch.cuda.is_available():
        yield fine("GPU", "{gpus} x {name}", gpus=torch.cuda.device_count(), name=torch.cuda.get_device_name(0))
        yield pinning(torch.cuda.cudart(), mapped_file(context, _PINNED_NBYTES))
    else:
        yield warning("GPU", f"this node has a GPU, but PyTorch {torch.__version__} sees none", "install PyTorch for "
                      "this GPU (not a +cpu build), ask Slurm for GPUs (--gpus-per-task), and check "
                      "CUDA_VISIBLE_DEVICES and the driver")  # fmt: skip


def pinning(cudart: Any, memory: np.ndarray) -> Finding:
    """Pin some memory, as mlflash pins slots."""
    status = int(cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
    if status == 0:
        cudart.cudaHostUnregister(memory.ctypes.data)
        return fine("pinning", "cudaHostRegister pins files in memory")
    return warning("pinning", f"cudaHostRegister cannot pin files in memory: CUDA error {status}", "saves copy from "
                   "the GPU several times slower without pinning: raise the limit of locked memory (memlock), and "
                   "give a container IPC_LOCK")  # fmt: skip


# Software


def versions(context: Context) -> Iterator[Finding]:
    """Name the installed packages and their versions, and a PyTorch with which mlflash was not run."""
    installed = {}
    for name in ("mlflash", "numpy", "mpi4py", "h5py", "xxhash", "torch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    text = ", ".join([f"Python {platform.python_version()}", *map(" ".join, installed.items())])
    yield fine("versions", "{versions}", versions=text)
    if "torch" in installed and (unknown := not_run_with(installed["torch"])) is not None:
        yield warning("versions", unknown, "install one of these releases, or begin with a short run that you restore")
    if copy_kernel.FASTEST is copy_kernel.Variant.NUMPY:
        yield warning("versions", "the library with which mlflash copies was not built: saves stop training for about "
                      "twice as long", "install mlflash where there is a C compiler (cc)")  # fmt: skip


def environment(context: Context) -> Iterator[Finding]:
    """Check whether mlflash is turned off, and look for variables that look like settings but are not."""
    if not is_enabled(context.environment):
        setting = f"{DISABLE}={context.environment[DISABLE]}"
        yield warning("switch", f"{setting}: training saves and restores nothing", f"unset {DISABLE}")
    for name in unknown_variables(context.environment):
        yield warning("environment", f"{name} is not a setting of mlflash", "correct its name, or unset it")


def parity(context: Context) -> Iterator[Finding]:
    """Name the library that computes parity."""
    from ..protect.erasure_codes import library

    scheme = context.settings.redundancy
    by = re.sub(r"/\S*/", "", library())
    if by == "numpy" and parse(scheme).parity:
        yield warning("parity", "computed by numpy",
                      "install libisal2 of your distribution: ISA-L is several times as fast")  # fmt: skip
    else:
        yield fine("parity", "computed by {library}" + f"; {scheme} has no parity" * (not parse(scheme).parity),
                   library=by)  # fmt: skip


def compression(context: Context) -> Iterator[Finding]:
    """Check whether drained files can be compressed with the configured method."""
    method = context.settings.compression
    if method not in ("", "gzip"):
        from ..drain.hdf5_format import plugin

        plugin()
        yield fine("compression", f"of drained files: {method}")


# Slurm


def slurm(context: Context) -> Iterator[Finding]:
    """Ask Slurm for its configuration. For rank 0, because each call is a request to slurmctld."""
    if context.rank != 0:
        return
    if "SLURM_JOB_ID" not in context.environment:
        yield fine("job", "not in a Slurm job")
        return
    job, nodes, restarts = (context.environment.get(f"SLURM_{name}", "")
                            for name in ("JOB_ID", "JOB_NODELIST", "RESTART_COUNT"))  # fmt: skip
    yield fine("job", f"job {job} on {nodes}" + f", restarted {restarts} times" * bool(restarts))
    try:
        yield from judge_configuration(ask(["scontrol", "show", "config"]))
    except LaunchFailed as error:
        yield warning("configuration", "scontrol show config does not answer: {error}",
                      "look at Epilog, TaskEpilog and JobContainerType on a login node", error=str(error))  # fmt: skip


def judge_configuration(text: str) -> Iterator[Finding]:
    """Judge the parts of ``scontrol show config`` that concern memory. ``Epilog[0]``, ``Epilog[1]`` are one value."""
    config = collections.defaultdict[str, list[str]](list)
    for key, value in re.findall(r"^(\w+)(?:\[\d+\])?[ \t]*=[ \t]*(.*?)[ \t]*$", text, re.MULTILINE):
        config[key] += [] if value in _NONE else value.split()
    container = " ".join(config["JobContainerType"]) or "none"
    if container.endswith("tmpfs"):
        yield warning("job container", f"{container}: each job has its own /dev/shm, unless Dirs= in "
                      "job_container.conf leaves it out", "memory outlives a job step, but not the job: relaunch "
                      "inside the job (mlflash run), and do not requeue")  # fmt: skip
    else:
        yield fine("job container", container)
    yield judge_script("epilog", config["Epilog"], "at the end of a job", "")
    yield judge_script("task epilog", config["TaskEpilog"], "at the end of each task",
                       ": a relaunch in the same job would find nothing")  # fmt: skip


def judge_script(check: str, names: Sequence[str], when: str, harm: str) -> Finding:
    """Check whether a script that Slurm runs mentions shared memory. ``names`` are paths or patterns."""
    files = sorted(file for name in names for file in glob.glob(name))
    values = {"names": " ".join(names), "when": when}
    try:
        lines = [(file, line) for file in files for line in Path(file).read_text(errors="replace").splitlines()]
    except OSError:
        files, lines = [], []
    for file, line in lines:
        if re.search(r"\bshm\b", line.split("#", 1)[0]):
            return warning(check, "{file} runs {when} and has: {line}", f"make it spare /dev/shm/mlflash-*{harm}",
                           file=file, line=line.strip()[:100], **values)  # fmt: skip
    if not names:
        return fine(check, "none")
    if files:
        return fine(check, "{names} runs {when} and does not mention shm", **values)
    return warning(check, "{names} runs {when}, but cannot be read here",
                   f"ask your site whether it deletes files in /dev/shm, or leave a file there and see{harm}; "
                   "scontrol show config | grep -i epilog", **values)  # fmt: skip
