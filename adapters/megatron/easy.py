"""Save a Megatron training every so many iterations, with three calls in your own script: the calls of EasyCkpt.

Every ``save_mem_interval`` iterations the training is saved in the memory of the nodes. Every ``save_storage_interval``
iterations that checkpoint is also copied to the directory, in the background. The state comes from
``sharded_state_dict`` of model and optimizer. Megatron's ``save_checkpoint`` and its flags for local checkpoints are
not used. With ``in_background=True`` the directory gets Megatron's own checkpoints in its own format instead. If
mlflash is off, Megatron itself saves to the directory and loads from there.

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

import collections
import contextlib
import dataclasses
import functools
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from torch.distributed.checkpoint.api import CheckpointException

from mlflash import Checkpointer, rng
from mlflash.checkpointer.adapter_api import OwnFiles
from mlflash.errors import ConfigError, MlflashError, StructureMismatch, Unrestorable

from ..replacing import replaced
from . import persistent
from .persistent import TRACKER, MemoryOnly
from .shards import LoadShards, SaveShards

log = logging.getLogger("mlflash")

# How a distributed optimizer divides its state: by the buckets of each rank, if this Core can put these together for
# another number of data-parallel ranks.
_CUT = "dp_reshardable" if hasattr(DistributedOptimizer, "get_parameter_state_dp_reshardable") else (
    "fully_sharded_model_space")  # fmt: skip
_COUNTED = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples",
            "num_floating_point_operations_so_far")  # fmt: skip
"""Of Megatron's arguments: how far the training is."""
_PLACES = {"directory", "job", "memory"}  # settings that say where checkpoints are
_WHEN_ASKED = 1 << 31  # no drain is due by itself, but there is a third slot for drains


@dataclasses.dataclass
class _Running:
    """What belongs to one training."""

    checkpointer: Checkpointer
    save: SaveShards
    mem_interval: int
    storage_interval: int
    handler: logging.Handler | None = None  # writes the log to a file of its own
    pending: Callable[[], None] | None = None  # waits for the save that is running
    is_first: bool = True  # whether nothing was saved yet
    only_loads: bool = False  # whether `load_checkpoint` made it, before `initialize` said where checkpoints are
    files: OwnFiles | None = None  # moves Megatron's own checkpoints to the directory
    max_ckpt_num: int = 0  # number of these to keep there; 0: all
    written: collections.deque[str] = dataclasses.field(default_factory=collections.deque)  # by this training
    only: MemoryOnly | None = None  # says at the end what did not come to the directory


_running: _Running | None = None


def initialize(
    save_mem_interval: int, save_storage_interval: int, max_ckpt_num: int,
    log_file_path: str | os.PathLike[str] | None = None, enabled: bool = True, in_background: bool = False,
    **settings: Any,
) -> None:  # fmt: skip
    """Set up saving. Call it after Megatron has made its process groups.

    Collective over all ranks. You may call it after `load_checkpoint`, as EasyCkpt's page does. Then `load_checkpoint`
    looks where a Checkpointer looks by default.

    Args:
        save_mem_interval: iterations between saves in memory.
        save_storage_interval: iterations between saves to the directory. 0: save nothing there. Such a save goes to
            memory first, whatever ``save_mem_interval`` is.
        max_ckpt_num: number of checkpoints to keep in the directory. 0: all.
        log_file_path: a file to which rank 0 also writes its log.
        enabled: False, or ``MLFLASH_DISABLE=1``: nothing is saved in memory. Every ``save_storage_interval`` iterations
            Megatron's own ``save_checkpoint`` writes to ``--save``, and `load_checkpoint` calls Megatron's own.
        in_background: True: Megatron's own ``save_checkpoint`` writes the checkpoints for its ``--save`` to memory, and
            they are moved there while training continues. False: they are drained, in mlflash's format.
        settings: as those of a Checkpointer. ``directory`` is Megatron's ``--save`` by default.

    Raises:
        ConfigError: the intervals make no sense, an earlier `load_checkpoint` looked elsewhere, or Megatron itself
            writes in the background.
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
    if save_storage_interval and checkpointer.enabled:
        _running.only = only = MemoryOnly(checkpointer)
        _running.save.committed = lambda iteration: only.saved(iteration, _directory())
    if in_background and save_storage_interval and checkpointer.enabled:
        _running.files, _running.max_ckpt_num = _own_files(persistent.arguments(), checkpointer), max_ckpt_num


initialize_easyckpt = initialize
"""The same under EasyCkpt's name."""


def load_checkpoint(
    model: Any, optimizer: Any, opt_param_scheduler: Any, load_arg: str = "load", strict: bool = True,
    concat: bool = False, skip_load_to_model_and_opt: bool = False, **of_megatron: Any,
) -> Any:  # fmt: skip
    """Load the newest checkpoint of memory and the directory.

    Collective over all ranks. If there is none, and ``--load`` names another directory, it loads from there what these
    calls or Megatron wrote. If Megatron's own checkpoint in ``--load`` or ``--save`` is newer, it loads that.

    Args:
        model: a model, or the list of models that Megatron makes.
        optimizer: Megatron's optimizer. None: load none.
        opt_param_scheduler: Megatron's scheduler. None: load none.
        load_arg: the argument of Megatron that names the directory to load from.
        strict: whether the model must have exactly the parameters of the checkpoint.
        concat: True: allow another number of data-parallel ranks, and put together the parts of the optimizer's state.
        skip_load_to_model_and_opt: as Megatron's own: load into the tensors in place, and do not call
            ``load_state_dict`` of model and optimizer.
        of_megatron: ``checkpointing_context`` and other arguments of Megatron's own call. They are ignored.

    Returns:
        The iteration; 0 if there is no checkpoint. With ``checkpointing_context``, the iteration and the number of
        floating point operations so far, as Megatron's own call. It also sets Megatron's ``consumed_train_samples``.

    Raises:
        TypeError: an unknown argument, without ``checkpointing_context``.
        StructureMismatch: another number of ranks saved the checkpoint and ``concat`` is False, or its tensor or
            pipeline parallelism was another one.
        Unrestorable: there are checkpoints, but none can be loaded, and Megatron has saved none.
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
    # One after the other, so that all ranks learn of a failure before they send the messages of the next.
    wanted = together(iteration, lambda: _state_of(model, optimizer, with_rng=is_alike, is_loading=True), anew=True)
    state = together(iteration, lambda: dist_checkpointing.load(wanted, directory, load))
    if skips:
        model = optimizer = None
    together(iteration, lambda: _put(state, common, model, optimizer, opt_param_scheduler, strict))
    for name, value in common["arguments"].items():
        setattr(arguments, name, value)
    return iteration


def _put(state: Any, common: Any, model: Any, optimizer: Any, opt_param_scheduler: Any, strict: bool) -> None:
    """Put what was loaded into the objects of the training. None: skip that object."""
    for number, chunk in enumerate([] if model is None else _listed(model)):
        _unwrapped(chunk).load_state_dict(state[f"model{number}"], strict=strict)
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
    if opt_param_scheduler is not None:
        opt_param_scheduler.load_state_dict(common["opt_param_scheduler"])
    if "rng" in state:
        rng().load_state_dict(state["rng"]["generators"])
        tensor_parallel.get_cuda_rng_tracker().set_states(state["rng"]["tracker"])


def save_checkpoint_if_needed(iteration: int, model: Any, optimizer: Any, opt_param_scheduler: Any) -> None:
    """Save an iteration if it is due. Call it after each iteration.

    Collective over all ranks. When it returns, training may go on. What is due for the directory is drained in the
    background. A save that fails logs a warning at the next save, and the checkpoint before it stays.
    """
    running = _needed()
    goes_on = bool(running.storage_interval) and iteration % running.storage_interval == 0
    in_memory = running.checkpointer.enabled and iteration % running.mem_interval == 0
    if not (goes_on or in_memory):
        return
    gather(_listed(model), optimizer)
    if goes_on and (running.files is not None or not running.checkpointer.enabled):
        save = functools.partial(persistent.save, iteration, _listed(model), optimizer, opt_param_scheduler)
        save_to_directory(iteration, running, save)
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
    running.save.owned = functools.partial(changed_in_steps, _listed(model), optimizer)
    request = dist_checkpointing.save(state, running.save.directory(iteration), running.save, async_sharded_save=True,
                                      validate_access_integrity=running.is_first)  # fmt: skip
    running.is_first = False
    running.pending = request.finalize_fns[0]  # those of Megatron only mark the directory, which is not kept


def close() -> None:
    """Wait for running saves to memory and to the directory, and close. Collective over all ranks."""
    global _running
    running, _running = _running, None
    if running is None:
        return
    with contextlib.ExitStack() as stack:  # do everything, even if a part raises
        if running.handler is not None:
            stack.callback(running.handler.close)
            stack.callback(log.removeHandler, running.handler)
        if running.only is not None:
            stack.callback(running.only.end)
        stack.push(running.checkpointer.__exit__)
        if running.files is not None:
            stack.callback(running.files.close)
            running.files.finish()
        _end_pending(running)


def _newest_of_ours(checkpointer: Checkpointer, other: Any, instead: Any) -> tuple[LoadShards, str | None]:
    """Find the newest checkpoint of mlflash in memory and the directory, else in another one. Collective."""
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
    return getattr(persistent.arguments(), "save", None)


def _end_pending(running: _Running) -> None:
    pending, running.pending = running.pending, None
    if pending is not None:
        try:
            pending()
        except (MlflashError, CheckpointException) as error:
            log.warning("%s", error)


def _told_by_first(look: Callable[[], Any]) -> Any:
    """Tell all ranks what rank 0 sees, through torch.distributed: if mlflash is off, there is no MPI. Collective."""
    seen = [look() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(seen, 0)
    return seen[0]


def _layout() -> dict[str, int]:
    return {
        "ranks": dist.get_world_size(),
        "tensor parallel": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline parallel": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual pipeline": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        "expert parallel": parallel_state.get_expert_model_parallel_world_size(),
        "expert tensor parallel": parallel_state.get_expert_tensor_parallel_world_size(),
    }


def _check(saved: dict[str, int], now: dict[str, int], concat: bool, iteration: int) -> None:
    if saved == now:
        return
    names = [name for name in {**now, **saved} if name != "ranks" and saved.get(name) != now.get(name)]
    if not concat:
        why = "another layout of ranks saved the checkpoint: concat=True loads another number of data-parallel ranks"
    elif names:
        why = f"concat=True loads another number of data-parallel ranks, but no other layout of: {', '.join(names)}"
    else:
        return
    raise StructureMismatch(why, step=iteration, expected=saved, found=now)


def _state_of(model: Any, optimizer: Any, with_rng: bool, is_loading: bool = False) -> dict[str, Any]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"distrib_optim_sharding_type": _CUT, "singleton_local_shards": False,
                "chained_optim_avoid_prefix": True, "dp_cp_group": group}  # fmt: skip
    # Without a prefix: the chunks of a virtual pipeline have layers of one model, which are numbered through.
    chunks = {
        f"model{number}": _unwrapped(chunk).sharded_state_dict(prefix="", metadata=metadata)
        for number, chunk in enumerate(_listed(model))
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
    while hasattr(model, "module"):
        model = model.module
    return model


# Megatron's own checkpoints. When one has arrived, ``latest_checkpointed_iteration.txt`` names it.


def _own_files(arguments: Any, checkpointer: Checkpointer) -> OwnFiles:
    """Make what moves Megatron's own checkpoints to ``--save``. Collective over all ranks."""
    if getattr(arguments, "save", None) is None:
        raise ConfigError("in_background=True moves Megatron's own checkpoints to --save: give --save a directory")
    for flag in ("async_save", "save_retain_interval"):
        if getattr(arguments, flag, None):
            raise ConfigError("Megatron already writes, or deletes, checkpoints in the background: leave out "
                              f"in_background, or --{flag.replace('_', '-')}")  # fmt: skip
    return checkpointer.adapting.own_files()


def save_to_directory(iteration: int, running: _Running, save: Callable[[], None]) -> None:
    """Let Megatron write to its directory, or first to memory if all ranks have room there. Collective."""
    files, directory = running.files, os.path.abspath(_directory() or "")
    target = os.path.join(directory, f"iter_{iteration:07d}")
    if files is None or not files.begin(target):
        save()
        return
    from megatron.training import checkpointing

    name, tracker = checkpointing.get_checkpoint_name, checkpointing.get_checkpoint_tracker_filename
    with files.directory(target, {os.path.join(directory, TRACKER): str(iteration)}) as path:
        place = os.fspath(path.parent)

        def moved(given: Any) -> Any:
            return place if os.path.abspath(given) == directory else given

        with replaced(
            checkpointing,
            get_checkpoint_name=lambda given, *args, **more: name(moved(given), *args, **more),
            get_checkpoint_tracker_filename=lambda given: tracker(moved(given)),
        ):
            save()
    running.written.append(target)
    if running.max_ckpt_num:
        files.when_moved(lambda: _delete_oldest(running))


def _delete_oldest(running: _Running) -> None:
    """Delete the oldest checkpoints that this training wrote, beyond the number to keep."""
    while len(running.written) > running.max_ckpt_num:
        oldest = running.written.popleft()
        if running.checkpointer.adapting.ranks.rank == 0:
            shutil.rmtree(oldest, ignore_errors=True)


# Megatron's weights at a save: make them whole, and find those that change only in the optimizer's step.


_KNOWN = (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)


def gather(chunks: Sequence[Any], optimizer: Any) -> None:
    """Gather the weights that ``--overlap-param-gather`` would gather in the next forward pass.

    Before that, some weights are of the step before. Megatron's own training loop does the same before it saves.
    Collective over data-parallel ranks.
    """
    late = [chunk for chunk in chunks if _is_gathered_late(chunk)]
    if late and hasattr(optimizer, "prepare_model_params_for_param_sync"):
        optimizer.prepare_model_params_for_param_sync()
    for chunk in late:
        chunk.start_param_sync(force_sync=True)


def changed_in_steps(chunks: Sequence[Any], optimizer: Any) -> Iterable[Any]:
    """Give the weights, if only a step of the optimizer changes them, after the step of the torch optimizer inside it.

    Not collective. Otherwise give none. That is the case if weights are gathered in the forward pass or share memory
    with gradients (MXFP8), if the optimizer's class is unknown, or if this rank has no part of the optimizer, because
    then another rank may gather them first.
    """
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    if any(map(_is_gathered_late, chunks)) or not all(map(_is_known, parts)):
        return ()
    return [parameter for chunk in chunks for parameter in chunk.parameters() if type(parameter.data) is torch.Tensor]


def _is_gathered_late(chunk: Any) -> bool:
    return isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather


def _is_known(part: Any) -> bool:
    if type(part) not in _KNOWN or getattr(part, "is_stub_optimizer", False):
        return False
    return not getattr(part.config, "reuse_grad_buf_for_mxfp8_param_ag", False)
