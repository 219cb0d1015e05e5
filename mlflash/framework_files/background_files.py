"""Gives a framework a directory in memory to write its checkpoint to, and has it moved to disk: `BackgroundFiles`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import UnsafePath
from ..events import News
from ..memory.node_directory import PRIVATE, describe, is_private

log = logging.getLogger("mlflash")

_ROOM = 1.2  # this many times the size of the largest checkpoint so far must be free
_LONG_S = 1.0  # if training waits longer, the log says so


class BackgroundFiles:
    """Directories that are written to memory, and moved to disk by a separate process.

    Not collective, but all ranks make one, and write the same directories in the same order. Close it.

    Raises:
        UnsafePath: the directory for it belongs to somebody else.
    """

    def __init__(self, memory: str, job: str, run: str, rank: int, size: int, rate: float = 0.0,
                 patience_s: float = 600.0):  # fmt: skip
        self._memory = Path(memory)
        of_job = _private(_of_user(memory)) / job
        self._place = of_job / f"{run}.{rank}"
        of_job.mkdir(exist_ok=True)
        with _locked(of_job):
            self._place.mkdir()
            lock = os.open(self._place, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)  # the mover keeps this lock
            _remove_leftovers(of_job)
        self._largest_nbytes = self._count = 0
        self._news, self._lock = News(), threading.Lock()
        self._on_their_way: list[str] = []
        self._failed: dict[str, str] = {}
        self._has_ended = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.mover"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            pass_fds=[lock], start_new_session=True,
        )  # fmt: skip
        os.close(lock)
        self._tell({"rank": rank, "size": size, "run": run, "rate": rate, "patience_s": patience_s,
                    "place": os.fspath(self._place)})  # fmt: skip
        self._listener = threading.Thread(target=self._listen, name="mlflash-files", daemon=True)
        self._listener.start()

    def has_room(self) -> bool:
        """Whether there is a process that moves files, and room for one more checkpoint in memory.

        Waits for the files that are being moved, so that memory holds at most one checkpoint. A checkpoint is written
        to memory if all ranks have room; otherwise the framework writes it to disk itself.
        """
        start = time.monotonic()
        self.wait()
        if (waited := time.monotonic() - start) > _LONG_S:
            log.info("training waited %.1f s until the checkpoint before was on disk", waited)
        if self._has_ended:
            return False
        status = os.statvfs(self._memory)
        return status.f_bavail * status.f_frsize > _ROOM * self._largest_nbytes

    @contextlib.contextmanager
    def directory(self, target: str | os.PathLike[str], notes: Mapping[str, str] | None = None,
                  alone: bool = False, checks: bool = False) -> Iterator[Path]:  # fmt: skip
        """Yield a directory to write to in place of another one, to which its content is moved during training.

        If writing raises, nothing is moved.

        Args:
            target: the other one; it gets its name when all files of all ranks are there. Or a file, which is written
                into the directory under its name.
            notes: files to write then, by their paths, and their text.
            checks: `torch.save` leaves its checksums out, and the files get them when they are moved.
        """
        path = self._place / str(self._count) / Path(target).name
        self._count += 1
        path.mkdir(parents=True)
        try:
            yield path
        except BaseException:
            shutil.rmtree(path.parent, ignore_errors=True)
            raise
        self._largest_nbytes = max(self._largest_nbytes, _nbytes(path))
        there = os.path.abspath(target)
        self._order(there, {"from": os.fspath(path), "to": there, "notes": dict(notes or {}), "alone": alone,
                            "checks": checks})  # fmt: skip

    def link(self, path: str | os.PathLike[str], to: str | os.PathLike[str]) -> None:
        """Make a link once everything that was written so far is on disk; for one rank only."""
        there = os.path.relpath(to, os.path.dirname(path))
        self._order(os.path.abspath(path), {"link": os.path.abspath(path), "to": there})

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until everything that was written is on disk, or has failed; return whether it is."""
        return self._news.wait_for(lambda: not self._on_their_way, timeout_s)

    def failures(self) -> dict[str, str]:
        """What was not moved since the last call, by where it should be, and why."""
        with self._lock:
            failed, self._failed = self._failed, {}
        return failed

    def close(self) -> None:
        """Let the mover end when it has moved everything, without waiting for it."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()

    def _order(self, target: str, order: dict[str, Any]) -> None:
        with self._lock:
            if self._has_ended:  # nobody would remove it from the list again
                self._failed[target] = "the process that moves files has ended"
                return
            self._on_their_way.append(target)
        self._tell(order)

    def _tell(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            pass  # the process has ended, which the listener reports

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            for line in answers:
                answer = json.loads(line)
                with self._lock:
                    target = answer.get("moved") or answer["failed"]
                    self._on_their_way.remove(target)
                    if "failed" in answer:
                        self._failed[target] = answer["why"]
                self._news.tell()
        code = self._process.wait()
        with self._lock:
            self._has_ended = True
            self._failed |= dict.fromkeys(self._on_their_way, f"the process that moves files ended with {code}")
            self._on_their_way = []
        self._news.tell()


def leftovers(memory: str, job: str, dry_run: bool = False) -> int:
    """Remove what runs of a job left in memory, if their movers have ended; return its bytes."""
    of_job = _of_user(memory) / job
    nbytes = _remove_leftovers(of_job, dry_run) if of_job.is_dir() else 0
    with contextlib.suppress(OSError):  # a mover may still be working there
        if not dry_run:
            of_job.rmdir()
            of_job.parent.rmdir()
    return nbytes


def _of_user(memory: str) -> Path:
    return Path(memory, f"mlflash-{os.getuid()}-files")


def _nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _remove_leftovers(of_job: Path, dry_run: bool = False) -> int:
    nbytes = 0
    for path in of_job.iterdir():
        with contextlib.suppress(OSError), _locked(path, fcntl.LOCK_NB):
            nbytes += _nbytes(path)
            if not dry_run:
                shutil.rmtree(path)
    return nbytes


@contextlib.contextmanager
def _locked(folder: Path, how: int = 0) -> Iterator[None]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | how)
        yield
    finally:
        os.close(fd)


def _private(path: Path) -> Path:
    """Make a directory that only this user can access."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not path.is_dir() or path.is_symlink() or not is_private(status):
        raise UnsafePath(f"{path} is not private to this user", expected=PRIVATE, found=describe(status))
    return path
