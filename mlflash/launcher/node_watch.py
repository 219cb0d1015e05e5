"""What the nodes of a job say of themselves when they are looked at, and what that means for a run.

Whatever goes wrong with a look costs time, never the job: what a node does not say is not known, and no more.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import LaunchFailed
from ..telemetry.heartbeat import SHOW_STACKS
from ..telemetry.heartbeat_format import has_own_courier, is_without_courier, why_unread
from ..version import __version__
from .downtime import Heartbeat
from .launch_system import Launcher
from .node_assignment import NodeAssignment

log = logging.getLogger("mlflash")

LOOK_S = 20.0
"""Deadline of a look at the nodes."""
_BEHIND_S = 8.0  # a node that answers so much later than most others is as one that does not
_STACKS_S = 1.0
_LOOKS = 10_000  # until they are made half as often
_STUCK_S = 3 * LOOK_S  # for a look with all that it waits for


def ask(launcher: Launcher, hosts: Sequence[str], *words: str) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Ask nodes what they say of themselves (see `node_look`).

    Args:
        launcher: reaches them.
        hosts: which.
        words: memory, job and so on, as `node_look` takes them.

    Returns:
        What each node says; those that say nothing, or nonsense, are left out. And, in words, what cannot be read.

    Raises:
        LaunchFailed: nobody can be asked.
    """
    argv = [sys.executable, "-m", "mlflash.launcher.node_status", *words]
    said: dict[str, dict[str, Any]] = {}
    unread: list[str] = []
    for host, text in launcher.on_each(hosts, argv, LOOK_S, _BEHIND_S).items():
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if wrong := _why_unread(document, len(words) > 1):
            unread.append(f"what {host} says {wrong}")
            continue
        unread += [f"{host}: {one}" for one in document.get("unread", [])]
        said[host] = document
    return said, unread


def _why_unread(document: Any, of_job: bool) -> str:
    """Why what a node says cannot be read; "" where it can. Its mlflash may be another version."""
    kinds: dict[str, Any] = {"jobs": list}
    if of_job:
        kinds = {"free": int, "gpus": int | None, "interface": bool | None, "heartbeats": list, "steps": list}
    if not isinstance(document, dict):
        return "cannot be read: it is no look at a node"
    if wrong := [name for name, kind in kinds.items() if not isinstance(document.get(name, ...), kind)]:
        version = document.get("version", "that does not say which it is")
        return f"cannot be read: written by version {version} (this is {__version__}; {', '.join(wrong[:3])})"
    found = (why_unread(heartbeat) for heartbeat in document.get("heartbeats", []))
    return next((wrong for wrong in found if wrong), "")


class Looks:
    """The last look at each node.

    Args:
        launcher: reaches the nodes.
        memory, job: where ranks keep their slots.
        gpus, interface: what a node must have to train, see `Orders`.
    """

    def __init__(self, launcher: Launcher, memory: str, job: str, gpus: int, interface: str):
        self._launcher, self._gpus, self._interface = launcher, gpus, interface
        self._words = [memory, job, *([interface] if interface else [])]
        self._said: dict[str, dict[str, Any]] = {}
        self._warned: set[str] = set()
        self._asked = 0  # looks so far
        self._last: dict[str, int] = {}  # which look was the last at each node: they may overlap

    def look(self, hosts: Sequence[str]) -> None:
        """Ask nodes how they are; of those that do not answer nothing is known. What a later look found stays."""
        self._asked += 1
        this = self._asked
        try:
            told, unread = ask(self._launcher, hosts, *self._words)
        except LaunchFailed as error:
            told, unread = {}, [f"the nodes cannot be looked at: {error}"]
        except Exception as error:  # a mistake of ours must not be the end of the job, and not be silent
            told, unread = {}, [f"the nodes cannot be looked at: {error!r}"]
        unread += [
            f"{host}: the courier of rank {one['rank']} (pid {one['courier_pid']}) died, and its trainer goes on"
            for host, document in told.items() for one in document["heartbeats"] if is_without_courier(one)
        ]  # fmt: skip
        for text in unread:
            if text not in self._warned:
                log.warning("%s", text)
        self._warned = {*unread}
        said = dict(self._said)
        for host in (host for host in hosts if self._last.get(host, 0) < this):
            self._last[host] = this
            said.pop(host, None)
            if host in told:
                said[host] = told[host]
        self._said = said

    def every(self, seconds: float) -> float:
        """Say how long to wait for the next look, in seconds: twice as long after each 10,000 looks.

        A look is a step of a Slurm job, which may have 40,000 (MaxStepCount): one each 15 s are these after a week, and
        no rank could be started any more. So they last for 26 days.

        Args:
            seconds: between two looks at first.
        """
        return seconds * 2.0 ** (self._asked // _LOOKS)

    def silent(self, hosts: Sequence[str]) -> list[str]:
        """Which nodes did not answer."""
        return [host for host in hosts if host not in self._said]

    def wrong_with(self, host: str) -> str:
        """Why a node is not fit to train; "" where it is."""
        said = self._said.get(host)
        if said is None:
            return "it does not answer"
        if self._gpus and (said["gpus"] or 0) < self._gpus:
            return f"{said['gpus'] or 0} of {self._gpus} GPUs answer"
        return f"{self._interface} is down" if said["interface"] is False else ""

    def holding(self, hosts: Sequence[str]) -> list[str]:
        """Which nodes hold checkpoints in memory."""
        return [host for host in hosts if host in self._said and self._said[host]["steps"]]

    def newest(self) -> int | None:
        """The newest step that was committed or restored, as far as ranks have said so."""
        steps = [heartbeat[what] for said in self._said.values() for heartbeat in said["heartbeats"]
                 for what in ("committed", "restored") if heartbeat[what] is not None]  # fmt: skip
        return max(steps, default=None)

    def heartbeats(self, run: str) -> list[Heartbeat]:
        """What the ranks of a start have said of themselves."""
        return [
            heartbeat for said in self._said.values() for heartbeat in said["heartbeats"] if heartbeat["run"] == run
        ]

    def show_stacks(self, hosts: Sequence[str], run: str) -> None:
        """Have every rank of a start print where each of its threads is, and its courier the same."""
        for host in hosts:
            heartbeats = self._said[host]["heartbeats"] if host in self._said else []
            mine = [heartbeat for heartbeat in heartbeats if heartbeat["run"] == run]
            pids = [str(one["pid"]) for one in mine if one["alive"]]
            pids += [str(one["courier_pid"]) for one in mine if has_own_courier(one) and one["courier_alive"]]
            if pids:
                try:
                    self._launcher.on_each([host], ["kill", f"-{SHOW_STACKS}", *pids], LOOK_S)
                except LaunchFailed as error:
                    log.warning("the ranks of %s cannot be asked where they are: %s", host, error)
        time.sleep(_STACKS_S)


class Beside:
    """A look that goes on beside what its caller does.

    Its thread is a daemon: one that hangs must not keep `mlflash run` from ending.
    """

    def __init__(self, looks: Looks, hosts: Sequence[str]):
        self._begun, self._said = time.monotonic(), False
        self._thread = threading.Thread(target=looks.look, args=(hosts,), name="mlflash-look", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        """Whether it has ended. Says once that it does not."""
        if not self._thread.is_alive():
            return True
        if not self._said and time.monotonic() - self._begun > _STUCK_S:
            self._said = True
            log.warning("a look at the nodes has not ended in %g s: until it does, nobody sees whether ranks hang or "
                        "nodes are silent", _STUCK_S)  # fmt: skip
        return False


class Watch:
    """What the looks at one run that goes on say of it, one after the other.

    Args:
        looks: at the nodes.
        run: names the start.
        seats: its nodes.
        patience_s: seconds without a sign of life after which it hangs; 0: it never does.
    """

    def __init__(self, looks: Looks, run: str, seats: NodeAssignment, patience_s: float):
        self._looks, self._run, self._seats, self._patience_s = looks, run, seats, patience_s
        self._begun = time.time()
        self._seen = 0  # ranks that have been seen at once
        self._suspects = ""

    def hangs(self) -> bool:
        """Whether no trainer got on for too long: that couriers get on is no progress of the training."""
        last_beat = max(
            (float(heartbeat["beat"]) for heartbeat in self._looks.heartbeats(self._run)), default=self._begun
        )
        return self._patience_s > 0 and time.time() - last_beat > self._patience_s

    def dead(self) -> str:
        """Which nodes or ranks are gone, in words; "" where none is. To be asked once after each look.

        Twice the same: the launcher does not find out by itself, or survivors wait for the dead for ever.
        """
        before, self._suspects = self._suspects, self._missing()
        return before if before == self._suspects else ""

    def not_ended(self) -> str:
        """Which ranks have not said that they came to their end, in words; "" where all have, or none ever spoke."""
        heartbeats = self._looks.heartbeats(self._run)
        if not heartbeats and not self._looks.silent(self._seats.hosts):
            log.warning("no rank made a Checkpointer: the exit code is all there is to go by")
            return ""
        missing = self._others(int(heartbeat["rank"]) for heartbeat in heartbeats if heartbeat["state"] == "ended")
        return f"the launcher returned 0, but ranks {missing[:8]} did not come to their end" if missing else ""

    def _missing(self) -> str:
        if silent := self._looks.silent(self._seats.hosts):
            return f"{', '.join(silent)} does not answer"
        heartbeats = self._looks.heartbeats(self._run)
        gone = [
            int(heartbeat["rank"])
            for heartbeat in heartbeats
            if heartbeat["state"] == "started" and not heartbeat["alive"]
        ]
        if self._seen > len(heartbeats):  # a node came up again, with nothing in its memory
            gone += self._others(int(heartbeat["rank"]) for heartbeat in heartbeats)
        self._seen = max(self._seen, len(heartbeats))
        return f"ranks {gone[:8]} died" if gone else ""

    def _others(self, ranks: Iterable[int]) -> list[int]:
        return sorted({*range(self._seats.ranks)} - {*ranks})
