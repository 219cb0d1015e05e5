"""Writes what 1,000 ranks of 3,000 leaves each would have drained: replicas of shards, as if the ranks did not know."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import xxhash

from mlflash.draining import file_index, rank_table
from mlflash.draining.drain_input import deal
from mlflash.draining.file_index import CARD_NBYTES, Card, Place, Places, Stored
from mlflash.memory.slot_header import Attempt
from mlflash.mpi.world import World
from mlflash.protocol.describe_ranks import Described, gather_ranks
from mlflash.state import manifest
from mlflash.state.leaves import Entry

SHARDS, REPLICAS, LEAVES, ALIKE = 40, 25, 3000, 100
RANKS = SHARDS * REPLICAS
STEP, OWNER, BLOCK_NBYTES = 5, "0:ab:many", 4096
TREE = ["d", [["model", ["d", [[f"l{n}", ["e", n]] for n in range(LEAVES - 1)]]], ["own", ["e", LEAVES - 1]],
              ["epoch", ["p", 0]], ["of rank", ["p", 1]]]]  # fmt: skip
ATTEMPT = Attempt(bytes(range(16)), 3)


def whole(leaf: int) -> np.ndarray:
    """A tensor as it is, whatever its shards: some are held whole by all."""
    rows = 1 if leaf < ALIKE else SHARDS
    return np.arange(rows * 2, dtype="<f4").reshape(rows, 2) + leaf


def entries_of(shard: int) -> tuple[Entry, ...]:
    found = []
    for leaf in range(LEAVES - 1):
        row = 0 if leaf < ALIKE else shard
        shape = whole(leaf).shape
        found.append(Entry(f"model.l{leaf}", "tensor", "float32", shape, (row, 0), (1, 2), 8 * leaf, 8))
    return (*found, Entry("own", "tensor", "int64", (1,), (0,), (1,), 8 * (LEAVES - 1), 8))


def write(folder: Path) -> None:
    """Write the files of all ranks, and the one that commits them."""
    folder.mkdir(parents=True)
    shards = [_Shard(shard) for shard in range(SHARDS)]
    described, stored = {}, []
    for rank in range(RANKS):
        dealt = [leaf for leaf, *_ in deal(shards[0].entries[:ALIKE], RANKS, rank)]
        its = shards[rank % SHARDS]
        stored.append(its.write(folder, rank, dealt))
        checks = {**dict.fromkeys(range(ALIKE), 1), LEAVES - 1: rank}
        more = -1, 8 * dealt[0] if dealt else -1, -1
        described[rank] = dataclasses.replace(its.described, plain=[STEP * 10, rank], checks=checks, more=more)
    text = rank_table.encode("dcp", "many", stored, gather_ranks(World(None, 0, math.inf), described))
    (folder / "checkpoint.mlflash").write_bytes(_card(-1, text).pack() + text)


class _Shard:
    """What the files of all replicas of a shard have in common: they hold its leaves, then what they were dealt."""

    places = {leaf: Place(8 * nth, 8, 0, 1, nth, False) for nth, leaf in enumerate(range(ALIKE, LEAVES))}

    def __init__(self, shard: int):
        self.entries = entries_of(shard)
        self.described = Described.of(self.entries, TREE, [], {})
        structure = dataclasses.replace(self.described.structure, alike=tuple(range(ALIKE)))
        self.described = dataclasses.replace(self.described, structure=structure)
        self._text, self._tree = manifest.encode_entries(self.entries), manifest.encode_tree(TREE)
        self._content = b"".join(whole(leaf)[shard].tobytes() for leaf in range(ALIKE, LEAVES - 1))
        self._checks = _checks(self._content)

    def write(self, folder: Path, rank: int, dealt: list[int]) -> Stored:
        rest = rank.to_bytes(8, "little") + b"".join(whole(leaf)[0].tobytes() for leaf in dealt)
        content, checks = self._content + rest, [*self._checks, *_checks(rest)]
        more = {leaf: Place(8 * nth, 8, 0, 1, nth, False) for nth, leaf in enumerate(dealt, len(self.places))}
        places = Places(f"__{rank}_0.distcp", BLOCK_NBYTES, np.array(checks, dtype="<u8"), {**self.places, **more})
        raw = manifest.join(self._text, self._tree, [STEP * 10, rank])
        text, first_nbytes = file_index.encode(raw, 8 * LEAVES, places)
        card, name = _card(rank, text), f"rank-{rank:05d}.mlflash"
        (folder / name).write_bytes(card.pack() + text)
        (folder / places.data).write_bytes(content)
        return Stored.of(name, card, places.data, len(content), text[:first_nbytes])


def _checks(content: bytes) -> list[int]:
    return [xxhash.xxh3_64_intdigest(content[at : at + 8]) for at in range(0, len(content), 8)]


def _card(rank: int, text: bytes) -> Card:
    return Card(ATTEMPT, STEP, rank, RANKS, CARD_NBYTES + len(text), CARD_NBYTES, len(text),
                xxhash.xxh3_64_intdigest(text), 1_700_000_000_000_000_000, OWNER)  # fmt: skip
