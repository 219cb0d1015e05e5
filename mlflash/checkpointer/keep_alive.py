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
from typing import Any, TypeVar, overload

from ..channel import connection
from ..config import Config, from_environment
from ..crash_points import reach
from ..errors import ConfigError
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
from ..save.snapshot import has_committed
from ..telemetry.recorder import FAILED_AT
from . import checkpointer
from .checkpointer import Checkpointer

log = logging.getLogger("mlflash")

T = TypeVar("T")
_MORE_S = 2.0  # in addition to the time after which a loss is known
_MARGIN = 1.5  # a late rank must be lost, and the others told, before they stop waiting
around_frameworks: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {}
"""What each call of ``train`` is made in, if a framework trains. Adapters enter it, by the name of the framework."""


@overload
def keep_alive(train: Callable[[], T]) -> T: ...


@overload
def keep_alive(train: Callable[[Checkpointer, int], T], state: Any, directory: str | os.PathLike[str] | None = None,
               **settings: Any) -> T: ...  # fmt: skip


def keep_alive(train: Callable[..., T], state: Any = None, directory: str | os.PathLike[str] | None = None,
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

    Without ``state``, a framework trains, and its adapter restores. Then ``train`` makes everything that depends on the
    rank, all wrapped models (DDP, FSDP2) and all process groups but the first one. It keeps none of them elsewhere.

    Args:
        train: gets a Checkpointer and the step of ``state``, which is 0 if nothing was committed. It trains from there,
            and saves. Without ``state`` it gets nothing, and an adapter makes the Checkpointer.
        state: what is restored, as in `Checkpointer.restore`. Default: ``train`` restores everything that it changes.
        directory, settings: arguments of the Checkpointer. With an adapter, give them to the adapter.

    Returns:
        What ``train`` returns.

    Raises:
        ConfigError: torch.distributed was set up with process groups that mlflash cannot replace; or something of an
            earlier call of ``train`` is still there. The text says what to do instead.
        Exception: what ``train`` raises, if no rank was lost.
    """
    if state is None and (directory is not None or settings):
        raise ConfigError("without a state, an adapter makes the Checkpointer: give these arguments to the adapter",
                          found=sorted(settings) or directory)  # fmt: skip
    link = decider()
    if link is None and state is None:
        return train()
    if link is None:
        with Checkpointer(directory, **settings) as ckpt:
            return train(ckpt, ckpt.restore(state) or 0)
    result: T = _Rounds(link, train, state, {"directory": directory, **settings}).run()
    return result


class _Rounds:
    """Runs one round after the other in this process."""

    def __init__(self, link: DeciderLink, train: Callable[..., Any], state: Any, settings: Any):
        self._link, self._train, self._state, self._settings = link, train, state, settings
        self._ckpts: list[Checkpointer] = []  # those that were made in this round
        self._agent: AgentClient | None = None  # it stays from round to round, as it has imported everything
        self._seat = Seat(0, 0, 0, 0.0, 0.0, 0.0)  # of the round to which all this belongs
        self._is_first = False  # whether this process does not continue what another one has begun
        self._has_begun = False  # whether it has reported that it trains in this round
        self._times = _Times(0.0)  # of what comes before that
        self._watch: ProgressWatch | None = None  # from then on
        self._interrupting = threading.Lock()

    def run(self) -> Any:
        check_groups(are_needed=self._state is None)
        link = self._link
        if link.waits:
            os.environ.pop(FAILED_AT, None)  # the others have recovered without it
            self._agent = connection.find_agent(self._config(), link.size)
            forked_spare.is_ready()
        link.on_lost.append(self._interrupt)
        self._unit()  # it is known then when ranks are lost
        link.say({"ready": True})
        after, self._times = 0, _Times(time.monotonic())
        while True:
            seat = link.seat(after)
            with self._interrupting:  # wait for an interruption of the last round: it must not touch this one
                self._seat = seat
            if after:
                self._times.note("wait")
            else:  # there was no round to leave
                self._times = _Times(time.monotonic())
            checkpointer.joined[:] = [self._join]
            try:
                result = self._round()
                break
            except Exception as error:
                if not link.is_over(seat.round, seat.lost_s + _MORE_S):
                    raise
                log.info("leaving round %d: %s", seat.round, str(error)[:200])
                _clear(error)
            finally:
                checkpointer.joined.clear()
                self._end_watch()
            self._times = _Times(link.heard_at)
            self._leave()
            self._times.note("leave")
            after = seat.round
        if self._agent is not None:
            self._agent.close()
        return result

    def _round(self) -> Any:
        seat = self._seat
        self._is_first = seat.round == 1 and not self._link.waits
        self._has_begun = False
        if not self._is_first:
            self._take()
        result = self._train_framework() if self._state is None else self._train_state()
        self._link.check(seat.round)
        self._link.say({"done": seat.round})
        return result

    def _train_state(self) -> Any:
        ckpt = Checkpointer(**self._settings)
        self._times.note("checkpointer")
        reach("round.open")
        if not self._is_first:
            for group in registered_groups:
                group.connect(self._seat, self._share)
                group.forget_step()
            self._times.note("groups")
            reach("round.groups")
        step = ckpt.restore(self._state)
        self._times.note("restore")
        self._begin(step)
        result = self._train(ckpt, step or 0)
        self._end_watch()
        self._link.check(self._seat.round)
        ckpt.close()
        return result

    def _train_framework(self) -> Any:
        if not self._is_first:
            for group in registered_groups:
                group.renew(self._seat, self._share)
            self._times.note("groups")
            reach("round.groups")
            self._link.check(self._seat.round)  # an interruption a moment earlier would have found no group
        with contextlib.ExitStack() as stack:
            for around in around_frameworks.values():
                stack.enter_context(around())
            result = self._train()
        self._end_watch()
        if not self._has_begun:
            raise ConfigError("the function that keep_alive calls has made no Checkpointer: give the framework the "
                              "callback or wrapper of its adapter, or give keep_alive a state")  # fmt: skip
        return result

    def _share(self, what: str, text: str | None) -> str:
        return self._link.share(self._seat.round, what, text, _MARGIN * self._seat.ready_s)

    def _join(self, ckpt: Checkpointer) -> None:
        """Let a Checkpointer take part in this round. If a framework trains, the first one begins the round.

        Collective over the ranks of the Checkpointer.
        """
        number = self._seat.round
        self._ckpts.append(ckpt)
        self._link.check(number)  # an interruption a moment earlier would have found no Checkpointer
        ckpt.after_save(lambda snapshot: self._link.saved(number, snapshot.step, lambda: has_committed(snapshot)))
        if self._state is not None or self._has_begun:
            return
        self._times.note("checkpointer")
        reach("round.open")
        self._begin(max(ckpt.steps(), default=None))
        if not self._is_first:
            ckpt.adapting.must_restore("a rank was lost within a step, and nothing was restored since")

    def _begin(self, step: int | None) -> None:
        """Report that this process trains from a step on. None: nothing was committed."""
        if step is None and not self._is_first:
            log.error("a rank was lost before the first commit, so there is no step to go back to: this process ends")
            raise SystemExit(1)
        reach("round.restored")
        self._link.check(self._seat.round)
        if self._agent is None or self._agent.is_lost:
            self._agent = connection.find_agent(self._config(), self._seat.size)
        self._has_begun = True
        seat = self._seat
        self._link.began(seat.round, step or 0, self._times.took, self._unit())
        if not self._is_first:
            self._ckpts[0].adapting.recovered(step or 0, sum(self._times.took.values()))
        self._watch = ProgressWatch(seat.hang_s, lambda: self._link.say({"stuck": seat.round, **progress.described()}))

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.end()
        self._watch = None

    def _take(self) -> None:
        """Take the rank of this round, and connect couriers with all other ranks."""
        seat = self._seat
        reach("round.seated")
        if self._state is not None:
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
        self._times.note("couriers")
        reach("round.couriers")

    def _config(self) -> Config:
        known = {field.name for field in dataclasses.fields(Config)} - {"directory"}
        given = {name: value for name, value in self._settings.items() if name in known}
        if self._state is None:  # an adapter has the settings
            given = {"job": os.environ.get("MLFLASH_JOB") or "torch"}
        directory = self._settings["directory"]
        return from_environment(os.environ, None if directory is None else os.fspath(directory), **given)

    def _interrupt(self, number: int) -> None:
        with self._interrupting:
            if number < self._seat.round:
                return
            for ckpt in list(self._ckpts):
                ckpt.interrupt("a rank was lost: all ranks go back to the newest committed step")
            connection.interrupt(RoundOver("a rank was lost"))
            for group in registered_groups:
                group.drop()

    def _leave(self) -> None:
        self._interrupt(self._seat.round)
        are_unused = [ckpt.abandon() for ckpt in self._ckpts]
        if not all(are_unused):
            raise SystemExit("a device still copies into memory that another process needs: this process ends")
        self._ckpts.clear()
        connection.leave()
        self._link.say({"left": self._seat.round, "unit": self._unit()})
        reach("round.left")
        gc.collect()  # while others leave; iterators and their workers end with their frames

    def _unit(self) -> int:
        """What the number of ranks must be a multiple of, as this rank knows; 0: it cannot change."""
        # A framework makes its groups anew, for any number of ranks.
        units = [] if self._state is None else [group.unit() for group in registered_groups]
        return 0 if 0 in units else math.lcm(*units)


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
            cause.__traceback__ = None  # somebody may have kept the error, and a frame has its function
            todo += [cause.__cause__, cause.__context__]
