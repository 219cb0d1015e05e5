"""The MPI of couriers: which library it is, how its processes read each other's memory, and what it leaves in /dev/shm.

**The library** need not be that of the trainer. It is the one that ``MLFLASH_LIBMPI`` names, else that of the Python
package mpich of this environment, else the one that mpi4py finds (``MPI4PY_LIBMPI``, or the usual places). Couriers
start without a launcher of MPI, so the library must speak PMI-1, as MPICH, Cray MPICH and Intel MPI do.

**The memory of other processes.** MPI takes for granted that processes of a node can read each other's memory
(process_vm_readv). For MPI, two ranks in containers that share a host name and `/dev/shm` are on one node. If each
container has its own process numbers, the number that MPI reads by belongs to another process or to none: the call
fails or returns other bytes. In two user namespaces, and under some profiles of seccomp, the call is refused. In these
cases MPI must copy through shared memory.

**Shared memory in /dev/shm** stays there when MPICH's processes are killed. While a process lives, /proc tells which
segments it maps. If it was killed before anybody asked, the segments are removed whose names follow from the name of
the epoch. Segments stay only if an MPICH names them in another way. An agent also writes the names of its couriers'
segments to a file in a private directory of its user, and holds a lock on it while it lives: a scheduler that ends a
job kills the agent, too, and each relaunch on the node would leave some MiB. Before the next agent has a courier start
MPI, it removes what files name that nobody holds.

Source: process_vm_readv(2), pid_namespaces(7); MPICH, src/mpid/ch4/shm/ipc/cma, src/mpid/ch4/shm/posix/posix_init.c and
src/util/mpir_pmi.c; UCX, src/uct/sm/mm/posix.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import glob
import os
import re
import secrets
import stat
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from .own_process import opened

LIBRARY = "MLFLASH_LIBMPI"
"""The path of the MPI library of couriers."""
CHOSEN = "MPI4PY_LIBMPI"
"""The path that mpi4py loads; the agent notes there what it has chosen."""
_FILE = "libmpi.so.12"
_NO_PMI = ("Open MPI",)  # names of mpi4py


def library_of(environment: Mapping[str, str]) -> str | None:
    """The path of the library; None: mpi4py looks for one."""
    return environment.get(LIBRARY) or _of_package()


def _of_package() -> str | None:
    # Where its wheel puts it. The standard library's importlib.metadata would take 2 MB in each courier.
    folders = [folder for folder in sys.path if folder and glob.glob(f"{glob.escape(folder)}/mpich-*.dist-info")]
    paths = (os.path.normpath(os.path.join(folder, "..", "..", _FILE)) for folder in folders)
    return next(filter(os.path.exists, paths), None)


def needs_launcher(vendor: str) -> bool:
    """Whether an MPI, as mpi4py names it, can be started by its own launcher only."""
    return vendor in _NO_PMI


def describe() -> str:
    """The name, version, devices and path of the library that was loaded. Not collective; MPI need not be up."""
    mpi = sys.modules["mpi4py.MPI"]
    name, version = mpi.get_vendor()
    lines = [line.partition(":") for line in mpi.Get_library_version().splitlines()]
    device = next((value.strip() for key, _, value in lines if key.strip() == "MPICH Device"), "")
    path = os.environ.get(CHOSEN, "")
    return f"{name} {'.'.join(map(str, version))}" + (f" ({device})" if device else "") + (f", {path}" if path else "")


# The memory of other processes

_NAMESPACES = tuple(Path("/proc/self/ns", name) for name in ("pid", "user"))
_COPYING = {"MPIR_CVAR_CH4_CMA_ENABLE": "0", "UCX_POSIX_USE_PROC_LINK": "n"}


class _Range(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def readable_namespaces() -> str:
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


def can_all_read(nodes: Sequence[int], namespaces: Sequence[str]) -> bool:
    """Whether on each node all ranks can read each other's memory, given node and `readable_namespaces` of each."""
    on_node: dict[int, list[str]] = {}
    for node, readable in zip(nodes, namespaces, strict=True):
        on_node.setdefault(node, []).append(readable)
    return all(len(names) == 1 or (len(set(names)) == 1 and bool(names[0])) for names in on_node.values())


def memory_settings(reads: bool, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that MPI needs, without those that the user has set. ``reads``: see `can_all_read`."""
    return {} if reads else {name: value for name, value in _COPYING.items() if name not in environment}


# Shared memory in /dev/shm

SHARED_MEMORY = Path("/dev/shm")
_NAME = re.compile(r" /dev/shm/(mpich_(?:shm|vci)_[0-9a-f]{1,16}_[0-9]{1,9})$", re.MULTILINE)


def is_segment(name: object) -> bool:
    """Whether this is the name of such a segment."""
    return isinstance(name, str) and _NAME.fullmatch(f" {SHARED_MEMORY}/{name}") is not None


def mapped_by(pid: int | str) -> set[str]:
    """The names of the segments that a process maps; none if it has ended or belongs to somebody else."""
    try:
        return set(_NAME.findall(Path(f"/proc/{pid}/maps").read_text(errors="replace")))
    except OSError:
        return set()


def named_after(epoch: str, node: int) -> set[str]:
    """The names of the segments that MPICH 5 makes for an epoch on a node, numbered as in `pmi_server`."""
    hashes = (_fnv(epoch.encode()), _fnv(f"{epoch}-1".encode()))  # MPICH 5.0 and 5.1
    return {f"mpich_{what}_{hashed:x}_{node}" for what in ("shm", "vci") for hashed in hashes}


def remove_unmapped(names: Collection[str]) -> set[str]:
    """Remove those of these segments that no process maps any more; return the others."""
    ours = set(filter(_is_ours, names))
    if not ours:
        return set()
    still = ours & set().union(*(mapped_by(entry) for entry in os.listdir("/proc") if entry.isdigit()))
    for name in ours - still:
        (SHARED_MEMORY / name).unlink(missing_ok=True)
    return still


def _fnv(text: bytes) -> int:
    """Hash by FNV-1a, 32 bits."""
    hashed = 2166136261
    for byte in text:
        hashed = (hashed ^ byte) * 16777619 & 0xFFFFFFFF
    return hashed


def _is_ours(name: str) -> bool:
    try:
        status = (SHARED_MEMORY / name).lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


_PREFIX = "segments-"


class SegmentRecord:
    """The file of one agent in a private directory of its user. Close it; it may be closed twice.

    It also removes what agents have left that were killed. Raises OSError or UnsafePath: no file can be written there.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        with opened(directory) as folder:
            _remove_left(Path(folder))
            self._name, self._fd = _made(Path(folder))

    def add(self, names: Collection[str]) -> None:
        """Add names of segments, before MPI makes them."""
        os.write(self._fd, "".join(f"{name}\n" for name in sorted(names)).encode())

    def close(self) -> None:
        """Remove the file: nothing is left, or another agent's file names it, too."""
        if self._fd >= 0:
            with contextlib.suppress(FileNotFoundError):
                (self._directory / self._name).unlink()
            os.close(self._fd)
            self._fd = -1


def _made(folder: Path) -> tuple[str, int]:
    while True:
        name = f"{_PREFIX}{secrets.token_hex(8)}"
        fd = os.open(folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return name, fd
        os.close(fd)  # somebody has just taken it for left


def _remove_left(folder: Path) -> None:
    """Remove the segments that files name that nobody holds, unless a file names them that somebody holds."""
    with contextlib.ExitStack() as held:
        left: dict[Path, set[str]] = {}
        used: set[str] = set()
        for path in folder.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):  # its agent has just ended
                file = held.enter_context(path.open())
                names = {name for name in file.read().split() if is_segment(name)}
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    left[path] = names
                except BlockingIOError:
                    used |= names
        still = remove_unmapped(set().union(*left.values()) - used)
        for path, names in left.items():
            if not names & (still | used):
                path.unlink(missing_ok=True)
