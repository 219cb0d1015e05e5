"""TorchTitan: checkpoints in the memory of the nodes, between those that its checkpointer writes to disk.

`MemoryCheckpointManager` is TorchTitan's `CheckpointManager` with more options. TorchTitan's options still apply to the
disk. Every ``memory_interval`` steps, or with None whenever it writes to disk, it also saves in memory. A load takes
the newest checkpoint of memory and disk.

It saves what TorchTitan's manager holds (model parts, optimizers, schedulers, data loader, step) and the random number
state of this rank. It uses `Checkpointer.save` and `restore` instead of DCP. DCP would plan each save again, which for
thousands of DTensors takes seconds and messages between all ranks. It saves the parameters and buffers of models
directly, because hooks of their `state_dict` may gather weights from all ranks to split them (`FusedQKVLinear`). A
restore fills these and the optimizers' tensors in place, on any number of ranks, because they are DTensors. If a tensor
is missing on either side, `restore` refuses it, which the objects themselves would not do.

Example:
    from torchtitan.models.llama3.config_registry import llama3_8b
    from mlflash.adapters.torchtitan import MemoryCheckpointManager

    def llama3_8b_in_memory():
        config = llama3_8b()
        config.checkpoint = MemoryCheckpointManager.Config.beside(config.checkpoint, memory_interval=10)
        return config
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.checkpointer import DATALOADER, MODEL, OPTIMIZER, CheckpointManager
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.tools import filesystem

from mlflash import Checkpointer, rng
from mlflash.checkpointer.off import turned_off
from mlflash.errors import ConfigError, StructureMismatch

from . import intervals
from .newest import OnDisk, newest_in_memory

log = logging.getLogger("mlflash")

_NUMBERS = "random numbers"


class MemoryCheckpointManager(CheckpointManager):
    """TorchTitan's checkpointer, which also saves in memory. TorchTitan builds it from its `Config`.

    All methods are collective over all ranks.

    Args:
        config: TorchTitan's options and those for memory.
        objects: the arguments of TorchTitan's manager.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """TorchTitan's options and those for memory."""

        memory_enable: bool = True
        """Whether to save in memory and load from there. ``MLFLASH_DISABLE=1`` turns it off, too. Without TorchTitan's
        ``enable`` nothing is saved or loaded at all."""

        memory_interval: int | None = 10
        """Steps between checkpoints in memory. None: save whenever TorchTitan saves."""

        memory_skip: int | None = None
        """Do not save in memory if the step is a multiple of this, such as ``interval``, whose steps go to disk."""

        memory_directory: str | None = None
        """Where checkpoints are drained or scavenged to. Default: none."""

        memory_settings: dict[str, Any] = dataclasses.field(default_factory=dict)
        """More settings of a Checkpointer."""

        def __post_init__(self) -> None:
            CheckpointManager.Config.__post_init__(self)
            intervals.check(self.memory_interval, self.memory_skip)

        @classmethod
        def beside(cls, disk: CheckpointManager.Config, **memory: Any) -> MemoryCheckpointManager.Config:
            """Add options for memory to those of TorchTitan's own manager.

            Raises:
                ConfigError: these are the options of another manager, which this one would replace.
            """
            if type(disk) is not CheckpointManager.Config:
                raise ConfigError("memory goes beside TorchTitan's own CheckpointManager only, which writes by DCP",
                                  expected=f"{CheckpointManager.__module__}.CheckpointManager.Config",
                                  found=f"{type(disk).__module__}.{type(disk).__qualname__}")  # fmt: skip
            return cls(**{field.name: getattr(disk, field.name) for field in dataclasses.fields(disk)}, **memory)

    _flash: Checkpointer | None = None

    def __init__(self, config: Config, **objects: Any):
        super().__init__(config, **objects)
        self._every, self._skip = config.memory_interval, config.memory_skip
        if config.enable and not config.create_seed_checkpoint and not turned_off(config.memory_enable):
            flash = Checkpointer(config.memory_directory, **config.memory_settings)
            self._flash = flash if flash.enabled else None
            if self._flash is not None:
                own = f"TorchTitan saves (interval={self.interval}, and the last step)"
                nothing = "load_only is set, and TorchTitan saves nothing either" if self.load_only else ""
                intervals.say(flash, None if self.load_only else self._every, self._skip, own, nothing)
        elif not config.enable and not turned_off(config.memory_enable) and dist.get_rank() == 0:
            log.warning(
                "nothing is saved in memory: TorchTitan's checkpoints are off. --checkpoint.enable turns both on"
            )

    def __del__(self) -> None:
        """Abandon what was never closed, without waiting for other ranks, whose finalizers run at other times."""
        self._end(RuntimeError)
        super().__del__()

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        is_due = self._every is not None or self._should_save(curr_step, last_step)
        is_due = is_due and intervals.is_due(curr_step, self._every, self._skip)
        if self._flash is not None and is_due and not self.load_only:
            optimizers = self.states[OPTIMIZER].optimizers
            with torch.no_grad():
                self._flash.adapting.save_or_warn(curr_step, {**self._state(), _NUMBERS: rng()}, optimizers)
        saved: bool = super()._save(curr_step, last_step)
        return saved

    def _load(self, step: int = -1) -> bool:
        if self._flash is None:
            return bool(super()._load(step))
        disk: OnDisk = self._flash.adapting.seen_by_first(lambda: self._look(step))
        held: int | None
        if step == -1:
            held = newest_in_memory(self._flash, disk)
        else:  # a step that the user names should be in the folder
            held = step if disk.path is None and step in self._flash.steps() else None
        if held is not None:
            self._restore(self._flash, held)
            return True
        self._draw_from(None)
        return bool(super()._load(step if disk.step is None else disk.step))

    def _look(self, step: int) -> OnDisk:
        """Find the newest step on disk (-1), or the given one."""
        if step == -1:
            step = int(self._find_load_step())
        elif not filesystem.isfile(filesystem.join(self._create_checkpoint_id(step), ".metadata")):
            step = -1
        return OnDisk(None) if step < 0 else OnDisk(f"step {step} on disk", step)

    def _restore(self, flash: Checkpointer, step: int) -> None:
        """Restore a step from memory or the directory."""
        numbers, optimizers, excluded = _Numbers(), self.states[OPTIMIZER], set(self.exclude_from_loading)
        if unknown := excluded - self.states.keys():
            raise ConfigError("exclude_from_loading names parts that the state does not have",
                              expected=sorted(self.states), found=sorted(unknown))  # fmt: skip
        new = [optimizer for optimizer in optimizers.optimizers if not optimizer.state]
        together = flash.adapting.load_together
        with torch.no_grad():
            state = together(step, self._state, anew=True)
            if state[DATALOADER] is not None:
                state[DATALOADER] = _Position(state[DATALOADER])
            for key in excluded:
                state[key] = _Unread(state[key] if key == OPTIMIZER else {})
            flash.restore({**state, _NUMBERS: numbers}, step)
            if OPTIMIZER not in excluded:
                # Its tensors are filled already. Its other values are not.
                together(step, lambda: optimizers.load_state_dict(state[OPTIMIZER]))
            else:
                for optimizer in new:  # reading its state made a step with zero gradients, which would count
                    optimizer.state.clear()
        self._draw_from(numbers.held)

    def _state(self) -> dict[str, Any]:
        """Give what TorchTitan's manager holds, with model parts and optimizers as dicts of their live tensors."""
        parts = [_tensors(part) for part in self.states[MODEL].model]
        return {**self.states, MODEL: parts, OPTIMIZER: self.states[OPTIMIZER].state_dict()}

    def _draw_from(self, numbers: dict[str, Any] | None) -> None:
        """Set the random number state after the data loader has drawn random numbers for its new iterator.

        In an uninterrupted run the loader drew these before the first step. None: do not set the state.
        """
        loader = self.states[DATALOADER]
        make = getattr(type(loader), "_get_iterator", None)
        if make is None:
            if numbers is not None:
                rng().load_state_dict(numbers)
            return
        vars(loader).pop("_get_iterator", None)
        if numbers is None:
            return

        def get_iterator() -> Any:
            del loader._get_iterator
            iterator = make(loader)
            rng().load_state_dict(numbers)
            return iterator

        loader._get_iterator = get_iterator

    def _close(self) -> None:
        try:
            super()._close()
        finally:
            self._end(sys.exc_info()[0])

    def _end(self, error: type[BaseException] | None) -> None:
        """Close the Checkpointer. After an error, do not wait for other ranks."""
        flash, self._flash = self._flash, None
        if flash is not None:
            flash.__exit__(error, None, None)


def _tensors(part: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Give parameters and persistent buffers by TorchTitan's names."""
    tensors = dict(part.named_parameters())
    for prefix, module in part.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}".lstrip(".")] = buffer
    return {canonical_fqn(name): tensor for name, tensor in tensors.items()}


class _Numbers:
    rank_private = True

    def __init__(self) -> None:
        self.held: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return rng().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state


class _Unread:
    """A part of the state that a restore does not change."""

    def __init__(self, like: dict[str, Any]):
        self._like = like

    def state_dict(self) -> dict[str, Any]:
        return self._like

    def load_state_dict(self, state: Any) -> None:
        """Do nothing."""


class _Position:
    """Loads TorchTitan's data loader, which by itself would only warn and start the data anew if it cannot continue."""

    def __init__(self, loader: Any):
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        """Give nothing: the loader would start an iterator, with workers, and draw random numbers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        mine, size = getattr(self._loader, "_rank_id", None), getattr(self._loader, "dp_world_size", None)
        if state and mine is not None and (mine not in state or state.get("world_size") != size):
            raise StructureMismatch(
                'the data was dealt to other ranks: to start the data anew, set exclude_from_loading=["dataloader"]',
                expected=f"{mine} of {size}", found=f"{min(state)} of {state.get('world_size')}",
            )  # fmt: skip
        self._loader.load_state_dict(state)
