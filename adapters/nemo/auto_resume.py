"""Choose the checkpoint that a NeMo training starts from: the newest of memory and disk."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from nemo.lightning.io.pl import ckpt_to_weights_subdir
from nemo.lightning.resume import AdapterPath, AutoResume, _try_restore_tokenizer
from nemo.utils.app_state import AppState
from nemo.utils.exp_manager import NotFoundError, _filter_out_unfinished_checkpoints
from torch.distributed.checkpoint.api import CheckpointException

from ..newest import TORN, OnDisk, newest_complete
from ..replacing import replaced
from .memory import Memory

log = logging.getLogger("mlflash")


class MLFlashAutoResume(AutoResume):
    """An AutoResume that takes the checkpoint in memory if it is the newest, and otherwise what NeMo's takes.

    Args:
        default: NeMo's AutoResume. It gets the same fields as this one.
        memory: the checkpoints in memory.
    """

    def __init__(self, default: AutoResume, memory: Memory):
        fields = {field.name: getattr(default, field.name) for field in dataclasses.fields(AutoResume)}
        super().__init__(**fields)
        self._default, self._memory = default, memory

    def setup(self, trainer: Any, model: Any = None) -> None:
        """Let a trainer start from the newest checkpoint. Collective over all ranks."""
        step, theirs, _ = self._compare(model)
        if step is None:
            with self._instead(theirs):
                self._default.setup(trainer, model)
            return
        # A ModelCheckpoint, if there is one, learns from the checkpoint which files exist.
        trainer.ckpt_path = self._memory.path_of(step)
        AppState().restore = True
        if getattr(self.restore_config, "load_artifacts", False):
            _try_restore_tokenizer(model, self._context(step, model))

    def get_trainer_ckpt_path(self, model: Any = None) -> Any:
        """Find the checkpoint to start from. Collective over all ranks.

        Returns:
            The path. None if there is no checkpoint.
        """
        step, theirs, error = self._compare(model)
        if step is not None:
            return self._memory.path_of(step)
        if error is not None:
            raise error
        return theirs

    def get_context_path(self, model: Any = None) -> Any:
        """Find the context of the checkpoint to start from. Collective over all ranks."""
        step, theirs, _ = self._compare(model)
        if step is None:
            with self._instead(theirs):
                return self._default.get_context_path(model)
        return self._context(step, model)

    def _instead(self, theirs: Any) -> contextlib.AbstractContextManager[Any]:
        """Let NeMo's AutoResume take a path, if there is one."""
        if theirs is None:
            return contextlib.nullcontext()
        return replaced(self._default, get_trainer_ckpt_path=lambda model=None: theirs)

    def _context(self, step: int, model: Any) -> Any:
        """Give the context of a checkpoint in memory, or else that of the model with which training began."""
        context = self._memory.context_of(self._memory.path_of(step))
        if context is not None or self.restore_config is None:
            return context
        begun_with = Path(self._extract_path(self.restore_config.path))
        return begun_with / "context" if (begun_with / "context").is_dir() else begun_with

    def _compare(self, model: Any) -> tuple[int | None, Any, Exception | None]:
        """Give the step in memory if that is taken, the path that NeMo's AutoResume takes, and the error it raises."""
        for field in dataclasses.fields(AutoResume):
            setattr(self._default, field.name, getattr(self, field.name))
        theirs, error = None, None
        try:
            theirs = self._default.get_trainer_ckpt_path(model)  # on each rank, because it sets an attribute there
        except (NotFoundError, ValueError) as problem:
            error = problem
        disk, error = self._memory.checkpointer.adapting.seen_by_first(lambda: (_look(theirs), error))
        if isinstance(error, ValueError) and "unfinished" not in str(error):  # for example: training has completed
            raise error
        theirs = disk.path if disk.is_other else theirs
        in_memory = self._memory.find(disk.path)
        if in_memory is None or disk.is_newer(in_memory):
            return None, theirs, error
        log.info("going on from step %d in memory; on disk: %s", in_memory, theirs or error or "nothing")
        return in_memory, theirs, error


def _look(theirs: Any) -> OnDisk:
    """Read the step of the checkpoint that NeMo would take. If it is incomplete, take another one."""
    if theirs is None:
        return OnDisk(None)
    return newest_complete(
        str(theirs), _step_of, lambda: () if isinstance(theirs, AdapterPath) else _others(Path(theirs)), _TORN
    )


def _others(torn: Path) -> Iterator[str]:
    """Yield the weights of the finished checkpoints of the same folder."""
    torn = torn.parent if torn.name == "weights" else torn
    # A name that begins with a dot is that of a checkpoint that is still being moved.
    folders = [path for path in torn.parent.iterdir() if path.is_dir() and not path.name.startswith(".")]
    for path in _filter_out_unfinished_checkpoints(folders):
        weights = ckpt_to_weights_subdir(Path(path), is_saving=False)
        if Path(path) != torn and dist_checkpointing.check_is_distributed_checkpoint(str(weights)):
            yield str(weights)


def _step_of(path: Any) -> int:
    common = dist_checkpointing.load_common_state_dict(str(ckpt_to_weights_subdir(Path(path), is_saving=False)))
    return int(common["global_step"])


_TORN = (*TORN, CheckpointException, CheckpointingException, zipfile.BadZipFile)
