"""A framework's own checkpoints, of all ranks: the framework writes them to memory, and mlflash moves them to disk."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..background_files.staged import BackgroundFiles
from ..errors import SaveFailed
from ..protocol.ranks import Ranks

log = logging.getLogger("mlflash")


class OwnFiles:
    """The own checkpoints of one training. Close it.

    Args:
        files: the files of this rank.
        ranks: all ranks.
        strict: raise if a checkpoint was not moved; otherwise it is a warning.
    """

    def __init__(self, files: BackgroundFiles, ranks: Ranks, strict: bool):
        self._files, self._ranks, self._strict = files, ranks, strict
        self._later: list[Callable[[], None]] = []
        self._coming: set[str] = set()  # on their way to disk; `_going`: to be deleted after that
        self._going: set[str] = set()

    def begin(self, target: str) -> bool:
        """Whether all ranks can write the next checkpoint to memory; otherwise the framework writes it to disk itself.

        The framework also writes to disk if a directory of this name already exists: it writes the newer files into
        that. This call waits until the previous checkpoint is on disk, and then runs what was postponed until then.
        Collective over comm.

        Args:
            target: the checkpoint; rank 0's value is used.

        Raises:
            SaveFailed: with ``strict``, on all ranks, if the previous checkpoint was not moved on some of them.
        """
        mine = [self._files.has_room(), self._is_well(), self._ranks.rank != 0 or not os.path.isdir(target)]
        has_room, is_well, is_new = map(bool, self._ranks.agree(list(map(int, mine))))
        if self._strict and not is_well:
            raise SaveFailed("a checkpoint of the framework was not moved to disk: the log says why")
        self._do_later()
        if not has_room and self._ranks.rank == 0:
            log.warning(
                "memory has no room, or the process that moves files has ended: the framework writes %s to disk itself",
                target,
            )
        return has_room and is_new

    @contextlib.contextmanager
    def directory(self, target: str | os.PathLike[str], notes: Mapping[str, str] | None = None, alone: bool = False
                  ) -> Iterator[Path]:  # fmt: skip
        """Return a directory to write to in place of another one; see `BackgroundFiles.directory`.

        Inside, `torch.save` makes no checksums, which take most of its time: the files get them while they are moved to
        disk. Not collective, but all ranks that have a part of it write the same ones in the same order.
        """
        with _without_checksums() as checks, self._files.directory(target, notes, alone, checks) as path:
            yield path

    def link(self, path: str | os.PathLike[str], to: str | os.PathLike[str]) -> None:
        """Make a link once everything that was written so far is on disk, even if this rank is killed meanwhile.

        Not collective, and for one rank only.

        Args:
            path: the link; it replaces whatever has this name then.
            to: its target.
        """
        self._files.link(path, to)

    def expect(self, path: str | os.PathLike[str]) -> None:
        """Note on a rank that a path is being moved to disk, until somebody waits for it."""
        self._coming.add(os.path.abspath(path))

    def expects(self, path: str | os.PathLike[str]) -> bool:
        """Whether a path is being moved to disk."""
        return os.path.abspath(path) in self._coming

    def would_be_there(self, path: str | os.PathLike[str], is_there: Callable[[], bool]) -> bool:
        """Whether a path would exist if all writes and deletions had happened at once. Collective as ``is_there`` is.

        Args:
            path: the path.
            is_there: returns whether it exists now.
        """
        return self.expects(path) or (os.path.abspath(path) not in self._going and is_there())

    def remove_when_moved(self, path: str | os.PathLike[str], remove: Callable[[], None]) -> None:
        """Delete something once everything that was written so far is on disk, see `when_moved`."""
        self._going.add(os.path.abspath(path))
        self.when_moved(remove)

    def when_moved(self, do: Callable[[], None]) -> None:
        """Run a function once everything that was written so far is on disk: the next time that somebody waits for it.

        For example, to delete older checkpoints.
        """
        self._later.append(do)

    def finish(self) -> None:
        """Wait until everything is on disk, and run what was postponed until then."""
        self._files.wait()
        self._is_well()
        self._do_later()

    def close(self) -> None:
        """Let the rest be moved without waiting for it."""
        self._files.close()

    def _is_well(self) -> bool:
        """Warn about files that were not moved; return whether there are none."""
        failed = self._files.failures()
        for target, why in failed.items():
            log.warning("%s was not moved to disk: %s", target, why)
        if failed:
            self._later.clear()  # older checkpoints are kept then
        return not failed

    def _do_later(self) -> None:
        self._coming.clear()
        self._going.clear()
        later, self._later = self._later, []
        for do in later:
            do()


@contextlib.contextmanager
def _without_checksums() -> Iterator[bool]:
    """Keep `torch.save` from making checksums; yields whether it would have made them."""
    torch: Any = sys.modules.get("torch")
    serialization: Any = getattr(torch, "serialization", None)
    if not hasattr(serialization, "set_crc32_options") or not serialization.get_crc32_options():
        yield False
        return
    serialization.set_crc32_options(False)
    try:
        yield True
    finally:
        serialization.set_crc32_options(True)
