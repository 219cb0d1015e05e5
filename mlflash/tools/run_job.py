"""The commands ``mlflash run`` and ``mlflash agent``, which start what must outlive a job step or a rank."""

from __future__ import annotations

import functools
import os
import shlex
import signal
import socket
import sys
from pathlib import Path

import click

from ..config import DISABLE, is_enabled, job_name
from ..errors import ConfigError, DeadlineExceeded, LaunchFailed
from ..launch import agent_process
from ..launch.line_client import LineClient
from ..run.agents import SILENCE_S, Agents
from ..run.first_node_guard import guard_of
from ..run.launch_systems import OnSlurm, OnSsh, System, names_in, own_id
from ..run.membership import Deadlines
from ..run.started_ranks import KeepAlive, RunLog, start, start_kept
from ..run.supervisor import RunOptions, Supervisor
from . import completion
from .options import job_option, memory_option

_MOVE = "move"
_MOVE_S = 30.0  # limit for `mlflash run` to answer
_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option("--nodes", "-N", type=click.IntRange(1), required=True, help="Number of nodes that train.")
@click.option("--ranks-per-node", type=click.IntRange(1),
              help="Ranks on each node.  [default: SLURM_NTASKS_PER_NODE, else 1]")  # fmt: skip
@click.option(
    "--spares",
    type=click.IntRange(0),
    help="Nodes that wait to replace a lost one. With --keep-alive and without spare nodes: processes that wait on the "
    "nodes that train.  [default: all other nodes]",
)
@click.option("--keep-alive", is_flag=True, help="When ranks are lost, keep the other processes: spares take the lost "
              "ranks, and all continue after the newest commit (see mlflash.keep_alive).")  # fmt: skip
@click.option("--lost-after", type=click.FloatRange(0.5), default=10, show_default=True, metavar="SECONDS",
              help="--keep-alive: a node or process without a sign of life for this long is lost.")  # fmt: skip
@click.option("--leave-within", type=click.FloatRange(1), default=30, show_default=True, metavar="SECONDS",
              help="--keep-alive: time for ranks to leave their step after another rank is lost.")  # fmt: skip
@click.option("--ready-within", type=click.FloatRange(1), default=120, show_default=True, metavar="SECONDS",
              help="--keep-alive: time from there until all ranks begin the next step.")  # fmt: skip
@click.option("--min-nodes", type=click.IntRange(1),
              help="Continue with down to this many nodes, if your training can reshard.  [default: what --min-ranks "
              "needs, else all]")  # fmt: skip
@click.option("--min-ranks", type=click.IntRange(1),
              help="--keep-alive: if too few processes wait, train on with down to this many ranks.  [default: those "
              "of --min-nodes]")  # fmt: skip
@click.option("--max-restarts", type=click.IntRange(0), default=20, show_default=True,
              help="End after this many restarts.")  # fmt: skip
@click.option("--directory", "-d", metavar="DIR", shell_complete=completion.directories,
              help="Directory or URL that the job drains to. At the end, the newest checkpoint is "
              "scavenged to it.")  # fmt: skip
@click.option("--job", envvar="MLFLASH_JOB", metavar="NAME", shell_complete=completion.jobs,
              help="Name of the job.  [default: the name that Checkpointer gives it]")  # fmt: skip
@memory_option
@click.option("--keep-memory", is_flag=True, help="Leave the slots in memory at the end.")
@click.option("--hang-timeout", type=click.FloatRange(0), default=1800, show_default=True, metavar="SECONDS",
              help="Restart the ranks if they save nothing for this long. 0: never.")  # fmt: skip
@click.option("--hang-after", type=click.FloatRange(0), default=300, show_default=True, metavar="SECONDS",
              help="--keep-alive: replace a rank without a collective and a save for this long, and for ten of its "
              "steps. 0: never.")  # fmt: skip
@click.option("--look-every", type=click.FloatRange(0.5), default=15, show_default=True, metavar="SECONDS",
              help="Time between two checks of the nodes.")  # fmt: skip
@click.option("--grace", type=click.FloatRange(0), default=60, show_default=True, metavar="SECONDS",
              help="Time for one more checkpoint after a signal that ends the run.")  # fmt: skip
@click.option("--gpus", type=click.IntRange(0), default=0, help="Number of GPUs that must respond on each node.")
@click.option("--interface", default="", metavar="NAME", help="Network interface that must be up on each node.")
@click.option("--journal", "run_log", type=click.Path(dir_okay=False, path_type=Path), default=Path("run.jsonl"),
              show_default=True, help="File to append events of the run to.")  # fmt: skip
@click.option("--launcher", "kind", type=click.Choice(["srun", "ssh"]),
              help="Program that starts the agent of each node.  [default: srun in a Slurm allocation, else "
              "ssh]")  # fmt: skip
@click.option("--srun-args", default="", metavar="WORDS", help="More arguments for srun.")
@click.option("--hosts", default="", metavar="A,B,C", help="ssh: all nodes, spares included.  [default: this node]")
@click.option("--rsh", default="ssh", show_default=True, metavar="PROGRAM", help="ssh: program for the remote shell.")
@click.argument("argv", nargs=-1, required=True, type=click.UNPROCESSED, shell_complete=completion.files)
def run(nodes: int, ranks_per_node: int | None, spares: int | None, min_nodes: int | None, max_restarts: int,
        directory: str | None, job: str | None, memory: str, keep_memory: bool, hang_timeout: float,
        look_every: float, grace: float, gpus: int, interface: str, run_log: Path, kind: str | None,
        srun_args: str, hosts: str, rsh: str, keep_alive: bool, lost_after: float, leave_within: float,
        ready_within: float, hang_after: float, min_ranks: int | None, argv: tuple[str, ...]) -> None:  # fmt: skip
    """Start the command ARGV on all ranks, and restart it after a failure with spares in place of lost nodes.

    \b
    mlflash run -N 8 -d DIR -- python train.py
    mlflash run -N 2 --hosts n1,n2,n3 -d DIR -- python train.py

    `mlflash template` writes a batch script that calls it. Exits with 0 if all ranks ended well, else with the exit
    code of the last run.
    """
    journal = RunLog(run_log)
    if directory is not None and "://" not in directory:
        directory = str(Path(directory).absolute())
    try:
        name = job or job_name(os.environ, directory, argv)
    except ConfigError:
        raise click.UsageError("the job has no name: give --directory (where it drains to) or --job") from None
    try:
        if not is_enabled(os.environ):  # ranks that save nothing give no signs of life
            hang_timeout = grace = 0.0
            click.echo(f"mlflash run: {DISABLE} is set: there are no checkpoints, and hangs are not detected", err=True)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    # "4(x2)" means four on each of two nodes.
    tasks = os.environ.get("SLURM_NTASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE", "1")
    tasks_per_node = int(tasks.split("(")[0].split(",")[0])
    try:
        ranks_per_node = ranks_per_node or tasks_per_node
        min_nodes = min_nodes or -(-(min_ranks or 0) // ranks_per_node)
        options = RunOptions(
            argv, nodes, ranks_per_node, min_nodes, max_restarts, name, memory, directory,
            keep_memory, hang_timeout, look_every, grace, gpus, interface,
        )  # fmt: skip
        system = _system(kind, shlex.split(srun_args), hosts.split(",") if hosts else ["localhost"], rsh)
        if spares is not None and not keep_alive and len(system.hosts) < nodes + spares:
            raise click.UsageError(
                f"--nodes {nodes} and --spares {spares} need {nodes + spares} nodes, not {len(system.hosts)}"
            )
        kept = KeepAlive(
            spares or 0,
            Deadlines(lost_after, leave_within, hang_after, ready_within),
            min_ranks or options.least * options.ranks_per_node,
            nodes * options.ranks_per_node,
        )
        guard = guard_of(system, options, run_log) if isinstance(system, OnSlurm) else None
        couriers = {"couriers": {"job": name, "memory": memory}} if is_enabled(os.environ) else {}
        with Agents(system, lost_after if keep_alive else SILENCE_S, couriers, guard) as agents:
            begin = (
                functools.partial(start_kept, agents, kept, journal) if keep_alive else functools.partial(start, agents)
            )
            supervisor = Supervisor(agents, options, journal, begin)
            for number in _SIGNALS:
                signal.signal(number, lambda number, frame: setattr(supervisor, "signal_number", number))
            code = supervisor.run()
        sys.exit(code)
    except LaunchFailed as error:
        raise click.ClickException(str(error)) from None


def _system(kind: str | None, extra: list[str], hosts: list[str], rsh: str) -> System:
    if kind == "srun" or (kind is None and "SLURM_JOB_ID" in os.environ):
        if "SLURM_JOB_ID" not in os.environ:
            raise click.UsageError("--launcher srun works inside an allocation of Slurm: in a batch script, or salloc")
        return OnSlurm(own_id(os.environ), names_in(os.environ["SLURM_JOB_NODELIST"]), extra)
    if extra:
        raise click.UsageError("--srun-args are for srun, but ssh starts these agents")
    return OnSsh(hosts, rsh)


@click.command()
@job_option
@memory_option
def agent(job: str | None, memory: str) -> None:
    """Start the agent of this node, so that couriers outlive a killed job step. `mlflash run` does this by itself.

    Start it once on each node, in a job step of its own, before the trainers. After SIGTERM or SIGINT it ends as soon
    as the last courier has ended.

    \b
    srun --overlap --ntasks-per-node=1 --cpu-bind=none mlflash agent &
    """
    environment = {**os.environ, "MLFLASH_MEMORY": memory} | ({"MLFLASH_JOB": job} if job else {})
    names = agent_process.kept_names(memory, environment)
    if not names:
        raise click.UsageError("this process does not know its job: set MLFLASH_JOB, or start it in a Slurm job")
    listeners = [socket.socket(socket.AF_UNIX) for _ in names]
    try:
        for listener, name in zip(listeners, names, strict=True):
            agent_process.listen(listener, name)
    except OSError:
        raise click.ClickException("an agent of this job already runs on this node") from None
    click.echo(agent_process.READY)
    agent_process.become(listeners, environment)


@click.command()
@click.argument("node", default="")
@job_option
@memory_option
def move(node: str, job: str | None, memory: str) -> None:
    """Let the ranks of a job under `mlflash run --keep-alive` leave NODE: waiting processes take them.

    They leave it after the next save, so that no step is lost; then nothing of the job runs there. Call this on a node
    of the job. Without NODE it is the node on which you call it. A node may have ranks again when it was rebooted.

    \b
    mlflash move node17 --job run8
    """
    if job is None:
        raise click.UsageError("name the job by --job or MLFLASH_JOB, as `mlflash run` does")
    try:
        sock = agent_process.connect_again(agent_process.name_for_commands(job, memory))
    except OSError:
        raise click.ClickException(f"job {job} has no agent of `mlflash run` on this node; if its memory is not "
                                   f"{memory}, name it by --memory or MLFLASH_MEMORY") from None  # fmt: skip
    client = LineClient(sock, "the agent of this node", lambda message: None)
    try:
        why_not = client.ask(_MOVE, _MOVE_S, move=node)
    except (DeadlineExceeded, OSError) as error:
        raise click.ClickException(str(error)) from None
    finally:
        client.close()
    if why_not:
        raise click.ClickException(f"{node or 'this node'} is not left: {why_not}")
    click.echo(f"{node or 'this node'} is left after the next save")
