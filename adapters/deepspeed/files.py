"""Convert what a DeepSpeed engine writes to files to a state for the slots.

DeepSpeed gives each file to its CheckpointEngine as nested dicts with the live tensors, and a name. These dicts are the
state of the rank, and nothing is written. All ranks take part, even those that would write no file. DeepSpeed lets rank
0 write the weights of ZeRO 0 to 2 for all ranks. Here each rank saves its own, so that no rank needs another's to load.

mlflash calls only those parts of DeepSpeed's `save_checkpoint` that make the files. The rest of it waits at barriers,
where the other ranks would wait for a rank that failed. It calls DeepSpeed's `load_checkpoint` as a whole. That looks
for its files by name before it loads them, so it gets a directory with empty files. Because of this, mlflash need not
replace methods of it, and leaves nothing where your checkpoints are.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from mlflash.errors import ConfigError, StructureMismatch, WorldSizeChanged

from ..pickles import apart, together
from ..replacing import once_staged, replaced

log = logging.getLogger("mlflash")

TAG = re.compile(r"global_step(\d+)")
"""The tag that DeepSpeed gives a checkpoint if the user gives none."""
OTHER_RANKS = (
    "DeepSpeed can load its partitions only on as many ranks as saved them. For another number, convert a checkpoint "
    "in storage with ds_to_universal.py and set load_universal: mlflash does not look at memory then. To give up the "
    "checkpoint in memory, use another job name or `mlflash clean`"
)


class MemoryCheckpointEngine(CheckpointEngine):
    """Keeps what DeepSpeed would write to files, by their names, and gives it back.

    Not collective. DeepSpeed continues with the tensors that `load` gives, so nothing else may use them.

    Attributes:
        files: content of the files by name.
    """

    def __init__(self, files: dict[str, Any] | None = None):
        super().__init__()
        self.name = "mlflash"
        self.files: dict[str, Any] = {} if files is None else files

    def create(self, info: Any) -> None:
        """Begin a checkpoint: do nothing."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make no directory, because there will be no file."""

    def save(self, state_dict: Any, path: str) -> None:
        self.files[os.path.basename(path)] = state_dict

    def load(self, path: str, map_location: Any = None) -> Any:
        return self.files[os.path.basename(path)]

    def commit(self, info: Any) -> bool:
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        return True

    def preserves_storage_sharing(self) -> bool:
        """Give False, so that no tensor is cloned. Of a view of a larger tensor, only the view is saved."""
        return False


class EngineState:
    """Everything an engine continues from, as an object in a state for `Checkpointer.save`.

    Args:
        engine: DeepSpeed's engine.
        tag: tag of the checkpoint. Default: as DeepSpeed names it.
        client_state: values that you add. Each rank's own are saved.
        exclude_frozen_parameters: leave out parameters that are not trained.

    Attributes:
        client_state: as you gave it; after a load, as DeepSpeed returns it.

    Raises:
        ConfigError: the engine keeps state where mlflash cannot save it.
    """

    def __init__(
        self, engine: Any, tag: str | None = None, client_state: Mapping[str, Any] | None = None,
        exclude_frozen_parameters: bool = False,
    ):  # fmt: skip
        refuse_what_is_elsewhere(engine)
        self._engine = engine
        self._tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
        self.client_state: dict[str, Any] = dict(client_state or {})
        self._exclude = exclude_frozen_parameters

    def state_dict(self) -> dict[str, Any]:
        """Give the content of the files. Collective over all ranks with ZeRO-3, which partitions and gathers again."""
        engine, taking = self._engine, MemoryCheckpointEngine()
        has_events = engine._optimizer_has_ckpt_event_prologue()
        if has_events:
            engine.optimizer.checkpoint_event_prologue()
        try:
            with _in_use(engine, taking):
                engine._save_checkpoint("", self._tag, self.client_state, exclude_frozen_parameters=self._exclude)
                if _is_partitioned(engine):
                    engine._save_zero_checkpoint("", self._tag)
        finally:  # on all ranks, even if something failed on this one
            if has_events:
                engine.optimizer.checkpoint_event_epilogue()
        return {"tag": self._tag, "ranks": torch.distributed.get_world_size(), "files": apart(taking.files)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load everything that was not left out. Collective over all ranks. See `load`."""
        self.load(state, load_module_strict=not self._exclude)

    def files_of(self, state: dict[str, Any], **options: Any) -> dict[str, Any]:
        """Give the files in a state of `state_dict`, if they can be loaded. It changes nothing. Not collective."""
        ranks = torch.distributed.get_world_size()
        if state["ranks"] != ranks:
            raise WorldSizeChanged(OTHER_RANKS, expected=f"{state['ranks']} ranks", found=ranks)
        if self._engine.zero_optimization_partition_weights() and options.get("load_module_only"):
            raise ConfigError("with ZeRO-3 load_module_only=True loads no weights: use load_optimizer_states=False")
        files: dict[str, Any] = together(state["files"])
        if files.keys() != (names := self._names(state["tag"])):
            raise StructureMismatch("this engine has another ZeRO stage or precision than the one that was saved",
                                    expected=sorted(names), found=sorted(files))  # fmt: skip
        return files

    def load(self, state: dict[str, Any], **options: Any) -> dict[str, Any]:
        """Let DeepSpeed load a state of `state_dict`. Collective over all ranks.

        Args:
            state: the state. DeepSpeed continues with its tensors.
            options: as those of ``engine.load_checkpoint``.

        Returns:
            The client state, as DeepSpeed returns it.

        Raises:
            WorldSizeChanged: another number of ranks saved the state.
            StructureMismatch: another kind of engine saved the state.
            ConfigError: with these options nothing would be loaded.
        """
        engine, tag = self._engine, state["tag"]
        files = self.files_of(state, **options)
        for number in range(engine.mp_world_size):  # DeepSpeed counts them, and expects this number in the first
            name = os.path.basename(engine._get_ckpt_name("", tag, f"{number:02d}"))
            files.setdefault(name, {"mp_world_size": engine.mp_world_size})
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="mlflash-deepspeed-"))
            stack.enter_context(_in_use(engine, MemoryCheckpointEngine(files)))
            os.makedirs(os.path.join(directory, tag))
            for name in files:
                Path(directory, tag, name).touch()
            if engine.zero_optimization_partition_weights() and not options.get("load_optimizer_states", True):
                # DeepSpeed would build the weights from the files of all ranks. Here each rank has its shard.
                options = {**options, "load_optimizer_states": True}
                stack.enter_context(_weights_only(engine.optimizer))
            # The method of the class, because `attach` replaces the engine's.
            _, self.client_state = type(engine).load_checkpoint(engine, directory, tag, **options)
        return self.client_state

    def _names(self, tag: str) -> set[str]:
        engine = self._engine
        paths = [engine._get_ckpt_name("", tag)]
        if _is_partitioned(engine):
            paths.append(engine._get_zero_ckpt_name("", tag))
        return {os.path.basename(path) for path in paths}


def alike(engine: Any, name: str) -> dict[str, Any]:
    """Give ``replicated`` for a Checkpointer: the entries of an `EngineState` that data-parallel ranks hold alike.

    Not collective.

    Args:
        engine: DeepSpeed's engine.
        name: key of the `EngineState` in the state.

    Returns:
        A dict from name patterns to the process group: the weights, unless ZeRO-3 is used, and with ZeRO 0 also the
        optimizer. Empty if no entry is the same on several ranks.
    """
    group = engine.seq_data_parallel_group
    if engine.zero_optimization_partition_weights() or torch.distributed.get_world_size(group) == 1:
        return {}
    parts = ("module",) if _is_partitioned(engine) else ("module", "optimizer")
    return {part_of(name, part): group for part in parts}


def part_of(name: str, part: str) -> str:
    """Give the name pattern of a part of an `EngineState`, such as ``module``. Not collective."""
    return f"{name}.files.tree.mp_rank_*.{part}.*"


def step_on_disk(engine: Any, load_dir: str | os.PathLike[str], tag: str | None) -> int | None:
    """Give the step of a checkpoint that DeepSpeed wrote. None if there is none, or if it cannot be read."""
    try:
        tag = Path(load_dir, "latest").read_text().strip() if tag is None else str(tag)
    except OSError:
        return None
    names = engine._get_all_ckpt_names(load_dir, tag)
    if not names:
        return None
    if named := TAG.fullmatch(tag):
        return int(named[1])
    try:
        try:
            return int(torch.load(names[0], map_location="cpu", mmap=True, weights_only=False)["global_steps"])
        except RuntimeError:  # not in the format that can be mapped
            return int(engine.checkpoint_engine.load(names[0], map_location="cpu")["global_steps"])
    except (OSError, EOFError, KeyError, RuntimeError, pickle.UnpicklingError) as error:
        log.warning("the step of %s is not known (%s): mlflash assumes that memory is newer", names[0], error)
        return None


def refuse_what_is_elsewhere(engine: Any) -> None:
    """Refuse an engine whose ranks do not each save everything that they load. Not collective."""
    if isinstance(engine, PipelineEngine):
        raise ConfigError("mlflash cannot save a pipeline engine: its ranks divide the files of the layers among them, "
                          "and no rank has all that it loads")  # fmt: skip
    if engine.has_moe_layers:
        raise ConfigError("mlflash cannot save an engine with experts (MoE): its ranks divide the files of the "
                          "experts among them, and no rank has all that it loads")  # fmt: skip
    if engine.zero_nvme_offload_optimizer():
        raise ConfigError("mlflash cannot save this engine: the optimizer's state is on NVMe, and DeepSpeed copies it "
                          "from file to file")  # fmt: skip
    if (offload := engine.zero_offload_param()) is not None and offload.device == "nvme":
        raise ConfigError("mlflash cannot save this engine: the parameters are on NVMe")
    if engine.zero_elastic_checkpoint():
        raise ConfigError("with elastic_checkpoint a rank loads what all ranks saved, and mlflash gives it only its "
                          "own: leave out elastic_checkpoint")  # fmt: skip
    if engine.checkpoint_engine is None:
        raise ConfigError("this engine has no optimizer, and DeepSpeed saves no checkpoint of it")


def _is_partitioned(engine: Any) -> bool:
    """Whether each rank has a part of the optimizer's state in a file of its own."""
    return hasattr(engine.optimizer, "dp_process_group")


def _in_use(engine: Any, checkpoint_engine: MemoryCheckpointEngine) -> contextlib.ExitStack:
    return replaced(engine, checkpoint_engine=checkpoint_engine, save_non_zero_checkpoint=True,
                    _copy_recovery_script=lambda path: None)  # fmt: skip


def _weights_only(optimizer: Any) -> contextlib.ExitStack:
    """Let a ZeRO-3 optimizer load its shard of the weights, but not its own state."""
    load = optimizer.load_state_dict

    def load_weights(*args: Any, **options: Any) -> None:
        load(*args, **{**options, "load_optimizer_states": False})

    return replaced(optimizer, load_state_dict=load_weights)


# Where an engine changes weights and the optimizer's state: only in the step of `engine.optimizer`. That step calls the
# step of the optimizer that the user gave, whose tensors are the shards (of ZeRO) in full precision, and makes the
# weights from these. ZeRO-3 puts its shards together before each layer, which does not change them.


_KNOWN = {"DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "BF16_Optimizer", "FP16_Optimizer",
          "FP16_UnfusedOptimizer"}  # fmt: skip
"""Optimizers that change tensors only in their step. Those of SuperOffload and ZenFlow step while training goes on."""


def optimizers_of(engine: Any) -> list[Any] | str:
    """Give the optimizer in whose step an engine changes weights, or say why that is not known. Not collective."""
    optimizer = engine.optimizer
    if type(engine) is not DeepSpeedEngine:
        return f"a {type(engine).__name__} may change weights elsewhere than in its optimizer's step"
    if getattr(optimizer, "zenflow", False) or getattr(engine, "_deepcompile_active", False):
        return "ZenFlow and DeepCompile change or move the weights while training goes on"
    if isinstance(optimizer, torch.optim.Optimizer):
        return [optimizer]
    if type(optimizer).__name__ not in _KNOWN:
        return f"mlflash does not know where {type(optimizer).__name__} changes weights"
    return [optimizer.optimizer]


def owned_by(engine: Any) -> Iterable[Any]:
    """Give the weights if they change only in that step. With ZeRO-3 give none, because they are freed and gathered."""
    return () if engine.zero_optimization_partition_weights() else engine.module.parameters()


def steps_once_staged(engine: Any, wait_staged: Callable[[], None]) -> contextlib.ExitStack:
    """Let that step first wait until saves have copied everything. Close the result to undo it. Not collective."""
    return replaced(engine.optimizer, step=once_staged(wait_staged, engine.optimizer.step))
