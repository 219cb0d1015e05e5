"""Enter a training function again, in the same process and with the newest committed state, when a rank was lost."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import math
import os
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from ..channel import connection
from ..config import Config, from_environment
from ..crash_points import reach
from ..errors import MlflashError
from ..launch.agent_client import AgentClient
from ..launch.launcher_variables import Launched
from ..launch.rendezvous import Meeting
from ..run import forked_spare
from ..run.decider_link import (
    DeciderLink,
    RoundOver,
    Seat,
    check_groups,
    decider,
    registered_groups,
)
from ..run.progress import ProgressWatch, progress
from ..save.snapshot import Snapshot
from .checkpointer import Checkpointer

log = logging.getLogger("mlflash")

T = TypeVar("T")
_MORE_S = 2.0  # in addition to the time after which a loss is known
_MARGIN = 1.5  # a late rank must be lost, and the others told, before they stop waiting


def keep_alive(train: Callable[[Checkpointer, int], T], state: Any, directory: str | os.PathLike[str] | None = None,
               **settings: Any) -> T:  # fmt: skip
    """Train, and continue in this process when another process is lost.

    Collective over all ranks. Under ``mlflash run --keep-alive``, when a rank or a node is lost:

    - All other ranks leave ``train`` by an exception, raised by a collective of torch.distributed or by a call of the
    Checkpointer.
    - Another process takes the lost rank.
    - ``state`` is restored, in place, to the newest committed step.
    - ``train`` is called again, with a new Checkpointer.

    Models, optimizers and process groups stay the same objects. Without ``mlflash run --keep-alive``, ``train`` is
    called once, after a restore.

    What is not in ``state`` stays as the interrupted step left it. So put random generators (`mlflash.rng`), positions
    in data and counters into it. Iterators that ``train`` makes are made again.

    Args:
        train: gets a Checkpointer and the step of ``state``, which is 0 if nothing was committed. It trains from there,
            and saves.
        state: what is restored, as in `Checkpointer.restore`.
        directory, settings: arguments of the Checkpointer.

    Returns:
        What ``train`` returns.

    Raises:
        ConfigError: torch.distributed was set up with process groups that mlflash cannot replace; the text says what to
            use instead.
        Exception: what ``train`` raises, if no rank was lost.
    """
    link = decider()
    if link is None:
        with Checkpointer(directory, **settings) as ckpt:
            return train(ckpt, ckpt.restore(state) or 0)
    result: T = _Rounds(link, train, state, {"directory": directory, **settings}).run()
    return result


class _Rounds:
    """Runs one round after the other in this process."""

    def __init__(self, link: DeciderLink, train: Callable[[Checkpointer, int], Any], state: Any, settings: Any):
        self._link, self._train, self._state, self._settings = link, train, state, settings
        self._ckpt: Checkpointer | None = None
        self._agent: AgentClient | None = None  # it stays from round to round, as it has imported everything
        self._number = 0  # the round to which all this belongs
        self._interrupting = threading.Lock()

    def run(self) -> Any:
        check_groups()
        link = self._link
        if link.waits:
            self._agent = connection.find_agent(self._config(), link.size)
            forked_spare.is_ready()
        link.on_lost.append(self._interrupt)
        link.say({"ready": True})
        after, times = 0, _Times(time.monotonic())
        while True:
            seat = link.seat(after)
            with self._interrupting:  # wait for an interruption of the last round: it must not touch this one
                self._number = seat.round
            if after:
                times.note("wait")
            else:  # there was no round to leave
                times = _Times(time.monotonic())
            try:
                result = self._round(seat, times)
                break
            except Exception as error:
                if not link.is_over(seat.round, seat.lost_s + _MORE_S):
                    raise
                log.info("leaving round %d: %s", seat.round, str(error)[:200])
                _clear(error)
            times = _Times(link.heard_at)
            self._leave(seat)
            times.note("leave")
            after = seat.round
        if self._agent is not None:
            self._agent.close()
        return result

    def _round(self, seat: Seat, times: _Times) -> Any:
        is_first = seat.round == 1 and not self._link.waits
        if not is_first:
            self._take(seat, times)
        self._ckpt = ckpt = Checkpointer(**self._settings)
        times.note("checkpointer")
        reach("round.open")
        if not is_first:
            for group in registered_groups:
                group.connect(seat, lambda what, text: self._link.share(seat.round, what, text, _MARGIN * seat.ready_s))
                group.forget_step()
            times.note("groups")
            reach("round.groups")
        step = ckpt.restore(self._state)
        times.note("restore")
        if step is None and not is_first:
            log.error("a rank was lost before the first commit, so there is no step to go back to: this process ends")
            raise SystemExit(1)
        reach("round.restored")
        self._link.check(seat.round)
        if self._agent is None or self._agent.is_lost:
            self._agent = connection.find_agent(self._config(), seat.size)
        ckpt.after_save(lambda snapshot: self._link.saved(seat.round, snapshot.step, lambda: _is_committed(snapshot)))
        self._link.began(seat.round, step or 0, times.took, _unit())
        watch = ProgressWatch(seat.hang_s, lambda: self._link.say({"stuck": seat.round, **progress.described()}))
        try:
            result = self._train(ckpt, step or 0)
        finally:
            watch.end()
        self._link.check(seat.round)
        ckpt.close()
        self._link.check(seat.round)
        self._link.say({"done": seat.round})
        return result

    def _take(self, seat: Seat, times: _Times) -> None:
        """Take the rank of a seat, and connect couriers with all other ranks."""
        reach("round.seated")
        for group in registered_groups:
            group.take(seat.rank, seat.size)
        self._link.say({"here": seat.round})
        os.environ.update({"RANK": str(seat.rank), "WORLD_SIZE": str(seat.size)})
        meeting = Meeting(
            Launched(seat.rank, seat.size, None, "mlflash run"),
            "mlflash run",
            _MARGIN * seat.ready_s,  # a process may have to begin its program anew
            lambda text, timeout_s: self._link.share(seat.round, "couriers", text, timeout_s),
            check=lambda: self._link.check(seat.round),
        )
        connection.reset(self._config(), meeting)
        meeting.check()  # an interruption a moment earlier would have found nothing to interrupt
        times.note("couriers")
        reach("round.couriers")

    def _config(self) -> Config:
        known = {field.name for field in dataclasses.fields(Config)} - {"directory"}
        given = {name: value for name, value in self._settings.items() if name in known}
        directory = self._settings["directory"]
        return from_environment(os.environ, None if directory is None else os.fspath(directory), **given)

    def _interrupt(self, number: int) -> None:
        with self._interrupting:
            if number < self._number:
                return
            if self._ckpt is not None:
                self._ckpt.interrupt("a rank was lost: all ranks go back to the newest committed step")
            connection.interrupt(RoundOver("a rank was lost"))
            for group in registered_groups:
                group.drop()

    def _leave(self, seat: Seat) -> None:
        self._interrupt(seat.round)
        if self._ckpt is not None and not self._ckpt.abandon():
            raise SystemExit("a device still copies into memory that another process needs: this process ends")
        self._ckpt = None
        connection.leave()
        self._link.say({"left": seat.round, "unit": _unit()})
        reach("round.left")
        gc.collect()  # while others leave; iterators and their workers end with their frames


def _unit() -> int:
    """What the number of ranks must be a multiple of, as this rank knows; 0: it cannot change."""
    units = [group.unit() for group in registered_groups]
    return 0 if 0 in units else math.lcm(*units)


def _is_committed(snapshot: Snapshot) -> bool:
    """Wait for the end of a save. Return whether it is committed, which is the same on all ranks."""
    with contextlib.suppress(MlflashError):
        snapshot.wait_staged()
        snapshot.wait()
    return snapshot.committed


class _Times:
    """How long each phase took, since a moment."""

    def __init__(self, since: float):
        self._last, self.took = since, dict[str, float]()

    def note(self, what: str) -> None:
        now = time.monotonic()
        self.took[what] = round(now - self._last, 4)
        self._last = now


def _clear(error: BaseException) -> None:
    """Release what the frames of an interrupted step hold."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        cause = todo.pop()
        if cause is not None and id(cause) not in seen:
            seen.add(id(cause))
            traceback.clear_frames(cause.__traceback__)
            todo += [cause.__cause__, cause.__context__]
