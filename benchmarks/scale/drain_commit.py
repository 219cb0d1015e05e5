"""Measures what only rank 0 does for a drain: it receives all receipts, looks for all files, and commits.

    python benchmarks/scale/drain_commit.py [--ranks 1024 4096 16384] [--leaves 12] [--form hdf5 dcp] [--json FILE]

It runs the code of mlflash in one process, on real files in memory that contain only their cards. The receipts are
generated in the form in which ranks send them. Each rank has one shard of every leaf.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import dataclasses
import gc
import json
import math
import os
import pickle
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scale import phantoms  # noqa: E402
from scale.meeting import Fabric  # noqa: E402
from scale.old_ranks import KINDS, Others, entries_of, plain_of  # noqa: E402
from scale.simulated_mpi import Comm, module  # noqa: E402

from mlflash.draining import checkpoint_directory, rank_table  # noqa: E402
from mlflash.draining.drain import Drain  # noqa: E402
from mlflash.draining.drain_input import DrainInput, Receipt  # noqa: E402
from mlflash.draining.file_format import Form  # noqa: E402
from mlflash.draining.file_index import CARD_NBYTES, Card, Stored  # noqa: E402
from mlflash.draining.write_checkpoint import Terms, _form, _OnItsWay  # noqa: E402
from mlflash.memory.slot_header import Attempt  # noqa: E402
from mlflash.mpi.background_collectives import BackgroundCollectives  # noqa: E402
from mlflash.mpi.world import World  # noqa: E402
from mlflash.protocol.describe_ranks import Gathered, gather_ranks  # noqa: E402

FORMS = ("hdf5", "dcp")
STEP, OWNER, ATTEMPT = 7, "0:ab:scale", Attempt(bytes(range(16)), 3)


@dataclasses.dataclass
class Row:
    """What rank 0 needed. Seconds are CPU time.

    Attributes:
        leaves: leaves of each rank.
        received_mb: size of the packed receipts.
        receipts_s: time to unpack the receipts.
        stat_s: time to look for the files.
        table_s: time to encode the table of all ranks.
        listing_s: time to list the tensors, for the master file of HDF5 or the metadata of DCP.
        commit_s: time of the commit without the receipts, including writing.
        written_mb: size of what the commit writes.
        held_mb: peak growth of the process.
        requests: requests to the directory during the commit.
        delete_s, delete_requests: time and requests to delete the checkpoint.
        wrong: what went wrong. Empty if nothing did.
    """

    ranks: int
    form: str
    leaves: int
    received_mb: float = 0.0
    receipts_s: float = 0.0
    stat_s: float = 0.0
    table_s: float = 0.0
    listing_s: float = 0.0
    commit_s: float = 0.0
    written_mb: float = 0.0
    held_mb: float = 0.0
    requests: int = 0
    delete_s: float = 0.0
    delete_requests: int = 0
    wrong: str = ""


def measure(ranks: int, form: str, leaves: int = KINDS) -> Row:
    """Commit a checkpoint of this number of ranks, and delete it."""
    row = Row(ranks, form, leaves)
    _form(_terms(form))  # loads modules before the measurement
    asked: collections.Counter[tuple[str, str]] = collections.Counter()
    top = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=top, prefix="mlflash-scale-") as place:
        store = phantoms.CountedDirectory(place).count(asked, {})
        inside = store.at("step-00000007")
        inside.make(parents=False)
        files = [_write(inside.path, rank, ranks, form) for rank in range(ranks)]
        packed = [_packed(rank, ranks, leaves, form, files[rank]) for rank in range(ranks)]
        gathered = _gathered(ranks, leaves)
        row.received_mb = sum(map(len, packed)) / 1e6
        with _grown() as grown:
            begun = time.process_time()
            told = sorted((one for those in _collect(packed) for one in those), key=lambda one: one[1].rank)
            row.receipts_s = time.process_time() - begun
            _commit(row, inside, told, gathered)
            row.held_mb = grown() / 1e6
        row.requests = asked.total()
        committed = [name for name in os.listdir(inside.path) if name.startswith(("checkpoint.", ".metadata"))]
        row.written_mb = sum(os.path.getsize(f"{inside.path}/{name}") for name in committed) / 1e6
        (listed,) = checkpoint_directory.list_checkpoints(store)
        asked.clear()
        begun = time.process_time()
        checkpoint_directory.delete(store, listed)
        row.delete_s, row.delete_requests = time.process_time() - begun, asked.total()
        if os.path.exists(inside.path):
            row.wrong = "the checkpoint was not deleted"
    return row


def _write(folder: str, rank: int, ranks: int, form: str) -> Stored:
    """Write the files of a rank. They contain only the card."""
    card_name, data_name = (names % rank for names in rank_table._names(form))
    nbytes = 2 * CARD_NBYTES
    card = Card(ATTEMPT, STEP, rank, ranks, nbytes, CARD_NBYTES, 1, 1, 1, OWNER)
    for name in {card_name, data_name}:
        with open(f"{folder}/{name}", "wb") as file:
            file.write(card.pack() if name == card_name else b"")
            file.truncate(nbytes)
    return Stored(card_name, nbytes, 1, data_name, nbytes)


def _packed(rank: int, ranks: int, leaves: int, form: str, stored: Stored) -> bytes:
    """Give what a rank hands in, packed as it sends it."""
    pieces = entries_of(rank, ranks, ranks, leaves)
    if form == "dcp":
        from mlflash.storage.dcp_files import Contents

        contents = Contents(stored.data, pieces, [], [(piece.start, piece.nbytes) for piece in pieces])
        more = pickle.dumps((contents, {piece.name: (piece.name,) for piece in pieces}, {}))
        receipt = Receipt(rank, [], {}, None, more=zlib.compress(more, 1))
    else:
        receipt = Receipt(rank, [(piece, False, rank) for piece in pieces], {}, {} if rank == 0 else None)
    return zlib.compress(pickle.dumps([(stored, receipt)]), 1)


def _gathered(ranks: int, leaves: int) -> Gathered:
    """Give what all ranks have told each other before."""
    others = Others(ranks, leaves)
    olds = {rank: dataclasses.replace(others.first, row=others.row_of(rank), plain=plain_of(rank), more=(-1, -1, -1))
            for rank in range(ranks)}  # fmt: skip
    return gather_ranks(World(None, 0, math.inf), olds)


def _collect(packed: list[bytes]) -> list[Any]:
    """Unpack what all ranks hand in, as rank 0 does it."""
    fabric = Fabric(len(packed), 8, (0,), (), lambda comm, nbytes: None)
    fabric.answers["drain"].append(lambda: [None, *packed[1:]])
    collectives = BackgroundCollectives(World(None, 0, math.inf))
    collectives._comm, collectives._mpi = Comm(fabric, "drain", ("drain",), range(fabric.size), 0), module()
    return _driven(collectives.collect(pickle.loads(zlib.decompress(packed[0]))))


def _driven(operation: Iterator[bool]) -> Any:
    while True:
        try:
            next(operation)
        except StopIteration as end:
            return end.value


def _terms(form: str) -> Terms:
    return Terms(form, OWNER, "scale", 1 << 20)


def _commit(row: Row, inside: phantoms.CountedDirectory, told: list[Any], gathered: Gathered) -> None:
    world, terms = World(None, 0, math.inf), _terms(row.form)
    drain_input = DrainInput(ATTEMPT, STEP, row.ranks, dict)
    its = _OnItsWay(Drain(STEP), drain_input, world, BackgroundCollectives(world), inside, terms)
    form: Form = _form(terms)
    its.form, its.inside = form, inside

    def timed(work: Callable[..., Any], name: str) -> Callable[..., Any]:
        def do(*args: Any) -> Any:
            begun = time.process_time()
            try:
                return work(*args)
            finally:
                setattr(row, name, getattr(row, name) + time.process_time() - begun)

        return do

    with (mock.patch.object(inside, "nbytes", timed(inside.nbytes, "stat_s")),
          mock.patch.object(rank_table, "encode", timed(rank_table.encode, "table_s")),
          mock.patch.object(form, "master_files", timed(form.master_files, "listing_s"))):  # fmt: skip
        timed(its._commit, "commit_s")(told, gathered)


@contextlib.contextmanager
def _grown() -> Iterator[Callable[[], int]]:
    """Give a function that returns the peak growth of this process in bytes since the block began."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    yield lambda: max(0, _status("VmHWM") - before)


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 4096, 16_384], help="numbers of ranks")
    parser.add_argument("--leaves", type=int, nargs="+", default=[KINDS], help="numbers of leaves of each rank")
    parser.add_argument("--form", nargs="+", choices=FORMS, default=FORMS, help="formats of the files")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    args = parser.parse_args()
    names = [field.name for field in dataclasses.fields(Row)][:-1]
    print(" ".join(f"{name:>15}" for name in names))
    rows = []
    for form in args.form:
        for leaves in args.leaves:
            for ranks in args.ranks:
                rows.append(measure(ranks, form, leaves))
                values = (getattr(rows[-1], name) for name in names)
                print(" ".join(f"{value:15.3f}" if isinstance(value, float) else f"{value:>15}" for value in values),
                      rows[-1].wrong, flush=True)  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    return int(any(row.wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main())
