"""The command ``mlflash mark``."""

from __future__ import annotations

import contextlib

import click

from ..config import Config
from ..drain import checkpoint_directory
from ..memory.inventory import write_verdict
from ..memory.node_directory import NodeDirectory
from ..memory.slot import Verdict
from ..mpi.world import World, gather
from ..storage.store import open_store
from ..text import many
from .jobs import choose_job
from .options import job_options
from .run_on_ranks import Answer, together


@click.command()
@click.argument("step", type=click.IntRange(0))
@click.option("--bad/--good", "is_bad", default=True, show_default=True, help="How to mark the step.")
@job_options
@together
def mark(world: World, config: Config, job: str | None, step: int, is_bad: bool) -> Answer | None:
    """Mark a step as bad, so that restores pass over it, or as good.

    \b
    mlflash mark 1200 --bad --job llama
    srun --ntasks-per-node=1 mlflash mark 1200 --bad -d /lustre/me/run42

    Alone it marks what this node holds. With --directory it also marks the drained checkpoint. The job may be alive.
    """
    verdict = Verdict.BAD if is_bad else Verdict.GOOD
    name = choose_job(world, config, job)
    marked = gather(world, (world.node_name, _mark_here(config.memory, name, step, verdict)))
    if world.rank:
        return None
    nodes = sorted({node for node, count in marked if count})
    folders: list[str] = []
    if config.directory is not None:
        store = open_store(config.directory)
        folders = checkpoint_directory.mark(store, checkpoint_directory.list_checkpoints(store), step, verdict)
    document = {"job": name, "step": step, "verdict": verdict.name.lower(), "nodes": nodes, "folders": folders}
    places = [f"in memory ({many(len(nodes), 'node')})"] * bool(nodes) + [f"in {folder}" for folder in folders]
    words = (f"step {step} is marked {document['verdict']} {' and '.join(places)}" if places else
             f"step {step} of job {name} was not found on these nodes or in --directory")  # fmt: skip
    return Answer(bool(places), document, words)


def _mark_here(memory: str, job: str, step: int, verdict: Verdict) -> int:
    try:
        held = NodeDirectory(memory, job, make=False)
    except FileNotFoundError:
        return 0
    with contextlib.closing(held):
        return len(write_verdict(held, step, verdict))
