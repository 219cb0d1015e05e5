"""The page of ``mlflash top``: sentences about the job, a table of its ranks or nodes, and warnings."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from ..telemetry.heartbeat import is_orphan, is_without_courier
from ..telemetry.recorder import is_notable
from ..text import many, named, show_bytes, show_seconds
from .output import new_table
from .top_ranks import Heartbeat, Look

_QUIET_S = 60.0  # a rank without a heartbeat for this long gets a color
_STYLES = {"gone": "bold red", "failed": "red", "no courier": "bold yellow", "starting": "cyan", "training": "green",
           "ended": "dim"}  # fmt: skip
"""The states of ranks, the worst first, and their colors."""
_DISPENSABLE = ("memory", "stall", "commit", "saved", "late", "node")
"""Columns that a narrow terminal does not show, in this order."""
_AROUND = 10  # lines of the page that are not ranks


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
        look = self._look
        clock = time.strftime("%H:%M:%S", time.localtime(look.at))
        yield Text.assemble(("mlflash ", "bold"), f"{self._job}   ", (clock, "dim"))
        if not look.heartbeats:
            yield Text("no rank of this job has made a Checkpointer on the nodes that were read", style="yellow")
        else:
            yield from _summary(look)
            is_short = options.height is not None and len(look.heartbeats) > max(4, options.height - _AROUND)
            yield _table(console, options, look, is_short)
        for warning in _warnings(look):
            yield Text(warning, style="yellow")


def _summary(look: Look) -> Iterator[Text]:
    """Say how many ranks there are, how far they are, whom they wait for, and how much memory there is."""
    heartbeats, step = look.heartbeats, look.committed
    states, ranks = [*map(state_of, heartbeats)], heartbeats[0]["ranks"]
    alive, ended = len(states) - states.count("gone") - states.count("failed"), states.count("ended")
    text = f"{ended} of {ranks} ranks have ended" if ended == len(states) else f"{alive - ended} of {ranks} ranks alive"
    schemes = sorted({str(heartbeat.get("redundancy", "")) for heartbeat in heartbeats} - {""})
    yield Text.assemble((text, "" if alive == ranks else "bold red"), f" on {len(look.seen)} of "
                        f"{many(look.nodes, 'node')}; redundancy {', '.join(schemes) or 'unknown'}")  # fmt: skip
    parts = ["checkpoint none yet" if step is None else f"checkpoint step {step}"]
    first = next((heartbeat for heartbeat in heartbeats if heartbeat["committed"] == step), heartbeats[0])
    if int(first.get("saves", 0)) > 1 and "committed" in first["times"]:
        passed_s = float(first.get("courier_beat") or first["beat"]) - float(first["times"]["committed"])
        parts.append(f"every {show_seconds(passed_s / (int(first['saves']) - 1))}")
    parts.append(f"last sign {_age(look.at - max(float(heartbeat['beat']) for heartbeat in heartbeats))} ago")
    if restored := next((heartbeat for heartbeat in heartbeats if heartbeat["restored"] is not None), None):
        ago = _age(look.at - float(restored["times"]["restored"]))
        parts.append(f"restored step {restored['restored']} from {restored['source']} {ago} ago")
    yield Text(", ".join(parts))
    if is_notable(float(first.get("slowest_s", 0.0)), float(first.get("commit_s", 0.0))):
        yield Text(
            f"the last commit waited for rank {first.get('slowest', '?')}: {show_seconds(first['slowest_s'])} "
            f"late in {first.get('slowest_in', '?')}, on {first.get('slowest_on', '?')}",
            style="yellow",
        )
    for host, free in look.free[:4]:
        # If there is only one host, all ranks are on it, whatever MLFLASH_NODE calls their nodes.
        held = sum(int(h.get("held", 0)) for h in heartbeats if len(look.free) == 1 or h["node"] == host)
        yield Text(f"memory of {host}: {show_bytes(held)} held, {show_bytes(free)} free", style="dim")


def _table(console: Console, options: ConsoleOptions, look: Look, is_short: bool) -> Table:
    count = ">ranks" if is_short else ">rank"
    lines: dict[tuple[str, int], list[Heartbeat]] = collections.defaultdict(list)
    for heartbeat in look.heartbeats:
        lines[str(heartbeat["node"]), 0 if is_short else int(heartbeat["rank"])].append(heartbeat)
    rows = [{"node": Text(node), count: Text(str(len(heartbeats) if is_short else rank)), **_cells(look, heartbeats)}
            for (node, rank), heartbeats in sorted(lines.items())]  # fmt: skip
    columns, dispensable = [*rows[0]], [*_DISPENSABLE]
    while True:
        table = new_table(*columns)
        for column in table.columns:
            column.no_wrap = True
        for row in rows:
            table.add_row(*(row[name] for name in columns))
        needed = console.measure(table, options=options.update(width=1000)).maximum
        if needed <= options.max_width or not dispensable:
            return table
        dropped = dispensable.pop(0)
        columns = [name for name in columns if name.lstrip(">") != dropped]


def _cells(look: Look, heartbeats: Sequence[Heartbeat]) -> dict[str, Text]:
    """Return the cells of a rank, or of a node: each shows the node's rank that is furthest behind."""
    states = [state_of(heartbeat) for heartbeat in heartbeats]
    worst = next(state for state in _STYLES if state in states)
    count = states.count(worst)
    quiet = look.at - min(float(heartbeat["beat"]) for heartbeat in heartbeats)
    is_quiet = worst in ("training", "starting", "no courier") and quiet > _QUIET_S
    latest = max(heartbeats, key=lambda heartbeat: float(heartbeat.get("late_s", 0.0)))
    late = Text("-")
    if is_notable(float(latest.get("late_s", 0.0)), float(latest.get("commit_s", 0.0))):
        late = Text(f"{show_seconds(latest['late_s'])} {latest.get('late_in', '')}", style="yellow")
    return {
        "state": Text(worst if count == len(heartbeats) else f"{count} {worst}", style=_STYLES[worst]),
        ">saved": _lowest(heartbeats, "saved"),
        ">checkpoint": _lowest(heartbeats, "committed"),
        ">last sign": Text(_age(quiet), style="yellow" if is_quiet else ""),
        ">stall": _longest(heartbeats, "stall_s"),
        ">commit": _longest(heartbeats, "commit_s"),
        ">late": late,
        ">memory": Text(show_bytes(sum(int(heartbeat.get("held", 0)) for heartbeat in heartbeats))),
    }


def _lowest(heartbeats: Sequence[Heartbeat], key: str) -> Text:
    steps = [heartbeat[key] for heartbeat in heartbeats]
    return Text("-" if None in steps else str(min(steps)))


def _longest(heartbeats: Sequence[Heartbeat], key: str) -> Text:
    times_s = [float(heartbeat[key]) for heartbeat in heartbeats if heartbeat.get(key) is not None]
    return Text(show_seconds(max(times_s)) if times_s else "-")


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
    if not look.silent and len(look.seen) < look.nodes:
        yield f"{many(look.nodes - len(look.seen), 'other node')} not asked: use --slurm-job ID or --hosts A,B"
