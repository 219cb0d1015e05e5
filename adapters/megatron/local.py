"""The manager of Megatron's local checkpoints, on slots in node memory instead of files.

Megatron and NVRx give it a *tensor-aware state dict*: an object whose tensors can be taken out and put back. The
tensors go straight into the slot. The rest of the object is saved with them as a pickle that a restricted loader reads.

To its callers it behaves like NVRx's ``BaseCheckpointManager`` (nvidia-resiliency-ext 0.4 to 0.7). Each method says
where it differs.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import logging
import os
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlflash import Checkpointer, config
from mlflash.checkpointer import keep_alive, process_end
from mlflash.errors import MlflashError
from mlflash.save.snapshot import Snapshot
from mlflash.state.flatten import flatten
from mlflash.state.layout import round_up
from mlflash.state.leaves import Flat

from .. import pickles
from ..wrappers import instances
from . import nvrx, padding, persistent
from .nvrx import CheckpointingException
from .request import request

log = logging.getLogger("mlflash")

CkptID = tuple[int, int, str]
_open: dict[str, Checkpointer] = {}  # of this process, by job
_only: dict[str, persistent.MemoryOnly] = {}  # of each of them; a manager may be gone before the process ends
_ROOM_NBYTES = 64 << 10  # the pickle is padded to a multiple of this, so that the layout rarely changes


class LocalCheckpoints(nvrx.BaseCheckpointManager):
    """Saves and loads tensor-aware state dicts in the memory of the nodes.

    The ranks of torch.distributed must be those of the launcher, see `mlflash.adapters.distributed`. The first
    collective call makes the Checkpointer, because Megatron makes its manager before its process groups. If you make a
    new manager with the same names in the same process, it takes over from the one before, which you need not close.

    Args:
        local_ckpt_dir: names the checkpoints; nothing is written there. Two trainings on the same nodes need two names.
        session_id: distinguishes trainings that have the same directory.
        repl_strategy: the protection on other nodes: a scheme ("copy", "xor:8", ...) or a strategy of NVRx, which
            means F - 1 copies for replication factor F. None: no protection.
        directory: where checkpoints are drained or scavenged to. A load takes them from there if memory has no newer
            one. If you give it, it names the checkpoints instead of ``local_ckpt_dir``. Default: none.
        enabled: False, or ``MLFLASH_DISABLE=1``: nothing is saved and nothing is found.
        instead: what training can start from otherwise, such as the path of a checkpoint on disk. If you give it, or
            Megatron has a persistent checkpoint, `find_latest` only warns of checkpoints that cannot be loaded.
        settings: as those of a Checkpointer.

    Attributes:
        latest_iteration: what `find_latest` found; -1 before that.
        persistent_dir: directory of Megatron's persistent checkpoints. None: that of Megatron's ``--load``.
        persistent_save: directory to which Megatron saves persistent ones. None: that of Megatron's ``--save``.
    """

    def __init__(self, local_ckpt_dir: str | os.PathLike[str], session_id: str = "", repl_strategy: Any = None,
                 directory: str | os.PathLike[str] | None = None, enabled: bool = True, instead: object = None,
                 **settings: Any):  # fmt: skip
        padding.leave_out()
        self.root_local_ckpt_dir = Path(local_ckpt_dir)
        self.session_id, self.repl_strategy, self._instead = session_id, repl_strategy, instead
        self.latest_iteration = -1
        self.persistent_dir: str | os.PathLike[str] | None = None
        self.persistent_save: str | os.PathLike[str] | None = None
        named = os.path.join(self.root_local_ckpt_dir if directory is None else directory, session_id)
        job = config.from_environment(os.environ, named, job=settings.pop("job", None), enabled=enabled).job
        scheme = nvrx.scheme_of(repl_strategy)
        own = {"job": job, "redundancy": scheme, "directory": None if directory is None else named}
        self._settings = {"enabled": enabled, **own, **settings}
        self._made: Checkpointer | None = None

    @property
    def rank(self) -> int:
        """Rank in torch.distributed. 0 without torch.distributed."""
        if torch.distributed.is_initialized():
            return int(torch.distributed.get_rank())
        log.warning("Torch distributed backend has not been initialized.")
        return 0

    @property
    def local_ckpt_dir(self) -> Path:
        """Path that a file of this rank would have, for callers that print it."""
        return self.root_local_ckpt_dir / self.session_id / str(self.rank)

    @property
    def checkpointer(self) -> Checkpointer:
        """The Checkpointer underneath. The first use by a manager makes it, which is collective over all ranks."""
        job = self._settings["job"]
        if self._made is None or _open.get(job) is not self._made:
            _only.pop(job, None)
            if (before := _open.pop(job, None)) is not None:
                try:
                    before.close()
                except MlflashError as error:
                    log.warning("a new manager of local checkpoints replaced another, which ended with an error: %s",
                                error)  # fmt: skip
            self._made = _open[job] = Checkpointer(**self._settings)
            if self._made.enabled:
                _only[job] = persistent.MemoryOnly(self._made)
        return self._made

    def find_latest(self) -> int:
        """Find the newest iteration that every rank can load, if necessary from copies or parity.

        Collective over all ranks. Unlike NVRx's method it verifies every byte, and finds an older iteration if the
        newest is damaged beyond repair. The result is kept until the next save.

        Returns:
            The iteration. -1 if there is none, or if another number of ranks saved it. With ``directory``, it also
            finds what was drained there.

        Raises:
            Unrestorable: there are checkpoints, but none can be loaded, Megatron has no persistent one, and you gave
                nothing as ``instead``.
        """
        if self.latest_iteration == -1 and self.checkpointer.enabled:
            adapting = self.checkpointer.adapting
            given = self.persistent_dir or getattr(persistent.arguments(), "load", None)
            instead = adapting.seen_by_first(lambda: given if persistent.iteration_in(given) else self._instead)
            found = adapting.newest_alike(instead)
            self.latest_iteration = -1 if found is None else found
            adapting.loaded_elsewhere()  # what was found is loaded, or Megatron's own, or a new training begins
        return self.latest_iteration

    def load(self) -> tuple[Any, CkptID]:
        """Load what `find_latest` found. All ranks verify every byte. You may call it again.

        Collective over all ranks.

        Returns:
            The tensor-aware state dict, with its tensors on the devices where they were, and ``(iteration, rank,
            session_id)``.

        Raises:
            CheckpointingException: `find_latest` was not called or found nothing; or the checkpoint cannot be loaded,
                which all ranks raise.
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
        """Save a tensor-aware state dict. When this returns, training may change its tensors.

        Collective over all ranks. Unlike NVRx's method, a failed save leaves no file behind, no tensor of yours is
        replaced by a copy or a placeholder, and memory also keeps the checkpoint before the newest.

        Args:
            state_dict: has ``pop_tensors`` and ``insert_tensors``. If these raise NotImplementedError, the whole
                object is pickled; its tensors still go straight into the slot.
            iteration: larger than that of the newest checkpoint. You may repeat an iteration whose save failed.
            is_async: True: do not wait for the commit.

        Returns:
            None. With ``is_async`` a request for any queue of NVRx or Megatron. Its worker waits for the commit, so
            that its finalizing function need not wait.

        Raises:
            CheckpointingException: the save failed on some rank. All ranks raise it, with ``is_async`` in the
                finalizing function. The older checkpoint is untouched.
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
        except MlflashError as error:  # the other ranks learn of it in the commit
            failed = error
        only = _only.get(self._settings["job"])

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
            if only is not None:
                only.saved(iteration, self.persistent_save or getattr(persistent.arguments(), "save", None))

        if not is_async:
            finalize()
            return None
        if snapshot is None:
            return request(lambda call: call(None), finalize, 0.0)
        return request(snapshot.add_done_callback, finalize, self.checkpointer.timeout_s)

    def _begin(self, iteration: int, state: _Apart) -> Snapshot:
        checkpointer = self.checkpointer
        if not checkpointer.enabled:
            return checkpointer.save(iteration, state)
        if iteration != checkpointer.last_step:
            return checkpointer.adapting.save(iteration, state, checkpointer.adapting.stepped_optimizers())
        # The step is saved again after a failure. Its tensors must not change until that save has ended.
        begun = checkpointer.adapting.begin(iteration, threading.current_thread())
        try:
            leaves: Flat | MlflashError = flatten(state)
        except MlflashError as error:
            leaves = error
        snapshot = checkpointer.adapting.save_again(leaves, begun)
        try:
            snapshot.wait()
        except MlflashError:
            pass  # whoever waits for the snapshot raises it
        return snapshot

    def close(self) -> None:
        """Wait for all saves so far and free everything but the checkpoints. Collective over all ranks."""
        if self._made is not None:
            made, self._made = self._made, None
            job, only = self._settings["job"], None
            if _open.get(job) is made:
                del _open[job]
                only = _only.pop(job, None)
            made.close()
            if only is not None:
                only.end()

    # The hooks that NVRx's class leaves to subclasses. They are made for files.

    def _ckpt_id(self, iteration: int) -> CkptID:
        if iteration < 0:
            raise CheckpointingException(f"Invalid iteration: expected a non-negative value, got {iteration}.")
        return iteration, self.rank, self.session_id

    def _my_ckpt_ids(self) -> list[CkptID]:
        steps = self.checkpointer.adapting.steps_alike() if self.checkpointer.enabled else []
        return [(step, self.rank, self.session_id) for step in steps]

    def _load(self, ckpt_id: CkptID) -> Any:
        raise CheckpointingException("all ranks read slots together: call load()")

    def _save(self, state_dict: Any, ckpt_id: CkptID) -> None:
        raise CheckpointingException("all ranks write slots together: call save()")

    def _cleanup(self, iteration: int) -> None:
        """Do nothing: the next save overwrites an older slot."""

    def _cleanup_failed_save(self, iteration: int) -> None:
        """Do nothing: a slot that was not committed is never read."""


class _Apart:
    """A tensor-aware state dict as a state: its tensors, and a pickle that is padded to the same length each time.

    Args:
        whole: see `LocalCheckpoints.save`. It is unchanged afterwards.
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
    whole, tensors = pickles.load(state["pickled"].tobytes(), state["tensors"])
    if tensors is not None:
        whole.insert_tensors(tensors)
    whole.restore_tensor_device(non_blocking=False)
    return whole


_DESTROY = (
    ("megatron.training.global_vars", "destroy_global_vars"),
    ("megatron.core.num_microbatches_calculator", "destroy_num_microbatches_calculator"),
    ("megatron.core.rerun_state_machine", "destroy_rerun_state_machine"),
    ("megatron.core.parallel_state", "destroy_global_memory_buffer"),
    ("megatron.core.parallel_state", "destroy_model_parallel"),
)


@contextlib.contextmanager
def _trained_again() -> Iterator[None]:
    """Let Megatron train again in this process after an error, as if it had not trained here. Not collective.

    Source: ``destroy_state`` of Megatron's ``inprocess_restart``.
    """
    times = dict(getattr(sys.modules.get("megatron.training.training"), "_STARTUP_TIMESTAMPS", {}))
    try:
        yield
    except Exception:
        for only in _only.values():
            process_end.discard(only)
        _only.clear()
        _open.clear()
        for module, name in _DESTROY:
            if module in sys.modules:
                getattr(sys.modules[module], name)()
        _free_model()
        training = sys.modules.get("megatron.training.training")
        if now := getattr(training, "_STARTUP_TIMESTAMPS", None):  # with a time, ranks do a collective more
            now.update({name: times.get(name) for name in now})
        raise


def _free_model() -> None:
    """Free model and optimizer: they are in cycles through nodes of autograd, which Python's collector does not see."""
    wrapper = sys.modules.get("megatron.core.distributed.distributed_data_parallel")
    if wrapper is None:
        return
    for model in instances(wrapper.DistributedDataParallel):
        model.grad_accs.clear()
    for optimizer in instances(sys.modules["megatron.core.optimizer.optimizer"].MegatronOptimizer):
        if inner := vars(optimizer).get("optimizer"):
            inner.param_groups.clear()
            inner.state.clear()
        vars(optimizer).clear()


keep_alive.around_frameworks["megatron"] = _trained_again


# Let Megatron's own local checkpoints use slots: Megatron finds this manager where it looks for NVRx's. Megatron-LM,
# Megatron Bridge and NeMo make their manager from names of `nvidia_resiliency_ext` when they need it. `install`
# replaces the values of those names. If NVRx is not installed, it makes modules that have only these names.


_LOCAL = "nvidia_resiliency_ext.checkpointing.local"


def install(redundancy: str | None = None, enabled: bool = True, **settings: Any) -> None:
    """Let Megatron's ``--non-persistent-ckpt-type local`` use mlflash. Call it before Megatron's ``pretrain``.

    Not collective. Call it on all ranks with the same arguments. ``--non-persistent-save-interval`` and
    ``--non-persistent-local-ckpt-algo`` work as before. ``--non-persistent-local-ckpt-dir`` names the checkpoints;
    nothing is written there. ``--replication --replication-factor F`` makes F - 1 copies on other nodes, and
    ``--replication-jump`` has no effect.

    Args:
        redundancy: the redundancy scheme, such as "xor:8". It replaces what ``--replication`` asks for.
        enabled: False, or ``MLFLASH_DISABLE=1``: Megatron uses NVRx's own local checkpoints if NVRx is installed, and
            otherwise has none.
        settings: as those of a Checkpointer.

    Example:
        from mlflash.adapters.megatron import install

        install()  # the first lines of pretrain_gpt.py
    """
    if nvrx.stands_aside(enabled):
        return

    class Installed(LocalCheckpoints):
        """The manager that Megatron makes from its flags."""

        def __init__(
            self, root_local_ckpt_dir: str | os.PathLike[str], session_id: str = "", repl_strategy: Any = None
        ):
            strategy = redundancy or repl_strategy
            super().__init__(root_local_ckpt_dir, session_id, strategy, enabled=enabled, **settings)

    for name, values in {
        "base_state_dict": {"TensorAwareStateDict": nvrx.TensorAwareStateDict},
        "ckpt_managers.base_manager": {
            "BaseCheckpointManager": nvrx.BaseCheckpointManager, "CheckpointingException": nvrx.CheckpointingException,
            "CkptID": CkptID, "SameMachineReplicationException": nvrx.SameMachineReplicationException,
        },
        "ckpt_managers.local_manager": {"LocalCheckpointManager": Installed},
        "replication.group_utils": {"GroupWrapper": None, "parse_group_sequence": None},
        "replication.strategies": {
            "CliqueReplicationStrategy": nvrx.Clique, "LazyCliqueReplicationStrategy": nvrx.Clique,
            "NoReplicasAvailableError": nvrx.NoReplicasAvailableError, "ReplicationStrategy": nvrx.ReplicationStrategy,
        },
    }.items():  # fmt: skip
        module = _module(f"{_LOCAL}.{name}")
        for which, value in values.items():
            if value is not None or not hasattr(module, which):
                setattr(module, which, value)
    if "megatron.core.dist_checkpointing.tensor_aware_state_dict" in sys.modules:
        nvrx.work_without_nvrx()


def checkpointing_context(
    local_ckpt_dir: str | os.PathLike[str], session_id: str = "", repl_strategy: Any = None, enabled: bool = True,
    **settings: Any,
) -> dict[str, Any]:  # fmt: skip
    """Make the ``checkpointing_context`` for Megatron's load_checkpoint and save_checkpoint in your own training loop.

    Not collective. The arguments are those of `LocalCheckpoints`.
    """
    manager = LocalCheckpoints(local_ckpt_dir, session_id, repl_strategy, enabled=enabled, **settings)
    nvrx.work_without_nvrx()
    return {"local_checkpoint_manager": manager}


def _module(name: str) -> types.ModuleType:
    """Import a module. If there is none, make an empty one and the packages around it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        made = types.ModuleType(name, "Replaces a module of NVRx, which is not installed.")
        made.__path__ = []
        made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(_module(parent), own, made)
        sys.modules[name] = made
        return made
