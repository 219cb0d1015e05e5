"""The connection of a trainer to the process that is its courier, which all its Checkpointers share."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import queue
import socket
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from ..config import Config
from ..errors import Closed, DeadlineExceeded, MlflashError, text_of
from ..memory import user_directory
from ..wireup.launch import Couriers
from . import wire_format as wire
from .wire_format import BadMessage, Frame, Kind

log = logging.getLogger("mlflash")

_ENTRY = "mlflash.courier.process_main:run"
_READ_NBYTES = 1 << 20


@dataclasses.dataclass
class Sent:
    """A frame on its way to the socket."""

    packed: bytes
    fds: tuple[int, ...] = ()


class RemoteJob:
    """A job that the courier does; see `mpi.courier.Job`."""

    def __init__(self, frame: Callable[[], Sent], number: int, answers: Any,
                 on_late: Callable[[DeadlineExceeded], None] | None,
                 on_refused: Callable[[MlflashError], None] | None):  # fmt: skip
        self.frame, self.number, self.answers = frame, number, answers
        self.on_late, self.on_refused = on_late, on_refused
        self.is_sent = False
        self.sent = threading.Event()
        self.woken = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None
        self.late: DeadlineExceeded | None = None

    def refuse(self, why: MlflashError) -> None:
        """Say that the courier will not do it."""
        if not self.woken.is_set() and self.on_refused is not None:
            self.on_refused(why)
        self.error = self.error or why
        self.sent.set()
        self.woken.set()


class Session(Protocol):
    """A Checkpointer that has this connection."""

    def take(self, frame: Frame) -> None:
        """Take a frame in; on the thread that receives."""

    def lose(self, why: str) -> None:
        """Let nobody wait for a courier that has ended."""


class CourierLink:
    """The connection of this trainer to its courier, which all Checkpointers of the process share.

    Collective, as `Couriers` is.

    Args:
        timeout_s: how long the start may take, seconds.
        directory: of this user alone, where ranks of one host may meet.
    """

    def __init__(self, timeout_s: float, directory: Path | None):
        self.couriers = Couriers(_ENTRY, os.environ, timeout_s, directory=directory)
        self._sock = self.couriers.courier.trainer
        self.pid = self.couriers.courier.pid
        self.sessions: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()
        self._numbers = itertools.count(1)
        self.lost: str = ""  # how the courier has ended
        self.queue: queue.SimpleQueue[RemoteJob | Sent | None] = queue.SimpleQueue()
        for work, name in ((self._send, "send"), (self._receive, "receive")):
            threading.Thread(target=work, name=f"mlflash-{name}", daemon=True).start()

    def number(self) -> int:
        """A number that was not given before."""
        return next(self._numbers)

    def _send(self) -> None:
        while (item := self.queue.get()) is not None:
            if isinstance(item, RemoteJob):
                if item.is_sent:
                    continue
                item.is_sent = True
                try:
                    sent = item.frame()
                except Exception as error:  # as no more is done; or a fault of ours
                    item.refuse(error if isinstance(error, MlflashError) else Closed(text_of(error)))
                    continue
            else:
                sent = item
            try:
                if sent.fds:
                    begun = socket.send_fds(self._sock, [sent.packed], list(sent.fds))
                    self._sock.sendall(sent.packed[begun:])
                else:
                    self._sock.sendall(sent.packed)
            except OSError as error:
                self._lose(f"it takes no message any more: {error}")
            if isinstance(item, RemoteJob):
                item.sent.set()

    def _receive(self) -> None:
        stream = wire.Stream()
        try:
            while received := self._sock.recv(_READ_NBYTES):
                for frame in stream.add(received):
                    self._take(frame)
            why = "it has ended"
        except (BadMessage, OSError) as error:
            why = str(error)
        self._lose(why)

    def _take(self, frame: Frame) -> None:
        if frame.kind is Kind.EVENT and frame.name == "log":
            level, text = wire.decode(wire.EVENTS["log"], frame.body)
            log.log(level, "%s", text)
            return
        session = self.sessions.get(frame.session)
        if session is not None:
            session.take(frame)

    def _lose(self, why: str) -> None:
        if not self.lost:
            self.lost = why
            for session in list(self.sessions.values()):
                session.lose(why)

    def close(self) -> None:
        """End the courier. Not collective."""
        self.queue.put(None)
        self.couriers.close()


_link: CourierLink | None = None


def link(config: Config) -> CourierLink:
    """The connection of this process, made by the first Checkpointer. Collective over all ranks of the job.

    Raises:
        Closed: its courier has ended.
        WorldMismatch: MPI is up in this process, or the ranks cannot find each other.
    """
    global _link
    if _link is None:
        top = user_directory.claim(config.memory, config.job)
        _link = CourierLink(config.timeout_s, Path(top))
    if _link.lost:
        raise Closed("the courier of this process has ended", found=_link.lost)
    return _link


def close_link() -> None:
    """End the courier of this process, which no Checkpointer needs any more. Not collective."""
    if _link is not None:
        _link.close()


def _forget() -> None:
    global _link
    _link = None


os.register_at_fork(after_in_child=_forget)
