"""Which saves copy while training continues, until an optimizer's next step; if they do not, the log says why, once.

A user's loop asks for this with ``until=``. Adapters give the optimizers of their framework, or the reason why their
steps cannot be used. Only optimizers that were heard to step are used: some change tensors in backward, and never step.
If something other than a step changed a tensor, so that a save failed, later saves copy at once.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..errors import StateError
from ..state.leaves import Flat, Structure
from .deferred_copies import LARGE_NBYTES, DeferredCopies

log = logging.getLogger("mlflash")

_CHANGED = "something other than an optimizer's step changed a tensor before it was copied"


class LazySaves:
    """Decides this for the saves of this rank; ``speaks``: whether this rank logs why one copies all at once."""

    def __init__(self, is_on: bool, speaks: bool):
        self._is_on, self._speaks = is_on, speaks
        self._leaves, self.steps = LazyLeaves(), Steps()
        self._logged: set[str] = set()
        self._was_changed = False
        self._is_first = True

    def stepped(self) -> Sequence[Any] | str:
        """Return torch's optimizers that have stepped, as `until` takes them, if the framework's are not known.

        Steps are heard from the first call on. The first time there may be none.
        """
        HOOK.register()
        heard = sorted(HOOK.heard, key=id)
        is_first, self._is_first = self._is_first, False
        return heard if heard or is_first else "mlflash has not heard any torch optimizer step"

    def until(self, optimizers: Sequence[Any] | str, owned: Callable[[], Iterable[Any]] = lambda: ()) -> Until | None:
        """Return what a save of an adapter waits for; None: it copies at once (``optimizers`` may be the reason)."""
        if isinstance(optimizers, str):
            self._say(optimizers)
            return None
        if not optimizers or not self._is_on:
            return None
        others = [type(optimizer).__name__ for optimizer in optimizers if not is_torch_optimizer(optimizer)]
        is_first, self._is_first = self._is_first, False
        HOOK.register()
        heard = tuple(optimizer for optimizer in optimizers if optimizer in HOOK.heard)
        if others:
            self._say(f"{others[0]} is not a torch optimizer, so mlflash does not hear its steps")
        elif self._was_changed:
            self._say(_CHANGED)
        elif not heard and not is_first:
            self._say(f"mlflash has not heard {type(optimizers[0]).__name__} step")
        return None if others or self._was_changed or not heard else Until(heard, owned)

    def find(self, flat: Flat, until: Any) -> Mapping[int, Any]:
        """The leaves of a state that are copied later, see `LazyLeaves.find`; none if ``until`` is None."""
        if until is None or not self._is_on:
            return {}
        leaves = self._leaves.find(flat, until)
        if self._leaves.why:
            self._say(self._leaves.why)
        return leaves

    def hears(self, optimizers: Iterable[Any]) -> bool:
        """Whether copies may last until the next step of these: it can be heard, and no copy came too late before."""
        return self._is_on and not self._was_changed and not _why_unheard(optimizers)

    def begin(self, later: DeferredCopies) -> None:
        """Make any optimizer's next step wait for copies."""
        later.tell_changed = self._note_changed
        self.steps.before_next(later)

    def _note_changed(self) -> None:
        self._was_changed = True

    def _say(self, why: str) -> None:
        if self._is_on and self._speaks and why not in self._logged:
            log.info("saves copy everything before they return, and not while training continues: %s", why)
        self._logged.add(why)


# Leaves in the memory of an optimizer's own tensors, which only its step is meant to change, and tensors of which an
# adapter knows the same. Everything else (buffers, averages, copies that a framework made) is copied at once.


_NONE_OWNED = "no large tensor of the state lies in the memory of its optimizers: the framework may have given copies"


@dataclasses.dataclass(frozen=True)
class Until:
    """How long copies may last."""

    optimizers: tuple[Any, ...]  # torch optimizers: until a step of any of them
    # returns further tensors, which change only in these steps, or after an adapter has waited for the copies
    owned: Callable[[], Iterable[Any]] = lambda: ()


class LazyLeaves:
    """Finds these leaves."""

    def __init__(self) -> None:
        # why the last state had none, though it has large tensors; "": it had some, or it has no large tensors
        self.why = ""
        self._structure: Structure | None = None
        self._optimizers: tuple[Any, ...] = ()
        self._owners: dict[int, _Owner] = {}

    def find(self, flat: Flat, until: Any) -> Mapping[int, Any]:
        """Find the leaves, by number, and their owners. Raises StateError if ``until`` has no torch optimizers."""
        if not isinstance(until, Until):
            until = Until(tuple(until) if isinstance(until, (list, tuple)) else (until,))
        optimizers = until.optimizers
        for optimizer in optimizers:
            if not is_torch_optimizer(optimizer):
                raise StateError("until= needs torch optimizers: mlflash does not hear the steps of others",
                                 found=type(optimizer))  # fmt: skip
        if why := _why_unheard(optimizers):
            self.why = why
            return {}
        if flat.structure is self._structure and optimizers == self._optimizers:
            owned = {n: owner.tensor for n, owner in self._owners.items() if owner.is_where_it_was(flat.values[n])}
            if len(owned) == len(self._owners):
                return owned
        self._structure = None  # in case of an exception in the next line, for example from a signal handler
        self._optimizers, self._owners = optimizers, self._find_owners(flat, until)
        self._structure = flat.structure
        owners = ((number, owner.tensor) for number, owner in self._owners.items())
        return {number: tensor for number, tensor in owners if tensor is not None}  # some are made only for this call

    def _find_owners(self, flat: Flat, until: Until) -> dict[int, _Owner]:
        lazy = [(number, value) for number, value in enumerate(flat.values) if is_worth_deferring(value)]
        self.why = ""
        of_optimizers = (tensor for optimizer in until.optimizers for tensor in _tensors_of(optimizer))
        memory = Memory(itertools.chain(of_optimizers, map(local, until.owned())))
        owners = ((number, value, memory.owner_of(value)) for number, value in lazy)
        owned = {number: _Owner(value, owner) for number, value, owner in owners if owner is not None}
        if lazy and not owned:
            self.why = _NONE_OWNED
        return owned


def _why_unheard(optimizers: Iterable[Any]) -> str:
    """Why a step of these may not be heard; "": it is."""
    if HOOK.is_passed_by:
        return "steps of an optimizer run without hooks"
    if any(group.get("capturable") for optimizer in optimizers for group in optimizer.param_groups):
        return "capturable=True: a CUDA graph may replay the optimizer's steps, and then no hook runs"
    return ""


class _Owner:
    """An optimizer's tensor that contains a leaf, and where both were when this was made."""

    def __init__(self, leaf: Any, tensor: Any):
        self._tensor, self._places = weakref.ref(tensor), (leaf.data_ptr(), tensor.data_ptr())

    @property
    def tensor(self) -> Any:
        return self._tensor()

    def is_where_it_was(self, leaf: Any) -> bool:
        tensor = self.tensor
        return tensor is not None and (leaf.data_ptr(), tensor.data_ptr()) == self._places


class Memory:
    """The memory of contiguous tensors, by device."""

    def __init__(self, tensors: Iterable[Any]):
        self._begins: dict[Any, list[int]] = {}
        self._tensors: dict[Any, dict[int, Any]] = {}
        for tensor in tensors:
            if not nbytes_of(tensor) or not tensor.is_contiguous() or not (begin := tensor.data_ptr()):
                continue
            tensors_at = self._tensors.setdefault(tensor.device, {})
            if begin not in tensors_at or nbytes_of(tensors_at[begin]) < nbytes_of(tensor):
                tensors_at[begin] = tensor
        for device, tensors_at in self._tensors.items():
            self._begins[device] = sorted(tensors_at)

    def owner_of(self, leaf: Any) -> Any:
        """The tensor whose memory contains all of a contiguous leaf; None: there is none."""
        begins, begin = self._begins.get(leaf.device, []), leaf.data_ptr()
        place = bisect.bisect_right(begins, begin) - 1
        if place < 0:
            return None
        owner = self._tensors[leaf.device][begins[place]]
        end = owner.data_ptr() + nbytes_of(owner)
        return owner if begin + nbytes_of(leaf) <= end else None


def is_torch_optimizer(optimizer: Any) -> bool:
    """Whether mlflash can hear the steps of something: whether it is a torch optimizer."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(optimizer, torch.optim.Optimizer)


def _tensors_of(optimizer: Any) -> Iterable[Any]:
    torch = sys.modules["torch"]
    for group in optimizer.param_groups:
        yield from (local(tensor) for tensor in group["params"])
    for parameter, values in optimizer.state.items():  # between steps some are in no group, as with ZeRO-3
        tensors = (parameter, *values.values())
        yield from (local(value) for value in tensors if isinstance(value, torch.Tensor))


def local(tensor: Any) -> Any:
    """The shard of a DTensor that is on this rank; any other tensor itself."""
    return tensor._local_tensor if type(tensor).__name__ == "DTensor" else tensor


def nbytes_of(tensor: Any) -> int:
    """How many bytes a tensor shows."""
    return int(tensor.numel() * tensor.element_size())


def is_worth_deferring(value: Any) -> bool:
    """Whether a leaf is a tensor that can be copied later, and is large enough for that."""
    torch = sys.modules["torch"]
    if not isinstance(value, torch.Tensor) or value.is_inference() or value.is_conj() or value.is_neg():
        return False
    nbytes = nbytes_of(value)
    return nbytes > 0 and value.is_contiguous() and (value.device.type != "cpu" or nbytes >= LARGE_NBYTES)


# Steps of torch optimizers, heard before they change anything. Torch's own optimizers call the closure that a step may
# get (from Lightning) before that, and so the copies have time until the closure ends.


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Steps:
    """Hears of the steps of all torch optimizers before they are made."""

    def __init__(self) -> None:
        self.laters: list[DeferredCopies] = []

    def before_next(self, later: DeferredCopies) -> None:
        """Make any optimizer's next step wait for copies."""
        self.laters = [*(waiting for waiting in self.laters if not waiting.is_over), later]
        if self not in HOOK.listeners:
            HOOK.listeners.add(self)
            HOOK.register()

    def hold_back(self) -> None:
        """Make whatever changes the state from now on come after the copies."""
        while self.laters:
            self.laters.pop().hold_back()

    def close(self) -> None:
        """Leave optimizers alone from now on."""
        self.laters.clear()
        HOOK.listeners.discard(self)


class _Hook:
    """The hook that torch calls before each step of any optimizer: one for this process.

    It stays registered, because compiled code is compiled again whenever the hooks change.
    """

    def __init__(self) -> None:
        self.listeners: weakref.WeakSet[Steps] = weakref.WeakSet()  # the `Steps` that hear of steps
        # optimizers that have stepped since the hook was registered
        self.heard: weakref.WeakSet[Any] = weakref.WeakSet()
        # whether steps run without the hook, compiled (fullgraph=True) or captured in a CUDA graph: then nothing may
        # wait for a step
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
            instead: Arguments | None = tell(optimizer, args, kwargs)
            return instead

        self._handle = register_optimizer_step_pre_hook(hook)

    def _tell(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Delay a step, or what comes after its closure; then return the arguments with which it is called instead."""
        if _is_captured():  # devices must not be asked now; if a tensor changes before its copy, the save fails
            self._note_passed_by("captured in a CUDA graph")
            return None
        self.heard.add(optimizer)
        if not any(steps.laters for steps in self.listeners):
            return None
        if (instead := self._after_closure(optimizer, args, kwargs)) is None:
            self._hold_back()
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
        is_one_graph = bool(now.one_graph or getattr(now, "error_on_graph_break", False))
    except (ImportError, AttributeError):  # another version of torch, which reports itself what it cannot compile
        return False
    if is_one_graph:
        HOOK.pass_by()
    return is_one_graph
