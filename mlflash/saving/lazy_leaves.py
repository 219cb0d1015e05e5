"""Which leaves of a state are copied after `save` has returned: those in the memory of an optimizer's own tensors.

Only a step of a torch optimizer is meant to change these: its parameters, and its state. In addition there are tensors
of which an adapter knows that only such a step changes them. Everything else (buffers, averages, copies that a
framework made) is copied at once. If nothing is copied later, `why` gives the reason.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..errors import StateError
from ..state.leaves import Flat, Structure
from .optimizer_steps import HOOK

LARGE_NBYTES = 64 << 10  # to remember the place of a smaller tensor takes as long as its copy
_NONE_OWNED = "no large tensor of the state lies in the memory of its optimizers: the framework may have given copies"


@dataclasses.dataclass(frozen=True)
class Until:
    """How long copies may last.

    Attributes:
        optimizers: torch optimizers: until a step of any of them.
        owned: returns further tensors, which change only in these steps, or after an adapter has waited for the copies.
    """

    optimizers: tuple[Any, ...]
    owned: Callable[[], Iterable[Any]] = lambda: ()


class LazyLeaves:
    """Finds these leaves.

    Attributes:
        why: why the last state had none, though it has large tensors; "": it had some, or it has no large tensors.
    """

    def __init__(self) -> None:
        self.why = ""
        self._structure: Structure | None = None
        self._optimizers: tuple[Any, ...] = ()
        self._owners: dict[int, _Owner] = {}

    def find(self, flat: Flat, until: Any) -> Mapping[int, Any]:
        """The numbers of those leaves, each with the optimizer's tensor that contains it.

        Args:
            until: a torch optimizer, or several; or `Until`.

        Raises:
            StateError: it is something else.
        """
        if not isinstance(until, Until):
            until = Until(tuple(until) if isinstance(until, (list, tuple)) else (until,))
        optimizers = until.optimizers
        for optimizer in optimizers:
            if not is_torch_optimizer(optimizer):
                raise StateError("until= needs torch optimizers: mlflash does not hear the steps of others",
                                 found=type(optimizer))  # fmt: skip
        if HOOK.is_passed_by:
            self.why = "steps of an optimizer run without hooks"
            return {}
        if flat.structure is self._structure and optimizers == self._optimizers:
            owned = {n: owner.tensor for n, owner in self._owners.items() if owner.is_where_it_was(flat.values[n])}
            if len(owned) == len(self._owners):
                return owned
        self._structure = None  # in case of an exception in the next line, for example from a signal handler
        self._optimizers, self._owners = optimizers, self._look(flat, until)
        self._structure = flat.structure
        found = ((number, owner.tensor) for number, owner in self._owners.items())
        return {number: tensor for number, tensor in found if tensor is not None}  # some are made only for this call

    def _look(self, flat: Flat, until: Until) -> dict[int, _Owner]:
        lazy = [(number, value) for number, value in enumerate(flat.values) if _is_lazy(value)]
        self.why = ""
        if any(group.get("capturable") for optimizer in until.optimizers for group in optimizer.param_groups):
            self.why = "capturable=True: a CUDA graph may replay the optimizer's steps, and then no hook runs"
            return {}
        of_optimizers = (tensor for optimizer in until.optimizers for tensor in _tensors_of(optimizer))
        memory = _Memory(itertools.chain(of_optimizers, map(local, until.owned())))
        found = ((number, value, memory.owner_of(value)) for number, value in lazy)
        owned = {number: _Owner(value, owner) for number, value, owner in found if owner is not None}
        if lazy and not owned:
            self.why = _NONE_OWNED
        return owned


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


class _Memory:
    """The memory of contiguous tensors, by device."""

    def __init__(self, tensors: Iterable[Any]):
        self._begins: dict[Any, list[int]] = {}
        self._tensors: dict[Any, dict[int, Any]] = {}
        for tensor in tensors:
            if not nbytes_of(tensor) or not tensor.is_contiguous() or not (begin := tensor.data_ptr()):
                continue
            there = self._tensors.setdefault(tensor.device, {})
            if begin not in there or nbytes_of(there[begin]) < nbytes_of(tensor):
                there[begin] = tensor
        for device, there in self._tensors.items():
            self._begins[device] = sorted(there)

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
        mine = (parameter, *values.values())
        yield from (local(value) for value in mine if isinstance(value, torch.Tensor))


def local(tensor: Any) -> Any:
    """The shard of a DTensor that is on this rank; any other tensor itself."""
    return tensor._local_tensor if type(tensor).__name__ == "DTensor" else tensor


def nbytes_of(tensor: Any) -> int:
    """How many bytes a tensor shows."""
    return int(tensor.numel() * tensor.element_size())


def _is_lazy(value: Any) -> bool:
    torch = sys.modules["torch"]
    if not isinstance(value, torch.Tensor) or value.is_inference() or value.is_conj() or value.is_neg():
        return False
    nbytes = nbytes_of(value)
    return nbytes > 0 and value.is_contiguous() and (value.device.type != "cpu" or nbytes >= LARGE_NBYTES)
