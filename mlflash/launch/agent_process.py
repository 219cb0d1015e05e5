"""Finds the agent of this node, or starts it: the process that forks couriers and knows who has ended.

All trainers of a job on a node have the same one, if they have the same view of the node (namespaces and memory) and
would load the same code. They find it by a socket whose name says all of that. The name is in no directory, so a killed
agent leaves nothing. Whoever listens there as another user is left alone, and the trainer has an agent of its own.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from ..version import __version__
from .interfaces import for_mpi
from .launcher_variables import without_launcher

_NAMESPACES = ("pid", "user")  # the name itself is one of the network namespace
# What decides which code and which libraries a process loads.
LOADED_BY = ("MLFLASH_LIBMPI", "MPI4PY_LIBMPI", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHOME")
_BACKLOG = 1024
_PAUSE_S = 0.002
_TAKEN_S = 2.0  # for another process to listen that has just taken the name
READY = "the agent of this job is ready here"
"""What `mlflash agent` prints when trainers can find it."""
_CREDENTIALS = struct.Struct("3i")  # of SO_PEERCRED: pid, uid, gid


def names_of(job: str, memory: str, environment: Mapping[str, str]) -> list[str]:
    """The names of the agent of a job, whose slots are in a directory in memory, on this node.

    Containers with the same process numbers, memory and paths of programs have one; others have their own. A trainer
    starts an agent of the first name. One that was started before, by somebody who does not know what the training
    calls its job, has the others (`kept_names`).
    """
    return [_name([job], memory, environment), *kept_names(memory, environment)]


def kept_names(memory: str, environment: Mapping[str, str]) -> list[str]:
    """The names of an agent that was started before its trainers; [] if it is unknown which job that is."""
    known = ((word, environment.get(word, "")) for word in ("MLFLASH_JOB", "SLURM_JOB_ID"))
    return [_name([word, value], memory, environment) for word, value in known if value]


def name_for_commands(job: str, memory: str) -> str:
    """The name at which an agent of `mlflash run` hears commands, whatever code and libraries these load."""
    return _digest(["commands", job], memory)


def _name(words: Sequence[str], memory: str, environment: Mapping[str, str]) -> str:
    loaded = [sys.executable, __version__, __file__, *(environment.get(name, "") for name in LOADED_BY)]
    return _digest([*words, *loaded], memory)


def _digest(words: Sequence[str], memory: str) -> str:
    status = os.stat(memory) if os.path.isdir(memory) else None
    seen = [f"{status.st_dev}:{status.st_ino}" if status else memory]
    seen += [os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES]
    digest = hashlib.sha256("\0".join([*words, *seen]).encode()).hexdigest()
    return f"mlflash-{os.geteuid()}-{digest[:16]}"


def connect(names: Sequence[str], environment: Mapping[str, str]) -> tuple[socket.socket, str]:
    """Connect to an agent that has one of these names; start one with the first if there is none. Not collective.

    Returns the connection, and the name, which is another one if another user listens there. ``environment``: of the
    agent, if it is started. Raises OSError: no process can be started.
    """
    for other in names[1:]:
        with contextlib.suppress(OSError):
            return connect_again(other), other
    name, end = names[0], time.monotonic() + _TAKEN_S
    while True:
        try:
            return connect_again(name), name
        except ConnectionRefusedError:
            with socket.socket(socket.AF_UNIX) as listener:
                try:
                    listen(listener, name)
                except OSError:  # somebody else has just taken the name
                    pass
                else:
                    _start(listener, environment)
                    return connect_again(name), name
        except PermissionError:
            end = 0.0
        except OSError:  # too many others wait there
            pass
        if time.monotonic() > end:  # whoever has it is not an agent of this user, or does not accept
            name, end = f"mlflash-{secrets.token_hex(16)}", float("inf")
        time.sleep(_PAUSE_S)


def listen(listener: socket.socket, name: str) -> None:
    """Let a socket listen for trainers. Raises OSError (EADDRINUSE): somebody else has the name."""
    listener.bind(f"\0{name}")
    listener.listen(_BACKLOG)


def connect_again(name: str) -> socket.socket:
    """Connect to the agent of this name.

    Raises:
        ConnectionRefusedError: it is not there.
        PermissionError: another user listens there.
        OSError: it has no room for a connection now.
    """
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.setblocking(False)  # who has taken the name may accept nobody
        sock.connect(f"\0{name}")
        sock.setblocking(True)
        if peer_uid(sock) != os.geteuid():
            raise PermissionError(errno.EPERM, "another user listens there")
    except BaseException:
        sock.close()
        raise
    return sock


def peer_uid(sock: socket.socket) -> int:
    """The user at the other end."""
    uid: int = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
    return uid


_COMMAND = [sys.executable, "-m", "mlflash.launch.agent"]


def become(listeners: Sequence[socket.socket], environment: Mapping[str, str]) -> NoReturn:
    """Be the agent, until SIGTERM or SIGINT and then until the last courier has ended."""
    for listener in listeners:
        listener.set_inheritable(True)
    words = [*_COMMAND, "kept", *(str(listener.fileno()) for listener in listeners)]
    os.execve(sys.executable, words, own_environment(environment))


def _start(listener: socket.socket, environment: Mapping[str, str]) -> None:
    agent = subprocess.Popen(
        [*_COMMAND, str(listener.fileno())],
        env=own_environment(environment),
        pass_fds=[listener.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # so that signals of a terminal or launcher to the trainer's group miss it
        cwd="/",
    )
    threading.Thread(target=agent.wait, name="mlflash-agent", daemon=True).start()  # it may end before this process


def own_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """That of an agent and of the couriers of a trainer, from that of the trainer.

    Python finds mlflash where this process finds it, whatever the working directory, and nothing in that.
    """
    own = without_launcher(environment)
    root = str(Path(__file__).resolve().parents[2])
    first = str(Path(sys.path[0] or ".").resolve()) if sys.path else ""
    folders = [os.path.abspath(folder) for folder in own.get("PYTHONPATH", "").split(os.pathsep) if folder]
    if root in (first, os.getcwd()):  # a checkout, which is not installed
        folders.append(root)
    path = {"PYTHONPATH": os.pathsep.join(folders)} if folders else {}
    return {**own, **path, "PYTHONSAFEPATH": "1", **for_mpi(environment)}
