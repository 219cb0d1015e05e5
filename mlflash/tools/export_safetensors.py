"""Write safetensors: one file, or shards and an index as the Hugging Face tools expect them.

A file has eight bytes with the length of the header, the header as JSON, and the bytes of the tensors without gaps.

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import fnmatch
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..errors import ConfigError, StateError
from ..state.leaves import Entry
from ..state.paths import plain_leaves
from ..storage.file_holes import Source
from ..storage.store import Store
from ..storage.whole_state import Whole, Written, cut, tensor_dtype

SHARD_NBYTES = 5 * 10**9  # the size at which Hugging Face cuts
_HEADER_NBYTES = 100_000_000  # the safetensors library refuses longer ones
_CHUNK_NBYTES = 64 << 20

DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
_CONFIGURATION = ("*.json", "*.jinja", "*.model", "*.py", "*.tiktoken", "merges.txt", "vocab.txt")


def write(whole: Whole, store: Store, shard_nbytes: int = SHARD_NBYTES) -> Written:
    """Write all tensors and arrays of a checkpoint.

    Collective if reading the checkpoint is. Of tied tensors only the first one is written, as Hugging Face does. The
    result names the others. This format cannot hold plain leaves.

    Args:
        store: where the files go: ``model.safetensors``, or ``model-00001-of-00003.safetensors``, … and
            ``model.safetensors.index.json``, last.
        shard_nbytes: most bytes of tensors in a file. A larger tensor gets its own file.

    Raises:
        StateError: the format does not have this dtype. The error names the tensor.
    """
    # In a file larger elements come first, so that each tensor begins at a multiple of its element's size.
    names_of_shards = cut({entry.name: entry.nbytes for entry in whole.own}, shard_nbytes) or [[]]
    shards = [sorted((whole.entries[name] for name in names), key=lambda entry: -_item_nbytes(entry))
              for names in names_of_shards]  # fmt: skip
    headers = [_header(shard) for shard in shards]
    sources = whole.sources([entry for shard in shards for entry in shard])
    count = len(shards)
    names = [f"model-{at:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"
             for at in range(1, count + 1)]  # fmt: skip
    files = {name: store.write(name, _content(header, shard, sources))
             for name, header, shard in zip(names, headers, shards, strict=True)}  # fmt: skip
    if count > 1:
        index = "model.safetensors.index.json"
        files[index] = store.write(index, [_index(names, shards)])
    return Written(files, len(whole.own), whole.ties, tuple(plain_leaves(whole.tree)))


def _item_nbytes(entry: Entry) -> int:
    return entry.nbytes // max(1, math.prod(entry.shape))


def _header(shard: list[Entry]) -> bytes:
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in shard:
        dtype = tensor_dtype(entry)
        if dtype not in DTYPES or entry.name in fields:
            raise StateError("safetensors cannot hold this tensor: leave it out with --drop, or --rename it",
                             tensor=entry.name, expected=f"one of {', '.join(DTYPES)}", found=dtype)  # fmt: skip
        end = start + entry.nbytes
        fields[entry.name] = {"dtype": DTYPES[dtype], "shape": entry.shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    if len(text) > _HEADER_NBYTES:
        raise ConfigError("a file has too many tensors for safetensors: choose smaller shards",
                          expected=f"a header of at most {_HEADER_NBYTES} bytes", found=len(text))  # fmt: skip
    return len(text).to_bytes(8, "little") + text


def _content(header: bytes, shard: list[Entry], sources: Mapping[str, Source]) -> Iterator[memoryview]:
    yield memoryview(header)
    for entry in shard:
        if entry.nbytes:
            content = sources[entry.name]().data
            for at in range(0, content.nbytes, _CHUNK_NBYTES):
                yield content[at : at + _CHUNK_NBYTES]


def _index(names: list[str], shards: list[list[Entry]]) -> bytes:
    total = sum(entry.nbytes for shard in shards for entry in shard)
    weight_map = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def copy_config(source: str | os.PathLike[str], store: Store) -> dict[str, int]:
    """Copy a model's configuration and tokenizer, which ``from_pretrained`` needs in addition to the weights.

    Follow links, because the cache of Hugging Face has only links.

    Raises:
        ConfigError: there is no ``config.json``.
    """
    directory = Path(source)
    if not (directory / "config.json").is_file():
        raise ConfigError("this directory has no Hugging Face config.json", found=directory)
    files = sorted(
        path for path in directory.iterdir() if path.is_file() and not path.name.endswith(".index.json")
        and any(fnmatch.fnmatch(path.name, wanted) for wanted in _CONFIGURATION)
    )  # fmt: skip
    return {path.name: store.write(path.name, [path.read_bytes()]) for path in files}
