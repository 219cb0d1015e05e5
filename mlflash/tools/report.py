"""The command ``mlflash report``: one HTML page that loads nothing and runs no script."""

from __future__ import annotations

import datetime
import importlib.resources
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from ..errors import ConfigError
from ..text import listed, many, named, show_bytes, show_seconds, show_share
from . import completion
from .options import json_option
from .report_history import JobHistory, job_history
from .report_log import Events, Launch, files_of, read, unique

_MOST_ROWS = 64  # of a timeline
_MOST_MARKS = 15_000  # of a timeline; about 1.5 MB
_DRAWN = {"save": "training stalled for", "protect": "protected in", "drain": "drained in", "restore": "restored in",
          "commit": "committed after"}  # fmt: skip


@click.command()
@click.argument("logs", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False),
                shell_complete=completion.files)  # fmt: skip
@click.option("--output", "-o", type=click.Path(dir_okay=False), metavar="FILE", shell_complete=completion.files,
              help="File to write the page to.  [default: report.html; none with --json]")  # fmt: skip
@json_option
def report(logs: tuple[str, ...], output: str | None, as_json: bool) -> None:
    """Make one HTML page from event logs: launches, failures, recoveries, and where the time went.

    \b
    mlflash report events.jsonl -o report.html
    mlflash report events.jsonl run.jsonl

    The name of one file stands for the files of the other nodes, too. If you add the journal of `mlflash run`, the
    page also shows why launches failed, and with --keep-alive ranks that were replaced or moved in place, and hangs.
    """
    try:
        log = read(files_of(logs))
        if not log.events:
            raise click.ClickException(f"no event in {', '.join(logs)}: give the event logs of the ranks; the journal "
                                       "of `mlflash run` alone is not enough")  # fmt: skip
        history = job_history(log)
        if as_json:
            click.echo(json.dumps(history.numbers, indent=1))
        if as_json and output is None:
            return
        path = Path(output or "report.html")
        # A browser that shows the old page may reload it at any time.
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        unfinished.write_text(page(history), encoding="utf-8", errors="replace")
        unfinished.replace(path)
    except (ConfigError, OSError) as error:
        raise click.ClickException(str(error)) from None
    numbers = history.numbers
    in_place = f"{many(len(numbers['recoveries']), 'loss')} recovered in place, " if numbers["recoveries"] else ""
    click.echo(f"{path}: {many(len(numbers['launches']), 'launch')}, {many(len(numbers['failures']), 'failure')}, "
               f"{in_place}goodput {100 * numbers['goodput']:.1f} %", err=as_json)  # fmt: skip


# The page


class Bar(NamedTuple):
    """A part of the timeline: its left end and width in percent of the drawing, and what it means."""

    kind: str
    left: float
    width: float
    text: str


def page(history: JobHistory) -> str:
    """Write the page of a job's history."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {"bytes": show_bytes, "cell": show_cell, "many": many, "seconds": show_seconds,
                            "share": show_share, "time": show_time}  # fmt: skip
    template = importlib.resources.files(__package__).joinpath("report_page.html").read_text(encoding="utf-8")
    rows, across = timeline(history)
    return environment.from_string(template).render(history.numbers, rows=rows, across=across)


def row_names(launches: Sequence[Launch]) -> dict[tuple[str, int], str]:
    """Name the row of each rank on each node. If there are too many, a row is a node or several neighboring nodes."""
    nodes = unique(node for launch in launches for round_ in launch.rounds for node in round_.nodes)
    ranks_on: dict[str, set[int]] = {node: set() for node in nodes}
    for launch in launches:
        for event in launch.events:
            ranks_on[event.node].add(event.rank)
    places = [(node, rank) for node, ranks in ranks_on.items() for rank in sorted(ranks)]
    if len(places) <= _MOST_ROWS:
        return {(node, rank): f"{node}, rank {rank}" for node, rank in places}
    changed = [node for node in nodes if any(node not in launch.nodes for launch in launches)][: _MOST_ROWS // 4]
    stable = [node for node in nodes if node not in changed]
    each = math.ceil(len(stable) / (_MOST_ROWS - len(changed)))
    row_of = {node: listed(stable[at - at % each :][:each], 1) for at, node in enumerate(stable)}
    return {(node, rank): row_of.get(node, node) for node, rank in places}


def timeline(history: JobHistory) -> tuple[dict[str, list[Bar]], list[Bar]]:
    """Return the bars of each row, and those across all rows. Events that end close to each other are one bar."""
    numbers, names = history.numbers, row_names(history.launches)
    wall_s = max(numbers["ended"] - numbers["began"], 1e-3)

    def bar(kind: str, began: float, ended: float, text: str) -> Bar:
        return Bar(kind, 100 * (began - numbers["began"]) / wall_s, 100 * (ended - began) / wall_s, text)

    rows: dict[str, list[Bar]] = {name: [] for name in names.values()}
    marks: dict[tuple[str, str, int], Events] = {}
    cell_s = wall_s * len(_DRAWN) * len(rows) / _MOST_MARKS
    for number, launch in enumerate(history.launches, 1):
        lives: dict[str, Events] = {}
        for event in launch.events:
            name = names[event.node, event.rank]
            if event.is_of_training:
                lives.setdefault(name, Events()).append(event)
            if event.kind in _DRAWN and (event.kind != "protect" or event.peers):
                marks.setdefault((name, event.kind, int(event.time // cell_s)), Events()).append(event)
        for name, life in lives.items():
            rows[name].append(bar("alive", life.began, life.ended, f"launch {number}"))
    for (name, kind, _), events in marks.items():
        steps = " to ".join(unique(f"{step:,}" for step in (events[0].step, events[-1].step)))
        nbytes = f"{show_bytes(events.nbytes)} " if kind in ("protect", "drain") else ""
        text = f"step {steps}: {nbytes}{_DRAWN[kind]} {show_seconds(events.seconds)}"
        rows[name].append(bar(kind, events.ended if kind == "commit" else events.began, events.ended, text))
    across = [bar("lost", began, ended, "lost training") for began, ended in history.lost]
    for number, row in enumerate(numbers["failures"], 1):
        across.append(bar("down", row["time"], row["time"] + row["down_s"], f"down after failure {number}"))
        across.append(bar("failure", row["time"], row["time"], f"failure {number}"))
    for number, row in enumerate(numbers["recoveries"], 1):
        across.append(bar("recovered", row["began"], row["ended"], f"recovery R{number}"))
    for number, row in enumerate(numbers["moves"], 1):
        across.append(bar("recovered", row["began"], row["ended"], f"move M{number}"))
    return rows, across


def show_time(time: float) -> str:
    """Write a time in UTC, to the second."""
    return f"{datetime.datetime.fromtimestamp(max(0.0, time), datetime.timezone.utc):%Y-%m-%d %H:%M:%S}"


def show_cell(row: dict[str, Any], fields: str, number: str = "") -> str:
    """Write a cell of a table: each of some fields on a line of its own. "#" is the number of the row."""
    return "\n".join(filter(None, (number if field == "#" else _show(row, field) for field in fields.split())))


def _show(row: dict[str, Any], field: str) -> str:
    """Write a field of a row of the JSON document, by its type and the unit that its name ends with."""
    match row[field]:
        case None | "" | []:
            return ""
        case [str(), *_] as names:
            return listed(names)
        case list(ranks):
            return named(ranks)
        case dict(parts):
            return "\n".join(f"{name}: {_show(parts, name)}" for name in parts)
        case float(time) if field in ("time", "began", "ended", "last", "first"):
            return show_time(time)
        case float(seconds):
            return show_seconds(seconds)
        case int(nbytes) if field.endswith("_nbytes"):
            return show_bytes(nbytes)
        case int(count):
            return f"{count:,}"
        case text:
            return str(text)
