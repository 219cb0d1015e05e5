"""A state taken apart: tensors and arrays are *leaves* (bytes for the slot), everything else is a *tree* for JSON.

Users who save only arrays must not pay for torch, so torch is looked up in ``sys.modules`` and never imported only to
ask whether something is a tensor.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import add
from typing import Annotated, Any

import msgspec
import numpy as np
import xxhash

from ..errors import StateError

Tree = list[Any]
"""A node is ``[tag, …]``: e(ntry index), p(lain index), d(ict), l(ist), t(uple), k (see `containers`), o(bject with
state_dict)."""


def inside(tree: Tree) -> Tree:
    """The node of a plain container or leaf: without the object, or the class, that it is of."""
    return inside(tree[1]) if tree[0] in ("o", "k") else tree


Natural = Annotated[int, msgspec.Meta(ge=0)]


class Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """What a slot says about one tensor shard or array (the model of PyTorch DCP)."""

    name: str  # path in the state, dict keys and list indices joined with "."
    kind: str  # "tensor" or "array"
    dtype: str  # "float32", "bfloat16", … (torch) or numpy's dtype.str ("<f4")
    global_shape: tuple[Natural, ...]  # shape of the whole tensor
    offset: tuple[Natural, ...]  # where this shard begins in it, one number per dimension
    shape: tuple[Natural, ...]  # shape of this shard
    start: Natural  # first byte, counted from the start of the payload
    nbytes: Natural
    mesh: str | None = None  # of a DTensor, which ranks hold it: see `mesh_name`; None: it is no DTensor


def ties_of(entries: Sequence[Entry]) -> tuple[int, ...]:
    """For each entry, the number of the first one with the same memory: usually its own; always for an empty one."""
    firsts: dict[Any, int] = {}
    return tuple(
        firsts.setdefault((e.start, e.kind, e.dtype, e.global_shape, e.offset, e.shape), number) if e.nbytes else number
        for number, e in enumerate(entries)
    )


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A live tensor or array found in the state; ``entry.start`` is not known yet."""

    entry: Entry
    value: Any  # torch.Tensor (local shard) or np.ndarray
    tie: int  # index of an earlier leaf with the same memory, or -1
    whole: Any = None  # the DTensor whose local shard it is


@dataclasses.dataclass(frozen=True)
class Structure:
    """What usually does not change from save to save: equal structures have equal extents."""

    entries: tuple[Entry, ...]
    ties: tuple[int, ...]  # for each leaf the number of an earlier one with the same memory, or -1
    tree: Tree
    private: frozenset[str] = frozenset()  # names of leaves of which each rank has its own


@dataclasses.dataclass
class Flat:
    """A state taken apart."""

    structure: Structure  # everything except the values
    values: list[Any]
    plain: list[Any]  # values of the plain leaves, each in a form that JSON can hold
    # the DTensors to which leaves belong as local shards, by number of the leaf
    wholes: dict[int, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, leaves: Sequence[Leaf], tree: Tree, plain: list[Any], private: frozenset[str] = frozenset()) -> Flat:
        structure = Structure(tuple(leaf.entry for leaf in leaves), tuple(leaf.tie for leaf in leaves), tree, private)
        wholes = {number: leaf.whole for number, leaf in enumerate(leaves) if leaf.whole is not None}
        return cls(structure, [leaf.value for leaf in leaves], plain, wholes)

    @property
    def is_on_device(self) -> bool:
        return any(is_tensor(value) and value.device.type != "cpu" for value in self.values)

    @functools.cached_property
    def leaves(self) -> list[Leaf]:
        structure = self.structure
        return [
            Leaf(entry, value, tie, self.wholes.get(number))
            for number, (entry, value, tie) in enumerate(
                zip(structure.entries, self.values, structure.ties, strict=True)
            )
        ]


def is_tensor(value: Any) -> bool:
    """Whether something is a torch tensor, without loading torch to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


# The dtypes that a slot can hold: one table for writing and for reading


TORCH_ITEM_NBYTES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32", "bcomplex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
    **dict.fromkeys(
        ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
         "float4_e2m1fn_x2", "bits8", "bits4x2", "bits2x4", "bits1x8"), 1,
    ),
    "bits16": 2,
}  # fmt: skip
"""The torch dtypes a slot can hold and their bytes per element."""

# What dtype.str of an array without fields can be. Give nothing else to np.dtype(), because it evaluates parts of it.
_ARRAY_DTYPE = re.compile(r"[<>|](?:[biufcSUV]\d{1,9}|[mM]8(?:\[\d{0,9}[a-zA-Z]{1,2}\])?)")


def item_nbytes(kind: Any, dtype: Any) -> int:
    """Bytes of an element; a dtype that a slot cannot hold is a ValueError or a LookupError."""
    if kind == "tensor":
        return TORCH_ITEM_NBYTES[dtype]
    if kind != "array":
        raise ValueError(f"unknown kind {kind!r}")
    return array_dtype(dtype).itemsize


def array_dtype(name: Any) -> np.dtype[Any]:
    """The NumPy dtype of a name; a name that a slot cannot hold is a ValueError."""
    if not isinstance(name, str) or not _ARRAY_DTYPE.fullmatch(name):
        raise ValueError(f"dtype {name!r} is not allowed")
    parsed = np.dtype(name)
    if parsed.hasobject or parsed.names is not None or parsed.str != name:
        raise ValueError(f"dtype {name!r} is not allowed")
    return parsed


def array_dtype_name(dtype: np.dtype[Any], path: str) -> str:
    """The name under which a slot holds a NumPy dtype. Raises StateError if it would be read back as another."""
    if dtype.hasobject or dtype.names is not None:
        raise StateError("an array of objects or records cannot be saved", tensor=path, found=dtype)
    name: str = dtype.str
    try:
        is_known = array_dtype(name) == dtype and dtype.metadata is None
    except (ValueError, TypeError):
        is_known = False
    if not is_known:  # for example bfloat16 of ml_dtypes, which says "<V2"
        raise StateError("NumPy knows only the size of this dtype, or it carries metadata: view it as an integer "
                         "dtype of that size", tensor=path, found=repr(dtype))  # fmt: skip
    return name


def torch_dtype_name(dtype: Any, path: str) -> str:
    """The name under which a slot holds a torch dtype. Raises StateError if it has no name."""
    name = _name_of(dtype)
    if name not in TORCH_ITEM_NBYTES:
        raise StateError("torch cannot copy tensors of this dtype: view it as torch.uint8, and save that",
                         tensor=path, found=dtype)  # fmt: skip
    return name


@functools.cache
def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


# Which ranks hold a DTensor: meshes by name, so that the same name of a tensor on two meshes is two tensors


_mesh_names: dict[int, tuple[int, str]] = {}  # by the id of a mesh that lives: the size of the job, its name


def mesh_name(mesh: Any) -> str:
    """Name a device mesh by what it leaves out of the ranks of the job.

    A mesh that was cut out of a larger one has the coordinates, there, that all of its ranks share. So
    it can be found again after its other dimensions have changed. Any other is named by its ranks.

    Returns:
        "" for all ranks; "expert=1/4,pp=0/2"; "ranks 0-6:2"; or "ranks #..." with a checksum.
    """
    import torch.distributed as dist

    size = dist.get_world_size() if dist.is_initialized() else 0
    # By its id: meshes are equal that were cut out of different ones, or belong to an earlier job of the process.
    known = _mesh_names.get(id(mesh))
    if known is not None and known[0] == size:
        return known[1]
    name = _mesh_name(mesh, size)
    if known is None:
        weakref.finalize(mesh, _mesh_names.pop, id(mesh))
    _mesh_names[id(mesh)] = size, name
    return name


def _mesh_name(mesh: Any, size: int) -> str:
    ranks = np.unique(mesh.mesh.numpy())
    if len(ranks) == (size or len(ranks)):
        return ""
    root = mesh._get_root_mesh()
    names = getattr(root, "mesh_dim_names", None)
    if root is not mesh and names:
        coordinates = np.argwhere(np.isin(root.mesh.numpy(), ranks))
        dims = list(zip(names, coordinates.T, root.mesh.shape, strict=True))
        fixed = {name: f"{name}={column[0]}/{many}" for name, column, many in dims
                 if many > 1 and (column == column[0]).all()}  # fmt: skip
        if fixed and math.prod(many for name, _, many in dims if name not in fixed) == len(ranks):
            return ",".join(fixed[name] for name in sorted(fixed))
    steps = np.unique(np.diff(ranks))
    if len(steps) <= 1:
        step = f":{steps[0]}" if len(steps) and steps[0] > 1 else ""
        return f"ranks {ranks[0]}-{ranks[-1]}{step}" if len(ranks) > 1 else f"rank {ranks[0]}"
    return f"ranks #{xxhash.xxh3_64_hexdigest(ranks.astype('<i8').tobytes())}"


NameAndMesh = tuple[str, str | None]
"""The name of a tensor, and that of its mesh."""


def names_on_several_meshes(tensors: Iterable[NameAndMesh]) -> set[str]:
    """The names that ranks have on several meshes."""
    meshes_of: dict[str, set[str | None]] = {}
    for name, mesh in tensors:
        meshes_of.setdefault(name, set()).add(mesh)
    return {name for name, meshes in meshes_of.items() if len(meshes) > 1}


def apart(tensors: Iterable[NameAndMesh]) -> Callable[[str, str | None], str]:
    """Tell tensors of one name on several meshes apart: a function of name and mesh, which adds "@" and the mesh."""
    several = names_on_several_meshes(tensors)
    return lambda name, mesh: f"{name}@{mesh or 'all ranks'}" if name in several and mesh is not None else name


# Tensors and arrays


def tensor_entry(torch: Any, tensor: Any, path: str) -> tuple[Any, Entry, tuple[Any, ...] | None]:
    """Describe a tensor: shard, entry, and what identifies its memory. Raises StateError if it cannot be saved."""
    try:
        return _tensor_entry(torch, tensor, path)
    except StateError:
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:  # for example of nested tensors
        raise StateError(f"this tensor cannot be read: {error}", tensor=path, found=class_name(tensor)) from None


def _tensor_entry(torch: Any, tensor: Any, path: str) -> tuple[Any, Entry, tuple[Any, ...] | None]:
    shard: list[Any] | None = None
    mesh: str | None = None
    if type(tensor).__name__ == "DTensor":
        global_shape, mesh = tuple(tensor.shape), mesh_name(tensor.device_mesh)
        tensor, *shard = dtensor_shard(tensor.detach(), path)
    elif is_placed(tensor):
        tensor, global_shape, *shard = _placed_part(tensor, path)
    tensor = as_plain_tensor(torch, tensor, path)
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
        what = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise StateError("only dense tensors with memory of their own can be saved", tensor=path, found=what)
    if shard is None:
        global_shape = tuple(tensor.shape)
        shard = [global_shape, (0,) * len(global_shape)]
    shape, offset = shard
    dtype = torch_dtype_name(tensor.dtype, path)
    nbytes = math.prod(shape) * tensor.element_size()
    if nbytes and not has_memory(tensor):
        raise StateError("this tensor has no memory now: its storage was made smaller, or it is kept elsewhere",
                         tensor=path, found=f"{tensor.untyped_storage().nbytes()} bytes of storage")  # fmt: skip
    entry = Entry(path, "tensor", dtype, global_shape, offset, shape, 0, nbytes, mesh)
    plain_bits = not (tensor.is_conj() or tensor.is_neg())
    key = (str(tensor.device), tensor.data_ptr(), dtype, shape, tensor.stride()) if nbytes and plain_bits else None
    return tensor, entry, key


class Described:
    """Live tensors and arrays with what `tensor_entry` and `array_entry` say, so that a restore asks once for each."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, tuple[Any, Entry, tuple[Any, ...] | None]]] = {}

    def of(self, value: Any, path: str) -> tuple[Any, Entry, tuple[Any, ...] | None]:
        """Describe a tensor or array; the name of the entry may be that of an earlier call."""
        known, said = self._known.get(id(value), (None, None))
        if said is None or known is not value:
            is_array = isinstance(value, np.ndarray)
            said = array_entry(value, path) if is_array else tensor_entry(sys.modules["torch"], value, path)
            self._known[id(value)] = value, said
        return said

    def forget(self) -> None:
        """Describe everything anew: tensors may have got other memory."""
        self._known.clear()


def is_placed(tensor: Any) -> bool:
    """Whether a tensor says which part of a larger one it is, by the attributes of PyTorch's `CheckpointableTensor`."""
    return hasattr(tensor, "global_shape") and all(hasattr(tensor, name) for name in _PLACE)


def _placed_part(tensor: Any, path: str) -> tuple[Any, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The part of a larger tensor that a tensor holds, the shape of the larger one, the part's shape and its place.

    Source: torch.distributed.checkpoint.protocol, since PyTorch 2.14.
    """
    whole = tuple(tensor.global_shape)
    parts = list(zip(tensor.global_offsets, tensor.local_offsets, tensor.local_sizes, strict=True))
    if len(parts) > 1:
        raise StateError("this tensor holds several parts of a larger one: make a tensor of each", tensor=path,
                         found=f"{len(parts)} parts of {list(whole)}")  # fmt: skip
    if not parts:  # this rank has nothing of it
        nothing = (0,) * len(whole)
        return tensor.detach().reshape(-1)[:0].reshape(nothing), whole, nothing, nothing
    ((offset, local, shape),) = ([tuple(numbers) for numbers in part] for part in parts)
    outside = any(at < 0 or at + size > most for at, size, most in zip(
        (*offset, *local), (*shape, *shape), (*whole, *tensor.shape), strict=True))  # fmt: skip
    if outside:
        raise StateError("the part that this tensor is said to hold is not in it, or not in the larger one",
                         tensor=path, expected=f"{list(shape)} at {list(offset)} of {list(whole)}",
                         found=f"at {list(local)} of {list(tensor.shape)}")  # fmt: skip
    return tensor.detach()[tuple(map(slice, local, map(add, local, shape)))], whole, shape, offset


def as_plain_tensor(torch: Any, tensor: Any, path: str) -> Any:
    """The tensor itself, without a class of its own, like Parameter. Raises StateError if it wraps others."""
    kind = type(tensor)
    if kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
        inner: tuple[Any, ...] = ()
        if callable(getattr(tensor, "__tensor_flatten__", None)):
            inner = tuple(tensor.__tensor_flatten__()[0])
        hint = ", ".join(f"its {name}" for name in inner) or "the tensors that it is made of"
        raise StateError(f"a tensor that wraps others cannot be saved as one: save {hint}", tensor=path,
                         found=class_name(tensor))  # fmt: skip
    if torch.nn.parameter.is_lazy(tensor):
        raise StateError("a parameter that is not initialized has no values yet: give its module an input first",
                         tensor=path, found=class_name(tensor))  # fmt: skip
    with torch._C.DisableTorchFunctionSubclass():  # what the class makes of operations is not what the tensor holds
        tensor = tensor.detach()
        return tensor if type(tensor) is torch.Tensor else tensor.as_subclass(torch.Tensor)


def is_as_stored(value: Any) -> bool:
    """Whether a tensor or array is in the host's memory, in one piece, with the bits that a slot holds."""
    if isinstance(value, np.ndarray):
        return bool(value.flags.c_contiguous)
    return value.device.type == "cpu" and value.is_contiguous() and not (value.is_conj() or value.is_neg())


def has_memory(tensor: Any) -> bool:
    """Whether the storage of a tensor with elements is complete: it may have been freed for a while."""
    count = tensor.numel()
    if not tensor.is_contiguous():
        count = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    end: int = (tensor.storage_offset() + count) * tensor.element_size()
    return bool(tensor.data_ptr() != 0 and end <= tensor.untyped_storage().nbytes())


def class_name(value: Any) -> str:
    """The name of the class of a value, with its module."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


_PLACE = ("global_offsets", "local_offsets", "local_sizes")
_SHARD_PLACES = 10_000
_shard_places: dict[Any, tuple[Any, Any]] = {}  # shape and offset of a shard, by what they depend on


def dtensor_shard(tensor: Any, path: str) -> tuple[Any, tuple[int, ...], tuple[int, ...]]:
    """The local shard of a DTensor, its shape, and where it begins in the whole."""
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise StateError("a DTensor with a partial placement has no value yet: redistribute it", tensor=path)
    if mesh.get_coordinate() is None:  # this rank has nothing of it
        if not tensor.shape:
            raise StateError("a DTensor without dimensions on a mesh without this rank cannot be saved: save its value",
                             tensor=path)  # fmt: skip
        nothing = (0,) * tensor.dim()
        return local_of(tensor).reshape(nothing), nothing, nothing
    key = (tuple(tensor.shape), tuple(mesh.shape), tuple(mesh.get_coordinate() or ()), placements)
    if key not in _shard_places:  # PyTorch takes up to a millisecond for this
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        if len(_shard_places) >= _SHARD_PLACES:
            _shard_places.clear()
        _shard_places[key] = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    shape, offset = _shard_places[key]
    local = local_of(tensor)
    if not local.numel() and not math.prod(shape):  # which of its dimensions is empty means nothing
        shape = tuple(local.shape)
        room = zip(offset, tensor.shape, shape, strict=True)
        return local, shape, tuple(min(at, most - size) for at, most, size in room)
    if tuple(local.shape) != tuple(shape):
        raise StateError("the local shard of a DTensor is not where its placement says", tensor=path,
                         expected=tuple(shape), found=tuple(local.shape))  # fmt: skip
    return local, tuple(shape), tuple(offset)


def place_of(tensor: Any, path: str) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], str | None]:
    """Global shape, offset and local shape of a tensor, and a DTensor's mesh. Raises StateError without a value."""
    if type(tensor).__name__ == "DTensor":
        _, shape, offset = dtensor_shard(tensor.detach(), path)
        return tuple(tensor.shape), offset, shape, mesh_name(tensor.device_mesh)
    shape = tuple(tensor.shape)
    return shape, (0,) * len(shape), shape, None


def local_of(dtensor: Any) -> Any:
    """The local shard of a DTensor, once it is there: it may be the result of a collective that is still running."""
    local = dtensor.to_local()
    return local.wait() if type(local).__name__ == "AsyncCollectiveTensor" else local


def replica_ranks(dtensor: Any) -> tuple[int, ...]:
    """The ranks that hold the same shard of a DTensor as this one, ascending, according to its placements."""
    mesh = dtensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    index = tuple(slice(None) if p.is_replicate() else at for p, at in zip(dtensor.placements, coordinate, strict=True))
    return tuple(sorted(mesh.mesh[index].reshape(-1).tolist()))


@dataclasses.dataclass(frozen=True)
class Replica:
    """A DTensor without shards, on the mesh of another one that is ``near``."""

    near: Any


def as_shard_like(live: Any, local: Any) -> Any:
    """Make a local shard part of a DTensor like a live one; if that has another shard or none, return it as it is."""
    if isinstance(live, Replica):
        from torch.distributed.tensor import Replicate

        mesh = live.near.device_mesh
        return type(live.near).from_local(local.to(live.near.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    if type(live).__name__ != "DTensor" or live.to_local().shape != local.shape:
        return local
    on_device = local.to(live.device)
    return type(live).from_local(on_device, live.device_mesh, live.placements, run_check=False, shape=live.shape,
                                 stride=live.stride())  # fmt: skip


def array_entry(array: np.ndarray, path: str) -> tuple[Any, Entry, tuple[Any, ...] | None]:
    """Describe an array, as :func:`tensor_entry` does a tensor."""
    if type(array) not in (np.ndarray, np.memmap):
        raise StateError("an array of this class may hold more than its bytes: save the arrays it is made of",
                         tensor=path, found=class_name(array))  # fmt: skip
    array = array if type(array) is np.ndarray else array.view(np.ndarray)
    dtype = array_dtype_name(array.dtype, path)
    zero = (0,) * array.ndim
    entry = Entry(path, "array", dtype, array.shape, zero, array.shape, 0, array.nbytes)
    address = array.__array_interface__["data"][0]
    return array, entry, ("cpu", address, dtype, array.shape, array.strides) if array.nbytes else None


# Bytes


def as_bytes(value: Any) -> np.ndarray:
    """View a contiguous CPU tensor or array as a 1-d uint8 array (no copy).

    A storage that torch has given to NumPy can never be resized again, which FSDP and others do; so torch does not know
    about this view. It keeps the tensor alive, but the storage must not be resized while the view is used.
    """
    if isinstance(value, np.ndarray):
        return value.reshape(-1).view(np.uint8)
    nbytes: int = value.numel() * value.element_size()
    if not nbytes:
        return np.empty(0, dtype=np.uint8)
    end = value.storage_offset() * value.element_size() + nbytes
    if (
        value.device.type != "cpu"
        or not value.is_contiguous()
        or value.is_conj()
        or value.untyped_storage().nbytes() < end
    ):
        raise AssertionError(f"the bytes of this tensor are not in one place of the host's memory: {value.device}")
    room: Any = (ctypes.c_ubyte * nbytes).from_address(value.data_ptr())
    room.owner = value
    raw: np.ndarray = np.frombuffer(room, dtype=np.uint8)
    return raw


def kept_bytes(value: Any) -> np.ndarray:
    """View like `as_bytes` what is read after `save` has returned; torch refuses to resize the storage from now on.

    There is no other way to prevent that, and nothing may take away the memory while it is being copied.
    """
    if isinstance(value, np.ndarray):
        return as_bytes(value)
    raw: np.ndarray = flat_bytes(value).numpy()
    return raw


def flat_bytes(tensor: Any) -> Any:
    """View a contiguous tensor as a 1-d uint8 tensor; if it has a single element, its strides do not matter."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(sys.modules["torch"].uint8)


def live_bytes(value: Any, start: int = 0, end: int | None = None, kept: bool = False) -> np.ndarray:
    """Some of the bytes of a tensor or array in C order, on the host: a view if they are so already, otherwise a copy.

    Args:
        kept: a view is used after `save` has returned.
    """
    if isinstance(value, np.ndarray):
        return as_bytes(np.ascontiguousarray(value))[start:end]
    value = as_bits(value.detach().resolve_conj().resolve_neg()).contiguous()
    if not value.numel():  # an empty tensor may have any strides
        return np.empty(0, dtype=np.uint8)
    flat = flat_bytes(value)[start:end]
    return kept_bytes(flat) if kept and flat.device.type == "cpu" else as_bytes(flat.cpu())


def as_bits(tensor: Any) -> Any:
    """View a tensor as bytes if torch does not copy its dtype exactly: in a bool, it turns all but 0 into 1."""
    return tensor.view(sys.modules["torch"].uint8) if is_copied_as_bytes(tensor.dtype) else tensor


@functools.cache
def is_copied_as_bytes(dtype: Any) -> bool:
    """Whether torch does not copy a dtype exactly, so that it is copied as bytes."""
    return dtype.itemsize == 1 and torch_dtype_name(dtype, "") not in ("int8", "uint8")


def from_bytes(entry: Entry, raw: np.ndarray) -> Any:
    """View bytes as the tensor or array that an entry describes (no copy)."""
    if entry.kind == "array":
        dtype = np.dtype(entry.dtype)
        return raw.view(dtype).reshape(entry.shape) if entry.nbytes else np.ndarray(entry.shape, dtype)
    import torch

    dtype = getattr(torch, entry.dtype)
    flat = torch.from_numpy(raw) if entry.nbytes else torch.zeros(0, dtype=torch.uint8)  # numpy's empty has stride 0
    return flat.view(dtype).view(entry.shape)
