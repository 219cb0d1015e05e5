"""Write safetensors: one file, or shards and an index as the Hugging Face tools expect them.

A file has eight bytes with the length of the header, the header as JSON, and the bytes of the tensors without gaps.

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from ..errors import ConfigError, StateError
from ..state.paths import plain_leaves
from ..storage.store import Store
from ..storage.whole_state import Whole, Written, tensor_dtype
from .mapping import plan
from .outputs import Batches, Output, item_nbytes
from .rules import Rule

SHARD_NBYTES = 5 * 10**9  # the size at which Hugging Face cuts
_HEADER_NBYTES = 100_000_000  # the safetensors library refuses longer ones
_CHUNK_NBYTES = 64 << 20

DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip


def write(
    whole: Whole, store: Store, rules: Sequence[Rule] = (), stem: str = "model", shard_nbytes: int = SHARD_NBYTES
) -> Written:
    """Write all tensors and arrays of a checkpoint.

    Collective if reading the checkpoint is. Of tied tensors only the first one is written, as Hugging Face does. The
    result names the others. This format cannot hold plain leaves.

    Args:
        whole: the checkpoint.
        store: where the files go: ``{stem}.safetensors``, or ``{stem}-00001-of-00003.safetensors``, … and
            ``{stem}.safetensors.index.json``, last.
        rules: how tensors change on the way.
        stem: the beginning of the file names.
        shard_nbytes: most bytes of tensors in a file. A larger tensor gets its own file.

    Raises:
        StateError: the format does not have this dtype. The error names the tensor.
        ConfigError: a rule does not fit.
    """
    outputs = plan(whole.entries, rules, whole.ties)
    ties = {output.entry.name: output.tie for output in outputs if output.tie is not None}
    shards = _cut([output for output in outputs if output.tie is None], shard_nbytes)
    headers = [_header(shard) for shard in shards]
    batches = Batches(whole, [output for shard in shards for output in shard])
    count = len(shards)
    names = [f"{stem}-{at:05d}-of-{count:05d}.safetensors" if count > 1 else f"{stem}.safetensors"
             for at in range(1, count + 1)]  # fmt: skip
    files = {name: store.write(name, _content(header, shard, batches))
             for name, header, shard in zip(names, headers, shards, strict=True)}  # fmt: skip
    if count > 1:
        index = f"{stem}.safetensors.index.json"
        files[index] = store.write(index, [_index(names, shards)])
    return Written(files, sum(map(len, shards)), ties, tuple(plain_leaves(whole.tree)))


def _cut(outputs: list[Output], shard_nbytes: int) -> list[list[Output]]:
    """Divide outputs among files, in order. As with Hugging Face, a tensor that does not fit begins the next file."""
    shards: list[list[Output]] = [[]]
    nbytes = 0
    for output in outputs:
        if shards[-1] and nbytes + output.entry.nbytes > shard_nbytes:
            shards.append([])
            nbytes = 0
        shards[-1].append(output)
        nbytes += output.entry.nbytes
    # Larger elements first, so that each tensor begins at a multiple of its element's size.
    return [sorted(shard, key=lambda output: -item_nbytes(output.entry)) for shard in shards]


def _header(shard: list[Output]) -> bytes:
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in (output.entry for output in shard):
        dtype = tensor_dtype(entry)
        if dtype not in DTYPES or entry.name in fields:
            raise StateError("safetensors cannot hold this tensor: drop or rename it with a rule of --map",
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


def _content(header: bytes, shard: list[Output], batches: Batches) -> Iterator[memoryview]:
    yield memoryview(header)
    for output in shard:
        if output.entry.nbytes:
            content = batches.source(output)().data
            for at in range(0, content.nbytes, _CHUNK_NBYTES):
                yield content[at : at + _CHUNK_NBYTES]


def _index(names: list[str], shards: list[list[Output]]) -> bytes:
    total = sum(output.entry.nbytes for shard in shards for output in shard)
    weight_map = {output.entry.name: name for name, shard in zip(names, shards, strict=True) for output in shard}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
