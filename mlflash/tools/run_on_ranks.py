"""Run a command on several processes: they start together, rank 0 prints the answer, and all end with one exit code.

Exit codes: 0: all is well. 1: something is wrong, or there is nothing to restore. 2: the command was called wrongly.

``python -m mlflash.tools.run_on_ranks -m MODULE ARGUMENTS`` replaces ``mpiexec python -m mpi4py -m MODULE
ARGUMENTS`` where there is no MPI launcher. You start it once for each rank, with RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT. The ranks meet without MPI, and the courier of each rank runs the module. `mlflash run` scavenges with it:
MLFLASH_JOB and MLFLASH_MEMORY then lead to its own agents, which have imported everything already.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import runpy
import select
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import click

from ..errors import DeadlineExceeded, MlflashError
from ..mpi.world import World, abort_all, find_comm, load_mpi
from .options import settings
from .output import print_answer

if TYPE_CHECKING:
    from rich.console import Console

    from ..launch.courier_process import Courier

FINE, WRONG = 0, 1
_ENTRY = "mlflash.tools.run_on_ranks:run_in_courier"
_MEET_S = 120.0
_LOOK_S = 600.0


class Answer(NamedTuple):
    """What a command has found: a document for programs, and words or a table for people."""

    is_well: bool
    document: Any
    words: str | Callable[[Console], None]


def together(work: Callable[..., Answer | None]) -> Callable[..., NoReturn]:
    """Make a command of what all its processes do together.

    ``work`` gets the world, the settings, the given job, and the options that are the command's own. The answer of rank
    0 is printed and decides the exit code of all. Collective over COMM_WORLD under an MPI launcher or srun. Otherwise
    this process is alone. An MlflashError or ClickException of ``work`` must be the same on all ranks.
    """

    @functools.wraps(work)
    def command(memory: str, as_json: bool, job: str | None = None, directory: str | None = None, **own: Any
                ) -> NoReturn:  # fmt: skip
        config = settings(memory, job, directory)
        world: World | None = None
        code = FINE
        try:
            world = World(find_comm(os.environ), config.here, config.timeout_s)
            world.start_job(raise_deadline)
            world.connect()
            world.end_job()  # reading may take long, and the user who started the command sees its progress
            answer = work(world, config, job, **own)
            if world.rank == 0 and answer is not None:
                print_answer(as_json, answer.document, answer.words)
                code = FINE if answer.is_well else WRONG
        except (MlflashError, click.ClickException) as error:
            code = error.exit_code if isinstance(error, click.ClickException) else WRONG
            if world is None or world.rank == 0 or isinstance(error, DeadlineExceeded):
                _say_error(error, as_json)
            if isinstance(error, DeadlineExceeded):  # only this rank knows: the others may never arrive
                _abort(world)
        except Exception:
            traceback.print_exc()
            _abort(world)
            code = WRONG
        if world is not None:
            sys.stdout.flush()
            code = world.broadcast(code, 0)
            world.free()
        sys.exit(code)

    return command


def raise_deadline(error: DeadlineExceeded) -> None:
    """End a wait by its error, see `World.start_job`."""
    raise error


def _say_error(error: Exception, as_json: bool) -> None:
    if isinstance(error, click.UsageError):
        error.show()
        return
    text = error.format_message() if isinstance(error, click.ClickException) else str(error)
    click.echo(f"Error: {text}", err=True)
    if as_json:
        click.echo(json.dumps({"error": text}, indent=1))


def _abort(world: World | None) -> None:
    """End the other processes, too. They would wait for this one forever."""
    if world is not None and world.mpi is not None:
        abort_all(world.mpi, WRONG)


# Ranks that no MPI launcher started


def main() -> int:
    """Run a module as one of the ranks, and return the exit code of its courier."""
    from ..launch.agent_client import AgentLost, AgentRefused
    from ..launch.couriers import CourierEnded, Couriers

    if len(sys.argv) < 3 or sys.argv[1] != "-m":
        print("usage: python -m mlflash.tools.run_on_ranks -m MODULE ARGUMENTS", file=sys.stderr)
        return 2
    end = None
    try:
        job, memory = os.environ.get("MLFLASH_JOB", ""), os.environ.get("MLFLASH_MEMORY", "")
        with contextlib.closing(Couriers(_ENTRY, os.environ, _MEET_S, job=job, memory=memory)) as couriers:
            couriers.next_epoch(_MEET_S)
            couriers.courier.channel.sendall(json.dumps(sys.argv[2:]).encode() + b"\n")
            if couriers.size > 1:
                couriers.wait_up(_MEET_S)
            while end is None:  # the program has its own deadlines
                end = couriers.wait_end(_LOOK_S)
    except (MlflashError, CourierEnded, AgentLost, AgentRefused) as error:
        print(f"Error: {' '.join(sys.argv[2:4])} cannot use MPI on this rank: {error}", file=sys.stderr)
        return WRONG
    return 128 + end.signal if end.signal is not None else end.status or 0


def run_in_courier(forked: Courier) -> None:
    """Run the module in a courier. This is the entry point of the forked process."""
    threading.Thread(target=_end_with, args=(forked.trainer_pidfd,), name="mlflash-rank", daemon=True).start()
    mpi: Any = None
    if forked.has_mpi:
        mpi = load_mpi()
        if mpi.COMM_WORLD.size != len(forked.nodes):
            name = mpi.Get_library_version().splitlines()[0]
            print(f"Error: each rank is alone in its MPI world: {name} needs its own launcher to connect the ranks",
                  file=sys.stderr)  # fmt: skip
            raise SystemExit(WRONG)
        forked.tell_mpi_is_up()
    with forked.channel.makefile() as lines:
        module, *arguments = json.loads(lines.readline())
    sys.argv = [module, *arguments]
    code: Any = None
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code
    if mpi is not None:  # not after another exception: the other ranks may wait for this one
        mpi.Finalize()
    raise SystemExit(code)


def _end_with(pidfd: int) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll()
    os._exit(WRONG)


if __name__ == "__main__":
    sys.exit(main())
