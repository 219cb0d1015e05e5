"""The steps of a training's optimizers, as they are made: which gradients each uses, and with which settings.

A step of an optimizer is repeated by the optimizer's own code, from the same state, gradients and settings. So that is
all that has to be kept of it. Gradients are not copied here: whoever saves them does that, and asks before whether
something has changed them since (`Tape.problem`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import xxhash

from ..errors import StateError, text_of
from ..state.leaves import class_name
from ..state.wrapped_tensors import inner_of, is_wrapped
from .lazy_saves import is_torch_optimizer, local

_OF_SCALER = ("grad_scale", "found_inf")  # attributes that an AMP scaler sets for the step of a fused optimizer
_SAMPLED, _MOST = 64, 256  # elements of a tensor, and tensors, that a digest has
_CHANGED = "something other than the optimizer's step has changed weights or what the optimizer holds"
_MOST_STEPS = 8  # whose gradients are held between two saves


@dataclasses.dataclass
class Step:
    """A step that an optimizer is about to make.

    Attributes:
        optimizer: its number.
        groups: the settings of each of its groups, such as the learning rate, without the parameters.
        grads: for each group, the gradient of each parameter; None: it has none.
        scaler: tensors of an AMP scaler, by name.
    """

    optimizer: int
    groups: list[dict[str, Any]]
    grads: list[list[Any]]
    scaler: dict[str, Any]


def optimizers_in(state: Any) -> list[Any]:
    """Find the torch optimizers in a nested state, each once, in its order."""
    found: dict[int, Any] = {}
    todo = [state]
    while todo:
        value = todo.pop(0)
        if is_torch_optimizer(value):
            found.setdefault(id(value), value)
        elif isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, (list, tuple)):
            todo += value
    return list(found.values())


def tensors_of(optimizers: Iterable[Any]) -> Iterator[Any]:
    """Give the parameters of optimizers and what they hold for these, as local tensors, in a fixed order.

    Raises StateError for a tensor of a class that nobody has checked.
    """
    return itertools.chain.from_iterable(map(_parts_of, _held_by(optimizers)))


def _parts_of(tensor: Any) -> Iterable[Any]:
    """The local tensors with memory of their own that a tensor is made of."""
    torch = sys.modules["torch"]
    own = local(tensor)
    if type(own).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return (own,)
    if not is_wrapped(own):
        raise StateError("the optimizer holds a tensor of a class that mlflash does not know", found=class_name(own))
    return itertools.chain.from_iterable(map(_parts_of, inner_of(own).values()))


def _held_by(optimizers: Iterable[Any]) -> Iterator[Any]:
    for optimizer in optimizers:
        torch = sys.modules["torch"]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter
                values = optimizer.state.get(parameter, {})
                yield from (values[name] for name in sorted(values) if isinstance(values[name], torch.Tensor))


def _memory_of(tensor: Any) -> Any:
    """A weak reference to a tensor's memory: as long as there is one, no other memory is equal to it."""
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())


class _Mark:
    """How some tensors are at a moment: where they are, their versions, which PyTorch counts, and some elements.

    It does not count each change (2.13): not `torch._foreach_mul_` of distributed tensors, nor that a fused optimizer
    divides gradients by the scale of AMP. The elements stay on the device until they are compared.

    Args:
        tensors: any.
        earlier: a mark of the same tensors. If they are where they were, it knows where their elements are.
    """

    def __init__(self, tensors: Iterable[Any], earlier: _Mark | None = None):
        self._tensors = list(tensors)
        self.versions = [(id(tensor), tensor._version) for tensor in self._tensors]
        parts = [part for tensor in self._tensors for part in _parts_of(tensor)]
        self.versions += [(0 if part.is_sparse else part.data_ptr(), part._version) for part in parts]
        self._places = [at for at, _ in self.versions]
        self._views: dict[_Kind, list[Any]]
        if earlier is not None and earlier._places == self._places:
            self._views = earlier._views
        else:
            self._views = _samples([part for part in parts if not part.is_sparse], 0)
        self._elements = _joined(self._views)

    def is_as(self, other: _Mark) -> bool:
        """Whether nothing has changed between two moments."""
        torch = sys.modules["torch"]
        theirs = other._elements
        return self.versions == other.versions and all(torch.equal(own, theirs[device])
                                                       for device, own in self._elements.items())  # fmt: skip

    @property
    def now(self) -> _Mark:
        """How the same tensors are now."""
        return _Mark(self._tensors, self)


class Tape:
    """Notes the steps of some optimizers from now on.

    Attributes:
        steps: those since `clear`.
        why_not: why one of them cannot be repeated, for the rest of the training; "": nothing is wrong.
    """

    def __init__(self, optimizers: Sequence[Any]):
        self.optimizers, self.steps, self.why_not = optimizers, list[Step](), ""
        self._not_now = ""  # why those since `clear` cannot be repeated
        self._are_changed: bool | None = None  # whether something changes gradients that were noted; None: unknown
        self._noted: list[tuple[_Mark, bool]] = []  # those of each of `steps`, and whether they are copied
        self._memory: dict[int, set[Any]] = {}  # of the gradients of each optimizer's last step: weak references
        self._reuses_memory = False  # whether gradients were in the memory of those of the step before
        self._last = _Mark(())
        self._weights = self._look()
        self._between: list[tuple[_Mark, _Mark]] = []  # weights after a save or a step, and before the next step
        self._problem: str | None = None  # at the end of `steps`, as far as it was asked
        self._handles: list[Any] = []
        self._is_paused = False
        for optimizer in optimizers:
            compiler = sys.modules["torch"].compiler
            self._handles.append(optimizer.register_step_pre_hook(compiler.disable(self._before)))
            self._handles.append(optimizer.register_step_post_hook(compiler.disable(self._after)))

    def close(self) -> None:
        """Leave the optimizers alone from now on."""
        for handle in self._handles:
            handle.remove()

    def clear(self) -> None:
        """Begin anew after a save: what follows continues from where `problem` looked for it."""
        self._weights = self._look() if self._problem is None else self._last
        self.steps, self._noted, self._between, self._not_now, self._problem = [], [], [], "", None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Note nothing in a block that changes weights, as a restore does; then begin anew."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused, self._problem = False, None
            self.clear()

    def problem(self) -> str:
        """Why the steps that were noted cannot be repeated from what is in memory now; "": they can."""
        if self._problem is None:
            self._problem = self._find_problem()
        return self._problem

    @property
    def keeps_gradients(self) -> bool:
        """Whether nothing changes the noted gradients before the next step: backward makes others elsewhere."""
        return not self._reuses_memory or all(is_copied for _, is_copied in self._noted)

    def _find_problem(self) -> str:
        changed = [is_copied for grads, is_copied in self._noted if not grads.is_as(grads.now)]
        if self._noted:
            self._are_changed = self._are_changed or bool(changed)  # then they are copied, from the next step on
        if not self.why_not and not all(changed):
            return "gradients were changed between the optimizer's step and the save"
        if not all(then.is_as(now) for then, now in (*self._between, (self._weights, self._look()))):
            self._not_now = _CHANGED
        return self.why_not or self._not_now

    def _look(self) -> _Mark:
        """How weights are now, and what the optimizers hold."""
        try:
            self._last = _Mark(_held_by(self.optimizers), self._last)
        except Exception as error:  # of tensors that are like no others; training must go on
            self.why_not = text_of(error)
        return self._last

    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._problem = None
        if self._is_paused or self.why_not:
            return
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            self.why_not = f"the step of {type(optimizer).__name__} gets arguments, such as a closure"
            return
        weights = self._look()
        if self._weights.versions != weights.versions:
            self._not_now = _CHANGED
        elif len(self.steps) == _MOST_STEPS:
            self._not_now = f"more than {_MOST_STEPS} steps were made since the last save"
        if self._not_now:
            self.steps, self._noted = [], []  # they hold their gradients
            return
        self._between.append((self._weights, weights))
        try:
            self._note(optimizer)
        except Exception as error:  # training must go on
            self.why_not = f"a step of {type(optimizer).__name__} could not be noted: {error}"

    def _note(self, optimizer: Any) -> None:
        step = Step(self.optimizers.index(optimizer), [], [], {})
        is_copied = self._are_changed is not False  # optimizers change them, too
        grads = [each.grad for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        self._noted.append((_Mark(grads), is_copied))
        parts = itertools.chain.from_iterable(map(_parts_of, grads))
        memory = {_memory_of(part) for part in parts if not part.is_sparse}
        self._reuses_memory |= not memory.isdisjoint(self._memory.get(step.optimizer, ()))
        self._memory[step.optimizer] = memory
        for group in optimizer.param_groups:
            step.groups.append({name: self._setting(value) for name, value in group.items() if name != "params"})
            step.grads.append([self._grad(each.grad, is_copied) for each in group["params"]])
        step.scaler = {name: getattr(optimizer, name).clone() for name in _OF_SCALER
                       if getattr(optimizer, name, None) is not None}  # fmt: skip
        self.steps.append(step)

    def _after(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (self._is_paused or self.why_not):
            self._weights = self._look()

    def _grad(self, grad: Any, is_copied: bool) -> Any:
        if grad is None:
            return None
        own = local(grad)
        if own.is_sparse:
            self.why_not = "gradients are sparse"
        return own.clone() if is_copied else own

    def _setting(self, value: Any) -> Any:
        return value.clone() if isinstance(value, sys.modules["torch"].Tensor) else value


def repeat(step: Step, optimizers: Sequence[Any]) -> None:
    """Make a step again. Parameters have no gradients afterwards. Not collective."""
    optimizer = optimizers[step.optimizer]
    settings = []
    for group, kept, grads in zip(optimizer.param_groups, step.groups, step.grads, strict=True):
        settings.append({name: group[name] for name in kept})
        group.update(kept)
        for parameter, grad in zip(group["params"], grads, strict=True):
            parameter.grad = None if grad is None else _like(grad, parameter)
    for name, tensor in step.scaler.items():
        setattr(optimizer, name, tensor)
    try:
        type(optimizer).step(optimizer)  # a scheduler may have wrapped that of the object
    finally:
        for name in step.scaler:
            delattr(optimizer, name)
        for group, now in zip(optimizer.param_groups, settings, strict=True):
            group.update(now)
            for parameter in group["params"]:
                parameter.grad = None


def _like(grad: Any, parameter: Any) -> Any:
    """A gradient with the device and the class of its parameter, of which it is this rank's part."""
    own = grad.to(local(parameter).device)
    if not hasattr(parameter, "device_mesh"):
        return own
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(own, parameter.device_mesh, parameter.placements, run_check=False,
                              shape=parameter.shape, stride=parameter.stride())  # fmt: skip


class Shadow:
    """A copy of optimizers and their parameters, which repeats each step, to see whether that is exact.

    It needs as much memory, on the same device, as parameters and optimizers take.
    """

    def __init__(self, optimizers: Sequence[Any]):
        self._live = optimizers
        self._copies = [_copied(optimizer) for optimizer in optimizers]

    def repeat(self, steps: Iterable[Step]) -> None:
        """Make steps that the optimizers have made. The training's random numbers stay what they are."""
        torch = sys.modules["torch"]
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices):
            for step in steps:
                repeat(step, self._copies)

    def differs(self) -> str:
        """What differs in any bit from the optimizers now; "": nothing."""
        for live, copied in zip(tensors_of(self._live), tensors_of(self._copies), strict=True):
            if live.shape != copied.shape or _bits(live).ne(_bits(copied)).any():
                return f"a {live.dtype} of {tuple(live.shape)}"
        return ""


def _copied(optimizer: Any) -> Any:
    """A copy of an optimizer, with parameters of its own and without hooks."""
    torch = sys.modules["torch"]
    copied = object.__new__(type(optimizer))
    vars(copied).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            setattr(copied, name, type(value)())
    anew = {parameter: _clone(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    copied.param_groups = [{**group, "params": [anew[parameter] for parameter in group["params"]]}
                           for group in optimizer.param_groups]  # fmt: skip
    copied.state = type(optimizer.state)(getattr(optimizer.state, "default_factory", None))
    for parameter, values in optimizer.state.items():
        copied.state[anew.get(parameter, parameter)] = {
            name: _cloned(value.detach()) if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        }
    return copied


def _clone(parameter: Any) -> Any:
    torch = sys.modules["torch"]
    return torch.nn.Parameter(_cloned(parameter.detach()), requires_grad=parameter.requires_grad)


def _cloned(tensor: Any) -> Any:
    if not is_wrapped(tensor):
        return tensor.clone()
    inner = {name: _cloned(part) for name, part in inner_of(tensor).items()}  # not each of these classes has clone()
    return type(tensor).__tensor_unflatten__(inner, tensor.__tensor_flatten__()[1], tensor.size(), tensor.stride())


def _bits(tensor: Any) -> Any:
    torch = sys.modules["torch"]
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class Digest:
    """A checksum of all bits of the weights, and of some elements of what optimizers hold besides. Not collective.

    Args:
        seed: chooses the elements.

    Attributes:
        weights: those on the host, which must not change until `value` is there. Devices have begun by then.
    """

    def __init__(self, optimizers: Iterable[Any], seed: int):
        optimizers = list(optimizers)
        self.weights: list[Any] = []
        self._seed, self._held, self._on_devices = seed, list[Any](), list[Any]()
        self._lock, self._value = threading.Lock(), 0
        try:
            self._held = list(tensors_of(optimizers))
            groups = [group for optimizer in optimizers for group in optimizer.param_groups]
            weights = [part for group in groups for parameter in group["params"] for part in _parts_of(parameter)]
        except StateError:
            return
        for weight in weights:
            (self.weights if weight.device.type == "cpu" else self._on_devices).append(weight)
        if self._on_devices:
            self._on_devices = [*map(_checksum, map(_bits, self._on_devices)), *self._elements()]

    def _elements(self) -> list[Any]:
        views = _samples(self._held, self._seed)
        self._held = []
        return [*_joined(dict(sorted(views.items(), key=lambda item: str(item[0])))).values()]

    @property
    def value(self) -> int:
        """It has 63 bits, and is 0 if optimizers hold tensors that light saves do not know."""
        self.make()
        return self._value

    def make(self) -> Digest:
        """Make the checksum, unless it is made; any thread may. Weights may be changed again then."""
        with self._lock:
            if self.weights or self._on_devices:
                hasher = xxhash.xxh3_64()
                for weight in self.weights:
                    hasher.update(_bits(weight).numpy().data)
                for elements in self._on_devices or self._elements():
                    hasher.update(elements.cpu().numpy().tobytes())
                self._value = hasher.intdigest() >> 1
                self.weights, self._on_devices = [], []
        return self


_PIECE = 1 << 22  # elements that have factors of their own


def _checksum(raw: Any) -> Any:
    """A checksum of bytes, made on their device: a sum of words times odd factors, which each changed word changes."""
    torch = sys.modules["torch"]
    words = raw.view(torch.int32) if not (raw.numel() % 4 or raw.storage_offset() % 4) else raw.to(torch.int32)
    factors = torch.arange(min(_PIECE, len(words)), device=raw.device, dtype=torch.int32) * -1640531534 + 1
    total = torch.zeros((), device=raw.device, dtype=torch.int64)
    for piece in words.split(_PIECE):
        total = total * 6364136223846793005 + (piece * factors[: len(piece)]).sum(dtype=torch.int64)
    return total


_Kind = tuple[Any, Any]  # device and dtype of tensors


def _samples(tensors: Sequence[Any], seed: int) -> dict[_Kind, list[Any]]:
    """Some elements of some tensors, which ``seed`` chooses: views of one dimension."""
    apart = -(-len(tensors) // _MOST) or 1
    views: dict[_Kind, list[Any]] = {}
    for number in range(seed % apart, len(tensors), apart):
        row, place = tensors[number].detach(), seed * 2654435761 + number * 40503
        if not (length := row.numel()):
            continue
        stride = 1
        if not row.is_contiguous():
            while row.dim() > 1:
                row = row[place % row.shape[0]]
            length, stride = row.numel(), row.stride(0)
        count = min(_SAMPLED, length)
        begin = row.storage_offset() + place % (length - count + 1) * stride
        views.setdefault((row.device, row.dtype), []).append(row.as_strided((count,), (stride,), begin))
    return views


def _joined(views: dict[_Kind, list[Any]]) -> dict[_Kind, Any]:
    """What views show now, as bytes, one tensor for each device and dtype."""
    torch = sys.modules["torch"]
    return {kind: torch.cat(of_kind).view(torch.uint8) for kind, of_kind in views.items()}
