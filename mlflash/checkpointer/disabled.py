"""The parts of a Checkpointer when mlflash is off: callers see the same interface, and nothing is done.

It is off with ``MLFLASH_DISABLE=1``, the kill switch, or with ``enabled=False``. Training then runs as if mlflash were
not there: MPI is not started, no file and no thread is made, and nothing waits for other ranks. The first process logs
that mlflash is off.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np

from .. import config
from ..draining import drains
from ..draining.drain import Drain
from ..errors import MlflashError, Unrestorable
from ..memory.wanted_step import WantedStep
from ..protocol.client import Client
from ..protocol.messages import Message, Report, Survives
from ..protocol.wanted_parts import WantedPart
from ..restoring import newest_step, restore
from ..restoring.open_in_directory import OpenInDirectory
from ..restoring.open_in_memory import OpenCheckpoint
from ..saving import save_queue
from ..saving.early_staging import StagedState
from ..saving.lazy_leaves import Until
from ..saving.lazy_saves import LazySaves
from ..saving.reserved_saves import ReservedSave, ReservedSaves
from ..saving.snapshot import Snapshot
from ..state.leaves import Flat
from . import for_adapters, own_files

log = logging.getLogger("mlflash")

_RANK_NAMES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_NO_STEP = -1
_said: set[str] = set()


def turned_off(enabled: bool = True) -> bool:
    """Whether mlflash is off, for the entry of an adapter. If so, the first process logs it, once.

    Not collective.

    Args:
        enabled: what the adapter was given.

    Raises:
        ConfigError: ``MLFLASH_DISABLE`` is neither true nor false.
    """
    if config.is_enabled(os.environ, enabled):
        return False
    say()
    return True


def say(comm: Any = None) -> None:
    """Let the first process log that mlflash is off, and which setting turned it off. Not collective.

    Args:
        comm: communicator that gives this rank, if nothing else does.
    """
    why = "enabled=False" if config.is_enabled(os.environ) else f"{config.DISABLE}={os.environ[config.DISABLE]}"
    if why not in _said and _rank(comm) == 0:
        log.warning("mlflash is off (%s): nothing is saved in memory, and nothing is restored from there", why)
    _said.add(why)


def _rank(comm: Any) -> int:
    """Return this rank, as far as it can be found without starting MPI; otherwise 0."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    told = next((os.environ[name] for name in _RANK_NAMES if os.environ.get(name, "").isdecimal()), None)
    if told is None and comm is not None:
        return int(comm.rank)
    return int(told or 0)


def stand_ins(
    comm: Any = None,
) -> tuple[Client, drains.Drains, save_queue.SaveQueue, restore.Restores, for_adapters.Adapting]:
    """Make the parts of a Checkpointer that is off, and log that it is off. Not collective.

    Args:
        comm: what the Checkpointer was given.
    """
    say(comm)
    return Courier(_rank(comm)), Drains(), SaveQueue(), Restores(), Adapting()


def not_saved(step: object) -> Snapshot:
    """Return what a save gives: done, not committed, skipped. Waiting for it takes no time and is not an error."""
    snapshot = Snapshot(int(step) if isinstance(step, (int, np.integer)) else _NO_STEP, lambda: None)
    snapshot.leave()
    return snapshot


# Each class stands in for its base class, which has the same name. It has everything that callers use, and none of the
# base's attributes. So no constructor calls that of its base.


class Courier(Client):
    """Does nothing that it is asked for; see `protocol.client.Client`.

    Args:
        rank: this rank, or 0 if it is not known.
    """

    late = broken = None
    is_stuck = False
    is_a = ""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def post(self, job: Any) -> None:
        """Do nothing."""

    def job(self, message: Message, answers: Any = None, on_late: Any = None, on_refused: Any = None) -> None:
        """There is nothing to do."""

    def wait_sent(self, job: Any) -> None:
        """Nothing is sent."""

    def unit(self) -> contextlib.AbstractContextManager[None]:
        """Begin nothing."""
        return contextlib.nullcontext()

    def call(self, message: Message, answers: Any = None) -> Any:
        """Do nothing; the result is None."""

    def ask(self, message: Message) -> Any:
        """Answer as a courier that has done nothing."""
        if isinstance(message, Survives):
            return "nothing: mlflash is off"
        return self._report() if isinstance(message, Report) else None

    def tell_doing(self, what: str) -> None:
        """Nobody waits."""

    def go_on_behind(self) -> None:
        """Nothing continues in the background."""

    def stop(self, abandon: bool) -> None:
        """There is no thread."""

    def leave(self) -> None:
        """Nothing belongs to the parent."""

    def _report(self) -> dict[str, Any]:
        return {
            "enabled": False, "rank": self._rank, "node": socket.gethostname(), "scheme": "none", "group": [],
            "partners": [], "shared with": [], "transport": "", "job": "", "memory": "", "restored_from": "",
            "drain": None, "send rate": None, "slots": [], "counts": {}, "seconds": {},
        }  # fmt: skip


class Drains(drains.Drains):
    """Drains nothing, and sees nothing in the directory."""

    idle = True
    drained = None

    def __init__(self) -> None:
        self.last = self.restored = None

    def began(self, drain: Drain) -> None:
        """No drain begins."""

    def ask(self) -> None:
        """Do nothing."""

    def drain(self) -> Drain:
        """Return a drain that has ended, without a path."""
        drain = Drain(_NO_STEP)
        drain.end(None)
        return drain

    def wait(self, timeout_s: float | None = None) -> None:
        """No drain is running."""

    def settle(self) -> None:
        """No drain is running."""

    def finish(self) -> None:
        """Nothing is left to drain."""

    def lacks(self, step: int | None) -> bool:
        """Nothing is in memory that a directory could lack."""
        return False

    def give_up(self) -> None:
        """No drain is running."""


class OwnFiles(own_files.OwnFiles):
    """Writes nothing to memory: the framework writes its files to disk."""

    def __init__(self) -> None:
        """Start no process."""

    def begin(self, target: str) -> bool:
        """Not to memory."""
        return False

    def when_moved(self, do: Callable[[], None]) -> None:
        """Run it now: nothing has to be moved."""
        do()

    def finish(self) -> None:
        """Nothing is being moved."""

    def close(self) -> None:
        """Nothing is being moved."""


class SaveQueue(save_queue.SaveQueue):
    """Saves nothing, and looks at no state and no step."""

    def __init__(self) -> None:
        self.last_step, self.lazy = None, LazySaves(is_on=False, speaks=False)
        self.begun = ReservedSaves(lambda begun: None, 0.0)

    def save(self, step: int, state: object, until: object = None) -> Snapshot:
        """Do nothing."""
        return not_saved(step)

    def begin(self, step: int, thread: threading.Thread) -> ReservedSave:
        """No save follows."""
        return ReservedSave(step, thread, ())

    def save_again(self, flat: Flat | StagedState | MlflashError, begun: ReservedSave) -> Snapshot:
        """Do nothing."""
        return not_saved(begun.step)

    def stage_ahead(self, flat: Flat, until: Until | None = None) -> StagedState | None:
        """There are no slots."""
        return None

    def forget(self) -> None:
        """There are no slots."""

    def end(self) -> None:
        """Nothing is running."""

    def wait(self) -> None:
        """Nothing is running."""

    def settle(self) -> None:
        """Nothing is running."""

    def raise_what_failed(self) -> None:
        """Nothing has failed."""

    def plan(self, flat: Flat) -> Any:
        """Nobody calls this."""
        raise NotImplementedError("nothing is planned where mlflash is off")

    def prepare(self, state: object) -> None:
        """Make nothing."""

    def reserve(self, nbytes: int, share_nbytes: int = 0) -> None:
        """Make nothing."""

    def find_replicas(self, state: object) -> None:
        """Nobody calls this."""


class Newest(newest_step.Newest):
    """Finds nothing."""

    def __init__(self) -> None:
        pass

    def step(self) -> int | None:
        """There is no step."""
        return None

    def step_alike(self) -> int | None:
        """There is no step."""
        return None

    def why_not(self, step: int) -> str | None:
        """Give the reason: mlflash is off."""
        return "mlflash is off"

    def verify(self, drained: OpenInDirectory) -> None:
        """Nothing is read."""


class Restores(restore.Restores):
    """Restores nothing, whatever memory and directory hold."""

    def __init__(self) -> None:
        self.newest = Newest()

    def restore(self, state: Any, wanted: WantedStep, source: str | None = None) -> int | None:
        """Leave the state as it is."""
        return None

    def load(self, wanted: WantedStep, source: str | None = None, copy: bool = True) -> tuple[int | None, Any]:
        """There is nothing."""
        return None, None

    def open(self, step: int | None, told: Collection[str], source: str | None = None) -> OpenCheckpoint | None:
        """There is nothing."""
        return None

    def read(
        self,
        opened: OpenCheckpoint,
        wanted: Callable[[], Iterable[WantedPart]],
        done: Callable[[], None],
        anew: bool = False,
    ) -> None:
        """Nothing was opened."""

    def steps(self) -> list[int]:
        """There are none."""
        return []

    def steps_alike(self) -> list[int]:
        """There are none."""
        return []


class Adapting(for_adapters.Adapting):
    """What adapters find. An adapter first asks `Checkpointer.enabled`, and then leaves its framework alone."""

    def __init__(self) -> None:
        self._saves, self._restores, self._drains = SaveQueue(), Restores(), Drains()
        self._check_open = lambda: None

    def _unit(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def own_files(self) -> OwnFiles:
        """Leave a framework's own checkpoints to the framework."""
        return OwnFiles()

    def seen_by_first(self, look: Callable[[], Any]) -> Any:
        """Look on each rank: nothing could tell the others."""
        return look()

    def save_or_warn(
        self, step: int, state: Any, until: Sequence[Any] | str = (), owned: Callable[[], Iterable[Any]] = lambda: ()
    ) -> Snapshot | None:
        """Do nothing."""
        return not_saved(step)

    def save(
        self, step: int, state: Any, until: Sequence[Any] | str = (), owned: Callable[[], Iterable[Any]] = lambda: ()
    ) -> Snapshot:
        """Do nothing."""
        return not_saved(step)

    def stepped_optimizers(self) -> Sequence[Any] | str:
        """Listen to none."""
        return ()

    def wait_staged(self) -> None:
        """Nothing is copied."""

    def give_up(self, ahead: StagedState) -> None:
        """Nothing was staged."""

    def load_together(self, step: int, work: Callable[[], Any], anew: bool = False) -> Any:
        """Do the work, and agree with nobody."""
        return work()

    def loaded_elsewhere(self) -> None:
        """No load has failed."""

    def go_on_instead(self, error: Unrestorable, instead: object) -> None:
        """Nobody looks for checkpoints that could not be used."""
