"""Read a directory that PyTorch DCP has written as a nested state.

No code in the directory runs. ``.metadata`` is a pickle, and an unpickler reads it that knows only the classes of DCP.
``torch.load(weights_only=True)`` reads tensors and objects.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

from ..errors import StateError, StructureMismatch
from ..state.shards import box
from ..storage.store import Store, open_store

_HINT = "read_dcp(..., trust_pickle=True) reads it, but may run code in it: use it only if you trust the author"


def read_dcp(path: str | os.PathLike[str], trust_pickle: bool = False) -> dict[str, Any]:
    """Read a checkpoint of ``dcp.save``, written by any number of ranks.

    Not collective. Afterwards the whole state is in memory. One part of a tensor is there twice while it is read.

    Args:
        path: the directory, or a URL that fsspec knows.
        trust_pickle: unpickle everything. This can run code.

    Returns:
        The state that was given to ``dcp.save``: nested, with whole tensors on the CPU.

    Raises:
        StateError: an object needs ``trust_pickle``. The error has its key.
        StructureMismatch: this is not a DCP checkpoint, or it is damaged.
    """
    store = open_store(path)
    metadata = _read_metadata(store, trust_pickle)
    flat: dict[str, Any] = {}
    for key, described in metadata.state_dict_metadata.items():
        if isinstance(described, dcp.TensorStorageMetadata):
            flat[key] = _read_tensor(store, metadata, key, described)
        else:
            flat[key] = _read(store, metadata, key, None, trust_pickle)
    paths = metadata.planner_data
    return unflatten_state_dict(flat, paths) if isinstance(paths, dict) else flat


def _read_tensor(store: Store, metadata: Any, key: str, described: Any) -> torch.Tensor:
    there = sum(math.prod(tuple(chunk.sizes)) for chunk in described.chunks)
    if there != math.prod(tuple(described.size)):
        raise StructureMismatch("parts of this tensor are not in the checkpoint", tensor=key,
                                expected=f"{math.prod(tuple(described.size))} elements", found=there)  # fmt: skip
    tensor = torch.empty(described.size, dtype=described.properties.dtype)
    for chunk in described.chunks:
        part = _read(store, metadata, key, chunk.offsets, False)
        if part.shape != chunk.sizes:
            raise StructureMismatch("a part of this tensor has another shape than in the metadata", tensor=key,
                                    expected=tuple(chunk.sizes), found=tuple(part.shape))  # fmt: skip
        tensor[box(chunk.offsets, chunk.sizes)] = part
    return tensor


def _read(store: Store, metadata: Any, key: str, offset: Any, trust_pickle: bool) -> Any:
    """Read a part of a tensor, or an object."""
    info = metadata.storage_data.get(dcp.MetadataIndex(key, offset))
    name = getattr(info, "relative_path", None)
    if not isinstance(name, str) or os.path.basename(name) != name:
        raise StructureMismatch("the metadata names no file of this directory for this tensor", tensor=key,
                                found=name)  # fmt: skip
    if info.transform_descriptors:
        raise StructureMismatch("this checkpoint was written with extensions of DCP, which only DCP can read",
                                tensor=key, found=info.transform_descriptors)  # fmt: skip
    raw = store.read(name, info.offset, info.length)
    if len(raw) != info.length:
        raise StructureMismatch("a file of this checkpoint is too short", tensor=key,
                                expected=f"{info.length} bytes at {info.offset} of {name}",
                                found=len(raw))  # fmt: skip
    try:
        with contextlib.nullcontext() if trust_pickle else torch.serialization.safe_globals(_NUMPY):
            return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=not trust_pickle)
    except pickle.UnpicklingError as error:
        reason = next((line for line in str(error).splitlines() if "GLOBAL" in line), str(error))
        raise StateError(f"this object is more than plain data. {_HINT}", tensor=key, found=reason[:200]) from None


# The functions and classes in NumPy's pickles of arrays and numbers.
_NUMPY: list[Any] = [
    np.ndarray, np.dtype, np.array(0).__reduce__()[0], np.float64(0).__reduce__()[0],
    *{type(np.dtype(code)) for code in "?bhilqBHILQefdgFDGSUV"},
]  # fmt: skip


class _Properties(dcp.TensorProperties):  # type: ignore[misc]
    """Properties of a tensor as any version of PyTorch has pickled them: 2.15 has added its strides."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        super().__setstate__(state[:5])


class _Unpickler(pickle.Unpickler):
    """Unpickles only the classes that a ``.metadata`` needs.

    Args:
        trusts: unpickle any class.
    """

    _KNOWN = frozenset({
        *(("torch.distributed.checkpoint.metadata", name) for name in (
            "ChunkStorageMetadata", "TensorStorageMetadata", "BytesStorageMetadata", "Metadata", "MetadataIndex",
            "StorageMeta", "_MEM_FORMAT_ENCODING")),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"), ("pathlib._local", "PosixPath"),
    })  # fmt: skip

    def __init__(self, raw: io.BytesIO, trusts: bool):
        super().__init__(raw)
        self._trusts = trusts

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (dcp.__name__, "TensorProperties"):
            return _Properties
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if self._trusts or is_dtype or (module, name) in self._KNOWN:
            return super().find_class(module, name)
        raise StateError(f"the metadata of this checkpoint is more than plain data. {_HINT}", found=f"{module}.{name}")


def _read_metadata(store: Store, trust_pickle: bool) -> Any:
    if ".metadata" not in store.names():
        raise StructureMismatch("this is not a checkpoint of PyTorch DCP: it has no .metadata", found=store.path)
    raw = io.BytesIO(store.read(".metadata"))
    try:
        metadata = _Unpickler(raw, trust_pickle).load()
    except (pickle.UnpicklingError, EOFError, ValueError, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, StateError):
            raise
        raise StructureMismatch("the .metadata of this checkpoint is damaged", found=error) from None
    if not isinstance(metadata, dcp.Metadata) or not isinstance(metadata.storage_data, dict):
        raise StructureMismatch("the .metadata of this checkpoint has another type", found=type(metadata))
    return metadata
