"""A plan as a table with sentences for people, and as JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..command_line.output import new_table
from ..human_readable.units import YEAR_S, show_bytes, show_seconds, show_share
from ..human_readable.wording import many
from .interval import Costs, daly, young
from .scheme_comparison import Job, SchemeCosts, least

_NAMED = 2  # warnings about domains that are shown for each scheme


def show(
    console: Console, job: Job, costs: Costs | None, prospects: Sequence[SchemeCosts], notes: Sequence[str]
) -> None:
    """Print a plan: the job, a line for each scheme, the losses that each survives, warnings, and the least memory."""
    for line in _asked(job, costs, prospects):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(_table(job, costs, prospects))
    for p in prospects:
        console.print(Text.assemble((f"{p.scheme}: ", "bold"), p.survives), highlight=False, soft_wrap=True)
    for p in prospects:
        for text in p.too_close[:_NAMED]:
            console.print(Text(f"warning: {p.scheme}: {text}", style="yellow"), soft_wrap=True)
        if more := len(p.too_close[_NAMED:]):
            console.print(Text(f"warning: {p.scheme}: {more} more like this", style="yellow"), soft_wrap=True)
    for text in notes:
        console.print(Text(text, style="dim"), soft_wrap=True)
    for wish, best in least(prospects).items():
        text = f"least memory for {wish}: {best.scheme}, {show_bytes(best.memory_nbytes)} a node"
        console.print(Text(f"{text} ({best.memory_nbytes / job.state_nbytes:.2f} x state)", style="green"))


def _asked(job: Job, costs: Costs | None, prospects: Sequence[SchemeCosts]) -> Iterator[str]:
    nodes, state = len(job.node_names), job.state_nbytes
    why = [text for text, is_so in (("it drains", job.own_slots > job.copy_slots),
                                    ("it keeps certified steps", job.copy_slots > 2)) if is_so]  # fmt: skip
    slots = many(job.own_slots, "slot") + (f" ({' and '.join(why)})" if why else "")
    if job.copy_slots > 2:
        slots += f", and {job.copy_slots} for each copy"
    yield (
        f"{many(nodes, 'node')} x {many(job.ranks_per_node, 'rank')} x {show_bytes(job.nbytes)}: "
        f"{show_bytes(state)} of state on a node, {show_bytes(nodes * state)} in all; each rank has {slots}"
    )
    if job.alike_nbytes:
        yield f"{show_bytes(job.alike_nbytes)} of it is the same on all ranks: stored once on each node, and not sent"
    if job.memory_nbytes is not None:
        yield f"a node has {show_bytes(job.memory_nbytes)} for checkpoints"
    yield f"{show_bytes(max(p.spare_nbytes for p in prospects))} more must be free on a node when slots are made"
    if costs is None:
        return
    yield (
        f"a node fails every {show_seconds(costs.mtbf_s * nodes)}, the job every {show_seconds(costs.mtbf_s)}; a save "
        f"stalls {show_seconds(costs.stall_s)} and is committed after {show_seconds(costs.commit_s)}; a restart takes "
        f"{show_seconds(costs.restart_s)}"
    )
    bound = daly(costs.stall_s, costs.mtbf_s)
    first_order = show_seconds(young(costs.stall_s, costs.mtbf_s))
    text = f"best interval: {show_seconds(bound)} (Daly 2006; Young 1974: {first_order})"
    if bound < costs.commit_s:
        text += f", but a commit takes longer: {show_seconds(costs.commit_s)}"
    yield text
    if costs.drain_every_s is None:
        yield "the waste does not include failures that memory cannot cover: give --drain-every and --pfs-restart"
    else:
        yield (
            f"the job drains every {show_seconds(costs.drain_every_s)}; a restart from the file system takes "
            f"{show_seconds(costs.pfs_restart_s)}"
        )


def _table(job: Job, costs: Costs | None, prospects: Sequence[SchemeCosts]) -> Table:
    other_made = any(p.made != str(p.scheme) for p in prospects)
    heads = ["scheme", *["made here"] * other_made, ">a node", ">x state", *["fits"] * (job.memory_nbytes is not None)]
    heads += [f">{lost} lost" for lost in range(1, len(prospects[0].chances) + 1)]
    table = new_table(*heads, *([">save every", ">waste", ">falls a year"] if costs is not None else []))
    for p in prospects:
        row = [str(p.scheme)]
        if other_made:
            row.append("" if p.made == str(p.scheme) else p.made)
        row += [show_bytes(p.memory_nbytes), f"{p.memory_nbytes / job.state_nbytes:.2f}"]
        if p.fits is not None:
            row.append("yes" if p.fits else "no")
        row += [show_chance(chance) for chance in p.chances]
        if costs is not None:
            row += ["-" if p.interval_s is None else show_seconds(p.interval_s)]
            row += ["-" if p.waste is None else show_share(p.waste), _few(_falls(p, costs))]
        table.add_row(*row, style="dim" if p.fits is False else None)
    return table


def show_chance(chance: float) -> str:
    """Write a probability, rounded down. Only certainty is 100 %.

    Example:
        1 → "100 %"; 0.99996 → "99.996 %"; 0.5 → "50.0 %".
    """
    if chance >= 1 or chance <= 0:
        return "100 %" if chance >= 1 else "0 %"
    digits = min(9, max(1, math.ceil(-math.log10(100 * (1 - chance)))))
    return f"{math.floor(chance * 100 * 10**digits) / 10**digits:.{digits}f} %"


def _few(count: float) -> str:
    # Losses that do not come from single nodes dominate anything rarer that the model predicts.
    if 0 < count < 0.001:
        return "< 0.001"
    return f"{count:,.0f}" if count >= 10 else f"{count:.2g}"


def _falls(p: SchemeCosts, costs: Costs) -> float:
    return (p.uncovered or 0.0) * YEAR_S / costs.mtbf_s


def to_json(job: Job, costs: Costs | None, prospects: Sequence[SchemeCosts], notes: Sequence[str]) -> dict[str, Any]:
    """Return a plan as plain values in bytes, seconds and shares, whatever units were given."""
    given = {"nodes": len(job.node_names), "ranks_per_node": job.ranks_per_node, "nbytes_per_rank": job.nbytes,
             "alike_nbytes": job.alike_nbytes,
             "memory_nbytes": job.memory_nbytes, "own_slots": job.own_slots,
             "copy_slots": job.copy_slots}  # fmt: skip
    failures = None
    if costs is not None:
        failures = {
            "node_mtbf_s": costs.mtbf_s * len(job.node_names), "mtbf_s": costs.mtbf_s, "stall_s": costs.stall_s,
            "commit_s": costs.commit_s, "restart_s": costs.restart_s, "drain_every_s": costs.drain_every_s,
            "pfs_restart_s": costs.pfs_restart_s, "young_s": young(costs.stall_s, costs.mtbf_s),
            "daly_s": daly(costs.stall_s, costs.mtbf_s),
        }  # fmt: skip
    return {
        "job": given,
        "failures": failures,
        "schemes": [
            {
                "scheme": str(p.scheme),
                "made": p.made,
                "memory_nbytes_per_node": p.memory_nbytes,
                "spare_nbytes_per_node": p.spare_nbytes,
                "memory_per_state": p.memory_nbytes / job.state_nbytes,
                "fits": p.fits,
                "survives": p.survives,
                "any_nodes": p.any_nodes,
                "any_domain": list(p.any_domain),
                "chances": {str(lost): chance for lost, chance in enumerate(p.chances, 1)},
                "uncovered": p.uncovered,
                "falls_per_year": None if costs is None else _falls(p, costs),
                "interval_s": p.interval_s,
                "waste": p.waste,
                "warnings": list(p.too_close),
            }
            for p in prospects
        ],
        "least_memory": {wish: str(p.scheme) for wish, p in least(prospects).items()},
        "notes": list(notes),
    }
