"""A trainer without MPI; tests/programs/test_couriers.py says what it is to do."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from processes import resident
from records import OUT, note
from traps import set_traps
from waiting import PATIENCE_S, hang, until

import mlflash
from mlflash.launch.couriers import Couriers, RunningCourier

RANK = int(os.environ.get("RANK") or os.environ.get("PMI_RANK", "0"))


def state_at(step: int) -> dict[str, Any]:
    random = np.random.default_rng((RANK, step))
    return {"own": random.integers(0, 256, 100_000 + 1000 * RANK, dtype=np.uint8), "step": step}


def is_same(state: dict[str, Any], other: dict[str, Any]) -> bool:
    return state.keys() == other.keys() and all(np.array_equal(state[name], other[name]) for name in state)


def train(settings: dict[str, Any], kills: str = "") -> None:
    """Restore, save three steps, and lose a courier or an agent: see `_lose_the_courier`."""
    logging.getLogger("mlflash").addHandler(_Note())
    for when, method in (("first", "next_epoch"), ("meeting", "_take_seat")):
        if kills == f"{when} agent {RANK}":
            _kill_the_agent_at(method)
    with mlflash.Checkpointer(**settings) as ckpt:
        state = state_at(0)
        start = ckpt.restore(state)
        note("restored", rank=RANK, step=start, same=is_same(state, state_at(start or 0)))
        for step in range((start or 0) + 1, (start or 0) + 4):
            ckpt.save(step, state_at(step)).wait()
            note("committed", rank=RANK, step=step)
        if kills:
            _lose_the_courier(ckpt, kills)
        note("end", rank=RANK, steps=ckpt.steps(), report=ckpt.report())


def _kill_the_agent_at(name: str) -> None:
    """Kill the agent when this method would need it for the first time."""
    method = getattr(Couriers, name)

    def killed(couriers: Couriers, *args: Any) -> Any:
        setattr(Couriers, name, method)
        os.kill(couriers.agent.pid, signal.SIGKILL)
        return method(couriers, *args)

    setattr(Couriers, name, killed)


def _lose_the_courier(ckpt: mlflash.Checkpointer, kills: str) -> None:
    """Kill the courier of rank 1, "twice" the next one too before it is up; save until a step is committed again.

    "agent 0" kills the agent of that rank, and its next two while they start; "first agent 0" and "meeting agent 0"
    were killed before.
    """
    if kills == "busy":  # in the middle of a save, as a rule
        ckpt.save(99, state_at(99))
    if kills == f"agent {RANK}":
        agent = lambda: ckpt._courier._connection.couriers.agent.pid
        for _ in range(3):
            os.kill(last := agent(), signal.SIGKILL)
            until(lambda last=last: agent() != last, "the next agent", look_s=0.0005)
    elif RANK == 1 and "agent" not in kills:
        os.kill(first := ckpt._courier._connection.pid, signal.SIGKILL)
        if kills == "twice":
            until(lambda: ckpt._courier._connection.pid != first, "the next courier", look_s=0.0005)
            os.kill(ckpt._courier._connection.pid, signal.SIGKILL)
    note("again", rank=RANK, step=_save_until_committed(ckpt, 100))


def mpi_fails(settings: dict[str, Any], point: str) -> None:
    """MPI fails in the courier of rank 1, in the second save; say what became of each save on this rank."""
    set_traps([{"path": ["commit.seen", point], "action": "mpi fails", "rank": 1}], RANK)
    with mlflash.Checkpointer(**settings) as ckpt:
        for step in range(1, 5):
            try:
                ckpt.save(step, state_at(step)).wait()
                note("committed", rank=RANK, step=step)
            except mlflash.errors.SaveFailed:
                pass


def weigh(settings: dict[str, Any]) -> None:
    """Say what courier and agent take of memory, after saves of more than what MPI keeps of one."""
    with mlflash.Checkpointer(**settings) as ckpt:
        state = {"a": np.random.default_rng(RANK).standard_normal(2 << 20), "step": 0}
        ckpt.restore(state)
        for step in range(1, 5):
            ckpt.save(step, state).wait()
        link = ckpt._courier._connection
        note("weight", rank=RANK, slots=sum(slot["nbytes"] for slot in ckpt.report()["slots"]),
             courier=resident(link.pid), agent=resident(link.couriers.agent.pid))  # fmt: skip


def stay(settings: dict[str, Any]) -> None:
    """Save once, say which processes there are, and do nothing more until somebody ends it."""
    with mlflash.Checkpointer(**settings) as ckpt:
        ckpt.save(1, state_at(1)).wait()
        link = ckpt._courier._connection
        note("up", rank=RANK, trainer=os.getpid(), agent=link.couriers.agent.pid, courier=link.pid,
             is_a=ckpt.report()["courier"])  # fmt: skip
        hang()


def cycle(settings: dict[str, Any], times: int) -> None:
    """Open and close Checkpointers, one after the other and two at a time."""
    left = []
    for number in range(times):
        with mlflash.Checkpointer(**settings | {"job": f"j{number % 3}"}) as ckpt:
            with mlflash.Checkpointer(**settings | {"job": "other"}) as other:
                other.save(number + 1, {"a": number}).wait()
            ckpt.save(number + 1, {"a": number}).wait()
        left.append([len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd")])
    least = [min(numbers) for numbers in zip(*left[:3], strict=True)]
    until(lambda: len(os.listdir("/proc/self/task")) <= least[0], f"the threads of {left} to end")
    until(lambda: len(os.listdir("/proc/self/fd")) <= least[1] + 1, f"the descriptors of {left} to be closed")
    note("end", rank=RANK)


def one_leaves(settings: dict[str, Any], how: str) -> None:
    """Rank 1 leaves the job; the others wait for it in something that is not ours, or save."""
    logging.getLogger("mlflash").addHandler(_Note())
    ckpt = mlflash.Checkpointer(**settings)
    ckpt.save(1, state_at(1)).wait()
    note("committed", rank=RANK, step=1)
    if RANK == 1:
        leave(how)
    if how in ENDS_ALL:
        hang()
    until(lambda: ckpt._courier.broken is not None, "the others to hear of it")
    for step in (2, 3, 4):
        try:
            ckpt.save(step, state_at(step)).wait()
        except mlflash.errors.MlflashError as error:
            note("failed", rank=RANK, step=step, why=str(error))
    held = len(ckpt._courier._jobs)
    ckpt.close()
    note("end", rank=RANK, held=held)


ENDS_ALL = ("raises", "interrupted")


def leave(how: str) -> None:
    if how == "interrupted":
        raise KeyboardInterrupt
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
    end(how, os.getpid(), "import time; time.sleep(100)")


def end(how: str, pid: int, program: str = "pass") -> None:
    """Let this process come to its end, or another one, in one of several ways."""
    signals = {"killed": signal.SIGKILL, "terminated": signal.SIGTERM, "hung up": signal.SIGHUP,
               "stopped": signal.SIGSTOP}  # fmt: skip
    if how == "raises":
        raise ValueError("a fault of the training")
    if how == "exits":
        sys.exit(3)
    if how == "exits at once":
        os._exit(3)
    if how == "executes":
        os.execv(sys.executable, [sys.executable, "-c", program])
    os.kill(pid, signals.get(how, signal.SIGKILL))


def _save_until_committed(ckpt: mlflash.Checkpointer, first: int) -> int:
    for step in range(first, first + 20):
        try:
            ckpt.save(step, state_at(step)).wait(PATIENCE_S)
            return step
        except mlflash.errors.MlflashError as error:
            note("failed", rank=RANK, step=step, why=str(error))
    raise AssertionError("no save was committed")


def out_of_step(settings: dict[str, Any], late: bool) -> None:
    """Couriers are started anew while rank 0 is between two jobs of a unit; the others wait for it in the second."""
    with mlflash.Checkpointer(**settings) as ckpt:
        ckpt.save(1, state_at(1)).wait()
        link, ranks = ckpt._courier._connection, ckpt.adapting.ranks
        before = link.pid
        try:
            with ckpt._courier.restart_scope():
                ranks.barrier()
                note("inside", rank=RANK, courier=before)
                if RANK == 0:
                    courier = ckpt._courier
                    gone = lambda: courier._is_down if not late else link.pid != before and not courier._is_down
                    until(gone, "the courier to have ended")
                note("agreed", rank=RANK, values=ranks.least_of([RANK, 2]))
        except mlflash.errors.Closed as error:
            note("closed", rank=RANK, why=str(error))
        state = state_at(0)
        note("restored", rank=RANK, step=ckpt.restore(state), same=is_same(state, state_at(1)))
        note("end", rank=RANK, step=_save_until_committed(ckpt, 2))


def abandoned(settings: dict[str, Any], point: str, dies: str) -> None:
    """The courier of rank 1 stops in a save, which all give up; in the first save of the next Checkpointer ranks die.

    Before, the courier goes on with what it was in.
    """
    set_traps([], RANK)
    with mlflash.Checkpointer(**settings) as ckpt:  # with long deadlines, as couriers start
        ckpt.save(1, state_at(1)).wait()
        courier, size = ckpt._courier._connection.pid, ckpt._trainer.ranks.size
    set_traps([{"path": [point], "action": "stop", "rank": 1},
               {"path": ["restore.loaded", "protect.announced", dies], "action": "rank"}], RANK)  # fmt: skip
    start = time.monotonic()
    try:
        with mlflash.Checkpointer(**settings | {"timeout_s": 5.0}) as ckpt:
            ckpt.save(2, state_at(2)).wait()
    except mlflash.errors.DeadlineExceeded as error:
        note("gave up", rank=RANK, ranks=error.ranks, why=str(error), seconds=time.monotonic() - start)
    (OUT / f"left{RANK}").touch()
    until(lambda: len([*OUT.glob("left*")]) == size, "all ranks to have given up")
    if RANK == 1:
        os.kill(courier, signal.SIGCONT)
    look(settings, saves=True)


def look(settings: dict[str, Any], saves: bool = False) -> None:
    """Restore, and note the step and whose content it has: that of 1 to 3, or of what is saved afterwards."""
    with mlflash.Checkpointer(**settings) as ckpt:
        state = state_at(0)
        step = ckpt.restore(state) or 0
        content = [number for number in (step, 100 + step) if is_same(state | {"step": number}, state_at(number))]
        note("restored", rank=RANK, step=step, content=content)
        if saves:
            ckpt.save(step + 1, state_at(100 + step + 1)).wait()


def later(settings: dict[str, Any]) -> None:
    """Start MPI after the courier is there, in each of the ways there are, and save all the same."""
    with mlflash.Checkpointer(**settings) as ckpt:
        said: list[str] = []

        def attempt(start: Callable[[], object]) -> None:
            try:
                start()
            except (ImportError, mlflash.errors.MpiUnavailable) as error:
                said.append(f"{type(error).__mro__[1].__name__}: {error}")

        attempt(lambda: importlib.import_module("mpi4py.MPI").COMM_WORLD.Barrier())
        started = bool(said) and "libmpi" in Path("/proc/self/maps").read_text()
        if said:
            import mpi4py

            mpi4py.rc.initialize = False
            from mpi4py import MPI

            assert isinstance(MPI.BYTE, MPI.Datatype) and not MPI.Is_initialized()
            attempt(MPI.Init)
            attempt(MPI.Init_thread)
        note("later", rank=RANK, said=said, started=started)
        ckpt.save(1, {"a": 1}).wait(PATIENCE_S)
    note("end", rank=RANK)


def fail_to_start(settings: dict[str, Any], dies: int | None = None) -> None:
    """Find no courier; ``dies``: the rank of which each courier is killed soon after it is forked."""
    next_epoch = Couriers.next_epoch

    def killed(couriers: Couriers, *args: Any) -> RunningCourier:
        os.kill((running := next_epoch(couriers, *args)).pid, signal.SIGSTOP)
        threading.Timer(0.1, kill, (running.pid,)).start()
        return running

    def kill(pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    if dies == RANK:
        Couriers.next_epoch = killed  # type: ignore[method-assign]
    logging.getLogger("mlflash").addHandler(_Note())
    start = time.monotonic()
    try:
        mlflash.Checkpointer(**settings)
    except mlflash.errors.Closed as error:
        note("failed", rank=RANK, why=str(error), seconds=time.monotonic() - start)


class _Note(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note("log", rank=RANK, level=record.levelname, text=record.getMessage())


if __name__ == "__main__":
    spec = json.loads(sys.argv[1])
    globals()[spec.pop("program")](**spec)
