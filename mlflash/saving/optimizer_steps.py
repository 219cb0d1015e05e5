"""Hears of steps of torch optimizers before they change anything, so that deferred copies are made by then.

A step may get a closure (Lightning does that), which does forward and backward. Torch's own optimizers call it before
they change anything, and so the copies have time until the closure ends.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any

from .deferred_copies import DeferredCopies

log = logging.getLogger("mlflash")

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Steps:
    """Hears of the steps of all torch optimizers before they are made."""

    def __init__(self) -> None:
        self._laters: list[DeferredCopies] = []
        self._told: Callable[[], None] | None = None
        self._counted: Callable[[], Any] = lambda: None  # the optimizer whose steps count as training steps

    def before_next(self, later: DeferredCopies) -> None:
        """Make any optimizer's next step wait for copies."""
        self._laters = [*(one for one in self._laters if not one.is_over), later]
        self._listen()

    def tell(self, told: Callable[[], None]) -> None:
        """Call a function before each training step of an optimizer."""
        self._told = told
        self._listen()

    @property
    def holds_back(self) -> bool:
        return bool(self._laters)

    def hold_back(self) -> None:
        """Make whatever changes the state from now on come after the copies."""
        while self._laters:
            self._laters.pop().hold_back()

    def close(self) -> None:
        """Leave optimizers alone from now on."""
        self._laters.clear()
        HOOK.listeners.discard(self)

    def _listen(self) -> None:
        if self not in HOOK.listeners:
            HOOK.listeners.add(self)
            HOOK.register()

    def before_step(self, optimizer: Any) -> None:
        if self._told is None:
            return
        counted = self._counted()
        if counted is None:
            self._counted = weakref.ref(optimizer)
        if counted in (None, optimizer):
            self._told()


class _Hook:
    """The hook that torch calls before each step of any optimizer: one for this process.

    It stays registered, because compiled code is compiled again whenever the hooks change.

    Attributes:
        listeners: the `Steps` that hear of steps.
        heard: optimizers that have stepped since the hook was registered.
        is_passed_by: whether steps run without the hook, compiled (``fullgraph=True``) or captured in a CUDA graph:
            then nothing may wait for a step.
    """

    def __init__(self) -> None:
        self.listeners: weakref.WeakSet[Steps] = weakref.WeakSet()
        self.heard: weakref.WeakSet[Any] = weakref.WeakSet()
        self.is_passed_by = False
        self._handle: Any = None

    def register(self) -> None:
        if self._handle is not None:
            return
        import torch
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        tell = torch.compiler.disable(self._tell)  # not compiled: compiled code stops for it, and continues
        passes_by = torch.compiler.assume_constant_result(_is_passed_by)  # called as a step is compiled, not as it runs

        def hook(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
            if torch.compiler.is_compiling() and passes_by():
                return None
            told: Arguments | None = tell(optimizer, args, kwargs)
            return told

        self._handle = register_optimizer_step_pre_hook(hook)

    def _tell(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Delay a step, or what comes after its closure; then return the arguments with which it is called instead."""
        if _is_captured():  # devices must not be asked now; if a tensor changes before its copy, the save fails
            self._note_passed_by("captured in a CUDA graph")
            return None
        self.heard.add(optimizer)
        if not any(steps.holds_back for steps in self.listeners):
            instead = None
        elif (instead := self._after_closure(optimizer, args, kwargs)) is None:
            self._hold_back()
        for steps in list(self.listeners):
            steps.before_step(optimizer)
        return instead

    def _after_closure(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """The arguments of a step that waits when its closure has returned; None: that would be too late."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        hooks = self._handle.hooks_dict_ref()
        others = optimizer._optimizer_step_pre_hooks or next(reversed(hooks)) != self._handle.id  # these run first
        if closure is None or others or not f"{type(optimizer).__module__}.".startswith("torch.optim."):
            return None

        def and_hold_back() -> Any:
            result = closure()
            self._hold_back()
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": and_hold_back}
        return (args[0], and_hold_back, *args[2:]), kwargs

    def _hold_back(self) -> None:
        for steps in list(self.listeners):
            steps.hold_back()

    def pass_by(self) -> None:
        """Make the copies that wait for a step now, because no step is heard of any more."""
        self._note_passed_by("compiled as one graph (fullgraph=True)")
        self._hold_back()

    def _note_passed_by(self, how: str) -> None:
        if not self.is_passed_by:
            log.warning("a step of an optimizer is %s, so no hook runs in it: saves copy everything before they "
                        "return",
                        how)  # fmt: skip
        self.is_passed_by = True


HOOK = _Hook()


def _is_captured() -> bool:
    """Whether what a device is given now is recorded in a graph, and not executed."""
    cuda = sys.modules["torch"].cuda
    return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())


def _is_passed_by() -> bool:
    """Whether the step that torch compiles now must be one graph: then none of our code can run in it."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        now = InstructionTranslator.current_tx()
        whole = bool(now.one_graph or getattr(now, "error_on_graph_break", False))
    except (ImportError, AttributeError):  # another version of torch, which reports itself what it cannot compile
        return False
    if whole:
        HOOK.pass_by()
    return whole
