"""The command ``mlflash run``."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

import click

from ..command_line import shell_completion
from ..config import DISABLE, is_enabled, job_name
from ..errors import ConfigError, LaunchFailed, MpiUnavailable
from ..launcher.first_node_guard import Guard
from ..launcher.launch_system import Launcher
from ..launcher.on_hosts import OnHosts
from ..launcher.on_slurm import OnSlurm, own_id
from ..launcher.run_log import RunLog
from ..launcher.run_options import RunOptions
from ..launcher.supervisor import Supervisor

_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option("--nodes", "-N", type=click.IntRange(1), required=True, help="Nodes that train.")
@click.option("--ranks-per-node", type=click.IntRange(1), help="Ranks on each. [SLURM_NTASKS_PER_NODE, else 1]")
@click.option("--spares", type=click.IntRange(0), help="Nodes of the allocation that wait; only looked at. [the rest]")
@click.option("--min-nodes", type=click.IntRange(1), help="Go on with fewer nodes, if training reshards.")
@click.option("--max-restarts", type=click.IntRange(0), default=20, show_default=True)
@click.option("--directory", "-d", metavar="DIR", shell_complete=shell_completion.directories,
              help="Where the job drains to; scavenged to at the end.")  # fmt: skip
@click.option("--job", envvar="MLFLASH_JOB", metavar="NAME", shell_complete=shell_completion.jobs,
              help="The job. [as Checkpointer would name it]")  # fmt: skip
@click.option("--memory", envvar="MLFLASH_MEMORY", default="/dev/shm", show_default=True,
              shell_complete=shell_completion.directories, help="Memory file system.")  # fmt: skip
@click.option("--keep-memory", is_flag=True, help="Leave the slots in memory at the end.")
@click.option("--hang-timeout", type=click.FloatRange(0), default=1800, show_default=True, metavar="SECONDS",
              help="Without a save for so long a run hangs; 0: never.")  # fmt: skip
@click.option("--look-every", type=click.FloatRange(0.5), default=15, show_default=True, metavar="SECONDS",
              help="Between two looks at the nodes, by a short step beside the ranks.")  # fmt: skip
@click.option("--grace", type=click.FloatRange(0), default=60, show_default=True, metavar="SECONDS",
              help="For one more checkpoint, when a signal ends the run.")  # fmt: skip
@click.option("--gpus", type=click.IntRange(0), default=0, help="GPUs that must answer on each node.")
@click.option("--interface", default="", metavar="NAME", help="Network interface that must be up on each node.")
@click.option("--journal", "run_log", type=click.Path(dir_okay=False, path_type=Path), default=Path("run.jsonl"),
              show_default=True, help="Where to note what happens.")  # fmt: skip
@click.option("--launcher", "kind", type=click.Choice(["srun", "mpiexec"]), help="[srun in an allocation of Slurm]")
@click.option("--mpi", default="", metavar="TYPE", help="srun: what --mpi is to be: pmi2, pmix, cray_shasta, ...")
@click.option("--srun-args", default="", metavar="WORDS", help="Further words for srun (or mpiexec).")
@click.option("--hosts", default="", metavar="A,B,C", help="mpiexec: the nodes, spares too.")
@click.option("--rsh", default="ssh", show_default=True, metavar="PROGRAM", help="mpiexec: remote shell.")
@click.argument("argv", nargs=-1, required=True, type=click.UNPROCESSED, shell_complete=shell_completion.files)
def run(nodes: int, ranks_per_node: int | None, spares: int | None, min_nodes: int | None, max_restarts: int,
        directory: str | None, job: str | None, memory: str, keep_memory: bool, hang_timeout: float,
        look_every: float, grace: float, gpus: int, interface: str, run_log: Path, kind: str | None, mpi: str,
        srun_args: str, hosts: str, rsh: str, argv: tuple[str, ...]) -> None:  # fmt: skip
    """Start ARGV on all ranks, and again after a failure, with spares in the place of lost nodes.

    For the batch script of a job: `mlflash run -N 8 -d DIR --mpi pmix -- python -m mpi4py train.py`. Exits with 0
    where all ranks came to their end, else with what the last run ended with.
    """
    extra = shlex.split(srun_args)
    launcher: Launcher
    if (kind or ("srun" if "SLURM_JOB_ID" in os.environ else "mpiexec")) == "srun":
        if "SLURM_JOB_ID" not in os.environ:
            raise click.UsageError("--launcher srun works inside an allocation of Slurm: in a batch script, or salloc")
        launcher = OnSlurm(own_id(os.environ), mpi, extra)
    else:
        launcher = OnHosts(hosts.split(",") if hosts else ["localhost"], rsh, extra)
    if directory is not None and "://" not in directory:
        directory = str(Path(directory).absolute())
    try:
        name = job or job_name(os.environ, directory)
    except ConfigError:
        raise click.UsageError("nothing names the job: give --directory (where it drains to) or --job") from None
    try:
        if not is_enabled(os.environ):  # ranks that save nothing give no signs of life
            hang_timeout = grace = 0.0
            click.echo(f"mlflash run: {DISABLE} is set: no checkpoints, and nobody sees where training hangs", err=True)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    try:
        options = RunOptions(
            argv, nodes, ranks_per_node or _tasks_per_node(), min_nodes or 0, max_restarts, name, memory, directory,
            keep_memory, hang_timeout, look_every, grace, gpus, interface,
        )  # fmt: skip
        supervisor = Supervisor(launcher, options, RunLog(run_log))
        for number in _SIGNALS:
            signal.signal(number, lambda number, frame: setattr(supervisor, "told", number))
        if spares is not None and (there := len(launcher.hosts())) < nodes + spares:
            raise click.UsageError(f"{nodes} nodes and {spares} spares are more than the {there} that there are")
        with Guard(launcher, options, run_log) if isinstance(launcher, OnSlurm) else nullcontext():
            code = supervisor.run()
        sys.exit(code)
    except (LaunchFailed, MpiUnavailable) as error:
        raise click.ClickException(str(error)) from None


def _tasks_per_node() -> int:
    """Ranks per node as the allocation says: "4(x2)" is four on each of two nodes."""
    text = os.environ.get("SLURM_NTASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE", "1")
    return int(text.split("(")[0].split(",")[0])
