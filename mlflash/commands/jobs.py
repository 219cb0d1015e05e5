"""The command ``mlflash jobs``, and what `mlflash clean` lists."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ..command_line.options import json_option, memory_option
from ..command_line.output import answer, new_table
from ..errors import MlflashError
from ..human_readable.units import show_bytes, show_seconds
from ..human_readable.wording import many
from ..inspection import on_disk
from ..inspection.node_memory import Node, look
from ..memory.courier_process import process_named
from ..memory.node_directory import emulated_nodes, jobs_of

if TYPE_CHECKING:
    from rich.console import Console


@dataclasses.dataclass(frozen=True)
class Held:
    """What a job holds in the memory of this node.

    Attributes:
        job: its name.
        nodes: this node, and the nodes that are emulated on it.
        error: why the job cannot be looked at. Empty if it can.
    """

    job: str
    nodes: tuple[Node, ...] = ()
    error: str = ""

    @property
    def pid(self) -> int | None:
        """A live process of the job, or None."""
        return next((node.pid for node in self.nodes if node.pid is not None), None)

    @property
    def nbytes(self) -> int:
        """Bytes of its slots."""
        return sum(file.nbytes for node in self.nodes for file in node.files)

    @property
    def files(self) -> int:
        """Number of its slots."""
        return sum(len(node.files) for node in self.nodes)

    @property
    def newest(self) -> tuple[int, int] | None:
        """The newest step in its slots, and the time of that save in ns since 1970."""
        headers = [header for node in self.nodes for _, header in node.sealed]
        last = max(headers, key=lambda header: header.attempt.generation, default=None)
        return None if last is None else (last.step, last.unix_ns)

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        newest = self.newest
        return {"job": self.job, "pid": self.pid, "nbytes": self.nbytes, "files": self.files,
                "error": self.error or None, "step": None if newest is None else newest[0],
                "age_s": None if newest is None else on_disk.age_s(newest[1])}  # fmt: skip


def held(memory: str, job: str) -> Held:
    """Look at what a job holds in the memory of this node. Not collective."""
    try:
        numbers = (None, *emulated_nodes(memory, job))
        return Held(job, tuple(look(memory, job, number, "") for number in numbers))
    except MlflashError as error:
        return Held(job, error=str(error))


def show(console: Console, jobs: Sequence[Held], memory: str) -> None:
    """Print a line for each job, the largest first, and the sum of their bytes."""
    if not jobs:
        console.print(f"no job of this user holds memory in {memory} here")
        return
    table = new_table("job", ">size", ">files", ">newest step", ">saved", "process")
    for one in sorted(jobs, key=lambda one: -one.nbytes):
        step, age = "-", "-"
        if one.newest is not None:
            step, age = str(one.newest[0]), f"{show_seconds(on_disk.age_s(one.newest[1]))} ago"
        alive = "no process is alive" if one.pid is None else f"alive: {process_named(one.pid)}"
        alive = one.error or alive
        table.add_row(one.job, show_bytes(one.nbytes), str(one.files), step, age, alive)
    console.print(table)
    console.print(f"{many(len(jobs), 'job')} of this user in {memory}: {show_bytes(sum(one.nbytes for one in jobs))}")


@click.command()
@memory_option
@json_option
def jobs(memory: str, as_json: bool) -> None:
    """List the jobs of this user that hold memory on this node, with their sizes.

    Use it to find out what fills /dev/shm.

    \b
    mlflash jobs

    It changes nothing. `mlflash clean` frees the memory of jobs that have ended.
    """
    there = [held(memory, job) for job in jobs_of(memory)]
    answer(as_json, {"memory": memory, "jobs": [one.to_json() for one in there]},
           lambda console: show(console, there, memory))  # fmt: skip
