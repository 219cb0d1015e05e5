"""NeMo's CheckpointIO, with the paths below the base container in the memory of the nodes."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import dist_checkpointing
from nemo.lightning.io.pl import _fix_tensors_device
from nemo.utils.callbacks.dist_ckpt_io import AsyncCompatibleCheckpointIO, AsyncFinalizableCheckpointIO

from .memory import Memory


class MLFlashCheckpointIO(AsyncCompatibleCheckpointIO):
    """Saves and loads paths below the base container in memory, and passes all others to the wrapped CheckpointIO.

    Args:
        wrapped: NeMo's CheckpointIO for checkpoints on disk. Other attributes of this object are those of it.
        memory: the checkpoints below the base container.
        async_save: False: a save waits for the commit.
    """

    def __init__(self, wrapped: Any, memory: Memory, async_save: bool):
        self._wrapped, self.memory, self._waits = wrapped, memory, not async_save

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_wrapped":
            raise AttributeError(name)
        return getattr(self._wrapped, name)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> Any:
        """Save a checkpoint. Collective over all ranks."""
        if not self.memory.holds(path):
            return self._wrapped.save_checkpoint(checkpoint, path, storage_options=storage_options)
        options = storage_options or {}
        self.memory.save(checkpoint, path, options.get("content_metadata"))
        if self._waits:
            self.memory.wait()
        return None

    def load_checkpoint(self, path: Any, sharded_state_dict: Any = None, map_location: Any = None,
                        strict: Any = None, **kwargs: Any) -> Any:  # fmt: skip
        """Load a checkpoint. Collective over all ranks."""
        if not self.memory.holds(path):
            more = {"strict": strict} if strict is not None else {}
            return self._wrapped.load_checkpoint(path, sharded_state_dict, map_location, **more, **kwargs)
        loaded = self.memory.load(path, sharded_state_dict or {}, strict)
        return _fix_tensors_device(loaded) if torch.cuda.is_initialized() else loaded

    def load_content_metadata(self, path: Any = None, preloaded_state_dict: Any = None) -> Any:
        """Load how a checkpoint's state is sharded. For one in memory this is collective over all ranks."""
        if path is None or not self.memory.holds(path):
            return self._wrapped.load_content_metadata(path, preloaded_state_dict)
        return dist_checkpointing.load_content_metadata(self.memory.directory(path))

    def remove_checkpoint(self, path: Any) -> None:
        if not self.memory.holds(path):
            self._wrapped.remove_checkpoint(path)

    def teardown(self) -> None:
        self._wrapped.teardown()


class MLFlashAsyncFinalizableCheckpointIO(AsyncFinalizableCheckpointIO):
    """NeMo's queue of asynchronous saves to disk. Saves in memory do not go through the queue.

    Args:
        checkpoint_io: a `MLFlashCheckpointIO`.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if not self.checkpoint_io.memory.holds(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        finalize = (storage_options or {}).pop("finalize_fn", None)
        self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options)
        if finalize is not None:
            self.checkpoint_io.memory.wait()
            finalize()
