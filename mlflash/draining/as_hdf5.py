"""What a rank writes, and what commits a checkpoint → HDF5 files, each of which begins with its card."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..recovery.gather_shares import Home
from ..storage import dcp_plans
from ..storage.file_holes import Skeleton
from . import catalog, hdf5
from .cargo import Cargo, Load, Receipt, shown
from .catalog import Stored
from .form import add_card
from .index import Card


class Hdf5:
    """HDF5, see `hdf5`; with a compression of `config.COMPRESSIONS`, or ""."""

    def __init__(self, compression: str):
        self._compression = compression

    def rank_files(self, cargo: Cargo, rank: int, home: Home, load: Load, owner: str
                   ) -> tuple[list[tuple[str, Skeleton]], Stored, Receipt]:  # fmt: skip
        name = hdf5.rank_file_name(rank)
        here = {part.entry.name for part in load.parts}
        objects, names = _objects(home)
        ties = {name: first for name, first in load.ties.items() if first in here}
        entries = [part.entry for part in load.parts]
        skeleton, starts = hdf5.tensors(entries, load.sources, ties, objects, self._compression)
        text, its = load.index(home, name, starts)
        card = _finish(skeleton, cargo, rank, owner, text)
        stored = Stored(name, card.file_nbytes, card.index_check, name, card.file_nbytes)
        return (
            [(name, skeleton)],
            stored,
            Receipt.of(rank, its, load.ties, objects if names or rank == 0 else None, names),
        )

    def master_files(self, cargo: Cargo, stored: Sequence[Stored], receipts: Sequence[Receipt], job: str, owner: str
                     ) -> list[tuple[str, Skeleton]]:  # fmt: skip
        about: dict[str, Any] = {"step": cargo.step, "world_size": cargo.world_size, "job": job, "by": "mlflash"}
        objects = {key: value for one in reversed(receipts) if one.names for key, value in one.objects.items()}
        skeleton = hdf5.whole(shown(receipts), receipts[0].ties, objects or receipts[0].objects, about)
        _finish(skeleton, cargo, -1, owner, catalog.encode_master("hdf5", job, stored))
        return [(hdf5.MASTER, skeleton)]


def _objects(home: Home) -> tuple[Any, dict[str, str]]:
    """What a rank's state holds besides tensors, for people; names of tensors that are others in a DCP plan."""
    manifest = home.manifest
    if not dcp_plans.is_planned(manifest.tree):
        return hdf5.readable(manifest.tree, [entry.name for entry in manifest.entries], manifest.plain), {}
    index, blob = (home.reader()(entry).tobytes() for entry in manifest.entries[:2])
    values = dcp_plans.values(dcp_plans.Index.decode(index), blob)
    objects = {name: hdf5.readable(tree, (), plain) for name, (tree, plain) in values.items()}
    return objects, dcp_plans.names_of(manifest.tree, manifest.entries)


def _finish(skeleton: Skeleton, cargo: Cargo, rank: int, owner: str, text: bytes) -> Card:
    """Add the index to an HDF5 file, and the card."""
    start = hdf5.add_index(skeleton, text)
    return add_card(skeleton, cargo, rank, owner, start, text)
