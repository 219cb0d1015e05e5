"""What a rank writes, and what commits a checkpoint → HDF5 files, each of which begins with its card."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..redundancy.rank_checkpoint import RankCheckpoint
from ..storage import dcp_plans
from ..storage.file_holes import FileWithHoles
from . import hdf5_files
from .drain_input import DrainInput, Load, Receipt, shown
from .file_format import add_card
from .file_index import Card, Stored


class Hdf5:
    """HDF5, see `hdf5`; with a compression of `config.COMPRESSIONS`, or ""."""

    name = "hdf5"
    most_pieces: float = 1_000_000  # takes rank 0 a minute and 2 GB

    def __init__(self, compression: str):
        self._compression = compression

    def rank_files(self, drain_input: DrainInput, rank: int, home: RankCheckpoint, load: Load, owner: str
                   ) -> tuple[list[tuple[str, FileWithHoles]], Stored, Receipt]:  # fmt: skip
        name = hdf5_files.rank_file_name(rank)
        here = {part.entry.name for part in load.parts}
        objects, names = _objects(home)
        ties = {name: first for name, first in load.ties.items() if first in here}
        entries = [part.entry for part in load.parts]
        skeleton, starts = hdf5_files.tensors(entries, load.sources, ties, objects, self._compression)
        places = load.places(home, name, starts)
        text, first_nbytes = load.index(home, places)
        card = _finish(skeleton, drain_input, rank, owner, text)
        stored = Stored.of(name, card, name, card.file_nbytes, text[:first_nbytes])
        receipt = Receipt.of(rank, load, places, objects if names or rank == 0 else None, names)
        return [(name, skeleton)], stored, receipt

    def master_files(
        self, drain_input: DrainInput, text: bytes, receipts: Sequence[Receipt], job: str, owner: str
    ) -> list[tuple[str, FileWithHoles]]:
        about: dict[str, Any] = {
            "step": drain_input.step,
            "world_size": drain_input.world_size,
            "job": job,
            "by": "mlflash",
        }
        objects = {key: value for one in reversed(receipts) if one.names for key, value in one.objects.items()}
        skeleton = hdf5_files.whole(shown(receipts), receipts[0].ties, objects or receipts[0].objects, about)
        _finish(skeleton, drain_input, -1, owner, text)
        return [(hdf5_files.MASTER, skeleton)]


def _objects(home: RankCheckpoint) -> tuple[Any, dict[str, str]]:
    """What a rank's state holds besides tensors, for people; and the names of tensors that differ in a DCP plan."""
    manifest = home.manifest
    if not dcp_plans.is_planned(manifest.tree):
        return hdf5_files.readable(manifest.tree, [entry.name for entry in manifest.entries], manifest.plain), {}
    index, blob = (home.reader()(entry).tobytes() for entry in manifest.entries[:2])
    values = dcp_plans.values(dcp_plans.Index.decode(index), blob)
    objects = {name: hdf5_files.readable(tree, (), plain) for name, (tree, plain) in values.items()}
    return objects, dcp_plans.names_of(manifest.tree, manifest.entries)


def _finish(skeleton: FileWithHoles, drain_input: DrainInput, rank: int, owner: str, text: bytes) -> Card:
    """Add the index to an HDF5 file, and the card."""
    start = hdf5_files.add_index(skeleton, text)
    return add_card(skeleton, drain_input, rank, owner, start, text)
