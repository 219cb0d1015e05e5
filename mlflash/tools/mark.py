"""The command ``mlflash mark``."""

from __future__ import annotations

import contextlib
from typing import Any

import click

from ..drain import checkpoint_directory
from ..memory.inventory import write_verdict
from ..memory.node_directory import NodeDirectory
from ..memory.slot import Verdict
from ..mpi.world import World, gather
from ..storage.store import open_store
from ..text import many
from .jobs import choose_job
from .options import job_options, settings
from .output import answer
from .run_on_ranks import FINE, WRONG, run_together


@click.command()
@click.argument("step", type=click.IntRange(0))
@click.option("--bad/--good", "is_bad", default=True, show_default=True, help="How to mark the step.")
@job_options
def mark(step: int, is_bad: bool, directory: str | None, job: str | None, memory: str, as_json: bool) -> None:
    """Mark a step as bad, so that restores pass over it, or as good.

    \b
    mlflash mark 1200 --bad --job llama
    srun --ntasks-per-node=1 mlflash mark 1200 --bad -d /lustre/me/run42

    Alone it marks what this node holds. With --directory it also marks the drained checkpoint. The job may be alive.
    """
    given = settings(memory, job, directory)
    verdict = Verdict.BAD if is_bad else Verdict.GOOD

    def work(world: World) -> int:
        name = choose_job(world, given, job)
        marked = gather(world, (world.node_name, _mark_here(given.memory, name, step, verdict)))
        if world.rank:
            return FINE
        nodes = sorted({node for node, count in marked if count})
        folders = [] if given.directory is None else _mark_in(given.directory, step, verdict)
        document: dict[str, Any] = {"job": name, "step": step, "verdict": verdict.name.lower(), "nodes": nodes,
                                 "folders": folders}  # fmt: skip
        answer(as_json, document, _in_words(document))
        return FINE if nodes or folders else WRONG

    run_together(given, as_json, work)


def _mark_here(memory: str, job: str, step: int, verdict: Verdict) -> int:
    try:
        held = NodeDirectory(memory, job, make=False)
    except FileNotFoundError:
        return 0
    with contextlib.closing(held):
        return len(write_verdict(held, step, verdict))


def _mark_in(directory: str, step: int, verdict: Verdict) -> list[str]:
    store = open_store(directory)
    return checkpoint_directory.mark(store, checkpoint_directory.list_checkpoints(store), step, verdict)


def _in_words(document: dict[str, Any]) -> str:
    places = [f"in memory ({many(len(document['nodes']), 'node')})"] * bool(document["nodes"])
    places += [f"in {folder}" for folder in document["folders"]]
    if not places:
        return f"step {document['step']} of job {document['job']} was not found on these nodes or in --directory"
    return f"step {document['step']} is marked {document['verdict']} {' and '.join(places)}"
