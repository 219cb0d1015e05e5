"""The channel between a trainer and its courier: each end calls methods of objects at the other end.

A frame is its length in eight bytes and a pickle of a `Call` or a `Reply`. Both ends are processes of one user and one
installation, and the channel is a socketpair that the courier was forked with, so a pickle is as safe as the fork.
Which methods there are is said by the classes at both ends: `session.Session` in the courier; `client.Client`,
`client.TrainerState` and the trainer's part of a save (`records.Trainer`) in the trainer.

A long tuple, such as the layout of a state, travels once: later frames refer to it. Both ends keep the last `_KEPT`.
"""

from __future__ import annotations

import io
import pickle
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..errors import DeadlineExceeded, MlflashError, text_of
from ..events import Event

_LENGTH_NBYTES = 8
_READ_NBYTES, _MOST_DESCRIPTORS = 1 << 20, 16
_LONG, _KEPT = 64, 8  # items of a long tuple; how many of them both ends keep


class Call(NamedTuple):
    """A method to call.

    Attributes:
        session: the number of the Checkpointer whose object has the method; 0: the connection itself.
        number: of the call, which its reply has, too; 0: nobody waits for a reply.
        method: its name.
        args: its arguments.
        job: from the trainer: whether it is a job, which waits for earlier ones. From the courier: the number of the
            job in whose middle it is; 0: none.
    """

    session: int
    number: int
    method: str
    args: tuple[Any, ...] = ()
    job: int = 0


class Reply(NamedTuple):
    """The result of a call, or its error.

    ``refused``: a job was not begun, because the courier has stopped working.
    """

    session: int
    number: int
    result: Any = None
    error: MlflashError | None = None
    refused: bool = False

    def value(self) -> Any:
        """Return the result, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.result


class PendingCall:
    """A frame of a trainer until it is sent; a call, until it has ended.

    Attributes:
        client: whose it is.
        fds: descriptors that go with it.
        answers: what the courier may ask in the middle of the job.
        on_late, on_refused: called when its deadline has passed; if no courier will do it.
        is_kept: whether the next courier gets it, or does it again, if this one ends.
        scope: the restart scope that a job belongs to, see `Client`; 0: none.
        was_filled: whether the slots of a save were filled when its courier ended.
        sent, woken: set when the courier has it; when it has ended, or is late.
    """

    def __init__(self, client: Any, frame: Call | Reply, is_kept: bool = False):
        self.client, self.frame, self.is_kept = client, frame, is_kept
        self.fds: tuple[int, ...] = ()
        self.answers: Any = None
        self.on_late: Callable[[DeadlineExceeded], None] | None = None
        self.on_refused: Callable[[MlflashError], None] | None = None
        self.scope = 0
        self.is_sent = self.was_filled = False
        self.sent, self.woken = Event(), Event()
        self.result: Any = None
        self.error: MlflashError | None = None
        self.late: DeadlineExceeded | None = None

    @property
    def number(self) -> int:
        return self.frame.number

    @property
    def method(self) -> str:
        """The method of a call; "" of a reply."""
        return self.frame.method if isinstance(self.frame, Call) else ""

    @property
    def is_job(self) -> bool:
        return isinstance(self.frame, Call) and self.frame.job > 0

    def be_late(self, error: DeadlineExceeded) -> None:
        """Note that the courier has passed its deadline and still works."""
        self.late = error
        if self.on_late is not None:
            self.on_late(error)
        self.woken.set()

    def end(self, error: MlflashError | None, result: Any = None) -> None:
        """Note the result, and wake who waits."""
        self.error, self.result = error, result
        self.woken.set()


class _LongTuples(dict[int, tuple[Any, ...]]):
    """The last long tuples that one end has sent or received, by number."""

    def number_of(self, value: tuple[Any, ...]) -> int | None:
        return next((number for number, sent in self.items() if sent is value), None)

    def keep(self, number: int, value: tuple[Any, ...]) -> None:
        self[number] = value
        self.pop(number - _KEPT, None)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, sent: _LongTuples):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._sent = sent

    def persistent_id(self, value: Any) -> tuple[int, list[Any] | None] | None:
        if type(value) is not tuple or len(value) < _LONG:
            return None
        if (number := self._sent.number_of(value)) is not None:
            return number, None
        number = max(self._sent, default=0) + 1
        self._sent.keep(number, value)
        return number, [*value]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, received: _LongTuples):
        super().__init__(file)
        self._received = received

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(sys.intern(module), sys.intern(name))

    def persistent_load(self, pid: Any) -> tuple[Any, ...]:
        number, items = pid
        if items is not None:
            self._received.keep(number, tuple(items))
        return self._received[number]


class Broken(ConnectionError):
    """What has arrived is no frame."""


class Channel:
    """One end of the channel. Any thread may send; one thread receives.

    Attributes:
        descriptors: those that came with calls and were not taken yet, in their order.
    """

    def __init__(self, sock: socket.socket):
        self.sock, self.descriptors = sock, deque[int]()
        self._sending = threading.Lock()
        self._sent, self._received = _LongTuples(), _LongTuples()
        self._bytes = bytearray()

    def send(self, frame: Call | Reply, descriptors: Sequence[int] = ()) -> None:
        """Send a frame. Of a reply that cannot be pickled an error is sent instead: the other end waits for it.

        Raises OSError if the other end has gone, and MlflashError if a call cannot be pickled.
        """
        with self._sending:
            try:
                packed = self._pack(frame)
            except MlflashError as error:
                if isinstance(frame, Call):
                    raise
                packed = self._pack(frame._replace(result=None, error=error))
            sent_nbytes = socket.send_fds(self.sock, [packed], [*descriptors]) if descriptors else 0
            self.sock.sendall(packed[sent_nbytes:])

    def _pack(self, frame: Call | Reply) -> memoryview:
        file, before = io.BytesIO(), dict(self._sent)
        file.write(bytes(_LENGTH_NBYTES))
        try:
            _Pickler(file, self._sent).dump(frame)
        except Exception as error:  # such as a value of the user's that no pickle can hold
            self._sent = _LongTuples(before)
            raise MlflashError(f"a message between trainer and courier cannot be sent: {text_of(error)}") from error
        packed = file.getbuffer()
        packed[:_LENGTH_NBYTES] = (len(packed) - _LENGTH_NBYTES).to_bytes(_LENGTH_NBYTES, "big")
        return packed

    def receive(self) -> list[Call | Reply] | None:
        """Wait for bytes, and return the frames that are complete with them; None: the other end has gone.

        Raises Broken if what has come is no frame.
        """
        try:
            received, descriptors, _, _ = socket.recv_fds(self.sock, _READ_NBYTES, _MOST_DESCRIPTORS)
        except OSError:
            return None
        self.descriptors.extend(descriptors)
        if not received:
            return None
        self._bytes += received
        frames = []
        while len(self._bytes) >= (end := self._end_of_frame()):
            body = bytes(self._bytes[_LENGTH_NBYTES:end])
            del self._bytes[:end]
            try:
                frame = _Unpickler(io.BytesIO(body), self._received).load()
            except Exception as error:
                raise Broken(f"a frame that cannot be read: {text_of(error)}") from error
            if isinstance(frame, Call):  # Python's cache of attributes keeps each text that it was asked for
                frame = frame._replace(method=sys.intern(frame.method))
            frames.append(frame)
        return frames

    def _end_of_frame(self) -> int:
        if len(self._bytes) < _LENGTH_NBYTES:
            return _LENGTH_NBYTES
        return _LENGTH_NBYTES + int.from_bytes(self._bytes[:_LENGTH_NBYTES], "big")
