"""The courier, from its fork to its end.

One thread reads what the trainer sends. Each Checkpointer of the trainer has a session, with its own thread for jobs
and its own communicators. When the trainer has ended, the courier goes on with the posted jobs for up to 4 s
(`ORPHAN_S`) and then ends. It drops a commit that takes longer.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections import deque
from typing import Any

from ..errors import Closed, text_of
from ..mpi.world import load_mpi
from ..protocol import messages as asked
from ..wireup.courier_process import Courier as Forked
from . import wire_format as wire
from .hosted_session import ORPHAN_S, Hosted
from .remote_trainer import Link
from .wire_format import BadMessage, Frame, Kind, Outcome

log = logging.getLogger("mlflash")

_CLOSED = 8  # sessions that can still be asked for their report
_READ_NBYTES = 1 << 20


class _Forward(logging.Handler):
    """Sends what the courier logs to the trainer, which logs it."""

    def __init__(self, link: Link):
        super().__init__()
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f": {text_of(record.exc_info[1])}"
        if self._link.is_lost.is_set():
            with contextlib.suppress(OSError):  # the launcher, which read the output, may have ended, too
                print(f"mlflash courier: {text}", flush=True)
        self._link.send(Kind.EVENT, 0, 0, "log", (record.levelno, text))


def run(forked: Forked) -> None:
    """Be a courier until the trainer closes the connection or ends. The entry point of the forked process."""
    comm = None
    if forked.has_mpi:
        comm = load_mpi().COMM_WORLD
        forked.tell_mpi_is_up()
    link = Link(forked.trainer, forked.trains_on)
    log.addHandler(_Forward(link))
    log.propagate = False
    sessions: dict[int, Hosted] = {}
    try:
        _serve(forked, link, comm, sessions)
    except BadMessage as error:
        log.error("the courier ends: its trainer sent %s", error)
        link.lose()
    link.lose()
    _finish(sessions)


def _serve(forked: Forked, link: Link, comm: Any, sessions: dict[int, Hosted]) -> None:
    """Do what the trainer sends, until it has ended."""
    stream, files = wire.Stream(), deque[int]()
    poll = select.poll()
    poll.register(link.sock, select.POLLIN)
    poll.register(forked.trainer_pidfd, select.POLLIN)
    while not link.is_lost.is_set():
        ready = [fd for fd, _ in poll.poll()]
        if link.sock.fileno() in ready:
            try:
                received, descriptors, _, _ = socket.recv_fds(link.sock, _READ_NBYTES, 16)
            except OSError:
                return
            files.extend(descriptors)
            if not received:
                return
            for frame in stream.add(received):
                _take(frame, link, comm, sessions, files)
        elif forked.trainer_pidfd in ready:  # everything that it had sent has been read
            return


def _take(frame: Frame, link: Link, comm: Any, sessions: dict[int, Hosted], files: deque[int]) -> None:
    if frame.kind is Kind.OPEN:
        opened: wire.Opened = wire.decode(wire.Opened, frame.body)
        if opened.version != wire.VERSION:
            raise BadMessage(f"version {opened.version} of the protocol, and this is {wire.VERSION}")
        log.setLevel(opened.log_level)
        sessions[frame.session] = Hosted(frame.session, link, opened, comm, list(sessions.values()))
        return
    if frame.kind is Kind.REPLY:
        link.replied(frame)
        return
    if frame.session not in sessions and frame.kind in (Kind.ASK, Kind.CLOSE):  # the last courier has freed it
        gone = Outcome(Closed("this Checkpointer was closed"), False, wire.NOTHING)
        link.send(Kind.ANSWER, frame.session, frame.number, frame.name, gone)
        return
    if frame.session not in sessions:
        raise BadMessage(f"a frame for session {frame.session}, which does not exist")
    hosted = sessions[frame.session]
    if frame.kind is Kind.POST:
        hosted.post(frame, files)
    elif frame.kind is Kind.ASK:
        hosted.answer(frame)
    elif frame.kind is Kind.TELL:
        hosted.told(frame)
    elif frame.kind is Kind.CLOSE:
        hosted.is_closed = True
        for number in [number for number, one in sessions.items() if one.is_closed][:-_CLOSED]:
            del sessions[number]
        threading.Thread(target=hosted.close, args=(frame,), name="mlflash-close", daemon=True).start()
    else:
        raise BadMessage(f"a frame of kind {frame.kind}, which trainers do not send")


def _finish(sessions: dict[int, Hosted]) -> None:
    """Wait up to `ORPHAN_S` for the jobs that the ended trainer has posted, and give up what is left."""
    end = time.monotonic() + ORPHAN_S
    for hosted in sessions.values():
        hosted.finish(end)
    for hosted in sessions.values():
        if not hosted.is_closed and hasattr(hosted.session, "context"):
            hosted.session.answer(asked.GiveUpDrain())
        if hasattr(hosted.session, "context"):
            hosted.session.context.recorder.end()
