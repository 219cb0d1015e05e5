"""Moves directories of files from memory to disk: ``python -m mlflash.background_files.mover``, one for each rank.

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
import os
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from . import zip_checksums

_CHUNK_NBYTES = 8 << 20
_LOOK_S = 0.05
_LIST, _FAILED = ".mlflash-files-", ".mlflash-failed-"


@dataclasses.dataclass(frozen=True)
class Job:
    """What a mover is told first.

    Attributes:
        rank, size: of this rank, and the number of ranks.
        run: tells this run's moves from those of another one.
        rate: bytes per second; 0: no limit.
        patience_s: how long to wait for the files of other ranks.
        place: the directory in memory that all of it comes from. This process has a descriptor that locks it, so that
            it is not taken for a leftover.
    """

    rank: int
    size: int
    run: str
    rate: float
    patience_s: float
    place: str


class MoveFailed(Exception):
    """Some rank's files did not arrive: nothing has the target's name."""


class Mover:
    """The mover of one rank.

    Args:
        job: see `Job`.
    """

    def __init__(self, job: Job):
        self._job = job

    def move(
        self, source: Path, target: Path, notes: dict[str, str], alone: bool = False, checks: bool = False
    ) -> None:
        """Move what is in a directory to its target.

        Args:
            source: in memory; it is always removed.
            target: its place. If the directory contains only a file of this name, it is the place of that file. If a
                directory has this name already, it stays, and counts as moved; a file is replaced.
            notes: files to write once it is there, and their text.
            alone: no other rank has a part of it.
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
        """Link to what was moved before, in place of whatever has this name.

        Args:
            target: the link.
            to: relative to its directory.

        Raises:
            MoveFailed: its target does not exist, and what had the name still has it.
        """
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
                    zip_checksums.complete(path)
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
            self._wait(lambda: self._failure(beside) or all(one.exists() for one in lists))
            if why := self._failure(beside):
                raise MoveFailed(why)
            names: set[str] = set()
            for one in lists:
                for name, nbytes in json.loads(one.read_text()).items():
                    names.add(name)
                    if (beside / name).stat().st_size != nbytes:
                        raise MoveFailed(f"{name} is incomplete or damaged")
            for one in lists:
                one.unlink()
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
            time.sleep(_LOOK_S)

    def _failure(self, beside: Path) -> str:
        """What went wrong on another rank; "": nothing."""
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
        said = {"moved": target}
        try:
            if "link" in order:
                mover.link(Path(target), order["to"])
            else:
                mover.move(Path(order["from"]), Path(target), order["notes"], order["alone"], order["checks"])
        except MoveFailed as error:
            said = {"failed": target, "why": str(error)}
        with contextlib.suppress(OSError):  # nobody reads the stream any more
            print(json.dumps(said), flush=True)
    shutil.rmtree(job.place, ignore_errors=True)


if __name__ == "__main__":
    main()
