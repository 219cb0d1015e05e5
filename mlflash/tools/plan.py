"""The command ``mlflash plan``: what each redundancy scheme would give a job, and how often to save.

Nothing follows from the name of a scheme. Each scheme is placed over the nodes as a Checkpointer places it, and the
losses that the placement survives are counted. docs/plan.md has the model of the interval, its assumptions and a worked
example. All times are wall-clock seconds. An interval is the time from one call of ``save`` to the next.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from ..config import history_of_light, slot_counts, slots_of
from ..errors import ConfigError
from ..memory.memory_limits import headroom
from ..memory.parity_layout import parity_extents
from ..placement import survival
from ..placement.failure_domains import Domains, ask_slurm, expand_hosts, from_argument
from ..placement.redundancy import Placement, Scheme, made, parse, place
from ..placement.topology import Topology
from ..protect.deduplication import cuts
from ..state import layout
from ..state.layout import ALIGN_NBYTES, PAGE_NBYTES, Extents, round_up
from ..text import YEAR_S, many, show_bytes, show_seconds, show_share
from . import completion
from .options import (
    BYTES,
    SECONDS,
    certify_after_option,
    draining_option,
    gradients_option,
    history_option,
    light_option,
)
from .output import new_table, print_answer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

SCHEMES = ("none", "copy", "copy:2", "xor:4", "xor:8", "rs:6+2", "rs:8+2", "rs:8+3")
MOST_RANKS = 1 << 20
_LATER_LOSSES = 64  # further nodes lost during one recovery; more of them count as not covered
_FILE = click.Path(exists=True, dir_okay=False)
_OF_TMPFS = 2  # /dev/shm has a half of a node's memory, unless it is mounted with another size


@dataclasses.dataclass(frozen=True)
class Node:
    """A node that people have: its GPUs, and the bytes of its memory."""

    gpus: int
    host_nbytes: int


NODES = {
    "dgx-h100": Node(8, 2 * 10**12),
    "dgx-h200": Node(8, 2 * 10**12),
    "dgx-b200": Node(8, 2 * 10**12),
    "gb200-tray": Node(4, 2 * 480 * 10**9),
    "nd-mi300x-v5": Node(8, 1850 << 30),
}
"""docs/plan.md has the source of each figure."""


@click.command()
@click.option("--nodes", type=click.IntRange(1),
              help="Nodes of the job.  [default: those of --hosts, --report or --domains]")  # fmt: skip
@click.option("--ranks-per-node", type=click.IntRange(1),
              help="Ranks on each node.  [default: those of --report or --node, or 8]")  # fmt: skip
@click.option("--node", type=click.Choice([*NODES]),
              help="Kind of each node. It gives --ranks-per-node, and half of its memory as --memory.")  # fmt: skip
@click.option("--bytes", "nbytes", callback=BYTES,
              help="State of one rank, such as 12GiB or 80GB.  [default: that of --report]")  # fmt: skip
@click.option("--alike", callback=BYTES,
              help="The part of --bytes that is the same on all ranks, as under DDP.  [default: that of --report, "
              "or 0]")  # fmt: skip
@click.option("--memory", callback=BYTES, help="Memory of a node for checkpoints, such as 512GiB.")
@click.option("--scheme", "schemes", multiple=True, shell_complete=completion.schemes,
              help="Scheme to compare; you can repeat it.  [default: all that differ on these nodes]")  # fmt: skip
@click.option("--losses", type=click.IntRange(1, 64), default=3, show_default=True,
              help="Show the chances if 1 to this many random nodes are lost at once.")  # fmt: skip
@draining_option
@certify_after_option
@history_option
@light_option
@gradients_option
@click.option("--on-disk", is_flag=True, help="Copies and parity are on a disk of each node (the setting copies).")
@click.option("--mtbf", callback=SECONDS, help="Mean time between failures of one node: 5y, 200d, 30000h.")
@click.option("--save", callback=SECONDS,
              help="Time that a save stalls training: 0.5s, 80ms.  [default: that of --report]")  # fmt: skip
@click.option("--commit", callback=SECONDS,
              help="Time from the call of save to its commit.  [default: that of --report, or --save]")  # fmt: skip
@click.option("--restart", callback=SECONDS, default="2min", show_default=True,
              help="Time from a failure to the next step.")  # fmt: skip
@click.option("--drain-every", callback=SECONDS, help="Time between two drains to the file system: 1h.")
@click.option("--pfs-restart", callback=SECONDS,
              help="As --restart, if the file system is read.  [default: --restart]")  # fmt: skip
@click.option(
    "--domains",
    type=_FILE,
    help="File that lists hosts and their failure domains, outermost first: n[001-032] row1 rack1.",
)
@click.option("--slurm", is_flag=True, help="Ask Slurm for its switches or blocks (scontrol show topology).")
@click.option("--hosts", help="Hosts in the order of the ranks: n[001-128].  [default: all of --domains or --slurm]")
@click.option("--report", type=_FILE,
              help="JSON of Checkpointer.report() of one rank, or a list of the reports of all ranks.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document with bytes, seconds and shares.")
def plan(schemes: tuple[str, ...], losses: int, as_json: bool, report: str | None, **given: Any) -> None:
    """Compare what redundancy schemes cost and survive, and compute how often to save. docs/plan.md has the model.

    \b
    mlflash plan --nodes 16 --bytes 12GiB --memory 512GiB
    mlflash plan --nodes 16 --bytes 12GiB --mtbf 5y --save 0.5s
    """
    try:
        measured = _measured(report) if report else {}
        job, notes = _job(given, measured)
        costs = _costs(len(job.node_names), given, measured)
        considered, left_out = consider(job, schemes)
        losses = min(losses, len(job.node_names))
        compared = [scheme_costs(job, scheme, placed, losses, costs) for scheme, placed in considered]
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
    notes += left_out
    failures = None if costs is None else {**dataclasses.asdict(costs), "young_s": young(costs.stall_s, costs.mtbf_s),
                                           "daly_s": daly(costs.stall_s, costs.mtbf_s)}  # fmt: skip
    document = {"job": dataclasses.asdict(job), "failures": failures, "schemes": [*map(dataclasses.asdict, compared)],
                "least_memory": {loss: p.scheme for loss, p in least(compared).items()}, "notes": notes}  # fmt: skip
    print_answer(as_json, document, lambda console: show(console, job, costs, compared, notes))


def _job(given: dict[str, Any], measured: dict[str, Any]) -> tuple[Job, list[str]]:
    nbytes, alike = given["nbytes"], given["alike"] or 0
    if nbytes is None and not measured:
        raise click.UsageError("how much state does a rank have? Give --bytes or --report, for example "
                               "`mlflash plan --nodes 16 --bytes 12GiB`")  # fmt: skip
    if nbytes is None:
        nbytes, alike = measured["nbytes"], measured["alike"] if given["alike"] is None else alike
    if given["gradients"] and not given["light"]:
        raise click.UsageError("--gradients is for --light N")
    names, domains, notes = _places(given["nodes"] or measured.get("nodes"), given["domains"], given["slurm"],
                                    given["hosts"])  # fmt: skip
    node = NODES.get(given["node"])
    slots = slot_counts(given["certify_after"], given["history"], given["on_disk"], given["draining"])
    memory = given["memory"] or (None if node is None else node.host_nbytes // _OF_TMPFS)
    job = Job(
        names, given["ranks_per_node"] or measured.get("ranks_per_node") or (8 if node is None else node.gpus), nbytes,
        domains.kinds if domains else (), tuple(map(domains.names, names)) if domains else (), memory,
        own_slots=slots.own, copy_slots=slots.copies, kept_slots=slots.kept,
        host_nbytes=None if node is None else node.host_nbytes, alike_nbytes=alike,
        light=given["light"], gradients_nbytes=given["gradients"] or measured.get("gradients"),
        on_disk=given["on_disk"],
    )  # fmt: skip
    for kind, names_of in job.domains.items():
        if len(names) > 1 and len(set(names_of)) == 1:
            notes.append(f"all nodes are in {kind} {names_of[0]}: if it fails, all checkpoints in memory are lost")
    return job, notes


def _places(nodes: int | None, file: str | None, slurm: bool, hosts: str | None
            ) -> tuple[tuple[str, ...], Domains | None, list[str]]:  # fmt: skip
    if file is not None and slurm:
        raise click.UsageError("give either --domains or --slurm")
    domains = ask_slurm() if slurm else from_argument(file)
    if slurm and domains is None:
        raise ConfigError("Slurm knows no switches or blocks here: use --domains FILE")
    if slurm:
        hosts = hosts or os.environ.get("SLURM_JOB_NODELIST")
    notes = []
    if hosts:
        names = expand_hosts(hosts, "--hosts")
        if nodes not in (None, len(names)) or len(set(names)) < len(names):
            raise ConfigError("--hosts", expected=f"{nodes or len(names)} different hosts", found=f"{len(names)} names")
    elif domains is not None:
        names = tuple(domains.of)[:nodes]
        if nodes is not None and len(names) < nodes:
            raise ConfigError("too few hosts are known", expected=f"{nodes} nodes", found=f"{len(names)} hosts")
        if len(names) < len(domains.of):
            notes.append(f"the first {len(names)} of {len(domains.of)} hosts: {names[0]} to {names[-1]}")
    elif nodes is None:
        raise click.UsageError("how many nodes? Give --nodes, --hosts, --domains, or --report with all ranks' reports")
    else:
        names = tuple(f"node{number}" for number in range(nodes))
    if unknown := [name for name in names if domains and not domains.knows(name)]:
        notes.append(f"the failure domains of {len(unknown)} of {len(names)} hosts are unknown, so each counts as its "
                     f"own: {unknown[0]}, ...")  # fmt: skip
    return names, domains, notes


def _costs(nodes: int, given: dict[str, Any], measured: dict[str, Any]) -> Costs | None:
    mtbf, restart, drain_every, pfs_restart = (given[k] for k in ("mtbf", "restart", "drain_every", "pfs_restart"))
    if mtbf is None:
        return None
    stall = measured.get("save") if given["save"] is None else given["save"]
    if stall is None:
        raise click.UsageError("the interval needs --save (the time that a save stalls training) or --report")
    commit = max(stall, measured.get("commit", 0.0)) if given["commit"] is None else given["commit"]
    if mtbf == 0 or commit == 0 or drain_every == 0:
        raise click.UsageError("--mtbf, --commit and --drain-every must be longer than 0 s")
    if commit < stall:
        raise click.UsageError("--commit counts from the call of save: it cannot be shorter than --save")
    if pfs_restart is not None and drain_every is None:
        raise click.UsageError("--pfs-restart needs --drain-every: the work since the last drain is lost")
    return Costs(mtbf / nodes, stall, commit, restart, drain_every, restart if pfs_restart is None else pfs_restart)


class _Slot(msgspec.Struct):
    what: str
    nbytes: int


class _Report(msgspec.Struct):
    node: str
    counts: dict[str, int]
    seconds: dict[str, float]
    slots: list[_Slot]
    shared_with: list[int] = msgspec.field(name="shared with")
    light: _Report | None = None

    def largest(self, what: str) -> int:
        return max((slot.nbytes for slot in self.slots if slot.what == what), default=0)


def _measured(path: str) -> dict[str, Any]:
    """Return the options that a report gives, by their names: sizes, and mean times of the slowest rank."""
    try:
        decoded = msgspec.json.decode(Path(path).read_bytes(), type=list[_Report] | _Report)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} is not a report: {error}",
                          expected="JSON of Checkpointer.report(), or a list of such reports") from None  # fmt: skip
    reports = decoded if isinstance(decoded, list) else [decoded]
    ranks_on, alike_on = Counter(report.node for report in reports), Counter[str]()
    for report in reports:
        alike_on[report.node] += report.largest("share")
    alike = max(alike_on.values(), default=0)
    nbytes = max((report.largest("own") for report in reports), default=0) + alike
    of_light = [report.light for report in reports if report.light is not None]
    gradients = max((report.largest("own") for report in of_light), default=0)
    gradients += sum(report.largest("share") for report in of_light)
    if not nbytes or not all(report.counts.get("saves") for report in reports):
        raise ConfigError(f"the run of {path} saved nothing", expected="at least one save")
    if alike and len(reports) < (needed := len(reports[0].shared_with)):
        raise ConfigError("this run's ranks share state", found=f"{len(reports)} reports",
                          expected=f"those of all {needed} ranks, in a list")  # fmt: skip
    stall, behind = (max(report.seconds.get(phase, 0.0) / report.counts["saves"] for report in reports)
                     for phase in ("stall", "protect and commit"))  # fmt: skip
    size = {"nodes": len(ranks_on), "ranks_per_node": max(ranks_on.values())} if len(reports) > 1 else {}
    size |= {"gradients": gradients} if gradients else {}
    return {**size, "nbytes": nbytes, "alike": alike, "save": stall, "commit": stall + behind}


# The table


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
    if job.light:
        yield f"light saves: each rank and each copy has {job.light_slots} slots of {show_bytes(job.light_nbytes)} more"
    if job.on_disk:
        own = f", and {job.kept_slots} own states of each rank" * bool(job.kept_slots)
        most = max(p.disk_nbytes for p in compared)
        yield f"copies and parity are on disks{own}, with {show_bytes(most)} a node at most"
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
    if job.light:
        columns[">sent a save"] = lambda p: show_bytes(p.sent_nbytes)
    if job.on_disk:
        columns[">on disk"] = lambda p: show_bytes(p.disk_nbytes)
    if job.memory_nbytes is not None:
        columns["fits"] = lambda p: "yes" if p.fits else "no"
    if job.host_nbytes is not None:
        columns[">left"] = lambda p: show_bytes(max(0, (job.host_nbytes or 0) - p.memory_nbytes - p.spare_nbytes))
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


# How often to save


@dataclasses.dataclass(frozen=True)
class Costs:
    """What saves and failures of a job cost."""

    mtbf_s: float  # mean time between failures of the job: that of one node divided by the number of nodes
    stall_s: float  # time that a save stalls training
    commit_s: float  # time from the call of ``save`` to its commit; a failure before it goes back to the previous save
    restart_s: float  # time from a failure to the next step after a restore from memory
    drain_every_s: float | None = None  # time between two drains to the file system; None: unknown
    pfs_restart_s: float = 0.0  # as ``restart_s``, with a restore from the file system


def young(stall_s: float, mtbf_s: float) -> float:
    """Estimate the best interval to first order. A save of 2 s and a failure every 10,000 s give 200 s.

    Source: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.
    """
    return math.sqrt(2 * stall_s * mtbf_s)


def daly(stall_s: float, mtbf_s: float) -> float:
    """Estimate the best interval to higher order. Daly counts the computation alone; this interval includes the save.

    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
        Generation Computer Systems 22(3), 2006.
    """
    if stall_s >= 2 * mtbf_s:
        return mtbf_s + stall_s
    share = stall_s / (2 * mtbf_s)
    return young(stall_s, mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9)


def inflation(interval_s: float, stall_s: float, recovery_s: float, mtbf_s: float) -> float:
    """Return the time of a job divided by the time of its computation alone, for random failures (Poisson).

    Each failure costs ``recovery_s`` beyond the work since the last save. Failures may happen during it.

    Source: Daly 2006, the complete model, with failures during restarts and repeated work.
    """
    if interval_s <= stall_s:
        return math.inf
    failures = interval_s / mtbf_s
    try:
        repeated = math.expm1(failures) / failures if failures else 1.0
        return interval_s / (interval_s - stall_s) * math.exp(recovery_s / mtbf_s) * repeated
    except OverflowError:  # a failure interrupts every attempt
        return math.inf


def best_interval(costs: Costs, uncovered: float) -> float | None:
    """Return Daly's interval, or the time of a commit if that is longer: saves would wait for each other.

    The share ``uncovered`` of failures that go back to the file system does not change it, because drains take the
    newest save, too. If memory covers no failure, saves only serve to drain, and the result is None.
    """
    return None if uncovered >= 1 else max(daly(costs.stall_s, costs.mtbf_s), costs.commit_s)


def waste(interval_s: float | None, costs: Costs, uncovered: float) -> float:
    """Return the share of time that does not compute a step for the first time: saves, recoveries and lost work.

    ``uncovered`` is the share of the failures that go back to the file system. They cost nothing if
    ``costs.drain_every_s`` is unknown. Without an interval, the job saves only what it drains.
    """
    longer = 1.0
    if interval_s is not None and uncovered < 1:
        # A failure loses what came after the last committed save. The stall of that save is not repeated.
        lost_s = costs.commit_s - costs.stall_s + costs.restart_s
        longer = inflation(interval_s, costs.stall_s, lost_s, costs.mtbf_s / (1 - uncovered))
    if costs.drain_every_s is not None and uncovered > 0:
        stall_s, age_s = (costs.stall_s, 0.0) if interval_s is None else (0.0, interval_s / 2)
        lost_s = age_s + costs.commit_s - stall_s + costs.pfs_restart_s
        longer *= inflation(costs.drain_every_s, stall_s, lost_s, costs.mtbf_s / uncovered)
    return 1 - 1 / longer


# Schemes


@dataclasses.dataclass(frozen=True)
class Job:
    """A job to plan for."""

    node_names: tuple[str, ...]
    ranks_per_node: int
    nbytes: int  # state of a rank
    kinds: tuple[str, ...] = ()  # levels of failure domains, outermost first
    places: tuple[tuple[str, ...], ...] = ()  # the domain of each node at each level; empty: unknown
    memory_nbytes: int | None = None  # of a node, for checkpoints; None: unknown
    own_slots: int = 2  # of each rank in memory: a third if the job drains, one or two more if it certifies steps
    copy_slots: int = 2  # of each copy and each parity file: as many more if the job certifies steps
    kept_slots: int = 0  # of each rank on a disk, if the history is there
    host_nbytes: int | None = None  # memory of a node; None: unknown
    alike_nbytes: int = 0  # the part of ``nbytes`` that is the same on all ranks: stored once on each node
    light: int = 0  # saves between two whole ones that keep gradients only
    gradients_nbytes: int | None = None  # of a rank; None: a third of ``nbytes``
    on_disk: bool = False  # whether copies and parity are on a disk of each node

    def __post_init__(self) -> None:
        if not 1 <= len(self.node_names) * self.ranks_per_node <= MOST_RANKS or self.nbytes < 1:
            raise ConfigError(
                "impossible job size", expected=f"1 to {MOST_RANKS:,} ranks, and at least 1 byte of state on each",
                found=f"{len(self.node_names)} nodes x {self.ranks_per_node} ranks x {self.nbytes} bytes",
            )  # fmt: skip
        if not 0 <= self.alike_nbytes <= self.nbytes:
            raise ConfigError("the state that all ranks share (--alike) is larger than the state of a rank",
                              expected=f"at most {self.nbytes} bytes", found=f"{self.alike_nbytes}")  # fmt: skip

    @cached_property
    def topology(self) -> Topology:
        """Ranks in the order of their nodes, as launchers place them by default."""
        nodes = range(len(self.node_names))
        return Topology(tuple(node for node in nodes for _ in range(self.ranks_per_node)), self.node_names)

    @cached_property
    def domains(self) -> dict[str, list[str]]:
        """The domain name of each node, for each kind of failure domain, innermost first."""
        return {kind: [place[level] for place in self.places] for level, kind in reversed([*enumerate(self.kinds)])}

    @property
    def light_slots(self) -> int:
        return slots_of(0, history_of_light(self.light)) if self.light else 0

    @property
    def light_nbytes(self) -> int:
        return -(-self.nbytes // 3) if self.gradients_nbytes is None else self.gradients_nbytes

    @property
    def alike_share(self) -> float:
        return self.alike_nbytes / self.nbytes

    @property
    def state_nbytes(self) -> int:
        """Bytes of state on a node (the B of "4 B")."""
        return self.ranks_per_node * self.nbytes


@dataclasses.dataclass(frozen=True)
class SchemeCosts:
    """What a scheme gives a job. What depends on failure rates is None if these are unknown."""

    scheme: str  # as the user named it
    made: str  # on these nodes: "rs:8+2" if "rs:6+2" forms groups of ten
    memory_nbytes: int  # on the node that needs most
    memory_per_state: float  # ``memory_nbytes`` divided by the state of a node
    spare_nbytes: int  # what must stay free when the memory is allocated
    disk_nbytes: int  # on the disk of the node that needs most
    sent_nbytes: int  # by a rank for a save, on average of whole and light ones
    fits: bool | None  # whether a node has room for both; None: unknown
    survives: str  # the losses that it survives, in words
    any_nodes: int  # largest k for which any k nodes may be lost
    any_domain: tuple[str, ...]  # kinds of failure domains for which any one domain may be lost
    chances: dict[int, float]  # number of random nodes lost at once → probability that a checkpoint is left in memory
    warnings: tuple[str, ...]  # domains that hold more nodes of a group than the group may lose
    uncovered: float | None  # share of the failures that go back to the file system
    falls_per_year: float | None  # number of these failures
    interval_s: float | None  # best time from save to save; None, too, if memory covers no failure
    waste: float | None  # share of wasted time with this interval


def consider(job: Job, asked: Sequence[str] = ()) -> tuple[list[tuple[Scheme, Placement]], list[str]]:
    """Place the named schemes, or else those of `SCHEMES` that differ here, and say why others are left out."""
    considered: list[tuple[Scheme, Placement]] = []
    left_out = []
    for scheme in map(parse, asked or SCHEMES):
        placed = place(job.topology, scheme, job.places)
        same = next((known for known, other in considered if _groups(other) == _groups(placed)), None)
        if asked or same is None:
            considered.append((scheme, placed))
        else:
            left_out.append(f"{scheme} is left out: it makes {made(placed)} here, as {same} does")
    return considered, left_out


def _groups(placement: Placement) -> tuple[object, ...]:
    return made(placement), placement.parity_groups, placement.partners


def node_nbytes(job: Job, placement: Placement) -> int:
    """Count the bytes that a placement takes in the memory of the node that needs most.

    The manifest counts with its smallest size, two pages; its real size depends on the names in the state.
    """
    kept = 0 if job.on_disk else 1
    whole = _nbytes_of_slots(job, placement, job.nbytes, job.alike_nbytes, job.own_slots, job.copy_slots * kept)
    if not job.light:
        return whole
    light, alike = job.light_nbytes, round(job.light_nbytes * job.alike_share)
    return whole + _nbytes_of_slots(job, placement, light, alike, job.light_slots, job.light_slots * kept)


def disk_nbytes(job: Job, placement: Placement) -> int:
    """Count the bytes that copies and parity take on the disk of the node that needs most, if they are there."""
    in_memory = dataclasses.replace(job, on_disk=False, own_slots=job.own_slots + job.kept_slots)
    return node_nbytes(in_memory, placement) - node_nbytes(job, placement)


def sent_nbytes(job: Job, placement: Placement) -> int:
    """Return how many bytes a rank sends for a save, on average: once for each lost node that a group survives.

    A whole save comes with a light one, on which the next light one depends.
    """
    whole, light = job.nbytes - job.alike_nbytes, round(job.light_nbytes * (1 - job.alike_share))
    sent = whole + (job.light + 1) * light if job.light else whole
    return round(sent * placement.scheme.losses / (job.light + 1))


def _nbytes_of_slots(job: Job, placement: Placement, nbytes: int, alike: int, own_slots: int, copy_slots: int) -> int:
    slot = Extents(2 * PAGE_NBYTES, round_up(nbytes - alike, ALIGN_NBYTES), layout.BLOCK_NBYTES)
    sizes = {len(group) for group in placement.parity_groups}
    parity = {n: parity_extents([slot.blocks] * n, placement.scheme.losses, layout.BLOCK_NBYTES).nbytes for n in sizes}
    nodes = [0] * len(job.node_names)
    for node, owners, group in zip(job.topology.node_of, placement.owners, placement.parity_group_of, strict=True):
        nodes[node] += own_slots * slot.nbytes
        nodes[node] += copy_slots * (len(owners) * slot.nbytes + parity.get(len(group), 0))
    bounds = cuts(alike, job.ranks_per_node) if alike else []
    shares = [Extents(0, high - low, layout.BLOCK_NBYTES).nbytes for low, high in itertools.pairwise(bounds)]
    return max(nodes) + own_slots * sum(shares)


def share_uncovered(survived: survival.Survival, node_mtbf_s: float, window_s: float) -> float:
    """Return the probability that memory cannot cover a lost node, because others are lost while it is replaced.

    Nodes fail independently, so the number of further losses within the window has a Poisson distribution.
    """
    mean = (survived.nodes - 1) * window_s / node_mtbf_s
    most = min(survived.nodes, 1 + _LATER_LOSSES)
    good = survived.surviving(most)
    likely = [math.exp(-mean + further * math.log(mean) - math.lgamma(further + 1)) if mean else float(not further)
              for further in range(most)]  # fmt: skip
    lost = [1 - good[1 + further] / math.comb(survived.nodes, 1 + further) for further in range(most)]
    beyond = max(0.0, 1 - math.fsum(likely))
    # A smaller value is the rounding error of the sum, not a probability.
    return min(1.0, math.fsum(p * share for p, share in zip(likely, lost, strict=True)) + beyond * (beyond > 1e-12))


def scheme_costs(job: Job, scheme: Scheme, placed: Placement, losses: int, costs: Costs | None) -> SchemeCosts:
    """Compute what a scheme gives a job. Without ``costs``, failure rates are unknown."""
    survived = survival.of(job.topology, placed)
    memory, good = node_nbytes(job, placed), survived.surviving(losses)
    uncovered = falls = interval = wasted = None
    if costs is not None:
        uncovered = share_uncovered(survived, costs.mtbf_s * survived.nodes, costs.restart_s)
        falls = uncovered * YEAR_S / costs.mtbf_s
        interval = best_interval(costs, uncovered)
        if interval is not None or costs.drain_every_s is not None:
            wasted = waste(interval, costs, uncovered)
    return SchemeCosts(
        scheme=str(scheme),
        made=made(placed),
        memory_nbytes=memory,
        memory_per_state=memory / job.state_nbytes,
        spare_nbytes=headroom(memory),
        disk_nbytes=disk_nbytes(job, placed),
        sent_nbytes=sent_nbytes(job, placed),
        fits=None if job.memory_nbytes is None else memory + headroom(memory) <= job.memory_nbytes,
        survives=survival.describe(survived, job.domains),
        any_nodes=survived.any_nodes,
        any_domain=tuple(kind for kind, names in job.domains.items() if survival.any_domain(survived, names)),
        chances={lost: good[lost] / math.comb(survived.nodes, lost) for lost in range(1, losses + 1)},
        warnings=tuple(survival.too_close(job.topology, placed, job.domains)),
        uncovered=uncovered,
        falls_per_year=falls,
        interval_s=interval,
        waste=wasted,
    )


def least(compared: Sequence[SchemeCosts]) -> dict[str, SchemeCosts]:
    """Find the scheme that fits with the least memory for each loss: "any 1 node", "any 2 nodes", "any 1 rack"."""
    # If two differ only by a few headers, take the one that survives more.
    fitting = sorted((p for p in compared if p.fits is not False),
                     key=lambda p: (float(f"{p.memory_nbytes:.3g}"), -p.any_nodes))  # fmt: skip
    wishes = {f"any {many(n, 'node')}": [p for p in fitting if p.any_nodes >= n] for n in (1, 2, 3)}
    for kind in dict.fromkeys(kind for p in fitting for kind in p.any_domain):
        wishes[f"any 1 {kind}"] = [p for p in fitting if kind in p.any_domain]
    return {wish: granting[0] for wish, granting in wishes.items() if granting}
