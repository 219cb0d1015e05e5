"""Which checkpoint a training of NeMo starts from: the newest of memory and disk."""

from __future__ import annotations

import dataclasses
import logging
import pickle
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from nemo.lightning.io.pl import ckpt_to_weights_subdir
from nemo.lightning.resume import AutoResume, _try_restore_tokenizer
from nemo.utils.app_state import AppState
from nemo.utils.exp_manager import NotFoundError

from .memory import Memory

log = logging.getLogger("mlflash")


class MLFlashAutoResume(AutoResume):
    """Takes the checkpoint in memory where it is the newest, and else what the default one takes.

    Args:
        default: NeMo's; what is set here is set there, too.
        memory: the checkpoints in memory.
    """

    def __init__(self, default: AutoResume, memory: Memory):
        fields = {field.name: getattr(default, field.name) for field in dataclasses.fields(AutoResume)}
        super().__init__(**fields)
        self._default, self._memory = default, memory

    def setup(self, trainer: Any, model: Any = None) -> None:
        """Let a trainer start from the newest checkpoint. Collective over all ranks."""
        step, _, _ = self._compare(model)
        if step is None:
            self._default.setup(trainer, model)
            return
        # Its ModelCheckpoint, if it has one, learns from the checkpoint itself which files there are.
        trainer.ckpt_path = self._memory.path_of(step)
        AppState().restore = True
        if getattr(self.restore_config, "load_artifacts", False):
            _try_restore_tokenizer(model, self._context(step, model))

    def get_trainer_ckpt_path(self, model: Any = None) -> Any:
        """Find the checkpoint to start from. Collective over all ranks.

        Returns:
            Its path; None: there is none.
        """
        step, theirs, error = self._compare(model)
        if step is not None:
            return self._memory.path_of(step)
        if error is not None:
            raise error
        return theirs

    def get_context_path(self, model: Any = None) -> Any:
        """Find the context of the checkpoint to start from. Collective over all ranks."""
        step, _, _ = self._compare(model)
        return self._default.get_context_path(model) if step is None else self._context(step, model)

    def _context(self, step: int, model: Any) -> Any:
        """That of a checkpoint in memory, or else of the model that training had begun with."""
        context = self._memory.context_of(self._memory.path_of(step))
        if context is not None or self.restore_config is None:
            return context
        begun_with = Path(self._extract_path(self.restore_config.path))
        return begun_with / "context" if (begun_with / "context").is_dir() else begun_with

    def _compare(self, model: Any) -> tuple[int | None, Any, Exception | None]:
        """The step in memory, where that is taken; what the default one takes; what it raises."""
        for field in dataclasses.fields(AutoResume):
            setattr(self._default, field.name, getattr(self, field.name))
        theirs, error = None, None
        try:
            theirs = self._default.get_trainer_ckpt_path(model)
        except (NotFoundError, ValueError) as problem:
            error = problem
            if isinstance(problem, ValueError) and "unfinished" not in str(problem):  # such as: training has completed
                raise
        in_memory = self._memory.find(theirs)
        if in_memory is None:
            return None, theirs, error
        on_disk = self._memory.checkpointer.adapting.seen_by_first(lambda: None if theirs is None else _step_of(theirs))
        if on_disk is not None and on_disk > in_memory:
            return None, theirs, error
        log.info("going on from step %d in memory; on disk: %s", in_memory, theirs or error or "nothing")
        return in_memory, theirs, error


def _step_of(path: Any) -> int | None:
    """The step of a checkpoint on disk; None where it does not say. Not collective."""
    try:
        common = dist_checkpointing.load_common_state_dict(str(ckpt_to_weights_subdir(Path(path), is_saving=False)))
        return int(common["global_step"])
    except (OSError, KeyError, RuntimeError, CheckpointingException, pickle.UnpicklingError) as error:
        log.warning("the step of %s is not known (%r): memory is taken to be newer", path, error)
        return None
