"""State of the training ↔ leaves and a tree.

``flatten`` takes a nested state apart: tensors and arrays become *leaves* (bytes for the slot), everything
else a *tree* that JSON can hold. The way back is in `rebuild`.

The core must not pay for torch where there are only arrays, so torch is looked up in ``sys.modules`` and
never imported to ask whether something is a tensor.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import math
import sys
from typing import Any

import numpy as np

from .errors import StateError

Tree = list[Any]
"""A node is ``[tag, …]``: e(ntry index), p(lain index), d(ict), l(ist), t(uple), o(bject with state_dict)."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """What a slot says of one tensor shard or array (the model of PyTorch DCP).

    Args:
        name: path in the state, dict keys and list indices joined with ".".
        kind: "tensor" or "array".
        dtype: "float32", "bfloat16", … (torch) or numpy's dtype.str ("<f4").
        global_shape: shape of the whole tensor.
        offset: where this shard begins in it, one number per dimension.
        shape: shape of this shard.
        start: first byte, counted from the start of the payload.
        nbytes: its bytes.
    """

    name: str
    kind: str
    dtype: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclasses.dataclass
class Leaf:
    """A live tensor or array found in the state; ``entry.start`` is not known yet."""

    entry: Entry
    value: Any  # torch.Tensor (local shard) or np.ndarray
    tie: int  # index of an earlier leaf with the same memory, or -1
    whole: Any = None  # the DTensor whose local shard it is


@dataclasses.dataclass
class Flat:
    """A state taken apart."""

    leaves: list[Leaf]
    tree: Tree
    plain: list[Any]  # values of the plain leaves, each in a form that JSON can hold
    private: frozenset[str] = frozenset()  # names of leaves that each rank has its own of

    @functools.cached_property
    def fingerprint(self) -> tuple[object, ...]:
        """Tells whether two states have the same layout: equal fingerprints, equal extents."""
        return tuple((leaf.entry, leaf.tie) for leaf in self.leaves)


def flatten(state: Any) -> Flat:
    """Take a state apart without copying any tensor.

    Not collective. The leaves alias the live tensors.

    Raises:
        StateError: a leaf cannot be saved (its path is named), or a container holds itself.
    """
    walk = _Flatten()
    tree = walk.visit(state, "")
    return Flat(walk.leaves, tree, walk.plain, frozenset(walk.private))


def flatten_or_none(state: Any) -> Flat | None:
    """Take a state apart as `flatten` does; None where it cannot be. Not collective."""
    try:
        return flatten(state)
    except Exception:  # state_dict() of an object may raise anything
        return None


class _Flatten:
    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self.plain: list[Any] = []
        self.names: dict[str, int] = {}
        self.memory: dict[tuple[Any, ...], int] = {}
        self.open: set[int] = set()
        self.private: list[str] = []
        self.torch = sys.modules.get("torch")

    def visit(self, value: Any, path: str) -> Tree:
        if self.torch is not None and isinstance(value, self.torch.Tensor):
            return self.leaf(value, *tensor_entry(self.torch, value, path))
        if isinstance(value, np.ndarray):
            return self.leaf(value, *array_entry(value, path))
        if isinstance(value, (dict, list, tuple)) or is_object(value):
            if id(value) in self.open:
                raise StateError("the state contains itself", tensor=path)
            self.open.add(id(value))
            tree = self.container(value, path)
            self.open.remove(id(value))
            return tree
        self.plain.append(encode_plain(value, path))
        return ["p", len(self.plain) - 1]

    def container(self, value: Any, path: str) -> Tree:
        prefix = path + "." if path else ""
        if isinstance(value, dict):
            items = [[encode_key(k, path), self.visit(v, f"{prefix}{k}")] for k, v in value.items()]
            return ["d", items]
        if isinstance(value, (list, tuple)):
            tag = "l" if isinstance(value, list) else "t"
            return [tag, [self.visit(v, f"{prefix}{i}") for i, v in enumerate(value)]]
        before = len(self.leaves)
        tree = self.visit(value.state_dict(), path)
        if getattr(value, "rank_private", False):
            self.private += [leaf.entry.name for leaf in self.leaves[before:]]
        return ["o", tree]

    def leaf(self, value: Any, local: Any, entry: Entry, key: tuple[Any, ...] | None) -> Tree:
        count = self.names[entry.name] = self.names.get(entry.name, 0) + 1
        if count > 1:  # {"a.b": x, "a": {"b": y}}: the tree keeps them apart, the name says so too
            entry = dataclasses.replace(entry, name=f"{entry.name}~{count}")
        tie = -1 if key is None else self.memory.setdefault(key, len(self.leaves))
        whole = value if type(value).__name__ == "DTensor" else None
        self.leaves.append(Leaf(entry, local, -1 if tie == len(self.leaves) else tie, whole))
        return ["e", len(self.leaves) - 1]


def is_object(value: Any) -> bool:
    """Tell an object that saves and loads itself by ``state_dict`` and ``load_state_dict``."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def is_tensor(value: Any) -> bool:
    """Tell a torch tensor, without loading torch to ask."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


# Tensors and arrays


def tensor_entry(torch: Any, tensor: Any, path: str) -> tuple[Any, Entry, tuple[Any, ...] | None]:
    """Describe a tensor: its local shard, the entry, and what identifies its memory (None: nothing does)."""
    tensor = tensor.detach()
    global_shape = shape = tuple(tensor.shape)
    offset: tuple[int, ...] = (0,) * len(shape)
    if type(tensor).__name__ == "DTensor":
        tensor, shape, offset = dtensor_shard(tensor, path)
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
        what = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise StateError("only dense tensors with memory of their own can be saved", tensor=path, found=what)
    dtype = str(tensor.dtype).removeprefix("torch.")
    nbytes = math.prod(shape) * tensor.element_size()
    entry = Entry(path, "tensor", dtype, global_shape, offset, shape, 0, nbytes)
    plain_bits = not (tensor.is_conj() or tensor.is_neg())
    key = (str(tensor.device), tensor.data_ptr(), dtype, shape, tensor.stride()) if nbytes and plain_bits else None
    return tensor, entry, key


_SHARD_PLACES = 10_000
_shard_places: dict[Any, tuple[Any, Any]] = {}  # shape of the shard and where it begins; what they depend on is the key


def dtensor_shard(tensor: Any, path: str) -> tuple[Any, tuple[int, ...], tuple[int, ...]]:
    """The local shard of a DTensor, its shape, and where it begins in the whole."""
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise StateError("a DTensor with a partial placement has no value yet: redistribute it", tensor=path)
    key = (tuple(tensor.shape), tuple(mesh.shape), tuple(mesh.get_coordinate() or ()), placements)
    if key not in _shard_places:  # PyTorch takes up to a millisecond to find out
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        if len(_shard_places) >= _SHARD_PLACES:
            _shard_places.clear()
        _shard_places[key] = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    shape, offset = _shard_places[key]
    local = tensor.to_local()
    if tuple(local.shape) != tuple(shape):
        raise StateError("the local shard of a DTensor is not where its placement says", tensor=path,
                         expected=tuple(shape), found=tuple(local.shape))  # fmt: skip
    return local, tuple(shape), tuple(offset)


def replica_ranks(dtensor: Any) -> tuple[int, ...]:
    """The ranks that hold the same shard of a DTensor as this one, ascending, as its placements say."""
    mesh = dtensor.device_mesh
    here = mesh.get_coordinate()
    if here is None:
        return ()
    index = tuple(slice(None) if p.is_replicate() else at for p, at in zip(dtensor.placements, here, strict=True))
    return tuple(sorted(mesh.mesh[index].reshape(-1).tolist()))


def as_shard_like(live: Any, local: Any) -> Any:
    """Make a local shard part of a DTensor like a live one; where that is none, or another shard, give it as it is."""
    if type(live).__name__ != "DTensor" or live.to_local().shape != local.shape:
        return local
    on_device = local.to(live.device)
    return type(live).from_local(on_device, live.device_mesh, live.placements, run_check=False, shape=live.shape,
                                 stride=live.stride())  # fmt: skip


def array_entry(array: np.ndarray, path: str) -> tuple[Any, Entry, tuple[Any, ...] | None]:
    """Describe an array, as :func:`tensor_entry` does a tensor."""
    if array.dtype.hasobject or array.dtype.names is not None:
        raise StateError("an array of objects or records cannot be saved", tensor=path, found=array.dtype)
    zero = (0,) * array.ndim
    entry = Entry(path, "array", array.dtype.str, array.shape, zero, array.shape, 0, array.nbytes)
    address = array.__array_interface__["data"][0]
    return array, entry, ("cpu", address, array.dtype.str, array.shape, array.strides) if array.nbytes else None


def as_bytes(value: Any) -> np.ndarray:
    """View a contiguous CPU tensor or array as a 1-d uint8 array (no copy)."""
    if isinstance(value, np.ndarray):
        return value.reshape(-1).view(np.uint8)
    import torch

    raw: np.ndarray = value.reshape(-1).view(torch.uint8).numpy()
    return raw


def live_bytes(value: Any) -> np.ndarray:
    """The bytes of a tensor or array in C order, on the host: a view where they are so already, else a copy."""
    if isinstance(value, np.ndarray):
        return as_bytes(np.ascontiguousarray(value))
    return as_bytes(value.detach().resolve_conj().resolve_neg().cpu().contiguous())


def from_bytes(entry: Entry, raw: np.ndarray) -> Any:
    """View bytes as the tensor or array that an entry describes (no copy)."""
    if entry.kind == "array":
        return raw.view(np.dtype(entry.dtype)).reshape(entry.shape)
    import torch

    dtype = getattr(torch, entry.dtype)
    flat = torch.from_numpy(raw) if entry.nbytes else torch.zeros(0, dtype=torch.uint8)  # numpy's empty has stride 0
    return flat.view(dtype).view(entry.shape)


# Plain leaves and keys: JSON that keeps Python's types apart


def encode_plain(value: Any, path: str) -> Any:
    """Put a plain leaf into a form that JSON can hold, exactly."""
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if abs(value) < 1 << 53 else ["i", hex(value)]
    if kind is float:
        return value if math.isfinite(value) else ["f", repr(value)]
    if kind is complex:
        return ["c", value.real.hex(), value.imag.hex()]
    if kind is bytes:
        return ["b", base64.b64encode(value).decode()]
    if isinstance(value, np.generic) and not value.dtype.hasobject and value.dtype.names is None:
        return ["n", value.dtype.str, base64.b64encode(value.tobytes()).decode()]
    name = f"{kind.__module__}.{kind.__qualname__}"
    raise StateError(
        "this leaf cannot be saved; save tensors, arrays, None, bool, int, float, complex, str, bytes, "
        "containers of them, or objects with state_dict and load_state_dict",
        tensor=path or "(the state itself)",
        found=name,
    )


def decode_plain(value: Any) -> Any:
    """Undo :func:`encode_plain`."""
    if not isinstance(value, list):
        return value
    tag, *rest = value
    if tag == "i":
        return int(rest[0], 16)
    if tag == "f":
        return float(rest[0])
    if tag == "c":
        return complex(float.fromhex(rest[0]), float.fromhex(rest[1]))
    if tag == "b":
        return base64.b64decode(rest[0])
    if tag == "k":
        return tuple(decode_plain(v) for v in rest[0])
    return np.frombuffer(base64.b64decode(rest[1]), dtype=np.dtype(rest[0]))[0]


def encode_key(key: Any, path: str) -> Any:
    """Put a dict key (a plain leaf or a tuple of them) into a form that JSON can hold."""
    if isinstance(key, tuple):
        return ["k", [encode_plain(part, path) for part in key]]
    return encode_plain(key, f"{path} (a key)")
