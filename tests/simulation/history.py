"""One seed is one history of a job: launches, faults at any scheduling point, relaunches, and what must hold after each."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import couriers
import machine
import mpi
import threads
from faults import Plan, Setting, draw_plan, draw_setting
from oracle import Oracle
from scheduler import NEVER, Process, Scheduler, Task
from states import States

import mlflash
from mlflash import crash_points

TIMEOUT_S = 60.0
CALL_LIMIT_S = 2 * TIMEOUT_S + 40  # a call may wait for the save before, and for an error that comes after its deadline
_SHM = Path("/dev/shm")
_SOMETIMES_REACHED = {"drain": "drain", "lazy": "lazy", "mend": "mend", "share": "common", "room": "grow"}


@dataclasses.dataclass
class Record:
    """What a rank noted: an event of its training, as a user sees it."""

    rank: int
    event: str
    step: int | None = None
    launch: int | None = None
    text: str = ""
    error: BaseException | None = None
    wrong: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Launch:
    """One launch of the job.

    Attributes:
        saves: of each rank.
        waits: which saves are waited for: every one, every second one, or none.
        left: trainers that have not come to their end.
        died: whether any process has died.
        ends_at: scheduling points at which processes die, after the first death.
    """

    number: int
    plan: Plan
    saves: int
    waits: str
    is_last: bool
    trainers: list[Process] = dataclasses.field(default_factory=list)
    networks: list[mpi.Network] = dataclasses.field(default_factory=list)
    records: list[Record] = dataclasses.field(default_factory=list)
    snapshots: list[tuple[int, int, Any]] = dataclasses.field(default_factory=list)
    ended: set[int] = dataclasses.field(default_factory=set)
    died: bool = False
    node_died: bool = False
    triggered: bool = False
    phases: Counter[str] = dataclasses.field(default_factory=Counter)
    ends_at: dict[Process, int] = dataclasses.field(default_factory=dict)
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
        reached: how often each crash point was reached.
        outcomes: how often what happened.
    """

    def __init__(self, seed: int, fixed: dict[str, object] | None = None, keeps_trace: bool = False,
                 until_points: float = NEVER):  # fmt: skip
        self.seed, self.until_points = seed, until_points
        self.kernel = threads.SCHEDULER = Scheduler(seed, keeps_trace=keeps_trace)
        self.setting = draw_setting(self.kernel.random, fixed or {})
        self.memory = _SHM / f"simulation-{machine.real_pid()}"
        self.problems: list[str] = []
        self.reached: Counter[str] = Counter()
        self.kills: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.oracle = Oracle(self)
        special = self.setting.special
        self.states = States(
            self.setting.nbytes, 4 if "grow" in special else 0, "values" in special or self.kernel.random.random() < 0.3,
            "common" in special or "elastic" in special, 8 if "zeros" in special else 0,
        )  # fmt: skip
        self.launch: Launch

    def node_path(self, node: int) -> Path:
        return self.memory / f"mlflash-{os.getuid()}" / "j" / f"node{node}"

    def run(self) -> None:
        """Run all launches, the last one without faults."""
        random = self.kernel.random
        self.memory.mkdir(mode=0o700)
        machine.begin(self.seed)
        crash_points.arm(self._reach)
        logging_handler = _listen(self)
        try:
            for number in range(self.setting.launches + 1):
                is_last = number == self.setting.launches
                plan = Plan("none", 0) if is_last else draw_plan(random, self.setting, self._points())
                saves, waits = (1, "all") if is_last else (random.choice([1, 2, 3, 4]), random.choice(["all", "some", "none"]))
                self.launch = Launch(number, plan, saves, waits, is_last)
                why = self._run_launch()
                self.oracle.judge(self.launch, why)
                if self.problems:
                    break
                if not is_last:
                    self._damage()
                    self._resize()
        finally:
            logging.getLogger("mlflash").removeHandler(logging_handler)
            crash_points.arm(None)
            machine.end()
            threads.SCHEDULER = None
            shutil.rmtree(self.memory, ignore_errors=True)

    def _points(self) -> list[str]:
        """The crash points that a launch of this setting may reach."""
        special = self.setting.special
        left_out = {kind for kind, needs in _SOMETIMES_REACHED.items() if needs not in special} | {"round", "close"}
        return [point for point in crash_points.POINTS if point.partition(".")[0] not in left_out]

    # One launch

    def _run_launch(self) -> str:
        kernel, setting, launch = self.kernel, self.setting, self.launch
        kernel.note(f"launch {launch.number}: {setting if not launch.number else ''} {launch.plan}")
        machine.FAULTS.no_space = 0.0 if launch.is_last else setting.no_space
        launch.trainers = [self._process(rank, 1000 * (launch.number + 1) + rank) for rank in range(setting.ranks)]
        couriers.begin(kernel, self)
        if setting.courier == "thread":
            network = mpi.Network(kernel, launch.trainers, setting.pace, setting.has_errors)
            launch.networks.append(network)
            machine.MPI.worlds = {process: network.world(process) for process in launch.trainers}
        for process in launch.trainers:
            kernel.spawn(process, "main", lambda process=process: self._main(process))
        kernel.at_point = None if launch.is_last else self._at_point
        why = kernel.run(lambda: len(launch.ended) == setting.ranks)
        kernel.at_point = None
        if not why:  # couriers bring to its end what they were given, unless their node is taken away before
            why = kernel.run(lambda: not couriers.processes(), max_s=30.0)
            why = "" if launch.died else why and f"couriers go on after their trainers: {why}"
        if not launch.died and not why:
            self.oracle.judge_end(launch)
        for process in [*launch.trainers, *couriers.processes()]:
            kernel.kill(process)
        kernel.forget()
        return why

    def _process(self, rank: int, pid: int) -> Process:
        process = Process(rank, pid, globals=machine.process_globals())
        process.at_death.append(lambda: self.launch.ended.add(rank))
        return process

    def _reach(self, point: str) -> None:
        self.reached[point] += 1
        if self.kernel.current is not None:
            if point == "heal.done":
                self.oracle.healed(self.launch, self.kernel.current.process.rank)
            self.kernel.point(point)

    # Training

    def note(self, process: Process, event: str, **more: Any) -> None:
        record = Record(process.rank, event, **more)
        self.launch.records.append(record)
        self.kernel.note(f"{process.name} {process.rank} notes {event} {record.step}")

    def _main(self, process: Process) -> None:
        """The main thread of a trainer, to its end."""
        try:
            self._train(process)
        except Exception as error:
            text = "".join(traceback.format_exception(error))[-3000:]
            self.note(process, "error", error=error, text=text)
            self.outcomes[type(error).__name__] += 1
            if not isinstance(error, mlflash.errors.Unrestorable):
                self.launch.died = True  # a launcher ends the others when a rank fails
                self._end_others(mean=3000)
                self.kernel.kill(process)
        if self.setting.courier == "process" and process.is_alive:
            couriers.exit_trainer()
            self.kernel.kill(process)
        self.launch.ended.add(process.rank)

    def _train(self, process: Process) -> None:
        setting, launch, rank = self.setting, self.launch, process.rank
        special, call = setting.special, self._timed
        ckpt = call(process, "Checkpointer", lambda: self._checkpointer(process))
        step_before = self.oracle.newest[1] if self.oracle.newest else 0
        state = self.states.at(rank, step_before, 77)
        launch.phases["restoring"] += 1
        try:
            start = call(process, "restore", lambda: ckpt.restore(state))
        except mlflash.errors.StructureMismatch:  # weights had grown, or not yet
            state = self.states.at(rank, 4 if step_before < 4 else 0, 77)
            start = call(process, "restore", lambda: ckpt.restore(state))
        except mlflash.errors.Unrestorable as error:
            self.note(process, "unrestorable", text=str(error))
            raise
        is_new = rank >= self.oracle.ranks_of_newest
        wrong = [] if start is None else self.states.differences(state, rank, start, state["launch"], is_new)
        self.note(process, "restored", step=start, launch=None if start is None else state["launch"], wrong=wrong)
        step = start or 0
        for step in range(step + 1, step + 1 + launch.saves):
            state = self.states.at(rank, step, launch.number)
            self.note(process, "saving", step=step)
            launch.phases["saving"] += rank == launch.plan.who
            snapshot = call(process, "save", lambda step=step, state=state: ckpt.save(step, state))
            launch.snapshots.append((rank, step, snapshot))
            state["weights"][:] = 7  # at once, as the promise says
            if launch.waits == "all" or (launch.waits == "some" and step % 2):
                self._wait(process, step, snapshot)
            self.kernel.point("train")
        call(process, "wait", ckpt.wait)
        if "drain" in special:
            call(process, "wait_drained", ckpt.wait_drained)
        steps = call(process, "steps", ckpt.steps)
        call(process, "close", ckpt.close)
        self.note(process, "end", step=steps[-1] if steps else None)

    def _checkpointer(self, process: Process) -> mlflash.Checkpointer:
        setting = self.setting
        more: dict[str, Any] = {}
        if "drain" in setting.special:
            more |= {"directory": str(self.memory / "files"), "drain_every": 2, "keep_last": 2}
        if setting.courier == "thread":
            more |= {"comm": machine.MPI.worlds[process]}
        return mlflash.Checkpointer(
            job="j", memory=str(self.memory), redundancy=setting.scheme, transport=setting.transport,
            ranks_per_node=setting.per_node, timeout_s=TIMEOUT_S, block_nbytes=4096, chunk_nbytes=4096, copy_threads=1,
            scrub_rate=20e6 if "mend" in setting.special else 0, when_busy=setting.when_busy, courier=setting.courier,
            replicated=True if {"common", "elastic"} & setting.special else None, courier_cpus="inherit", **more,
        )  # fmt: skip

    def _wait(self, process: Process, step: int, snapshot: mlflash.Snapshot) -> None:
        try:
            self._timed(process, "Snapshot.wait", snapshot.wait)
            self.note(process, "committed", step=step)
        except mlflash.errors.MlflashError as error:
            self.note(process, "failed", step=step, text=f"{type(error).__name__}: {error}")

    def _timed(self, process: Process, name: str, call: Callable[[], Any]) -> Any:
        """Call something that must end before its deadline, in virtual time."""
        start, stopped = self.kernel.now, process.stopped_until
        try:
            return call()
        finally:
            took = self.kernel.now - start
            if took > CALL_LIMIT_S and process.is_alive and process.stopped_until == stopped:
                self.problems.append(f"launch {self.launch.number}: {name} of rank {process.rank} took {took:.1f} s")

    # Deaths

    def _at_point(self, task: Task, name: str) -> None:
        """Decide whether somebody dies at this scheduling point."""
        kernel, launch, plan, process = self.kernel, self.launch, self.launch.plan, task.process
        if kernel.points > self.until_points:
            return
        if process in launch.ends_at and process.points >= launch.ends_at[process]:
            self._die([process])
        if plan.stop is not None and process.rank == plan.stop[0] and process.points == plan.stop[1]:
            kernel.stop(process, plan.stop[2])
        if launch.triggered or plan.dies == "none" or not self._is_time(process, name):
            return
        launch.triggered = True
        self.kills[name if plan.point else f"in {plan.phase}"] += 1
        everyone = [*launch.trainers, *couriers.processes()]
        if plan.dies == "courier" and setting_has_couriers(self.setting):
            self.outcomes["courier killed"] += 1
            self._die([one for one in couriers.processes() if one.rank == plan.who], is_end=False)
            return
        node = plan.who // self.setting.per_node
        dead = {
            "rank": [one for one in launch.trainers if one.rank == plan.who], "all": everyone,
            "courier": [one for one in launch.trainers if one.rank == plan.who],
            "node": [one for one in everyone if one.rank // self.setting.per_node == node],
        }[plan.dies]  # fmt: skip
        launch.node_died = plan.dies in ("node", "all")
        self._die(dead)
        self._end_others(plan.others)
        if plan.second:
            other = kernel.random.choice(everyone)
            launch.ends_at[other] = min(launch.ends_at.get(other, 1 << 60), other.points + plan.second)

    def _is_time(self, process: Process, name: str) -> bool:
        plan, launch = self.launch.plan, self.launch
        if plan.point:
            if name == plan.point and (plan.dies != "rank" or process.rank == plan.who):
                plan.nth -= 1
            if plan.nth > 0:
                return False
        elif launch.phases[plan.phase] < plan.nth:
            return False
        plan.after -= 1
        return plan.after < 0

    def _die(self, processes: list[Process], is_end: bool = True) -> None:
        self.launch.died |= is_end
        for process in processes:
            self.kernel.kill(process)

    def _end_others(self, mean: int) -> None:
        """Let the other processes die later, each at a scheduling point of its own, as their launcher ends them."""
        launch, kernel = self.launch, self.kernel
        for process in [*launch.trainers, *couriers.processes()]:
            if process.is_alive and process.name == "trainer" and process.rank not in launch.ended:
                launch.ends_at[process] = process.points + (1 + int(kernel.random.expovariate(1 / mean)) if mean else 0)
        kernel.after(launch.plan.ends_s, lambda: self._die([p for p in launch.trainers if p.rank not in launch.ended]))

    # Between launches

    def _damage(self) -> None:
        """Lose what is lost between two launches: within what the scheme covers, or, rarely, beyond."""
        random, plan = self.kernel.random, self.launch.plan
        is_beyond = random.random() < 0.05
        for _ in range(plan.wipes):
            node = random.randrange(self.setting.nodes)
            if plan.dies == "node" and random.random() < 0.7:
                node = plan.who // self.setting.per_node
            if (is_beyond or self.oracle.covers(node)) and self.node_path(node).exists():
                shutil.rmtree(self.node_path(node))
                self.oracle.lost.add(node)
                self.outcomes["wiped"] += 1
                self.kernel.note(f"wipe {node}")
        if self.setting.flips and random.random() < 0.6:
            self._flip(random.randrange(self.setting.nodes))

    def _flip(self, node: int) -> None:
        """Flip bits in a file of a node's memory; that counts as the loss of that node."""
        random = self.kernel.random
        files = sorted(self.node_path(node).glob("slot-*")) if self.oracle.covers(node) else []
        if files:
            path = random.choice(files)
            raw = bytearray(path.read_bytes())
            for _ in range(random.choice([1, 1, 5])):
                raw[random.randrange(len(raw))] ^= 1 << random.randrange(8)
            path.write_bytes(raw)
            self.oracle.lost.add(node)
            self.outcomes["flipped"] += 1
            self.kernel.note(f"flip {path.name} of node {node}")

    def _resize(self) -> None:
        """Let the next launch have another number of ranks."""


def setting_has_couriers(setting: Setting) -> bool:
    return setting.courier == "process"


class _Errors(logging.Handler):
    """Notes what mlflash logs as an error that is none of its own kind."""

    def __init__(self, history: History):
        super().__init__(logging.DEBUG)
        self._history = history

    def emit(self, record: logging.LogRecord) -> None:
        history = self._history
        error = record.exc_info[1] if record.exc_info else None
        if history.kernel.trace is not None:
            history.kernel.trace.append(f"{history.kernel.now:12.6f} log {record.levelname}: {record.getMessage()}")
        is_ours = isinstance(error, (mlflash.errors.MlflashError, mpi.MpiError, OSError))
        if record.levelno >= logging.ERROR and error is not None and not is_ours:
            text = record.getMessage() + "".join(traceback.format_exception(error))[-2500:]
            history.launch.errors_logged.append(text)


def _listen(history: History) -> logging.Handler:
    log = logging.getLogger("mlflash")
    handler = _Errors(history)
    log.addHandler(handler)
    log.propagate = False
    log.setLevel(logging.DEBUG if history.kernel.trace is not None else logging.WARNING)
    return handler
