"""Read a sealed file of node memory without mapping it: its checksums, its manifest, its bytes.

The job may rewrite the file while it is read. It unseals a slot before the first byte changes. So if the header is the
same before and after, the bytes are those that were sealed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import numpy as np
import xxhash

from ..errors import CorruptSlot, UnsafePath
from ..memory.node_directory import NodeDirectory
from ..memory.parity_layout import decode_heads
from ..memory.slot import table_check
from ..memory.slot_header import HEADER_NBYTES, Header, Kind, unpack
from ..state.layout import CHECK_NBYTES, PAGE_NBYTES
from ..state.manifest import Manifest, decode

RUN_NBYTES = 8 << 20  # read at a time


class Changed(Exception):
    """The file no longer holds what its header said, because the job writes it."""


class Sealed(contextlib.AbstractContextManager["Sealed"]):
    """A file of this node that is open for reading.

    `memory.slot.Slot` maps its file and belongs to the job. This one reads what another process may rewrite.

    Args:
        memory: the job's directory.
        name: name of the file.
        header: its header.

    Raises:
        Changed: the file now holds something else.
    """

    def __init__(self, memory: NodeDirectory, name: str, header: Header):
        self.name, self.header = name, header
        self._memory, self._fd = memory, self._open(memory)

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def _open(self, memory: NodeDirectory) -> int:
        try:
            return memory.open(self.name, os.O_RDONLY)
        except (FileNotFoundError, UnsafePath):
            raise Changed from None

    def read(self, start: int, nbytes: int) -> np.ndarray:
        """Read bytes of the file: ``(nbytes,)`` uint8, or fewer if the file ends before."""
        raw = np.empty(nbytes, dtype=np.uint8)
        done = 0
        while done < nbytes and (got := os.preadv(self._fd, [raw[done:].data], start + done)):
            done += got
        return raw[:done]

    def manifest(self) -> Manifest:
        """Read the manifest of a slot. Raises CorruptSlot if the manifest does not follow the format."""
        raw = self.read(PAGE_NBYTES, self.header.manifest_nbytes).tobytes()
        return decode(raw, self.header.extents.payload_nbytes)

    def check(self) -> None:
        """Check that the file still has the same header. Then everything read before is good.

        Raises:
            Changed: the header has changed.
        """
        fd = self._open(self._memory)  # not the open one, which may have been deleted
        try:
            if unpack(os.pread(fd, HEADER_NBYTES, 0)) != self.header:
                raise Changed
        except CorruptSlot:
            raise Changed from None
        finally:
            os.close(fd)

    def verify(self, advance: Callable[[int], None]) -> None:
        """Check every byte against the checksums.

        Args:
            advance: gets the number of bytes after each read.

        Raises:
            CorruptSlot: something is damaged.
            Changed: the job writes the file.
        """
        try:
            self._verify(advance)
        finally:
            self.check()

    def _verify(self, advance: Callable[[int], None]) -> None:
        extents = self.header.extents
        table = np.frombuffer(self.read(extents.table_start, extents.blocks * CHECK_NBYTES).tobytes(), dtype="<u8")
        if table.size != extents.blocks or table_check(table) != self.header.table_check:
            raise CorruptSlot("its block table is damaged")
        bad: list[int] = []
        many = max(1, RUN_NBYTES // extents.block_nbytes)
        for first in range(0, extents.blocks, many):
            blocks = [extents.block(number) for number in range(first, min(extents.blocks, first + many))]
            start, nbytes = blocks[0].start, blocks[-1].stop - blocks[0].start
            raw = self.read(PAGE_NBYTES + start, nbytes)
            sums = [xxhash.xxh3_64_intdigest(raw[block.start - start : block.stop - start].data) for block in blocks]
            bad += [first + nth for nth, check in enumerate(sums) if check != int(table[first + nth])]
            advance(nbytes)
        if bad:
            raise CorruptSlot(f"{len(bad)} of {extents.blocks} blocks are damaged, first block {bad[0]}")
        if self.header.kind is Kind.SLOT:
            self.manifest()
        elif self.header.kind is Kind.PARITY:
            decode_heads(self.read(PAGE_NBYTES, self.header.manifest_nbytes).tobytes(), self.header, self.name)
