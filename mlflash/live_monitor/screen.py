"""Draw the page of ``mlflash top`` from a look and the history."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..command_line.output import new_table
from ..human_readable.units import show_bytes, show_seconds
from ..human_readable.wording import many, named
from ..telemetry.heartbeat_format import is_orphan, is_without_courier
from ..telemetry.lateness import is_worth_a_word
from .history import History, committed, spark
from .rank_status import Heartbeat, Look

_QUIET_S = 60.0  # a rank without a heartbeat for this long gets a color
_STYLES = {"training": "green", "starting": "cyan", "ended": "dim", "no courier": "bold yellow", "failed": "red",
           "gone": "bold red"}  # fmt: skip
_WORST = ("gone", "failed", "no courier", "starting", "training", "ended")
_UNREAD = 3  # how many of them are shown
_AROUND = 12  # lines of the page that are not ranks


def page(job: str, look: Look, history: History, width: int = 80, height: int = 40) -> RenderableType:
    """Lay out one page.

    Args:
        job: name of the job.
        look: the last look.
        history: what all looks saw.
        width, height: size of the terminal. If there are more ranks than lines, each line shows a node.
    """
    parts: list[RenderableType] = [_headline(job, look), Text(), _figures(look, history, width), Text()]
    if not look.heartbeats:
        text = "no rank of this job has made a Checkpointer on the nodes that were read"
        parts.append(Text(text, style="yellow"))
    elif len(look.heartbeats) <= max(4, height - _AROUND):
        parts.append(_ranks(look))
    else:
        parts.append(_nodes(look))
    for text in _warnings(look):
        parts.append(Text(text, style="yellow"))
    return Group(*parts)


def state_of(heartbeat: Heartbeat) -> str:
    """Return the state of a rank in a word or two.

    It is training, starting, ended, failed, gone (its process died without a message), or "no courier" (its courier
    died without a message while the training continues).
    """
    if heartbeat["state"] != "started":
        return str(heartbeat["state"])
    if not heartbeat["alive"]:
        return "gone"
    if is_without_courier(heartbeat):
        return "no courier"
    return "starting" if heartbeat["saved"] is None and heartbeat["restored"] is None else "training"


def _headline(job: str, look: Look) -> Text:
    heartbeats = look.heartbeats
    alive = sum(bool(heartbeat["alive"]) and heartbeat["state"] == "started" for heartbeat in heartbeats)
    ranks = heartbeats[0]["ranks"] if heartbeats else 0
    nodes = {heartbeat["node"] for heartbeat in heartbeats}
    of = max((int(heartbeat.get("nodes", 0)) for heartbeat in heartbeats), default=0)
    text = Text.assemble(("mlflash ", "bold"), job, "   ")
    if heartbeats and all(heartbeat["state"] == "ended" for heartbeat in heartbeats):
        text.append(f"{len(heartbeats)} of {ranks} ranks have ended")
    elif heartbeats:
        text.append(f"{alive} of {ranks} ranks alive", style="" if alive == ranks else "bold red")
    text.append(f" on {len(nodes)} of {many(of, 'node')}" if heartbeats else "no rank")
    schemes = sorted({str(heartbeat.get("redundancy", "")) for heartbeat in heartbeats} - {""})
    text.append(f"   {', '.join(schemes)}" if schemes else "")
    text.append(time.strftime("   %H:%M:%S", time.localtime(look.at)), style="dim")
    return text


def _figures(look: Look, history: History, width: int) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(justify="right")
    grid.add_column(style="cyan", no_wrap=True, overflow="crop")
    bars = max(8, min(60, width - 40))
    step, every_s = committed(look), history.every_s
    age = max((float(p["beat"]) for p in look.heartbeats if p["committed"] == step), default=look.at)
    often = f"every {show_seconds(every_s)}" if every_s else ""
    grid.add_row("checkpoint", "none yet" if step is None else f"step {step}", Text(often, style="default"))
    if step is not None:
        grid.add_row("last sign", f"{_age(look.at - age)} ago", "")
    if restored := next((heartbeat for heartbeat in look.heartbeats if heartbeat["restored"] is not None), None):
        ago = _age(look.at - float(restored["times"]["restored"]))
        source = Text(f"from {restored['source']}, {ago} ago", style="dim")
        grid.add_row("restored", f"step {restored['restored']}", source)
    for name, values in (("stall", history.stalls), ("commit", history.commits)):
        if values:
            grid.add_row(name, show_seconds(values[-1]), spark(values, bars))
    if waited := _waited_for(look.heartbeats, step):
        grid.add_row("waited for", *waited)
    if speed := _speed(look.heartbeats):
        grid.add_row("protect", f"{show_bytes(speed)}/s", Text("the slowest rank", style="dim"))
    for host, free in look.free[:4]:
        held = sum(int(heartbeat.get("held", 0)) for heartbeat in look.heartbeats if _on(heartbeat, host, look))
        grid.add_row("memory", show_bytes(held), Text(f"of {host}; {show_bytes(free)} free", style="dim"))
    return grid


def _waited_for(heartbeats: Sequence[Heartbeat], step: int | None) -> tuple[str, Text] | None:
    """Return the rank that delayed the last commit, with the time, the phase and the node. None if no rank did."""
    one = next((one for one in heartbeats if one["committed"] == step and one.get("slowest_s") is not None), None)
    if one is None or not is_worth_a_word(float(one["slowest_s"]), float(one.get("commit_s", 0.0))):
        return None
    who = f"rank {one.get('slowest', '?')}"
    text = f"{show_seconds(one['slowest_s'])} late in {one.get('slowest_in', '?')}, on {one.get('slowest_on', '?')}"
    return who, Text(text, style="yellow")


def _on(heartbeat: Heartbeat, host: str, look: Look) -> bool:
    """Say whether a rank is on a host. If there is only one host, it is: emulated nodes have other names."""
    return len(look.free) == 1 or heartbeat["node"] == host


def _speed(heartbeats: Sequence[Heartbeat]) -> float:
    speeds = [
        heartbeat["nbytes"] / heartbeat["protect_s"]
        for heartbeat in heartbeats
        if heartbeat.get("protect_s") and heartbeat.get("nbytes")
    ]
    return min(speeds, default=0.0)


def _ranks(look: Look) -> Table:
    """Make a line for each rank."""
    ordered = sorted(look.heartbeats, key=lambda one: (str(one["node"]), int(one["rank"])))
    return _table(
        look, ">rank", [(str(heartbeat["node"]), str(heartbeat["rank"]), [heartbeat]) for heartbeat in ordered]
    )


def _nodes(look: Look) -> Table:
    """Make a line for each node. Each column shows the node's rank that is furthest behind."""
    by_node: dict[str, list[Heartbeat]] = {}
    for heartbeat in look.heartbeats:
        by_node.setdefault(str(heartbeat["node"]), []).append(heartbeat)
    return _table(
        look, ">ranks", [(name, str(len(heartbeats)), heartbeats) for name, heartbeats in sorted(by_node.items())]
    )


def _table(look: Look, what: str, lines: Sequence[tuple[str, str, Sequence[Heartbeat]]]) -> Table:
    """Make the table. Each line has a node, its rank or number of ranks, and their heartbeats.

    The name of a node stands only in its first line.
    """
    table = new_table("node", what, "state", ">saved", ">checkpoint", ">last sign", ">stall", ">commit", ">late",
                      ">memory")  # fmt: skip
    before = ""
    for node, of_it, heartbeats in lines:
        table.add_row("" if node == before else node, of_it, *_cells(look, heartbeats))
        before = node
    return table


def _cells(look: Look, heartbeats: Sequence[Heartbeat]) -> list[Text]:
    states = [state_of(heartbeat) for heartbeat in heartbeats]
    worst = next(state for state in _WORST if state in states)
    count = states.count(worst)
    text = worst if count == len(heartbeats) else f"{count} {worst}"
    quiet = look.at - min(float(heartbeat["beat"]) for heartbeat in heartbeats)
    alive = worst in ("training", "starting", "no courier")
    return [
        Text(text, style=_STYLES[worst]),
        Text(_step(heartbeats, "saved")),
        Text(_step(heartbeats, "committed")),
        Text(_age(quiet), style="yellow" if alive and quiet > _QUIET_S else ""),
        Text(_longest(heartbeats, "stall_s")),
        Text(_longest(heartbeats, "commit_s")),
        _latest(heartbeats),
        Text(show_bytes(sum(int(heartbeat.get("held", 0)) for heartbeat in heartbeats))),
    ]


def _step(heartbeats: Sequence[Heartbeat], key: str) -> str:
    steps = [heartbeat[key] for heartbeat in heartbeats]
    return "-" if None in steps else str(min(steps))


def _longest(heartbeats: Sequence[Heartbeat], key: str) -> str:
    values = [float(heartbeat[key]) for heartbeat in heartbeats if heartbeat.get(key) is not None]
    return show_seconds(max(values)) if values else "-"


def _latest(heartbeats: Sequence[Heartbeat]) -> Text:
    """Return how late the latest of some ranks was in the last commit, and in which phase; "-" if it is only noise."""
    latest = max(heartbeats, key=lambda one: float(one.get("late_s", 0.0)))
    late_s = float(latest.get("late_s", 0.0))
    if not is_worth_a_word(late_s, float(latest.get("commit_s", 0.0))):
        return Text("-")
    return Text(f"{show_seconds(late_s)} {latest.get('late_in', '')}", style="yellow")


def _age(seconds: float) -> str:
    return show_seconds(max(0.0, seconds)) if seconds >= 1 else "0 s"


def _warnings(look: Look) -> list[str]:
    found = [look.wrong] if look.wrong else []
    found += look.unread[:_UNREAD]
    if look.silent:
        found.append(f"no answer from {', '.join(look.silent)}")
    if left := [int(heartbeat["rank"]) for heartbeat in look.heartbeats if is_orphan(heartbeat)]:
        found.append(f"the courier of {named(left)} still commits the last save, but its trainer is gone")
    if lost := [heartbeat for heartbeat in look.heartbeats if is_without_courier(heartbeat)]:
        ranks = named([int(heartbeat["rank"]) for heartbeat in lost])
        found.append(f"no courier on {ranks}: training continues, but saves are not committed; the log says why")
    if failed := sum(int(heartbeat.get("failed", 0)) for heartbeat in look.heartbeats if heartbeat["rank"] == 0):
        found.append(f"{many(failed, 'save')} of this run did not become checkpoints: the log says why")
    seen = {heartbeat["node"] for heartbeat in look.heartbeats}
    of = max((int(heartbeat.get("nodes", 0)) for heartbeat in look.heartbeats), default=0)
    if len(seen) < of and not look.silent:
        found.append(f"{many(of - len(seen), 'other node')} not asked: use --slurm-job ID or --hosts A,B")
    return found
