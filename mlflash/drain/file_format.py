"""What a rank writes, and what commits a checkpoint → files: as HDF5, or in the format of PyTorch DCP.

As HDF5 a rank has one file, which begins with its card. DCP's files have no room for a card: there the card and the
index are files of their own, and so is the file that commits the checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import xxhash

from ..protect.rank_checkpoint import RankCheckpoint
from ..storage.file_holes import FileWithHoles
from .file_index import CARD_NBYTES, Card, Stored
from .rank_input import DrainInput, Load, Receipt


class Form(Protocol):
    """A file format. Nothing is collective."""

    name: str
    most_pieces: float  # how many pieces, of all ranks, its last file lists; if there are more, it lists none

    def rank_files(self, drain_input: DrainInput, rank: int, home: RankCheckpoint, load: Load, owner: str
                   ) -> tuple[list[tuple[str, FileWithHoles]], Stored, Receipt]:  # fmt: skip
        """Lay out the files of a rank, in the order in which they are to be written."""

    def master_files(
        self, drain_input: DrainInput, text: bytes, receipts: Sequence[Receipt], job: str, owner: str
    ) -> list[tuple[str, FileWithHoles]]:
        """Lay out what is written last; the very last file commits the checkpoint, and has this index."""


def plain_file(drain_input: DrainInput, rank: int, owner: str, text: bytes) -> tuple[FileWithHoles, Card]:
    """Make a file that has a card and an index, and nothing else."""
    skeleton = FileWithHoles()
    skeleton.patch(CARD_NBYTES, text)
    return skeleton, add_card(skeleton, drain_input, rank, owner, CARD_NBYTES, text)


def add_card(skeleton: FileWithHoles, drain_input: DrainInput, rank: int, owner: str, start: int, text: bytes) -> Card:
    """Put the card on a file that was laid out and has its index ``text`` at ``start``."""
    card = Card(drain_input.attempt, drain_input.step, rank, drain_input.world_size, skeleton.nbytes, start, len(text),
                xxhash.xxh3_64_intdigest(text), time.time_ns(), owner, drain_input.mark)  # fmt: skip
    skeleton.patch(0, card.pack())
    return card
