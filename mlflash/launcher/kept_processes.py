"""The connection of a host's agent to the service that decides which processes have ranks (`member_service`)."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..memory.courier_process import read_stat
from ..wireup.frames import BadFrame, Frames, Outbox
from ..wireup.launcher_variables import KEPT, SEED

LARGEST_NBYTES = 1 << 16
"""Largest size of a message, in both directions."""
BEATS = 8
"""Signs of life, in both directions, during the time after which a silent side counts as lost."""
_CONNECT_S = 10.0
_LEASE = 0.8  # after this share of that time the agent kills its processes, before others take their ranks


class KeptProcesses:
    """The connection. Close it.

    Args:
        told: ``address`` of the service, ``token``, ``host`` (the name of this host), and ``lost_s`` (seconds without a
            sign of life after which a side counts as lost).
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
        self._stopped: dict[int, float] = {}  # pid → since when
        self._has_ended = False

    def fileno(self) -> int:
        """The descriptor to wait for."""
        return self._sock.fileno()

    @property
    def events(self) -> int:
        """The events of select.poll to wait for."""
        return select.POLLIN | (select.POLLOUT if self._out.unsent else 0)

    @property
    def until(self) -> float:
        """The next time when there is something to do, by time.monotonic."""
        return self._next_beat

    @property
    def is_lost(self) -> bool:
        """Whether nothing was heard for so long that other processes may have the ranks of this host."""
        return self._has_ended or time.monotonic() - self._heard > _LEASE * self._told["lost_s"]

    def environment(self, name: str, size: int) -> dict[str, str]:
        """The environment variable that tells a process how to reach the service.

        Args:
            name: of the process.
            size: number of ranks.
        """
        what = {"address": self._told["address"], "token": self._told["token"], "name": name, "size": size}
        return {KEPT: json.dumps(what)}

    def ended(self, name: str, code: int) -> None:
        """Report that a process has ended, with its exit code as in a shell."""
        self._out.send({"ended": name, "code": code})

    def orders(self, is_ready: bool) -> Iterator[dict[str, Any]]:
        """Yield the orders that have arrived, and send a sign of life when it is time.

        Args:
            is_ready: whether there is something to read or room to write.
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
        """The processes that have been stopped (SIGSTOP) for so long that they count as lost."""
        now, since = time.monotonic(), self._stopped
        self._stopped = {pid: since.get(pid, now) for pid in pids if _is_stopped(pid)}
        return [pid for pid, start in self._stopped.items() if now - start > self._told["lost_s"]]

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped, or the child that it has forked to train in its place (`in_place.forked_spare`)."""
    try:
        stat = read_stat(pid)
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split() if stat.name == SEED else []
    except OSError:
        return False
    return stat.state == "T" or any(_is_stopped(int(child)) for child in children)  # "t" would be a debugger
