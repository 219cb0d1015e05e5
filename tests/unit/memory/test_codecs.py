"""Whatever is written comes back equal; a byte that was changed or cut is refused, or what is read is valid.

Each row of `CODECS` is a form in which mlflash writes something that another process reads, perhaps long after.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlflash.channel.describe_ranks import Described, gather_ranks
from mlflash.config import Config
from mlflash.drain import index
from mlflash.drain.index import Card, Place, RankFiles, RankTable
from mlflash.errors import CorruptSlot
from mlflash.launch.lines import BadLine, Lines, pack
from mlflash.memory.slot import COMMIT_START, MAX_GROUP, Attempt, Header, Kind, any_record, pack_record, unpack
from mlflash.mpi.world import World
from mlflash.placement.topology import this_node
from mlflash.state import manifest, old_ranks
from mlflash.state.layout import PAGE_NBYTES, Extents
from mlflash.state.leaves import TORCH_ITEM_NBYTES, Entry
from mlflash.state.old_ranks import RankStructure
from mlflash.storage import canonical_json
from mlflash.telemetry import heartbeat

PAYLOAD_NBYTES = 10_000  # of a slot, and of a drained file
BLOCK_NBYTES = 7  # of a drained file
U32, U64, I64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63 - 1)
NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=4)
ATTEMPTS = st.builds(Attempt, st.binary(min_size=16, max_size=16), U64)
JSON = st.recursive(
    st.none() | st.booleans() | I64 | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=3), inside, max_size=3),
    max_leaves=8,
)
TEXTS_OF_ERRORS = st.text(max_size=8)
CONFIG = Config(job="a-job", directory="/data/é", drain_every=3, timeout_s=12.5)


@dataclasses.dataclass(frozen=True)
class Codec:
    """A form in which something is written.

    Attributes:
        values: what is written.
        encode, decode: write it, and read it.
        refuses: what reading raises where the bytes are wrong.
        is_valid: whether what was read makes sense; None: the bytes have a checksum, and any change is refused.
        plainly: what is compared of two values.
        hostile: what somebody else may have written, with checksums that are right.
    """

    values: st.SearchStrategy[Any]
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]
    refuses: type[Exception] | tuple[type[Exception], ...] = CorruptSlot
    is_valid: Callable[[Any], bool] | None = None
    plainly: Callable[[Any], Any] = lambda value: value
    hostile: st.SearchStrategy[bytes] | None = None


# Of a slot


@st.composite
def headers(draw: st.DrawFn) -> Header:
    group = sorted(draw(st.sets(st.integers(0, 2**32 - 2), min_size=1, max_size=MAX_GROUP)))
    rank, room, kind = draw(st.sampled_from(group)), draw(st.integers(0, 99)), draw(st.sampled_from(Kind))
    world_size = draw(st.integers(group[-1] + 1, 2**32 - 1))
    made = Header(
        draw(ATTEMPTS), draw(I64), rank, world_size, draw(U32), draw(U32), draw(st.integers(0, room * PAGE_NBYTES)),
        Extents(room * PAGE_NBYTES, draw(st.integers(0, 2**60)), draw(st.integers(1, 2**63))), draw(U64), draw(U64),
        draw(NAMES), draw(NAMES), draw(NAMES), tuple(group), mark=draw(U32),
    )  # fmt: skip
    if kind is Kind.PARITY and len(group) > 2:
        return dataclasses.replace(made, parities=draw(st.integers(1, len(group) - 2)))
    if kind is Kind.SHARE:
        by = draw(st.integers(0, min(world_size, 2**32 - 1) - 1))
        return dataclasses.replace(made, share=group.index(rank), shared_by=by)
    return made


def write_record(value: tuple[Attempt, int]) -> bytes:
    return pack_record(COMMIT_START, *value, 7)


def read_record(raw: bytes) -> tuple[Attempt, int]:
    decoded = any_record(bytes(COMMIT_START) + raw, COMMIT_START)
    if decoded is None:
        raise CorruptSlot("there is no record")
    return decoded


@st.composite
def entries(draw: st.DrawFn) -> tuple[Entry, ...]:
    """Tensors, one after the other in a payload."""
    made, at = [], 0
    for name in draw(st.lists(st.text(max_size=6), unique=True, max_size=5)):
        dtype = draw(st.sampled_from(["float32", "bfloat16", "uint8", "complex128"]))
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        whole = tuple(n + draw(st.integers(0, 2)) for n in shape)
        offset = tuple(draw(st.integers(0, w - n)) for w, n in zip(whole, shape, strict=True))
        nbytes = math.prod(shape) * TORCH_ITEM_NBYTES[dtype]
        made.append(Entry(name, "tensor", dtype, whole, offset, shape, at, nbytes))
        at += nbytes
    return tuple(made)


@st.composite
def manifests(draw: st.DrawFn) -> manifest.Manifest:
    held = draw(entries())
    leaves: list[Any] = [["e", number] for number in range(len(held))] + [["p", 0], ["l", [["t", [["p", 1]]]]]]
    plain = draw(st.lists(st.booleans() | st.integers(-9, 9) | st.text(max_size=3), min_size=2, max_size=2))
    tree: list[Any] = ["d", [[draw(st.text(max_size=3)), leaf] for leaf in leaves]]
    if draw(st.booleans()):
        tree = ["o", ["k", tree, ["OrderedDict"], ["d", [["_metadata", ["v", 1]]]]]]
    shared = draw(st.none() | st.builds(manifest.Shared, st.integers(0, 9), st.integers(1, 255), st.integers(0, 9)))
    provenance = draw(st.sampled_from([{}, manifest.provenance_of({"python": "3.11"}, '{"seed":1}')]))
    return manifest.Manifest(held, tree, plain, shared, provenance)


def encode_manifest(value: manifest.Manifest) -> bytes:
    parts = manifest.encode_entries(value.entries), manifest.encode_tree(value.tree), value.plain
    return manifest.join(*parts, value.shared, value.provenance)


def is_inside(entry: Entry) -> bool:
    return all(at + n <= of for at, n, of in zip(entry.offset, entry.shape, entry.global_shape, strict=True))


def is_manifest(value: manifest.Manifest) -> bool:
    room = PAYLOAD_NBYTES + (value.shared.nbytes if value.shared else 0)
    return all(is_inside(entry) and 0 <= entry.start <= entry.start + entry.nbytes <= room for entry in value.entries)


@st.composite
def hostile_manifests(draw: st.DrawFn) -> bytes:
    return json.dumps(draw(spoiled(json.loads(encode_manifest(draw(manifests())))))).encode()


@st.composite
def spoiled(draw: st.DrawFn, document: Any) -> Any:
    """A document in which something is missing, or something else is in its place."""
    node = document
    while True:
        key = draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        if not isinstance(node[key], (dict, list)) or not node[key] or draw(st.booleans()):
            break
        node = node[key]
    if draw(st.booleans()):
        del node[key]
    else:
        node[key] = draw(JSON | st.just(10**30))
    return document


PLAIN_LEAVES = 2


@st.composite
def structures(draw: st.DrawFn) -> RankStructure:
    tree = ["d", [["plain", ["p", 0]], ["other", ["p", 1]]]]
    return dataclasses.replace(RankStructure.of(draw(entries()), tree)[0], alike=(), shared=())


def write_json(document: Any) -> bytes:
    return json.dumps(document).encode()


def read_structure(raw: bytes) -> RankStructure:
    return old_ranks.structure_from_document(json.loads(raw), PLAIN_LEAVES)


def write_structure(value: RankStructure) -> bytes:
    return json.dumps(value.document).encode()


# Of a directory


@st.composite
def cards(draw: st.DrawFn) -> Card:
    world_size, file_nbytes = draw(st.integers(1, 2**32 - 1)), draw(U64)
    rank, start = draw(st.just(-1) | st.integers(0, world_size - 1)), draw(st.integers(0, file_nbytes))
    return Card(draw(ATTEMPTS), draw(I64), rank, world_size, file_nbytes, start,
                draw(st.integers(0, file_nbytes - start)), draw(U64), draw(U64), draw(NAMES))  # fmt: skip


@st.composite
def indexes(draw: st.DrawFn) -> index.Index:
    held, places, checks = draw(manifests()), {}, 0
    for number, entry in enumerate(held.entries):
        packed = bool(entry.shape and entry.nbytes) and draw(st.booleans())
        rows = entry.shape[0] if entry.shape else 1
        places[number] = Place(entry.start, entry.nbytes, 0, rows, checks, packed)
        checks += index.blocks(entry.nbytes, BLOCK_NBYTES)
    sums = np.array(draw(st.lists(U64, min_size=checks, max_size=checks)), dtype=np.uint64)
    return index.Index("x", BLOCK_NBYTES, sums, places, held)


def encode_index(value: index.Index) -> bytes:
    return index.encode_index(encode_manifest(value.manifest), PAYLOAD_NBYTES, value)[0]


def plain_index(value: index.Index) -> Any:
    return value.manifest, value.data, value.block_nbytes, value.checks.tolist(), value.of


def is_index(value: index.Index) -> bool:
    """Whether the rows that a reader would take are in the file and in a tensor, and have checksums."""
    return all(
        (place.packed or 0 <= place.start <= place.start + place.nbytes <= PAYLOAD_NBYTES)
        and place.first_check + index.blocks(place.nbytes, value.block_nbytes) <= value.checks.size
        and entry.nbytes == place.nbytes
        and is_inside(entry)
        for entry, place in value.pieces
    )


@st.composite
def hostile_indexes(draw: st.DrawFn) -> bytes:
    """An index with rows that are elsewhere, of no tensor, or without checksums."""
    valid = draw(indexes())
    places, checks = dict(valid.of), valid.checks
    wrong = st.integers(0, 9) | st.sampled_from([PAYLOAD_NBYTES, 2**60, 2**61, 2**63, 2**64 - 1])
    for number in draw(st.lists(st.integers(0, 9), max_size=2)):
        field = draw(st.sampled_from(Place._fields))
        value = draw(st.booleans()) if field == "packed" else draw(wrong)
        places[number] = places.get(number, Place(0, 0, 0, 0, 0, False))._replace(**{field: value})
    raw = index.encode_index(
        b"",
        draw(st.sampled_from([PAYLOAD_NBYTES, 0, 2**63])),
        dataclasses.replace(valid, of=places, checks=checks[: draw(st.integers(0, 99))]),
    )[0]
    return raw + draw(hostile_manifests() | st.just(encode_manifest(valid.manifest)))


FILES = [RankFiles(f"rank-0000{n}.h5", 4096, 2**64 - 1, f"rank-0000{n}.h5", 4096, 512, 88, 2**64 - 2) for n in range(2)]


def write_table() -> bytes:
    """Two ranks that hold two tensors alike, share another one, and have shards and a value of their own."""

    def entry(name: str, whole: int, offset: int, rows: int, start: int) -> Entry:
        return Entry(name, "tensor", "float32", (whole, 2), (offset, 0), (rows, 2), start, 8 * rows)

    described = {}
    for rank, dealt in enumerate([(0, 0, -1), (0, 40, 0)]):
        held = [
            entry("w", 8, 4 * rank, 4, 0),
            entry("a", 4, 0, 4, 32),
            entry("b", 2, 0, 2, 64),
            entry("s", 2, 0, 2, 80),
        ]
        value = Described.of(held, ["d", [["n", ["p", 0]]]], [rank], {1: 5, 2: 6, 3: 7}, dealt)
        described[rank] = dataclasses.replace(
            value, structure=dataclasses.replace(value.structure, alike=(2, 1), shared=(3,))
        )
    return index.encode_table("hdf5", "job", FILES, gather_ranks(World(None, this_node(), math.inf), described))


@st.composite
def hostile_tables(draw: st.DrawFn) -> bytes:
    raw = write_table()
    end = 8 + int.from_bytes(raw[:8], "little")
    text = write_json(draw(spoiled(json.loads(raw[8:end]))))
    return len(text).to_bytes(8, "little") + text + raw[end:]


def is_table(value: RankTable) -> bool:
    """Whether each rank is there once, files are in the directory, and shards in their tensors."""
    ranks = sorted(rank for group in value.groups for rank in group.ranks.tolist())
    names = [name for stored in value.files for name in (stored.card, stored.data)]
    held = [entry for group in value.groups for row in group.rows for entry in group.structure.entries(row)]
    return ranks == [0, 1] and not any("/" in name for name in names) and all(map(is_inside, held))


# Between processes


def read_message(raw: bytes) -> Any:
    messages = list(Lines(1000).add(raw))
    if len(messages) != 1:
        raise BadLine("this is no message")
    return messages[0]


PARTS = st.fixed_dictionaries({
    "format": st.just(1), "start": st.text(max_size=8), "rank": U32, "pid": st.integers(1, 99), "pid_namespace": U32,
    "state": st.sampled_from(["started", "ended", "failed"]), "times": st.just({"made": 1.5}), "beat": st.just(2.5),
    "committed": st.none() | U32,
})  # fmt: skip


def read_part(raw: bytes) -> Any:
    decoded = heartbeat.read_part(raw, heartbeat.CourierPart)
    if isinstance(decoded, str):
        raise ValueError(decoded)
    return decoded


CODECS = {
    "header of a slot": Codec(headers(), Header.pack, unpack),
    "record in a slot": Codec(st.tuples(ATTEMPTS, I64), write_record, read_record),
    "card of a file": Codec(cards(), Card.pack, index.read_card),
    "manifest": Codec(manifests(), encode_manifest, partial(manifest.decode, payload_nbytes=PAYLOAD_NBYTES),
                      is_valid=is_manifest, hostile=hostile_manifests()),
    "index of a file": Codec(indexes(), encode_index, partial(index.decode_index, data="x", data_nbytes=PAYLOAD_NBYTES),
                             is_valid=is_index, plainly=plain_index, hostile=hostile_indexes()),
    "table of ranks": Codec(
        st.builds(lambda: index.decode_table(write_table(), 2)), lambda _: write_table(),
        partial(index.decode_table, world_size=2), is_valid=is_table, hostile=hostile_tables(),
        plainly=lambda value: (value.files, value.dealt.tolist(), value.differ, value.plain_differ),
    ),
    "structure of ranks": Codec(
        structures(), write_structure, read_structure, manifest.BAD_DOCUMENT,
        lambda decoded: read_structure(write_structure(decoded)) == decoded,
        hostile=structures().flatmap(lambda value: spoiled(json.loads(write_structure(value)))).map(write_json),
    ),
    "canonical JSON": Codec(JSON, canonical_json.encode, canonical_json.decode, ValueError,
                            lambda decoded: canonical_json.decode(canonical_json.encode(decoded)) == decoded),
    "heartbeat": Codec(PARTS, heartbeat.encode, read_part, ValueError,
                       lambda decoded: decoded is None or heartbeat.encode(decoded) != b""),
    "message of JSON": Codec(JSON, pack, read_message, BadLine, lambda decoded: bool(pack(decoded))),
}  # fmt: skip
CHECKED = [name for name, codec in CODECS.items() if codec.is_valid is None]


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_what_is_written_comes_back_equal(name: str, data: st.DataObject) -> None:
    codec = CODECS[name]
    value = data.draw(codec.values)
    decoded = codec.decode(codec.encode(value))
    assert type(decoded) is type(value) and codec.plainly(decoded) == codec.plainly(value)


@pytest.mark.parametrize("name", CHECKED)
@settings(max_examples=3)
@given(data=st.data())
def test_each_byte_that_is_changed_or_cut_is_found_by_a_checksum(name: str, data: st.DataObject) -> None:
    codec = CODECS[name]
    value = data.draw(codec.values)
    raw = codec.encode(value)
    flipped = [raw[:at] + bytes([raw[at] ^ bits]) + raw[at + 1 :] for at in range(len(raw)) for bits in (1, 128, 255)]
    for damaged in (*flipped, *(raw[:at] for at in range(len(raw)))):
        try:
            assert codec.decode(damaged) == value, "which only padding may leave as it is"
        except codec.refuses:
            pass


@st.composite
def damaged(draw: st.DrawFn, codec: Codec) -> bytes:
    """What was written with some bytes changed, cut or added; or what somebody else may have written."""
    if codec.hostile is not None and draw(st.booleans()):
        return draw(codec.hostile)
    raw = bytearray(codec.encode(draw(codec.values)))
    if draw(st.integers(0, 9)) == 0:
        return bytes(raw[:8]) + draw(st.binary(max_size=600))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(raw)))
        raw[at : at + draw(st.integers(0, 4))] = draw(st.binary(max_size=4))
    return bytes(raw)


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_no_bytes_make_a_reader_do_anything_but_refuse_or_read_what_is_valid(name: str, data: st.DataObject) -> None:
    codec = CODECS[name]
    try:
        decoded = codec.decode(data.draw(damaged(codec)))
    except codec.refuses:
        return
    assert codec.is_valid is None or codec.is_valid(decoded)
