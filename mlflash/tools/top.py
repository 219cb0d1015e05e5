"""The command ``mlflash top``: what the ranks of a running job report, as a page of sentences, a table and warnings."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import socket
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from ..errors import MlflashError
from ..memory.node_directory import jobs_of
from ..run.agents import Agents
from ..run.launch_systems import OnSlurm, OnSsh, hosts_of, own_id
from ..run.node_watch import ask
from ..telemetry.heartbeat import is_orphan, is_without_courier, live_jobs, read_heartbeats
from ..telemetry.recorder import is_notable
from ..text import many, named, show_bytes, show_seconds
from .jobs import decide
from .options import directory_option, job_option, memory_option, settings
from .output import new_table, print_answer

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table
    from rich.text import Text

Heartbeat = dict[str, Any]
_QUIET_S = 60.0  # a rank without a heartbeat for this long gets a color
_STYLES = {"gone": "bold red", "failed": "red", "no courier": "bold yellow", "starting": "cyan", "training": "green",
           "ended": "dim"}  # fmt: skip
"""The states of ranks, the worst first, and their colors."""
_DISPENSABLE = ("memory", "stall", "commit", "saved", "late", "node")
"""Columns that a narrow terminal does not show, in this order."""
_AROUND = 10  # lines of the page that are not ranks


@click.command()
@directory_option
@job_option
@memory_option
@click.option("--hosts", default="", metavar="A,B,C", help="Ask these nodes, on which a remote shell starts an agent.")
@click.option("--rsh", default="ssh", show_default=True, metavar="PROGRAM", help="Program for the remote shell.")
@click.option("--slurm-job", default="", metavar="ID",
              help="Ask all nodes of this Slurm job.  [default: the job that this command runs in]")  # fmt: skip
@click.option("--here", is_flag=True, help="Look at this node only.")
@click.option("--every", type=click.FloatRange(0.1), metavar="SECONDS",
              help="Time between two looks.  [default: 1; with other nodes: 5]")  # fmt: skip
@click.option("--once", is_flag=True,
              help="Print one page and end. This is the default if the output is not a terminal.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the status of the ranks as one JSON document and end.")
def top(directory: str | None, job: str | None, memory: str, hosts: str, rsh: str, slurm_job: str, here: bool,
        every: float | None, once: bool, as_json: bool) -> None:  # fmt: skip
    """Watch a running job in the terminal: checkpoints, stalls, memory, and ranks that are gone.

    \b
    mlflash top
    mlflash top --slurm-job 4711
    mlflash top --hosts n1,n2
    """
    given = settings(memory, job, directory)
    with contextlib.ExitStack() as opened:
        agents = None if here else _others(hosts, rsh, slurm_job)
        if agents is None:
            jobs = live_jobs(memory) or jobs_of(memory)
        else:
            opened.enter_context(agents)
            jobs = [job] if job else jobs_everywhere(agents, memory)
        name = decide(jobs, os.environ, job, given.directory, memory)

        def look() -> Look:
            return look_here(memory, name) if agents is None else look_everywhere(agents, memory, name)

        if as_json or once or not (sys.stdin.isatty() and sys.stdout.isatty()):
            seen = look()
            document = {"job": name, "at": seen.at, "ranks": seen.heartbeats, "silent": seen.silent,
                        "unread": seen.unread, "free": dict(seen.free)}  # fmt: skip
            print_answer(as_json, document, lambda console: console.print(Page(name, seen)))
        else:
            _watch(name, look, every or (1.0 if agents is None else 5.0))


def _others(hosts: str, rsh: str, slurm_job: str) -> Agents | None:
    if hosts:
        return Agents(OnSsh(hosts.split(","), rsh))
    job = slurm_job or (own_id(os.environ) if "SLURM_JOB_ID" in os.environ else "")
    if not job:
        return None
    os.environ["SLURM_JOB_ID"] = job  # srun needs it outside of the job, or inside of another one
    if nodes := hosts_of(job):
        return Agents(OnSlurm(job, nodes))
    raise click.ClickException(f"Slurm knows no nodes of job {job}")


def _watch(job: str, look: Callable[[], Look], every_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    looks = collections.deque([look()], maxlen=1)
    threading.Thread(target=_keep_looking, args=(look, every_s, looks), daemon=True).start()
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        with Live(get_renderable=lambda: Page(job, looks[0]), console=Console(highlight=False), screen=True):
            while os.read(sys.stdin.fileno(), 1) not in (b"q", b"Q", b"\x04", b""):
                pass
    except KeyboardInterrupt:
        pass
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _keep_looking(look: Callable[[], Look], every_s: float, looks: collections.deque[Look]) -> None:
    """Look again and again, on a thread, so that a node that does not answer cannot block the terminal."""
    while True:
        time.sleep(every_s)
        try:
            looks.append(look())
        except (MlflashError, OSError) as error:  # the next look may succeed
            looks.append(dataclasses.replace(looks[0], wrong=f"the last look failed: {error}"))


# What the ranks report


@dataclasses.dataclass(frozen=True)
class Look:
    """The status of a job at one time."""

    at: float  # seconds since 1970
    heartbeats: tuple[Heartbeat, ...] = ()  # the newest of each rank, by rank
    free: tuple[tuple[str, int], ...] = ()  # free bytes of memory, by host
    silent: tuple[str, ...] = ()  # hosts that did not answer
    wrong: str = ""  # why there is no newer look
    unread: tuple[str, ...] = ()  # why some heartbeats could not be read

    @property
    def committed(self) -> int | None:
        """The newest step that all ranks know to be a checkpoint."""
        steps = [heartbeat["committed"] for heartbeat in self.heartbeats]
        return None if None in steps else min(steps, default=None)

    @property
    def seen(self) -> int:
        return len({heartbeat["node"] for heartbeat in self.heartbeats})

    @property
    def nodes(self) -> int:
        """Number of nodes of the job, also of those that were not asked."""
        return max((int(heartbeat.get("nodes", 0)) for heartbeat in self.heartbeats), default=0)


def look_here(memory: str, job: str) -> Look:
    """Look at this node."""
    at, space, read = time.time(), os.statvfs(memory), read_heartbeats(memory, job)
    free = (socket.gethostname(), space.f_bavail * space.f_frsize)
    return Look(at, _newest(read.heartbeats), (free,), unread=tuple(read.unread))


def look_everywhere(agents: Agents, memory: str, job: str) -> Look:
    """Ask nodes, as `mlflash run` does."""
    at, hosts = time.time(), agents.hosts
    answers, unread = ask(agents, hosts, "status", memory=memory, job=job, interface="")
    heartbeats = [heartbeat for document in answers.values() for heartbeat in document["heartbeats"]]
    free = tuple((host, int(document["free"])) for host, document in answers.items())
    unread += [f"{host}: {document['memory_error']}" for host, document in answers.items() if document["memory_error"]]
    return Look(at, _newest(heartbeats), free, tuple(host for host in hosts if host not in answers),
                unread=tuple(unread))  # fmt: skip


def jobs_everywhere(agents: Agents, memory: str) -> list[str]:
    """Ask nodes which jobs of this user are alive there."""
    answers, _ = ask(agents, agents.hosts, "jobs", memory=memory)
    return sorted({job for document in answers.values() for job in document["jobs"]})


def _newest(heartbeats: Sequence[Heartbeat]) -> tuple[Heartbeat, ...]:
    """Return the newest heartbeat of each rank. A rank that has moved is where its process lives, or lived last.

    Nodes have different clocks, so times of heartbeats decide only among the living and among the dead.
    """

    def age(heartbeat: Heartbeat) -> tuple[bool, float]:
        return bool(heartbeat["alive"]), float(heartbeat["beat"])

    newest = {int(heartbeat["rank"]): heartbeat for heartbeat in sorted(heartbeats, key=age)}
    size = max(newest.values(), key=age)["ranks"] if newest else 0
    return tuple(newest[rank] for rank in sorted(newest) if rank < size)  # a relaunch may have fewer ranks


# The page


def state_of(heartbeat: Heartbeat) -> str:
    """Return the state of a rank, one of `_STYLES`. A rank is gone if its process died without a message."""
    if heartbeat["state"] != "started":
        return str(heartbeat["state"])
    if not heartbeat["alive"]:
        return "gone"
    if is_without_courier(heartbeat):
        return "no courier"
    return "starting" if heartbeat["saved"] is None and heartbeat["restored"] is None else "training"


class Page:
    """A page that fits the terminal. If there are more ranks than lines, each line is a node."""

    def __init__(self, job: str, look: Look):
        self._job, self._look = job, look

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.text import Text

        look = self._look
        clock = time.strftime("%H:%M:%S", time.localtime(look.at))
        yield Text.assemble(("mlflash ", "bold"), f"{self._job}   ", (clock, "dim"))
        if look.heartbeats:
            yield from (Text(line, style=style) for line, style in _summary(look))
            is_short = options.height is not None and len(look.heartbeats) > max(4, options.height - _AROUND)
            yield _table(console, options, look, is_short)
        else:
            yield Text("no rank of this job has made a Checkpointer on the nodes that were read", style="yellow")
        for warning in _warnings(look):
            yield Text(warning, style="yellow")


def _summary(look: Look) -> Iterator[tuple[str, str]]:
    """Say how many ranks there are, how far they are, whom they wait for, and how much memory there is, with styles."""
    heartbeats, step = look.heartbeats, look.committed
    states, ranks = [*map(state_of, heartbeats)], heartbeats[0]["ranks"]
    alive, ended = len(states) - states.count("gone") - states.count("failed"), states.count("ended")
    text = f"{ended} of {ranks} ranks have ended" if ended == len(states) else f"{alive - ended} of {ranks} ranks alive"
    schemes = ", ".join(sorted({str(heartbeat.get("redundancy", "")) for heartbeat in heartbeats} - {""}))
    yield (f"{text} on {look.seen} of {many(look.nodes, 'node')}; redundancy {schemes or 'unknown'}",
           "" if alive == ranks else "bold red")  # fmt: skip
    parts = ["checkpoint none yet" if step is None else f"checkpoint step {step}"]
    first = next((heartbeat for heartbeat in heartbeats if heartbeat["committed"] == step), heartbeats[0])
    if int(first.get("saves", 0)) > 1 and "committed" in first["times"]:
        passed_s = float(first.get("courier_beat") or first["beat"]) - float(first["times"]["committed"])
        parts.append(f"every {show_seconds(passed_s / (int(first['saves']) - 1))}")
    parts.append(f"last sign {_age(look.at - max(float(heartbeat['beat']) for heartbeat in heartbeats))} ago")
    if restored := next((heartbeat for heartbeat in heartbeats if heartbeat["restored"] is not None), None):
        age = _age(look.at - float(restored["times"]["restored"]))
        parts.append(f"restored step {restored['restored']} from {restored['source']} {age} ago")
    yield ", ".join(parts), ""
    if is_notable(float(first.get("slowest_s", 0.0)), float(first.get("commit_s", 0.0))):
        yield (f"the last commit waited for rank {first.get('slowest', '?')}: {show_seconds(first['slowest_s'])} late "
               f"in {first.get('slowest_in', '?')}, on {first.get('slowest_on', '?')}", "yellow")  # fmt: skip
    for host, free in look.free[:4]:
        # If there is only one host, all ranks are on it, whatever MLFLASH_NODE calls their nodes.
        held = sum(int(h.get("held", 0)) for h in heartbeats if len(look.free) == 1 or h["node"] == host)
        yield f"memory of {host}: {show_bytes(held)} held, {show_bytes(free)} free", "dim"


def _table(console: Console, options: ConsoleOptions, look: Look, is_short: bool) -> Table:
    count = ">ranks" if is_short else ">rank"
    lines: dict[tuple[str, int], list[Heartbeat]] = collections.defaultdict(list)
    for heartbeat in look.heartbeats:
        lines[str(heartbeat["node"]), 0 if is_short else int(heartbeat["rank"])].append(heartbeat)
    rows = [{"node": node, count: str(len(heartbeats) if is_short else rank), **_cells(look, heartbeats)}
            for (node, rank), heartbeats in sorted(lines.items())]  # fmt: skip
    for dropped in range(len(_DISPENSABLE) + 1):
        columns = [name for name in rows[0] if name.lstrip(">") not in _DISPENSABLE[:dropped]]
        table = new_table(*columns)
        for column in table.columns:
            column.no_wrap = True
        for row in rows:
            table.add_row(*(row[name] for name in columns))
        if console.measure(table, options=options.update(width=1000)).maximum <= options.max_width:
            break
    return table


def _cells(look: Look, heartbeats: Sequence[Heartbeat]) -> dict[str, str | Text]:
    """Return the cells of a rank, or of a node: each shows the node's rank that is furthest behind."""
    from rich.text import Text

    def lowest(key: str) -> str:
        steps = [heartbeat[key] for heartbeat in heartbeats]
        return "-" if None in steps else str(min(steps))

    def longest(key: str) -> str:
        times_s = [float(heartbeat[key]) for heartbeat in heartbeats if heartbeat.get(key) is not None]
        return show_seconds(max(times_s)) if times_s else "-"

    states = [state_of(heartbeat) for heartbeat in heartbeats]
    worst = next(state for state in _STYLES if state in states)
    count = states.count(worst)
    quiet = look.at - min(float(heartbeat["beat"]) for heartbeat in heartbeats)
    is_quiet = worst in ("training", "starting", "no courier") and quiet > _QUIET_S
    latest = max(heartbeats, key=lambda heartbeat: float(heartbeat.get("late_s", 0.0)))
    is_late = is_notable(float(latest.get("late_s", 0.0)), float(latest.get("commit_s", 0.0)))
    late = f"{show_seconds(latest['late_s'])} {latest.get('late_in', '')}" if is_late else "-"
    return {
        "state": Text(worst if count == len(heartbeats) else f"{count} {worst}", style=_STYLES[worst]),
        ">saved": lowest("saved"), ">checkpoint": lowest("committed"),
        ">last sign": Text(_age(quiet), style="yellow" if is_quiet else ""),
        ">stall": longest("stall_s"), ">commit": longest("commit_s"),
        ">late": Text(late, style="yellow" if is_late else ""),
        ">memory": show_bytes(sum(int(heartbeat.get("held", 0)) for heartbeat in heartbeats)),
    }  # fmt: skip


def _age(seconds: float) -> str:
    return show_seconds(seconds) if seconds >= 1 else "0 s"


def _warnings(look: Look) -> Iterator[str]:
    yield from [look.wrong] if look.wrong else []
    yield from look.unread[:3]
    if look.silent:
        yield f"no answer from {', '.join(look.silent)}"
    if orphans := [int(heartbeat["rank"]) for heartbeat in look.heartbeats if is_orphan(heartbeat)]:
        yield f"the courier of {named(orphans)} still commits the last save, but its trainer is gone"
    if lost := [int(heartbeat["rank"]) for heartbeat in look.heartbeats if is_without_courier(heartbeat)]:
        yield f"no courier on {named(lost)}: training continues, but saves are not committed; the log says why"
    if failed := sum(int(heartbeat.get("failed", 0)) for heartbeat in look.heartbeats if heartbeat["rank"] == 0):
        yield f"{many(failed, 'save')} of this run did not become checkpoints: the log says why"
    if not look.silent and look.seen < look.nodes:
        yield f"{many(look.nodes - look.seen, 'other node')} not asked: use --slurm-job ID or --hosts A,B"
