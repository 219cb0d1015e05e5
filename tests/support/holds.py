"""Hold, slow down or break what comes to a named point, in this process or in its courier.

A file in a directory of this rank's own says what happens at a point: it has the point's name.
"""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

from waiting import take, until

from mlflash import crash_points

_FOLDER = "MLFLASH_TEST_HOLDS"


class Hold:
    """Something that happens at a point until `set` is called. Not collective."""

    def __init__(self, path: Path, what: str):
        self._path = path
        path.with_suffix(".new").write_text(what)
        path.with_suffix(".new").rename(path)

    @property
    def is_reached(self) -> bool:
        return _reached(self._path).exists()

    def set(self) -> None:
        self._path.unlink(missing_ok=True)


def reach_into_couriers() -> None:
    """Let this process and the couriers that it is going to have be held. Not collective."""
    os.environ[_FOLDER] = tempfile.mkdtemp(prefix="mlflash-holds-")
    os.environ["MLFLASH_TEST_ARMS"] = "holds"


def hold(point: str) -> Hold:
    """Hold whatever comes to a point."""
    return at(point, "hold")


def slow(point: str, seconds: float) -> Hold:
    """Let whatever comes to a point take its time there, but for the main thread of this process."""
    return at(point, f"slow {seconds}")


def fail(point: str) -> Hold:
    """Raise an error that is none of mlflash's where something comes to a point."""
    return at(point, "fail")


def at(point: str, what: str) -> Hold:
    """Let something happen at a point: "hold", "slow SECONDS", "fail", or what `in_couriers` knows."""
    arm()
    return Hold(Path(os.environ[_FOLDER], point), what)


def happens_at(point: str) -> str:
    """What a test lets happen at a point now; "": nothing."""
    try:
        return Path(os.environ[_FOLDER], point).read_text()
    except FileNotFoundError:
        return ""


def let_go() -> None:
    """Let everything go on that is held, and hold nothing more."""
    for path in Path(os.environ[_FOLDER]).iterdir():
        path.unlink(missing_ok=True)
    crash_points.arm(None)


def arm() -> None:
    """Look at each point whether something is to happen there."""
    crash_points.arm(_look)


def _look(point: str) -> None:
    path = Path(os.environ[_FOLDER], point)
    what, *more = happens_at(point).split() or [""]
    if not what:
        return
    if what == "slow":
        if threading.current_thread() is not threading.main_thread():
            take(float(more[0]))
    elif what == "fail":
        raise ZeroDivisionError("a mistake of ours")
    else:
        _reached(path).touch()
        until(lambda: not path.exists(), f"the test to let go of {point}")


def _reached(path: Path) -> Path:
    return path.with_name(f"reached {path.name}")
