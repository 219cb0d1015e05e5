"""The manager of Megatron's local checkpoints, on slots in node memory instead of files.

Megatron and NVRx give it a *tensor-aware state dict*: an object whose tensors can be taken out and put back. The
tensors go straight into the slot; the rest of the object travels with them, as a pickle that a restricted loader reads.

Behaves as NVRx's ``BaseCheckpointManager`` (nvidia-resiliency-ext 0.4 to 0.7) as its callers see it; what differs is
written at each method.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlflash import Checkpointer, config
from mlflash.errors import MlflashError
from mlflash.saving.snapshot import Snapshot
from mlflash.state.flatten import flatten
from mlflash.state.layout import round_up
from mlflash.state.leaves import Flat

from .. import pickles
from . import padding, persistent
from .nvrx import BaseCheckpointManager, CheckpointingException
from .replication import scheme_of
from .request import request

log = logging.getLogger("mlflash")

CkptID = tuple[int, int, str]
_open: dict[str, Checkpointer] = {}  # of this process, by job
_ROOM_NBYTES = 64 << 10  # the pickle takes a multiple of this, so that the layout stays as it is from save to save


class LocalCheckpoints(BaseCheckpointManager):
    """Saves and loads tensor-aware state dicts in the memory of the nodes.

    All ranks of torch.distributed have to be the ranks of the launcher, see `mlflash.adapters.distributed`. It is made
    at the first call that is collective, as Megatron makes its manager before its process groups. A manager that is
    made anew in the same process, with the same names, takes over from the one before, which then need not be closed.

    Args:
        local_ckpt_dir: names the checkpoints; nothing is written there. Two trainings on the same nodes need two.
        session_id: tells the checkpoints of one training from another's under the same directory.
        repl_strategy: how they are protected on other nodes: a scheme ("copy", "xor:8", ...), or one of NVRx's
            strategies: with replication factor F it means F - 1 copies. None: not at all.
        directory: where the checkpoints go that are drained or scavenged, and come back from where memory has none
            that is newer; then it names them, too. Default: none.
        enabled: False, or ``MLFLASH_DISABLE=1``: none is saved, and none is found.
        instead: what training can go on from besides, such as the path of a checkpoint on disk. Where there is
            something, or Megatron has a persistent checkpoint, those that cannot be loaded are a warning, and -1.
        settings: as those of a Checkpointer.

    Attributes:
        latest_iteration: what `find_latest` found; -1 before.
        persistent_dir: where persistent checkpoints are; None: where Megatron's ``--load`` says.
    """

    def __init__(self, local_ckpt_dir: str | os.PathLike[str], session_id: str = "", repl_strategy: Any = None,
                 directory: str | os.PathLike[str] | None = None, enabled: bool = True, instead: object = None,
                 **settings: Any):  # fmt: skip
        padding.fill_with_zeros()
        self.root_local_ckpt_dir = Path(local_ckpt_dir)
        self.session_id, self.repl_strategy, self._instead = session_id, repl_strategy, instead
        self.latest_iteration = -1
        self.persistent_dir: str | os.PathLike[str] | None = None
        named = os.path.join(self.root_local_ckpt_dir if directory is None else directory, session_id)
        job = config.from_environment(os.environ, named, job=settings.pop("job", None), enabled=enabled).job
        own = {"job": job, "redundancy": scheme_of(repl_strategy), "directory": None if directory is None else named}
        self._settings = {"enabled": enabled, **own, **settings}
        self._made: Checkpointer | None = None

    @property
    def rank(self) -> int:
        """Rank in torch.distributed; 0 without it."""
        if torch.distributed.is_initialized():
            return int(torch.distributed.get_rank())
        log.warning("Torch distributed backend has not been initialized.")
        return 0

    @property
    def local_ckpt_dir(self) -> Path:
        """Where a file of this rank would be, for callers that print it."""
        return self.root_local_ckpt_dir / self.session_id / str(self.rank)

    @property
    def checkpointer(self) -> Checkpointer:
        """The Checkpointer underneath. Collective over all ranks, the first time, and where another manager had it."""
        job = self._settings["job"]
        if self._made is None or _open.get(job) is not self._made:
            if (before := _open.pop(job, None)) is not None:
                try:
                    before.close()
                except MlflashError as error:
                    log.warning("a new manager of local checkpoints replaced another, which ended with an error: %s",
                                error)  # fmt: skip
            self._made = _open[job] = Checkpointer(**self._settings)
        return self._made

    def find_latest(self) -> int:
        """Find the newest iteration of which every rank's checkpoint can be had, from copies or parity too.

        Collective over all ranks. Every byte of it is verified, unlike NVRx's, so that an older one is found where it
        is damaged beyond repair. What was found is remembered until the next save.

        Returns:
            It; -1 where there is none, or where it was saved by another number of ranks. Where there is a directory,
            what was drained there counts, too.

        Raises:
            Unrestorable: checkpoints are there, none of them can be loaded, Megatron has no persistent one, and
                nothing was given as ``instead``.
        """
        if self.latest_iteration == -1:
            adapting = self.checkpointer.adapting
            given = self.persistent_dir or getattr(persistent.arguments(), "load", None)
            instead = adapting.seen_by_first(lambda: given if persistent.iteration_in(given) else self._instead)
            found = adapting.newest_alike(instead)
            self.latest_iteration = -1 if found is None else found
        return self.latest_iteration

    def load(self) -> tuple[Any, CkptID]:
        """Load what `find_latest` found; every byte of it verified on all ranks. May be called again.

        Collective over all ranks.

        Returns:
            The tensor-aware state dict, its tensors on the devices where they were, and ``(iteration, rank,
            session_id)``.

        Raises:
            CheckpointingException: `find_latest` was not called, or found nothing; on all ranks, where what it found
                cannot be loaded.
        """
        if self.latest_iteration == -1:
            raise CheckpointingException("The 'find_latest' method must be called before invoking the 'load' function.")
        try:
            iteration, state = self.checkpointer.load(self.latest_iteration)
            loaded = self.checkpointer.adapting.load_together(
                self.latest_iteration, lambda: _together(state), anew=True
            )
        except MlflashError as error:
            raise CheckpointingException(f"iteration {self.latest_iteration} cannot be loaded: {error}") from error
        assert iteration is not None
        return loaded, (iteration, self.rank, self.session_id)

    def save(self, state_dict: Any, iteration: int, is_async: bool = False) -> Any:
        """Save a tensor-aware state dict; when this returns the training may change its tensors.

        Collective over all ranks. Unlike NVRx's, no file is left behind by a save that fails, no tensor of the caller
        is replaced by a copy or a placeholder, and the checkpoint before the newest one is kept in memory, too.

        Args:
            state_dict: has ``pop_tensors`` and ``insert_tensors``; where these raise NotImplementedError, it is pickled
                with its tensors, which go into the slot all the same.
            iteration: larger than that of the newest checkpoint; one whose save has failed may come again.
            is_async: do not wait for the commit.

        Returns:
            None; with ``is_async`` a request for any queue of NVRx or Megatron. What its worker does is to wait for the
            commit, so that its finalizing function need not.

        Raises:
            CheckpointingException: on all ranks, where it failed on any; the older checkpoint is untouched. With
                ``is_async`` from the finalizing function.
        """
        self._ckpt_id(iteration)  # refuses a negative one
        assert self.latest_iteration < iteration, (
            f"A newer checkpoint is already available: {self.latest_iteration} (saving {iteration})"
        )
        self.latest_iteration = -1
        failed: MlflashError | None = None
        snapshot: Snapshot | None = None
        try:
            snapshot = self._begin(iteration, _Apart(state_dict))
        except MlflashError as error:  # the other ranks hear of it by the commit
            failed = error

        def finalize() -> None:
            self.latest_iteration = -1
            try:
                if failed is not None:
                    raise failed
                assert snapshot is not None
                snapshot.wait()
            except MlflashError as error:
                raise CheckpointingException(
                    f"Failure during saving local checkpoint from iteration {iteration}: {error}"
                ) from error
            log.info("Successfully saved local checkpoint from iteration %d", iteration)

        if not is_async:
            finalize()
            return None
        if snapshot is None:
            return request(lambda call: call(None), finalize, 0.0)
        return request(snapshot.add_done_callback, finalize, self.checkpointer.timeout_s)

    def _begin(self, iteration: int, state: _Apart) -> Snapshot:
        checkpointer = self.checkpointer
        if iteration != checkpointer.last_step:
            return checkpointer.adapting.save(iteration, state, checkpointer.adapting.stepped_optimizers())
        # Once more, after it has failed. What is given here must not change before it has ended.
        begun = checkpointer.adapting.begin(iteration, threading.current_thread())
        try:
            leaves: Flat | MlflashError = flatten(state)
        except MlflashError as error:
            leaves = error
        snapshot = checkpointer.adapting.save_again(leaves, begun)
        try:
            snapshot.wait()
        except MlflashError:
            pass  # said by who waits for it
        return snapshot

    def close(self) -> None:
        """Wait for the saves so far and free everything but the checkpoints. Collective over all ranks."""
        if self._made is not None:
            made, self._made = self._made, None
            if _open.get(self._settings["job"]) is made:
                del _open[self._settings["job"]]
            made.close()

    # What NVRx's users call, and the hooks that its class leaves to subclasses: files are what they are for.

    def _ckpt_id(self, iteration: int) -> CkptID:
        if iteration < 0:
            raise CheckpointingException(f"Invalid iteration: expected a non-negative value, got {iteration}.")
        return iteration, self.rank, self.session_id

    def _filename_from_template(self, iteration: int | str, rank: int | str, extra_suffix: str = "") -> str:
        """The name that NVRx's file of an iteration would have."""
        digits = f"{iteration:07d}" if isinstance(iteration, int) else iteration
        return f"iter_{digits}_{rank}_local{extra_suffix}.pt"

    def _filename_to_id(self, filename: str) -> CkptID:
        _, iteration, rank, _ = filename.split("_", 3)
        return int(iteration), int(rank), self.session_id

    def _local_ckpt_path_from_id(self, ckpt_id: CkptID, is_dirty: bool = False) -> Path:
        """Where NVRx's file of a checkpoint would be; there is none."""
        return self.local_ckpt_dir / self._filename_from_template(*ckpt_id[:2], ".dirty" if is_dirty else "")

    def _my_ckpt_ids(self) -> list[CkptID]:
        return [(step, self.rank, self.session_id) for step in self.checkpointer.adapting.steps_alike()]

    def _load(self, ckpt_id: CkptID) -> Any:
        raise CheckpointingException("all ranks read slots together: call load()")

    def _save(self, state_dict: Any, ckpt_id: CkptID) -> None:
        raise CheckpointingException("all ranks write slots together: call save()")

    def _cleanup(self, iteration: int) -> None:
        """Nothing: an older slot is written over."""

    def _cleanup_failed_save(self, iteration: int) -> None:
        """Nothing: a slot that was not committed is never looked at."""


class _Apart:
    """A tensor-aware state dict as a state: a pickle that pads to the same length each time, and tensors.

    Args:
        whole: see `LocalCheckpoints.save`; is left as it was.
    """

    def __init__(self, whole: Any):
        self._whole = whole

    def state_dict(self) -> dict[str, Any]:
        try:
            tensors = list(self._whole.pop_tensors())
        except NotImplementedError:  # the pickler takes the tensors out as well
            pickled, plain = pickles.dump((self._whole, None))
        else:
            try:
                pickled, plain = pickles.dump((self._whole, tensors))
            finally:
                self._whole.insert_tensors(tensors)
        padded = np.frombuffer(pickled.ljust(round_up(len(pickled), _ROOM_NBYTES), b"\0"), dtype=np.uint8)
        return {"pickled": padded, "tensors": plain}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError("a load makes a new object")


def _together(state: dict[str, Any]) -> Any:
    """Make what was taken apart whole again, with its tensors on the devices where they were."""
    whole, tensors = pickles.load(state["pickled"].tobytes(), state["tensors"])
    if tensors is not None:
        whole.insert_tensors(tensors)
    whole.restore_tensor_device(non_blocking=False)
    return whole
