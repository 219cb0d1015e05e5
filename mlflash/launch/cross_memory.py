"""Whether processes of a node can read each other's memory (process_vm_readv). MPI takes for granted that they can.

For MPI, two ranks in containers that share a host name and `/dev/shm` are on one node. If each container has its own
process numbers, the number that MPI reads by belongs to another process or to none: the call fails or returns other
bytes. In two user namespaces, and under some profiles of seccomp, the call is refused. In these cases MPI must copy
through shared memory.

Source: process_vm_readv(2), pid_namespaces(7); MPICH, src/mpid/ch4/shm/ipc/cma; UCX, src/uct/sm/mm/posix.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

_NAMESPACES = tuple(Path("/proc/self/ns", name) for name in ("pid", "user"))
_OFF = {"MPIR_CVAR_CH4_CMA_ENABLE": "0", "UCX_POSIX_USE_PROC_LINK": "n"}


class _Range(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def reach() -> str:
    """Names of the namespaces whose processes can read each other; "" if this process may not read.

    It asks the kernel by reading this process itself.
    """
    source, target = ctypes.create_string_buffer(b"x"), ctypes.create_string_buffer(1)
    ranges = [_Range(ctypes.addressof(buffer), 1) for buffer in (target, source)]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    got = libc.process_vm_readv(os.getpid(), ctypes.byref(ranges[0]), ctypes.c_ulong(1), ctypes.byref(ranges[1]),
                                ctypes.c_ulong(1), ctypes.c_ulong(0))  # fmt: skip
    return " ".join(str(path.stat().st_ino) for path in _NAMESPACES) if got == 1 else ""


def is_whole(nodes: Sequence[int], reaches: Sequence[str]) -> bool:
    """Whether on each node all ranks can read each other's memory, given node and `reach` of each rank."""
    found: dict[int, list[str]] = {}
    for node, its in zip(nodes, reaches, strict=True):
        found.setdefault(node, []).append(its)
    return all(len(told) == 1 or (len(set(told)) == 1 and told[0]) for told in found.values())


def settings(reads: bool, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that MPI needs, without those that the user has set. ``reads``: see `is_whole`."""
    return {} if reads else {name: value for name, value in _OFF.items() if name not in environment}
