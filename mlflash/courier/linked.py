"""The one connection of this process to its courier process. All Checkpointers share it."""

from __future__ import annotations

import os
from pathlib import Path

from ..config import Config
from ..errors import MlflashError, MpiUnavailable, pip_install
from ..memory import user_directory
from ..wireup import mpich_segments
from ..wireup.launch import Meeting
from ..wireup.zygote_client import ZygoteClient, ZygoteLost
from .courier_link import CourierLink

_link: CourierLink | None = None
_making: ZygoteClient | None = None  # its courier is being started; other ranks may be lost meanwhile
_left: set[str] = set()  # shared memory that others still mapped when the last connection was given up


def link(config: Config, zygote: ZygoteClient | None = None) -> CourierLink:
    """The connection of this process. The first Checkpointer makes it, collectively over all ranks of the job.

    Raises:
        Closed: its courier has ended.
        MpiUnavailable: the process that starts couriers has ended.
        WorldMismatch: MPI is up in this process, or the ranks cannot find each other.
    """
    global _link
    if _link is None:
        _link = _made(config, _meeting_place(config.memory, config.job), zygote)
    _link.check()
    return _link


def link_anew(config: Config, zygote: ZygoteClient, meeting: Meeting) -> None:
    """Make a new connection of this process after `leave`. Collective over the current ranks.

    `interrupt` ends it early, if ``check`` of the meeting raises by then.

    Raises:
        MpiUnavailable: the process that starts couriers has ended.
        DeadlineExceeded: some ranks did not come in time.
    """
    global _link, _making
    _making = zygote
    try:
        _link = _made(config, None, zygote, meeting)
    finally:
        _making = None


def _made(config: Config, directory: Path | None, zygote: ZygoteClient | None,
          meeting: Meeting | None = None) -> CourierLink:  # fmt: skip
    try:
        return CourierLink(config, directory, zygote, meeting)
    except ZygoteLost as error:
        raise MpiUnavailable(
            "couriers cannot be started as processes, and the output above says why. If there is no MPI: "
            f"{pip_install('mpich')}, or load the module of your cluster's MPI. MLFLASH_COURIER=thread needs no such "
            "processes",
            found=str(error),
        ) from error


def interrupt(why: MlflashError) -> None:
    """Fail everything that waits for the courier of this process, permanently. Not collective; any thread."""
    if (zygote := _making) is not None:  # the zygote of rank 0 has the store at which all ranks meet
        zygote.process.kill()
    if _link is not None:
        _link.interrupt(why)


def leave(timeout_s: float = 10.0) -> None:
    """Give up the connection of this process, after `interrupt`."""
    global _link, _left
    if _link is not None:
        _left = mpich_segments.remove_unmapped(_left | _link.abandon(timeout_s))
    _link = None


def is_linked() -> bool:
    """Whether this process has a connection to a courier process."""
    return _link is not None


def _meeting_place(memory: str, job: str) -> Path | None:
    """Where ranks of one host may meet: this user's directory in memory, or None if there can be none.

    If something is wrong with the directory, the courier finds it later and tells all ranks.
    """
    usual = Path(memory, f"mlflash-{os.getuid()}")  # the meeting makes it
    if os.path.isdir(memory) and not os.path.lexists(usual):
        return usual
    try:
        return Path(user_directory.claim(memory, job))
    except (OSError, MlflashError):
        return None


def close_link() -> None:
    """End the courier of this process when no Checkpointer needs it any more."""
    if _link is not None:
        _link.close()


def _forget() -> None:
    global _link
    _link = None


os.register_at_fork(after_in_child=_forget)
