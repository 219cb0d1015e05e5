"""A whole checkpoint → a directory that plain ``torch.distributed.checkpoint.load`` reads; see `storage.dcp_files`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..state.leaves import Entry, Tree, from_bytes
from ..state.plain_values import decode_plain
from ..storage.dcp_files import METADATA, Contents, metadata, pickled, rank_file
from ..storage.dcp_keys import Keys, keys_of
from ..storage.store import Store
from ..storage.whole_state import Whole, Written, build, tensor_dtype
from .formulas import Formula
from .mapping import plan
from .outputs import BATCH_NBYTES, Batches, Output
from .rules import Rule

FILE_NBYTES = 4 << 30
_CHUNK_NBYTES = 64 << 20


def write(whole: Whole, store: Store, rules: Sequence[Rule] = (), file_nbytes: int = FILE_NBYTES) -> Written:
    """Write a checkpoint as a DCP checkpoint of one rank.

    Collective if reading the checkpoint is. Tied tensors are stored once, and each of their keys finds them. Objects
    (numbers, strings, arrays, tuples) are pickled, as in DCP.

    Args:
        whole: the checkpoint.
        store: where the files go.
        rules: how tensors change on the way. With rules the checkpoint is a dict of tensors by name.
        file_nbytes: most bytes of tensors in a file. A larger tensor gets its own file.

    Raises:
        StateError: the state is not a dict, or torch cannot load a dtype.
        ConfigError: a rule does not fit.
    """
    entries = list(whole.entries.values())
    outputs, keys = _planned(whole, rules)
    first: dict[Formula, str] = {}
    ties = {key: other for key, output in outputs.items() if (other := first.setdefault(output.formula, key)) != key}
    own = {key: output for key, output in outputs.items() if key not in ties}
    for output in own.values():
        tensor_dtype(output.entry)  # raises before anything is written
    batches = Batches(whole, list(own.values()))
    files, written = [], {}
    for number, (tensors, objects) in enumerate(_cut(entries, own, keys.objects, file_nbytes)):
        pieces = [dataclasses.replace(own[key].entry, name=key) for key in tensors]
        sources = [batches.source(own[key]) for key in tensors]
        extras = {key: pickled(_object(whole, entries, keys.objects[key])) for key in objects}
        skeleton, places, _ = rank_file(pieces, sources, extras)
        name = f"__0_{number}.distcp"
        try:
            written[name] = store.write(name, skeleton.stream(_CHUNK_NBYTES))
        finally:
            skeleton.close()
        files.append(Contents(name, pieces, list(extras), places))
    written[METADATA] = store.write(METADATA, [metadata(files, keys.paths, ties)])
    return Written(written, len(own), ties)


def _planned(whole: Whole, rules: Sequence[Rule]) -> tuple[dict[str, Output], Keys]:
    """Return the tensors to write by key, and all keys."""
    outputs = plan(whole.entries, rules, whole.ties)
    if rules:
        named = {output.entry.name: output for output in outputs}
        return named, Keys({}, {}, {name: (name,) for name in named})
    keys = keys_of(whole.tree, list(whole.entries.values()))
    return {key: outputs[number] for key, number in keys.tensors.items()}, keys


def _cut(
    entries: Sequence[Entry], tensors: Mapping[str, Output], objects: Mapping[str, Tree], file_nbytes: int
) -> list[tuple[list[str], list[str]]]:
    """Divide tensors and objects among files. Objects are in memory while their file is written."""
    sizes = [(key, True, output.entry.nbytes) for key, output in tensors.items()]
    sizes += [(key, False, sum(entry.nbytes for entry in _inside(entries, tree))) for key, tree in objects.items()]
    files: list[tuple[list[str], list[str]]] = [([], [])]
    nbytes = held = 0
    for key, is_tensor, more in sizes:
        if nbytes and (nbytes + more > file_nbytes or (not is_tensor and held + more > BATCH_NBYTES)):
            files.append(([], []))
            nbytes = held = 0
        files[-1][not is_tensor].append(key)
        nbytes, held = nbytes + more, held + (0 if is_tensor else more)
    return files


def _inside(entries: Sequence[Entry], tree: Tree) -> list[Entry]:
    """Return the tensors and arrays in a part of the state."""
    found: list[Entry] = []
    build(tree, lambda number: found.append(entries[number]), lambda _: None)
    return found


def _object(whole: Whole, entries: Sequence[Entry], tree: Tree) -> Any:
    """Build a part of the state with its values."""
    names = [entry.name for entry in _inside(entries, tree)]
    raw = whole.bytes_of(names) if names else {}
    return build(tree, lambda number: from_bytes(entries[number], np.array(raw[entries[number].name])),
                 lambda number: decode_plain(whole.plain[number]))  # fmt: skip
