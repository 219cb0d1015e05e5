"""A plan as a table with sentences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.table import Table

from ..text import many, show_bytes, show_seconds, show_share
from .output import new_table
from .plan_interval import Costs, daly, young
from .plan_schemes import Job, SchemeCosts, least


def show(console: Console, job: Job, costs: Costs | None, compared: Sequence[SchemeCosts], notes: Sequence[str]
         ) -> None:  # fmt: skip
    """Print the job, a line for each scheme, the losses that each survives, warnings, and the least memory."""
    for line in _introduction(job, costs, compared):
        console.print(line, soft_wrap=True)
    console.print(_table(job, costs, compared))
    for p in compared:
        console.print(f"{p.scheme}: {p.survives}", soft_wrap=True)
    for p in (p for p in compared if p.warnings):
        more = f"; {len(p.warnings) - 1} more like this" if len(p.warnings) > 1 else ""
        console.print(f"warning: {p.scheme}: {p.warnings[0]}{more}", style="yellow", soft_wrap=True)
    for note in notes:
        console.print(note, style="dim", soft_wrap=True)
    for loss, p in least(compared).items():
        console.print(f"least memory for {loss}: {p.scheme}, {show_bytes(p.memory_nbytes)} a node "
                      f"({p.memory_per_state:.2f} x state)", style="green")  # fmt: skip


def _introduction(job: Job, costs: Costs | None, compared: Sequence[SchemeCosts]) -> Iterator[str]:
    nodes = len(job.node_names)
    yield (
        f"{many(nodes, 'node')} x {many(job.ranks_per_node, 'rank')} x {show_bytes(job.nbytes)}: "
        f"{show_bytes(job.state_nbytes)} of state on a node, {show_bytes(nodes * job.state_nbytes)} in all; each rank "
        f"has {job.own_slots} slots, each copy {job.copy_slots}"
    )
    if job.alike_nbytes:
        yield f"{show_bytes(job.alike_nbytes)} of it is the same on all ranks: stored once on each node, and not sent"
    yield f"{show_bytes(max(p.spare_nbytes for p in compared))} more must be free on a node when slots are made"
    if costs is None:
        return
    yield (
        f"a node fails every {show_seconds(costs.mtbf_s * nodes)}, the job every {show_seconds(costs.mtbf_s)}; a save "
        f"stalls {show_seconds(costs.stall_s)} and is committed after {show_seconds(costs.commit_s)}; a restart takes "
        f"{show_seconds(costs.restart_s)}"
    )
    best_s, young_s = daly(costs.stall_s, costs.mtbf_s), young(costs.stall_s, costs.mtbf_s)
    longer = f", but a commit takes longer: {show_seconds(costs.commit_s)}" if best_s < costs.commit_s else ""
    yield f"best interval: {show_seconds(best_s)} (Daly 2006; Young 1974: {show_seconds(young_s)}){longer}"
    if costs.drain_every_s is None:
        yield "the waste does not include failures that memory cannot cover: give --drain-every and --pfs-restart"


def _table(job: Job, costs: Costs | None, compared: Sequence[SchemeCosts]) -> Table:
    columns: dict[str, Callable[[SchemeCosts], str]] = {"scheme": lambda p: p.scheme}
    if any(p.made != p.scheme for p in compared):
        columns["made here"] = lambda p: "" if p.made == p.scheme else p.made
    columns |= {">a node": lambda p: show_bytes(p.memory_nbytes), ">x state": lambda p: f"{p.memory_per_state:.2f}"}
    if job.memory_nbytes is not None:
        columns["fits"] = lambda p: "yes" if p.fits else "no"
    for lost in compared[0].chances:
        columns[f">{lost} lost"] = lambda p, lost=lost: show_chance(p.chances[lost])  # type: ignore[misc]
    if costs is not None:
        columns[">save every"] = lambda p: "-" if p.interval_s is None else show_seconds(p.interval_s)
        columns[">waste"] = lambda p: "-" if p.waste is None else show_share(p.waste)
        columns[">falls a year"] = lambda p: _show_rate(p.falls_per_year or 0.0)
    table = new_table(*columns)
    for p in compared:
        table.add_row(*(text(p) for text in columns.values()), style="dim" if p.fits is False else None)
    return table


def show_chance(chance: float) -> str:
    """Write a probability, rounded down: 0.99996 → "99.996 %". Only certainty is 100 %."""
    if chance >= 1 or chance <= 0:
        return "100 %" if chance >= 1 else "0 %"
    digits = min(9, max(1, math.ceil(-math.log10(100 * (1 - chance)))))
    return f"{math.floor(chance * 100 * 10**digits) / 10**digits:.{digits}f} %"


def _show_rate(count: float) -> str:
    # Losses that do not come from single nodes dominate anything rarer that the model predicts.
    if 0 < count < 0.001:
        return "< 0.001"
    return f"{count:,.0f}" if count >= 10 else f"{count:.2g}"
