"""Coverage-guided fuzzing of what reads slots and drained files.

`pip install atheris; python tests/campaigns/fuzz_format.py -max_total_time=600`.

Not part of `make full`: what it finds becomes a case in tests/unit/test_format.py.
"""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path

import atheris
import numpy as np

with atheris.instrument_imports(include=["mlflash"]):
    from mlflash import errors
    from mlflash.draining import file_index, rank_table
    from mlflash.draining.file_index import Place, Places, Stored
    from mlflash.memory import slot_header
    from mlflash.mpi.world import World
    from mlflash.placement.node import this_node
    from mlflash.protocol.describe_ranks import Described, gather_ranks
    from mlflash.state import layout, manifest, rebuild
    from mlflash.state.flatten import flatten

PAYLOAD_NBYTES = 512


def one_input(raw: bytes) -> None:
    """Whatever the bytes are: refused as CorruptSlot, or read within the payload and built without any other error."""
    try:
        slot_header.unpack(raw[: slot_header.HEADER_NBYTES])
    except errors.CorruptSlot:
        pass
    of_drained_files(raw)
    try:
        read = manifest.decode(raw, PAYLOAD_NBYTES)
    except errors.CorruptSlot:
        return
    payload = np.zeros(PAYLOAD_NBYTES, dtype=np.uint8)
    for entry in read.entries:
        assert 0 <= entry.start <= entry.start + entry.nbytes <= PAYLOAD_NBYTES
    rebuild.materialize(read.tree, read.entries, read.plain, lambda e: payload[e.start : e.start + e.nbytes])


def of_drained_files(raw: bytes) -> None:
    """Whatever the bytes are: refused as CorruptSlot, or rows that lie in the file, and shards in their tensors."""
    try:
        for entry, place in file_index.decode(raw, "x", PAYLOAD_NBYTES).pieces:
            assert place.packed or place.start + place.nbytes <= PAYLOAD_NBYTES
            assert entry.nbytes == place.nbytes
    except errors.CorruptSlot:
        pass
    try:
        table = rank_table.decode(raw, 1)
    except errors.CorruptSlot:
        return
    for group in table.groups:
        for entry in group.structure.entries(group.rows[0]):
            assert all(a + n <= of for a, n, of in zip(entry.offset, entry.shape, entry.global_shape, strict=True))


def seeds(directory: Path) -> None:
    states = [
        {"a": np.zeros(3), "b": [np.ones(2, dtype=np.int8), (1, None)], 5: "x"},
        {"n": np.float32(1.5), "k": {(1, "a"): True}, "c": 1 + 2j},
        {"big": 1 << 70, "raw": b"\x00\xff", "inf": float("inf")},
    ]
    for index, state in enumerate(states):
        flat = flatten(state)
        entries = layout.plan(flat, 100).entries
        text = manifest.join(manifest.encode_entries(entries), manifest.encode_tree(flat.structure.tree), flat.plain)
        (directory / str(index)).write_bytes(text)
        checks = np.zeros(len(entries), dtype="<u8")
        of = {n: Place(0, its.nbytes, 0, next(iter(its.shape), 1), n, False) for n, its in enumerate(entries)}
        raw, _ = file_index.encode(text, PAYLOAD_NBYTES, Places("x", PAYLOAD_NBYTES, checks, of))
        (directory / f"index-{index}").write_bytes(raw)
        its = Described.of(entries, flat.structure.tree, flat.plain, {}, (-1, -1, -1))
        files = [Stored("rank-00000.h5", 1, 1, "rank-00000.h5", 1)]
        told = gather_ranks(World(None, this_node(), math.inf), {0: its})
        (directory / f"table-{index}").write_bytes(rank_table.encode("hdf5", "job", files, told))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as corpus:
        seeds(Path(corpus))
        atheris.Setup([*sys.argv, corpus], one_input)
        atheris.Fuzz()
