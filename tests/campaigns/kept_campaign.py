"""Lose ranks and nodes of a training that is kept alive, again and again, and hold each recovery to what is promised.

    PYTHONPATH=tests/support:tests python tests/campaigns/kept_campaign.py --faults 200 --seed 1 --out faults.jsonl

Four nodes train and a fifth has a process that waits; a node that has crashed is booted again, but under Slurm, whose
jobs do not get it back: there, the next training begins when this one has ended, and the node that has `mlflash run`
does not crash. After each fault: the
others are the same processes; the state that all go on from has, on each rank, the bits that it has at that step in a
training that nothing happens to; and no committed step but the last few is lost. Where all are started again instead,
that is counted, with the reason, and another training begins. Needs root.

With --elastic no node waits: fewer ranks train on, and all when the node or the process is back. Then the bits are
compared when a training has ended, with trainings that had these numbers of ranks and to which nothing happened.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cluster.nodes import Nodes
from cluster.slurm.daemons import Slurm
from kept_run import MLFLASH, TRAINER, Kept, KeptJob, KeptRun, number_inside, uninterrupted
from waiting import take, until

PLACES = ("fetch", "forward", "backward", "optimizer", "save", "stage.begun", "stage.copied")
POINTS = ("round.left", "round.seated", "round.couriers", "round.open", "round.groups", "round.restored")
KINDS = {"kill": 6, "kill at a place": 4, "stop": 2, "crash": 4, "power cut": 3, "two kills": 1, "kill, and another in "
         "recovery": 2, "crash and kill": 1, "hang": 1, "move": 1}  # fmt: skip
HANG_S = 3
CRASHES = ("crash", "power cut", "crash and kill")
NOT_REACHED_S = 20.0
RECOVERS_S = 60.0
SLOW_S = 5.0  # to leave a step, or to wait for others
NEVER = float("inf")
LOOK_S = 0.1  # who is looked at needs the cores
PARTS = ("detect", "leave", "wait", "couriers", "checkpointer", "groups", "restore", "step")
OFTEN = 5  # recoveries of a process, from which on it is looked at for leaks


class Job:
    """One training that is attacked until it ends, or is started again.

    Args:
        folder: for what it leaves, where something is wrong.
        ranks: how many train; one more node waits.
        last: the last step.
        expected: the digest of each rank, step for step, in a training that nothing happens to.
        dice: decide what happens.
        kinds: of faults, with their weights.
        model: see `kept_trainer`.
        with_slurm: whether it is a job of Slurm.
        pause: in each step, seconds.
        light: saves between two whole ones that are light.
        more: options of the training; see `kept_trainer`.
        victim: the rank that is lost first, always; None: any.
        elastic: whether no node waits, and fewer ranks train on. ``expected`` is empty then.
    """

    def __init__(self, folder: Path, ranks: int, last: int, expected: list[dict[int, str]], dice: random.Random,
                 kinds: dict[str, int], model: str, with_slurm: bool, pause: float, victim: int | None,
                 elastic: bool, light: int, more: dict[str, Any]):  # fmt: skip
        self._folder, self._ranks, self._last, self._expected = folder, ranks, last, expected
        self._dice, self._kinds = dice, kinds
        self._nodes = Nodes([f"host{number}" for number in range(1, ranks + 2 - elastic)])
        self._slurm = Slurm(self._nodes) if with_slurm else None
        training = {"attacked": True, "digests": "steps" if elastic else "entries", "pause": pause, "kind": model,
                    "stops": elastic, "settings": {"job": "kept", "light": light}, **more}  # fmt: skip
        options = ["--hang-after", str(HANG_S)] + (["--min-ranks", "1"] if elastic else [])
        start = functools.partial(KeptJob, self._slurm) if self._slurm else functools.partial(KeptRun, self._nodes)
        self._model, self._optimizer, self._elastic, self._grown = model, more["optimizer"], elastic, 0.0
        self._run: Kept = start(ranks, last, more=options, **training)
        self._dead: list[str] = []
        self._victim = victim

    def attack(self, most: int) -> Iterator[dict[str, Any]]:
        """Attack it; gives what came of each fault."""
        try:
            self._run.wait_for(20)
            for _ in range(most):
                if not self._is_whole():
                    break
                if self._elastic and (event := self._growth()):
                    yield event
                take(self._dice.uniform(0.1, 1.0))
                if int(self._run.last_step(0)[1]) > self._last - 50:
                    break
                if result := self._lose():
                    yield result
                if {"again", "wrong"} & {*result}:
                    return
            else:
                if not self._elastic:
                    return
                self._last = self._run.stop()  # only then bits are compared
            if self._run.wait(self._last / 5 + 90):
                yield {"kind": "the end", "wrong": "it did not end well"}
            elif wrong := self._wrong_bits():
                yield {"kind": "the end", "wrong": wrong}
        except AssertionError as error:
            yield {"kind": "?", "wrong": str(error)[:2000]}

    def close(self, keep: str = "") -> None:
        """End it; what it has printed and written is kept under a name."""
        self._run.close()
        if keep:
            shutil.copytree(self._run.out, self._folder / keep, dirs_exist_ok=True)
        if self._slurm is not None:
            self._slurm.close()
        self._nodes.close()

    # Faults

    def _is_whole(self) -> bool:
        """Wait until all nodes are there, and a process waits; false where that will not be any more."""
        if self._slurm is not None and self._dead:
            return False
        for host in self._dead:
            self._nodes.boot(host)
        self._dead = []
        is_whole = self._is_large if self._elastic else self._waiting
        until(lambda: self._run.has_ended or is_whole(), lambda: f"all:\n{self._run.log()}", RECOVERS_S, LOOK_S)
        return not self._run.has_ended

    def _is_large(self) -> bool:
        """Whether all ranks train."""
        events = self._run.events("recovered") + self._run.events("moved")
        newest = max(events, key=lambda event: event["time"], default={"ranks": self._ranks, "time": 0.0})
        since = newest["time"]
        return newest["ranks"] == self._ranks and all(
            float(self._run.last_step(rank)[0]) > since for rank in range(self._ranks)
        )

    def _growth(self) -> dict[str, Any]:
        """What came of the last time that ranks came; empty: none have since this was asked."""
        events = [event for event in self._run.events("moved") if event["time"] > self._grown]
        if not events:
            return {}
        self._grown = events[-1]["time"]
        took = sum(event["seconds"] for event in events)
        return {"kind": "grow", "fault": f"grow to {events[-1]['ranks']}", "seconds": took, **events[-1]["times"],
                "steps lost": 0, "late": []}  # fmt: skip

    def _wrong_bits(self) -> str:
        """What is wrong at the end of a training; "": nothing."""
        ends = [end["digest"] for end in self._run.ends()]
        if not self._elastic:
            return "" if ends == [digests[self._last] for digests in self._expected] else "other bits at the end"
        changes = sorted(self._run.events("recovered") + self._run.events("moved"), key=lambda event: event["time"])
        parts, ranks = list[tuple[int, int]](), self._ranks
        for event in changes:
            if event["ranks"] != ranks:
                parts.append((ranks, event["step"]))
                ranks = event["ranks"]
        parts.append((ranks, self._last))
        out = self._folder / f"{self._run.out.parent.name}-uninterrupted"
        out.mkdir()
        expected = uninterrupted(out, *parts, kind=self._model, optimizer=self._optimizer)
        shutil.rmtree(out)
        return "" if ends[:ranks] == expected else f"other bits at the end, after {parts}"

    def _waiting(self) -> bool:
        ranks = {self._run.process_of(rank) for rank in range(self._ranks)}
        if None in ranks or not all(self._nodes.running(host, str(TRAINER)) for host in self._nodes.names):
            return False
        for host in self._nodes.names:
            for pid in {*self._nodes.running(host, str(TRAINER))} - ranks:
                if (self._run.out / f"waits-{host}-{number_inside(pid)}").exists():
                    return True
        return False

    def _lose(self) -> dict[str, Any]:
        """One fault, and what came of it; nothing, where its place was not reached."""
        run = self._run
        (kind,) = self._dice.choices([*self._kinds], [*self._kinds.values()])
        first, second = self._dice.sample(range(self._ranks), 2)
        if self._victim is not None:
            first, second = self._victim, (self._victim + 1) % self._ranks
        if kind in (*CRASHES, "move") and self._slurm and self._run.host_of(first) == self._nodes.names[0]:
            first, second = second, first  # `mlflash run` is there: the job is requeued
        before = {rank: run.last_step(rank) for rank in range(self._ranks)}
        word = kind
        if kind == "kill at a place":
            word = f"kill: {(place := self._dice.choice(PLACES))}"
            if not (start := self._let_die(first, place)):
                return {}
            lost = {first}
        else:
            start, lost = time.time(), {first}
            if kind == "kill, and another in recovery":
                word = f"kill, then {(point := self._dice.choice(POINTS))}"
                (run.out / "die").write_text(f"{second} {point}")
            if kind == "move":
                self._move(first)
            elif kind == "hang":
                (run.out / "die").write_text(f"{first} hang")
            elif kind in CRASHES:
                host = run.host_of(first)
                self._dead.append(host)
                self._nodes.crash(host, kind == "power cut")
            else:
                self._signal(first, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
            if kind in ("two kills", "crash and kill"):
                self._signal(second, signal.SIGKILL)
                lost |= {second}
        event = "moved" if kind == "move" else "recovered"
        result = {"kind": kind, "fault": word, "at": start, "ranks": sorted(lost),
                  **self._outcome(start, lost, before, event)}  # fmt: skip
        if kind == "hang":
            self._death()
        if kind == "move":  # its node is maintained
            self._nodes.crash(self._dead[-1])
            if result.get("steps lost", 0) > 1:  # the one that runs, which ends it
                result["wrong"] = f"{result['steps lost']} steps were lost"
        if kind == "kill, and another in recovery":
            result["second"] = bool(self._death())
        return result

    def _move(self, rank: int) -> None:
        """Let a rank leave its node, at any moment."""
        self._dead.append(host := self._run.host_of(rank))
        self._nodes.run(host, MLFLASH, "move", "--job", "kept")

    def _let_die(self, rank: int, place: str) -> float:
        """Have a rank killed at a place; when that was, 0 where the place was not reached."""
        died, end = self._run.out / "died", time.monotonic() + NOT_REACHED_S
        (self._run.out / "die").write_text(f"{rank} {place}")
        until(lambda: died.exists() or time.monotonic() > end, "a death")
        return self._death()

    def _death(self) -> float:
        """When a process has died that was told to, 0 where none has; nothing is left of that."""
        died = self._run.out / "died"
        when = float(died.read_text()) if died.exists() else 0.0
        for name in ("die", "died"):
            (self._run.out / name).unlink(missing_ok=True)
        return when

    def _signal(self, rank: int, number: int) -> None:
        pid = self._run.process_of(rank)
        if pid is not None:
            os.kill(pid, number)

    # What came of it

    def _outcome(self, start: float, lost: set[int], before: dict[int, list[str]], name: str) -> dict[str, Any]:
        run = self._run

        def recoveries() -> list[dict[str, Any]]:
            return [event for event in run.events(name) if event["time"] > start]

        def trains() -> bool:
            since = recoveries()[-1]["time"] - 0.02 if recoveries() else NEVER
            ranks = recoveries()[-1]["ranks"] if recoveries() else self._ranks
            return all(float(run.last_step(rank)[0]) > since for rank in range(ranks))

        until(lambda: trains() or len(run.events("start")) > 1 or run.has_ended, run.log, RECOVERS_S, LOOK_S)
        if len(run.events("start")) > 1:
            return {"again": [line for line in run.log().splitlines() if "mlflash run:" in line][-6:]}
        if not trains():
            return {"wrong": f"it ended:\n{run.log()[-2000:]}"}
        recovered = recoveries()[-1]
        since = recovered["time"] - 0.02
        ranks = range(recovered["ranks"])
        after = {rank: next(line for line in run.steps(rank) if float(line[0]) > since) for rank in ranks}
        first_step = max(float(line[0]) for line in after.values())
        lost |= set(recovered["lost"])
        staying = {before[rank][2] for rank in before if rank not in lost}
        stayed = staying <= {line[2] for line in after.values()}
        if not self._elastic:  # otherwise they are numbered again
            stayed = all(after[rank][2] == before[rank][2] for rank in before if rank not in lost)
        done = max(int(line[1]) for rank in before for line in run.steps(rank) if float(line[0]) < start)
        bits = self._check_digests()
        return {
            "seconds": first_step - start,
            "detect": recovered["time"] - recovered["seconds"] - start,
            **recovered["times"],
            "recovered": recovered["seconds"],
            "step": first_step - recovered["time"],
            "steps lost": done - recovered["step"],
            "late": [event["rank"] for event in run.events("late") if event["time"] > start],
            "sizes": self._sizes(),
            **({} if stayed else {"wrong": f"other processes: {before} {after}"}),
            **({} if bits else {"wrong": f"other bits at step {recovered['step']}"}),
        }

    def _check_digests(self) -> bool:
        for rank, expected in enumerate(self._expected):
            path = self._run.out / f"digests-{rank}"
            for line in path.read_text().splitlines():
                step, _, digest = line.split(" ", 2)
                if int(step) and expected[int(step)] != digest:
                    return False
        return True

    def _sizes(self) -> dict[str, list[int]]:
        """Memory (KiB), descriptors and threads of each process on the nodes and the head that is one of ours."""
        found = {}
        for host in (*self._nodes.names, "head"):
            for pid in self._nodes.running(host) if host not in self._dead else ():
                if (size := size_of(pid)) is not None:
                    found[f"{host} {pid}"] = size
        return found


def reference(folder: Path, ranks: int, last: int, **options: Any) -> list[dict[int, str]]:
    """The digest of each rank after each step of a training that nothing happens to; ``options``: of the trainer."""
    out = folder / f"uninterrupted-{ranks}-{last}"
    out.mkdir()
    uninterrupted(out, (ranks, last), digests="steps", **options)
    return [{int(step): digest for step, _, digest in
             (line.split(" ", 2) for line in (out / f"digests-{rank}").read_text().splitlines())}
            for rank in range(ranks)]  # fmt: skip


def line(result: dict[str, Any]) -> str:
    fault = f"{result['job']}: {result.get('fault', result['kind'])} of {result.get('ranks', '?')}: "
    if "wrong" in result:
        return fault + "WRONG: " + result["wrong"]
    if "again" in result:
        return fault + "started again: " + "; ".join(result["again"])
    late = f", late: {result['late']}" if result["late"] else ""
    parts = ", ".join(f"{part} {result.get(part, 0):.2f}" for part in PARTS)
    return f"{fault}{result['seconds']:.2f} s ({parts}), {result['steps lost']} steps lost{late}"


def table(results: Sequence[dict[str, Any]]) -> str:
    """All of them: medians for each kind, and what processes had in the beginning and in the end."""
    head = "| fault | faults | recovered | started again | wrong | seconds: median | worst | "
    lines = [head + " | ".join(PARTS) + " |", "|---" * (7 + len(PARTS)) + "|"]
    for kind in [*dict.fromkeys(result["kind"] for result in results), ""]:
        alike = [result for result in results if result["kind"] == kind or not kind]
        well = [result for result in alike if "seconds" in result and "wrong" not in result]
        row = [kind or "all", str(len(alike)), str(len(well))]
        row += [str(sum(word in result for result in alike)) for word in ("again", "wrong")]
        if well:
            seconds = [result["seconds"] for result in well]
            row += [f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}"]
            row += [f"{statistics.median(result.get(part, 0.0) for result in well):.2f}" for part in PARTS]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join([*lines, "", *leaks(results)])


def leaks(results: Sequence[dict[str, Any]]) -> list[str]:
    """Memory, descriptors and threads of processes that have come through many recoveries, after two and after all."""
    seen: dict[tuple[int, str], list[Any]] = {}
    for result in results:
        for process, size in result.get("sizes", {}).items():
            seen.setdefault((result["job"], process), []).append(size)
    lines = ["| process | recoveries | KiB after 2 | in the end | descriptors | | threads | |", "|---" * 8 + "|"]
    for (job, process), sizes in seen.items():
        if len(sizes) >= OFTEN:
            (name, *first), (_, *last) = sizes[1], sizes[-1]
            sizes = " | ".join(f"{a} | {b}" for a, b in zip(first, last, strict=True))
            lines.append(f"| {job} {name} {process} | {len(sizes)} | {sizes} |")
    return lines


def size_of(pid: int) -> list[Any] | None:
    """What a process is, its memory (KiB), its descriptors and threads; None: it has ended, or is none of Python."""
    folder = Path(f"/proc/{pid}")
    try:
        words = (folder / "cmdline").read_text().split("\0")
        status = dict(text.split(":", 1) for text in (folder / "status").read_text().splitlines())
        counts = [len([*(folder / kind).iterdir()]) for kind in ("fd", "task")]
    except OSError:
        return None
    names = ["agent" if "'mlflash.launch.agent'" in word else Path(word).name for word in words[1:]]
    name = next((word for word in names if word in ("mlflash", "kept_trainer.py", "agent")), "")
    return [name, int(status["VmRSS"].split()[0]), *counts] if name and "VmRSS" in status else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--last", type=int, default=6000, help="the last step of each training")
    parser.add_argument("--at-once", type=int, default=20, help="faults, after which another training begins")
    parser.add_argument("--pause", type=float, default=0.01, help="seconds, in each step")
    parser.add_argument("--victim", type=int, help="the rank that is lost first, always; the others see all recoveries")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="default: all")
    parser.add_argument("--model", default="ddp", choices=["ddp", "compiled", "fsdp", "hsdp", "tp"])
    parser.add_argument("--elastic", action="store_true", help="no node waits: fewer ranks train on, and more later")
    parser.add_argument("--light", type=int, default=0, help="so many saves between two whole ones are light")
    parser.add_argument("--waits", action="store_true", help="each step waits until its save has committed")
    parser.add_argument("--until", action="store_true", help="saves copy until the optimizer steps")
    parser.add_argument("--optimizer", default="AdamW", choices=["AdamW", "fused", "SGD"])
    parser.add_argument("--slurm", action="store_true", help="each training is a job of a real Slurm on these nodes")
    parser.add_argument("--out", type=Path, required=True, help="a line of JSON for each fault; what went wrong beside")
    args = parser.parse_args()
    kinds = {kind: weight for kind, weight in KINDS.items() if not args.kinds or kind in args.kinds}
    folder = Path(tempfile.mkdtemp(prefix="kept-campaign-", dir="/var/tmp"))
    more = {"optimizer": args.optimizer, "waits": args.waits, "until": args.until}
    expected = [] if args.elastic else reference(folder, args.ranks, args.last, kind=args.model, **more)
    results: list[dict[str, Any]] = []
    number = 0
    while len(results) < args.faults:
        number += 1
        dice = random.Random(f"{args.seed} {number}")
        job = Job(args.out.parent, args.ranks, args.last, expected, dice, kinds, args.model, args.slurm, args.pause,
                  args.victim, args.elastic, args.light, more)  # fmt: skip
        keep = ""
        try:
            for result in job.attack(min(args.at_once, args.faults - len(results))):
                results.append({"job": number, **result})
                is_odd = {"wrong", "again"} & {*result} or max(result.get("leave", 0), result.get("wait", 0)) > SLOW_S
                keep = keep or (f"{args.out.stem}-{number}" if is_odd else "")
                with args.out.open("a") as file:
                    file.write(json.dumps(results[-1]) + "\n")
                print(line(results[-1]), flush=True)
        finally:
            job.close(keep)
    shutil.rmtree(folder)
    print(table(results))
    return int(any("wrong" in result for result in results))


if __name__ == "__main__":
    sys.exit(main())
