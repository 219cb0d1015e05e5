"""Write a checkpoint as a file of ``torch.save``, as a directory of PyTorch DCP, or as a file of HDF5."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..drain import hdf5_files
from ..state.leaves import Entry, Tree, from_bytes
from ..state.plain_values import decode_plain
from ..storage.dcp_files import METADATA, Contents, hollow, keys_of, metadata, pickled, rank_file, save
from ..storage.file_holes import FileWithHoles
from ..storage.store import Store
from ..storage.whole_state import BATCH_NBYTES, Whole, Written, build, cut, tensor_dtype

_CHUNK_NBYTES = 64 << 20
FILE_NBYTES = 4 << 30


def write_torch(whole: Whole, store: Store, name: str = "state.pt") -> Written:
    """Write a checkpoint as one file for ``torch.load``.

    Collective if reading the checkpoint is. Tied tensors stay tied. Arrays become tensors, and numbers of numpy become
    numbers of Python, so that ``torch.load(weights_only=True)`` accepts the file.

    Raises:
        StateError: torch has no dtype for an array. The error names it.
    """
    names, numbers = list(whole.entries), list[int]()
    build(whole.tree, numbers.append, lambda _: None)
    firsts = dict.fromkeys(whole.ties.get(names[number], names[number]) for number in numbers)
    own = [whole.entries[first] for first in firsts]  # in the order in which torch numbers storages
    empty = hollow([(tensor_dtype(entry), entry.shape) for entry in own])
    tensors = dict(zip(firsts, empty, strict=True))
    state = build(whole.tree, lambda number: tensors[whole.ties.get(names[number], names[number])],
                  lambda number: _python(decode_plain(whole.plain[number])))  # fmt: skip
    sources = whole.sources(own)
    skeleton = FileWithHoles()
    for start, entry in zip(save(state, skeleton), own, strict=True):
        skeleton.place(start, entry.nbytes, sources[entry.name])
    return Written({name: _write(store, name, skeleton)}, len(own), whole.ties)


def _write(store: Store, name: str, skeleton: FileWithHoles) -> int:
    try:
        return store.write(name, skeleton.stream(_CHUNK_NBYTES))
    finally:
        skeleton.close()


def _python(value: Any) -> Any:
    if isinstance(value, np.generic) and isinstance(item := value.item(), (bool, int, float, complex, str, bytes)):
        return item
    return value


def write_hdf5(whole: Whole, store: Store, name: str = "state.h5") -> Written:
    """Write a checkpoint as one HDF5 file: ``/tensors/<name>``, and everything else as JSON in ``/objects``."""
    own, sources = whole.own, whole.sources(whole.own)
    objects = hdf5_files.readable(whole.tree, list(whole.entries), whole.plain)
    skeleton, _ = hdf5_files.tensors(own, [sources[entry.name] for entry in own], whole.ties, objects)
    return Written({name: _write(store, name, skeleton)}, len(own), whole.ties)


def write_dcp(whole: Whole, store: Store, file_nbytes: int = FILE_NBYTES) -> Written:
    """Write a checkpoint as a DCP checkpoint of one rank, which ``torch.distributed.checkpoint.load`` reads.

    Collective if reading the checkpoint is. Tied tensors are stored once, and each of their keys finds them. Objects
    (numbers, strings, arrays, tuples) are pickled, as in DCP.

    Args:
        file_nbytes: most bytes of tensors in a file. A larger tensor gets its own file.

    Raises:
        StateError: the state is not a dict, or torch cannot load a dtype.
    """
    entries = list(whole.entries.values())
    keys = keys_of(whole.tree, entries)
    first: dict[str, str] = {}
    ties: dict[str, str] = {}
    own: dict[str, Entry] = {}
    for key, number in keys.tensors.items():
        name = whole.ties.get(entries[number].name, entries[number].name)
        if (other := first.setdefault(name, key)) != key:
            ties[key] = other
        else:
            tensor_dtype(entries[number])  # raises before anything is written
            own[key] = whole.entries[name]
    sources = whole.sources(list(own.values()))
    # Objects are in memory while their file is written.
    objects = {key: sum(entry.nbytes for entry in _inside(entries, tree)) for key, tree in keys.objects.items()}
    groups = [*cut({key: entry.nbytes for key, entry in own.items()}, file_nbytes),
              *cut(objects, BATCH_NBYTES)]  # fmt: skip
    files, written = [], {}
    for number, group in enumerate(groups):
        of_tensors, of_objects = [key for key in group if key in own], [key for key in group if key in objects]
        pieces = [dataclasses.replace(own[key], name=key) for key in of_tensors]
        extras = {key: pickled(_object(whole, entries, keys.objects[key])) for key in of_objects}
        skeleton, places, _ = rank_file(pieces, [sources[own[key].name] for key in of_tensors], extras)
        name = f"__0_{number}.distcp"
        written[name] = _write(store, name, skeleton)
        files.append(Contents(name, pieces, list(extras), places))
    written[METADATA] = store.write(METADATA, [metadata(files, keys.paths, ties)])
    return Written(written, len(own), ties)


def _inside(entries: Sequence[Entry], tree: Tree) -> list[Entry]:
    inside: list[Entry] = []
    build(tree, lambda number: inside.append(entries[number]), lambda _: None)
    return inside


def _object(whole: Whole, entries: Sequence[Entry], tree: Tree) -> Any:
    names = [entry.name for entry in _inside(entries, tree)]
    raw = whole.read(names) if names else {}
    return build(tree, lambda number: from_bytes(entries[number], np.array(raw[entries[number].name])),
                 lambda number: decode_plain(whole.plain[number]))  # fmt: skip
