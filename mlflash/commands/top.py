"""The command ``mlflash top``."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable

import click

from ..command_line import choose_job
from ..command_line.options import directory_option, job_option, memory_option, settings
from ..command_line.output import answer
from ..errors import MlflashError
from ..launcher.agents import Agents
from ..launcher.on_slurm import OnSlurm, hosts_of, own_id
from ..launcher.on_ssh import OnSsh
from ..live_monitor.rank_status import Look, jobs_everywhere, look_everywhere, look_here
from ..memory.node_directory import jobs_of
from ..telemetry.heartbeat import live_jobs

_DRAW_S = 0.25


@click.command()
@directory_option
@job_option
@memory_option
@click.option("--hosts", default="", metavar="A,B,C", help="Ask these nodes, on which a remote shell starts an agent.")
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

    \b
    mlflash top
    mlflash top --slurm-job 4711
    mlflash top --hosts n1,n2
    """
    given = settings(memory, job, directory)
    with contextlib.ExitStack() as opened:
        agents = None if here else _others(hosts, rsh, slurm_job)
        if agents is None:
            jobs = live_jobs(memory) or jobs_of(memory)
        else:
            opened.enter_context(agents)
            jobs = [job] if job else jobs_everywhere(agents, memory)
        name = choose_job.decide(jobs, os.environ, job, given.directory, memory)

        def look() -> Look:
            return look_here(memory, name) if agents is None else look_everywhere(agents, memory, name)

        if as_json or once or not (sys.stdin.isatty() and sys.stdout.isatty()):
            _print_once(name, look(), as_json)
        else:
            _watch(name, look, every or (1.0 if agents is None else 5.0))


def _others(hosts: str, rsh: str, slurm_job: str) -> Agents | None:
    if hosts:
        return Agents(OnSsh(hosts.split(","), rsh))
    job = slurm_job or (own_id(os.environ) if "SLURM_JOB_ID" in os.environ else "")
    if not job:
        return None
    os.environ["SLURM_JOB_ID"] = job  # srun needs it outside of the job, or inside of another one
    if nodes := hosts_of(job):
        return Agents(OnSlurm(job, nodes))
    raise click.ClickException(f"Slurm knows no nodes of job {job}")


def _print_once(job: str, look: Look, as_json: bool) -> None:
    from ..live_monitor.screen import Page

    document = {"job": job, "at": look.at, "ranks": look.heartbeats, "silent": look.silent, "unread": look.unread,
                "free": dict(look.free)}  # fmt: skip
    answer(as_json, document, lambda console: console.print(Page(job, look)))


def _watch(job: str, look: Callable[[], Look], every_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    from ..live_monitor.screen import Page

    shown, looks = look(), queue.SimpleQueue[Look]()
    threading.Thread(target=_keep_looking, args=(look, every_s, shown, looks), daemon=True).start()
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        with Live(console=Console(highlight=False), screen=True, auto_refresh=False) as live:
            while True:
                live.update(Page(job, shown), refresh=True)
                is_typed, _, _ = select.select([sys.stdin], [], [], _DRAW_S)
                if is_typed and os.read(sys.stdin.fileno(), 1) in (b"q", b"Q", b"\x04", b""):
                    return
                while not looks.empty():
                    shown = looks.get()
    except KeyboardInterrupt:
        pass
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _keep_looking(look: Callable[[], Look], every_s: float, last: Look, looks: queue.SimpleQueue[Look]) -> None:
    """Look again and again, on a thread, so that a node that does not answer cannot block the terminal."""
    while True:
        time.sleep(every_s)
        try:
            last = look()
        except (MlflashError, OSError) as error:  # the next look may succeed
            last = dataclasses.replace(last, wrong=f"the last look failed: {error}")
        looks.put(last)
