"""How the child of `async_checkpointer_type=PROCESS` asks its parent: a socket of this machine, and one answer each.

The child must not touch MPI (it would read its parent's connection to the launcher), and the slots are the parent's. So
it plans, and asks the parent to do the rest. Any user of this machine can see the socket and connect to it: the kernel
says who did, and whoever is not this user is let go before a byte of theirs is read. Questions are heard side by side,
so that one who connects and says nothing holds nobody up, and answered one after the other.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import pickle
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from mlflash.errors import DeadlineExceeded

log = logging.getLogger("mlflash")

_HEAR_S = 30.0  # for each thing that who has connected has to say, and for the answer to be taken: both come at once
_LONGEST_S = 1e9  # that the kernel waits
_REST_S = 0.25  # after a connection that could not be had, as without file descriptors
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


@dataclasses.dataclass(frozen=True)
class Door:
    """Where the parent is asked, and the secret without which it does not answer.

    The address is not a path, which could be too long for a socket, but a name that goes with the parent.
    """

    address: str
    key: bytes

    def ask(self, question: Any, timeout_s: float) -> Any:
        """Ask the parent and wait for its answer.

        Raises:
            DeadlineExceeded: there was none in time.
            PermissionError: whoever is there is not this user.
            Exception: what the parent raised.
        """
        end = time.monotonic() + timeout_s
        try:
            with socket.socket(socket.AF_UNIX) as plain:
                _bound(plain, timeout_s)
                plain.connect(self.address)
                line = _line(plain)
            with line:
                answer_challenge(line, self.key)
                deliver_challenge(line, self.key)
                line.send(question)
                answer = line.recv() if line.poll(max(0.0, end - time.monotonic())) else None
        except BlockingIOError:
            answer = None
        if answer is None:
            raise DeadlineExceeded(f"the parent process did not answer for {timeout_s:g} s")
        good, told = answer
        if not good:
            raise told
        return told


def open_door(answer: Callable[[Any], Any]) -> Door:
    """Answer questions in a thread of this process, until it ends.

    Args:
        answer: is called by one thread only; what it raises is raised where it was asked.
    """
    door = Door(f"\0mlflash-{os.getpid()}-{os.urandom(8).hex()}", os.urandom(32))
    listener = socket.socket(socket.AF_UNIX)
    listener.setblocking(True)
    listener.bind(door.address)
    listener.listen()
    questions: _Questions = queue.SimpleQueue()
    for work, arguments in ((_listen, (listener, door.key, questions)), (_answer, (questions, answer))):
        threading.Thread(target=work, args=arguments, name="mlflash-dcp", daemon=True).start()
    return door


_Questions = queue.SimpleQueue[tuple[Connection, bytes]]


def _listen(listener: socket.socket, key: bytes, questions: _Questions) -> None:
    rest, wrong = threading.Event(), False
    while True:
        try:
            plain, _ = listener.accept()
            try:
                threading.Thread(target=_hear, args=(plain, key, questions), name="mlflash-dcp", daemon=True).start()
            except RuntimeError:
                plain.close()
                raise
            wrong = False
        except Exception as error:  # no descriptor or thread is left: who waits is heard as soon as there is one
            if not wrong:
                log.warning("checkpoint processes cannot be heard for now: %r. mlflash keeps trying", error)
            wrong = True
            rest.wait(_REST_S)


def _hear(plain: socket.socket, key: bytes, questions: _Questions) -> None:
    try:
        _bound(plain, _HEAR_S)
        line = _line(plain)
    except OSError as error:  # a stranger could fill the log
        plain.close()
        log.debug("refused a connection to the socket for checkpoint processes: %r", error)
        return
    try:
        deliver_challenge(line, key)
        answer_challenge(line, key)
        questions.put((line, line.recv_bytes()))
    except Exception as error:  # a child that ended, or that says nothing
        line.close()
        log.warning("a checkpoint process connected but sent no question: %r", error)


def _answer(questions: _Questions, answer: Callable[[Any], Any]) -> None:
    while True:
        line, question = questions.get()
        with line:
            try:
                told = (True, answer(pickle.loads(question)))
            except Exception as error:  # raised where it was asked
                told = (False, error)
            try:
                line.send(told)
            except Exception as error:  # a child that ended: the next one is answered all the same
                log.warning("an answer did not reach its checkpoint process: %r", error)


def _line(plain: socket.socket) -> Connection:
    """Take a socket over, if this user is at its other end.

    Raises:
        PermissionError: somebody else is.
    """
    pid, uid, _ = _CREDENTIALS.unpack(plain.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.geteuid():
        raise PermissionError(f"process {pid} at the other end belongs to user {uid}")
    return Connection(plain.detach())


def _bound(plain: socket.socket, seconds: float) -> None:
    """Have each wait for the other end, from here on, raise BlockingIOError after so long."""
    plain.setblocking(True)
    for what in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        plain.setsockopt(socket.SOL_SOCKET, what, struct.pack("ll", math.ceil(min(seconds, _LONGEST_S)), 0))
