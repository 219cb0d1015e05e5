"""The memory that a node has for checkpoints: the memory file system, limits of cgroups, RAM and locked memory."""

from __future__ import annotations

import mmap
import os
import resource
import tempfile
import time
from collections.abc import Iterator

import numpy as np

from ..errors import UnsafePath
from ..memory import node_directory, user_directory
from ..memory.memory_limits import available
from ..memory.node_directory import NodeDirectory
from ..memory.other_files import mapped_files, other_files
from .findings import Finding, fine, warning, wrong
from .memory_need import Need

_TRIED_NBYTES = 16 << 20
_TINY_NBYTES = 1 << 30  # Docker's /dev/shm has 64 MiB by default
_LOCKED_NBYTES = 1 << 30
_LEFT_NBYTES = 16 << 20
_LEFT_NAMED = 5
_SHARE = 0.8  # the share of a cgroup's free memory, or of RAM, that slots may take: training needs some, too
_TAKES = "; the job takes {need_nbytes}, and {spare_nbytes} must stay free"
_ROOM = "use more nodes, another scheme (mlflash plan --memory) or fewer slots"


def free_space(memory: str, need: Need | None) -> Finding:
    """Compare the free space of the memory file system with what the job takes."""
    stat = os.statvfs(memory)
    held = held_by_jobs(memory)
    return judge_space(memory, stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize, held, need)


def held_by_jobs(memory: str) -> int:
    """Count the bytes of the slots that jobs of this user hold, alive or not. Not collective."""
    return sum(node_directory.held_by_jobs(memory).values())


def judge_space(memory: str, size: int, free: int, held: int, need: Need | None) -> Finding:
    """Compare size and free space with what the job takes.

    Args:
        memory: the memory file system.
        size, free: its size and free space in bytes.
        held: bytes that slots of this user's jobs take.
        need: what the job takes. None: unknown.
    """
    text = "{free_nbytes} free of {size_nbytes}" + (", {held_nbytes} held by mlflash jobs" if held else "")
    values = {"free_nbytes": free, "size_nbytes": size, **({"held_nbytes": held} if held else {})}
    if need is None:
        if size < _TINY_NBYTES:
            return warning("space", text, "this is little: use docker run --shm-size, or as root mount -o "
                           "remount,size=...", **values)  # fmt: skip
        return fine("space", text, **values)
    values |= {"need_nbytes": need.nbytes, "spare_nbytes": need.spare_nbytes}
    text += _TAKES
    if need.free_nbytes > size:
        advice = f"as root: mount -o remount,size=... {memory} (docker run --shm-size); or {_ROOM}"
        return wrong("space", text, advice, **values)
    if need.free_nbytes > free + held:
        return wrong("space", text, f"other files fill {memory}: delete them; or {_ROOM}", **values)
    if need.free_nbytes > free:
        return warning("space", text, "only a relaunch of the job that holds this memory can use it: free it with "
                       "mlflash clean for another job", **values)  # fmt: skip
    return fine("space", text, **values)


def left_over(memory: str) -> Iterator[Finding]:
    """Look for large files of others that no process uses, such as those that NCCL leaves when it is killed."""
    large = [one for one in other_files(memory) if one.nbytes >= _LEFT_NBYTES]
    mapped = mapped_files(memory) if large else set()
    left = [(one, count) for one in large if (count := one.unmapped(mapped))]
    for one, unmapped in left[:_LEFT_NAMED]:
        yield warning(
            "left over", "{unmapped} of {count} files {name} of user {user} are mapped by no process that can be seen "
            "here; together they take {taken_nbytes}", "delete them if none of that user's jobs runs on this node, in "
            "a container or outside", unmapped=unmapped, count=one.count, name=one.name, user=one.user,
            taken_nbytes=one.nbytes,
        )  # fmt: skip


def limits(memory: str, need: Need | None) -> Iterator[Finding]:
    """Compare what cgroups and RAM have left with what the job takes."""
    left = available(memory)
    groups = [nbytes for name, nbytes in left.items() if "cgroup" in name]
    if not groups:
        yield fine("cgroup", "no memory limit, in v1 or v2")
    else:
        more = "ask for more memory (sbatch --mem=0), because the kernel kills processes at the limit"
        yield judge_limit("cgroup", min(groups), need, more)
    if (ram := left.get("MemAvailable of the node")) is not None:
        yield judge_limit("RAM", ram, need, "take nodes with more memory")


def judge_limit(check: str, left: int, need: Need | None, more: str) -> Finding:
    """Compare the memory below a limit with what the job takes.

    Args:
        check: name of the limit.
        left: free bytes below it.
        need: what the job takes. None: unknown.
        more: how to get more.
    """
    text = "{left_nbytes} left"
    if need is None:
        return fine(check, text, left_nbytes=left)
    text += _TAKES
    values = {"left_nbytes": left, "need_nbytes": need.nbytes, "spare_nbytes": need.spare_nbytes}
    if need.free_nbytes > left:
        return wrong(check, text, f"{more}; or {_ROOM}", **values)
    if need.nbytes > _SHARE * left:
        return warning(check, text, f"the training itself needs memory, too: {more}", **values)
    return fine(check, text, **values)


def writing(memory: str, nbytes: int = _TRIED_NBYTES) -> Iterator[Finding]:
    """Write a small unnamed file, which is gone when it is closed, and look at this user's directory."""
    try:
        NodeDirectory(memory, "doctor-looks-only", None, make=False).close()
    except FileNotFoundError:
        pass
    except UnsafePath as error:
        yield wrong("private directory", "{error}, {found}", "delete it, or ask its owner to", error=error.message,
                    found=str(error.found))  # fmt: skip
    for path, found in user_directory.look(memory)[1].items():
        yield warning("private directory", "{path} does not belong to this user: {found}", "nothing is lost, because "
                      "jobs use the next name, mlflash-UID.1; ask its owner to delete it", path=path,
                      found=found)  # fmt: skip
    with tempfile.TemporaryFile(dir=memory) as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        target = np.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=np.uint8)
        source = np.ones(nbytes, dtype=np.uint8)
        fresh, warm = (_copy(target, source) for _ in range(2))
    yield fine("writing", "{tried_nbytes}: {fresh_gbs} into fresh pages, {warm_gbs} into warm ones",
               tried_nbytes=nbytes, fresh_gbs=fresh, warm_gbs=warm)  # fmt: skip


def _copy(target: np.ndarray, source: np.ndarray) -> float:
    start = time.perf_counter()
    np.copyto(target, source)
    return source.nbytes / (time.perf_counter() - start) / 1e9


def memlock(rdma: bool, root: bool) -> Finding:
    """Look at the limit of locked memory, which RDMA needs for windows and buffers."""
    return judge_memlock(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], rdma, root)


def judge_memlock(limit: int, rdma: bool, root: bool) -> Finding:
    """Judge a limit of locked memory.

    Args:
        limit: bytes; RLIM_INFINITY: no limit.
        rdma: whether the node has an RDMA device.
        root: whether this is root, who has no limit.
    """
    if limit == resource.RLIM_INFINITY:
        return fine("memlock", "unlimited")
    text = "{limit_nbytes} of locked memory"
    if root or not rdma:
        why = ", which does not apply to root" if root else ", which does not matter without an RDMA device"
        return fine("memlock", text + why, limit_nbytes=limit)
    if limit >= _LOCKED_NBYTES:
        return fine("memlock", text, limit_nbytes=limit)
    return warning(
        "memlock", text + ", but the node's RDMA device needs to lock memory",
        "set LimitMEMLOCK=infinity for slurmd, and PropagateResourceLimitsExcept=MEMLOCK in slurm.conf; without Slurm "
        "use ulimit -l unlimited", limit_nbytes=limit,
    )  # fmt: skip
