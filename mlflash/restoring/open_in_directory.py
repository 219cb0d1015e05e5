"""A checkpoint in a directory, open: any rank reads any part of any tensor of any old rank.

The ranks share the reading of the indexes, and tell each other. Tensors are read a part at a time, straight from the
file that has it, and each block that is touched is checked.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import xxhash

from ..draining import file_index
from ..draining.checkpoint_directory import Listed, read_master
from ..draining.file_index import CARD_NBYTES, Index, Piece, blocks, first_names, read_card
from ..errors import CorruptSlot, MlflashError, text_of
from ..protocol.ranks import Collectives
from ..protocol.wanted_parts import WantedPart, items
from ..redundancy.rank_checkpoint import RankCheckpoint
from ..state import shards
from ..state.manifest import Manifest
from ..state.rebuild import Read
from ..state.shards import Box, box, cut, overlap
from ..storage.store import Store
from .open_in_memory import OldRank

log = logging.getLogger("mlflash")

_RUN_NBYTES = 64 << 20  # read at a time
_ROUND_NBYTES = 1 << 30  # per rank, before the ranks look at each other again


class OpenInDirectory:
    """A committed checkpoint of a directory.

    Collective over the world.

    Args:
        world: the ranks that read.
        store: the directory.
        listed: which checkpoint.
        told: names of small entries whose bytes all ranks shall know.

    Attributes:
        step: of it.
        path: where it is.
        world_size: number of the ranks that saved it.
        restores, home: for memory only; 0 and None.
        damage: why the last `read` failed, of the lowest rank on which it did; the same on all.
        olds: what each old rank had; the same on all ranks.

    Raises:
        CorruptSlot: on all ranks, where a file is missing, damaged, or was changed since.
    """

    def __init__(self, world: Collectives, store: Store, listed: Listed, told: Collection[str] = ()):
        self._world, self._inside, self.listed = world, store.at(listed.folder), listed
        self.step, self.path, self.world_size = listed.step, self._inside.path, listed.card.world_size
        self.restores, self.damage = 0, ""
        self.home: RankCheckpoint | None = None
        self._open: dict[str, tuple[Any, Any]] = {}  # files that are read through HDF5, as they are compressed
        self._full: dict[int, Index] = {}  # those that this rank has read itself, with their checksums
        self._world.raise_together(self._attempt(self._read_mine))
        told_by_all = world.gather({rank: _Held.of(its) for rank, its in self._full.items()})
        self._held: dict[int, _Held] = {rank: held for theirs in told_by_all for rank, held in theirs.items()}
        self._commons: dict[tuple[int, str], list[tuple[int, int]]] = {}
        for rank, held in sorted(self._held.items()):
            for number, piece in enumerate(held.pieces):
                if piece.common >= 0:
                    self._commons.setdefault((piece.common, piece.entry.name), []).append((rank, number))
        texts: dict[int, dict[str, bytes]] = {}
        mine = tuple(self._full)
        world.raise_together(self._attempt(lambda: texts.update({rank: self._texts(rank, told) for rank in mine})))
        known = {rank: text for theirs in world.gather(texts) for rank, text in theirs.items()}
        self.olds: Mapping[int, OldRank] = {rank: self._describe(rank, known[rank]) for rank in sorted(self._held)}

    def is_near(self, rank: int) -> bool:
        """Whether the state of an old rank is as near as any. Not collective."""
        return True

    def distance(self, rank: int) -> int:
        """How far the state of an old rank is: as far as any. Not collective."""
        return 1

    def read(self, wanted: Iterable[WantedPart]) -> bool:
        """Bring parts of tensors to where they are wanted; whether all of them arrived whole.

        Collective over the world. The ranks wait for each other after each GiB, so that a slow file system is not
        taken for a dead rank.
        """
        return self._in_rounds(self._read(*run) for wanted_part in wanted for run in self._runs(wanted_part))

    def verify_together(self) -> None:
        """Read every byte of all files, shared out among the ranks, as `read` does. Collective over the world.

        Raises:
            CorruptSlot: on all ranks, where something is damaged.
        """
        mine = range(self._world.rank, self.world_size, self._world.size)
        if not self._in_rounds(
            raw.nbytes for rank in mine for piece in self.index(rank).pieces for raw in self.content(rank, piece)
        ):
            raise CorruptSlot(f"{self.path} is damaged: {self.damage}", step=self.step)

    def _in_rounds(self, reading: Iterator[int]) -> bool:
        """Read as long as all goes well on all ranks; gives whether it did. Collective over the world.

        Args:
            reading: reads some more each time, and gives the bytes.
        """
        good, more, why = True, True, ""
        while True:
            left = _ROUND_NBYTES
            while good and more and left > 0:
                try:
                    nbytes = next(reading, None)
                    more = nbytes is not None
                    left -= nbytes or 0
                except Exception as error:  # of whatever reads files, and of what says which parts are wanted
                    log.warning("rank %d: %s cannot be restored from: %s", self._world.rank, self.path, error)
                    good, why = False, str(error)
            self._world.renew_deadline()
            all_good, all_through = self._world.agree([int(good), int(not more)])
            if not all_good:
                self.damage = next(filter(None, self._world.gather(why)), "")
            if all_through or not all_good:
                return bool(all_good)

    def state(self, rank: int) -> tuple[Manifest, Read, list[WantedPart]]:
        """Give what an old rank's state is built of: its manifest, its bytes, and what is to be read before.

        Not collective.
        """
        held = self._held[rank]
        raw: dict[str, np.ndarray] = {}
        wanted_parts = []
        for number, (entry, name) in enumerate(zip(held.manifest.entries, held.names, strict=True)):
            if name not in raw:
                raw[name] = np.empty(entry.nbytes, dtype=np.uint8)
                start = (0,) * len(entry.shape)
                wanted_parts.append(WantedPart(rank, number, start, entry.shape, items(raw[name], entry)))
        first = dict(zip((entry.name for entry in held.manifest.entries), held.names, strict=True))
        return held.manifest, lambda entry: raw[first[entry.name]], wanted_parts

    def close(self) -> None:
        """Close the files. Not collective. May be called twice."""
        for opened in self._open.values():
            for file in opened:
                file.close()
        self._open.clear()

    def verify(self, ranks: Iterable[int]) -> Iterator[tuple[str, int, list[str]]]:
        """Read every byte of some ranks' files; gives file, bytes, and the tensors in which a block is bad.

        Not collective.
        """
        for rank in ranks:
            bad, nbytes = [], 0
            for piece in self.index(rank).pieces:
                try:
                    nbytes += sum(raw.nbytes for raw in self.content(rank, piece))
                except (MlflashError, OSError):
                    bad.append(piece.entry.name)
            yield self._files[rank].data, nbytes, bad

    def index(self, rank: int) -> Index:
        """Read what the file of an old rank says of itself, once. Not collective."""
        if rank in self._full:
            return self._full[rank]
        stored = self._files[rank]
        nbytes = self._inside.nbytes(stored.card)
        try:
            card = read_card(self._inside.read(stored.card, 0, CARD_NBYTES))
        except CorruptSlot as error:
            raise CorruptSlot(f"{self.path}/{stored.card}: {error.message}", step=self.step) from None
        found = (nbytes, card.attempt, card.rank, card.index_check, self._inside.nbytes(stored.data))
        wanted = (stored.nbytes, self.listed.card.attempt, rank, stored.index_check, stored.data_nbytes)
        if found != wanted:
            raise CorruptSlot(f"{self.path}/{stored.card} is not the file that was committed", step=self.step)
        raw = self._inside.read(stored.card, card.index_start, card.index_nbytes)
        if xxhash.xxh3_64_intdigest(raw) != card.index_check:
            raise CorruptSlot(f"the index of {self.path}/{stored.card} is damaged", step=self.step)
        self._full[rank] = file_index.decode(raw, stored.data_nbytes)
        return self._full[rank]

    def content(self, rank: int, piece: Piece) -> Iterator[np.ndarray]:
        """Read the bytes of a piece in a rank's file, some at a time; each block is checked. Not collective."""
        its = self.index(rank)
        run = max(its.block_nbytes, _RUN_NBYTES // its.block_nbytes * its.block_nbytes)
        for at in range(0, piece.entry.nbytes, run):
            yield self._checked(its, piece, at, min(piece.entry.nbytes, at + run))

    def _unpacked(self, its: Index, piece: Piece, low: int, high: int) -> np.ndarray:
        """Read bytes of a piece that HDF5 has compressed."""
        from ..draining import hdf5_files

        entry = piece.entry
        row = entry.nbytes // entry.shape[0]
        first, last = low // row, -(-high // row)
        try:
            if its.data not in self._open:
                file = self._inside.open(its.data)
                self._open[its.data] = (hdf5_files.open_file(file), file)
            dataset = self._open[its.data][0]["tensors"][hdf5_files.dataset_name(entry.name)]
            raw = hdf5_files.read_rows(dataset, first, last, (last - first) * row)
        except Exception as error:  # HDF5 raises what it likes where a file is damaged, or a plugin is missing
            raise CorruptSlot(f"HDF5 cannot read {self.path}/{its.data}: {error}", tensor=entry.name,
                              step=self.step) from None  # fmt: skip
        return raw[low - first * row : high - first * row]

    def _attempt(self, work: Callable[[], object]) -> MlflashError | None:
        try:
            work()
        except MlflashError as problem:
            return problem
        except OSError as problem:
            return CorruptSlot(f"{self.path} cannot be read: {problem}", step=self.step)
        except Exception as problem:  # of whatever reads a format
            return CorruptSlot(f"{self.path} cannot be read: {text_of(problem)}", step=self.step)
        return None

    def _read_mine(self) -> None:
        self._files = read_master(self._inside, self.listed)
        for rank in range(self._world.rank, self.world_size, self._world.size):
            self.index(rank)

    def _texts(self, rank: int, told: Collection[str]) -> dict[str, bytes]:
        text = {}
        for number, entry in enumerate(self._held[rank].manifest.entries):
            if entry.name in told:
                raw = np.empty(entry.nbytes, dtype=np.uint8)
                whole = WantedPart(rank, number, (0,) * len(entry.shape), entry.shape, items(raw, entry))
                for run in self._runs(whole):
                    self._read(*run)
                text[entry.name] = raw.tobytes()
        return text

    def _describe(self, rank: int, told: dict[str, bytes]) -> OldRank:
        held = self._held[rank]
        checks = {}
        for number, entry in enumerate(held.manifest.entries):
            if entry.shape == entry.global_shape:
                # What all hold alike has one number on all ranks, whoever stores it.
                parts = [self._held[of].checks[nth] for of, nth in self._pieces_of(rank, number)]
                checks[number] = xxhash.xxh3_64_intdigest(np.array(parts, dtype="<u8").tobytes())
        paths = shards.plain_leaves(held.manifest.tree)
        plain = {path: held.manifest.plain[number] for path, number in paths.items()}
        return OldRank(rank % self._world.size, -1, held.manifest.entries, held.manifest.tree, plain, checks, told)

    def _pieces_of(self, rank: int, number: int) -> list[tuple[int, int]]:
        """The pieces that may have parts of an entry of an old rank: rank and number of each."""
        held = self._held[rank]
        common, name = held.commons[number], held.names[number]
        return self._commons.get((common, name), []) if common >= 0 else [(rank, held.own[name])]

    def _runs(self, wanted_part: WantedPart) -> Iterator[tuple[int, int, Box, np.ndarray]]:
        """Of which parts of which pieces a wanted part is made: old rank, piece, box in the piece, where it goes."""
        entry = self._held[wanted_part.rank].manifest.entries[wanted_part.number]
        want = (tuple(a + b for a, b in zip(entry.offset, wanted_part.source, strict=True)), wanted_part.shape)
        filled = 0
        for rank, number in self._pieces_of(wanted_part.rank, wanted_part.number):
            piece = self._held[rank].pieces[number].entry
            both = overlap(want, (piece.offset, piece.shape))
            if both is None:
                continue
            filled += math.prod(both[1])
            source = tuple(a - b for a, b in zip(both[0], piece.offset, strict=True))
            into = tuple(a - b for a, b in zip(both[0], want[0], strict=True))
            target = wanted_part.target[box(into, both[1])]
            for offset, shape in cut(both[1], wanted_part.target.shape[-1], _RUN_NBYTES):
                inside = tuple(a + b for a, b in zip(source, offset, strict=True))
                yield rank, number, (inside, shape), target[box(offset, shape)]
        if filled < math.prod(wanted_part.shape):
            raise CorruptSlot("parts of this tensor are not in the files of the checkpoint", tensor=entry.name,
                              step=self.step)  # fmt: skip

    def _read(self, rank: int, number: int, part: Box, target: np.ndarray) -> int:
        """Read a box of a piece, and check it; returns the bytes read."""
        offset, shape = part
        if not math.prod(shape):
            return 0
        its = self.index(rank)
        piece = its.pieces[number]
        entry = piece.entry
        item = entry.nbytes // math.prod(entry.shape)
        row = item * math.prod(entry.shape[1:])
        if shape[1:] == entry.shape[1:] or len(shape) < 2:
            first = offset[0] * row if shape else 0
            raw = self._checked(its, piece, first, first + item * math.prod(shape))
            target[...] = raw.reshape(*shape, item)
            return raw.nbytes
        raw = self._checked(its, piece, offset[0] * row, (offset[0] + shape[0]) * row)
        rows = raw.reshape(shape[0], *entry.shape[1:], item)
        target[...] = rows[box((0, *offset[1:]), shape)]
        return raw.nbytes

    def _checked(self, its: Index, piece: Piece, first: int, last: int) -> np.ndarray:
        """Read bytes of a piece, and check all blocks that they touch."""
        entry, size = piece.entry, its.block_nbytes
        low, high = first // size * size, min(entry.nbytes, blocks(last, size) * size)
        if piece.packed:
            raw = self._unpacked(its, piece, low, high)
        else:
            raw = np.frombuffer(self._inside.read(its.data, entry.start + low, high - low), dtype=np.uint8)
        wanted = its.checks[piece.first_check + low // size :]
        for number, at in enumerate(range(0, high - low, size)):
            if raw.nbytes != high - low or xxhash.xxh3_64_intdigest(raw[at : at + size].data) != int(wanted[number]):
                raise CorruptSlot(f"block {low // size + number} is damaged in {self.path}/{its.data}",
                                  tensor=entry.name, step=self.step)  # fmt: skip
        return raw[first - low : last - low]


@dataclasses.dataclass(frozen=True)
class _Held:
    """What an old rank's file holds, without what is needed to read it.

    Attributes:
        names: for each entry of the manifest the name of the piece: of tied ones that of the first.
        own: number of each piece that is the rank's own, by name.
        checks: of each piece one number for its bytes.
    """

    manifest: Manifest
    commons: tuple[int, ...]
    pieces: tuple[Piece, ...]
    names: tuple[str, ...]
    own: dict[str, int]
    checks: tuple[int, ...]

    @classmethod
    def of(cls, its: Index) -> _Held:
        own = {piece.entry.name: number for number, piece in enumerate(its.pieces) if piece.common < 0}
        checks = tuple(its.check(piece) for piece in its.pieces)
        return cls(its.manifest, its.commons, its.pieces, first_names(its.manifest.entries), own, checks)
