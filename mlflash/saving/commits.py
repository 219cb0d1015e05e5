"""What the courier does for each save of this run: heal first if that is due, commit, and tell whoever asked."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ..errors import MlflashError, SaveFailed, text_of
from ..memory.slot import Slot
from ..protocol.save_request import SaveRequest, Trainer
from ..startup.context import Context
from . import commit
from .value_looks import certify

log = logging.getLogger("mlflash")


class Commits:
    """Runs saves to their end. Collective over the world; for the courier.

    Args:
        heal: tries once more to heal the restored step. Collective over the world.
        mend: repairs damage that was found at rest. Collective over the world.
    """

    def __init__(self, context: Context, drains: commit.CommitListener, heal: Callable[[Slot], None],
                 mend: Callable[[], None]):  # fmt: skip
        self._context, self._drains, self._heal, self._mend = context, drains, heal, mend

    def bring_to_end(self, request: SaveRequest, trainer: Trainer) -> None:
        """Commit what a trainer has staged, or tell it why that failed, and raise it as MlflashError on all ranks."""
        context, start = self._context, time.perf_counter()
        save = commit.Save(request, trainer, context)
        save.mends = True
        try:
            while True:
                if context.unhealed is not None:
                    self._heal(context.unhealed)
                save.drains_idle, save.drain_asked = self._drains.idle, self._drains.asked
                try:
                    commit.run(save, context, lambda: self._committed(save))
                    break
                except commit.OneAhead:
                    context.world.job_number += 1
                except commit.MendFirst:
                    self._mend_first(trainer)
            if save.is_given_up and self._context.world.rank == 0:
                log.warning("step %d is not kept because its values are suspect, and memory keeps the good step "
                            "before it; mark_good(%d) accepts the values", save.step, save.step)  # fmt: skip
            if save.due is not None and certify(self._context, save.due):
                self._drains.certified(save.due.attempt)
            self._compare_replicas(save)
        except MlflashError as error:
            context.recorder.failed(request.step, error)
            raise
        except BaseException as error:
            world = context.world
            world.end_if_mpi_failed(error)
            trainer.ended(SaveFailed(f"the courier failed: {text_of(error)}", rank=world.rank, node=world.node_name,
                                     step=request.step))  # fmt: skip
            raise
        finally:
            context.recorder.seconds["protect and commit"] += time.perf_counter() - start

    def _mend_first(self, trainer: Trainer) -> None:
        """Repair damage; afterwards no rank reports damage any more."""
        try:
            self._mend()
        except MlflashError as error:
            trainer.ended(error)
            raise

    def _committed(self, save: commit.Save) -> None:
        recorder = self._context.recorder
        if not save.is_given_up:
            self._context.unhealed = None  # a newer step has full redundancy
        self._drains.committed(save.slot, save.share, save.drain_asked, save.drains_idle)
        recorder.holds(self._context.pool.nbytes)
        age_s = time.perf_counter() - save.request.begun_s
        recorder.committed(save.step, age_s, save.attempt.generation)

    def _compare_replicas(self, save: commit.Save) -> None:
        replicas = self._context.replicas
        is_there = not save.skipped and not save.is_given_up  # otherwise the trainer may fill its slot again
        if replicas is not None and is_there and save.slot is not None and save.plan is not None:
            replicas.compare(save.slot, save.plan, save.step)
