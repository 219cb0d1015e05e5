"""The status of the nodes of a job (a "look" at them), and what it means for a run.

A failure of a look costs time, but never the job: what a node does not report is only unknown.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..telemetry.heartbeat import has_own_courier, is_without_courier, why_unread
from ..version import __version__
from .agents import Agents

log = logging.getLogger("mlflash")

Heartbeat = dict[str, Any]  # what a rank reported last, see `mlflash.telemetry.heartbeat`
LOOK_S = 20.0  # deadline of a look at the nodes, in seconds
_BEHIND_S = 8.0  # a node that answers this much later than most others counts as silent
_STACKS_S = 1.0


def unrestorable(heartbeats: Sequence[Heartbeat]) -> str:
    """Why a start could restore none of the existing checkpoints, as its ranks reported; "" if it could."""
    return next((str(heartbeat["unrestorable"]) for heartbeat in heartbeats if heartbeat.get("unrestorable")), "")


def certified(heartbeats: Sequence[Heartbeat]) -> int | None:
    """The newest certified step that the ranks of a start reported; None if there is none."""
    return max((int(heartbeat["certified"]) for heartbeat in heartbeats if "certified" in heartbeat), default=None)


def is_suspect(heartbeats: Sequence[Heartbeat]) -> bool:
    """Whether the values of any rank were suspect in the last save of a start."""
    return any("suspect" in heartbeat and heartbeat["suspect"] >= (heartbeat["committed"] or 0)
               for heartbeat in heartbeats)  # fmt: skip


def recovery(heartbeats: Sequence[Heartbeat], started: float, before: Sequence[Heartbeat], noticed: float | None
             ) -> dict[str, Any]:  # fmt: skip
    """What a start restored, and how long the recovery from the failure before it took, for the log of the run.

    Args:
        before: the last heartbeats of the start that failed.
        noticed: when the failure was noticed and the remaining ranks were ended, Unix time; None: nothing had failed.
    """
    facts: dict[str, Any] = {what: next((heartbeat[what] for heartbeat in heartbeats if heartbeat[what]), None)
                             for what in ("restored", "source")}  # fmt: skip
    times = {what: [heartbeat["times"][what] for heartbeat in heartbeats if what in heartbeat["times"]]
             for what in ("made", "restored", "saved")}  # fmt: skip
    if noticed is None or not all(times.values()):
        return facts
    made, restored, saved = (max(times[what]) for what in ("made", "restored", "saved"))
    steps = [heartbeat["saved"] for heartbeat in before if heartbeat["saved"] is not None]
    if steps and facts["restored"] is not None:
        facts["steps_lost"] = max(steps) - facts["restored"]
    last_beat = max((heartbeat["beat"] for heartbeat in before), default=noticed)
    marks = (last_beat, noticed, started, made, restored, saved)
    spans = [round(after - first, 3) for first, after in itertools.pairwise(marks)]
    names = ("detect_s", "look_s", "launch_s", "restore_s", "first_step_s")
    return facts | {"outage_s": round(saved - last_beat, 3)} | dict(zip(names, spans, strict=True))


def ask(agents: Agents, hosts: Sequence[str], what: str, **fields: Any) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Ask nodes for their status or jobs (see `tools.status_process`).

    Return the answer of each node that answers as it should, and messages about what cannot be read.
    """
    answers: dict[str, dict[str, Any]] = {}
    unread: list[str] = []
    for host, document in agents.ask(hosts, what, LOOK_S, _BEHIND_S, **fields).items():
        if wrong := _why_unread(document, what == "status"):
            unread.append(f"the status of {host} {wrong}")
            continue
        unread += [f"{host}: {reason}" for reason in document.get("unread", [])]
        answers[host] = document
    return answers, unread


def _why_unread(document: Any, of_job: bool) -> str:
    """Why the status of a node cannot be read; "" if it can. That node may have another version of mlflash."""
    kinds: dict[str, Any] = {"jobs": list}
    if of_job:
        kinds = {"free": int, "memory_error": str, "gpus": int, "gpu_error": str, "interface": bool | None,
                 "heartbeats": list, "steps": list}  # fmt: skip
    if not isinstance(document, dict):
        return "cannot be read: it is not what mlflash.tools.status_process says"
    if wrong := [name for name, kind in kinds.items() if not isinstance(document.get(name, ...), kind)]:
        version = document.get("version", "unknown")
        return f"cannot be read: written by version {version} (this is {__version__}; {', '.join(wrong[:3])})"
    reasons = (why_unread(heartbeat) for heartbeat in document.get("heartbeats", []))
    return next((wrong for wrong in reasons if wrong), "")


class Looks:
    """The last look at each node."""

    def __init__(self, agents: Agents, memory: str, job: str, gpus: int, interface: str):
        self._agents, self._gpus, self._interface = agents, gpus, interface
        self._of_job: dict[str, Any] = {"memory": memory, "job": job}
        self._status: dict[str, dict[str, Any]] = {}
        self._warned: set[str] = set()

    def clean(self, hosts: Sequence[str]) -> None:
        """Delete what the job holds on nodes, as soon as its couriers there have ended."""
        cleaned = self._agents.ask(hosts, "clean", LOOK_S, **self._of_job)
        if left := [host for host in hosts if host not in cleaned]:
            log.warning("the slots stay in the memory of %s, because cleaning it failed", ", ".join(left))

    def look(self, hosts: Sequence[str]) -> None:
        """Ask nodes for their status. Forget nodes that do not answer."""
        self.take(hosts, *self.ask(hosts))

    def ask(self, hosts: Sequence[str]) -> tuple[dict[str, dict[str, Any]], list[str]]:
        """Ask nodes for their status, on any thread. `take` takes what this returns."""
        try:
            return ask(self._agents, hosts, "status", **self._of_job, interface=self._interface)
        except Exception as error:  # a bug of mlflash must not end the job, and must not be silent
            return {}, [f"the nodes cannot be asked for their status: {error!r}"]

    def take(self, hosts: Sequence[str], status: Mapping[str, dict[str, Any]], unread: Sequence[str]) -> None:
        unread = [*unread, *(
            f"{host}: the courier of rank {beat['rank']} (pid {beat['courier_pid']}) died, and its trainer goes on"
            for host, document in status.items() for beat in document["heartbeats"] if is_without_courier(beat)
        )]  # fmt: skip
        for text in unread:
            if text not in self._warned:
                log.warning("%s", text)
        self._warned = {*unread}
        self._status = {host: document for host, document in self._status.items() if host not in hosts} | dict(status)

    def silent(self, hosts: Sequence[str]) -> list[str]:
        return [host for host in hosts if host not in self._status]

    def wrong_with(self, host: str) -> str:
        status = self._status.get(host)
        if status is None:
            return "it does not answer"
        if status["memory_error"]:
            return str(status["memory_error"])
        if status["gpus"] < self._gpus:
            why = f" ({status['gpu_error']})" if status["gpu_error"] else ""
            return f"{status['gpus']} of {self._gpus} GPUs answer{why}"
        return f"{self._interface} is down" if status["interface"] is False else ""

    def holding(self, hosts: Sequence[str]) -> list[str]:
        return [host for host in hosts if host in self._status and self._status[host]["steps"]]

    def newest(self) -> int | None:
        """The newest step that any rank reported as committed or restored; None if there is none."""
        steps = [heartbeat[what] for document in self._status.values() for heartbeat in document["heartbeats"]
                 for what in ("committed", "restored") if heartbeat[what] is not None]  # fmt: skip
        return max(steps, default=None)

    def heartbeats(self, run: str) -> list[Heartbeat]:
        return [beat for document in self._status.values() for beat in document["heartbeats"] if beat["run"] == run]

    def show_stacks(self, hosts: Sequence[str], run: str) -> None:
        """Make every rank of a start, and its courier, print the stacks of their threads."""
        for host in [host for host in hosts if host in self._status]:
            beats = [beat for beat in self._status[host]["heartbeats"] if beat["run"] == run]
            pids = [beat["pid"] for beat in beats if beat["alive"]]
            pids += [beat["courier_pid"] for beat in beats if has_own_courier(beat) and beat["courier_alive"]]
            if pids := [pid for pid in pids if pid]:  # 0: of another pid namespace
                self._agents.ask([host], "stacks", LOOK_S, pids=pids)
        time.sleep(_STACKS_S)


class Watch:
    """What consecutive looks say about one run; after ``patience_s`` without progress it hangs; 0: it never does."""

    def __init__(self, looks: Looks, run: str, hosts: Sequence[str], ranks: int, patience_s: float):
        self._looks, self.run, self._hosts, self._ranks, self._patience_s = looks, run, hosts, ranks, patience_s
        self._beats: dict[int, float] = {}  # the last beat of each rank, by the clock of its node
        self._progress = time.monotonic()  # when a look last showed a new one
        self._seen = 0  # the largest number of ranks seen in one look
        self._suspects = ""

    def hangs(self) -> bool:
        """Whether no trainer has made progress for too long. To be called after each look.

        Progress of couriers does not count. Clocks of nodes may differ: it only matters whether a beat is another one
        than in the look before. As long as no rank that was heard of is heard again, nothing is known.
        """
        beats = {int(heartbeat["rank"]): float(heartbeat["beat"]) for heartbeat in self._looks.heartbeats(self.run)}
        if any(self._beats.get(rank) != beat for rank, beat in beats.items()):
            self._beats |= beats
            self._progress = time.monotonic()
        is_known = bool(beats) or not self._beats
        return is_known and 0 < self._patience_s < time.monotonic() - self._progress

    def dead(self) -> str:
        """The nodes or ranks that are gone, in words; "" if there are none. To be called once after each look.

        Only the same answer twice counts: then the launcher does not notice it, or survivors wait forever for the dead.
        """
        before, self._suspects = self._suspects, self._missing()
        return before if before == self._suspects else ""

    def not_ended(self) -> str:
        """The ranks that have not reported that they finished, in words; "" if all have, or if none ever reported."""
        heartbeats = self._looks.heartbeats(self.run)
        if not heartbeats and not self._looks.silent(self._hosts):
            log.warning("no rank made a Checkpointer: mlflash run judges this run by its exit code only")
            return ""
        missing = self._others(int(heartbeat["rank"]) for heartbeat in heartbeats if heartbeat["state"] == "ended")
        return f"the launcher returned 0, but ranks {missing[:8]} did not come to their end" if missing else ""

    def _missing(self) -> str:
        if silent := self._looks.silent(self._hosts):
            return f"{', '.join(silent)} does not answer"
        heartbeats = self._looks.heartbeats(self.run)
        gone = [int(beat["rank"]) for beat in heartbeats if beat["state"] == "started" and not beat["alive"]]
        if self._seen > len(heartbeats):  # a node restarted, and its memory is empty
            gone += self._others(int(heartbeat["rank"]) for heartbeat in heartbeats)
        self._seen = max(self._seen, len(heartbeats))
        return f"ranks {gone[:8]} died" if gone else ""

    def _others(self, ranks: Iterable[int]) -> list[int]:
        return sorted({*range(self._ranks)} - {*ranks})
