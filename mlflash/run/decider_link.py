"""The connection of a training process to its agent, and so to `mlflash run`, which decides who has which rank.

`run.started_ranks` has the messages. When a rank is lost, the thread that receives them calls all functions in
`on_lost` with the number of the round. They must end whatever the training waits in.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ..errors import ConfigError, DeadlineExceeded, MlflashError
from ..launch.launcher_variables import KEPT
from ..launch.line_client import LineClient
from .progress import progress

log = logging.getLogger("mlflash")

_CONNECT_S = 60.0
_link: DeciderLink | None = None
registered_groups: list[Groups] = []


class RoundOver(MlflashError, ConnectionError):
    """A rank was lost, and the next round is about to begin."""


@dataclasses.dataclass(frozen=True)
class Seat:
    """The rank that this process has."""

    round: int
    rank: int
    size: int
    lost_s: float  # a lost rank is noticed after at most this many seconds
    ready_s: float  # a rank that has not begun the round after this many seconds counts as lost
    hang_s: float  # a rank without progress for this many seconds, and some steps, may hang; 0: it may not


class DeciderLink:
    """The connection. Not collective; any thread.

    Args:
        told: the ``socket`` of the agent, ``name`` of this process, ``size``, the largest number of ranks, and whether
            this process ``waits`` for a rank.

    Attributes:
        waits: whether this process was started without a rank.
    """

    def __init__(self, greeting: Mapping[str, Any]):
        self.size: int = greeting["size"]
        self.waits: bool = greeting["waits"]
        self._seat: Seat | None = None
        self._over, self._why = 0, ""  # the last round that has ended, and why
        self._texts: dict[tuple[int, str], str] = {}
        self.heard_at = 0.0
        """When it was heard that the last round is over, by time.monotonic."""
        self.on_lost: list[Callable[[int], None]] = []
        self._saving = threading.Lock()  # between a save and a request to pause
        self._saved = 0  # the newest step that was saved, or restored
        self._pause, self._pause_after = 0, -1  # the round that is to pause, and the step after which; -1: not known
        self._lines = LineClient(_connect(greeting["socket"]), "mlflash run", self._take)
        self._news = self._lines.news
        self.say({"name": greeting["name"]})

    @property
    def _has_ended(self) -> bool:
        return self._lines.why is not None

    def say(self, message: dict[str, Any]) -> None:
        """Send a message. If nobody receives it any more, it is dropped: the agent is about to kill this process."""
        self._lines.say(message)

    def seat(self, after: int) -> Seat:
        """Wait for the rank that this process has in a round after the given one, however long it takes."""
        self._news.wait_for(lambda: self._has_ended or (self._seat is not None and self._seat.round > after))
        if (seat := self._seat) is None or seat.round <= after:
            raise MlflashError("mlflash run has ended, so this process cannot get a rank")
        return seat

    def is_over(self, number: int, wait_s: float = 0.0) -> bool:
        """Whether a round is over because a rank was lost; waits up to ``wait_s`` seconds for that."""
        return self._news.wait_for(lambda: self._has_ended or self._over >= number, wait_s) and self._over >= number

    def began(self, number: int, step: int, times: dict[str, float], unit: int) -> None:
        """Tell that this process trains in a round, from a step on. ``unit``: see `Groups.unit`."""
        progress.begin()
        with self._saving:
            self._saved = step
        self.say({"trains": number, "step": step, "times": times, "unit": unit})

    def saved(self, number: int, step: int, commit: Callable[[], bool]) -> None:
        """Note a save of this process. If all are to pause after it, wait for its commit, and until the round is over.

        Collective over the ranks of a round, which save the same steps.

        Args:
            commit: waits until the save is committed or has failed. Returns whether it is committed.

        Raises:
            RoundOver: the round is over, after this save or because a rank was lost.
        """
        progress.saved()
        with self._saving:
            self._saved = step
        self._news.wait_for(lambda: not self._pauses(number) or self._pause_after >= 0)
        # After a save that failed, all pause at the next one.
        if self._pauses(number) and step > self._pause_after and commit():
            self.say({"paused": number})
            self._news.wait_for(lambda: not self._pauses(number))
        self.check(number)

    def _pauses(self, number: int) -> bool:
        return self._pause == number and not self._has_ended and self._over < number

    def check(self, number: int) -> None:
        if self._over >= number:
            raise RoundOver(f"round {number} is over: {self._why}")

    def share(self, number: int, what: str, text: str | None, timeout_s: float) -> str:
        """Give rank 0's text to all ranks of a round. Collective over them.

        Raises:
            RoundOver: a rank was lost.
            DeadlineExceeded: the text did not arrive in time.
        """
        self.check(number)
        if text is not None:
            self.say({"text": number, "what": what, "is": text})
            return text
        there = self._news.wait_for(
            lambda: (number, what) in self._texts or self._over >= number or self._has_ended, timeout_s
        )
        if not there:
            raise DeadlineExceeded(f"rank 0 did not say within {timeout_s:g} s where the ranks meet", ranks=[0])
        if (shared := self._texts.get((number, what))) is not None:
            return shared
        raise RoundOver(f"round {number} is over: {self._why or 'mlflash run has ended'}")

    def _take(self, message: dict[str, Any]) -> None:
        calls: list[Callable[[int], None]] = []
        match message:
            case {"seat": dict(fields)}:
                seat = Seat(**fields)
                self._texts = {key: text for key, text in self._texts.items() if key[0] >= seat.round}
                self._seat = seat
            case {"lost": int(number), "why": str(why)}:
                self._why, self.heard_at = why, time.monotonic()
                self._over = number  # after these: it is what others look at
                calls = list(self.on_lost)
            case {"text": int(number), "what": str(what), "is": str(text)}:
                self._texts[number, what] = text
            case {"pause": int(number)}:
                with self._saving:  # what is saved later finds that it was asked to pause
                    self._pause, self._pause_after, step = number, -1, self._saved
                self.say({"saved": number, "step": step})
            case {"pause_after": int(number), "step": int(step)}:
                self._pause_after = step
            case {"where": int(number)}:
                self.say({"stuck": number, **progress.described()})
            case {"go_on": int(number)}:
                self._pause = 0
            case _:
                log.debug("ignored a message that this process does not understand: %s", str(message)[:80])
        self._news.tell()
        for call in calls:
            try:
                call(self._over)
            except Exception:
                log.exception("could not interrupt a wait of the training")


def _connect(name: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(_CONNECT_S)
    sock.connect(f"\0{name}")
    return sock


def decider() -> DeciderLink | None:
    """Return the connection of this process, made once. None: nobody assigns ranks, and a failure ends this process."""
    global _link
    if _link is None and KEPT in os.environ:
        _link = DeciderLink(json.loads(os.environ[KEPT]))
    return _link


def is_spare() -> bool:
    """Whether this process was started without a rank and waits for one."""
    return KEPT in os.environ and bool(json.loads(os.environ[KEPT])["waits"])


class Groups(Protocol):
    """What a training has, besides couriers, that knows its ranks: it is registered, and replaced in each round."""

    def drop(self) -> None:
        """Raise an exception in whatever waits for other ranks through them. Not collective; any thread."""

    def unit(self) -> int:
        """What the number of ranks must be a multiple of; 0: it cannot change. Not collective."""

    def take(self, rank: int, size: int) -> None:
        """Take a rank among a number of ranks, or begin this program anew. Not collective."""

    def connect(self, seat: Seat, share: Callable[[str, str | None], str]) -> None:
        """Connect them anew. Collective over the ranks of a round."""

    def forget_step(self) -> None:
        """Forget what was begun of a step. Collective."""

    def renew(self, seat: Seat, share: Callable[[str, str | None], str]) -> None:
        """Instead of keeping them, make them anew, with a rank. Collective over the ranks of a round."""


def check_groups(are_needed: bool) -> None:
    """Raise ConfigError if torch.distributed has groups that cannot be replaced, or none although they are needed."""
    if are_needed and not registered_groups:
        raise ConfigError("call init_process_group of mlflash.adapters.distributed before keep_alive: groups that a "
                          "framework makes cannot be replaced when a rank is lost")  # fmt: skip
    torch = sys.modules.get("torch.distributed")
    if torch is not None and torch.is_available() and torch.is_initialized() and not registered_groups:
        raise ConfigError(
            "mlflash cannot replace these process groups when a rank is lost: set up torch.distributed with "
            "mlflash.adapters.distributed.init_process_group, not with torch's own function", found=torch.get_backend(),
        )  # fmt: skip
