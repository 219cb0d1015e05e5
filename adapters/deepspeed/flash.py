"""Decide when a DeepSpeed engine is saved, in memory or storage or both, and which checkpoint it starts from."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

from mlflash import Checkpointer, rng
from mlflash.checkpointer.adapter_api import OwnFiles
from mlflash.checkpointer.off import turned_off
from mlflash.errors import ConfigError, StepNotFound, StructureMismatch, Unrestorable, WorldSizeChanged

from .. import intervals
from ..newest import OnDisk
from ..replacing import replaced
from .files import (
    OTHER_RANKS,
    TAG,
    EngineState,
    alike,
    optimizers_of,
    owned_by,
    refuse_what_is_elsewhere,
    step_on_disk,
    steps_once_staged,
)


def attach(
    engine: Any, every_n_steps: int | None = None, skip_every_n_steps: int | None = None,
    storage_every: int | None = None, enabled: bool = True, directory: str | os.PathLike[str] | None = None,
    in_background: bool = False, **settings: Any,
) -> Flash:  # fmt: skip
    """Give an engine checkpoints in memory. Call it before the engine's `load_checkpoint`.

    Collective over all ranks. After this call ``engine.load_checkpoint`` takes the newest checkpoint of memory and
    disk.

    Args:
        engine: the engine that ``deepspeed.initialize`` returned.
        every_n_steps: `Flash.save_if_needed` saves if ``engine.global_steps`` is a multiple of this. Default: it saves
            at each call. Then ``engine.save_checkpoint`` also saves in memory, unless you give ``storage_every``.
        skip_every_n_steps: do not save if the step is a multiple of this.
        storage_every: see `Flash`.
        enabled: False, or ``MLFLASH_DISABLE=1``: nothing happens, and the engine keeps its own methods.
        directory: where checkpoints are drained or scavenged to. Default: none.
        in_background: True: ``engine.save_checkpoint`` writes its files to memory, and they are moved to ``save_dir``
            while training continues. False: it writes them to ``save_dir``, and training waits.
        settings: as those of a Checkpointer.

    Raises:
        ConfigError: the intervals make no sense, the engine keeps state where mlflash cannot save it, or with
            ``in_background`` the engine itself writes files in the background.
    """
    return Flash(engine, every_n_steps, skip_every_n_steps, storage_every, enabled, directory, in_background, settings)


class Flash:
    """Checkpoints of a DeepSpeed engine in memory. `attach` makes it. Use it as a context manager, or call `close`.

    Args:
        engine, every_n_steps, skip_every_n_steps, enabled, directory, in_background, settings: see `attach`.
        storage_every: what ``engine.save_checkpoint`` does. A number k: it saves in memory, and each k-th call also
            writes to storage; with 0 no call does. None: it writes to storage, as without mlflash. It then also saves
            in memory, if you gave no ``every_n_steps`` and memory does not have the step yet.

    Attributes:
        storage_every: you may change it at any time, to the same value on all ranks. If you change it to None,
            ``engine.save_checkpoint`` writes to storage only, as without mlflash.
        checkpointer: the Checkpointer. None if mlflash is off.
    """

    def __init__(self, engine: Any, every_n_steps: int | None, skip_every_n_steps: int | None,
                 storage_every: int | None, enabled: bool, directory: Any, in_background: bool,
                 settings: dict[str, Any]):  # fmt: skip
        intervals.check(every_n_steps, skip_every_n_steps)
        if storage_every is not None and storage_every < 0:
            raise ConfigError("storage_every must be 0 or more", found=storage_every)
        self.storage_every = storage_every
        self.checkpointer: Checkpointer | None = None
        self._engine, self._every, self._skip = engine, every_n_steps, skip_every_n_steps
        self._step = engine.global_steps
        self._is_told_nothing = every_n_steps is None and storage_every is None  # when to save in memory
        self._calls = 0  # calls of engine.save_checkpoint since the last one to storage
        self._methods = contextlib.ExitStack()  # the replaced methods of the engine
        self._files: OwnFiles | None = None
        if turned_off(enabled):
            return
        refuse_what_is_elsewhere(engine)
        if in_background and engine.checkpoint_engine.is_decoupled():
            raise ConfigError("DeepSpeed already writes checkpoints in the background: leave out in_background, or "
                              "DeepSpeed's own checkpoint engine for that",
                              found=type(engine.checkpoint_engine).__name__)  # fmt: skip
        shared = alike(engine, "engine")
        settings = {**({"replicated": shared} if shared else {}), **settings}
        self._open = functools.partial(Checkpointer, directory, **settings)
        self.checkpointer = self._open()
        self._save, self._load = engine.save_checkpoint, engine.load_checkpoint
        self._files = self.checkpointer.adapting.own_files() if in_background else None
        self._methods = replaced(engine, save_checkpoint=self._save_checkpoint, load_checkpoint=self._load_checkpoint)
        self._methods.enter_context(steps_once_staged(engine, self.wait_staged))
        own = "save_if_needed or engine.save_checkpoint is called"
        intervals.say(self.checkpointer, every_n_steps, skip_every_n_steps, own)
        if None not in (every_n_steps, storage_every):
            intervals.say(self.checkpointer, None, None, "engine.save_checkpoint is called, too")

    # Saving

    def save_if_needed(
        self, client_state: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None, tag: str | None = None
    ) -> bool:
        """Save in memory if a step has ended and is due. Call it after each ``engine.step()``.

        Collective over all ranks.

        Args:
            client_state: see `save`; or a function that gives it, which is called only for a save.
            tag: see `save`.

        Returns:
            Whether the step was due.
        """
        step = self._engine.global_steps
        if self.checkpointer is None or step == self._step:  # gradients are still summed up
            return False
        self._step = step
        if not intervals.is_due(step, self._every, self._skip):
            return False
        self.save(client_state() if callable(client_state) else client_state, tag)
        return True

    def save(
        self, client_state: Mapping[str, Any] | None = None, tag: str | None = None,
        exclude_frozen_parameters: bool = False,
    ) -> None:  # fmt: skip
        """Save in memory now.

        Collective over all ranks, but no rank waits for another. If it fails on any rank, that is a warning, and the
        checkpoint before it stays.

        Args:
            client_state: values to save. Each rank's own are saved, and ``load_checkpoint`` returns them.
            tag: tag of the checkpoint. Default: as DeepSpeed names it.
            exclude_frozen_parameters: leave out parameters that are not trained.
        """
        if self.checkpointer is None:
            return
        self._step = step = self._engine.global_steps
        state = {
            "engine": EngineState(self._engine, tag, client_state, exclude_frozen_parameters),
            "rng": rng(),
            "tracker": get_cuda_rng_tracker().get_states(),
            "calls": self._calls,
        }
        engine, owned = self._engine, functools.partial(owned_by, self._engine)
        self.checkpointer.adapting.save_or_warn(step, state, optimizers_of(engine), owned)

    def wait_staged(self) -> None:
        """Copy everything that saves so far have not copied yet.

        Call it before anything other than the engine's own step changes weights or the optimizer's state, for example
        before ``safe_set_full_fp32_param``. Not collective.
        """
        if self.checkpointer is not None:
            self.checkpointer.adapting.wait_staged()

    def _save_checkpoint(
        self, save_dir: str, tag: str | None = None, client_state: Any = None, save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:  # fmt: skip
        to_storage = self.storage_every is None
        if self.storage_every is not None:
            self._calls += 1
            to_storage = self.storage_every > 0 and self._calls >= self.storage_every
            self._calls = 0 if to_storage else self._calls
            self.save(client_state, tag, exclude_frozen_parameters)
        elif self._is_told_nothing:
            assert self.checkpointer is not None
            step = self._engine.global_steps
            if step != self.checkpointer.last_step and intervals.is_due(step, None, self._skip):
                self.save(client_state, tag, exclude_frozen_parameters)
        if to_storage:
            tag = f"global_step{self._engine.global_steps}" if tag is None else str(tag)
            self._save_to_storage(save_dir, tag, client_state or {}, save_latest, exclude_frozen_parameters)
        return True

    def _save_to_storage(self, save_dir: str, tag: str, client_state: Any, save_latest: bool, exclude: bool) -> None:
        """Let DeepSpeed write to storage, or to memory with ``in_background``, unless some rank has no room there."""
        engine, files, target = self._engine, self._files, os.path.abspath(os.path.join(save_dir, tag))
        # no rank can wait for files on another node
        if files is None or engine.use_node_local_storage() or not files.begin(target):
            self._save(save_dir, tag, client_state, save_latest, exclude)
            return
        notes = {os.path.join(os.path.dirname(target), "latest"): tag} if save_latest else {}
        if engine.global_rank == 0:
            os.makedirs(save_dir, exist_ok=True)
        copy_script = engine._copy_recovery_script  # the script belongs next to the checkpoints, not into one
        with (
            files.directory(target, notes) as path,
            replaced(engine, _copy_recovery_script=lambda folder: copy_script(save_dir)),
        ):
            self._save(os.fspath(path.parent), tag, client_state, False, exclude)

    # Loading

    def steps(self) -> list[int]:
        """List the steps that can be loaded from memory or the directory, ascending. Collective over all ranks."""
        return [] if self.checkpointer is None else self.checkpointer.steps()

    def load(self, step: int | None = None, **options: Any) -> tuple[str | None, dict[str, Any] | None]:
        """Load from memory or the directory, without regard to DeepSpeed's own checkpoints on disk.

        Collective over all ranks.

        Args:
            step: the step to load. None: the newest.
            options: as those of ``engine.load_checkpoint``.

        Returns:
            The same as ``engine.load_checkpoint``, but a text that says where the checkpoint came from instead of the
            path.

        Raises:
            StepNotFound: there is no such step.
            WorldSizeChanged: another number of ranks saved it.
        """
        found = self._read(step)
        return (None, None) if found is None else self._give(*found, options)

    def _load_checkpoint(self, load_dir: str, tag: str | None = None, *args: Any, **options: Any) -> Any:
        names = ("load_module_strict", "load_optimizer_states", "load_lr_scheduler_states", "load_module_only",
                 "custom_load_fn")  # fmt: skip
        options |= dict(zip(names, args, strict=False))
        self.wait_staged()
        if self._files is not None:
            self._files.finish()
        if not self._engine.load_universal_checkpoint():
            assert self.checkpointer is not None
            step = self.checkpointer.adapting.seen_by_first(lambda: step_on_disk(self._engine, load_dir, tag))
            disk = OnDisk(None if step is None else f"step {step} in {load_dir}", step)
            found = None
            try:
                found = self._read() if tag is None else self._read_tag(str(tag))
            except WorldSizeChanged as error:
                if error.step is None or not disk.is_newer(error.step):
                    raise
            except Unrestorable as error:  # the same on all ranks
                self.checkpointer.adapting.go_on_instead(error, disk.path)
            if found is not None and not disk.is_newer(found[0]):
                return self._give(*found, options)
        result = self._load(load_dir, tag, **options)
        self._calls = 0
        self._go_on()
        return result

    def _read(self, step: int | None = None) -> tuple[int, dict[str, Any]] | None:
        """Read a step, or the newest one, from memory or the directory. Collective over all ranks."""
        if self.checkpointer is None:
            return None
        try:
            step, state = self.checkpointer.load(step)
        except WorldSizeChanged as error:
            raise WorldSizeChanged(OTHER_RANKS, step=error.step, expected=error.expected, found=error.found) from error
        if step is None:
            return None
        if not isinstance(state, dict) or state.keys() != {"engine", "rng", "tracker", "calls"}:
            raise StructureMismatch("this checkpoint was not saved through mlflash.adapters.deepspeed: give this "
                                    "training a job name of its own", step=step)  # fmt: skip
        return step, state

    def _read_tag(self, tag: str) -> tuple[int, dict[str, Any]] | None:
        """Read the newest checkpoint with a tag. Collective over all ranks."""
        named = TAG.fullmatch(tag)
        reasons: dict[int, str] = {}
        steps = self.steps()
        if not steps and self.checkpointer is not None:
            self.checkpointer.adapting.newest_step()  # raises if there are checkpoints that cannot be used
        for step in reversed(steps):
            if named is not None and step != int(named[1]):
                continue
            try:
                found = self._read(step)
            except StepNotFound as error:  # it was damaged
                reasons[step] = str(error)
                continue
            if found is not None and found[1]["engine"]["tag"] == tag:
                return found
        if reasons:
            raise Unrestorable(f"no checkpoint with the tag {tag!r} can be loaded", reasons=reasons)
        return None

    def _give(self, step: int, state: dict[str, Any], options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Put into the engine what was read. Collective over all ranks."""
        engine = EngineState(self._engine)

        def put() -> dict[str, Any]:
            client_state = engine.load(state["engine"], **options)
            rng().load_state_dict(state["rng"])
            get_cuda_rng_tracker().set_states(state["tracker"])
            return client_state

        assert self.checkpointer is not None
        together = self.checkpointer.adapting.load_together
        together(step, lambda: engine.files_of(state["engine"], **options), anew=True)
        client_state = together(step, put)
        self._calls = state["calls"]
        self._go_on()
        return f"step {step} of mlflash", client_state

    def _go_on(self) -> None:
        self._step = self._engine.global_steps
        assert self.checkpointer is not None
        if (self.checkpointer.last_step or 0) > self._step:  # within one Checkpointer steps only grow
            self.checkpointer.close()
            self.checkpointer = self._open()
            if self._files is not None:
                self._files.close()
                self._files = self.checkpointer.adapting.own_files()

    # Ending

    def close(self) -> None:
        """Wait for running saves, and give the engine its own methods back. Collective. You may call it twice."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Flash:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close. After an exception, do not wait for other ranks."""
        with contextlib.ExitStack() as stack:
            if self.checkpointer is not None:
                stack.callback(self.checkpointer.__exit__, kind, error, trace)
            if self._files is not None:
                stack.callback(self._files.close)
                if kind is None:
                    stack.callback(self._files.finish)
            self._methods.close()
