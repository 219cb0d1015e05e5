"""The commands ``scavenge`` and ``reprotect``: without training, memory → the directory, or made whole."""

from __future__ import annotations

import time

import click

from ..checkpointer.checkpointer import Checkpointer
from ..config import Config
from ..drain.drain_handle import Drain
from ..errors import DeadlineExceeded, DrainFailed
from ..memory.node_directory import jobs_of
from ..mpi.world import World, gather_from_all
from ..text import show_bytes, show_seconds
from . import completion, on_disk
from .jobs import choose_job
from .node_memory import Restorability, look_around, survival, what_is_restorable
from .options import directory_option, job_option, json_option, memory_option
from .output import progress_bar
from .run_on_ranks import Answer, together
from .status import describe, describe_lost

_LOOK_S = 0.2
_redundancy_option = click.option(
    "--redundancy", envvar="MLFLASH_REDUNDANCY", metavar="SCHEME", shell_complete=completion.schemes,
    help="Redundancy scheme to make.  [default: the scheme in memory]"
)  # fmt: skip


@click.command()
@click.argument("directory", shell_complete=completion.directories)
@job_option
@memory_option
@json_option
@together
def scavenge(world: World, config: Config, job: str | None) -> Answer | None:
    """Copy the newest checkpoint of a dead job from memory to DIRECTORY.

    Start it under srun or mpiexec, with one process or more on each node that is left:

    \b
    srun --ntasks-per-node=1 mlflash scavenge /lustre/me/run42

    It rebuilds lost slots from copies or parity. Memory stays as it is. Exits with 1 if a process of the job is alive,
    or if DIRECTORY does not have the newest committed step afterwards.
    """
    started = time.perf_counter()
    name = choose_job(world, config, job, is_live=False)
    before = _outlook(world, config, name)
    stored = on_disk.look_into(world, config.directory)
    newest, lost = before.newest, before.lost
    drain, nbytes = None, 0
    if newest is not None:
        with _checkpointer(config, name, "none") as checkpointer:  # no protection: any number of nodes is enough
            drain = checkpointer.scavenge()
            if drain is not None:
                _wait(checkpointer, drain, world.rank == 0)
        nbytes = sum(gather_from_all(world, 0 if drain is None else drain.nbytes))
    if world.rank:
        return None
    drained = stored.newest if stored is not None else None
    beyond = lost or newest  # if the directory does not have it either, it is gone
    covered = drain is not None or (
        drained is not None and (beyond is None or drained.card.attempt.generation >= beyond.attempt.generation)
    )
    if drain is not None:
        seconds = show_seconds(time.perf_counter() - started)
        words = f"step {drain.step} was drained to {drain.path}: {show_bytes(nbytes)} in {seconds}"
    elif newest is not None and not covered:
        words = f"step {newest.step} in memory is damaged: nothing was drained"
    elif drained is not None:
        words = f"memory has nothing newer than step {drained.step}, which {stored and stored.path} already has"
    else:
        words = ("memory has nothing that can be restored, and the directory has nothing either"
                 + _elsewhere(config, name))  # fmt: skip
    in_directory = drain or drained
    document = {
        "job": name, "drained": drain and drain.step, "path": drain and drain.path, "nbytes": nbytes,
        "lost": lost and lost.step, "newest": in_directory and in_directory.step,
    }  # fmt: skip
    return Answer(covered, document, f"{describe_lost(lost)}\n{words}" if lost is not None else words)


@click.command()
@directory_option
@_redundancy_option
@job_option
@memory_option
@json_option
@together
def reprotect(world: World, config: Config, job: str | None, redundancy: str | None) -> Answer | None:
    """Make lost copies and parity of a dead job's newest checkpoint again, before you relaunch it.

    Start as many processes as the job had ranks, on the nodes where it will run:

    \b
    srun -n 64 --ntasks-per-node=8 mlflash reprotect --directory /lustre/me/run42
    """
    name = choose_job(world, config, job, is_live=False)
    newest = _outlook(world, config, name).newest
    if newest is None:
        raise click.ClickException("memory has nothing that can be restored" + _elsewhere(config, name))
    if newest.world_size != world.size:
        raise click.UsageError(
            f"step {newest.step} was saved by {newest.world_size} ranks, and you started {world.size}: start as many "
            f"processes as the job had ranks (srun -n {newest.world_size} or mpiexec -n {newest.world_size}). "
            "`mlflash scavenge` works with any number"
        )
    with _checkpointer(config, name, redundancy or newest.scheme) as checkpointer:
        step, wanted = checkpointer.reprotect(), checkpointer.survives
    nodes = look_around(world, config.memory, name)
    if world.rank:
        return None
    made = what_is_restorable(nodes, world.world is not None).newest
    survives = None if made is None else str(survival(nodes, made))
    document = {"job": name, "step": step, "scheme": newest.scheme, "wanted": wanted, "survives": survives}
    words = "nothing" if made is None else f"{describe(made)}\nredundancy: {made.scheme}"
    return Answer(made is not None and made.step == step, document,
                  f"reprotected: {words}\nsurvives the loss of: any process; {survives}")  # fmt: skip


def _elsewhere(config: Config, job: str) -> str:
    others = [other for other in jobs_of(config.memory) if other != job]
    return f"; this node holds nothing of {job}, but of {', '.join(others)}: name it with --job" if others else ""


def _outlook(world: World, config: Config, job: str) -> Restorability:
    """Tell all ranks what all nodes can give. Collective."""
    nodes = look_around(world, config.memory, job)
    outlook: Restorability = world.broadcast(what_is_restorable(nodes, together=True) if world.rank == 0 else None, 0)
    return outlook


def _checkpointer(config: Config, job: str, redundancy: str) -> Checkpointer:
    """Make a Checkpointer on this command's MPI that drains, deletes and allocates nothing by itself. Collective."""
    return Checkpointer(config.directory, job=job, memory=config.memory, redundancy=redundancy, reserve=0,
                        drain_every=0, keep_last=0, keep_every=0, skip_stuck=0, fresh=False,
                        heartbeat=False)  # fmt: skip


def _wait(checkpointer: Checkpointer, drain: Drain, on: bool) -> None:
    """Wait for the end of a drain as long as any rank makes progress."""
    with progress_bar("draining", on=on) as update:
        while not drain.done:
            try:
                checkpointer.wait_drained(_LOOK_S)
            except DeadlineExceeded:
                if time.monotonic() - drain.moved > checkpointer.timeout_s:
                    raise
            else:
                break
            update(completed=drain.written, total=drain.nbytes or None)
    if not drain.done:
        raise DrainFailed("MPI failed in the background: see the log", step=drain.step)
    drain.wait()
