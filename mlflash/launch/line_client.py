"""A connection for threads, over which lines of JSON come and go: questions with their answers, and news."""

from __future__ import annotations

import array
import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import DeadlineExceeded
from ..events import News
from .lines import BadLine, Lines, pack

_LARGEST_NBYTES = 1 << 26
_LOOK_S = 1.0  # between two checks whether a wait is useless


class Lost(ConnectionError):
    """The connection has ended; the text says with whom, and how."""


class Refused(OSError):
    """The other end says why it does not do what it was asked to do. ``answer``: all that it says."""

    def __init__(self, answer: dict[str, Any]):
        super().__init__(answer["error"])
        self.answer = answer


class LineClient:
    """A connection, with a thread that receives. Close it; it may be closed twice.

    Any thread may call its methods. A question is ``{"id": number, "do": what, ...}``, and its answer is ``{"id":
    number, "is": result}`` or ``{"id": number, "error": text}``. Everything else that is received is news.

    Args:
        sock: connected. A child of this process closes it.
        peer: who is at the other end, in words.
        heard: called with each message that is no answer, on the receiving thread.
    """

    def __init__(self, sock: socket.socket, peer: str, heard: Callable[[dict[str, Any]], None]):
        self._sock, self._peer, self._heard = sock, peer, heard
        self._answers: dict[int, dict[str, Any] | None] = {}  # to the questions that are waited for
        self._numbers = itertools.count(1)
        self._sending = threading.Lock()
        self.news = News()
        self.why: str | None = None
        """Why the connection has ended; None: it has not."""
        sock.settimeout(None)
        os.register_at_fork(after_in_child=sock.close)
        self._thread = threading.Thread(target=self._receive, name="mlflash-lines", daemon=True)
        self._thread.start()

    def say(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a message, with copies of descriptors. If nobody receives it any more, it is dropped."""
        data = memoryview(pack(message))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        with self._sending, contextlib.suppress(OSError):
            data = data[self._sock.sendmsg([data], rights) :]
            if data:
                self._sock.sendall(data)

    def ask(self, what: str, timeout_s: float, check: Callable[[], None] = lambda: None,
            descriptors: Sequence[int] = (), **fields: Any) -> Any:  # fmt: skip
        """Ask, and wait for the answer.

        Args:
            check: called each second; what it raises ends the wait.
            descriptors: sent with the question.

        Raises:
            Lost: the connection has ended.
            Refused: the other end cannot do it.
            DeadlineExceeded: the answer has not come. It is dropped when it comes.
        """
        number = next(self._numbers)
        self._answers[number] = None
        end = time.monotonic() + timeout_s
        try:
            self.say({"id": number, "do": what, **fields}, descriptors)
            while not self.news.wait_for(lambda: self._answers[number] is not None or self.why is not None,
                                         max(0.0, min(_LOOK_S, end - time.monotonic()))):  # fmt: skip
                check()
                if time.monotonic() >= end:
                    raise DeadlineExceeded(f"waited {max(0.0, timeout_s):g} s for {self._peer} to answer: {what}")
            answer = self._answers[number]
        finally:
            del self._answers[number]
        if answer is None:
            raise Lost(f"{self._peer} has ended: {self.why}")
        if "error" in answer:
            raise Refused(answer)
        return answer["is"]

    def close(self) -> None:
        self.why = self.why or "it was closed here"
        with contextlib.suppress(OSError):  # closing is not enough where another process has it open, too
            self._sock.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)

    def _receive(self) -> None:
        lines, why = Lines(_LARGEST_NBYTES), "it closed the connection"
        try:
            while received := self._sock.recv(1 << 16):
                for message in lines.add(received):
                    self._take(message)
        except (OSError, BadLine) as error:
            why = str(error)
        self.why = self.why or why
        self._sock.close()
        self.news.tell()

    def _take(self, message: dict[str, Any]) -> None:
        number = message.get("id")
        if number is None:
            self._heard(message)
        elif number in self._answers:
            self._answers[number] = message
        self.news.tell()
