"""Tensors that wrap others: quantized weights, the states of optimizers in few bits, FP8.

Such a tensor has no memory of its own. PyTorch's protocol takes it apart (``__tensor_flatten__``) into inner tensors,
by name, and a context, and puts it together again (``__tensor_unflatten__``). In a tree it is a node ``["k", inner
tensors as a dict, ["wrapped", class], attributes]``, see `containers`. Only the classes in `CLASSES` are taken apart:
of others nobody has checked that their inner tensors and their context are all that they are.

A context may hold, besides plain values and containers, dtypes, enumerations, dataclasses and named tuples. Reading one
makes only those of classes that the program has loaded, in the package of the tensor's class, and runs no code of
these.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import sys
from collections.abc import Mapping
from typing import Any

from ..errors import StateError, StructureMismatch
from .leaves import class_name, local_of, place_of

WRAPPED = "wrapped"
"""The name of these classes in the code of a node."""

CLASSES = frozenset({
    "torchao.optim.subclass_8bit.OptimState8bit",
    "torchao.optim.subclass_4bit.OptimState4bit",
    "torchao.optim.subclass_fp8.OptimStateFp8",
    "torchao.quantization.Int8Tensor",
    "torchao.quantization.Float8Tensor",
    "torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor",
    "torchao.prototype.mx_formats.mx_tensor.MXTensor",
    "torchao.prototype.mx_formats.nvfp4_tensor.NVFP4Tensor",
})  # fmt: skip
"""Classes whose tensors are saved as what they wrap."""

Code = list[str]
Attributes = dict[str, Any]
"""What a tensor is besides its inner tensors: "context", encoded; "size" and "stride"; "shard", if it is one."""

Shard = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Of a DTensor: the name of its mesh, its global shape, and the offset."""


def is_wrapped(tensor: Any) -> bool:
    """Whether a tensor is taken apart: it is of one of `CLASSES`."""
    return class_name(tensor) in CLASSES


def found_in(tensor: Any, path: str) -> tuple[Any, Shard | None] | None:
    """The tensor of one of `CLASSES` that a tensor is, or whose DTensor it is. Raises StateError without a value."""
    if is_wrapped(tensor):
        return tensor, None
    if type(tensor).__name__ != "DTensor" or not is_wrapped(tensor._local_tensor):
        return None
    whole, offset, _, mesh = place_of(tensor, path)
    return local_of(tensor.detach()), (str(mesh), whole, offset)


def inner_of(tensor: Any) -> dict[str, Any]:
    """The tensors that a tensor wraps, by name."""
    return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}


def code_of(tensor: Any) -> Code:
    """The class of a tensor, for a node."""
    return [WRAPPED, class_name(tensor)]


def attributes_of(tensor: Any, path: str, shard: Shard | None = None) -> Attributes:
    """What a tensor of `CLASSES` is besides its inner tensors. Raises StateError if its context cannot be encoded."""
    package = type(tensor).__module__.partition(".")[0]
    made: Attributes = {"context": _encode(tensor.__tensor_flatten__()[1], package, path),
                        "size": list(tensor.shape), "stride": list(tensor.stride())}  # fmt: skip
    if shard is not None:
        mesh, whole, offset = shard
        made["shard"] = [mesh, list(whole), list(offset)]
    return made


def make(inner: Mapping[str, Any], code: Code, attributes: Attributes) -> Any:
    """Put a tensor together. Raises StructureMismatch if its class is not loaded."""
    kind = _loaded(code[1])
    if kind is None or code[1] not in CLASSES:
        raise StructureMismatch("the checkpoint holds a tensor that wraps others, and its class is not loaded: import "
                                "it first", expected=code[1])  # fmt: skip
    package = code[1].partition(".")[0]
    torch = sys.modules["torch"]
    size, stride = torch.Size(attributes["size"]), tuple(attributes["stride"])
    return kind.__tensor_unflatten__(dict(inner), _decode(attributes["context"], package), size, stride)


def loaded(module: str, qualname: str) -> Any:
    """What has a name in the modules that are loaded; None if nothing has it. No code of a module runs."""
    value: Any = sys.modules.get(module)
    for part in qualname.split("."):
        value = vars(value).get(part) if hasattr(value, "__dict__") else None
    return value


def _loaded(name: str) -> Any:
    """The class of a name in the modules that are loaded; None if there is none."""
    module, _, qualname = name.rpartition(".")
    while module and module not in sys.modules:
        module, _, outer = module.rpartition(".")
        qualname = f"{outer}.{qualname}"
    value = loaded(module, qualname)
    return value if isinstance(value, type) else None


# Contexts: JSON, in which each value that is none of JSON's is a list with a tag


def _encode(value: Any, package: str, path: str) -> Any:
    torch = sys.modules["torch"]
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    if type(value) in (list, tuple) or isinstance(value, torch.Size):
        tag = "size" if isinstance(value, torch.Size) else "list" if type(value) is list else "tuple"
        return [tag, *(_encode(item, package, path) for item in value)]
    if type(value) is dict and all(type(key) is str for key in value):
        return ["dict", *([key, _encode(item, package, path)] for key, item in value.items())]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    if type(value).__module__.partition(".")[0] == package:
        if isinstance(value, enum.Enum):
            return ["enum", class_name(value), value.name]
        if dataclasses.is_dataclass(value):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            return ["data", class_name(value), _encode(fields, package, path)]
        if isinstance(value, tuple) and hasattr(value, "_asdict"):
            return ["named", class_name(value), _encode(value._asdict(), package, path)]
    raise StateError("the context of this tensor, which wraps others, cannot be saved", tensor=path,
                     found=class_name(value))  # fmt: skip


def _decode(code: Any, package: str) -> Any:
    torch = sys.modules["torch"]
    if not isinstance(code, list):
        return code
    tag, *rest = code
    if tag in ("list", "tuple", "size"):
        made = [_decode(item, package) for item in rest]
        return made if tag == "list" else tuple(made) if tag == "tuple" else torch.Size(made)
    if tag == "dict":
        return {key: _decode(item, package) for key, item in rest}
    if tag == "dtype" and isinstance(dtype := getattr(torch, rest[0], None), torch.dtype):
        return dtype
    if tag == "device":
        return torch.device(rest[0])
    kind = _loaded(rest[0]) if rest[0].partition(".")[0] == package else None
    if kind is None:
        raise StructureMismatch("the checkpoint holds a tensor that wraps others, and a class that it needs is not "
                                "loaded: import it first", expected=rest[0])  # fmt: skip
    if tag == "enum":
        return kind[rest[1]]
    fields = _decode(rest[1], package)
    if tag == "named" and kind.__bases__ == (tuple,):
        return tuple.__new__(kind, fields.values())
    made = object.__new__(kind)
    for name, item in fields.items():
        object.__setattr__(made, name, item)
    return made


def check(code: Any, attributes: Any) -> None:
    """Raise ValueError, or what reading raises, if a class or attributes that were read are none."""
    if len(code) != 2 or code[1] not in CLASSES:
        raise ValueError(f"no tensor that wraps others is of the class {code!r}")
    if not {"context", "size", "stride"} <= attributes.keys() <= {"context", "size", "stride", "shard"}:
        raise ValueError("a tensor that wraps others without a context or a size")
    if not all(type(n) is int and n >= 0 for n in (*attributes["size"], *attributes["stride"])):
        raise ValueError("a tensor that wraps others has no size")
    _check(attributes["context"])
    if "shard" in attributes:
        mesh, whole, offset = attributes["shard"]
        if not isinstance(mesh, str) or not all(type(n) is int and n >= 0 for n in (*whole, *offset)):
            raise ValueError("a tensor that wraps others is no shard")


_MOST_LEVELS = 20


def _check(code: Any, depth: int = 0) -> None:
    if depth > _MOST_LEVELS or isinstance(code, dict):
        raise ValueError("a context of a tensor that wraps others is none")
    if isinstance(code, list):
        tag, *rest = code
        if tag in ("list", "tuple", "size"):
            for item in rest:
                _check(item, depth + 1)
        elif tag == "dict":
            for key, item in rest:
                if not isinstance(key, str):
                    raise ValueError("a context has a key that is no text")
                _check(item, depth + 1)
        elif tag in ("data", "named"):
            name, fields = rest
            _check(fields, depth + 1)
            if not isinstance(name, str) or fields[0] != "dict":
                raise ValueError("a context has a dataclass without a name or fields")
        elif tag not in ("dtype", "device", "enum") or not all(isinstance(text, str) for text in rest):
            raise ValueError(f"a context has the unknown tag {tag!r}")
