"""Moves directories of files from memory to disk: ``python -m mlflash.framework_files.mover``, one for each rank.

Standard input brings a `Job`, and then moves, a JSON object a line: ``{"from": DIR, "to": PATH, "notes": {PATH: TEXT},
"alone": BOOL, "checks": BOOL}``. Each rank's mover is told the same moves, in the same order, and has its own part of
the files. It copies them into a directory next to the target, syncs them, and leaves a list of them there. When the
lists of all ranks are there, and all files that they name, rank 0's mover renames the directory to the target, and
writes the notes (``latest`` and the like). So either all of it is there, or nothing has that name. Other ranks do not
wait for what one rank has written ``alone``; it may be one file. ``{"link": PATH, "to": NAME}`` links to what was moved
before. Each line is answered: ``{"moved": PATH}`` or ``{"failed": PATH, "why": TEXT}``.

When standard input ends because the rank has ended, the mover continues until everything that was written to memory is
on disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import os
import shutil
import struct
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

_END, _LOCATOR, _END64, _ENTRY, _DESCRIPTOR = b"PK\5\6", b"PK\6\7", b"PK\6\6", b"PK\1\2", b"PK\7\10"
_ENTRY_NBYTES, _LOCAL_NBYTES, _END_NBYTES, _END64_NBYTES, _LOCATOR_NBYTES = 46, 30, 22, 56, 20
_IN_EXTRA = 0xFFFFFFFF  # stands for a number that takes eight bytes; the extra field has it
_ID = b"/.data/serialization_id"
_WORD = (1 << 64) - 1
_CHUNK_NBYTES = 8 << 20
_POLL_S = 0.05
_LIST, _FAILED = ".mlflash-files-", ".mlflash-failed-"


def complete_checksums(path: Path) -> None:
    """Add the checksums that `torch.save` was told to leave out, which take three quarters of its time.

    Afterwards the file is as `torch.save` writes it, but for the checksum of each record, in its data descriptor and in
    the directory at the end, and the last record, an id made from all checksums. A file may be several archives one
    after the other, as in DCP's ``.distcp``. A file that is not from `torch.save` stays as it is.
    """
    if path.stat().st_size < _END_NBYTES:
        return
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as raw:
        end = len(raw)
        with contextlib.suppress(struct.error, ValueError, IndexError):  # the file only looks like an archive
            while end >= _END_NBYTES and raw[end - _END_NBYTES : end - _END_NBYTES + 4] == _END:
                end = _complete_archive(raw, end)


def _complete_archive(raw: mmap.mmap, end: int) -> int:
    """Do it for the archive that ends there; return its beginning, or 0 if it is not one of ours."""
    nbytes, start = struct.unpack_from("<II", raw, end - 10)
    directory = end - _END_NBYTES - nbytes
    at = end - _END_NBYTES - _LOCATOR_NBYTES
    if raw[at : at + 4] == _LOCATOR and raw[at - _END64_NBYTES : at - _END64_NBYTES + 4] == _END64:
        nbytes, start = struct.unpack_from("<QQ", raw, at - _END64_NBYTES + 40)
        directory = at - _END64_NBYTES - nbytes
    begin: int = directory - start
    records = [*_records(raw, directory, begin, directory + nbytes)] if 0 <= begin <= directory else []
    if not records or not records[-1][0].endswith(_ID):
        return 0
    for _, check, _, data, size in records:
        if check or (size and raw[data + size : data + size + len(_DESCRIPTOR)] != _DESCRIPTOR):
            return 0
    combined = 0
    for name, _, entry, data, size in records:
        if name.endswith(_ID):
            raw[data + 20 : data + size] = b"%020d" % combined
        if not size:
            continue
        with memoryview(raw) as view, view[data : data + size] as content:
            check = zlib.crc32(content)
        combined ^= (check + 0x9E3779B9 + (combined << 6) + (combined >> 2)) & _WORD
        struct.pack_into("<I", raw, entry + 16, check)
        struct.pack_into("<I", raw, data + size + len(_DESCRIPTOR), check)
    return begin


def _records(raw: mmap.mmap, at: int, begin: int, end: int) -> Iterator[tuple[bytes, int, int, int, int]]:
    """Name, checksum and place in the directory of each record; where its content begins, and its size."""
    while at < end and raw[at : at + 4] == _ENTRY:
        check, _, size, name_nbytes, extra_nbytes, comment_nbytes = struct.unpack_from("<IIIHHH", raw, at + 16)
        (place,) = struct.unpack_from("<I", raw, at + 42)
        name_at = at + _ENTRY_NBYTES
        name, extra = raw[name_at : name_at + name_nbytes], name_at + name_nbytes + 4
        if size == _IN_EXTRA:
            (size,), extra = struct.unpack_from("<Q", raw, extra), extra + 16
        if place == _IN_EXTRA:
            (place,) = struct.unpack_from("<Q", raw, extra)
        local_name, local_extra = struct.unpack_from("<HH", raw, begin + place + 26)
        yield name, check, at, begin + place + _LOCAL_NBYTES + local_name + local_extra, size
        at = name_at + name_nbytes + extra_nbytes + comment_nbytes


@dataclasses.dataclass(frozen=True)
class Job:
    """What a mover is told first.

    Attributes:
        place: the directory in memory that all of it comes from. This process has a descriptor that locks it,
            so that it is not taken for a leftover.
    """

    rank: int  # rank, size: of this rank, and the number of ranks
    size: int
    run: str  # tells this run's moves from those of another one
    rate: float  # bytes per second; 0: no limit
    patience_s: float  # how long to wait for the files of other ranks
    place: str


class MoveFailed(Exception):
    """Some rank's files did not arrive: nothing has the target's name."""


class Mover:
    """The mover of one rank."""

    def __init__(self, job: Job):
        self._job = job

    def move(
        self, source: Path, target: Path, notes: dict[str, str], alone: bool = False, checks: bool = False
    ) -> None:
        """Move what is in a directory to its target.

        Args:
            target: its place. If the directory contains only a file of this name, it is the place of that file. If a
                directory has this name already, it stays, and counts as moved; a file is replaced.
            notes: files to write once it is there, and their text.
            checks: files of `torch.save` do not have checksums yet.

        Raises:
            MoveFailed: nothing has that name, or what had it before still does.
        """
        beside = self._beside(target)
        ranks = [self._job.rank] if alone else list(range(self._job.size))
        try:
            self._bring(source, beside, checks, is_first=self._job.rank == ranks[0])
            if self._job.rank == ranks[0]:
                self._finish(beside, target, notes, ranks)
            else:
                self._wait(lambda: not beside.exists() or self._failure(beside))
                if not target.is_dir():
                    raise MoveFailed(self._failure(beside) or f"rank {ranks[0]} has given it up")
        finally:
            shutil.rmtree(source, ignore_errors=True)

    def link(self, target: Path, to: str) -> None:
        """Link to what was moved before, in place of whatever has this name. Raises MoveFailed."""
        if not (target.parent / to).exists():
            raise MoveFailed(f"{to} is not there")
        beside = self._beside(target)
        try:
            beside.symlink_to(to)
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            beside.rename(target)
            _sync(target.parent)
        except OSError as error:
            raise MoveFailed(str(error)) from error
        finally:
            beside.unlink(missing_ok=True)

    def _beside(self, target: Path) -> Path:
        """Where it is put together. The name contains nothing of the target's: NeMo would look for a metric in it."""
        return target.with_name(f".{self._job.run}.{zlib.crc32(os.fsencode(target.name)):08x}.part")

    def _bring(self, source: Path, beside: Path, checks: bool, is_first: bool) -> None:
        """Copy the files of this rank, and leave a list of them; if that fails, leave a note."""
        try:
            beside.mkdir(parents=True, exist_ok=True)
            sizes = dict(self._copied(source, beside, checks))
            _write(beside / f"{_LIST}{self._job.rank}", json.dumps(sizes))
        except OSError as error:
            why = f"rank {self._job.rank}: {error}"
            with contextlib.suppress(OSError):
                _write(beside / f"{_FAILED}{self._job.rank}", why)
            if is_first:
                shutil.rmtree(beside, ignore_errors=True)
            raise MoveFailed(why) from error

    def _copied(self, source: Path, beside: Path, checks: bool) -> Iterator[tuple[str, int]]:
        start, sent = time.monotonic(), 0
        for folder, _, names in os.walk(source):
            inside = beside / os.path.relpath(folder, source)
            inside.mkdir(exist_ok=True)
            for name in names:
                path, size = Path(folder, name), 0
                if checks:
                    complete_checksums(path)
                with path.open("rb") as given, (inside / name).open("wb") as taken:
                    while count := os.sendfile(taken.fileno(), given.fileno(), None, _CHUNK_NBYTES):
                        size, sent = size + count, sent + count
                        if self._job.rate and (ahead := sent / self._job.rate - (time.monotonic() - start)) > 0:
                            time.sleep(ahead)
                    os.fsync(taken.fileno())
                path.unlink()  # this frees its memory
                yield os.path.relpath(inside / name, beside), size
            _sync(inside)

    def _finish(self, beside: Path, target: Path, notes: dict[str, str], ranks: Sequence[int]) -> None:
        """Rename it to the target when all files of all ranks are there."""
        lists = [beside / f"{_LIST}{rank}" for rank in ranks]
        try:
            self._wait(lambda: self._failure(beside) or all(file_list.exists() for file_list in lists))
            if why := self._failure(beside):
                raise MoveFailed(why)
            names: set[str] = set()
            for file_list in lists:
                for name, nbytes in json.loads(file_list.read_text()).items():
                    names.add(name)
                    if (beside / name).stat().st_size != nbytes:
                        raise MoveFailed(f"{name} is incomplete or damaged")
            for file_list in lists:
                file_list.unlink()
            if names == {target.name}:
                (beside / target.name).rename(target)
            elif not target.is_dir():
                beside.rename(target)
            _sync(target.parent)
            for path, text in notes.items():
                _write(Path(path), text)
        except OSError as error:
            raise MoveFailed(str(error)) from error
        finally:
            shutil.rmtree(beside, ignore_errors=True)

    def _wait(self, condition: Callable[[], Any]) -> None:
        end = time.monotonic() + self._job.patience_s
        while not condition():
            if time.monotonic() > end:
                raise MoveFailed(f"the files of other ranks did not come within {self._job.patience_s:g} s")
            time.sleep(_POLL_S)

    def _failure(self, beside: Path) -> str:
        for path in beside.glob(f"{_FAILED}*"):
            with contextlib.suppress(OSError):
                return path.read_text() or "a rank has failed"
        return ""


def _write(path: Path, text: str) -> None:
    """Write a file with all of its text or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with beside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def main() -> None:
    """Do what standard input says, until it ends."""
    job = Job(**json.loads(sys.stdin.readline()))
    mover = Mover(job)
    for line in sys.stdin:
        order = json.loads(line)
        target = order.get("link") or order["to"]
        answer = {"moved": target}
        try:
            if "link" in order:
                mover.link(Path(target), order["to"])
            else:
                mover.move(Path(order["from"]), Path(target), order["notes"], order["alone"], order["checks"])
        except MoveFailed as error:
            answer = {"failed": target, "why": str(error)}
        with contextlib.suppress(OSError):  # nobody reads the stream any more
            print(json.dumps(answer), flush=True)
    shutil.rmtree(job.place, ignore_errors=True)


if __name__ == "__main__":
    main()
