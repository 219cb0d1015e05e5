"""Event logs of jobs that never ran, as their ranks would have written them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BEGAN = 1_780_000_000.0
MIB = 1 << 20


@dataclasses.dataclass
class Job:
    """A job whose steps all take the same time, and what each of its ranks says.

    Attributes:
        ranks_per_node: ranks 0 to so many are on the first node that a launch is given, and so on.
        step_s, every: a step, and how many there are from save to save.
        stall_s, protect_s, nbytes: of a save.
        drain_every: saves from drain to drain; 0: none.
    """

    ranks_per_node: int = 2
    step_s: float = 1.0
    every: int = 10
    stall_s: float = 0.5
    protect_s: float = 2.0
    nbytes: int = 256 * MIB
    drain_every: int = 0
    survives: str = "any process; any 1 of 2 nodes"
    redundancy: str = "copy"

    def __post_init__(self) -> None:
        self.lines: dict[str, list[dict[str, Any]]] = {}  # node → what its ranks wrote
        self._generation = 0

    def say(self, event: str, time: float, run: str, rank: int, node: str, **fields: Any) -> None:
        line = {"event": event, "time": round(time, 6), "run": run, "rank": rank, "node": node, **fields}
        self.lines.setdefault(node, []).append(line)

    def launch(self, run: str, began: float, nodes: Sequence[str], from_step: int | None, until: int,
               dies: Mapping[str, float] | None = None, end: str | None = "ended", ready_s: float = 5.0,
               places: Mapping[int, str] | None = None, source: str = "memory") -> float:  # fmt: skip
        """Train to a step, or until its nodes die; gives the Unix seconds of the end.

        Args:
            run, began, nodes: of it.
            from_step, ready_s, places, source: what is restored, so many seconds after the start; from whose memory.
            until: the last step.
            dies: node → when it falls silent, Unix seconds.
            end: how it says that it ends; None: it does not.
        """
        ranks = {rank: node for index, node in enumerate(nodes)
                 for rank in range(index * self.ranks_per_node, (index + 1) * self.ranks_per_node)}  # fmt: skip
        dies = dies or {}
        told = {
            "ranks": len(ranks), "nodes": list(nodes), "redundancy": self.redundancy, "survives": self.survives,
            "transport": "p2p", "job": "run42-1c0d5a3e", "version": "0.1.0", "drain_every": self.drain_every,
        }  # fmt: skip

        def say(event: str, time: float, rank: int, **fields: Any) -> None:
            if time <= dies.get(ranks[rank], time):
                self.say(event, time, run, rank, ranks[rank], **fields)

        for rank in ranks:
            partner = (rank + self.ranks_per_node) % len(ranks)
            say("start", began, rank, **told, partners=[partner])
            say("memory", began + 0.5 * ready_s, rank, nbytes=4 * self.nbytes + (rank % 3) * 3 * MIB)
        now = began
        if from_step is not None:
            now += ready_s
            for rank in ranks:
                place = (places or {}).get(rank, "")
                say("restore", now, rank, step=from_step, seconds=0.6 * ready_s, nbytes=self.nbytes, source=source,
                    **{"from": place or ("" if source != "memory" else ranks[rank])})  # fmt: skip
                say("reprotect", now + 1.0, rank, step=from_step, seconds=1.0)
        last = max(dies.values(), default=float("inf"))
        for step in range((from_step or 0) + self.every, until + 1, self.every):
            now += self.every * self.step_s
            if now > last:
                break
            now = self._save(say, ranks, step, now)
        now = min(now, last)
        if end is not None:
            for rank in ranks:
                say("end", now + self.protect_s + 0.5, rank, state=end)
        return now

    def _save(self, say: Any, ranks: Mapping[int, str], step: int, now: float) -> float:
        self._generation += 1
        protected = self.stall_s + self.protect_s
        committed = protected + 0.01
        for rank in ranks:
            say("save", now + self.stall_s, rank, step=step, seconds=self.stall_s, nbytes=self.nbytes, lazy=False)
            peer = (rank + self.ranks_per_node) % len(ranks)
            say("protect", now + protected, rank, step=step, seconds=self.protect_s, nbytes=self.nbytes, peers=[peer])
            say("commit", now + committed, rank, step=step, seconds=committed, generation=self._generation)
            if self.drain_every and self._generation % self.drain_every == 0:
                took = 6 * self.protect_s
                say("drain", now + committed + took, rank, step=step, seconds=took, nbytes=self.nbytes,
                    path=f"/lustre/me/run42/step-{step:08d}", error=None)  # fmt: skip
        return now + self.stall_s

    def write(self, path: Path) -> list[Path]:
        files = []
        for index, lines in enumerate(self.lines.values()):
            name = path if index == 0 else path.with_name(f"{path.stem}.node{index}{path.suffix}")
            lines.sort(key=lambda line: float(line["time"]))
            name.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
            files.append(name)
        return files


def journal(path: Path, *lines: Mapping[str, Any]) -> Path:
    """Write a journal as `mlflash run` does: events, each with its time."""
    path.write_text("".join(json.dumps({"time": line["time"], **line}) + "\n" for line in lines))
    return path


def eventful(path: Path) -> list[Path]:
    """Three quarters of an hour on four nodes with eight ranks: a node is lost, a process fails, a clean end."""
    survives = "any process; any 1 of 4 nodes; 4 of 6 pairs of nodes; not: n1 and n2 together, n3 and n4 together"
    job = Job(ranks_per_node=2, step_s=0.84, every=25, stall_s=0.11, protect_s=1.6, nbytes=1536 * MIB, drain_every=20,
              survives=survives)  # fmt: skip
    at = BEGAN
    at = job.launch("9f31c2aa", at, ["n1", "n2", "n3", "n4"], None, 4000, end=None,
                    dies={"n3": at + 812.4, "n1": at + 815.1, "n2": at + 815.1, "n4": at + 815.2})  # fmt: skip
    job.say("warning", at - 1.4, "9f31c2aa", 0, "n1", level="WARNING",
            text="step 975 waits for rank 4 and 5 on n3: nothing was heard of them for 2 s")  # fmt: skip
    at = job.launch("c04471be", at + 48.2, ["n1", "n2", "n5", "n4"], 950, 4000, end="failed", ready_s=9.2,
                    places={4: "n4", 5: "n4"}, dies={"n1": at + 1503.0})  # fmt: skip
    job.say("warning", at - 700, "c04471be", 3, "n2", level="WARNING", text="slots were busy: step 1350 was given up")
    for rank in range(8):
        job.say("skip", at - 700, "c04471be", rank, ["n1", "n2", "n5", "n4"][rank // 2], step=1350)
    job.launch("e7d90312", at + 21.0, ["n1", "n2", "n5", "n4"], 2650, 4300, ready_s=6.1)
    return job.write(path)


def large(path: Path, nodes: int = 64, ranks_per_node: int = 8, saves: int = 40) -> list[Path]:
    """Hundreds of ranks, tens of thousands of events; a node is lost after two thirds."""
    job = Job(ranks_per_node, step_s=3.0, every=20, stall_s=0.2, protect_s=8.0, nbytes=4096 * MIB)
    names = [f"node{index:03d}" for index in range(nodes)]
    third = BEGAN + saves * 2 / 3 * 60.2
    dead = dict.fromkeys(names, third + 4.0) | {names[nodes // 2]: third}
    at = job.launch("11111111", BEGAN, names, None, 20 * saves, dies=dead, end=None)
    spare = [*names[: nodes // 2], "spare0", *names[nodes // 2 + 1 :]]
    job.launch("22222222", at + 60, spare, int(saves * 2 / 3) * 20 - 20, 20 * saves,
               places={nodes // 2 * ranks_per_node: "parity"})  # fmt: skip
    return job.write(path)
