"""Save a Lightning training in memory and choose what it starts from: the hooks of a callback, without a base class.

Lightning calls the hooks on all ranks. Its private `_checkpoint_connector` makes a checkpoint and starts from one. The
parts of it that this module uses are the same from Lightning 2.4 to 2.6.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fsspec  # comes with Lightning
import torch

from mlflash import Checkpointer
from mlflash.checkpointer.adapter_api import OwnFiles
from mlflash.checkpointer.off import turned_off
from mlflash.errors import ConfigError

from .. import intervals
from ..newest import OnDisk, newest_complete, newest_in_memory
from ..replacing import replaced
from .checkpoint_io import PREFIX, step_of_path
from .loops import StepEnds, go_on, restore_together
from .packages import take_ranks_of_launcher
from .states import ALIKE, state_of

log = logging.getLogger("mlflash")


class Flash:
    """The hooks of `MLFlashCallback`, which Lightning calls on all ranks.

    You can make it on each rank by itself. When training begins, it makes its Checkpointer over all ranks.

    Args:
        every_n_steps: save in memory if ``trainer.global_step`` is a multiple of this. Default: save whenever Lightning
            saves, through a ModelCheckpoint or ``trainer.save_checkpoint``. If Lightning does neither, nothing is
            saved, and a warning says so.
        skip_every_n_steps: do not save if the step is a multiple of this, for example where Lightning writes to disk.
        enabled: False, or ``MLFLASH_DISABLE=1``: the callback does nothing.
        directory: where checkpoints are drained or scavenged to. Default: none.
        signals: signals such as SIGUSR1, which Slurm can send before the time limit. If any rank gets one, all ranks
            agree at the end of the step to save it and stop. Default: none, because `mlflash run` handles this.
        async_save: True: training goes on while a checkpoint is protected. False: each save waits for its commit.
        in_background: True: Lightning writes its own checkpoints to memory, and the same files are moved to their place
            while training continues. False: Lightning writes each to its place, and training waits.
        settings: as those of a Checkpointer.

    Attributes:
        checkpointer: the Checkpointer, open while Lightning trains.
    """

    def __init__(
        self, every_n_steps: int | None = None, skip_every_n_steps: int | None = None, enabled: bool = True,
        directory: str | os.PathLike[str] | None = None, signals: Sequence[int] = (), async_save: bool = True,
        in_background: bool = False, **settings: Any,
    ):  # fmt: skip
        intervals.check(every_n_steps, skip_every_n_steps)
        take_ranks_of_launcher()
        super().__init__()
        self.checkpointer: Checkpointer | None = None
        self._every, self._skip, self._enabled = every_n_steps, skip_every_n_steps, enabled
        self._directory, self._signals, self._settings = directory, tuple(signals), settings
        self._waits, self._in_background = not async_save, in_background
        self._files: OwnFiles | None = None
        self._before: dict[int, Any] = {}  # what handled the signals
        self._undo = contextlib.ExitStack()
        self._told = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Open the Checkpointer, and let Lightning start from the newest checkpoint of memory and disk. Collective."""
        if stage != "fit" or turned_off(self._enabled):
            return
        if "deepspeed" in type(trainer.strategy).__name__.lower():
            raise ConfigError("DeepSpeed keeps its own state, which this adapter cannot save")
        if type(trainer.strategy).__name__ == "FSDPStrategy" and trainer.strategy.kwargs.get("device_mesh") is None:
            raise ConfigError("FSDPStrategy needs a device_mesh: without one mlflash cannot tell which part of a "
                              "tensor each shard is")  # fmt: skip
        self.checkpointer = Checkpointer(self._directory, **{**_shared(trainer), **self._settings})
        rank = self.checkpointer.adapting.ranks.rank
        if self.checkpointer.adapting.undefined and trainer.global_rank != rank:
            raise ConfigError("make the Trainer inside the function that keep_alive calls, after MLFlashCallback and "
                              "without a cluster environment", rank=rank, found=trainer.global_rank)  # fmt: skip
        self._take_over_start(trainer, trainer._checkpoint_connector)
        end_step = functools.partial(self._end_step, trainer)
        ends = StepEnds(trainer, self.checkpointer, self._every, self._skip, end_step)
        self._undo.enter_context(ends.replaced)
        if self._in_background:
            self._files = _own_files(trainer, self.checkpointer)
        for number in self._signals:
            self._before[number] = signal.signal(number, self._note_signal)
            self._undo.callback(signal.signal, number, self._before[number])

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self._files is not None:
            self._files.finish()
        self._end()

    def on_exception(self, *args: Any, **kwargs: Any) -> None:
        self._end(RuntimeError)

    def _take_over_start(self, trainer: Any, connector: Any) -> None:
        """Let Lightning start from the newest checkpoint of memory and disk."""
        start, checkpointer = connector.resume_start, self.checkpointer
        assert checkpointer is not None

        def resume_start(checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
            step, path = _choose(trainer, checkpointer, checkpoint_path)
            if step is None:
                start(path, *args, **kwargs)
                if path is not None:
                    checkpointer.adapting.loaded_elsewhere()
                return
            connector._ckpt_path = f"{PREFIX}{step}"
            connector._loaded_checkpoint, at = state_of(trainer).load(checkpointer, step)
            together = functools.partial(checkpointer.adapting.load_together, step)
            self._undo.enter_context(restore_together(connector, together))
            self._undo.enter_context(go_on(trainer.fit_loop, at, together))

        self._undo.enter_context(replaced(connector, resume_start=resume_start))

    def _end_step(self, trainer: Any, is_new: bool, is_due: bool, epoch_has_ended: bool) -> None:
        if self.checkpointer is None:
            return
        step = trainer.global_step
        is_last = is_new and bool(self._signals) and trainer.strategy.reduce_boolean_decision(self._told, all=False)
        if is_last or is_due:
            self.checkpointer.adapting.save_or_warn(step, state_of(trainer, epoch_has_ended), trainer.optimizers)
            if self._waits:
                self.checkpointer.wait()
        if is_last:
            log.warning("a signal has come: training stops after step %d", step)
            trainer.should_stop = True

    def _end(self, error: type[BaseException] | None = None) -> None:
        checkpointer, self.checkpointer = self.checkpointer, None
        files, self._files = self._files, None
        with contextlib.ExitStack() as stack:  # do everything, even if a part raises
            if files is not None:
                stack.callback(files.close)
            if checkpointer is not None:
                stack.callback(checkpointer.__exit__, error, None, None)
            stack.callback(self._undo.close)

    def _note_signal(self, number: int, frame: Any) -> None:
        self._told = True
        before = self._before[number]
        if callable(before):
            before(number, frame)


def _shared(trainer: Any) -> dict[str, Any]:
    """Give the setting that says what all ranks of DDP hold alike, so that it is stored once per node."""
    ddp = type(trainer.strategy).__name__ == "DDPStrategy"
    return {"replicated": dict.fromkeys(ALIKE, True)} if ddp and trainer.world_size > 1 else {}


def _choose(trainer: Any, checkpointer: Checkpointer, path: Any) -> tuple[int | None, Any]:
    """Choose what to start from: a step in memory, or None and the path for Lightning. Collective."""
    if path is not None and str(path).startswith(PREFIX):
        is_again = bool(checkpointer.adapting.undefined)  # `keep_alive` fits once more, because a rank was lost
        return step_of_path(checkpointer, f"{PREFIX}newest" if is_again else str(path)), path
    disk = checkpointer.adapting.seen_by_first(lambda: _look(path)) if path else OnDisk(None)
    instead = f"step {trainer.global_step}, where this trainer is" if trainer.global_step else None
    newest = newest_in_memory(checkpointer, disk, instead)
    # a second call of `fit` continues with the state of this trainer
    if newest is None or newest <= trainer.global_step:
        return None, disk.path or path  # if it is incomplete and the only one, Lightning raises its error
    return newest, path


# Checkpoints that Lightning wrote to disk


def _look(path: Any) -> OnDisk:
    torn = Path(path)
    return newest_complete(path, _step_of, lambda: (
        str(other) for other in sorted(torn.parent.glob(f"*{torn.suffix}"))
        if other != torn and other.is_dir() == torn.is_dir()
    ))  # fmt: skip


def _step_of(path: Any) -> int:
    if not os.path.exists(path):
        with fsspec.open(str(path), "rb") as remote:
            return int(torch.load(remote, map_location="meta", weights_only=False)["global_step"])
    file = Path(path, "meta.pt") if os.path.isdir(path) else path
    if file != path and not os.path.exists(file):
        raise EOFError("it has no meta.pt, which is written last")
    with open(file, "rb") as opened:
        is_zip = opened.read(2) == b"PK"  # this format can be mapped
    try:
        return int(torch.load(file, map_location="cpu", mmap=is_zip, weights_only=False)["global_step"])
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: torch looked for the end record before the first byte
            raise
        raise EOFError(f"the file is cut off: {error}") from error


# Lightning's own checkpoints. When one has arrived, links to it are made. If a ModelCheckpoint deletes something
# meanwhile, that waits until then.


def _own_files(trainer: Any, checkpointer: Checkpointer) -> OwnFiles:
    """Let Lightning write the checkpoints of one fit to memory. Collective over all ranks, as the new methods are."""
    strategy = trainer.strategy
    if any("Async" in kind.__name__ for kind in type(strategy.checkpoint_io).__mro__):
        raise ConfigError("a plugin already writes checkpoints in the background: leave out in_background, or the "
                          "plugin", found=type(strategy.checkpoint_io).__name__)  # fmt: skip
    files, write, delete = checkpointer.adapting.own_files(), strategy.save_checkpoint, strategy.remove_checkpoint

    def save(checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        target = os.fspath(strategy.broadcast(filepath))
        if "://" in target or storage_options is not None or not files.begin(target):
            write(checkpoint, filepath, storage_options)
            return
        if _writes_on_all_ranks(strategy):
            with files.directory(target) as path, replaced(strategy, broadcast=lambda what, *args: what):
                write(checkpoint, path)
        elif strategy.is_global_zero:
            with files.directory(target, alone=True) as path:
                write(checkpoint, path / path.name)
        else:
            write(checkpoint, filepath)
        files.expect(target)

    def remove(filepath: Any) -> None:
        files.remove_when_moved(filepath, functools.partial(delete, filepath))

    def link(make: Callable[..., None], trainer: Any, filepath: str, linkpath: str) -> None:
        if not files.expects(filepath):
            make(trainer, filepath, linkpath)
        elif trainer.is_global_zero:
            files.link(linkpath, filepath)

    def exists(is_there: Callable[[Any, Any], bool], filepath: Any, trainer: Any) -> bool:
        return files.would_be_there(filepath, lambda: is_there(filepath, trainer))

    files.replaced.enter_context(replaced(strategy, save_checkpoint=save, remove_checkpoint=remove))
    for callback in trainer.checkpoint_callbacks:
        if hasattr(callback, "file_exists"):  # a ModelCheckpoint
            files.replaced.enter_context(replaced(
                callback,
                file_exists=functools.partial(exists, callback.file_exists),
                _link_checkpoint=functools.partial(link, callback._link_checkpoint),
            ))  # fmt: skip
    return files


def _writes_on_all_ranks(strategy: Any) -> bool:
    """Whether a checkpoint is a directory with files of each rank."""
    return bool(getattr(strategy, "_save_distributed_checkpoint", False)) or (
        getattr(strategy, "_state_dict_type", "") == "sharded"
    )
