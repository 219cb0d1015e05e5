"""Read a directory that PyTorch DCP has written as a nested state.

No code in the directory runs. ``.metadata`` is a pickle, and an unpickler reads it that knows only the classes of DCP.
``torch.load(weights_only=True)`` reads tensors and objects. The package safetensors reads its files.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pickle
import struct
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

from ..errors import ConfigError, MlflashError, StateError, StructureMismatch, text_of
from ..state.boxes import box
from ..storage.store import SAFETENSORS, TORCH_CHECKPOINTING, Directory, Store, format_of, open_store

_HINT = "read_dcp(..., trust_pickle=True) reads it, but may run code in it: use it only if you trust the author"
# The functions and classes in NumPy's pickles of arrays and numbers.
_NUMPY: list[Any] = [
    np.ndarray, np.dtype, np.array(0).__reduce__()[0], np.float64(0).__reduce__()[0],
    *{type(np.dtype(code)) for code in "?bhilqBHILQefdgFDGSUV"},
]  # fmt: skip
# What PyTorch and pickle raise at damaged bytes.
_DAMAGE = (pickle.UnpicklingError, struct.error, AttributeError, EOFError, LookupError, RuntimeError, TypeError,
           ValueError)  # fmt: skip
_INDEX = "model.safetensors.index.json"


def read_dcp(path: str | os.PathLike[str], trust_pickle: bool = False) -> dict[str, Any]:
    """Read a checkpoint of ``dcp.save``, written by any number of ranks.

    Afterwards the whole state is in memory. One part of a tensor is there twice while it is read.

    Args:
        path: the directory, or a URL that fsspec knows.
        trust_pickle: unpickle everything. This can run code.

    Returns:
        The state that was given to ``dcp.save``: nested, with whole tensors on the CPU. Of safetensors: tensors by
        name.

    Raises:
        ConfigError: the package that reads safetensors is missing.
        StateError: an object needs ``trust_pickle``. The error has its key.
        StructureMismatch: this is not a DCP checkpoint, or it is damaged.
    """
    store = open_store(path)
    if format_of(store.names()) == SAFETENSORS:
        return _read_safetensors(store)
    metadata = _read_metadata(store, trust_pickle)
    try:
        return _read_all(store, metadata, trust_pickle)
    except MlflashError:
        raise
    except _DAMAGE as error:
        raise StructureMismatch("the .metadata of this checkpoint is damaged", found=text_of(error)) from error


def _read_all(store: Store, metadata: Any, trust_pickle: bool) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, described in metadata.state_dict_metadata.items():
        if isinstance(described, dcp.TensorStorageMetadata):
            flat[key] = _read_tensor(store, metadata, key, described)
        else:
            flat[key] = _read(store, metadata, key, None, trust_pickle)
    paths = metadata.planner_data
    return unflatten_state_dict(flat, paths) if isinstance(paths, dict) else flat


def _read_tensor(store: Store, metadata: Any, key: str, described: Any) -> torch.Tensor:
    elements = sum(math.prod(tuple(chunk.sizes)) for chunk in described.chunks)
    if elements != math.prod(tuple(described.size)):
        raise StructureMismatch("parts of this tensor are not in the checkpoint", tensor=key,
                                expected=f"{math.prod(tuple(described.size))} elements", found=elements)  # fmt: skip
    tensor = torch.empty(described.size, dtype=described.properties.dtype)
    for chunk in described.chunks:
        part = _read(store, metadata, key, chunk.offsets, False)
        if part.shape != chunk.sizes:
            raise StructureMismatch("a part of this tensor has another shape than in the metadata", tensor=key,
                                    expected=tuple(chunk.sizes), found=tuple(part.shape))  # fmt: skip
        tensor[box(chunk.offsets, chunk.sizes)] = part
    return tensor


def _read(store: Store, metadata: Any, key: str, offset: Any, trust_pickle: bool) -> Any:
    info = metadata.storage_data.get(dcp.MetadataIndex(key, offset))
    name = getattr(info, "relative_path", None)
    if not isinstance(name, str) or os.path.basename(name) != name:
        raise StructureMismatch("the metadata names no file of this directory for this tensor", tensor=key,
                                found=name)  # fmt: skip
    if info.transform_descriptors:
        raise StructureMismatch("this checkpoint was written with extensions of DCP, which only DCP can read",
                                tensor=key, found=info.transform_descriptors)  # fmt: skip
    try:
        raw = store.read(name, info.offset, info.length)
    except FileNotFoundError:
        raise StructureMismatch("a file of this checkpoint is missing", tensor=key, found=name) from None
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
    except _DAMAGE as error:
        raise StructureMismatch("a file of this checkpoint is damaged", tensor=key,
                                found=f"{info.length} bytes at {info.offset} of {name}: {text_of(error)}"
                                ) from error  # fmt: skip


class _Properties(dcp.TensorProperties):  # type: ignore[misc]
    """Properties of a tensor as any version of PyTorch has pickled them: 2.15 has added its strides."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        super().__setstate__(state[:5])


class _Unpickler(pickle.Unpickler):
    """Unpickles only the classes that a ``.metadata`` needs."""

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
    names = store.names()
    if format_of(names) == TORCH_CHECKPOINTING:
        raise StructureMismatch(
            "this is a checkpoint of torch_checkpointing, which only its CheckpointManager reads: load it in the "
            "training, and save it with mlflash there", found=store.path,
        )  # fmt: skip
    if ".metadata" not in names:
        raise StructureMismatch("this is not a checkpoint of PyTorch DCP: it has no .metadata", found=store.path)
    raw = io.BytesIO(store.read(".metadata"))
    try:
        metadata = _Unpickler(raw, trust_pickle).load()
    except MlflashError:
        raise
    except _DAMAGE as error:
        raise StructureMismatch("the .metadata of this checkpoint is damaged", found=text_of(error)) from error
    if not isinstance(metadata, dcp.Metadata) or not isinstance(metadata.storage_data, dict):
        raise StructureMismatch("the .metadata of this checkpoint has another type", found=type(metadata))
    return metadata


# Safetensors, as DCP's HuggingFaceStorageWriter and the tools of Hugging Face write them


def _read_safetensors(store: Store) -> dict[str, torch.Tensor]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ConfigError("the package of this name reads safetensors: pip install safetensors", found=error) from None
    index, files = _check_files(store)
    state: dict[str, torch.Tensor] = {}
    for name in files:
        try:
            with safe_open(f"{store.path}/{name}", "pt") as file:
                parts = json.loads((file.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))  # of DCP's writer
                for key in file.keys():  # noqa: SIM118
                    if key in state or any(parts.get(key, {}).get("saved_offsets", ())):
                        raise StructureMismatch("only a part of this tensor is in the checkpoint", tensor=key,
                                                found=f"{store.path}/{name}")  # fmt: skip
                    state[key] = file.get_tensor(key)
        except SafetensorError as error:
            raise StructureMismatch(
                "a file cannot be read. HuggingFaceStorageWriter writes such files if the state has a value that is no "
                "tensor", found=f"{store.path}/{name}: {error}",
            ) from None  # fmt: skip
    if missing := sorted(index.get("weight_map", state).keys() - state.keys()):
        raise StructureMismatch("no file has this tensor, which the index names", tensor=missing[0])
    nbytes, written = sum(tensor.nbytes for tensor in state.values()), index.get("metadata", {}).get("total_size", 0)
    if nbytes < written:
        raise StructureMismatch(
            "the index counts more bytes than the files have. HuggingFaceStorageWriter without save_distributed=True "
            "lets ranks write over each other's parts of sharded tensors", expected=f"{written} bytes", found=nbytes,
        )  # fmt: skip
    return state


def _check_files(store: Store) -> tuple[dict[str, Any], list[str]]:
    """Check that the files are all there are. Return the index, or an empty one if there is one file, and the files."""
    if not isinstance(store, Directory):
        raise ConfigError("safetensors are read from file systems only: copy them there first", found=store.path)
    names = store.names()
    files = [name for name in names if name.endswith(".safetensors")]
    if any(name.startswith("shard-") for name in files):
        raise StructureMismatch(
            "these are the parts of each rank, and nothing says how many ranks there were: write them with "
            "HuggingFaceStorageWriter(..., save_distributed=True, enable_consolidation=True), or load them with "
            "HuggingFaceStorageReader in the training, and save with mlflash there", found=store.path,
        )  # fmt: skip
    index: dict[str, Any] = json.loads(store.read(_INDEX)) if _INDEX in names else {}
    expected = sorted(set(index["weight_map"].values())) if index else files[:1]
    if files != expected:
        raise StructureMismatch(f"the files are not those that {_INDEX} names, or it is missing", expected=expected,
                                found=files)  # fmt: skip
    return index, files
