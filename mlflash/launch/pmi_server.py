"""Answers what an MPI process asks while it starts: the server of PMI-1, for one process on one socket.

A process asks one question at a time, as a line of words ``key=value``:

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

All ranks of a node share what they know (`NodeEpoch`). What a rank has put, others get after the next barrier, which is
what PMI-1 promises. At a barrier a node says only once that its ranks have come, with all that they have put.

MPI names its shared memory after the epoch. So a name must never have been used before, or MPI_Init hangs.

A process also asks which node each rank is on: ``(vector,(node,nodes,ranks per node),...)``. A block ``(2,3,4)`` means
that the next four ranks are on node 2, then four on node 3 and four on node 4. If there are more ranks than the blocks
describe, the blocks are repeated. MPICH does this only if the first block begins at node 0, so nodes are numbered here
in the order in which they first appear. Example: the nodes 7 7 9 9 9 are ``(vector,(0,1,2),(1,1,3))``, and 7 9 7 9 are
``(vector,(0,2,1))``.

Source: MPICH, src/pmi/src/pmi_wire.c and src/mpl/src/mpl_rankmap.c; what MPICH 5.0.2 actually sends.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

from .courier_process import ABORTS

_NAME_LENGTH, _KEY_LENGTH, _VALUE_LENGTH = 256, 64, 1024
_LINE_LENGTH = 4096
_WORD = re.compile(r"([A-Za-z0-9_-]+)(?:=((?:[^\s\\]|\\[^\n])*))?")  # after a backslash, a space is part of a word
_LONGEST = 128  # longest repeated sequence of blocks that is tried; more do not fit into a value of PMI

Fence = Callable[[int, dict[str, str]], None]
"""Says that all ranks of this node have come to a barrier, by its number, and what they have put before."""


class NodeEpoch:
    """The ranks of this node in one epoch, as their MPI starts.

    Args:
        nodes: the node of each rank of the epoch, any numbers.
        here: number of ranks on this node.
        fence: called at each barrier; `fenced` must be called when the ranks of all nodes have come.
    """

    def __init__(self, name: str, nodes: Sequence[int], here: int, fence: Fence):
        self.name, self.size, self.mapping = name, len(nodes), mapping(nodes)
        self._here, self._fence = here, fence
        self._known: dict[str, str] = {}
        self._puts: dict[str, str] = {}
        self._waiting: list[Callable[[], None]] = []
        self._barriers = 0
        self._up = 0

    def put(self, key: str, value: str) -> None:
        self._puts[key] = value

    def get(self, key: str) -> str | None:
        """What any rank has put before the last barrier, or a rank of this node since then; None: nothing."""
        return self._puts.get(key, self._known.get(key))

    def enter(self, then: Callable[[], None]) -> None:
        """Note that a rank has come to a barrier. ``then`` is called when all have."""
        self._waiting.append(then)
        if len(self._waiting) == self._here:
            self._barriers += 1
            puts, self._puts = self._puts, {}
            self._fence(self._barriers, puts)

    def fenced(self, number: int, puts: dict[str, str]) -> None:
        """Let the ranks of this node go on, with what the ranks of all nodes have put."""
        if number == self._barriers:
            self._known |= puts
            waiting, self._waiting = self._waiting, []
            for then in waiting:
                then()

    def initialized(self) -> None:
        """Note that a rank of this node has initialized MPI. What was put is forgotten when all have."""
        self._up += 1
        if self._up == self._here:
            self._known, self._puts = {}, {}


class PmiServer:
    """The server of one MPI process, which has the other end of the socketpair.

    Its owner calls `receive` when the socket is readable.
    """

    def __init__(self, sock: socket.socket, epoch: NodeEpoch):
        self.error: str | None = None
        """Why this process cannot go on; its parent then ends it."""
        self._sock, self._epoch = sock, epoch
        self._received = bytearray()
        self._waits = False  # at a barrier
        self.is_open = True
        self.closing: Callable[[], None] = lambda: None
        """Called before the socket is closed."""
        sock.setblocking(False)

    def fileno(self) -> int:
        """The descriptor of the process; -1 if there is nothing to wait for any more."""
        return self._sock.fileno()

    def close(self) -> None:
        """Close the socket. If the process still needs it, it gets an error."""
        if self.is_open:
            self.is_open = False
            self.closing()
        self._sock.close()

    def receive(self) -> None:
        """Answer what has come, without waiting; `error` has what went wrong."""
        try:
            received = self._sock.recv(_LINE_LENGTH)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:  # the process has ended, without reading an answer or not, or has no need of PMI any more
            self.close()
            return
        self._received += received
        try:
            while self.is_open and b"\n" in self._received:
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
        elif self._waits:
            raise PmiError(f"{command} before the last command was answered")
        elif command == "init":
            fits = words.get("pmi_version") == "1"
            self._send(f"response_to_init pmi_version=1 pmi_subversion=1 rc={0 if fits else -1}")
        elif command == "get_maxes":
            self._send(f"maxes rc=0 kvsname_max={_NAME_LENGTH} keylen_max={_KEY_LENGTH} vallen_max={_VALUE_LENGTH}")
        elif command == "get_appnum":
            self._send("appnum rc=0 appnum=0")
        elif command == "get_my_kvsname":
            self._send(f"my_kvsname rc=0 kvsname={self._epoch.name}")
        elif command == "get_universe_size":
            self._send(f"universe_size rc=0 size={self._epoch.size}")
        elif command == "put":
            self._put(self._key(words), words.get("value", ""))
        elif command == "get":
            self._get(self._key(words))
        elif command == "barrier_in":
            self._waits = True
            self._epoch.enter(self._leave_barrier)
        elif command == "finalize":
            self._send("finalize_ack rc=0")
        else:
            raise PmiError(f"an unknown command: {command[:80]}")

    def _key(self, words: dict[str, str]) -> str:
        key = words.get("key", "")
        if words.get("kvsname") != self._epoch.name:
            raise PmiError(f"{words['cmd']} in {words.get('kvsname', '')[:80]!r}, which is not {self._epoch.name!r}")
        if not 0 < len(key) < _KEY_LENGTH:
            raise PmiError(f"a key of {len(key)} characters, where 1 to {_KEY_LENGTH - 1} are allowed")
        return key

    def _put(self, key: str, value: str) -> None:
        if len(value) >= _VALUE_LENGTH:
            raise PmiError(f"a value of {len(value)} characters, where {_VALUE_LENGTH - 1} are allowed")
        self._epoch.put(key, value)
        self._send("put_result rc=0 msg=success")

    def _get(self, key: str) -> None:
        if key == "PMI_process_mapping":
            # If there is no mapping, MPI asks the ranks for the names of their hosts.
            value = self._epoch.mapping if len(self._epoch.mapping) < _VALUE_LENGTH else None
        else:
            value = self._epoch.get(key)
        if value is None:
            self._send("get_result rc=-1 msg=key_not_found value=unknown")
        else:
            self._send(f"get_result rc=0 msg=success value={value}")

    def _leave_barrier(self) -> None:
        self._waits = False
        if self.is_open:
            self._send("barrier_out rc=0")

    def _send(self, words: str) -> None:
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


# The lines of PMI-1, which a server and a client of it read


class PmiError(ValueError):
    """Somebody has sent something that is not PMI-1, or too much of it."""


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


# Which node each rank is on


class Block(NamedTuple):
    """Consecutive nodes with the same number of ranks each."""

    node: int
    nodes: int
    ranks: int


def numbered(nodes: Sequence[int]) -> list[int]:
    """Number nodes from 0 in the order in which they first appear.

    Args:
        nodes: of each rank, any numbers `(ranks)`.
    """
    numbers: dict[int, int] = {}
    return [numbers.setdefault(node, len(numbers)) for node in nodes]


def blocks(nodes: Sequence[int]) -> tuple[Block, ...]:
    """Describe which node each rank is on, by as few blocks as a single pass finds.

    Args:
        nodes: of each rank, any numbers `(ranks)`.
    """
    renumbered = numbered(nodes)
    described: list[Block] = []
    for node, ranks in groupby(renumbered):
        count = len(list(ranks))
        last = described[-1] if described else None
        if last and last.ranks == count and last.node + last.nodes == node:
            described[-1] = Block(last.node, last.nodes + 1, count)
        else:
            described.append(Block(node, 1, count))
    for length, block in enumerate(described[1:_LONGEST], 1):
        if block.node == 0 and nodes_of(described[:length], len(nodes)) == renumbered:
            return tuple(described[:length])
    return tuple(described)


def nodes_of(described: Sequence[Block], size: int) -> list[int]:
    """The node of each rank, as MPI reads these blocks."""
    once = [block.node + i for block in described for i in range(block.nodes) for _ in range(block.ranks)]
    return (once * (size // max(1, len(once)) + 1))[:size]


def mapping(nodes: Sequence[int]) -> str:
    """The node of each rank, as the value of PMI_process_mapping."""
    return f"(vector,{','.join('({},{},{})'.format(*block) for block in blocks(nodes))})"
