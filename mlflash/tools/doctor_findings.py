"""What a check may look at, its results, how those of many ranks become a few lines, and how the lines are printed.

They are printed even if a check hangs or ends the process. MPI may do both when it starts. The process that prints has
a child. Before each check it sends the results so far to the child. If the process ends without a last message, or
spends too long in one check, the child prints the results instead. Other processes only end themselves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import faulthandler
import functools
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from ..config import Config, SlotCounts
from ..launch.own_process import running
from ..text import listed, many, named, show_bytes, show_seconds
from .output import print_answer

if TYPE_CHECKING:
    from rich.console import Console

    from ..launch.launcher_variables import Launched
    from ..mpi.world import World

_GRACE_S = 15.0  # the child waits this much longer than a check may take


@dataclasses.dataclass
class Context:
    """What a check may look at."""

    settings: Config
    environment: Mapping[str, str]
    launched: Launched  # this process, according to its launcher
    nbytes: int | None = None  # state of each rank of the job that the user plans. None: unknown
    slots: SlotCounts = dataclasses.field(default_factory=SlotCounts)  # of each rank of that job
    nodes: int | None = None  # nodes, ranks_per_node: size of that job. None: as started
    ranks_per_node: int | None = None
    light: int = 0  # saves of that job between two whole ones that are light
    gradients_nbytes: int | None = None  # of each rank of that job
    uid: int = dataclasses.field(default_factory=os.geteuid)
    root: str = "/"  # the directory that contains /etc, /dev and /proc
    mpi: Any = None  # the module of mpi4py. None: it is not started yet, or cannot be
    world: World | None = None  # None: not known yet

    @property
    def ranks(self) -> World:
        assert self.world is not None
        return self.world

    @property
    def rank(self) -> int:
        return self.launched.rank if self.world is None or self.world.world is None else self.world.rank

    @property
    def ranks_on(self) -> dict[str, tuple[int, ...]]:
        """The ranks of each node. Nodes of the same name count as one."""
        if self.world is None or self.world.world is None:
            return {socket.gethostname(): (self.rank,)}
        ranks_on: dict[str, tuple[int, ...]] = {}
        for name, ranks in zip(self.world.topology.node_names, self.world.topology.ranks_on, strict=True):
            ranks_on[name] = ranks_on.get(name, ()) + ranks
        return ranks_on

    @property
    def shape(self) -> tuple[int, int]:
        """Nodes and ranks per node of the job: as given, or as started."""
        return self.nodes or len(self.ranks_on), self.ranks_per_node or max(map(len, self.ranks_on.values()))


Value = str | tuple[float, float]


class Level(enum.IntEnum):
    """How bad a result is. NOTE: the check cannot find out what it is for."""

    OK = 0
    NOTE = 1
    WARNING = 2
    ERROR = 3


_STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.ERROR: "bold red"}


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of a check, on one rank or on all ranks with the same result.

    ``text`` and ``advice`` have the names of ``values`` in braces. Results with different strings are different lines;
    numbers are merged to the range of all ranks. The end of a name is the unit: ``_nbytes``, ``_s``, ``_gbs`` (10^9
    bytes per second).
    """

    check: str
    level: Level
    text: str
    advice: str = ""
    values: Mapping[str, Value] = dataclasses.field(default_factory=dict)
    subject: str = ""
    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    def fill(self, text: str) -> str:
        return text.format_map({name: show(name, value) for name, value in self.values.items()})

    def to_json(self) -> dict[str, Any]:
        return {
            "subject": self.subject, "check": self.check, "level": self.level.name.lower(),
            "text": self.fill(self.text), "advice": self.fill(self.advice) or None, "values": dict(self.values),
            "nodes": list(self.nodes), "ranks": list(self.ranks),
        }  # fmt: skip


def _make(level: Level, check: str, text: str, advice: str = "", /, **values: str | float) -> Finding:
    ranges = {name: value if isinstance(value, str) else (value, value) for name, value in values.items()}
    return Finding(check, level, text, advice, ranges)


fine, note, warning, wrong = (functools.partial(_make, level) for level in Level)
"""Make a result. The last two have advice."""


def show(name: str, value: Value) -> str:
    """Write a value with its unit: ``show("sent_gbs", (4.0, 5.5)) == "4.0 to 5.5 GB/s"``."""
    if isinstance(value, str):
        return value
    low, high = (_show_number(name, number) for number in value)
    number, _, unit = low.partition(" ")
    return low if low == high else f"{number if unit and high.endswith(f' {unit}') else low} to {high}"


def _show_number(name: str, number: float) -> str:
    if name.endswith("_nbytes"):
        return show_bytes(number)
    if name.endswith("_gbs"):
        return f"{number:.1f} GB/s" if number >= 0.1 else f"{number:.2g} GB/s"
    return show_seconds(number) if name.endswith("_s") else f"{number:,.0f}"


def merge(findings: Iterable[Finding]) -> list[Finding]:
    """Merge equal results to one line: "3 GiB free" on a, "5 GiB free" on b → "3 to 5 GiB free" on a, b.

    The order is that of the first results; the worst of each check comes first.
    """
    checks: dict[tuple[str, str], dict[tuple[object, ...], list[Finding]]] = {}
    for finding in findings:
        strings = tuple((name, value) for name, value in finding.values.items() if isinstance(value, str))
        same = finding.level, finding.text, finding.advice, strings
        checks.setdefault((finding.subject, finding.check), {}).setdefault(same, []).append(finding)
    return [_joined(same) for results in checks.values()
            for same in sorted(results.values(), key=lambda same: -same[0].level)]  # fmt: skip


def _joined(same: Sequence[Finding]) -> Finding:
    values = dict(same[0].values)
    for name, value in values.items():
        if not isinstance(value, str):
            ends = [float(end) for finding in same for end in finding.values[name]]
            values[name] = min(ends), max(ends)
    return dataclasses.replace(
        same[0], values=values, nodes=tuple(dict.fromkeys(node for finding in same for node in finding.nodes)),
        ranks=tuple(sorted({rank for finding in same for rank in finding.ranks})),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """All results, merged to lines: of which processes, and who started them."""

    started: str
    ranks_on: Mapping[str, tuple[int, ...]]
    lines: tuple[Finding, ...]

    def count(self, level: Level) -> int:
        return sum(line.level is level for line in self.lines)

    def where(self, line: Finding) -> str:
        """Name the nodes or ranks of a line, such as "rank 3 on node1"; "" if it holds for all of the only node."""
        ranks = {rank for node in line.nodes for rank in self.ranks_on.get(node, ())}
        if ranks - set(line.ranks):
            return named(line.ranks) + (f" on {line.nodes[0]}" if len(line.nodes) == 1 < len(self.ranks_on) else "")
        if 0 < len(line.nodes) < len(self.ranks_on):
            return listed(line.nodes)
        return f"all {len(line.nodes)} nodes" if len(line.nodes) > 1 else ""

    def to_json(self) -> dict[str, Any]:
        return {
            "well": self.count(Level.ERROR) == 0, "started": self.started, "warnings": self.count(Level.WARNING),
            "errors": self.count(Level.ERROR), "nodes": {node: list(ranks) for node, ranks in self.ranks_on.items()},
            "lines": [line.to_json() for line in self.lines],
        }  # fmt: skip

    def print(self, as_json: bool) -> None:
        print_answer(as_json, self.to_json(), self._print_lines)

    def _print_lines(self, console: Console) -> None:
        from rich.table import Table
        from rich.text import Text

        ranks = sum(map(len, self.ranks_on.values()))
        console.print(f"{many(ranks, 'rank')} on {many(len(self.ranks_on), 'node')}, {self.started}\n")
        for subject in dict.fromkeys(line.subject for line in self.lines):
            table = Table.grid("", "", "", padding=(0, 2, 0, 0))
            for line in self.lines:
                if line.subject == subject:
                    level = Text(f"{line.level.name.lower():7}", style=_STYLES[line.level])
                    where = self.where(line)
                    table.add_row(level, f"{line.check:17}", line.fill(line.text) + (f" ({where})" if where else ""))
                    if line.advice:
                        table.add_row("", "", f"→ {line.fill(line.advice)}")
            console.print(subject, style="bold")
            console.print(table)
        console.print(f"{many(self.count(Level.ERROR), 'error')}, {many(self.count(Level.WARNING), 'warning')}")


class Watch:
    """Watches this process, in which a check may take ``timeout_s`` seconds, until :meth:`over`."""

    def __init__(self, prints: bool, as_json: bool, timeout_s: float):
        self._patience_s = timeout_s + (_GRACE_S if prints else 2 * _GRACE_S)
        self._child: subprocess.Popen[bytes] | None = None
        if prints:
            receiver, self._sender = multiprocessing.Pipe(duplex=False)
            arguments = map(str, (receiver.fileno(), os.getpid(), self._patience_s, int(as_json)))
            # The child has its own session, so that it survives when somebody kills the process group of its rank.
            self._child = subprocess.Popen([*running("mlflash.tools.doctor_findings"), *arguments],
                                           pass_fds=[receiver.fileno()], start_new_session=True)  # fmt: skip
            receiver.close()

    def begin(self, pending: Finding, known: Diagnosis | None) -> None:
        """Announce a check by the result that it has if it does not end, and the results so far, if not printed yet."""
        if self._child is None:
            faulthandler.dump_traceback_later(self._patience_s, exit=True)
        else:
            self._send((pending, known))

    def over(self) -> None:
        """End the watch. May be called twice."""
        faulthandler.cancel_dump_traceback_later()
        if self._child is None:
            return
        self._send(None)
        self._sender.close()
        try:
            self._child.wait(self._patience_s)
        except subprocess.TimeoutExpired:
            self._child.kill()
        self._child = None

    def _send(self, message: tuple[Finding, Diagnosis | None] | None) -> None:
        with contextlib.suppress(OSError):  # a child that is gone prints nothing, but the checks continue
            self._sender.send(message)


def stand_by(receiver: Connection, watched: int, patience_s: float, as_json: bool) -> None:
    """Listen to the watched process until its last message. If that does not come, print in its place."""
    pending, known = wrong("start", "", ""), None
    while receiver.poll(patience_s):
        try:
            message = receiver.recv()
        except (EOFError, OSError):
            how = "this check ended the process: look at its stderr for the reason"
            break
        if message is None:
            return
        pending, known = message
    else:
        how = f"this check did not end within {patience_s:g} s, so its process was killed"
        if os.getppid() == watched:
            os.kill(watched, signal.SIGKILL)
    if known is None:
        print(f"Error: {pending.subject}, {pending.check}: {how}", file=sys.stderr)
    else:
        last = dataclasses.replace(pending, text=how)
        dataclasses.replace(known, lines=(*known.lines, last)).print(as_json)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends with the process it watches over, a moment later
    number, pid, patience, json = sys.argv[1:]
    stand_by(Connection(int(number), writable=False), int(pid), float(patience), json == "1")
