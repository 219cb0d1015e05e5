"""Saving every so many iterations, by three calls in a Megatron script of one's own: the calls of EasyCkpt.

Every ``save_mem_interval`` iterations the training is saved in the memory of the nodes; every ``save_storage_interval``
iterations it goes on from there to the directory, in the background. Neither Megatron's ``save_checkpoint`` nor its
flags for local checkpoints are used; what is saved comes from ``sharded_state_dict`` of model and optimizer. With
``in_background=True`` what goes to the directory is Megatron's own checkpoint, in its own format, written behind
training. Where mlflash is off Megatron itself saves what would go to the directory, and loads it.

Example:
    from mlflash.adapters.megatron import easy

    easy.initialize(save_mem_interval=1, save_storage_interval=50, max_ckpt_num=5)
    iteration = easy.load_checkpoint(model, optimizer, opt_param_scheduler)
    while iteration < args.train_iters:
        train_step(...)
        iteration += 1
        easy.save_checkpoint_if_needed(iteration, model, optimizer, opt_param_scheduler)
    easy.close()
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint.api import CheckpointException

from mlflash import Checkpointer, rng
from mlflash.errors import ConfigError, MlflashError, StructureMismatch, Unrestorable

from . import persistent, weights
from .own_files import OwnFiles
from .shards import LoadShards, SaveShards

log = logging.getLogger("mlflash")

# How a distributed optimizer cuts its state: by the buckets of each rank, where this Core can put them together for
# another number of data-parallel ranks.
_CUT = "dp_reshardable" if hasattr(DistributedOptimizer, "get_parameter_state_dp_reshardable") else (
    "fully_sharded_model_space")  # fmt: skip
_COUNTED = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples",
            "num_floating_point_operations_so_far")  # fmt: skip
"""Of Megatron's arguments: how far the training is."""
_PLACES = {"directory", "job", "memory"}  # settings that say where checkpoints are
_WHEN_ASKED = 1 << 31  # no checkpoint is due for draining by itself; but there is a third slot for it


@dataclasses.dataclass
class _Running:
    """What belongs to one training.

    Attributes:
        handler: writes the log to a file of its own.
        pending: waits for the save on its way.
        is_first: whether nothing was saved yet.
        only_loads: whether it was made by `load_checkpoint`, before `initialize` had said where.
        files: take Megatron's own checkpoints to the directory.
    """

    checkpointer: Checkpointer
    save: SaveShards
    mem_interval: int
    storage_interval: int
    handler: logging.Handler | None = None
    pending: Callable[[], None] | None = None
    is_first: bool = True
    only_loads: bool = False
    files: OwnFiles | None = None


_running: _Running | None = None


def initialize(
    save_mem_interval: int,
    save_storage_interval: int,
    max_ckpt_num: int,
    log_file_path: str | os.PathLike[str] | None = None,
    enabled: bool = True,
    in_background: bool = False,
    **settings: Any,
) -> None:
    """Set up saving; after Megatron's process groups are there.

    Collective over all ranks. It may come after `load_checkpoint`, as on EasyCkpt's page, which then looks where a
    Checkpointer looks by default.

    Args:
        save_mem_interval: iterations from one save in memory to the next.
        save_storage_interval: iterations from one that goes to the directory to the next; 0: none does. It is saved in
            memory first, whatever ``save_mem_interval`` is.
        max_ckpt_num: how many of them stay there; 0: all.
        log_file_path: file that rank 0's log goes to, besides.
        enabled: False, or ``MLFLASH_DISABLE=1``: nothing is in memory. Every ``save_storage_interval`` iterations
            Megatron's own ``save_checkpoint`` writes to ``--save``, and `load_checkpoint` is Megatron's own.
        in_background: what goes to the directory, Megatron's ``--save``, is written by Megatron's own
            ``save_checkpoint``, to memory, and moved there behind training. Default: drained, in mlflash's format.
        settings: as those of a Checkpointer. ``directory`` is Megatron's ``--save`` by default.

    Raises:
        ConfigError: the intervals make no sense, `load_checkpoint` has looked elsewhere before, or Megatron writes
            behind training itself.
    """
    global _running
    moved = [f"{name}={settings[name]!r}" for name in sorted(_PLACES & settings.keys())]
    if _running is not None and _running.only_loads and moved:
        raise ConfigError("load_checkpoint was called before initialize, so it could not know where to look: call "
                          "initialize first", found=", ".join(moved))  # fmt: skip
    if save_mem_interval < 1 or save_storage_interval < 0:
        raise ConfigError("the intervals must be numbers of iterations",
                          expected="save_mem_interval of 1 or more, save_storage_interval of 0 or more",
                          found=f"{save_mem_interval} and {save_storage_interval}")  # fmt: skip
    close()
    handler = None
    if log_file_path is not None and dist.get_rank() == 0:
        handler = logging.FileHandler(log_file_path)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(handler)
        log.setLevel(min(log.level or logging.INFO, logging.INFO))
    directory = settings.pop("directory", _directory())
    drains = bool(save_storage_interval) and not in_background
    drained = {"drain_every": _WHEN_ASKED, "keep_last": max_ckpt_num} if drains else {}
    checkpointer = Checkpointer(directory, enabled=enabled, **{**drained, **settings})
    _running = _Running(checkpointer, SaveShards(checkpointer), save_mem_interval, save_storage_interval, handler)
    if in_background and save_storage_interval and checkpointer.enabled:
        _running.files = OwnFiles(persistent.arguments(), checkpointer, max_ckpt_num)


initialize_easyckpt = initialize
"""EasyCkpt's name of it."""


def load_checkpoint(
    model: Any, optimizer: Any, opt_param_scheduler: Any, load_arg: str = "load", strict: bool = True,
    concat: bool = False, skip_load_to_model_and_opt: bool = False, **of_megatron: Any,
) -> Any:  # fmt: skip
    """Load the newest checkpoint that memory, or the directory, can give.

    Collective over all ranks. Where there is none, that of ``--load`` is loaded, if it is another directory: one that
    these calls have written, or Megatron. So it is where Megatron's own is newer, in ``--load`` or ``--save``.

    Args:
        model: one, or the list of them that Megatron makes.
        optimizer: Megatron's; None: without.
        opt_param_scheduler: Megatron's; None: without.
        load_arg: which of Megatron's arguments names that directory.
        strict: whether the model must have exactly the parameters of the checkpoint.
        concat: allow another number of data-parallel ranks: what each held of the optimizer's state is put together.
        skip_load_to_model_and_opt: as Megatron's own: what is loaded into tensors in place is enough, and the
            ``load_state_dict`` of model and optimizer is not called.
        of_megatron: ``checkpointing_context``, and what else Megatron calls its own with; it is not looked at.

    Returns:
        The iteration; 0 where there is no checkpoint. Megatron's ``consumed_train_samples`` are set. Where
        ``checkpointing_context`` is given, the iteration and the floating point operations so far, as Megatron's own.

    Raises:
        TypeError: an argument that is not known, in a call that is not Megatron's.
        StructureMismatch: it was saved by another number of ranks, and ``concat`` is False; or with other tensor or
            pipeline parallelism.
        Unrestorable: checkpoints are there, none of them can be loaded, and Megatron has saved none.
    """
    if of_megatron and "checkpointing_context" not in of_megatron:
        raise TypeError(f"load_checkpoint() has no argument {', '.join(of_megatron)}")
    iteration = _load(model, optimizer, opt_param_scheduler, load_arg, strict, concat, skip_load_to_model_and_opt)
    if not of_megatron:
        return iteration
    return iteration, getattr(persistent.arguments(), "num_floating_point_operations_so_far", 0)


def _load(model: Any, optimizer: Any, opt_param_scheduler: Any, load_arg: str, strict: bool, concat: bool,
          skips: bool) -> int:  # fmt: skip
    global _running
    if _running is None:
        checkpointer = Checkpointer(_directory())
        _running = _Running(checkpointer, SaveShards(checkpointer), 1, 0, only_loads=True)
    running, arguments = _running, persistent.arguments()
    if not running.checkpointer.enabled:
        which = _told_by_first(lambda: persistent.newest(arguments, load_arg))[1]
        return persistent.load(_listed(model), optimizer, opt_param_scheduler, which, strict)
    _end_pending(running)
    if running.files is not None:
        running.files.finish()
    chosen = getattr(arguments, load_arg, None)
    theirs, which = running.checkpointer.adapting.seen_by_first(lambda: persistent.newest(arguments, load_arg))
    other = chosen if chosen != getattr(arguments, "save", None) else None
    load, directory = _newest_of_ours(running.checkpointer, other, getattr(arguments, which, None) if theirs else None)
    common = {} if directory is None else load.common(directory)
    if theirs > common.get("iteration", 0):
        return persistent.load(_listed(model), optimizer, opt_param_scheduler, which, strict)
    if directory is None:
        return 0
    layout = _layout()
    iteration: int = common["iteration"]
    _check(common["layout"], layout, concat, iteration)
    together, is_alike = running.checkpointer.adapting.load_together, common["layout"] == layout
    # Each by itself: a rank that fails beside the messages of the next one is heard of at once.
    wanted = together(iteration, lambda: _state_of(model, optimizer, with_rng=is_alike, is_loading=True), anew=True)
    state = together(iteration, lambda: dist_checkpointing.load(wanted, directory, load))
    if skips:
        model = optimizer = None
    together(iteration, lambda: _put(state, common, model, optimizer, opt_param_scheduler, strict))
    for name, value in common["arguments"].items():
        setattr(arguments, name, value)
    return iteration


def _put(state: Any, common: Any, model: Any, optimizer: Any, opt_param_scheduler: Any, strict: bool) -> None:
    """Put what was loaded into what there is; None: leave it."""
    for number, one in enumerate([] if model is None else _listed(model)):
        _unwrapped(one).load_state_dict(state[f"model{number}"], strict=strict)
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
    if opt_param_scheduler is not None:
        opt_param_scheduler.load_state_dict(common["opt_param_scheduler"])
    if "rng" in state:
        rng().load_state_dict(state["rng"]["generators"])
        tensor_parallel.get_cuda_rng_tracker().set_states(state["rng"]["tracker"])


def save_checkpoint_if_needed(iteration: int, model: Any, optimizer: Any, opt_param_scheduler: Any) -> None:
    """Save an iteration, if it is one of those; to be called after each.

    Collective over all ranks. When it returns the training may go on; what is due for the directory is drained behind.
    A save that fails is a warning at the next one, and the checkpoint before it stays.
    """
    running = _needed()
    goes_on = bool(running.storage_interval) and iteration % running.storage_interval == 0
    in_memory = running.checkpointer.enabled and iteration % running.mem_interval == 0
    if not (goes_on or in_memory):
        return
    weights.gather(_listed(model), optimizer)
    if goes_on and (running.files is not None or not running.checkpointer.enabled):
        save = functools.partial(persistent.save, iteration, _listed(model), optimizer, opt_param_scheduler)
        save() if running.files is None else running.files.save(iteration, save)
        goes_on = False
    if not (goes_on or in_memory):
        return
    _end_pending(running)
    arguments = persistent.arguments()
    state = _state_of(model, optimizer, with_rng=True)
    state |= {
        "iteration": iteration,
        "layout": _layout(),
        "opt_param_scheduler": None if opt_param_scheduler is None else opt_param_scheduler.state_dict(),
        "arguments": {name: getattr(arguments, name) for name in _COUNTED if hasattr(arguments, name)},
    }
    if goes_on:
        running.checkpointer.adapting.ask_drain()
    running.save.owned = functools.partial(weights.changed_in_steps, _listed(model), optimizer)
    request = dist_checkpointing.save(state, running.save.directory(iteration), running.save, async_sharded_save=True,
                                      validate_access_integrity=running.is_first)  # fmt: skip
    running.is_first = False
    running.pending = request.finalize_fns[0]  # those of Megatron only mark the directory, which is not kept


def close() -> None:
    """Wait for what is on its way to memory and to the directory, and end. Collective over all ranks."""
    global _running
    running, _running = _running, None
    if running is None:
        return
    with contextlib.ExitStack() as stack:  # all of it is done, whatever a part of it raises
        if running.handler is not None:
            stack.callback(running.handler.close)
            stack.callback(log.removeHandler, running.handler)
        stack.push(running.checkpointer.__exit__)
        if running.files is not None:
            stack.callback(running.files.close)
            running.files.finish()
        _end_pending(running)


def _newest_of_ours(checkpointer: Checkpointer, other: Any, instead: Any) -> tuple[LoadShards, str | None]:
    """Find the newest checkpoint of mlflash in memory and the directory, else in another one. Collective.

    Args:
        other: it; None: there is none.
        instead: Megatron's own, where there is one, so that checkpoints which cannot be used are a warning.

    Raises:
        Unrestorable: checkpoints are there, none of them can be loaded, and there is nothing else.
    """
    unusable: Unrestorable | None = None
    for source in (None, other) if other is not None else (None,):
        load = LoadShards(checkpointer, source)
        try:
            directory = load.directory()
        except Unrestorable as error:  # the same on all ranks
            unusable = unusable or error
            continue
        if directory is not None:
            if unusable is not None:
                checkpointer.adapting.go_on_instead(unusable, source)
            return load, directory
    if unusable is not None:
        checkpointer.adapting.go_on_instead(unusable, instead)
    return load, None


def _needed() -> _Running:
    if _running is None or _running.only_loads:
        raise ConfigError("call initialize() first")
    return _running


def _directory() -> Any:
    """Where checkpoints go by default."""
    return getattr(persistent.arguments(), "save", None)


def _end_pending(running: _Running) -> None:
    """Wait for the save on its way."""
    pending, running.pending = running.pending, None
    if pending is not None:
        try:
            pending()
        except (MlflashError, CheckpointException) as error:
            log.warning("%s", error)


def _told_by_first(look: Callable[[], Any]) -> Any:
    """What rank 0 sees, told to all by torch.distributed, as there is no MPI where mlflash is off. Collective."""
    told = [look() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told, 0)
    return told[0]


def _layout() -> dict[str, int]:
    return {
        "ranks": dist.get_world_size(),
        "tensor parallel": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline parallel": parallel_state.get_pipeline_model_parallel_world_size(),
    }


def _check(saved: dict[str, int], here: dict[str, int], concat: bool, iteration: int) -> None:
    """Refuse a layout that cannot be loaded."""
    if saved == here:
        return
    if not concat:
        why = "another layout of ranks saved the checkpoint: concat=True loads another number of data-parallel ranks"
    elif {**saved, "ranks": 0} != {**here, "ranks": 0}:
        why = "concat=True loads another number of data-parallel ranks, but no other tensor or pipeline parallelism"
    else:
        return
    raise StructureMismatch(why, step=iteration, expected=saved, found=here)


def _state_of(model: Any, optimizer: Any, with_rng: bool, is_loading: bool = False) -> dict[str, Any]:
    """What is saved of a training, as Megatron's own sharded state."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"distrib_optim_sharding_type": _CUT, "singleton_local_shards": False,
                "chained_optim_avoid_prefix": True, "dp_cp_group": group}  # fmt: skip
    chunks = {
        f"model{number}": _unwrapped(one).sharded_state_dict(
            prefix=f"model{number}." if number else "", metadata=metadata
        )
        for number, one in enumerate(_listed(model))
    }
    state: dict[str, Any] = dict(chunks)
    if optimizer is not None:
        of = chunks["model0"] if len(chunks) == 1 else chunks
        state["optimizer"] = optimizer.sharded_state_dict(of, is_loading=is_loading, metadata=metadata)
    if with_rng:
        numbers = {
            "generators": rng().state_dict(),
            "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
        }
        state["rng"] = ShardedObject("rng", numbers, (dist.get_world_size(),), (dist.get_rank(),))
    return state


def _listed(model: Any) -> Sequence[Any]:
    return model if isinstance(model, list) else [model]


def _unwrapped(model: Any) -> Any:
    """The model without what DDP and mixed precision put around it."""
    while hasattr(model, "module"):
        model = model.module
    return model
