"""The courier, from its fork to its end.

One thread reads what the trainer sends. Each Checkpointer of the trainer has a session, with its own thread for jobs
and its own communicators. When the trainer has ended, the courier goes on with the posted jobs for up to 4 s
(`ORPHAN_S`) and then ends. It drops a commit that takes longer.
"""

from __future__ import annotations

import contextlib
import logging
import select
import time
from typing import Any

from ..config import Config
from ..errors import Closed, text_of
from ..mpi.world import load_mpi
from ..version import __version__
from ..wireup.courier_process import Courier as Forked
from .channel import Broken, Call, Channel, Reply
from .hosted_session import ORPHAN_S, Hosted
from .remote_trainer import Link

log = logging.getLogger("mlflash")

_CLOSED = 8  # sessions that can still be asked for their report


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
        self._link.send(Call(0, 0, "log", (record.levelno, text)))


def run(forked: Forked) -> None:
    """Be a courier until the trainer closes the connection or ends. The entry point of the forked process."""
    comm = None
    if forked.has_mpi:
        comm = load_mpi().COMM_WORLD
        forked.tell_mpi_is_up()
    link = Link(Channel(forked.trainer), forked.trains_on)
    log.addHandler(_Forward(link))
    log.propagate = False
    sessions: dict[int, Hosted] = {}
    try:
        _serve(forked, link, comm, sessions)
    except Broken as error:
        log.error("the courier ends: its trainer sent %s", error)
    link.lose()
    _finish(sessions)


def _serve(forked: Forked, link: Link, comm: Any, sessions: dict[int, Hosted]) -> None:
    """Do what the trainer sends, until it has ended."""
    sock = link.channel.sock
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    poll.register(forked.trainer_pidfd, select.POLLIN)
    while not link.is_lost.is_set():
        ready = [fd for fd, _ in poll.poll()]
        if sock.fileno() in ready:
            frames = link.channel.receive()
            if frames is None:
                return
            for frame in frames:
                if isinstance(frame, Reply):
                    link.replied(frame)
                else:
                    _take(frame, link, comm, sessions)
        elif forked.trainer_pidfd in ready:  # everything that it had sent has been read
            return


def _take(call: Call, link: Link, comm: Any, sessions: dict[int, Hosted]) -> None:
    if call.method == "open":
        _open(call.session, link, comm, sessions, *call.args)
    elif call.session in sessions:
        sessions[call.session].take(call)
        for number in [number for number, one in sessions.items() if one.is_closed][:-_CLOSED]:
            del sessions[number]
    elif call.job:
        raise Broken(f"a job for session {call.session}, which does not exist")
    elif call.number:  # the last courier has freed it
        link.send(Reply(call.session, call.number, None, Closed("this Checkpointer was closed")))


def _open(session: int, link: Link, comm: Any, sessions: dict[int, Hosted], version: str, log_level: int,
          config: Config, ranks: tuple[int, ...], earlier: int) -> None:  # fmt: skip
    if version != __version__:
        raise Broken(f"calls of mlflash {version}, and this is {__version__}")
    log.setLevel(log_level)
    sessions[session] = Hosted(session, link, comm, list(sessions.values()), config, ranks, earlier)


def _finish(sessions: dict[int, Hosted]) -> None:
    """Wait up to `ORPHAN_S` for the jobs that the ended trainer has posted, and give up what is left."""
    end = time.monotonic() + ORPHAN_S
    for hosted in sessions.values():
        hosted.finish(end)
    for hosted in sessions.values():
        if not hosted.is_closed and hasattr(hosted.session, "context"):
            hosted.session.give_up_drain()
        if hasattr(hosted.session, "context"):
            hosted.session.context.recorder.end()
