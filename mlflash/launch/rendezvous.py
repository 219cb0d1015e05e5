"""How the ranks of a job find each other without MPI.

They use the first of these ways that the job has:

1. torch.distributed, if the program has initialized it: its store, of whatever kind;
2. PMI-1 of the launcher (`pmi_client`): mpiexec of MPICH and of Intel MPI, ``srun --mpi=pmi2``. MPI can be started by
   it no more then (`refuse_mpi`);
3. MASTER_ADDR and MASTER_PORT: the agent of rank 0 listens on the first free one of 16 ports that follow from
   MASTER_PORT (torch or torchrun listens on MASTER_PORT itself, and other jobs of the host on the ports after it). Its
   token follows from a secret that only this user knows (`token_of`);
4. a file in a private directory, if all ranks are on one host and the launcher has a name for the launch: prterun and
   srun.

By the other ways rank 0 gives all ranks a short text: the address of its agent, and a token. All ranks choose the same
way, because they have the same launcher and run the same program.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime
import functools
import hmac
import os
import random
import secrets
import socket
import stat
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import DeadlineExceeded, UnsafePath, WorldMismatch
from . import pmi_client
from .launcher_variables import Launched, is_on_one_host, launched, name_of_launch
from .own_process import opened
from .pmi_client import refuse_mpi

TOKEN = "MLFLASH_TOKEN"
"""The variable with the secret that only one user knows, on all nodes. Its value is the same on all ranks."""
_TOKEN_FILE = "token"
_PORTS = 16
_LISTENING, _TRIES = range(10_000, 32_000), 100  # below the ports that a kernel gives to connections
_BELOW = 7000
"""How far the ports are below MASTER_PORT, which usually is 29500. Jobs of a host count upward from there, toward the
ports that the kernel gives to connections."""
_LAST_RESERVED = 1023  # only root may use ports up to this one
_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.2
_STORE_PREFIX = "mlflash"
_STORE_PAUSE_S, _LONGEST_STORE_PAUSE_S = 0.001, 0.05
_HELP = (
    "set MASTER_ADDR to the name of rank 0's host and MASTER_PORT to a free port, the same on all ranks, or call "
    "torch.distributed.init_process_group before"
)


@dataclasses.dataclass(frozen=True)
class Ports:
    """Where the agent of rank 0 listens, as all ranks know.

    Attributes:
        hosts: addresses of its host at which it may listen, the best one first; "": at all.
        places: addresses and ports at which other ranks look for it.
        token: that only ranks of this user and launch know.
        where: the same in words.
    """

    hosts: Sequence[str]
    places: Sequence[tuple[str, int]]
    token: str
    where: str

    @property
    def ports(self) -> list[int]:
        return list(dict.fromkeys(port for _, port in self.places))


@dataclasses.dataclass(frozen=True)
class Meeting:
    """How ranks meet that already know who they are.

    Attributes:
        me: this rank.
        how: how they meet, in words.
        timeout_s: how long everything may take, in seconds.
        share: gives rank 0's text to all ranks, within a number of seconds.
        ports: if they need no text.
        check: raises if the ranks have changed, so that waiting is useless.
    """

    me: Launched
    how: str
    timeout_s: float
    share: Callable[[str | None, float], str] | None = None
    ports: Ports | None = None
    check: Callable[[], None] = lambda: None


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


def meeting_of(environment: Mapping[str, str], me: Launched, directory: Path | None, timeout_s: float) -> Meeting:
    """How the ranks that were launched find each other without MPI. Not collective, and the same on all ranks.

    ``directory``: private to this user, made if needed; for ranks on one host. None: not this way.

    Raises:
        WorldMismatch: they cannot find each other; the message says what to set.
        UnsafePath: the secret of this user is open to others.
    """
    if me.size == 1:
        return Meeting(me, "one rank", timeout_s, lambda text, _: text or "")
    torch = _torch_distributed()
    if torch is not None:
        store = torch.distributed_c10d._get_default_store()
        share = functools.partial(share_by_store, torch, store, me.rank, me.size)
        return Meeting(me, "the store of torch.distributed", timeout_s, share)
    if me.launcher in ("hydra", "srun") and pmi_client.has_pmi(environment, me):
        return Meeting(me, f"the PMI of {me.launcher}", timeout_s, functools.partial(_by_pmi, environment, me))
    if "MASTER_ADDR" in environment and "MASTER_PORT" in environment:
        return Meeting(me, "MASTER_ADDR and MASTER_PORT", timeout_s, ports=_ports(environment, me, directory))
    name = name_of_launch(environment, me)
    if name is not None and directory is not None and is_on_one_host(environment, me):
        share = functools.partial(_by_file, directory, f"{name} {me.size}", me)
        return Meeting(me, "a file in this user's directory", timeout_s, share)
    advice = f"start them by srun --mpi=pmi2, or {_HELP}" if me.launcher == "srun" else _HELP
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    raise WorldMismatch(
        f"{me.size} ranks of {me.launcher} have no way to find each other without MPI: {advice}",
        rank=me.rank,
        found=f"no {' and no '.join(missing)}, and torch.distributed is not initialized",
    )


def _by_pmi(environment: Mapping[str, str], me: Launched, text: str | None, timeout_s: float) -> str:
    refuse_mpi()
    return pmi_client.share(environment, me, text, timeout_s)


def _torch_distributed() -> Any:
    """The module torch.distributed, if this program has imported and initialized it."""
    torch = sys.modules.get("torch.distributed")
    is_there = torch is not None and hasattr(torch, "is_initialized") and torch.is_initialized()
    return torch if is_there else None


# Ports that follow from MASTER_PORT


def _ports(environment: Mapping[str, str], me: Launched, directory: Path | None) -> Ports:
    host, port = environment["MASTER_ADDR"], environment["MASTER_PORT"]
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise WorldMismatch("MASTER_PORT is no port", expected="1 to 65535", found=port[:80])
    ports = ports_of(int(port))
    try:
        results = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise WorldMismatch(f"MASTER_ADDR is no host: {error}", rank=me.rank, found=host[:80]) from error
    addresses = list(dict.fromkeys(str(address[0]) for *_, address in results))
    one_host = is_on_one_host(environment, me)
    token = token_of(environment, directory if one_host else None, port, str(me.size),
                     environment.get("TORCHELASTIC_RUN_ID", ""))  # fmt: skip
    # If all ranks are on this host, only this host listens. Otherwise MASTER_ADDR may mean something else here.
    places = [(address, number) for number in ports for address in addresses]
    return Ports([*addresses, ""] if one_host else [""], places, token,
                 f"at ports {ports[0]} to {ports[-1]} of {host}")  # fmt: skip


def ports_of(port: int) -> range:
    """The ports of which rank 0 listens on one, for this MASTER_PORT."""
    first = port - _BELOW if port - _BELOW > _LAST_RESERVED else port + 1
    first = min(first, 65536 - _PORTS)
    return range(first, first + _PORTS)


def free_port(used: Collection[int] = ()) -> int:
    """A port on which nobody listens here now, and neither on the ports that mlflash derives from it."""
    port = 0
    for _ in range(_TRIES):
        port = random.choice(_LISTENING)
        if port not in used and all(map(_is_free, (port, *ports_of(port)))):
            break
    return port


def _is_free(port: int) -> bool:
    try:
        with socket.socket() as sock:
            sock.bind(("", port))
    except OSError:
        return False
    return True


# A file


def _by_file(directory: Path, launch: str, me: Launched, text: str | None, timeout_s: float) -> str:
    """Give rank 0's text to all ranks of a host, by a file that only this user can read."""
    end, pause_s = time.monotonic() + timeout_s, _PAUSE_S
    name = "launch-" + launch.replace("/", "-").replace(" ", "-")
    with opened(directory) as folder:
        path = f"{folder}/{name}"
        if text is not None:
            with open(os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(text)
            os.rename(f"{path}.new", path)
            atexit.register(_remove, directory.absolute() / name, os.getpid())
            return text
        while True:
            with contextlib.suppress(FileNotFoundError), open(path) as file:
                return file.read()
            if time.monotonic() >= end:
                raise DeadlineExceeded(f"waited {timeout_s:g} s for rank 0 to say in {directory} where its agent is",
                                       rank=me.rank, ranks=[0])  # fmt: skip
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:
        path.unlink(missing_ok=True)


def new_token() -> str:
    """Make a token, which only those know that are given it."""
    return secrets.token_hex(16)


# The secret of this user


def token_of(environment: Mapping[str, str], directory: Path | None, *launch: str) -> str:
    """The token of a launch: 32 hexadecimal digits that follow from the secret and from what all its ranks know.

    The secret is ``MLFLASH_TOKEN``, which `mlflash run` sets, or else a file that only this user can read: in the home
    directory, which the nodes of a cluster share, or, for ranks of one host, in this user's directory in memory.

    ``directory``: private to this user, where all ranks can look; None: the home directory. Raises UnsafePath: others
    can read the secret, or it cannot be kept.
    """
    secret = environment.get(TOKEN) or _secret_in(directory or Path.home() / ".config" / "mlflash")
    return hmac.new(secret.encode(), "\0".join(launch).encode(), "sha256").hexdigest()[:32]


def _secret_in(directory: Path) -> str:
    try:
        with opened(directory) as folder:
            path = f"{folder}/{_TOKEN_FILE}"
            with contextlib.suppress(FileExistsError):
                _make_secret(path)
            with open(path) as file:
                status = os.fstat(file.fileno())
                if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
                    raise UnsafePath(f"{directory / _TOKEN_FILE} must belong to this user, and nobody else may read it",
                                     expected=f"user {os.geteuid()}, mode 600",
                                     found=f"user {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}")  # fmt: skip
                return file.read()
    except OSError as error:
        raise UnsafePath(f"the secret by which ranks know each other cannot be kept in {directory}: {error}. Set "
                         f"{TOKEN} to the same text on all ranks") from error  # fmt: skip


def _make_secret(path: str) -> None:
    """Make the file, at once with what it contains: another rank may do the same. Raises FileExistsError."""
    if os.path.exists(path):
        return
    new = f"{path}.{secrets.token_hex(4)}"
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    try:
        os.link(new, path)
    finally:
        os.unlink(new)


# A store of torch.distributed


def share_by_store(torch: Any, store: Any, rank: int, size: int, text: str | None, timeout_s: float) -> str:
    """Give rank 0's text to all ranks, by a store that all reach. Collective.

    A store may survive a launch, as that of torchrun does when it starts its workers again, and then contain what dead
    ranks wrote. So every rank asks with a random word that it has just made, gets its answer under that word, and
    confirms with the word that rank 0 has made:

    | key below ``mlflash/`` | written by | holds                                 |
    |------------------------|------------|---------------------------------------|
    | ``ask/RANK``           | each rank  | its word                              |
    | ``answer/WORD``        | rank 0     | the word of rank 0, a space, the text |
    | ``got/WORD``           | that rank  | the word of rank 0                    |

    Rank 0 reads what a rank asks until that rank has confirmed, deletes all three keys, and returns when all have.

    ``torch`` is the module torch.distributed. Raises DeadlineExceeded: some ranks have not come, or the store is lost.
    """
    prefixed = torch.PrefixStore(_STORE_PREFIX, store)
    try:
        if text is None:
            return _ask_rank_0(prefixed, rank, timeout_s)
        missing = _answer_ranks(prefixed, size, text, timeout_s)
    except RuntimeError as error:  # torch's errors of a store that is late or lost are RuntimeErrors, too
        raise DeadlineExceeded(
            f"waited {timeout_s:g} s for rank 0 to put into the store of torch.distributed where its agent is: "
            f"{str(error).splitlines()[0]}",
            rank=rank,
            ranks=[0],
        ) from error
    if missing:
        raise DeadlineExceeded(
            f"waited {timeout_s:g} s for the other ranks to ask rank 0, through the store of torch.distributed, where "
            f"its agent is: {len(missing)} of {size} have not come",
            rank=0,
            ranks=missing,
        )
    return text


def _ask_rank_0(store: Any, rank: int, timeout_s: float) -> str:
    word = secrets.token_hex(8)
    store.set(f"ask/{rank}", word)
    store.wait([f"answer/{word}"], datetime.timedelta(seconds=timeout_s))
    word_of_rank_0, _, text = _value(store, f"answer/{word}").partition(" ")
    store.set(f"got/{word}", word_of_rank_0)
    return text


def _answer_ranks(store: Any, size: int, text: str, timeout_s: float) -> list[int]:
    """Answer all other ranks; return those that have not come."""
    end, pause_s, own_word = time.monotonic() + timeout_s, _STORE_PAUSE_S, secrets.token_hex(8)
    words: dict[int, str] = dict.fromkeys(range(1, size), "")  # for ranks without confirmation: the word answered last
    while words:
        before = len(words)
        for rank, word in list(words.items()):
            if word and _value(store, f"got/{word}") == own_word:
                _delete(store, [f"ask/{rank}", f"answer/{word}", f"got/{word}"])
                del words[rank]
            elif (asked := _value(store, f"ask/{rank}")) != word:
                store.set(f"answer/{asked}", f"{own_word} {text}")
                words[rank] = asked
        if time.monotonic() >= end:
            break
        pause_s = _STORE_PAUSE_S if len(words) < before else min(2 * pause_s, _LONGEST_STORE_PAUSE_S)
        time.sleep(pause_s)
    return sorted(words)


def _value(store: Any, key: str) -> str:
    """The value of a key; "" if it does not exist."""
    return bytes(store.get(key)).decode("ascii") if store.check([key]) else ""


def _delete(store: Any, keys: list[str]) -> None:
    with contextlib.suppress(RuntimeError, NotImplementedError):  # not every store can
        for key in keys:
            store.delete_key(key)
