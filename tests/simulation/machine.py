"""The machine of simulated processes: what of Python and of mlflash is replaced, once for all histories.

No file of mlflash is changed: its modules get other modules `threading` and `queue`, and mpi4py is ours. Slots and
drained files are real files in a directory of the history's own.
"""

from __future__ import annotations

import errno
import importlib
import os
import pkgutil
import random
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpi
import numpy as np
import threads

MPI = mpi.Mpi()
_PACKAGES = (
    "channel checkpointer commit courier drain memory mpi placement protect restore run save state storage telemetry"
)
_REAL = {name: getattr(os, name) for name in ("urandom", "getpid", "posix_fallocate", "fsync", "_exit", "environ")}


class Faults:
    """How the operating system fails at the moment, drawn by a generator of its own.

    Attributes:
        no_space: probability that memory has no room for a file.
        bad_sync: probability that a file system fails when a file is written to it.
    """

    def __init__(self) -> None:
        self.random = random.Random(0)
        self.no_space = self.bad_sync = 0.0

    def raise_sometimes(self, probability: float, number: int) -> None:
        if probability and self.random.random() < probability:
            raise OSError(number, os.strerror(number))


FAULTS = Faults()


class Disks:
    """What was written to files on disks and not synced: a power cut loses some of it, page by page."""

    def __init__(self) -> None:
        self._unsynced: dict[str, list[tuple[int, bytes]]] = {}  # by path, offset and content of a page before

    def install(self) -> None:
        from mlflash.memory.disk_slot import DiskFile

        write, sync = DiskFile.write, DiskFile.sync

        def note_write(file: Any, start: int, pages: np.ndarray) -> None:
            path = os.readlink(f"/proc/self/fd/{file._fd}")
            with open(path, "rb") as before:
                before.seek(start)
                olds = [(start + at, before.read(4096).ljust(4096, b"\0")) for at in range(0, pages.nbytes, 4096)]
            self._unsynced.setdefault(path, []).extend(olds)
            write(file, start, pages)

        def note_sync(file: Any) -> None:
            sync(file)
            self._unsynced.pop(os.readlink(f"/proc/self/fd/{file._fd}"), None)

        DiskFile.write, DiskFile.sync = note_write, note_sync  # type: ignore[method-assign]

    def lose_unsynced(self, random: random.Random) -> None:
        """Undo some of the writes, the last ones first."""
        for path, olds in sorted(self._unsynced.items()):
            if os.path.exists(path):
                with open(path, "r+b") as file:
                    for start, old in reversed(olds):
                        if random.random() < 0.5:
                            file.seek(start)
                            file.write(old)
        self._unsynced.clear()

    def begin(self) -> None:
        self._unsynced.clear()


DISKS = Disks()


def install() -> None:
    """Replace what must be replaced, before mlflash is imported."""
    threads.replace_time()
    package: Any = type(sys)("mpi4py")
    package.MPI = MPI
    sys.modules["mpi4py"], sys.modules["mpi4py.MPI"] = package, MPI  # type: ignore[assignment]
    for name in [name for name in os.environ if name.startswith(("MLFLASH_", "PMI", "SLURM", "OMPI"))]:
        del os.environ[name]
    _fill_new_arrays()
    _replace_modules()
    from mlflash.memory import copy_threads
    from mlflash.mpi import fabric
    from mlflash.protect import transfer
    from mlflash.state import layout

    layout.BLOCK_NBYTES, transfer.CHUNK_BLOCKS, copy_threads._MOST = 4096, 1, 1
    fabric.Poke.__call__ = lambda self: None  # type: ignore[method-assign]  # there is no progress to push
    import couriers
    import rounds

    couriers.install()
    rounds.install()
    _replace_nodes()
    DISKS.install()


def _replace_nodes() -> None:
    """Let each rank be on the node, and see the memory, that its rank in the job says, also where it gets another."""
    import couriers

    from mlflash import config
    from mlflash.memory.node_directory import NodeDirectory
    from mlflash.placement.topology import Node

    opens = NodeDirectory.__init__

    def node() -> str:
        process = _running()
        assert process is not None
        return f"node{(process.parent or process).rank // couriers.WORLD.history.setting.per_node}"

    def open_of_rank(held: NodeDirectory, memory: str, *given: Any, **more: Any) -> None:
        part = Path(memory, node())
        part.mkdir(0o700, exist_ok=True)
        opens(held, str(part), *given, **more)

    NodeDirectory.__init__ = open_of_rank  # type: ignore[method-assign]
    config.this_node = lambda memory, name: Node("host", node(), node())


def _fill_new_arrays() -> None:
    """Let np.empty have the same content in each run: what is not initialized must not decide anything."""
    empty = np.empty

    def filled(*shape: Any, **how: Any) -> np.ndarray:
        made: np.ndarray = empty(*shape, **how)
        if made.dtype != object:
            made.reshape(-1).view(np.uint8)[:] = 0xA5
        return made

    np.empty = filled
    np.empty_like = lambda like, dtype=None, **how: filled(np.shape(like), dtype or like.dtype)


def _replace_modules() -> None:
    import mlflash

    root = Path(mlflash.__file__).parent
    for package in _PACKAGES.split():
        modules = [module.name for module in pkgutil.iter_modules([str(root / package)])]
        assert modules, f"mlflash has no package {package}"
        for name in modules:
            importlib.import_module(f"mlflash.{package}.{name}")
    real_event = importlib.import_module("mlflash.events").Event
    stands_for = {"threading": threads.Threading(), "queue": threads.Queues()}
    for name, loaded in list(sys.modules.items()):
        if name.startswith("mlflash"):
            for attribute, replacement in stands_for.items():
                if getattr(loaded, attribute, None) is sys.modules[attribute]:
                    setattr(loaded, attribute, replacement)
            if getattr(loaded, "Event", None) is real_event:
                loaded.Event = threads.Event


def begin(seed: int) -> None:
    noise = random.Random(seed)
    DISKS.begin()
    FAULTS.random, FAULTS.no_space, FAULTS.bad_sync = random.Random(seed + 1), 0.0, 0.0
    os.urandom = noise.randbytes
    os.getpid = lambda: _REAL["getpid"]() if _running() is None else _running().pid
    os.posix_fallocate = _failing(_REAL["posix_fallocate"], lambda: FAULTS.no_space, errno.ENOSPC)
    os.fsync = _failing(_REAL["fsync"], lambda: FAULTS.bad_sync, errno.EIO)
    os._exit = lambda code: _REAL["_exit"](code) if _running() is None else threads.scheduler().exit(_running())


def end() -> None:
    """Give the operating system and the module variables back to the process that simulates."""
    for (module, name), value in process_globals().items():
        setattr(module, name, value)
    for name, real in _REAL.items():
        setattr(os, name, real)


def memory_of(pid: int = 0) -> Path:
    """The directory of what a process (0: this one) simulates; all are as long, as lengths of messages decide much."""
    return Path(f"/dev/shm/simulation-{pid or _REAL['getpid']():08}")


def exit_now(code: int) -> None:
    _REAL["_exit"](code)


def _running() -> Any:
    kernel = threads.SCHEDULER
    return None if kernel is None or kernel.current is None else kernel.current.process


def _failing(real: Callable[..., Any], probability: Callable[[], float], number: int) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        if _running() is not None:
            FAULTS.raise_sometimes(probability(), number)
        return real(*args)

    return call


def process_globals() -> dict[tuple[Any, str], Any]:
    """The module variables that each process has of its own, as they are in a new process."""
    import mlflash.channel.connection as connection
    import mlflash.checkpointer.checkpointer as checkpointer
    import mlflash.checkpointer.process_end as process_end
    import mlflash.launch.program_mpi as program_mpi
    import mlflash.memory.node_directory as node_directory
    import mlflash.run.decider_link as decider_link
    import mlflash.save.lazy_saves as lazy_saves

    return {
        (connection, "_connections"): [], (connection, "_starting"): None,
        (program_mpi, "_pending"): [], (checkpointer, "joined"): [],
        (node_directory, "_locked_here"): set(), (process_end, "_open"): weakref.WeakKeyDictionary(),
        (lazy_saves.HOOK, "listeners"): weakref.WeakSet(), (lazy_saves.HOOK, "heard"): weakref.WeakSet(),
        (sys, "excepthook"): sys.__excepthook__, (decider_link, "_link"): None, (os, "environ"): dict(_REAL["environ"]),
    }  # fmt: skip
