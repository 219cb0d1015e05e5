"""The courier's side of its trainer: questions and notices to it in the middle of a job."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any

from ..errors import MlflashError, SaveFailed
from ..events import Event
from ..memory.own_slots import SlotFile
from ..mpi.world import World
from ..protocol.save_request import SaveRequest
from ..redundancy.deduplication import Piece, Plan, ShareableLeaf, SharingNews
from .channel import Call, Channel, Reply


class TrainerLost(MlflashError):
    """The trainer has ended and cannot answer."""


class Link:
    """The channel to the trainer, shared by all threads of the courier."""

    def __init__(self, channel: Channel, trains_on: frozenset[int] = frozenset()):
        self.channel, self.trains_on = channel, trains_on
        self.is_lost = Event()
        self._asking = threading.Lock()
        self._waiting: dict[int, tuple[Event, list[Reply]]] = {}
        self._questions = 0

    def send(self, frame: Call | Reply) -> None:
        """Send a frame, see `Channel.send`. If the trainer has gone, do nothing."""
        try:
            self.channel.send(frame)
        except OSError:
            self.lose()

    def lose(self) -> None:
        """Note that the trainer has gone, and wake all threads that wait for it."""
        self.is_lost.set()
        for woken, _ in list(self._waiting.values()):
            woken.set()

    def ask(self, world: World, session: int, job: int, method: str, *args: object) -> Any:
        """Ask the trainer something in the middle of a job. While this waits, MPI progresses as in other waits.

        Raises TrainerLost if it has ended, and what the trainer has raised.
        """
        with self._asking:
            self._questions += 1
            number = self._questions
            woken, replies = self._waiting[number] = (Event(), [])
        try:
            self.send(Call(session, number, method, args, job))
            world.wait_for(lambda: woken.is_set() or self.is_lost.is_set())
            if not replies:
                raise TrainerLost("the trainer of this rank has ended", rank=world.rank)
            return replies[0].value()
        finally:
            del self._waiting[number]

    def replied(self, reply: Reply) -> None:
        """Pass an answer to the thread that waits for it."""
        woken, replies = self._waiting.get(reply.number, (Event(), []))
        replies.append(reply)
        woken.set()


class RemoteTrainer:
    """The trainer as a session sees it: see `startup.context.TrainerEnd`. ``job``: that it is in the middle of."""

    def __init__(self, link: Link, session: int, world: World, job: int = 0):
        self._link, self._session, self._world, self._job = link, session, world, job

    def _tell(self, method: str, *args: object) -> None:
        self._link.send(Call(self._session, 0, method, args, self._job))

    def update(self, files: Sequence[SlotFile]) -> None:
        self._tell("update", [*files])

    def freed(self) -> None:
        self._tell("freed")

    def told_sharing(self, sharing: SharingNews) -> None:
        self._tell("told_sharing", sharing)

    def told_unhealed(self, is_unhealed: bool) -> None:
        self._tell("told_unhealed", is_unhealed)


class RemoteAnswers(RemoteTrainer):
    """A trainer's answers in the middle of one of its jobs: see `save_request.Trainer`."""

    def __init__(self, link: Link, session: int, world: World, job: int, request: SaveRequest | None):
        super().__init__(link, session, world, job)
        self._has_deferred = request is not None and request.has_deferred

    def _ask(self, method: str, *args: object) -> Any:
        return self._link.ask(self._world, self._session, self._job, method, *args)

    def shareable(self) -> list[ShareableLeaf]:
        leaves: list[ShareableLeaf] = self._ask("shareable")
        return leaves

    def digests(self, keys: Collection[int]) -> dict[int, int]:
        made: dict[int, int] = self._ask("digests", [*keys])
        return made

    def lay_out(self) -> Plan:
        plan: Plan = self._ask("lay_out")
        return plan

    def stage(self, files: Sequence[SlotFile]) -> tuple[int, dict[Piece, int], bool]:
        inode, checks, self._has_deferred = self._ask("stage", files)
        return inode, checks, self._has_deferred

    def handed_over(self) -> None:
        self._tell("handed_over")

    def begin_deferred(self) -> None:
        if self._has_deferred:
            self._tell("begin_deferred")

    def finish_deferred(self) -> tuple[MlflashError | None, dict[Piece, int]]:
        if not self._has_deferred:
            return None, {}
        try:
            problem, checks = self._ask("finish_deferred")
        except TrainerLost:
            return _lost(), {}
        return problem, checks

    def is_changed(self) -> MlflashError | None:
        if not self._has_deferred:
            return None
        try:
            problem: MlflashError | None = self._ask("is_changed")
        except TrainerLost:
            return _lost()
        return problem

    def cancel_deferred(self) -> None:
        if self._has_deferred:
            with contextlib.suppress(TrainerLost):  # its copies ended with it
                self._ask("cancel_deferred")

    def ended(self, error: MlflashError | None, skipped: bool = False, at: float | None = None) -> None:
        self._tell("ended", error, skipped, time.monotonic() if at is None else at)


def _lost() -> SaveFailed:
    return SaveFailed("its trainer ended before everything was copied")
