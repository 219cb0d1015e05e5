"""Requests of the child process of `async_checkpointer_type=PROCESS` to its parent, over a local socket.

The child must not use MPI, because it would read its parent's connection to the launcher. The slots belong to the
parent. So the child plans and asks the parent to do the rest. Any user of this machine can connect to the socket. The
kernel tells which user connects, and mlflash closes the connection of another user before it reads a byte. Each
connection is read in a thread of its own, so that one that sends nothing delays no other. Requests are answered one
after the other.
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
from mlflash.events import Event

log = logging.getLogger("mlflash")

_HEAR_S = 30.0  # limit for a child to send a message or to take an answer
_LONGEST_S = 1e9  # the longest timeout that the kernel accepts
_MOST = 64  # connections that have not asked yet; more are closed
_REST_S = 0.25  # pause after a failed accept, for example without file descriptors
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


@dataclasses.dataclass(frozen=True)
class Door:
    """The address of the parent, and the secret that a request needs.

    The address is not a path, which could be too long for a socket. It is an abstract name, which ends with the parent.
    """

    address: str
    key: bytes

    def ask(self, question: Any, timeout_s: float) -> Any:
        """Ask the parent and wait for its answer."""
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
    """Answer requests in a thread of this process until the process ends."""
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
    rest, wrong, heard = Event(), False, list[socket.socket]()
    while True:
        try:
            plain, _ = listener.accept()
            if len(heard) >= _MOST:
                plain.close()
                continue
            try:
                heard.append(plain)
                work = (plain, key, questions, heard)
                threading.Thread(target=_hear, args=work, name="mlflash-dcp", daemon=True).start()
            except RuntimeError:
                heard.pop()
                plain.close()
                raise
            wrong = False
        except Exception as error:  # no descriptor or thread is left: the connection waits until one is free
            if not wrong:
                log.warning("checkpoint processes cannot be heard for now: %r. mlflash keeps trying", error)
            wrong = True
            rest.wait(_REST_S)


def _hear(plain: socket.socket, key: bytes, questions: _Questions, heard: list[socket.socket]) -> None:
    try:
        _hear_one(plain, key, questions)
    finally:
        heard.pop()  # whichever: they are counted only


def _hear_one(plain: socket.socket, key: bytes, questions: _Questions) -> None:
    try:
        _bound(plain, _HEAR_S)
        line = _line(plain)
    except OSError as error:  # not a warning: a stranger could fill the log
        plain.close()
        log.debug("refused a connection to the socket for checkpoint processes: %r", error)
        return
    try:
        deliver_challenge(line, key)
        answer_challenge(line, key)
        questions.put((line, line.recv_bytes()))
    except Exception as error:  # the child has ended or sends nothing
        line.close()
        log.warning("a checkpoint process connected but sent no question: %r", error)


def _answer(questions: _Questions, answer: Callable[[Any], Any]) -> None:
    while True:
        line, question = questions.get()
        with line:
            try:
                told = (True, answer(pickle.loads(question)))
            except Exception as error:  # the child that asked raises it
                told = (False, error)
            try:
                line.send(told)
            except Exception as error:  # the child has ended: go on with the next one
                log.warning("an answer did not reach its checkpoint process: %r", error)


def _line(plain: socket.socket) -> Connection:
    """Take over a socket if the process at its other end belongs to this user."""
    pid, uid, _ = _CREDENTIALS.unpack(plain.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.geteuid():
        raise PermissionError(f"process {pid} at the other end belongs to user {uid}")
    return Connection(plain.detach())


def _bound(plain: socket.socket, seconds: float) -> None:
    """Set the timeout after which each wait for the other end raises BlockingIOError."""
    plain.setblocking(True)
    for what in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        plain.setsockopt(socket.SOL_SOCKET, what, struct.pack("ll", math.ceil(min(seconds, _LONGEST_S)), 0))
