"""Checks of a node: its memory for checkpoints, what deletes it, and whether it can be pinned for GPUs."""

from __future__ import annotations

import mmap
import os
import re
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UnsafePath
from ..memory import node_directory
from ..memory.memory_limits import MEMORY_KINDS, available, headroom, mapped_files, mounted, other_files
from ..memory.node_directory import NodeDirectory
from ..mpi.fabric import has_rdma
from ..text import many, show_bytes
from .doctor_context import Context
from .doctor_findings import Finding, fine, note, warning, wrong

_TRIED_NBYTES, _PINNED_NBYTES = 16 << 20, 1 << 20
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
    for path, found in node_directory.scan_user_directories(memory)[1].items():
        yield warning("private directory", "{path} does not belong to this user: {found}", "nothing is lost, because "
                      "jobs use the next name, mlflash-UID.1; ask its owner to delete it", path=path,
                      found=found)  # fmt: skip
    mapped_file(context, _TRIED_NBYTES)[:] = 1
    yield fine("writing", "{tried_nbytes} can be written", tried_nbytes=_TRIED_NBYTES)


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


def count_need(context: Context) -> tuple[int, str]:
    """Count the bytes that the job takes on the node with the most of it, as `mlflash plan` does, and say why."""
    from .plan_schemes import Job, consider, node_nbytes

    assert context.nbytes is not None
    (nodes, ranks_per_node), scheme = context.shape, context.settings.redundancy
    job = Job(tuple(f"node{number}" for number in range(nodes)), ranks_per_node, context.nbytes,
              own_slots=context.own_slots, copy_slots=context.copy_slots)  # fmt: skip
    ((_, placement),), _ = consider(job, [scheme])
    ranks = f"{many(ranks_per_node, 'rank')} of {show_bytes(context.nbytes)}, {context.own_slots} slots each"
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
