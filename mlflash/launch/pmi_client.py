"""Shares one text by the launcher's own PMI-1, without MPI: hydra of MPICH and of Intel MPI, ``srun --mpi=pmi2``.

From ``cmd=init`` until ``cmd=finalize`` a process is a rank of PMI for its launcher. If it ends in between, the
launcher kills the whole job. So both commands are sent here, one right after the other. Afterwards the launcher treats
the process like one that never used PMI. No process can begin again, because hydra closes its end. If a program
initializes MPI by the same PMI, it must do so before, and then mlflash does not use PMI.

Source: MPICH, src/pmi/src/pmi_wire.c; src/pm/hydra/proxy/pmip_pmi.c (``fn_finalize``).

MPI is refused from then on (`refuse_mpi`) with an error that says what to do: MPI_Init would find that the launcher has
closed its end, and end the process. An import of `mpi4py.MPI` that initializes MPI raises an ImportError, as if there
were no MPI. With ``mpi4py.rc.initialize = False`` the import works for the types, and initializing MPI raises the
error. Other ways to MPI_Init, such as a library in C, are not detected.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import select
import socket
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

from ..errors import DeadlineExceeded, MpiUnavailable, WorldMismatch
from .launcher_variables import Launched
from .pmi_server import PmiError, parse
from .program_mpi import uses_mpi

_KEY = "mlflash-rendezvous"


def has_pmi(environment: Mapping[str, str], me: Launched) -> bool:
    """Whether this process has an unused PMI of its launcher, with the same rank."""
    if (environment.get("PMI_RANK"), environment.get("PMI_SIZE")) != (str(me.rank), str(me.size)) or uses_mpi():
        return False
    try:
        fd = int(environment["PMI_FD"])
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return False
    except (KeyError, ValueError, OSError):  # something between launcher and program has closed it
        return False
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return not poll.poll(0)  # it has an end, or an answer that somebody else waits for


def share(environment: Mapping[str, str], me: Launched, text: str | None, timeout_s: float) -> str:
    """Give rank 0's text, without spaces, to all. Collective over the ranks of the launcher.

    Raises:
        DeadlineExceeded: a rank has not come.
        WorldMismatch: the launcher does not answer like PMI-1.
    """
    try:
        with _Pmi(environment, time.monotonic() + timeout_s) as pmi:
            pmi.ask("init pmi_version=1 pmi_subversion=1", "response_to_init")
            pmi.ask("get_maxes", "maxes")
            name = pmi.ask("get_my_kvsname", "my_kvsname")["kvsname"]
            if text is not None:
                pmi.ask(f"put kvsname={name} key={_KEY} value={text}", "put_result")
            pmi.ask("barrier_in", "barrier_out")
            shared = pmi.ask(f"get kvsname={name} key={_KEY}", "get_result")["value"]
            pmi.ask("finalize", "finalize_ack")
            return shared
    except TimeoutError:
        raise DeadlineExceeded(
            f"waited {timeout_s:g} s for all ranks to meet by the PMI of {me.launcher}: a rank has not come",
            rank=me.rank,
        ) from None
    except (OSError, ValueError, KeyError) as error:
        raise WorldMismatch(
            f"the ranks cannot meet by the PMI of {me.launcher}: {error}", rank=me.rank, expected="PMI-1"
        ) from error


class _Pmi:
    """A connection to the server of PMI."""

    def __init__(self, environment: Mapping[str, str], end: float):
        self._end = end
        self._received = bytearray()
        self._sock = socket.socket(fileno=os.dup(int(environment["PMI_FD"])))

    def __enter__(self) -> _Pmi:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()

    def ask(self, command: str, answer: str) -> dict[str, str]:
        self._sock.sendall(f"cmd={command}\n".encode("ascii"))
        while b"\n" not in self._received:
            self._wait()
            received = self._sock.recv(4096)
            if not received:
                raise PmiError("the launcher closed the connection")
            self._received += received
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received = bytearray(rest)
        words = parse(line)
        if words["cmd"] != answer or words.get("rc", "0") != "0":
            raise PmiError(f"the launcher answered {line[:80]!r}, where {answer} was expected")
        return words

    def _wait(self) -> None:
        poll = select.poll()  # instead of a timeout of the socket, which all copies of its descriptor would share
        poll.register(self._sock, select.POLLIN)
        left = self._end - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise TimeoutError


_NAME = "mpi4py.MPI"


class MpiRefused(MpiUnavailable, ImportError):
    """MPI cannot be started in this process any more."""


def refuse_mpi() -> None:
    """Refuse MPI in this process and those that it forks, from now on, unless MPI is up."""
    if not is_refused():
        sys.meta_path.insert(0, _Finder())
    if (module := sys.modules.get(_NAME)) is not None:
        _guard(module)


def is_refused() -> bool:
    """Whether MPI is refused in this process."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def _guard(module: Any) -> None:
    if not module.Is_initialized():
        module.Init = module.Init_thread = _refuse


def _refuse(*_: object) -> NoReturn:
    raise MpiRefused(
        "MPI cannot be started in this process any more: mlflash has used the launcher's PMI connection, which MPI "
        "needs to start, to find the other ranks. A program that uses MPI itself must initialize it before it makes a "
        "Checkpointer. If it only needs the types of mpi4py, set mpi4py.rc.initialize = False before it imports "
        "mpi4py.MPI"
    )


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _NAME:
            return None
        if sys.modules["mpi4py"].rc.initialize:
            _refuse()
        finders = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(name, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any):
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _guard(module)
