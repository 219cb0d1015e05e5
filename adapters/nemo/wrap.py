"""Let a NeMo trainer and its AutoResume use checkpoints in memory."""

from __future__ import annotations

import os
from typing import Any

from nemo.lightning.pytorch.strategies import MegatronStrategy
from nemo.lightning.pytorch.strategies.utils import init_model_parallel
from nemo.lightning.resume import AutoResume
from nemo.utils.callbacks.dist_ckpt_io import AsyncFinalizableCheckpointIO

from mlflash.checkpointer.off import turned_off
from mlflash.errors import ConfigError

from ..lightning import MLFlashCallback
from .auto_resume import MLFlashAutoResume
from .callback import MLFlashCheckpointCallback
from .checkpoint_io import MLFlashAsyncFinalizableCheckpointIO, MLFlashCheckpointIO
from .memory import Memory


def wrap_trainer_and_auto_resume_with_mlflash(
    trainer: Any, flash_base_container: str | os.PathLike[str], async_save: bool,
    default_auto_resume: AutoResume | None = None, always_save_context: bool = False, write_thread_count: int = 1,
    initial_write_buffer_size_bytes: int | None = None, use_optimized_save: bool = True,
    use_cached_ckpt_structure: bool = False, use_fully_parallel_wrapper: bool = True, enabled: bool = True,
    in_background: bool = False, **settings: Any,
) -> AutoResume:  # fmt: skip
    """Let a trainer with an `MLFlashCheckpointCallback` keep checkpoints in the memory of the nodes.

    Not collective. Call it before or after ``trainer.strategy.setup_environment()``, and before ``fit``.

    Args:
        trainer: NeMo's Trainer.
        flash_base_container: the base container of the callback. Paths below it mean memory.
        async_save: True: training goes on while a checkpoint is protected. False: a save waits for its commit.
        default_auto_resume: chooses the checkpoint on disk to start from. Default: the newest, if there is one.
        always_save_context: save NeMo's context with each checkpoint (`MegatronStrategy` only).
        write_thread_count, use_optimized_save: arguments of ML Flashpoint, which have no effect here.
        initial_write_buffer_size_bytes: bytes of state per rank to allocate first, as ``reserve`` of a Checkpointer.
        use_cached_ckpt_structure: True: the state keeps its structure, so ranks agree only once on what each saves.
        use_fully_parallel_wrapper: True: ranks that hold the same tensors divide them among each other to save them.
            False: the first of these ranks saves them all.
        enabled: False, or ``MLFLASH_DISABLE=1``: checkpoints are NeMo's own, and the callback does nothing.
        in_background: True: NeMo's ModelCheckpoint writes to memory, and the same files are moved to their place while
            training continues (`MegatronStrategy` only). False: it writes to disk, and training waits.
        settings: as those of a Checkpointer.

    Returns:
        The AutoResume to use.

    Raises:
        ConfigError: the trainer or the strategy cannot be wrapped, or the trainer has no `MLFlashCheckpointCallback`.
    """
    resume = default_auto_resume or AutoResume(resume_if_exists=True, resume_ignore_no_checkpoint=True)
    if isinstance(trainer.strategy, MegatronStrategy):
        _set_up_groups_always(trainer.strategy)
    callback = _enabled_callback(trainer, enabled)
    if callback is None:
        return resume
    if os.path.abspath(callback.base) != os.path.abspath(flash_base_container):
        raise ConfigError("the MLFlashCheckpointCallback has another base container: give both the same one",
                          expected=os.fspath(flash_base_container), found=callback.base)  # fmt: skip
    if callback.memory is not None:  # wrapped before
        return MLFlashAutoResume(resume, callback.memory)
    settings = {"reserve": initial_write_buffer_size_bytes, **settings}
    memory = Memory(flash_base_container, use_cached_ckpt_structure, use_fully_parallel_wrapper, settings)
    if not isinstance(trainer.strategy, MegatronStrategy):
        _add_flash(trainer, callback, memory, async_save, in_background)
        return resume
    _wrap_checkpoint_io(trainer, memory, async_save)
    callback.save_through(memory, always_save_context, in_background)
    return MLFlashAutoResume(resume, memory)


def _enabled_callback(trainer: Any, enabled: bool) -> MLFlashCheckpointCallback | None:
    """Give the first callback that saves. With ``enabled`` False or ``MLFLASH_DISABLE=1`` turn all of them off."""
    callbacks = [callback for callback in trainer.callbacks if isinstance(callback, MLFlashCheckpointCallback)]
    if turned_off(enabled):
        for callback in callbacks:
            callback.enabled = False
    elif not callbacks:
        raise ConfigError("append an MLFlashCheckpointCallback to the callbacks of the trainer before you wrap it: the "
                          "callback saves", found=[type(other).__name__ for other in trainer.callbacks])  # fmt: skip
    return next((callback for callback in callbacks if callback.enabled), None)


def _wrap_checkpoint_io(trainer: Any, memory: Memory, async_save: bool) -> None:
    strategy = trainer.strategy
    if strategy.save_ckpt_format == "fsdp_dtensor":
        raise ConfigError("Megatron FSDP does not save through the CheckpointIO: mlflash cannot keep its checkpoints "
                          "in memory", found='save_ckpt_format="fsdp_dtensor"')  # fmt: skip
    checkpoint_io = strategy.checkpoint_io
    if isinstance(checkpoint_io, AsyncFinalizableCheckpointIO):
        inner = MLFlashCheckpointIO(checkpoint_io.checkpoint_io, memory, async_save)
        strategy.checkpoint_io = MLFlashAsyncFinalizableCheckpointIO(inner)
    else:
        strategy.checkpoint_io = MLFlashCheckpointIO(checkpoint_io, memory, async_save)


def _set_up_groups_always(strategy: Any) -> None:
    """Let NeMo make Megatron's process groups even if torch.distributed is set up before, when NeMo skips them."""
    setup_distributed = strategy.setup_distributed

    def set_up() -> None:
        setup_distributed()
        init_model_parallel(strategy.model)  # does nothing where they are there

    strategy.setup_distributed = set_up


def _add_flash(trainer: Any, callback: MLFlashCheckpointCallback, memory: Memory, async_save: bool,
               in_background: bool) -> None:  # fmt: skip
    """Let the Lightning adapter's callback save and load: these strategies do not give all state to a CheckpointIO."""
    if in_background:
        raise ConfigError("in_background is for checkpoints of a MegatronStrategy: leave it out",
                          found=type(trainer.strategy).__name__)  # fmt: skip
    flash = MLFlashCallback(callback.every, callback.skip, async_save=async_save, **memory.settings)
    trainer.callbacks.insert(trainer.callbacks.index(callback), flash)
    callback.stand_by(memory.place)
    load, strategy = trainer.strategy.load_model_state_dict, trainer.strategy

    def load_model_state_dict(checkpoint: Any, *args: Any, **kwargs: Any) -> None:
        if checkpoint["state_dict"]:  # otherwise it is loaded already, which NeMo's FSDP2Strategy does not expect
            load(checkpoint, *args, **kwargs)

    strategy.load_model_state_dict = load_model_state_dict
