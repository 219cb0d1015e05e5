"""One seed is one history of a job: launches with faults at any scheduling point, and what must hold after each."""

from __future__ import annotations

import dataclasses
import logging
import mmap
import os
import shutil
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import couriers
import machine
import mpi
import rounds
import threads
from faults import LAYOUTS, LEAST_NODES, Plan, draw_plan, draw_setting
from oracle import Oracle
from scheduler import NEVER, Process, Scheduler, Task
from states import States
from training import Training

import mlflash
from mlflash import crash_points
from mlflash.memory.slot import HEADER_NBYTES, Header, unpack


@dataclasses.dataclass
class Record:
    """What a rank noted: an event of its training, as a user sees it.

    Attributes:
        round: of a recovery in place.
        least: launch and step that had to be restored in a round, at the least.
        idle_s: virtual seconds since any rank came to a crash point.
    """

    rank: int
    event: str
    step: int | None = None
    launch: int | None = None
    text: str = ""
    error: BaseException | None = None
    wrong: list[str] = dataclasses.field(default_factory=list)
    round: int = 1
    least: tuple[int, int] | None = None
    idle_s: float = 0.0


@dataclasses.dataclass
class Launch:
    """One launch of the job.

    Attributes:
        saves: of each rank.
        waits: which saves are waited for: all, some (every second one) or none.
        marks: steps that are marked bad after their save.
        wants_certified: whether it restores the newest certified step.
        limit_s: virtual seconds after which it is over.
        step_s: virtual seconds from save to save in which a trainer computes, on average.
        ended: trainers that have ended.
        died: whether any process has died; its node, with all processes.
        triggered: whether the plan's death has come.
        phases: how often each phase has begun.
        snapshots: rank, launch as the content of the state names it, step, and what `save` returned.
        loss_at: number of snapshots when memory was lost while the job ran.
        flipped: nodes in whose memory bits of a step were flipped while the job ran, with that step.
        ends_at: scheduling points at which processes die, after the first death.
    """

    number: int
    plan: Plan
    saves: int
    waits: str
    is_last: bool
    marks: frozenset[int] = frozenset()
    wants_certified: bool = False
    limit_s: float = NEVER
    step_s: float = 0.0
    trainers: list[Process] = dataclasses.field(default_factory=list)
    networks: list[mpi.Network] = dataclasses.field(default_factory=list)
    records: list[Record] = dataclasses.field(default_factory=list)
    snapshots: list[tuple[int, int, int, Any]] = dataclasses.field(default_factory=list)
    ended: set[Process] = dataclasses.field(default_factory=set)
    died: bool = False
    node_died: bool = False
    triggered: bool = False
    phases: Counter[str] = dataclasses.field(default_factory=Counter)
    ends_at: dict[Process, int] = dataclasses.field(default_factory=dict)
    loss_at: int = 0
    flipped: dict[int, int] = dataclasses.field(default_factory=dict)
    errors_logged: list[str] = dataclasses.field(default_factory=list)

    def of(self, event: str) -> list[Record]:
        return [record for record in self.records if record.event == event]


class History:
    """Runs the history of a seed.

    Args:
        seed: of everything.
        fixed: fields of the setting that are given.
        keeps_trace: see `Scheduler`.
        until_points: nothing dies any more after so many scheduling points of the history, so that the shortest
            prefix of faults that still fails can be found.

    Attributes:
        problems: what must not have happened.
        reached, outcomes: how often each crash point was reached, and what happened.
    """

    def __init__(self, seed: int, fixed: dict[str, object] | None = None, keeps_trace: bool = False,
                 until_points: float = NEVER):  # fmt: skip
        self.seed, self.until_points = seed, until_points
        self.kernel = threads.SCHEDULER = Scheduler(seed, keeps_trace=keeps_trace)
        self.setting = draw_setting(self.kernel.random, fixed or {})
        self.memory = machine.memory_of()
        self.files, self.disks = self.memory / "files", self.memory / "disks"
        self.problems: list[str] = []
        self._worked_at = 0.0  # virtual time of the last crash point of any rank
        self.reached, self.outcomes = Counter[str](), Counter[str]()
        self.states = States(self.setting.nbytes, self.setting.special, self.kernel.random.random() < 0.3)
        self.oracle = Oracle(self)
        self.launch: Launch
        self.supervisor: rounds.Supervisor

    def run(self) -> None:
        shutil.rmtree(self.memory, ignore_errors=True)  # of a process that was killed and had this number
        self.disks.mkdir(mode=0o700, parents=True)
        machine.begin(self.seed)
        crash_points.arm(self._reach)
        handler = _listen(self)
        try:
            for number in range(self.setting.launches + 1):
                self.launch = self.draw_launch(number)
                why = self._run_launch()
                self.oracle.judge(self.launch, why)
                if self.problems:
                    break
                if not self.launch.is_last:
                    self.damage()
                    self._resize()
        finally:
            logging.getLogger("mlflash").removeHandler(handler)
            crash_points.arm(None)
            machine.end()
            threads.SCHEDULER = None
            shutil.rmtree(self.memory, ignore_errors=True)

    def draw_launch(self, number: int) -> Launch:
        random = self.kernel.random
        if number == self.setting.launches:
            return Launch(number, Plan("none", 0), 1, "all", True)
        saves = random.choice([1, 2, 3, 3, 4]) if not number else random.choice([0, 1, 1, 2, 3])
        plan = draw_plan(random, self.setting, crash_points.POINTS, saves, not number, bool(self.oracle.lost))
        launch = Launch(number, plan, saves, random.choice(["all", "some", "none"]), False,
                        step_s=random.choice([0.0, 0.0, 0.003, 0.03]))  # fmt: skip
        if self.setting.special & {"values", "kept", "drain", "light"}:
            launch.saves += 2
        if "values" in self.setting.special:
            newest = self.oracle.newest[1] if self.oracle.newest else 0
            launch.marks = frozenset({newest + random.choice([1, 2])} if random.random() < 0.2 else ())
            launch.wants_certified = random.random() < 0.3
        return launch

    # One launch

    def _run_launch(self) -> str:
        kernel, setting, launch = self.kernel, self.setting, self.launch
        self.oracle.ranks_of[launch.number] = setting.ranks
        kernel.note(f"launch {launch.number}: {setting} {launch.plan}")
        machine.FAULTS.no_space = 0.0 if launch.is_last else setting.no_space
        machine.FAULTS.bad_sync = 0.0 if launch.is_last else setting.bad_sync
        couriers.begin(kernel, self)
        if "kept" in setting.special:
            self.supervisor = rounds.Supervisor(self)
        else:
            launch.trainers = [self.process(rank) for rank in range(setting.ranks)]
        if setting.meets != "launcher":  # the program uses MPI itself
            network = mpi.Network(kernel, launch.trainers, setting.pace, setting.has_errors)
            launch.networks.append(network)
            machine.MPI.worlds = {process: network.world(process) for process in launch.trainers}
        for process in launch.trainers:
            program = rounds.Kept if "kept" in setting.special else Training
            kernel.spawn(process, "main", program(self, process).run)
        kernel.at_point = None if launch.is_last else self.at_point
        why = kernel.run(self._is_over, launch.limit_s)
        kernel.at_point = None
        if not why:  # couriers bring to its end what they were given
            why = kernel.run(lambda: not couriers.processes(), max_s=30.0)
            why = "" if launch.died else why and f"couriers go on after their trainers: {why}"
        if not launch.died and not why:
            self.oracle.judge_end(launch)
        for process in [*launch.trainers, *couriers.processes()]:
            kernel.kill(process)
        kernel.forget()
        return why

    def _is_over(self) -> bool:
        if "kept" in self.setting.special:
            return self.supervisor.is_over
        return len(self.launch.ended) == self.setting.ranks

    def process(self, rank: int, is_seated: bool = True) -> Process:
        """Make a trainer; ``is_seated``: it has its rank from the start."""
        process = Process(rank, 1000 * (self.launch.number + 1) + rank, globals=machine.process_globals())
        if is_seated:
            process.globals[os, "environ"].update(RANK=str(rank), WORLD_SIZE=str(self.setting.ranks))
        process.at_death += [lambda: self.launch.ended.add(process), lambda: couriers.left(process)]
        return process

    def _reach(self, point: str) -> None:
        self.reached[point] += 1
        self._worked_at = self.kernel.now
        if self.kernel.current is not None:
            if point == "reprotect.done" and "light" not in self.setting.special:
                self.oracle.reprotected(self.launch, self.kernel.current.process.rank)
            elif point == "restore.adopted":
                self.oracle.adopted()
            self.kernel.point(point)

    def note(self, process: Process, event: str, **more: Any) -> None:
        record = Record(process.rank, event, idle_s=self.kernel.now - self._worked_at, **more)
        self.launch.records.append(record)
        is_whole = event == "end" and record.step is not None and not self.setting.no_space
        if is_whole and "light" in self.setting.special:  # so has what a restore saved
            self.oracle.reprotected(self.launch, process.rank)
        self.kernel.note(f"{process.name} {process.rank} notes {event} {record.step}")

    # Deaths

    def at_point(self, task: Task, name: str) -> None:
        """Decide whether somebody dies at this scheduling point."""
        kernel, launch, plan, process = self.kernel, self.launch, self.launch.plan, task.process
        if kernel.points > self.until_points:
            return
        if process.points >= launch.ends_at.get(process, 1 << 60):
            self.die([process])
        if plan.stop is not None and process.rank == plan.stop[0] and process.points == plan.stop[1]:
            kernel.stop(process, plan.stop[2])
            if "kept" in self.setting.special:
                self.supervisor.stopped(process, plan.stop[2])
        if "kept" in self.setting.special and not self.supervisor.is_due:
            return
        if not launch.triggered and plan.dies != "none" and self._is_time(process, name):
            launch.triggered = True
            self._carry_out(plan)

    def _is_time(self, process: Process, name: str) -> bool:
        plan, launch = self.launch.plan, self.launch
        if launch.phases[plan.phase] < plan.nth:
            return False
        if plan.point:
            plan.times -= name == plan.point and (plan.dies != "rank" or process.rank == plan.who)
            if plan.times > 0:
                return False
        plan.after -= 1
        return plan.after < 0

    def _carry_out(self, plan: Plan) -> None:
        launch, everyone = self.launch, [*self.launch.trainers, *couriers.processes()]
        if "kept" in self.setting.special:
            self.supervisor.carry_out(plan)
            return
        if plan.dies == "courier":
            self.outcomes["courier killed"] += 1
            for courier in couriers.processes():
                if courier.rank == plan.who:
                    self.kernel.kill(courier)
            return
        node = plan.who // self.setting.per_node
        launch.node_died = plan.dies in ("node", "all")
        if plan.dies == "all":
            dead = everyone
        elif plan.dies == "node":
            dead = [process for process in everyone if process.rank // self.setting.per_node == node]
        else:
            dead = [process for process in launch.trainers if process.rank == plan.who]
        self.die(dead)
        self.end_others(plan.others)
        if plan.second:
            other = self.kernel.random.choice(everyone)
            launch.ends_at[other] = min(launch.ends_at.get(other, 1 << 60), other.points + plan.second)

    def die(self, processes: list[Process]) -> None:
        self.launch.died = True
        for process in processes:
            self.kernel.kill(process)

    def end_others(self, mean: int) -> None:
        """Let the other trainers die later, each at a scheduling point of its own, as their launcher ends them."""
        launch, kernel = self.launch, self.kernel
        for process in launch.trainers:
            if process.is_alive and process not in launch.ended:
                launch.ends_at[process] = process.points + (1 + int(kernel.random.expovariate(1 / mean)) if mean else 0)
        kernel.after(launch.plan.ends_s, lambda: self.die([p for p in launch.trainers if p not in launch.ended]))

    # What is lost

    def _node_paths(self, node: int, in_memory: bool = True, on_disk: bool = False) -> list[Path]:
        """The folders of the job, and of its light saves, in the memory and on the disk of a node."""
        tops = [self.memory] * in_memory + [self.disks] * on_disk
        return [path for top in tops for path in sorted((top / f"node{node}" / f"mlflash-{os.getuid()}").glob("j*"))]

    def _slots(self, node: int) -> list[Path]:
        return [slot for path in self._node_paths(node, on_disk=True) for slot in sorted(path.glob("slot-*"))]

    def damage(self) -> None:
        """Lose what is lost between two launches: within what the scheme covers, or, rarely, beyond."""
        random, plan = self.kernel.random, self.launch.plan
        if "disk" in self.setting.special and random.random() < 0.3:
            self.cut_power()
            return
        if random.random() < (0.3 if "drain" in self.setting.special else 0.08):
            nodes = self.setting.nodes
            for node in random.sample(range(nodes), random.choice([nodes, nodes, max(1, nodes - 1)])):
                self.wipe(node)
        for _ in range(plan.wipes):
            node = random.randrange(self.setting.nodes)
            if plan.dies == "node" and random.random() < 0.7:
                node = plan.who // self.setting.per_node
            if self.oracle.covers(node):
                self.wipe(node)
        node = random.randrange(self.setting.nodes)
        if self.setting.flips and random.random() < 0.6 and self.oracle.covers(node):
            self._flip(node, self._slots(node))
        if self.setting.flips and random.random() < 0.3:
            self._flip(None, sorted(path for path in self.files.rglob("*") if path.is_file() and path.stat().st_size))

    def cut_power(self) -> None:
        """Lose all memory, and what was written to disks and not synced.

        Copies that were in place are enough, if no state is shared: that is in memory only. Where whole steps are kept
        on disks, memory adds nothing to these; but light saves are not kept so.
        """
        machine.DISKS.lose_unsynced(self.kernel.random)
        special = self.setting.special
        is_whole = "whole" in special and "light" not in special
        is_shared = bool(special & {"common", "elastic"})
        is_enough = not self.oracle.lost and self.setting.scheme.startswith("copy") and not is_shared
        for node in range(self.setting.nodes):
            self.remove_memory(node, "power cut", is_disk_kept=True)
        self.oracle.is_cut = not is_whole
        if not (is_whole or is_enough):
            self.oracle.lost |= {*range(self.setting.nodes)}

    def wipe(self, node: int) -> None:
        if self.remove_memory(node, "wiped"):
            self.oracle.lost.add(node)

    def remove_memory(self, node: int, outcome: str, is_disk_kept: bool = False) -> bool:
        """Remove what the job has in the memory of a node, and count that. Return whether there was anything.

        Half of the time its disk is lost, too, unless ``is_disk_kept``.
        """
        is_kept = is_disk_kept or "disk" not in self.setting.special or self.kernel.random.random() < 0.5
        paths = self._node_paths(node, on_disk=not is_kept)
        for path in paths:
            shutil.rmtree(path)
        if paths:
            self.outcomes[outcome] += 1
            self.kernel.note(f"wipe {node}")
        return bool(paths)

    def flip_at_rest(self) -> None:
        """Flip a bit of the newest committed step in memory, while the job runs."""
        node = self.kernel.random.randrange(self.setting.nodes)
        step = max((step for _, _, step, snapshot in self.launch.snapshots if snapshot.committed), default=-1)
        if self.oracle.covers(node) and not self.launch.is_last:
            paths = [path for path in self._slots(node) if (header := _header_of(path)) and header.step == step]
            self._flip(node, paths)
            self.launch.flipped[node] = step

    def _flip(self, node: int | None, files: list[Path]) -> None:
        """Flip bits in one of some files of a node's memory; that counts as the loss of that node.

        Args:
            node: None: the files are those of the directory.
        """
        random = self.kernel.random
        if not files:
            return
        path = random.choice(files)
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as raw:
            for _ in range(random.choice([1, 1, 5])):
                raw[random.randrange(len(raw))] ^= 1 << random.randrange(8)
        if node is None:
            self.oracle.drained = None  # an older checkpoint may be taken, or none
        else:
            self.oracle.lost.add(node)
        self.outcomes["flipped"] += 1
        self.kernel.note(f"flip {path.name} of node {node}")

    def _resize(self) -> None:
        """Let the next launch have other ranks, if what it leaves behind may be lost."""
        random, setting = self.kernel.random, self.setting
        if "elastic" not in setting.special or random.random() < 0.4:
            return
        ranks, per_node = random.choice(LAYOUTS)
        nodes = ranks // per_node
        gone = set(range(nodes, setting.nodes))
        if nodes >= LEAST_NODES[setting.scheme] and self.oracle.covers(*gone):
            self.oracle.lost |= gone
            self.oracle.ranks_of_newest = min(self.oracle.ranks_of_newest, ranks)
            self.setting = dataclasses.replace(setting, ranks=ranks, per_node=per_node)
            self.outcomes["resized"] += 1


def _header_of(path: Path) -> Header | None:
    try:
        with path.open("rb") as file:
            return unpack(file.read(HEADER_NBYTES))
    except mlflash.errors.CorruptSlot:
        return None


class _Errors(logging.Handler):
    """Notes what mlflash logs as an error that is none of its own kind."""

    def __init__(self, history: History):
        super().__init__(logging.DEBUG)
        self._history = history

    def emit(self, record: logging.LogRecord) -> None:
        kernel = self._history.kernel
        error = record.exc_info[1] if record.exc_info else None
        if kernel.trace is not None:
            kernel.trace.append(f"{kernel.now:12.6f} log {record.levelname}: {record.getMessage()}")
        is_expected = isinstance(error, (mlflash.errors.MlflashError, mpi.MpiError, OSError))
        if record.levelno >= logging.ERROR and error is not None and not is_expected:
            text = record.getMessage() + "".join(traceback.format_exception(error))[-2500:]
            self._history.launch.errors_logged.append(text)


def _listen(history: History) -> logging.Handler:
    log = logging.getLogger("mlflash")
    handler = _Errors(history)
    log.addHandler(handler)
    log.propagate = False
    log.setLevel(logging.DEBUG if history.kernel.trace is not None else logging.WARNING)
    return handler
