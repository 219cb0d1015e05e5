"""Answers what an MPI process asks while it starts: the server of PMI-1, for one process on one socket.

It has no thread and never waits: `receive` processes what has come. Questions that depend on other ranks are answered
when the key-value store answers. A process asks one question at a time, as a line of words ``key=value``:

| MPI asks                          | the answer                                                                      |
|-----------------------------------|---------------------------------------------------------------------------------|
| ``cmd=init``                      | ``cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0``                     |
| ``cmd=get_maxes``                 | ``cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024``                 |
| ``cmd=get_appnum``                | ``cmd=appnum rc=0 appnum=0``                                                    |
| ``cmd=get_my_kvsname``            | ``cmd=my_kvsname rc=0 kvsname=EPOCH``                                           |
| ``cmd=get_universe_size``         | ``cmd=universe_size rc=0 size=RANKS``                                           |
| ``cmd=put kvsname= key= value=``  | ``cmd=put_result rc=0 msg=success``                                             |
| ``cmd=get kvsname= key=``         | ``cmd=get_result rc=0 msg=success value=VALUE``; ``rc=-1 msg=key_not_found``    |
| ``cmd=barrier_in``                | ``cmd=barrier_out rc=0``, when all ranks have come                              |
| ``cmd=finalize``                  | ``cmd=finalize_ack rc=0``; MPI_Finalize hangs without it                        |
| ``cmd=abort exitcode=``           | none: the parent of the process ends it (MPI_Abort of MPICH 5 returns)          |

In the store all keys of an epoch are below its name: ``EPOCH/started/RANK``, ``EPOCH/put/KEY``, ``EPOCH/barrier/N`` and
``EPOCH/barrier/N/all``, and ``EPOCH/up``, the number of ranks that have initialized MPI. The last of them deletes
``started`` and ``put``, which are no longer needed. MPI names its shared memory after the epoch. So a name must never
have been used before, or MPI_Init hangs.

Source: MPICH, src/pmi/src/pmi_wire.c; what MPICH 5.0.2 actually sends.
"""

from __future__ import annotations

import re
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import cast

from .frames import receive_ready
from .process_mapping import mapping
from .store_client import StoreClient, Then

_NAME_LENGTH, _KEY_LENGTH, _VALUE_LENGTH = 256, 64, 1024
_LINE_LENGTH = 4096
_WORD = re.compile(r"([A-Za-z0-9_-]+)(?:=((?:[^\s\\]|\\[^\n])*))?")  # after a backslash, a space is part of a word
ABORTS = "MPI_Abort"
"""Beginning of the reason why a courier is killed whose MPI aborts."""


class PmiError(ValueError):
    """An MPI process has sent something that is not PMI-1, or too much of it."""


def new_epoch_name(number: int) -> str:
    """Make a new, unique name of an epoch. Not collective: one rank makes it for all."""
    return f"epoch-{number}-{secrets.token_hex(8)}"


def parse(line: bytes) -> dict[str, str]:
    """Split a line into its words. Values stay as they were written, with their backslashes.

    Raises:
        PmiError: it does not follow the protocol.
    """
    try:
        text = line.decode("ascii")
    except UnicodeDecodeError:
        raise PmiError(f"bytes that are no text: {line[:80]!r}") from None
    words: dict[str, str] = {}
    at = 0
    while at < len(text):
        if text[at] == " ":
            at += 1
            continue
        word = _WORD.match(text, at)
        if word is None or (word.end() < len(text) and text[word.end()] != " "):
            raise PmiError(f"words that are not key=value: {line[:80]!r}")
        words[word[1]] = word[2] or ""
        at = word.end()
    if not text.startswith("cmd="):
        raise PmiError(f"a line without a command: {line[:80]!r}")
    return words


class PmiServer:
    """The server of one MPI process, which has the other end of the socketpair.

    The owner of this object drives it and ``store``, a client of the store. ``nodes``: the node of each rank, any
    numbers.
    """

    def __init__(self, sock: socket.socket, epoch: str, rank: int, nodes: Sequence[int], store: StoreClient):
        self.error: str | None = None
        """Why this process cannot go on; its parent then ends it."""
        self._sock, self._store = sock, store
        self._epoch, self._size = epoch, len(nodes)
        self._mapping = mapping(nodes)
        self._received = bytearray()
        self._is_busy = False  # with a command that the store has not answered
        self._barriers = 0
        # What all ranks have put, fetched at once after each barrier, because MPI asks for all of it on each rank.
        self._known: dict[str, str] | None = None
        self._is_open = True
        sock.setblocking(False)
        self._ask(self._looked, "look", "up")
        self._ask(self._started, "add", f"started/{rank}", 1)

    def fileno(self) -> int:
        """The descriptor of the process; -1 if there is nothing to wait for any more."""
        return self._sock.fileno()

    def close(self) -> None:
        """Close the socket. If the process still needs it, it gets an error."""
        self._is_open = False
        self._sock.close()

    def receive(self) -> None:
        """Answer what has come, without waiting; `error` has what went wrong."""
        if (received := receive_ready(self._sock, _LINE_LENGTH)) is None:
            return
        if not received:  # the process has ended, without reading an answer or not, or has no need of PMI any more
            self.close()
            return
        self._received += received
        try:
            while self._is_open and b"\n" in self._received:
                line, _, rest = bytes(self._received).partition(b"\n")
                self._received = bytearray(rest)
                self._answer(parse(line))
            if len(self._received) > _LINE_LENGTH:
                raise PmiError(f"a line of more than {_LINE_LENGTH} bytes")
        except PmiError as error:
            self._fail(str(error))

    def _answer(self, words: dict[str, str]) -> None:
        command = words["cmd"]
        if command == "abort":
            code = words.get("exitcode", "")
            self._fail(f"{ABORTS}({code if re.fullmatch(r'-?[0-9]{1,9}', code) else 1})")
            return
        if self._is_busy:
            raise PmiError(f"{command} before the last command was answered")
        if command == "init":
            fits = words.get("pmi_version") == "1"
            self._send(f"response_to_init pmi_version=1 pmi_subversion=1 rc={0 if fits else -1}")
        elif command == "get_maxes":
            self._send(f"maxes rc=0 kvsname_max={_NAME_LENGTH} keylen_max={_KEY_LENGTH} vallen_max={_VALUE_LENGTH}")
        elif command == "get_appnum":
            self._send("appnum rc=0 appnum=0")
        elif command == "get_my_kvsname":
            self._send(f"my_kvsname rc=0 kvsname={self._epoch}")
        elif command == "get_universe_size":
            self._send(f"universe_size rc=0 size={self._size}")
        elif command == "put":
            self._put(self._key(words), words.get("value", ""))
        elif command == "get":
            self._get(self._key(words))
        elif command == "barrier_in":
            self._enter_barrier()
        elif command == "finalize":
            self._send("finalize_ack rc=0")
        else:
            raise PmiError(f"an unknown command: {command[:80]}")

    def _key(self, words: dict[str, str]) -> str:
        key = words.get("key", "")
        if words.get("kvsname") != self._epoch:
            raise PmiError(f"{words['cmd']} in {words.get('kvsname', '')[:80]!r}, which is not {self._epoch!r}")
        if not 0 < len(key) < _KEY_LENGTH:
            raise PmiError(f"a key of {len(key)} characters, where 1 to {_KEY_LENGTH - 1} are allowed")
        return key

    def _put(self, key: str, value: str) -> None:
        if len(value) >= _VALUE_LENGTH:
            raise PmiError(f"a value of {len(value)} characters, where {_VALUE_LENGTH - 1} are allowed")
        self._is_busy = True
        self._ask(lambda _: self._send("put_result rc=0 msg=success"), "put", f"put/{key}", value)

    def _get(self, key: str) -> None:
        if key == "PMI_process_mapping":
            # If there is no mapping, MPI asks the ranks for the names of their hosts.
            self._found(self._mapping if len(self._mapping) < _VALUE_LENGTH else None)
        elif key.startswith("PMI_"):  # known to launchers only; no rank puts it
            self._found(None)
        elif self._known is None:
            self._learn(key)
        elif key in self._known:
            self._found(self._known[key])
        else:
            self._is_busy = True
            self._ask(self._found, "look", f"put/{key}")

    def _learn(self, key: str) -> None:
        def learnt(known: object) -> None:
            self._known = cast("dict[str, str]", known)
            self._get(key)

        self._is_busy = True
        self._ask(learnt, "below", "put/")

    def _found(self, value: object) -> None:
        if value is None:
            self._send("get_result rc=-1 msg=key_not_found value=unknown")
        else:
            self._send(f"get_result rc=0 msg=success value={value}")

    def _enter_barrier(self) -> None:
        self._is_busy = True
        self._known = None
        self._barriers += 1
        name = f"barrier/{self._barriers}"

        def arrived(number: object) -> None:
            if number == self._size:
                self._ask(lambda _: None, "put", f"{name}/all", "1")

        self._ask(arrived, "add", name, 1)
        self._ask(lambda _: self._send("barrier_out rc=0"), "get", f"{name}/all")

    def initialized(self, *others: str) -> None:
        """Note that MPI is initialized. The last process deletes what is no longer needed.

        Args:
            others: prefixes of other keys to delete then.
        """

        def counted(number: object) -> None:
            if number == self._size:
                for prefix in (*(f"{self._epoch}/{what}/" for what in ("started", "put")), *others):
                    self._store.send(lambda *_: None, "delete", prefix)

        self._ask(counted, "add", "up", 1)

    def _started(self, times: object) -> None:
        if times != 1:
            self._fail(f"the name {self._epoch} was used before, or two couriers have this rank")

    def _looked(self, up: object) -> None:
        if up is not None:
            self._started(None)

    def _ask(self, then: Callable[[object], None], operation: str, key: str, *values: object) -> None:
        self._store.send(self._then(then), operation, f"{self._epoch}/{key}", *values)

    def _then(self, then: Callable[[object], None]) -> Then:
        """A function that handles an answer if the process is still there."""

        def answered(result: object, error: OSError | None) -> None:
            if not self._is_open:
                return
            if error is not None:
                self._fail(str(error))
            else:
                then(result)

        return answered

    def _send(self, words: str) -> None:
        self._is_busy = False
        try:
            line = f"cmd={words}\n".encode("ascii")
            if self._sock.send(line) < len(line):
                self._fail("it does not take its answers")
        except BlockingIOError:
            self._fail("it does not take its answers")
        except OSError:  # the process has ended, which its parent notices
            self.close()

    def _fail(self, why: str) -> None:
        self.error = self.error or why
        self.close()
