"""What lies in a directory of drained checkpoints: cards, indexes, who writes what, HDF5 for others, retention."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import until

from mlflash import Checkpointer, errors
from mlflash.config import Config
from mlflash.draining import checkpoint_directory, drain_input, file_index, hdf5_files, rank_table
from mlflash.draining.checkpoint_directory import Listed
from mlflash.draining.file_index import CARD_NBYTES, Card, Place, Places, Stored
from mlflash.draining.hdf5_files import Hdf5
from mlflash.memory.slot_header import Attempt, Verdict
from mlflash.mpi.world import World
from mlflash.protocol.describe_ranks import Described, gather_ranks
from mlflash.state import layout, manifest
from mlflash.state.dtypes import TORCH_ITEM_NBYTES
from mlflash.state.flatten import flatten
from mlflash.state.leaves import Entry, array_entry, live_bytes, tensor_entry
from mlflash.storage.file_holes import FileWithHoles, Source
from mlflash.storage.store import Directory

H5DUMP = shutil.which("h5dump")
needs_h5dump = pytest.mark.skipif(H5DUMP is None, reason="h5dump is not installed (hdf5-tools)")
RUN = bytes(range(16))
MIB = 1 << 20

# Cards

u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
CARD = Card(
    Attempt(RUN, 5), 12, 3, 8, 70_000, 60_000, 10_000, 0x0123456789ABCDEF, 1_700_000_000_000_000_000, "0:ab:job"
)
CHECKED_NBYTES = 272  # of the card; zeros follow


@st.composite
def cards(draw: st.DrawFn) -> Card:
    world_size = draw(st.integers(1, 2**32 - 1))
    rank = draw(st.one_of(st.just(-1), st.integers(0, world_size - 1)))
    file_nbytes = draw(u64)
    start = draw(st.integers(0, file_nbytes))
    owner = draw(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=24))
    attempt = Attempt(draw(st.binary(min_size=16, max_size=16)), draw(u64))
    step, ns = draw(st.integers(-(2**63), 2**63 - 1)), draw(u64)
    return Card(attempt, step, rank, world_size, file_nbytes, start, draw(st.integers(0, file_nbytes - start)),
                draw(u64), ns, owner)  # fmt: skip


@given(card=cards())
def test_a_card_comes_back_as_it_was(card: Card) -> None:
    raw = card.pack()
    assert len(raw) == CARD_NBYTES and file_index.read_card(raw) == card


def test_the_bytes_of_a_card_are_the_golden_ones() -> None:
    expected = (
        b"MLFDRAIN" + b"\1\0" b"\0\0" b"\0\0\0\0"  # version, master
        + RUN + (5).to_bytes(8, "little") + (12).to_bytes(8, "little")
        + (3).to_bytes(4, "little") + (8).to_bytes(4, "little")
        + b"".join(n.to_bytes(8, "little") for n in (70_000, 60_000, 10_000, CARD.index_check, CARD.unix_ns))
        + b"0:ab:job".ljust(96, b"\0")
    )  # fmt: skip
    expected += xxhash.xxh3_64_intdigest(expected).to_bytes(8, "little")
    assert len(expected) < CHECKED_NBYTES
    assert CARD.pack() == expected.ljust(CARD_NBYTES, b"\0"), "the card changed: raise file_index.VERSION"
    assert dataclasses.replace(CARD, rank=-1).pack()[10:12] == b"\1\0"


def test_every_damaged_byte_of_a_card_is_found() -> None:
    raw = CARD.pack()
    nbytes = len(raw.rstrip(b"\0"))
    assert nbytes > 190
    for place in range(nbytes):
        for bits in (1, 128, 255):
            damaged = raw[:place] + bytes([raw[place] ^ bits]) + raw[place + 1 :]
            with pytest.raises(errors.CorruptSlot):
                file_index.read_card(damaged)


@pytest.mark.parametrize("nbytes", [0, 7, 8, 100, 199])
def test_a_short_card_is_refused(nbytes: int) -> None:
    with pytest.raises(errors.CorruptSlot):
        file_index.read_card(CARD.pack()[:nbytes])


@given(raw=st.binary(max_size=600), magic=st.booleans())
def test_no_bytes_make_the_card_reader_do_anything_but_refuse(raw: bytes, magic: bool) -> None:
    with pytest.raises(errors.CorruptSlot):
        file_index.read_card(file_index.MAGIC * magic + raw)


@pytest.mark.parametrize(
    "wrong",
    [{"rank": 8}, {"world_size": 0, "rank": 0}, {"index_start": 60_001}, {"index_nbytes": 2**64 - 1}],
)
def test_a_card_that_contradicts_itself_is_refused_though_its_checksum_is_right(wrong: dict[str, int]) -> None:
    with pytest.raises(errors.CorruptSlot, match="contradict"):
        file_index.read_card(dataclasses.replace(CARD, **wrong).pack())


def test_the_longest_name_of_a_job_fits_into_a_card_whole() -> None:
    owners = {Config(job="j" * 63 + last, directory="/d").owner for last in "ab"}
    packed = {file_index.read_card(dataclasses.replace(CARD, owner=owner).pack()).owner for owner in owners}
    assert packed == owners
    longest = f"{2**32 - 1}:{'0' * 8}:{'j' * 64}"
    assert file_index.read_card(dataclasses.replace(CARD, owner=longest).pack()).owner == longest


# Indexes


def example() -> tuple[bytes, int, list[Entry], np.ndarray]:
    """A manifest of some entries, and the pieces that a rank's file may have of them."""
    flat = flatten({"w": np.zeros((8, 100)), "tied": np.zeros(3), "e": np.zeros(0), "n": {"x": 1.5, 3: b"\0"}})
    entries = layout.plan(flat, 100, 4096).entries
    text = manifest.join(manifest.encode_entries(entries), manifest.encode_tree(flat.structure.tree), flat.plain)
    w, tied, empty = entries
    part = dataclasses.replace(w, offset=(4, 0), shape=(2, 100), start=1000, nbytes=1600)
    pieces = [part, dataclasses.replace(tied, start=2600), dataclasses.replace(empty, start=0)]
    return text, 8192, pieces, np.array([1, 2**64 - 1, 3], dtype=np.uint64)


PLACES = {0: Place(1000, 1600, 4, 2, 0, False), 1: Place(2600, 24, 0, 3, 2, True), 2: Place(0, 0, 0, 0, 3, False)}


def index() -> tuple[bytes, int]:
    text, payload_nbytes, _, checks = example()
    return file_index.encode(text, payload_nbytes, Places("rank-00000.h5", 1024, checks, PLACES))


def test_an_index_comes_back_as_it_was_and_its_first_part_alone() -> None:
    text, payload_nbytes, pieces, checks = example()
    raw, first_nbytes = index()
    read = file_index.decode(raw, "rank-00000.h5", 5000)
    assert read.manifest == manifest.decode(text, payload_nbytes)
    assert [entry for entry, _ in read.pieces] == pieces
    places, end = file_index.decode_places(raw[:first_nbytes], "rank-00000.h5", 5000)
    assert end == first_nbytes and places.of == read.places.of == PLACES
    assert (places.data, places.block_nbytes, places.checks.tolist()) == ("rank-00000.h5", 1024, checks.tolist())


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_an_index_with_any_byte_changed_is_refused_or_still_valid(data: st.DataObject) -> None:
    raw, first_nbytes = index()
    changed = bytearray(raw)
    for at in data.draw(st.lists(st.integers(0, first_nbytes + 40), min_size=1, max_size=3)):
        changed[at] = data.draw(st.integers(0, 255))
    try:
        read = file_index.decode(bytes(changed[: data.draw(st.sampled_from([None, first_nbytes - 1]))]), "x", 5000)
    except errors.CorruptSlot:
        return
    for entry, place in read.pieces:
        assert place.packed or 0 <= place.start <= place.start + place.nbytes <= 5000
        assert place.first_check + file_index.blocks(place.nbytes, read.places.block_nbytes) <= read.places.checks.size
        assert entry.nbytes == place.nbytes and all(
            at + n <= of for at, n, of in zip(entry.offset, entry.shape, entry.global_shape, strict=True)
        )


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"start": 3401}, "not in the file"), ({"start": 1 << 61}, "no size"), ({"nbytes": 1601}, "rows of no tensor"),
        ({"nbytes": 4001}, "not in the file"), ({"begin": 7}, "rows of no tensor"), ({"rows": 3}, "rows of no tensor"),
        ({"first_check": 2}, "without checksums"), ({"first_check": 1 << 60}, "without checksums"),
    ],
)  # fmt: skip
def test_hostile_places_are_refused_with_their_reason(wrong: dict[str, Any], reason: str) -> None:
    text, payload_nbytes, _, checks = example()
    spoiled = PLACES | {0: PLACES[0]._replace(**wrong)}
    raw, _ = file_index.encode(text, payload_nbytes, Places("x", 1024, checks, spoiled))
    with pytest.raises(errors.CorruptSlot, match=reason):
        file_index.decode(raw, "x", 5000)


@pytest.mark.parametrize(
    ("spoiled", "reason"),
    [({3: PLACES[0]}, "rows of no tensor"), ({2: PLACES[2]._replace(packed=True)}, "cannot be compressed")],
)
def test_places_of_no_tensor_are_refused(spoiled: dict[int, Place], reason: str) -> None:
    text, payload_nbytes, _, checks = example()
    with pytest.raises(errors.CorruptSlot, match=reason):
        file_index.decode(file_index.encode(text, payload_nbytes, Places("x", 1024, checks, spoiled))[0], "x", 5000)


@given(data=st.data())
def test_any_pieces_come_back_as_they_were(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.text(max_size=6), unique=True, max_size=5))
    entries: list[Entry] = []
    places, at, checks = {}, 0, 0
    for name in names:
        dtype = data.draw(st.sampled_from(["float32", "bfloat16", "uint8", "complex128"]))
        shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=3)))
        nbytes = math.prod(shape) * TORCH_ITEM_NBYTES[dtype]
        entries.append(Entry(name, "tensor", dtype, shape, (0,) * len(shape), shape, at, nbytes))
        places[len(places)] = Place(at, nbytes, 0, shape[0] if shape else 1, checks, False)
        at, checks = at + nbytes, checks + file_index.blocks(nbytes, 7)
    text = manifest.join(manifest.encode_entries(tuple(entries)), manifest.encode_tree(["l", []]), [])
    sums = np.arange(checks, dtype=np.uint64)
    read = file_index.decode(file_index.encode(text, at, Places("x", 7, sums, places))[0], "x", at)
    assert [entry for entry, _ in read.pieces] == entries and read.manifest.entries == tuple(entries)
    assert read.places.checks.tolist() == list(range(checks)) and read.places.of == places


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just(10**30)),
    lambda sub: st.one_of(st.lists(sub, max_size=3), st.dictionaries(st.text(max_size=3), sub, max_size=3)),
    max_leaves=6,
)


def spoil(document: Any, data: st.DataObject) -> Any:
    """Walk to a random place and put something else there, or take it away."""
    node = document
    while True:
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        if not isinstance(node[key], (dict, list)) or not node[key] or data.draw(st.booleans()):
            break
        node = node[key]
    if data.draw(st.booleans()):
        del node[key]
    else:
        node[key] = data.draw(json_values)
    return document


def put(document: dict[str, Any], *path: Any, value: Any) -> bytes:
    for key in path[:-1]:
        document = document[key]
    document[path[-1]] = value
    return b""


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"manifest":' + b"9" * 5000 + b"}"]
)
def test_what_is_no_index_is_refused(raw: bytes) -> None:
    with pytest.raises(errors.CorruptSlot):
        file_index.decode(raw, "x", 5000)


# The file that commits


def write_master(store: Directory, folder: str, text: bytes, *, step: int = 1, generation: int = 1, owner: str = "me",
                 run_id: bytes = RUN, world_size: int = 1, name: str = "checkpoint.h5") -> Listed:  # fmt: skip
    card = Card(Attempt(run_id, generation), step, -1, world_size, CARD_NBYTES + len(text), CARD_NBYTES, len(text),
                xxhash.xxh3_64_intdigest(text), 0, owner)  # fmt: skip
    inside = store.at(folder)
    inside.make()
    inside.write(name, [card.pack(), text])
    return Listed(folder, name, card)


FILES = [Stored(f"rank-0000{n}.h5", 4096, 2**64 - 1, f"rank-0000{n}.h5", 4096, 512, 88, 2**64 - 2) for n in range(2)]


def table() -> bytes:
    """Two ranks that hold two tensors alike, share another one, and have shards and a value of their own."""

    def entry(name: str, whole: int, offset: int, rows: int, start: int) -> Entry:
        return Entry(name, "tensor", "float32", (whole, 2), (offset, 0), (rows, 2), start, 8 * rows)

    mine = {}
    for rank in range(2):
        entries = [
            entry("w", 8, 4 * rank, 4, 0),
            entry("a", 4, 0, 4, 32),
            entry("b", 2, 0, 2, 64),
            entry("s", 2, 0, 2, 80),
        ]
        its = Described.of(
            entries, ["d", [["n", ["p", 0]]]], [rank], {1: 5, 2: 6, 3: 7}, (0, [0, 40][rank], [-1, 0][rank])
        )
        mine[rank] = dataclasses.replace(its, structure=dataclasses.replace(its.structure, alike=(2, 1), shared=(3,)))
    return rank_table.encode("hdf5", "job", FILES, gather_ranks(World(None, 0, math.inf), mine))


def test_the_index_of_the_committing_file_comes_back_as_it_was(tmp_path: Path) -> None:
    store = Directory(str(tmp_path))
    listed = write_master(store, "step-00000001", table(), world_size=2)
    read = rank_table.decode(checkpoint_directory.read_index(store.at(listed.folder), listed), 2)
    assert read.files == FILES and read.dealt.tolist() == [[0, 0, 0], [0, 40, 0]]
    (group,) = read.groups
    assert group.structure.names == ("w", "a", "b", "s") and group.plain == [0] and group.ranks.tolist() == [0, 1]
    assert (read.differ, read.plain_differ) == (set(), {"n"})
    assert [entry.offset[0] for entry in group.structure.entries(group.rows[1])] == [4, 0, 0, 0]
    # "b" has the first 16 bytes of what all hold alike, "a" the 32 behind: rank 1 begins in the middle of that.
    dealt = rank_table.Dealt(read)
    assert [dealt.ranks(0, 2, "b", 0, 2), dealt.ranks(1, 1, "a", 0, 4), dealt.ranks(1, 1, "a", 3, 4)] == [
        [0],
        [0, 1],
        [1],
    ]
    assert [dealt.ranks(0, 3, "s", 0, 2), dealt.ranks(0, 0, "w", 0, 4)] == [[1], None]
    path = tmp_path / "step-00000001" / "checkpoint.h5"
    good = path.read_bytes()
    for place in range(CARD_NBYTES, len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
        with pytest.raises(errors.CorruptSlot, match="is damaged"):
            checkpoint_directory.read_index(store.at(listed.folder), listed)
    path.write_bytes(good[:-1])
    with pytest.raises(errors.CorruptSlot, match="is damaged"):
        checkpoint_directory.read_index(store.at(listed.folder), listed)


def refused_or_valid(raw: bytes) -> None:
    try:
        read = rank_table.decode(raw, 2)
    except errors.CorruptSlot:
        return
    assert sorted(rank for group in read.groups for rank in group.ranks.tolist()) == [0, 1]
    for stored in read.files:
        assert "/" not in stored.card + stored.data and min(stored.nbytes, stored.data_nbytes, stored.index_check) >= 0
    for group in read.groups:
        for row in group.rows:
            for entry in group.structure.entries(row):
                assert all(0 <= at <= at + n <= of for at, n, of in
                           zip(entry.offset, entry.shape, entry.global_shape, strict=True))  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_committing_file_with_anything_wrong_in_it_is_refused_or_still_valid(data: st.DataObject) -> None:
    raw = table()
    length = int.from_bytes(raw[:8], "little")
    if data.draw(st.booleans()):
        text = json.dumps(spoil(json.loads(raw[8 : 8 + length]), data)).encode()
        refused_or_valid(len(text).to_bytes(8, "little") + text + raw[8 + length :])
        return
    changed = bytearray(raw)
    for at in data.draw(
        st.lists(st.one_of(st.integers(0, 9), st.integers(8 + length, len(raw) - 1)), min_size=1, max_size=3)
    ):
        changed[at] = data.draw(st.integers(0, 255))
    refused_or_valid(bytes(changed[: data.draw(st.sampled_from([None, len(raw) - 8, 7, 0]))]))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("groups",), []), (("groups", 0, 2), 1), (("groups", 0, 2), 3), (("groups", 0, 2), True),
        (("groups", 0, 1), []),
        (("groups", 0, 0, 7), [2]), (("groups", 0, 0, 7), [1, 2, 2]), (("differ",), [7]), (("differ",), "w"),
        (("plain_differ",), None), (("format",), "pickle"), (("format",), []), (("groups", 0, 0, 5), [1, 1, 1]),
    ],
)  # fmt: skip
def test_a_hostile_committing_file_is_refused(path: tuple[Any, ...], value: Any) -> None:
    raw = table()
    length = int.from_bytes(raw[:8], "little")
    document = json.loads(raw[8 : 8 + length])
    put(document, *path, value=value)
    text = json.dumps(document).encode()
    if path[-1] == 7 and value == [2]:  # fewer than there were: that is no contradiction
        return refused_or_valid(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    with pytest.raises(errors.CorruptSlot):
        rank_table.decode(len(text).to_bytes(8, "little") + text + raw[8 + length :], 2)


# Who writes what

shapes = st.lists(st.one_of(st.integers(1, 5), st.integers(1, 5000)), max_size=3).map(tuple)


@settings(max_examples=150, deadline=None)
@given(shapes=st.lists(shapes, max_size=12), ranks=st.integers(1, 9))
def test_parts_are_disjoint_cover_everything_and_are_balanced(shapes: list[tuple[int, ...]], ranks: int) -> None:
    entries = [
        Entry(str(n), "tensor", "float32", shape, (0,) * len(shape), shape, 0, 4 * math.prod(shape))
        for n, shape in enumerate(shapes)
    ]
    dealt = [list(drain_input.deal(entries, ranks, nth)) for nth in range(ranks)]
    assert dealt == [list(drain_input.deal(entries, ranks, nth)) for nth in range(ranks)]
    for number, entry in enumerate(entries):
        rows = entry.shape[0] if entry.shape else 1
        taken = [row for parts in dealt for n, begin, end in parts if n == number for row in range(begin, end)]
        assert taken == list(range(rows)), "each row once, in the order of the ranks"
    loads = [sum(drain_input.part_of(entries[n], *rows).nbytes for n, *rows in parts) for parts in dealt]
    total = sum(entry.nbytes for entry in entries)
    assert sum(loads) == total
    units = [e.nbytes // e.shape[0] if e.nbytes >= MIB and e.shape[0] > 1 else e.nbytes for e in entries if e.nbytes]
    assert all(abs(load - total / ranks) <= max(units, default=0) + 1 for load in loads)


def test_empty_tensors_are_dealt_once() -> None:
    entries = [Entry("e", "tensor", "float32", (0, 5), (0, 0), (0, 5), 0, 0)] * 2
    assert [list(drain_input.deal(entries, 3, nth)) for nth in range(3)] == [[(0, 0, 0), (1, 0, 0)], [], []]


def test_a_part_is_one_run_of_the_bytes_of_its_tensor() -> None:
    whole = np.arange(60, dtype="<f4").reshape(6, 10)
    entry = Entry("w", "array", "<f4", (12, 10), (6, 0), (6, 10), 0, 240)
    part = drain_input.part_of(entry, 2, 5)
    assert (part.offset, part.shape, part.start, part.nbytes) == ((8, 0), (3, 10), 80, 120)
    assert whole.tobytes()[part.start : part.start + part.nbytes] == whole[2:5].tobytes()


# HDF5 that others read

TORCH_DTYPES = [name for name in TORCH_ITEM_NBYTES if hasattr(torch, name)]
# bits8 and the like can hardly be made in PyTorch.
MAKEABLE = [name for name in TORCH_DTYPES if not name.startswith("bits")]
NUMPY_DTYPES = ["|b1", "<i2", ">f8", "<f2", "<c8", "<U3", "|S5", "<M8[ns]", "<m8[s]", "<f16", "|u1", ">u4", "<c32"]
RAW = {"complex32", "bcomplex32", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
       "float4_e2m1fn_x2"}  # fmt: skip
ODD = ["a/b", "a", ".", "..", "", "%", "%2E", "%2F", "a%b", "s~%b%d", "é→\U0001f680", "nul\0in", " ", "x" * 10_000,
       "a.b", "\\", "'\"", "mlflash", "/", "//"]  # fmt: skip


def pieces_of(values: Mapping[str, Any]) -> tuple[list[Entry], list[Source]]:
    """Entries of live tensors, and their bytes."""
    entries = [
        (array_entry(value, name) if isinstance(value, np.ndarray) else tensor_entry(torch, value, name))[1]
        for name, value in values.items()
    ]
    return entries, [lambda value=value: live_bytes(value) for value in values.values()]


def write(path: Path, skeleton: FileWithHoles) -> None:
    Directory(str(path.parent)).write(path.name, skeleton.stream(MIB))
    skeleton.close()


def written(path: Path, values: Mapping[str, Any], ties: Mapping[str, str] | None = None, objects: Any = None
            ) -> tuple[list[Entry], list[int]]:  # fmt: skip
    entries, sources = pieces_of(values)
    skeleton, starts = hdf5_files.tensors(entries, sources, ties or {}, objects)
    hdf5_files.add_index(skeleton, b"index")
    skeleton.patch(0, CARD.pack())
    write(path, skeleton)
    return entries, starts


def elsewhere(program: str, *arguments: object) -> None:
    """Run a program in a process that has no mlflash."""
    program = f"import sys\nsys.modules['mlflash'] = None\nimport h5py, numpy as np\n{program}"
    subprocess.run([sys.executable, "-W", "error", "-c", program, *map(str, arguments)], check=True, timeout=60)


READER = """
import pickle
found = {}
with h5py.File(sys.argv[1]) as file:
    for name, dataset in file["tensors"].items():
        attrs = dataset.attrs
        found[name] = (dataset[...], attrs["dtype"], "raw" in attrs, tuple(attrs["global_shape"]))
    found["*objects"] = file["objects"][()]
with open(sys.argv[2], "wb") as out:
    pickle.dump(found, out)
"""


def read_elsewhere(path: Path, tmp_path: Path) -> dict[str, Any]:
    """What plain h5py finds in a file: by name value, dtype, whether it is raw, global shape."""
    import pickle

    elsewhere(READER, path, tmp_path / "found")
    return pickle.loads((tmp_path / "found").read_bytes())


def random_tensor(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    nbytes = math.prod(shape) * TORCH_ITEM_NBYTES[dtype]
    raw = np.random.default_rng(7).integers(0, 2 if dtype == "bool" else 256, nbytes, dtype=np.uint8)
    return torch.from_numpy(raw).view(getattr(torch, dtype)).reshape(shape)


def test_every_dtype_of_pytorch_is_stored_and_read_as_what_it_is_or_marked_as_raw(tmp_path: Path) -> None:
    values = {name: random_tensor(name, (3, 4)) for name in MAKEABLE}
    entries, starts = written(tmp_path / "rank.h5", values)
    content = (tmp_path / "rank.h5").read_bytes()
    found = read_elsewhere(tmp_path / "rank.h5", tmp_path)
    for entry, start in zip(entries, starts, strict=True):
        value, (read, dtype, raw, shape) = values[entry.name], found[entry.name]
        bits = live_bytes(value).tobytes()
        assert content[start : start + entry.nbytes] == bits, "the bytes of the slot, unchanged"
        assert (dtype, raw, shape) == (entry.name, entry.name in RAW, (3, 4))
        if raw:
            assert read.tobytes() == bits and read.dtype == np.uint8
        elif entry.name in ("bfloat16", "float8_e5m2"):
            np.testing.assert_array_equal(read, value.float().numpy())
        else:
            assert read.tobytes() == bits and read.dtype == value.numpy().dtype


def test_every_dtype_of_a_slot_has_a_form() -> None:
    for name, nbytes in TORCH_ITEM_NBYTES.items():
        form = hdf5_files.form_of("tensor", name)
        assert math.prod(form.shape) * form.dtype.get_size() == nbytes


def test_every_dtype_of_numpy_is_stored_and_read_as_what_it_is_or_marked_as_raw(tmp_path: Path) -> None:
    values = {}
    for name in NUMPY_DTYPES:
        nbytes = 6 * np.dtype(name).itemsize
        raw = np.random.default_rng(1).integers(1, 2 if name in ("|b1", "<U3") else 256, nbytes, dtype=np.uint8)
        values[name] = np.frombuffer(raw.tobytes(), dtype=name).reshape(2, 3)
    values["<U3"] = np.array([["é", "", "abc"], ["\U0001f680", "x", "yz"]])
    written(tmp_path / "rank.h5", values)
    found = read_elsewhere(tmp_path / "rank.h5", tmp_path)
    for name, value in values.items():
        read, dtype, raw, _ = found[name]
        assert dtype == name
        assert raw == (value.dtype.kind in "UmM" or (value.dtype.kind == "c" and value.dtype.itemsize > 16)), name
        if raw:
            assert read.tobytes() == value.tobytes()
        else:  # h5py may give the machine's order of bytes
            assert read.dtype == value.dtype.newbyteorder("=") or read.dtype == value.dtype
            assert read.astype(value.dtype).tobytes() == value.tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2"])
def test_every_bit_pattern_of_bfloat16_and_e5m2_is_the_number_that_pytorch_takes_it_for(
    tmp_path: Path, dtype: str
) -> None:
    patterns = np.arange(65_536, dtype="<u2") if dtype == "bfloat16" else np.arange(256, dtype=np.uint8)
    tensor = torch.from_numpy(patterns.view(np.uint8).copy()).view(getattr(torch, dtype))
    written(tmp_path / "rank.h5", {"x": tensor})
    read, wanted = read_elsewhere(tmp_path / "rank.h5", tmp_path)["x"][0], tensor.float().numpy()
    assert np.isnan(read).tolist() == np.isnan(wanted).tolist()
    good = ~np.isnan(wanted)
    assert read[good].astype("<f4").tobytes() == wanted[good].tobytes(), "signs of zero, subnormals, infinities"


def h5dump(path: Path, name: str, *options: str) -> list[str]:
    done = subprocess.run([H5DUMP, "-w", "0", "-y", "-d", name, *options, str(path)], check=True, timeout=60,
                          capture_output=True, text=True, cwd="/")  # fmt: skip
    inside = done.stdout[done.stdout.index("DATA {") + 6 :].split("ATTRIBUTE")[0]
    return [text for text in re.split(r"[\s,{}]+", inside) if text]


@needs_h5dump
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "float32", "int64", "complex64", "float8_e4m3fn", "bool"])
def test_h5dump_reads_the_values_that_pytorch_has(tmp_path: Path, dtype: str) -> None:
    tensor = random_tensor(dtype, (16, 16))
    written(tmp_path / "rank.h5", {"a.x/y": tensor})
    read = h5dump(tmp_path / "rank.h5", "/tensors/a.x%2Fy", "-m", "%.17g")
    if dtype == "bool":
        assert [text == "TRUE" for text in read] == tensor.flatten().tolist()
    elif dtype == "float8_e4m3fn":
        assert [int(text) for text in read] == tensor.view(torch.uint8).flatten().tolist()
    elif dtype == "complex64":
        parts = torch.view_as_real(tensor).flatten().double().numpy()
        found = [float(text.rstrip("i").lstrip("+")) for text in read]
        np.testing.assert_array_equal(found, parts)
    else:
        wanted = tensor.flatten() if dtype == "int64" else tensor.flatten().double()
        np.testing.assert_array_equal([float(text) for text in read], wanted.numpy().astype(float))


def test_what_is_compressed_is_read_by_plain_hdf5_and_has_no_place(tmp_path: Path) -> None:
    values = {
        "big": np.arange(100_000).reshape(100, 1000),
        "half": torch.zeros(300, 300).bfloat16(),
        "small": np.ones(9),
    }
    skeleton, starts = hdf5_files.tensors(*pieces_of(values), {}, {}, "gzip")
    write(tmp_path / "rank.h5", skeleton)
    assert [start is None for start in starts] == [True, True, False]
    assert (tmp_path / "rank.h5").stat().st_size < values["big"].nbytes / 2
    found = read_elsewhere(tmp_path / "rank.h5", tmp_path)
    assert found["big"][0].tobytes() == values["big"].tobytes() and not found["half"][0].any()
    with hdf5_files.open_file(str(tmp_path / "rank.h5")) as file:
        raw = hdf5_files.read_rows(file["tensors"]["big"], 7, 9, 16_000)
    assert raw.tobytes() == values["big"][7:9].tobytes()


def test_odd_names_are_kept_apart_and_can_be_told_from_the_names_in_the_file(tmp_path: Path) -> None:
    values = {name: np.full(3, n) for n, name in enumerate(ODD)}
    written(tmp_path / "rank.h5", values)
    names = [hdf5_files.dataset_name(name) for name in ODD]
    assert len(set(names)) == len(ODD) and not any("/" in name for name in names)
    found = read_elsewhere(tmp_path / "rank.h5", tmp_path)
    assert {name: found[name][0].tolist() for name in names} == {name: [n] * 3 for n, name in enumerate(names)}


@given(one=st.text(max_size=8), other=st.text(max_size=8))
def test_different_names_are_different_in_the_file(one: str, other: str) -> None:
    assert (hdf5_files.dataset_name(one) == hdf5_files.dataset_name(other)) == (one == other)


@needs_h5dump
def test_h5dump_finds_odd_names(tmp_path: Path) -> None:
    written(tmp_path / "rank.h5", {name: np.full(2, n) for n, name in enumerate(ODD)})
    for n, name in enumerate(ODD):
        if len(name) < 1000 and hdf5_files.dataset_name(name) not in (
            " ",
            "'\"",
            "\\",
        ):  # h5dump trims and unquotes these
            assert h5dump(tmp_path / "rank.h5", f"/tensors/{hdf5_files.dataset_name(name)}") == [str(n)] * 2, name


def test_scalars_and_empty_tensors_keep_their_shapes(tmp_path: Path) -> None:
    values = {
        "scalar": torch.tensor(2.5), "none": torch.zeros(0), "rows": torch.zeros(0, 7), "columns": torch.zeros(3, 0),
        "raw scalar": torch.tensor(3).to(torch.float8_e4m3fn), "raw none": torch.zeros(0, 2).to(torch.float8_e4m3fn),
        "number": np.array(7), "words": np.zeros(0, dtype="<U3"),
    }  # fmt: skip
    written(tmp_path / "rank.h5", values)
    found = read_elsewhere(tmp_path / "rank.h5", tmp_path)
    for name, value in values.items():
        read, _, raw, shape = found[name]
        assert shape == tuple(value.shape)
        assert raw or read.shape == shape, name
    assert (found["scalar"][0], found["number"][0], found["raw scalar"][0]) == (2.5, 7, 68)


def test_tied_tensors_are_hard_links_and_objects_are_json(tmp_path: Path) -> None:
    ties = {"b/c": "a", "d": "a"}
    written(tmp_path / "rank.h5", {"a": np.arange(1000)}, ties, {"lr": 0.1, "w": {"$tensor": "a"}})
    elsewhere(
        "import json\nfile = h5py.File(sys.argv[1])\ntensors = file['tensors']\n"
        "assert tensors['a'] == tensors['b%2Fc'] == tensors['d'] and h5py.h5o.get_info(tensors['a'].id).rc == 3\n"
        "assert tensors.get('d', getlink=True).__class__ is h5py.HardLink\n"
        "assert json.loads(file['objects'][()]) == {'lr': 0.1, 'w': {'$tensor': 'a'}}\nfile.close()",
        tmp_path / "rank.h5",
    )
    assert (tmp_path / "rank.h5").stat().st_size < 2 * 8000


def test_the_card_and_the_index_are_where_they_are_said_to_be(tmp_path: Path) -> None:
    skeleton, _ = hdf5_files.tensors(*pieces_of({"a": np.arange(5)}), {}, {})
    start = hdf5_files.add_index(skeleton, b"my index")
    skeleton.patch(0, CARD.pack())
    write(tmp_path / "rank.h5", skeleton)
    raw = (tmp_path / "rank.h5").read_bytes()
    assert file_index.read_card(raw[:CARD_NBYTES]) == CARD and raw[start : start + 8] == b"my index"
    elsewhere(
        "file = h5py.File(sys.argv[1])\nassert file['mlflash/index'][...].tobytes() == b'my index'\n"
        "assert file.userblock_size == 512\nfile.close()",
        tmp_path / "rank.h5",
    )


def shard(name: str, whole: np.ndarray, offset: Sequence[int], shape: Sequence[int]) -> tuple[Entry, np.ndarray]:
    box = tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))
    part = np.ascontiguousarray(whole[box])
    return Entry(name, "array", whole.dtype.str, whole.shape, tuple(offset), tuple(shape), 0, part.nbytes), part


@pytest.fixture
def three_ranks(tmp_path: Path) -> tuple[Path, np.ndarray]:
    """Files of three ranks with shards of tensors, and the file that shows them whole."""
    whole = np.random.default_rng(3).standard_normal((30, 20))
    boxes = {0: [("w/%b", (0, 0), (12, 20)), ("tiles", (0, 0), (30, 7))],
             1: [("w/%b", (8, 0), (12, 20)), ("tiles", (0, 7), (15, 13)), ("alike", (0, 0), (30, 20))],
             2: [("w/%b", (20, 0), (10, 20)), ("tiles", (15, 7), (15, 13)), ("alike", (0, 0), (30, 20)),
                 ("w/%b", (0, 0), (0, 20))]}  # fmt: skip
    ranks: dict[int, list[tuple[str, Entry, bool]]] = {}
    for rank, parts in boxes.items():
        made = [shard(name, whole, offset, shape) for name, offset, shape in parts if math.prod(shape)]
        skeleton, _ = hdf5_files.tensors(
            [entry for entry, _ in made], [lambda part=part: live_bytes(part) for _, part in made], {}, None
        )
        write(tmp_path / hdf5_files.rank_file_name(rank), skeleton)
        ranks[rank] = [(name, shard(name, whole, offset, shape)[0], True) for name, offset, shape in parts]
    ranks[0].append(("differs", dataclasses.replace(ranks[0][0][1], name="differs"), False))
    ranks[1].append(("half of it", dataclasses.replace(ranks[0][1][1], name="half of it"), True))
    write(tmp_path / hdf5_files.MASTER, hdf5_files.whole(ranks, {"tied": "w/%b"}, {"step": 3}, {"step": 3}))
    return tmp_path / hdf5_files.MASTER, whole


def test_the_master_shows_tensors_whole_over_several_files_and_overlapping_replicas(
    three_ranks: tuple[Path, np.ndarray], tmp_path: Path
) -> None:
    path, whole = three_ranks
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in tmp_path.glob("*.h5"):
        file.rename(moved / file.name)  # names in it are relative
    path = moved / path.name
    np.save(tmp_path / "whole.npy", whole)
    elsewhere(
        "whole = np.load(sys.argv[2])\n"
        "with h5py.File(sys.argv[1]) as file:\n"
        "    tensors = file['tensors']\n"
        "    assert sorted(tensors) == ['alike', 'tied', 'tiles', 'w%2F%25b'], list(tensors)\n"
        "    for name in tensors:\n"
        "        assert tensors[name].is_virtual and tensors[name][...].tobytes() == whole.tobytes(), name\n"
        "    assert tensors['w%2F%25b'][6:24, 3:17:5].tobytes() == whole[6:24, 3:17:5].tobytes(), 'all three files'\n"
        "    assert tensors['tiles'][14:16, 6:8].tobytes() == whole[14:16, 6:8].tobytes(), 'a corner of three tiles'\n"
        "    assert tensors['tied'] == tensors['w%2F%25b']\n"
        "    assert file['ranks/00001/tiles'][...].tobytes() == whole[:15, 7:].tobytes()\n"
        "    assert file.attrs['step'] == 3",
        path,
        tmp_path / "whole.npy",
    )


@pytest.mark.parametrize("most", [1, 2])
def test_a_master_that_would_list_too_many_pieces_shows_none_and_all_comes_back(
    shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(Hdf5, "most_pieces", most)
    state, blank = ({name: np.full(1000, value) for name, value in zip("ab", values, strict=True)}
                    for values in ((1.0, 2.0), (0.0, 0.0)))  # fmt: skip
    options: dict[str, Any] = {"job": "t", "directory": tmp_path / "pfs", "courier": "thread", "redundancy": "none"}
    with Checkpointer(memory=str(shm), **options) as ckpt:
        ckpt.save(7, state).wait()
        ckpt.drain().wait()
    shutil.rmtree(shm / "t", ignore_errors=True)
    (shm / "other").mkdir()
    with Checkpointer(memory=str(shm / "other"), **options) as ckpt:
        assert ckpt.restore(blank) == 7 and all(np.array_equal(blank[name], state[name]) for name in "ab")
    elsewhere(
        "with h5py.File(sys.argv[1]) as file:\n"
        f"    assert sorted(file['tensors']) == {['a', 'b'] if most == 2 else []}\n"
        "    assert sorted(file['ranks/00000']) == ['a', 'b'] and file['ranks/00000/b'][999] == 2.0",
        tmp_path / "pfs" / "step-00000007" / "checkpoint.h5",
    )


@needs_h5dump
def test_h5dump_reads_a_slice_across_the_files_of_two_ranks(three_ranks: tuple[Path, np.ndarray]) -> None:
    path, whole = three_ranks
    read = h5dump(path, "/tensors/tiles", "-m", "%.17g", "-s", "10,5", "-c", "8,4")
    np.testing.assert_array_equal(np.array(read, dtype=float), whole[10:18, 5:9].flatten())


@pytest.mark.slow
def test_three_thousand_tensors_are_laid_out_fast_and_in_little_memory() -> None:
    entry = Entry("", "tensor", "bfloat16", (1024, 2048), (0, 0), (1024, 2048), 0, 4 * MIB)
    entries = [dataclasses.replace(entry, name=f"model.layers.{n}.weight") for n in range(3000)]
    begin = time.process_time()
    skeleton, starts = hdf5_files.tensors(entries, [_never] * 3000, {}, {})
    start = hdf5_files.add_index(skeleton, bytes(MIB))
    assert time.process_time() - begin < 4  # 1.6 s on an idle core
    assert skeleton.nbytes > 12e9 and len(set(starts)) == 3000 and start > 0
    assert os.fstat(skeleton.file.fileno()).st_blocks * 512 < 50e6
    begin = time.process_time()
    master = hdf5_files.whole(
        {rank: [(entry.name, entry, True) for entry in entries[rank::3]] for rank in range(3)}, {}, {}, {}
    )
    assert time.process_time() - begin < 4
    assert master.nbytes < 50e6
    skeleton.close()
    master.close()


def _never() -> np.ndarray:
    raise AssertionError("nothing is read while a file is laid out")


# Files with holes


@settings(max_examples=50, deadline=None)
@given(
    parts=st.lists(st.tuples(st.binary(max_size=40), st.binary(max_size=200)), max_size=5),
    chunk=st.sampled_from([1, 7, 64, 5000]),
)
def test_the_stream_is_the_file(parts: list[tuple[bytes, bytes]], chunk: int) -> None:
    skeleton, wanted = FileWithHoles(), bytearray()
    for content, hole in parts:
        skeleton.file.seek(len(wanted))
        skeleton.file.write(content)
        wanted += content
        skeleton.place(len(wanted), len(hole), lambda hole=hole: np.frombuffer(hole, dtype=np.uint8))
        wanted += hole
    pieces = [bytes(piece) for piece in skeleton.stream(chunk)]
    assert b"".join(pieces) == wanted and skeleton.nbytes == len(wanted)
    assert all(0 < len(piece) <= chunk for piece in pieces)
    assert b"".join(skeleton.stream(chunk)) == wanted, "as often as one likes"
    skeleton.close()
    skeleton.close()


def test_places_may_come_in_any_order_and_patches_afterwards() -> None:
    skeleton = FileWithHoles()
    skeleton.place(8, 4, lambda: np.frombuffer(b"last", dtype=np.uint8))
    skeleton.place(2, 5, lambda: np.frombuffer(b"first", dtype=np.uint8))
    skeleton.patch(0, b"ab")
    assert b"".join(skeleton.stream(3)) == b"abfirst\0last"
    skeleton.close()


@pytest.mark.parametrize("nbytes", [3, 5])
def test_a_source_of_the_wrong_size_raises(tmp_path: Path, nbytes: int) -> None:
    skeleton = FileWithHoles()
    skeleton.place(0, 4, lambda: np.zeros(nbytes, dtype=np.uint8))
    with pytest.raises(AssertionError, match=f"a tensor has {nbytes} bytes, not 4"):
        write(tmp_path / "file", skeleton)
    assert list(tmp_path.iterdir()) == []
    skeleton.close()


# Which checkpoints there are, and which may be deleted


def put_rank(store: Directory, folder: str, name: str = "rank-00000.h5", *, owner: str = "me", run_id: bytes = RUN,
             generation: int = 1) -> None:  # fmt: skip
    inside = store.at(folder)
    inside.make()
    inside.write(name, [dataclasses.replace(CARD, owner=owner, attempt=Attempt(run_id, generation)).pack()])


def commit(store: Directory, folder: str, step: int, generation: int, owner: str = "me", run_id: bytes = RUN,
           name: str = "checkpoint.h5") -> Listed:  # fmt: skip
    put_rank(store, folder, owner=owner, run_id=run_id, generation=generation)
    return write_master(store, folder, b"{}", step=step, generation=generation, owner=owner, run_id=run_id, name=name)


def tree(path: Path) -> list[str]:
    return sorted(str(one.relative_to(path)) for one in path.rglob("*") if not one.is_dir())


def test_the_newest_is_the_one_of_the_largest_generation_whatever_its_step(tmp_path: Path) -> None:
    store = Directory(str(tmp_path))
    for folder, step, generation in (("step-00000005", 5, 1), ("step-00000003", 3, 9), ("step-00000003.1", 3, 12),
                                     ("step-123456789", 123_456_789, 10)):  # fmt: skip
        commit(store, folder, step, generation)
    assert [(one.folder, one.step) for one in checkpoint_directory.list_checkpoints(store)] == [
        ("step-00000003.1", 3), ("step-123456789", 123_456_789), ("step-00000003", 3), ("step-00000005", 5)
    ]  # fmt: skip


def test_what_is_no_committed_checkpoint_is_passed_over(tmp_path: Path) -> None:
    store = Directory(str(tmp_path))
    wanted = commit(store, "step-00000001", 1, 1)
    put_rank(store, "step-00000002")  # not committed
    commit(store, "step-3", 3, 3)
    commit(store, "step-00000004.old", 4, 4)
    (tmp_path / "step-00000005").write_text("a file")
    (tmp_path / "step-00000006").mkdir()
    (tmp_path / "step-00000006" / "checkpoint.h5").write_bytes(b"")
    (tmp_path / "step-00000007" / "checkpoint.h5").mkdir(parents=True)
    (tmp_path / "step-00000008").mkdir()
    os.mkfifo(tmp_path / "step-00000008" / "checkpoint.h5")  # must not be waited for
    (tmp_path / "step-00000009").mkdir()
    shutil.copy(tmp_path / "step-00000001" / "rank-00000.h5", tmp_path / "step-00000009" / "checkpoint.h5")
    assert checkpoint_directory.list_checkpoints(store) == [wanted]
    assert checkpoint_directory.list_checkpoints(Directory(str(tmp_path / "nowhere"))) == []


def test_links_are_not_followed_when_reading_or_deleting(tmp_path: Path) -> None:
    store, outside = Directory(str(tmp_path / "d")), Directory(str(tmp_path / "outside"))
    listed = commit(outside, "step-00000001", 1, 7)
    wanted = commit(store, "step-00000002", 2, 2)
    (tmp_path / "d" / "step-00000001").symlink_to(tmp_path / "outside" / "step-00000001")
    (tmp_path / "d" / "step-00000003").mkdir()
    for name in ("checkpoint.h5", "rank-00000.h5"):
        (tmp_path / "d" / "step-00000003" / name).symlink_to(tmp_path / "outside" / "step-00000001" / name)
    put_rank(outside, "step-00000004", run_id=bytes(16))
    (tmp_path / "d" / "step-00000004").symlink_to(tmp_path / "outside" / "step-00000004")
    before = tree(tmp_path)
    assert checkpoint_directory.list_checkpoints(store) == [wanted]
    checkpoint_directory.delete_leftovers(store, "me", b"x" * 16)
    with pytest.raises(errors.UnsafePath, match="not followed"):
        checkpoint_directory.delete(store, listed)
    assert tree(tmp_path) == before
    assert [checkpoint_directory.new_folder(store, step) for step in (1, 4)] == ["step-00000001.1", "step-00000004.1"]
    for name in ("checkpoint.h5", "rank-00000.h5"):
        with pytest.raises(OSError, match="not followed"):
            store.at("step-00000003").read(name)
        with pytest.raises(errors.UnsafePath):
            store.at("step-00000001").read(name)


def test_a_link_to_the_directory_itself_is_the_users_affair(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "scratch").symlink_to(tmp_path / "real")
    store = Directory(str(tmp_path / "scratch"))
    listed = commit(store, "step-00000001", 1, 1)
    assert checkpoint_directory.list_checkpoints(store) == [listed]
    checkpoint_directory.delete(store, listed)
    assert list((tmp_path / "real").iterdir()) == []


@contextlib.contextmanager
def somebody_else(folder: Path) -> Iterator[None]:
    """Be a user who may not look into a folder."""
    if os.geteuid() == 0:
        os.seteuid(12_345)
        try:
            yield
        finally:
            os.seteuid(0)
    else:
        folder.chmod(0)
        try:
            yield
        finally:
            folder.chmod(0o700)


def test_a_folder_of_another_user_is_passed_over_and_is_in_nobodys_way(shm: Path) -> None:
    store = Directory(str(shm))
    commit(store, "step-00000003", 3, 3)  # 0700, as mlflash makes them
    shm.chmod(0o777)
    with somebody_else(shm / "step-00000003"):
        mine = commit(store, "step-00000001", 1, 1)
        assert checkpoint_directory.list_checkpoints(store) == [mine]
        checkpoint_directory.delete_leftovers(store, "me", b"x" * 16)
        assert checkpoint_directory.new_folder(store, 3) == "step-00000003.1"
        checkpoint_directory.delete(store, mine)
    assert tree(shm) == ["step-00000003/checkpoint.h5", "step-00000003/rank-00000.h5"]


def test_a_new_folder_is_one_that_is_not_taken(tmp_path: Path) -> None:
    store = Directory(str(tmp_path))
    assert checkpoint_directory.new_folder(store, 12) == "step-00000012"
    commit(store, "step-00000012", 12, 1)
    assert checkpoint_directory.new_folder(store, 12) == "step-00000012.1"
    put_rank(store, "step-00000012.7")
    assert checkpoint_directory.new_folder(store, 12) == "step-00000012.8"
    assert checkpoint_directory.new_folder(store, 1) == "step-00000001"
    (tmp_path / "step-00000013").write_text("in the way")
    assert checkpoint_directory.new_folder(store, 13) == "step-00000013.1"
    assert checkpoint_directory.new_folder(store, 123_456_789) == "step-123456789"


def model(listed: Sequence[Listed], owner: str, keep_last: int, keep_every: int) -> set[str]:
    """Which folders stay, said once more and simply."""
    if not keep_last:
        return {one.folder for one in listed}
    stays = {one.folder for one in listed if one.card.owner != owner}
    mine = sorted((one for one in listed if one.card.owner == owner), key=lambda one: one.age)
    newest = {one.step: one for one in mine if one.verdict is not Verdict.BAD}
    ranked = sorted(newest.values(), key=lambda one: one.age)
    stays |= {one.folder for one in ranked[-keep_last:]}
    for one in mine:
        newer = [another for another in ranked if another.age > one.age]
        if one.verdict is Verdict.BAD and len(newer) < keep_last:
            stays.add(one.folder)
    return stays | {one.folder for one in ranked if keep_every and one.step % keep_every == 0}


drained = st.tuples(
    st.integers(0, 12), st.sampled_from(["me", "other"]), st.sampled_from([Verdict.PASSED, Verdict.BAD])
)


@settings(max_examples=150, deadline=None)
@given(
    history=st.lists(drained, max_size=14),
    order=st.randoms(),
    keep_last=st.integers(0, 4),
    keep_every=st.integers(0, 4),
)
def test_what_is_surplus_is_what_a_simple_model_says(
    history: list[tuple[int, str, Verdict]], order: Any, keep_last: int, keep_every: int
) -> None:
    listed = [
        Listed(
            str(n),
            "checkpoint.h5",
            dataclasses.replace(CARD, rank=-1, step=step, owner=owner, attempt=Attempt(RUN, n)),
            verdict,
        )
        for n, (step, owner, verdict) in enumerate(history)
    ]
    order.shuffle(listed)
    found = {one.folder for one in checkpoint_directory.surplus(listed, "me", keep_last, keep_every)}
    stay = model(listed, "me", keep_last, keep_every)
    assert found == {one.folder for one in listed} - stay
    mine = {one.step for one in listed if one.card.owner == "me" and one.verdict is not Verdict.BAD}
    good = [one for one in listed if one.folder in stay and one.verdict is not Verdict.BAD]
    assert len(good) >= min(keep_last, len(mine)), "so many steps are there to go back to"


def test_deleting_leaves_foreign_files_and_then_the_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Directory(str(tmp_path))
    one, two = commit(store, "step-00000001", 1, 1), commit(store, "step-00000002", 2, 2)
    put_rank(store, "step-00000001", "rank-00001.h5", owner="other")
    put_rank(store, "step-00000001", "rank-00002.h5", run_id=bytes(16))
    (tmp_path / "step-00000001" / "rank-00003.h5").write_bytes(b"somebody else's")
    (tmp_path / "step-00000001" / "rank-00004.h5").mkdir()
    (tmp_path / "step-00000001" / ".metadata").symlink_to(tmp_path / "nowhere")
    (tmp_path / "step-00000001" / "notes.txt").write_text("mine")
    for listed in (one, two):
        checkpoint_directory.delete(store, listed)
    assert tree(tmp_path) == [f"step-00000001/{name}" for name in (
        ".metadata", "notes.txt", "rank-00001.h5", "rank-00002.h5", "rank-00003.h5")]  # fmt: skip
    assert not (tmp_path / "step-00000002").exists()
    assert "step-00000001 stays" in caplog.text and "step-00000002 stays" not in caplog.text


class Watched(Directory):
    """Notes what is deleted; one file takes as long as all that is deleted beside it."""

    def __init__(self, path: str, removed: list[str], slow: str = ""):
        super().__init__(path)
        self.removed, self.slow = removed, slow

    def at(self, name: str) -> Directory:
        return Watched(os.path.join(self.path, name), self.removed, self.slow)

    def remove(self, name: str) -> None:
        if name == self.slow:
            me = threading.current_thread()
            others = [one for one in threading.enumerate() if one.name == "mlflash-files" and one is not me]
            until(lambda: not any(one.is_alive() for one in others), "all others to be deleted")
        super().remove(name)
        self.removed.append(name)


def test_deleting_takes_the_committing_file_first(tmp_path: Path) -> None:
    removed: list[str] = []
    store = Watched(str(tmp_path), removed)
    listed = commit(store, "step-00000001", 1, 1)
    put_rank(store, "step-00000001", "rank-00001.h5")
    checkpoint_directory.delete(store, listed)
    assert removed == ["checkpoint.h5", "rank-00000.h5", "rank-00001.h5"]


def test_files_of_dcp_are_deleted_with_their_cards(tmp_path: Path) -> None:
    store = Directory(str(tmp_path))
    listed = write_master(store, "step-00000001", b"{}", name="checkpoint.mlflash")
    put_rank(store, "step-00000001", "rank-00000.mlflash")
    inside = store.at("step-00000001")
    inside.write("__0_0.distcp", [b"data"])
    inside.write("__1_0.distcp", [b"data without a card"])
    inside.write(".metadata", [b"pickle ", checkpoint_directory.tag(listed.card.attempt, "me").encode(), b" more"])
    checkpoint_directory.delete(store, listed)
    assert tree(tmp_path) == ["step-00000001/__1_0.distcp"]


def put_provenance(inside: Directory, attempt: Attempt, owner: str) -> None:
    inside.write("provenance.json", [b"{ ", checkpoint_directory.tag(attempt, owner).encode(), b" }"])
    inside.write("provenance.json.sig", [bytes(64)])


@pytest.mark.parametrize("committed", [True, False])
def test_provenance_is_deleted_with_its_checkpoint_and_that_of_another_stays(tmp_path: Path, committed: bool) -> None:
    removed: list[str] = []
    store = Watched(str(tmp_path), removed)
    listed = {step: commit(store, f"step-0000000{step}", step, step) for step in (1, 2)}
    put_provenance(store.at("step-00000001"), listed[1].card.attempt, "me")
    put_provenance(store.at("step-00000002"), listed[1].card.attempt, "me")  # it was copied there
    for folder in ("step-00000001", "step-00000002"):
        if committed:
            checkpoint_directory.delete(store, listed[int(folder[-1])])
        else:
            (tmp_path / folder / "checkpoint.h5").unlink()
    if not committed:
        checkpoint_directory.delete_leftovers(store, "me", b"y" * 16)
    assert tree(tmp_path) == ["step-00000002/provenance.json", "step-00000002/provenance.json.sig"]
    assert removed[committed:][:3] == ["provenance.json.sig", "provenance.json", "rank-00000.h5"], (
        "whose it is goes last"
    )


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("slow", [".metadata", "__99_0.distcp"])
def test_of_many_ranks_that_of_pytorch_goes_first_then_all_data_and_the_cards_last(
    tmp_path: Path, committed: bool, slow: str
) -> None:
    removed: list[str] = []
    store = Watched(str(tmp_path), removed, slow)
    listed = write_master(store, "step-00000001", b"{}", name="checkpoint.mlflash")
    inside = store.at("step-00000001")
    for rank in range(100):
        put_rank(store, "step-00000001", f"rank-{rank:05d}.mlflash")
        inside.write(f"__{rank}_0.distcp", [b"data"])
    inside.write(".metadata", [checkpoint_directory.tag(listed.card.attempt, "me").encode()])
    if committed:
        checkpoint_directory.delete(store, listed)
        assert removed.pop(0) == "checkpoint.mlflash"
    else:
        (tmp_path / "step-00000001" / "checkpoint.mlflash").unlink()
        checkpoint_directory.delete_leftovers(store, "me", b"y" * 16)
    assert removed[0] == ".metadata"
    assert sorted(removed[1:101]) == sorted(f"__{rank}_0.distcp" for rank in range(100))
    assert sorted(removed[101:]) == [f"rank-{rank:05d}.mlflash" for rank in range(100)]
    assert list(tmp_path.iterdir()) == []


def test_only_what_interrupted_drains_of_earlier_runs_of_this_job_left_is_deleted(tmp_path: Path) -> None:
    store = Directory(str(tmp_path))
    earlier, now = bytes(16), RUN

    def temporary(name: str, run_id: bytes, owner: str) -> str:
        return f".{name}.{checkpoint_directory.tag(Attempt(run_id, 1), owner)}.tmp"

    left = {
        "step-00000001": ["rank-00000.h5", "rank-00001.h5", temporary("rank-00002.h5", earlier, "me")],
        "step-00000002": [temporary("rank-00000.h5", earlier, "me")],
    }
    for folder, names in left.items():
        for name in names:
            put_rank(store, folder, name, run_id=earlier)
    (tmp_path / "step-00000002" / left["step-00000002"][0]).write_bytes(b"")  # no card yet
    put_rank(store, "step-00000003", "rank-00000.mlflash", run_id=earlier)
    store.at("step-00000003").write("__0_0.distcp", [b"data"])
    store.at("step-00000003").write(temporary("__1_0.distcp", earlier, "me"), [b"data"])
    store.at("step-00000003").write(".metadata", [checkpoint_directory.tag(Attempt(earlier, 1), "me").encode()])
    gone = tree(tmp_path)
    # These stay.
    commit(store, "step-00000004", 4, 1, run_id=earlier)
    store.at("step-00000004").write(temporary("rank-00005.h5", earlier, "me"), [b""])
    commit(store, "step-00000005", 5, 1, run_id=earlier, name="checkpoint.mlflash")
    put_rank(store, "step-00000006", run_id=now)
    store.at("step-00000006").write(temporary("rank-00001.h5", now, "me"), [b""])
    put_rank(store, "step-00000007", run_id=earlier, owner="other")
    store.at("step-00000007").write(temporary("rank-00001.h5", earlier, "other"), [b""])
    (tmp_path / "step-00000007" / "__0_0.distcp").write_bytes(b"data without a card")
    put_rank(store, "not a step", run_id=earlier)
    (tmp_path / "step-00000008").write_text("a file")
    (tmp_path / "step-00000001" / "notes.txt").write_text("mine")
    (tmp_path / "step-00000009").mkdir()
    stay = sorted(set(tree(tmp_path)) - set(gone))
    checkpoint_directory.delete_leftovers(store, "me", now)
    assert tree(tmp_path) == stay
    assert not (tmp_path / "step-00000002").exists() and not (tmp_path / "step-00000003").exists()
    assert (tmp_path / "step-00000009").exists() and (tmp_path / "step-00000001").exists()


def test_leftovers_of_many_ranks_are_found_in_one_pass(tmp_path: Path) -> None:
    reads: list[str] = []

    class Watched(Directory):
        def at(self, name: str) -> Directory:
            return Watched(os.path.join(self.path, name))

        def read(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
            reads.append(name)
            return super().read(name, start, nbytes)

    store = Watched(str(tmp_path))
    for rank in range(60):
        put_rank(store, "step-00000001", f"rank-{rank:05d}.h5", run_id=bytes(16))
    checkpoint_directory.delete_leftovers(store, "me", RUN)
    assert tree(tmp_path) == [] and len(reads) <= 3 * 60
