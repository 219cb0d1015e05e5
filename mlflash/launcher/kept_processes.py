"""What the agent of a host says to who decides of a training whose processes stay (`member_service`), and hears."""

from __future__ import annotations

import json
import re
import select
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..wireup.frames import BadFrame, Frames, Outbox
from ..wireup.launcher_variables import KEPT, SEED

LARGEST_NBYTES = 1 << 16
"""Of a message, either way."""
BEATS = 8
"""Signs of life, either way, in the time in which one is lost without."""
_CONNECT_S = 10.0
_LEASE = 0.8  # of that time; then what is here is killed, before others take its ranks


class KeptProcesses:
    """The connection. Close it.

    Args:
        told: ``address`` of the service, ``token``, ``host`` (the name of this one), and ``lost_s`` (seconds without a
            sign of life after which one is lost).
    """

    def __init__(self, told: dict[str, Any]):
        self._told = told
        self._sock = socket.create_connection(told["address"], _CONNECT_S)
        self._sock.setblocking(False)
        self._frames, self._out = Frames(LARGEST_NBYTES), Outbox(self._sock)
        self._out.send({"token": told["token"], "host": told["host"]})
        self._beat_s = told["lost_s"] / BEATS
        self._heard = time.monotonic()
        self._next_beat = self._heard
        self._stopped: dict[int, float] = {}  # since when
        self._has_ended = False

    def fileno(self) -> int:
        """What to wait for."""
        return self._sock.fileno()

    @property
    def events(self) -> int:
        """What of select.poll to wait for."""
        return select.POLLIN | (select.POLLOUT if self._out.unsent else 0)

    @property
    def until(self) -> float:
        """When there is something to do, by time.monotonic."""
        return self._next_beat

    @property
    def is_lost(self) -> bool:
        """Whether nothing was heard for so long that others may have got the ranks of this host."""
        return self._has_ended or time.monotonic() - self._heard > _LEASE * self._told["lost_s"]

    def environment(self, name: str, size: int) -> dict[str, str]:
        """What a process gets, to find who decides.

        Args:
            name: of the process.
            size: how many ranks there are.
        """
        what = {"address": self._told["address"], "token": self._told["token"], "name": name, "size": size}
        return {KEPT: json.dumps(what)}

    def ended(self, name: str, code: int) -> None:
        """Say that a process has ended, and how, as a shell says it."""
        self._out.send({"ended": name, "code": code})

    def orders(self, is_ready: bool) -> Iterator[dict[str, Any]]:
        """Take what is there of orders, and give a sign of life when it is time.

        Args:
            is_ready: whether there is something to read, or room to write.
        """
        if time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + self._beat_s
            self._out.send({})
        if not is_ready:
            return
        self._out.send_rest()
        try:
            received = self._sock.recv(1 << 16)
            self._frames.add(received)
            self._has_ended = not received
            self._heard = time.monotonic()
            yield from self._frames.messages()
        except BlockingIOError:
            return
        except (OSError, BadFrame):
            self._has_ended = True

    def stopped(self, pids: Iterable[int]) -> list[int]:
        """Which processes have been stopped (SIGSTOP) for so long that they count as lost."""
        now, since = time.monotonic(), self._stopped
        self._stopped = {pid: since.get(pid, now) for pid in pids if _is_stopped(pid)}
        return [pid for pid, start in self._stopped.items() if now - start > self._told["lost_s"]]

    def close(self) -> None:
        """End the connection."""
        self._sock.close()


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped, or that which it has forked to train in its place (`in_place.forked_spare`)."""
    try:
        _, name, rest = re.split(r" \(|\) ", Path(f"/proc/{pid}/stat").read_text(), maxsplit=2)
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split() if name == SEED else []
    except (OSError, ValueError):
        return False
    return rest[0] == "T" or any(_is_stopped(int(child)) for child in children)  # not by a debugger
