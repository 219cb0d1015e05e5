"""How the ranks of a job find each other without MPI: rank 0 has a short text, and all ranks get it.

They use the first of these ways that the job has:

1. torch.distributed, if the program has initialized it: its store, of whatever kind (`torch_store`);
2. PMI-1 of the launcher (`pmi_client`): mpiexec of MPICH and of Intel MPI, ``srun --mpi=pmi2``. MPI can be started by
   it no more then (`refuse_mpi`);
3. MASTER_ADDR and MASTER_PORT: rank 0 listens on the first free one of 16 ports that follow from MASTER_PORT (torch or
   torchrun listens on MASTER_PORT itself, and other jobs of the host on the ports after it), and gives the text to
   every rank that knows the launch, by a key-value store for this purpose;
4. a socket in a private directory, if all ranks are on one host and the launcher has a name for the launch: prterun
   and srun.

All ranks choose the same way, because they have the same launcher and run the same program.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import DeadlineExceeded, WorldMismatch
from . import pmi_client, torch_store
from .key_value_store import KeyValueStore, listen
from .launcher_variables import Launched, is_on_one_host, launched, name_of_launch
from .own_process import opened
from .pmi_client import refuse_mpi
from .store_client import StoreClient, StoreLost, left_s

_PREFIX = "mlflash"
_PORTS = 16
_BELOW = 7000
"""How far the ports are below MASTER_PORT, which usually is 29500. Jobs of a host count upward from there, toward the
ports that the kernel gives to connections."""
_LAST_RESERVED = 1023  # only root may use ports up to this one
_ANSWER_S = 2.0  # limit for a new connection to say which launch it is of, and for rank 0 to answer
_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.2
_HELP = (
    "set MASTER_ADDR to the name of rank 0's host and MASTER_PORT to a free port, the same on all ranks, or call "
    "torch.distributed.init_process_group before"
)


def who_am_i(environment: Mapping[str, str]) -> Launched:
    """The rank of this process and the number of ranks, from its launcher or torch.distributed.

    Raises:
        WorldMismatch: the two contradict each other, or the launcher's variables do.
    """
    me, torch = launched(environment), _torch_distributed()
    if torch is None:
        return me
    rank, size = int(torch.get_rank()), int(torch.get_world_size())
    if me.launcher == "none":
        return Launched(rank, size, None, "torch.distributed")
    if (rank, size) != (me.rank, me.size):
        raise WorldMismatch(
            f"torch.distributed and {me.launcher} contradict each other about this process",
            expected=f"rank {me.rank} of {me.size} ({me.launcher})",
            found=f"rank {rank} of {size} (torch.distributed)",
        )
    return me


def way(environment: Mapping[str, str], me: Launched) -> str:
    """How ranks find each other without MPI, in words; "" if they cannot. The same on all ranks; not collective."""
    if me.size == 1:
        return "there is one rank"
    if _torch_distributed() is not None:
        return "the store of torch.distributed"
    if me.launcher in ("hydra", "srun") and pmi_client.has_pmi(environment, me):
        return f"the PMI of {me.launcher}"
    if "MASTER_ADDR" in environment and "MASTER_PORT" in environment:
        return "MASTER_ADDR and MASTER_PORT"
    if name_of_launch(environment, me) is not None and is_on_one_host(environment, me):
        return "a socket in this user's directory"
    return ""


def rendezvous(
    environment: Mapping[str, str], me: Launched, text: str | None, directory: Path | None, timeout_s: float
) -> str:
    """Give rank 0's text to all ranks, by the `way` of this job. Collective over the ranks that were launched.

    Args:
        text: on rank 0, of letters, digits and ``.,:-``; None on others.
        directory: a private directory of this user, made if needed; for ranks on one host. None: not this way.

    Raises:
        DeadlineExceeded: some ranks have not come.
        WorldMismatch: they cannot find each other; the message says what to set.
        UnsafePath: the directory is somebody else's, or open to others.
    """
    torch = _torch_distributed()
    if torch is not None:
        store = torch.distributed_c10d._get_default_store()
        return torch_store.share(torch, store, me.rank, me.size, text, timeout_s)
    if me.launcher in ("hydra", "srun") and pmi_client.has_pmi(environment, me):
        refuse_mpi()
        return pmi_client.share(environment, me, text, timeout_s)
    if "MASTER_ADDR" in environment and "MASTER_PORT" in environment:
        return _by_ports(environment, me, text, timeout_s)
    name = name_of_launch(environment, me)
    if name is not None and directory is not None and is_on_one_host(environment, me):
        return _by_directory(directory, name, me, text, timeout_s)
    advice = f"start them by srun --mpi=pmi2, or {_HELP}" if me.launcher == "srun" else _HELP
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    raise WorldMismatch(
        f"{me.size} ranks of {me.launcher} have no way to find each other without MPI: {advice}",
        rank=me.rank,
        found=f"no {' and no '.join(missing)}, and torch.distributed is not initialized",
    )


# torch.distributed


def _torch_distributed() -> Any:
    """The module torch.distributed, if this program has imported and initialized it."""
    torch = sys.modules.get("torch.distributed")
    is_there = torch is not None and hasattr(torch, "is_initialized") and torch.is_initialized()
    return torch if is_there else None


# Ports that follow from MASTER_PORT


def _by_ports(environment: Mapping[str, str], me: Launched, text: str | None, timeout_s: float) -> str:
    host, port = environment["MASTER_ADDR"], environment["MASTER_PORT"]
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise WorldMismatch("MASTER_PORT is no port", expected="1 to 65535", found=port[:80])
    ports = ports_of(int(port))
    where = f"at ports {ports[0]} to {ports[-1]} of {host}"
    launch = _digest(port, str(me.size), environment.get("TORCHELASTIC_RUN_ID", ""))
    if text is None:
        return ask([(host, number) for number in ports], where, launch, me.rank, timeout_s)
    # If all ranks are on this host, only this host listens. Otherwise MASTER_ADDR may mean something else here.
    why = ""
    for address in [host, ""] if is_on_one_host(environment, me) else [""]:
        for number in ports:
            try:
                listener = _listen_at(address, number)
            except OSError as error:
                why = str(error)
            else:
                give(listener, launch, me.size, text, timeout_s)
                return text
    raise WorldMismatch(f"rank 0 cannot listen {where}, where the other ranks look for it: {why}", rank=0)


def ports_of(port: int) -> range:
    """The ports of which rank 0 listens on one, for this MASTER_PORT."""
    first = port - _BELOW if port - _BELOW > _LAST_RESERVED else port + 1
    first = min(first, 65536 - _PORTS)
    return range(first, first + _PORTS)


def _listen_at(host: str, port: int) -> socket.socket:
    if not host:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server((host, port), family=family, dualstack_ipv6=both, backlog=1024)
    address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
    return listen(str(address[0]), port)


# A directory


def _by_directory(directory: Path, name: str, me: Launched, text: str | None, timeout_s: float) -> str:
    launch = _digest(name, str(me.size))
    with opened(directory) as folder:
        path = f"{folder}/{launch}"  # short enough for a socket, wherever the directory is
        if text is None:
            return ask([path], f"at a socket in {directory}", launch, me.rank, timeout_s)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            new = f"{path}.{secrets.token_hex(4)}"
            listener.bind(new)
            listener.listen(1024)
            os.rename(new, path)  # replaces what a killed rank 0 has left
            try:
                give(listener, launch, me.size, text, timeout_s)
            finally:
                os.unlink(path)
        return text


# A store that all ranks find


def give(listener: socket.socket, launch: str, size: int, text: str, timeout_s: float) -> None:
    """Give a text to all other ranks, and return when all have it. Collective, with `ask` on the others.

    ``launch``: 32 hexadecimal digits that only this launch has; no secret. Raises DeadlineExceeded, with the ranks that
    have not come.
    """
    end = time.monotonic() + timeout_s
    with contextlib.closing(KeyValueStore(listener, launch, stranger_s=_ANSWER_S)) as store:
        store.put("text", text)
        while len(got := store.below("got/")) < size - 1:
            if time.monotonic() >= end:
                missing = [rank for rank in range(1, size) if str(rank) not in got]
                raise DeadlineExceeded(
                    f"waited {timeout_s:g} s for the other ranks to ask rank 0 where its key-value store is: "
                    f"{len(missing)} of {size} have not come",
                    rank=0,
                    ranks=missing,
                )
            store.step(min(left_s(end), _ANSWER_S))


def ask(addresses: Sequence[tuple[str, int] | str], where: str, launch: str, rank: int, timeout_s: float) -> str:
    """Ask rank 0 for its text until it answers. Collective, with `give` on rank 0.

    ``addresses``, ``where``: where rank 0 may listen, in the order in which it tries them, and the same in words.
    Raises DeadlineExceeded.
    """
    end = time.monotonic() + timeout_s
    pause_s, why = _PAUSE_S, "it was not tried"
    while True:
        for address in addresses:
            if not (left := left_s(end)):
                raise DeadlineExceeded(
                    f"waited {timeout_s:g} s for rank 0 to say where its key-value store is, {where}; last: {why}",
                    rank=rank,
                    ranks=[0],
                )
            try:
                with contextlib.closing(StoreClient(address, launch)) as store:
                    text = store.get("text", min(left, _ANSWER_S))
                    with contextlib.suppress(StoreLost, DeadlineExceeded):  # rank 0 has heard of it or given up
                        store.put(f"got/{rank}", "", min(left, _ANSWER_S))
                    return text
            except (OSError, DeadlineExceeded) as error:
                why = str(error)
        time.sleep(min(pause_s, left_s(end)))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _digest(*words: str) -> str:
    """A text that only this launch has; it is no secret."""
    return hashlib.sha256("\0".join([_PREFIX, str(os.geteuid()), *words]).encode()).hexdigest()[:32]
