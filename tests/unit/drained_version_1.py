"""The index of a rank's file as format version 1 had it, as nothing writes it any more."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import numpy as np

from mlflash.state.leaves import Entry


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a tensor, see docs/format.md."""

    entry: Entry
    common: int
    first_check: int
    packed: bool = False


def encode(raw_manifest: bytes, payload_nbytes: int, commons: Sequence[int], data: str, pieces: Sequence[Piece],
           block_nbytes: int, checks: np.ndarray) -> bytes:  # fmt: skip
    """Encode an index; ``raw_manifest`` is the document in the slot, see `manifest`."""
    rest = {
        "payload_nbytes": payload_nbytes,
        "commons": list(commons),
        "data": data,
        "pieces": [
            [*dataclasses.astuple(piece.entry), piece.common, piece.first_check, int(piece.packed)] for piece in pieces
        ],
        "block_nbytes": block_nbytes,
        "checks": checks.astype("<u8").tobytes().hex(),
    }
    return b'{"manifest":%s,%s' % (raw_manifest, json.dumps(rest, separators=(",", ":")).encode()[1:])
