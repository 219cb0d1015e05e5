"""Objects of frameworks ↔ bytes and tensors: what is no tensor is pickled, and unpickled by a loader that runs no code.

Their states hold objects of their own (Megatron's ShardedTensor, argparse's Namespace, ...), which only pickle can
bring back. A pickle may name any function to be called; this loader knows classes of a few packages, and the functions
by which NumPy's arrays are made. Tensors are not pickled: they go into the slot as tensors do.
"""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mlflash.errors import CorruptSlot, StateError

_PACKAGES = {"megatron", "nvidia_resiliency_ext", "mlflash", "transformer_engine", "lightning", "pytorch_lightning",
             "lightning_fabric", "lightning_utilities", "transformers", "deepspeed"}  # fmt: skip
"""Whose classes may be made."""
_CLASSES = {
    "argparse": {"Namespace"},
    "builtins": {
        "bool",
        "bytearray",
        "bytes",
        "complex",
        "dict",
        "float",
        "frozenset",
        "int",
        "list",
        "range",
        "set",
        "slice",
        "str",
        "tuple",
    },
    "_io": {"BytesIO"},
    "collections": {"OrderedDict", "defaultdict", "deque"},
    "datetime": {"date", "datetime", "time", "timedelta", "timezone"},
    "decimal": {"Decimal"},
    "signal": {"Signals"},
    "types": {"SimpleNamespace"},
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
    "numpy": {"dtype", "ndarray"},
    "torch": {"Size", "device"},
    "torch.nn.parameter": {"Parameter"},
}
_FUNCTIONS = {
    ("_codecs", "encode"),  # bytes, by protocol 2
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy.core.numeric", "_frombuffer"),
    ("numpy._core.numeric", "_frombuffer"),
    ("torch.serialization", "_get_layout"),
}

_allowed: set[tuple[str, str]] = set()


def allow(*classes: Any) -> None:
    """Let classes, or functions, be saved and loaded that are of no package known here: of a training's own arguments.

    Not collective; to be called before a save or a load. What is allowed may be called by any checkpoint.
    """
    _allowed.update((one.__module__, one.__qualname__) for one in classes)


def dump(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Pickle a value without its tensors.

    Returns:
        The pickle, and the tensors, in the order in which it names them.

    Raises:
        StateError: something in it cannot be pickled, or `load` would refuse it.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(value)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise StateError(f"what is no tensor in the state cannot be pickled: {error}") from error
    return file.getvalue(), pickler.tensors


def load(pickled: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """Unpickle what `dump` gave.

    Raises:
        CorruptSlot: it names something that may not be loaded; see `allow`.
    """
    try:
        return _Unpickler(io.BytesIO(pickled), tensors).load()
    except Exception as error:  # of what a damaged pickle makes of itself
        raise CorruptSlot(f"the state that is no tensor cannot be loaded: {error}") from error


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO):
        super().__init__(file, protocol=4)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}  # the same tensor twice stays one

    def persistent_id(self, value: Any) -> int | None:
        if type(value) is not torch.Tensor:
            return None
        number = self._numbers.setdefault(id(value), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value)
        return number

    def reducer_override(self, value: Any) -> Any:
        """Take tensors of other classes apart into plain ones: quantized weights (FP8, MXFP8) are made of several."""
        if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
            module = pickle.whichmodule(value, value.__qualname__)  # type: ignore[attr-defined]
            if not _knows(module, value.__qualname__, value):
                raise pickle.PicklingError(_unknown(module, value.__qualname__))
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        kind = type(value)
        if kind is torch.nn.Parameter:
            return torch.nn.Parameter, (value.data, value.requires_grad)
        if is_traceable_wrapper_subclass(value):
            names, context = value.__tensor_flatten__()
            parts = {name: getattr(value, name) for name in names}
            return _rebuild, (kind, parts, context, tuple(value.size()), tuple(value.stride()), value.requires_grad)
        if kind.__reduce_ex__ is not torch.Tensor.__reduce_ex__:  # Transformer Engine's say it so
            return NotImplemented
        raise pickle.PicklingError(f"a tensor of {kind.__module__}.{kind.__qualname__} says nowhere what it is made of "
                                   "(__tensor_flatten__)")  # fmt: skip


def _rebuild(
    kind: type, parts: dict[str, Any], context: Any, size: tuple[int, ...], stride: tuple[int, ...], grad: bool
) -> torch.Tensor:
    tensor: torch.Tensor = kind.__tensor_unflatten__(parts, context, torch.Size(size), stride)  # type: ignore[attr-defined]
    return tensor.requires_grad_(grad) if grad else tensor


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[torch.Tensor]):
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: Any) -> torch.Tensor:
        if not isinstance(number, int) or not 0 <= number < len(self._tensors):
            raise pickle.UnpicklingError(f"there is no tensor {number!r}")
        return self._tensors[number]

    def find_class(self, module: str, name: str) -> Any:
        if _knows(module, name):
            return super().find_class(module, name)
        top = module.partition(".")[0]
        found = super().find_class(module, name) if top in _PACKAGES else getattr(sys.modules.get(module), name, None)
        if not _knows(module, name, found):
            raise pickle.UnpicklingError(_unknown(module, name))
        return found


def _knows(module: str, name: str, found: Any = None) -> bool:
    """Whether something may be loaded: by its name, or by what it is."""
    if (module, name) in _FUNCTIONS or (module, name) in _allowed or name in _CLASSES.get(module, ()):
        return True
    top = module.partition(".")[0]
    if top == "torch" and "." not in name:
        return isinstance(found, (torch.dtype, torch.layout, torch.memory_format))
    if top not in _PACKAGES or found is None:
        return False
    if (module, name) == (__name__, "_rebuild") or name.endswith("._make_in_reduce_ex"):  # of Transformer Engine's
        return True
    # A class found by way of a package may be of another one: "megatron.core.utils.subprocess.Popen".
    return isinstance(found, type) and found.__module__.partition(".")[0] in _PACKAGES


def _unknown(module: str, name: str) -> str:
    return f"{module}.{name} is not known here: mlflash.adapters.pickles.allow({name})"
