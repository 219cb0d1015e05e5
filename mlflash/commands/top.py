"""The command ``mlflash top``."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator

import click

from ..command_line import choose_job
from ..command_line.options import directory_option, job_option, memory_option, settings
from ..command_line.output import answer
from ..launcher.launch_system import Launcher
from ..launcher.on_hosts import OnHosts
from ..launcher.on_slurm import OnSlurm, hosts_of, own_id
from ..live_monitor.history import History
from ..live_monitor.rank_status import Look, Watch, jobs_everywhere, look_everywhere, look_here
from ..memory.node_directory import jobs_of
from ..telemetry.heartbeat import live_jobs

_DRAW_S = 0.25
_ASK_S = 5.0  # between two requests to other nodes: each is a Slurm job step or a remote shell


@click.command()
@directory_option
@job_option
@memory_option
@click.option("--hosts", default="", metavar="A,B,C", help="Ask these nodes with a remote shell.")
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

    Use it on any node of the job, or name the nodes:

    \b
    mlflash top
    mlflash top --slurm-job 4711
    mlflash top --hosts n1,n2

    It reads the status that ranks write to the memory of their node, and changes nothing. Press q to end it.
    """
    given = settings(memory, job, directory)
    asked = None if here else _others(hosts, rsh, slurm_job)
    look: Callable[[], Look]
    if asked is None:
        name = choose_job.decide(live_jobs(memory) or jobs_of(memory), os.environ, job, given.directory, memory)
        look = lambda: look_here(memory, name)
    else:
        launcher, nodes = asked
        there = [] if job else jobs_everywhere(launcher, nodes, memory)
        name = choose_job.decide(there, os.environ, job, given.directory, memory)
        look = lambda: look_everywhere(launcher, nodes, memory, name)
    if as_json or once or not sys.stdout.isatty():
        _print_once(name, look(), as_json)
    else:
        _watch(name, Watch(look, every or (1.0 if asked is None else _ASK_S)))


def _others(hosts: str, rsh: str, slurm_job: str) -> tuple[Launcher, list[str]] | None:
    """Return the launcher that asks other nodes, and their names. None: look at this node only."""
    if hosts:
        return OnHosts(hosts.split(","), rsh), hosts.split(",")
    job = slurm_job or (own_id(os.environ) if "SLURM_JOB_ID" in os.environ else "")
    if not job:
        return None
    os.environ["SLURM_JOB_ID"] = job  # srun needs it outside of the job, or inside of another one
    if nodes := hosts_of(job):
        return OnSlurm(job), list(nodes)
    raise click.ClickException(f"Slurm knows no nodes of job {job}")


def _print_once(job: str, look: Look, as_json: bool) -> None:
    from ..live_monitor.screen import page

    history = History()
    history.add(look)
    document = {"job": job, "at": look.at, "ranks": look.heartbeats, "silent": look.silent, "unread": look.unread,
                "free": dict(look.free)}  # fmt: skip
    answer(as_json, document, lambda console: console.print(page(job, look, history, console.width, 10_000)))


def _watch(job: str, watch: Watch) -> None:
    from rich.console import Console
    from rich.live import Live

    from ..live_monitor.screen import page

    history, console, shown = History(), Console(highlight=False), None
    try:
        with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
            while pressed(_DRAW_S) not in ("q", "Q", "\x03", "\x04"):
                if watch.last is not shown:
                    shown = watch.last
                    history.add(shown)
                live.update(page(job, shown, history, console.width, console.height), refresh=True)
    except KeyboardInterrupt:
        pass
    finally:
        watch.end()


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits some seconds for a key. It returns "" if no key was pressed."""

    def pressed(timeout_s: float) -> str:
        if not select.select([sys.stdin], [], [], timeout_s)[0]:
            return ""
        return os.read(sys.stdin.fileno(), 1).decode(errors="replace") or "q"

    if not sys.stdin.isatty():
        yield lambda timeout_s: "".join(select.select([], [], [], timeout_s)[0])
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield pressed
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
