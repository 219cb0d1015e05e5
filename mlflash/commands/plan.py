"""The command ``mlflash plan``: its options, and what they mean together."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..command_line import shell_completion
from ..command_line.options import certify_after_option, draining_option
from ..command_line.output import answer
from ..config import slots_of
from ..errors import ConfigError

if TYPE_CHECKING:
    from ..placement.failure_domains import Domains
    from ..planning.interval import Costs
    from ..planning.measured_run import Measured
    from ..planning.scheme_comparison import Job


def _quantity(name: str) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """Make a callback that reads an option with a function of `units`. The function's error names valid values."""

    def read(_: click.Context, option: click.Parameter, text: str | None) -> Any:
        from ..human_readable import units

        try:
            return None if text is None else getattr(units, name)(text)
        except ConfigError as error:
            raise click.BadParameter(str(error), param=option) from None

    return read


_BYTES, _SECONDS = _quantity("read_bytes"), _quantity("read_seconds")
_FILE = click.Path(exists=True, dir_okay=False)


@click.command()
@click.option("--nodes", type=click.IntRange(1),
              help="Nodes of the job.  [default: those of --hosts, --report or --domains]")  # fmt: skip
@click.option("--ranks-per-node", type=click.IntRange(1),
              help="Ranks on each node.  [default: those of --report, or 8]")  # fmt: skip
@click.option("--bytes", "nbytes", callback=_BYTES,
              help="State of one rank, such as 12GiB or 80GB.  [default: that of --report]")  # fmt: skip
@click.option("--alike", callback=_BYTES,
              help="The part of --bytes that is the same on all ranks, as under DDP.  [default: that "
              "of --report, or 0]")  # fmt: skip
@click.option("--memory", callback=_BYTES, help="Memory of a node for checkpoints, such as 512GiB.")
@click.option("--scheme", "schemes", multiple=True, shell_complete=shell_completion.schemes,
              help="Scheme to compare; you can repeat it.  [default: all that differ on these nodes]")  # fmt: skip
@click.option(
    "--losses",
    type=click.IntRange(1, 64),
    default=3,
    show_default=True,
    help="Show the chances if 1 to this many random nodes are lost at once.",
)
@draining_option
@certify_after_option
@click.option("--mtbf", callback=_SECONDS, help="Mean time between failures of one node: 5y, 200d, 30000h.")
@click.option("--save", callback=_SECONDS,
              help="Time that a save stalls training: 0.5s, 80ms.  [default: that of --report]")  # fmt: skip
@click.option("--commit", callback=_SECONDS,
              help="Time from the call of save to its commit.  [default: that of --report, or --save]")  # fmt: skip
@click.option(
    "--restart", callback=_SECONDS, default="2min", show_default=True, help="Time from a failure to the next step."
)
@click.option("--drain-every", callback=_SECONDS, help="Time between two drains to the file system: 1h.")
@click.option("--pfs-restart", callback=_SECONDS,
              help="As --restart, if the file system is read.  [default: --restart]")  # fmt: skip
@click.option("--domains", type=_FILE,
              help="File that lists hosts and their failure domains, outermost first: n[001-032] row1 "
              "rack1.")  # fmt: skip
@click.option("--slurm", is_flag=True, help="Ask Slurm for its switches or blocks (scontrol show topology).")
@click.option("--hosts",
              help="Hosts in the order of the ranks: n[001-128].  [default: all hosts of --domains or "
              "--slurm]")  # fmt: skip
@click.option("--report", type=_FILE,
              help="JSON of Checkpointer.report() of one rank, or a list of the reports of all ranks.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document with bytes, seconds and shares.")
@click.option("--plot", metavar="FILE", shell_complete=shell_completion.files,
              help="Draw the wasted time against the interval to FILE.png (or .svg, .pdf).")  # fmt: skip
def plan(schemes: tuple[str, ...], losses: int, as_json: bool, plot: str | None, **given: Any) -> None:
    """Compare what redundancy schemes cost and survive, and compute how often to save.

    Use it before a job, on any machine, to choose a scheme.

    \b
    mlflash plan --nodes 16 --bytes 12GiB --memory 512GiB
    mlflash plan --nodes 16 --bytes 12GiB --mtbf 5y --save 0.5s

    It places each scheme on the nodes as a Checkpointer would. For each scheme it shows the memory, the losses that it
    survives, and the exact probability that random losses leave a complete checkpoint. With --mtbf and --save it also
    computes the interval between saves that wastes the least time. docs/plan.md describes the model.
    """
    from ..planning.plot import draw
    from ..planning.scheme_comparison import consider, scheme_costs
    from ..planning.view import show, to_json

    try:
        job, costs, notes = _understand(**given)
        if plot is not None and costs is None:
            raise click.UsageError("--plot draws wasted time against the interval: give --mtbf, and --save or --report")
        considered, left_out = consider(job, schemes)
        prospects = [scheme_costs(job, *one, min(losses, len(job.node_names)), costs) for one in considered]
        if plot is not None and costs is not None:
            draw(plot, job, costs, prospects)
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
    plan = job, costs, prospects, [*notes, *left_out]
    answer(as_json, to_json(*plan), lambda console: show(console, *plan))


def _understand(nbytes: int | None, alike: int | None, memory: int | None, ranks_per_node: int | None, draining: bool,
                certify_after: int, report: str | None,
                **given: Any) -> tuple[Job, Costs | None, list[str]]:  # fmt: skip
    """Make the job, the costs of saves and failures, and the notes for the user from the options."""
    from ..planning.measured_run import measured
    from ..planning.scheme_comparison import Job

    run: Measured | None = None
    if report is not None:
        try:
            run = measured(json.loads(Path(report).read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{report}: {error}") from None
    if nbytes is None and run is None:
        raise click.UsageError("how much state does a rank have? Give --bytes or --report, for example "
                               "`mlflash plan --nodes 16 --bytes 12GiB`")  # fmt: skip
    nodes = given["nodes"] or (None if run is None else run.nodes)
    names, domains, notes = _places(nodes, given["domains"], given["slurm"], given["hosts"])
    held = slots_of(certify_after)
    job = Job(
        names,
        ranks_per_node or (None if run is None else run.ranks_per_node) or 8,
        run.nbytes if nbytes is None and run is not None else nbytes or 0,
        domains.kinds if domains else (),
        tuple(domains.names(name) for name in names) if domains else (),
        memory,
        held + draining,
        held,
        alike_nbytes=run.alike_nbytes if alike is None and nbytes is None and run is not None else alike or 0,
    )
    for kind, names_of in job.domains.items():
        if len(names) > 1 and len(set(names_of)) == 1:
            notes.append(f"all nodes are in {kind} {names_of[0]}: if it fails, all checkpoints in memory are lost")
    return job, _costs(len(names), run, **{name: given[name] for name in _COSTS}), notes


_COSTS = ("mtbf", "save", "commit", "restart", "drain_every", "pfs_restart")


def _costs(nodes: int, run: Measured | None, mtbf: float | None, save: float | None, commit: float | None,
           restart: float, drain_every: float | None, pfs_restart: float | None) -> Costs | None:  # fmt: skip
    from ..planning.interval import Costs

    if mtbf is None:
        return None
    stall = save if save is not None or run is None else run.stall_s
    if stall is None:
        raise click.UsageError("the interval needs --save (the time that a save stalls training) or --report")
    if commit is None:
        commit = max(stall, run.commit_s if run is not None else 0.0)
    if mtbf == 0 or commit == 0 or drain_every == 0:
        raise click.UsageError("--mtbf, --commit and --drain-every must be longer than 0 s")
    if commit < stall:
        raise click.UsageError("--commit counts from the call of save: it cannot be shorter than --save")
    if pfs_restart is not None and drain_every is None:
        raise click.UsageError("--pfs-restart needs --drain-every: the work since the last drain is lost")
    return Costs(mtbf / nodes, stall, commit, restart, drain_every, restart if pfs_restart is None else pfs_restart)


def _places(nodes: int | None, file: str | None, slurm: bool, hosts: str | None
            ) -> tuple[tuple[str, ...], Domains | None, list[str]]:  # fmt: skip
    """Return the names of the nodes, their failure domains, and notes for the user."""
    from ..placement.failure_domains import from_argument, short_name
    from ..placement.host_list import expand_hosts
    from ..placement.slurm_topology import ask_slurm

    if file is not None and slurm:
        raise click.UsageError("give either --domains or --slurm")
    domains = from_argument(file)
    if slurm:
        domains = ask_slurm()
        if domains is None:
            raise ConfigError("Slurm knows no switches or blocks here: use --domains FILE")
        hosts = hosts or os.environ.get("SLURM_JOB_NODELIST")
    notes = []
    if hosts:
        names = expand_hosts(hosts, "--hosts")
        if nodes not in (None, len(names)) or len(set(names)) < len(names):
            raise ConfigError("--hosts", expected=f"{nodes or len(names)} different hosts", found=f"{len(names)} names")
    elif domains is not None:
        known = sorted(domains.of, key=lambda host: [int(part) if part.isdigit() else part
                                                     for part in re.split("([0-9]+)", host)])  # fmt: skip
        names = tuple(known[: nodes or len(known)])
        if nodes is not None and len(names) < nodes:
            raise ConfigError("too few hosts are known", expected=f"{nodes} nodes", found=f"{len(names)} hosts")
        if len(names) < len(known):
            notes.append(f"the first {len(names)} of {len(known)} hosts: {names[0]} to {names[-1]}")
    elif nodes is None:
        raise click.UsageError("how many nodes? Give --nodes, --hosts, --domains, or --report with all ranks' reports")
    else:
        names = tuple(f"node{number}" for number in range(nodes))
    unknown = [name for name in names if domains and not {name, short_name(name)} & domains.of.keys()]
    if unknown:
        notes.append(
            f"the failure domains of {len(unknown)} of {len(names)} hosts are unknown, so each counts as its own: "
            f"{unknown[0]}, ..."
        )
    return names, domains, notes
