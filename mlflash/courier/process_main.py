"""The courier as a process of its own: what it does from its fork to its end.

One thread reads what the trainer sends; each Checkpointer of the trainer has a session, whose jobs are done on a thread
of its own, on communicators of its own. When the trainer has ended, what it has posted is brought to its end, for as
long as that gets on; then the process ends.
"""

from __future__ import annotations

import functools
import logging
import mmap
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from ..draining.drain import Drain
from ..errors import Closed, DeadlineExceeded, MlflashError, SaveFailed, text_of
from ..memory.own_slots import SlotFile, SlotId
from ..mpi.courier import Courier, Job
from ..mpi.world import World, load_mpi
from ..protocol import messages as asked
from ..protocol.messages import FoundInMemory, Message
from ..protocol.save_request import SaveRequest
from ..protocol.wanted_parts import WantedPart
from ..redundancy.deduplication import Piece
from ..redundancy.shareable_leaves import ShareableLeaf, SharingNews
from ..redundancy.slot_plan import Plan
from ..wireup.courier_process import Courier as Forked
from . import wire_format as wire
from .session import Session
from .wire_format import BadMessage, Frame, Kind, Outcome

log = logging.getLogger("mlflash")

_ORPHAN_S = 5.0  # how long what a dead trainer has left may take
_LOOK_S = 0.05
_PLANS = 3  # that are kept besides the newest
_CLOSED = 8  # sessions that can still be asked for their report
_TOLD_S = 0.05  # how often a drain tells how far it is
_READ_NBYTES = 1 << 20


class TrainerLost(MlflashError):
    """The trainer has ended, and cannot answer."""


class Link:
    """The socket to the trainer, as all threads of the courier use it. Not collective.

    Args:
        sock: of it.
    """

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self.is_lost = threading.Event()
        self._sending = threading.Lock()
        self._waiting: dict[int, tuple[threading.Event, list[Frame]]] = {}
        self._questions = 0

    def send(self, kind: Kind, session: int, number: int, name: str, body: object) -> None:
        """Send a frame; nothing happens where the trainer has gone."""
        packed = wire.pack(kind, session, number, name, wire.encode(body))
        with self._sending:
            try:
                self.sock.sendall(packed)
            except OSError:
                self.lose()

    def lose(self) -> None:
        """Note that the trainer has gone: who waits for it is told."""
        self.is_lost.set()
        for woken, _ in list(self._waiting.values()):
            woken.set()

    def ask(self, world: World, session: int, job: int, name: str, *values: object) -> Any:
        """Ask the trainer something in the middle of a job, and wait for the answer as the job waits for others.

        Raises:
            TrainerLost: it has ended.
            MlflashError: what it has raised.
        """
        _, gives = wire.QUESTIONS[name]
        self._questions += 1
        woken, replies = self._waiting[self._questions] = (threading.Event(), [])
        number = self._questions
        try:
            self.send(Kind.QUESTION, session, number, name, (job, wire.encode(values)))
            world.wait_for(lambda: woken.is_set() or self.is_lost.is_set())
            if not replies:
                raise TrainerLost("the trainer of this rank has ended", rank=world.rank)
            outcome: Outcome = wire.decode(Outcome, replies[0].body)
            if outcome.error is not None:
                raise outcome.error
            return wire.decode(gives, outcome.result)
        finally:
            del self._waiting[number]

    def replied(self, frame: Frame) -> None:
        """Hand an answer to who waits for it."""
        woken, replies = self._waiting.get(frame.number, (threading.Event(), []))
        replies.append(frame)
        woken.set()


class RemoteTrainer:
    """The trainer, as a session sees it: see `startup.context.TrainerEnd`."""

    def __init__(self, link: Link, session: int, world: World):
        self._link, self._session, self._world = link, session, world

    def prepare(self, wanted: Sequence[tuple[SlotId, int]], waiting: Sequence[SlotId] = ()) -> list[SlotId]:
        try:
            given: list[SlotId] = self._link.ask(self._world, self._session, 0, "prepare", [*wanted], [*waiting])
        except TrainerLost:
            return []  # nobody fills them any more, but nobody has said which were
        return given

    def update(self, files: Iterable[SlotFile]) -> None:
        self._tell("update", [*files])

    def told_sharing(self, sharing: SharingNews) -> None:
        self._tell("told_sharing", sharing)

    def told_unhealed(self, is_unhealed: bool) -> None:
        self._tell("told_unhealed", is_unhealed)

    def _tell(self, name: str, value: object) -> None:
        self._link.send(Kind.EVENT, self._session, 0, name, value)


class RemoteAnswers:
    """What a trainer answers in the middle of one of its jobs: see `save_request.Trainer`.

    Args:
        link: to the trainer.
        hosted: the session.
        job: number of the job.
        request: of the save; None: it is none.
    """

    def __init__(self, link: Link, hosted: Hosted, job: int, request: SaveRequest | None):
        self._link, self._hosted, self._job, self._request = link, hosted, job, request

    def _ask(self, name: str, *values: object) -> Any:
        return self._link.ask(self._hosted.world, self._hosted.number, self._job, name, *values)

    def _tell(self, name: str, value: object) -> None:
        self._link.send(Kind.EVENT, self._hosted.number, self._job, name, value)

    def shareable(self) -> list[ShareableLeaf]:
        leaves: list[ShareableLeaf] = self._ask("shareable")
        return leaves

    def digests(self, keys: Collection[int]) -> dict[int, int]:
        made: dict[int, int] = self._ask("digests", [*keys])
        return made

    def lay_out(self) -> Plan:
        number, manifest_nbytes = self._ask("lay_out")
        return self._hosted.plan_of(number, manifest_nbytes)

    def stage(self) -> tuple[int, dict[Piece, int]]:
        inode, checks = self._ask("stage")
        return inode, dict(checks)

    @property
    def _has_deferred(self) -> bool:
        return self._request is not None and (self._request.has_deferred or self._request.waits_for_room)

    def begin_deferred(self) -> None:
        if self._request is not None and self._request.has_deferred:
            self._tell("begin_deferred", None)

    def finish_deferred(self) -> MlflashError | None:
        return self._problem("finish_deferred")

    def is_changed(self) -> MlflashError | None:
        return self._problem("is_changed")

    def _problem(self, name: str) -> MlflashError | None:
        if not self._has_deferred:
            return None
        try:
            problem: MlflashError | None = self._ask(name)
        except TrainerLost:
            return SaveFailed("its trainer ended before all was copied")
        return problem

    def cancel_deferred(self) -> None:
        if self._has_deferred:
            try:
                self._ask("cancel_deferred")
            except TrainerLost:
                pass  # what it was copying ended with it

    def ended(self, error: MlflashError | None, skipped: bool = False) -> None:
        self._tell("ended", (error, skipped))


class _Posted(Job):
    """A job of the trainer, which is told how it ends."""

    def __init__(self, work: Callable[[], Any], told: Callable[[_Posted], None], late: Callable[[MlflashError], None]):
        super().__init__(work, on_refused=self._refuse)
        self.refused, self._late = False, late
        self.woken = _Told(lambda: told(self))  # type: ignore[assignment]

    def is_late(self, error: DeadlineExceeded) -> None:
        self._late(error)

    def _refuse(self, error: MlflashError) -> None:
        self.refused = True


class _Told:
    """Stands for the event that a job sets at its end."""

    def __init__(self, tell: Callable[[], None]):
        self.set = tell


class Hosted:
    """A session, and the thread that does its jobs.

    Args:
        number: of it.
        link: to the trainer.
        opened: what the trainer has said of it.
        comm: of all ranks; None: there is one.
        starting: held by the session that connects its ranks: two at a time would take each other's messages.
    """

    def __init__(self, number: int, link: Link, opened: wire.Opened, comm: Any, starting: threading.Lock):
        self.number, self._link, self._starting = number, link, starting
        config = opened.config
        self.world = World(comm, config.ranks_per_node, config.timeout_s)
        self.jobs = Courier(self.world, threaded=True, nice=config.nice)
        self.session = Session(config, self.world, self.jobs, self._drain_began, is_process=True)
        self._plans: dict[int, Plan] = {}
        self._drains = 0
        self.posted = self.done = 0  # jobs
        self.is_closed = False

    def post(self, frame: Frame, files: deque[int]) -> None:
        """Post a job that the trainer asks for."""
        body = wire.decode(wire.known(wire.MESSAGES, frame.name), frame.body)
        message, answers, landing = self._message(body, frame, files)
        self.posted += 1
        work = functools.partial(self._do, message, answers, landing)
        told, late = functools.partial(self._told, frame), functools.partial(self._late, frame)
        self.jobs.post(_Posted(work, told, late))

    def _message(self, body: Any, frame: Frame, files: deque[int]) -> tuple[Message, Any, Landing | None]:
        if isinstance(body, wire.SaveWire):
            request = self._request(body)
            answers = RemoteAnswers(self._link, self, frame.number, request)
            commit = frame.name == "Commit"
            return asked.Commit(request) if commit else asked.CommitRestored(request, body.restores), answers, None
        if isinstance(body, wire.ExchangeWire):
            if not files:
                raise BadMessage("no file came with an exchange")
            landing = Landing(files.popleft(), body)
            return asked.Exchange(body.attempt, body.homes, body.files, landing.asked), None, landing
        if isinstance(body, asked.SettleShared):
            return body, RemoteAnswers(self._link, self, frame.number, None), None
        if not isinstance(body, Message):
            raise BadMessage(f"{frame.name} is no job")
        return body, None, None

    def _request(self, body: wire.SaveWire) -> SaveRequest:
        fields = {name: getattr(body, name) for name in body.__dataclass_fields__ if name not in (
            "plan", "manifest_nbytes", "checks", "restores", "problem")}  # fmt: skip
        request = SaveRequest(**fields, checks=dict(body.checks))
        request.problem = body.problem
        request.plan = None if body.plan < 0 else self.plan_of(body.plan, body.manifest_nbytes)
        return request

    def plan_of(self, number: int, manifest_nbytes: int) -> Plan:
        """The plan of a number, for a manifest of so many bytes."""
        if number not in self._plans:
            raise BadMessage(f"there is no plan {number}")
        known = self._plans[number]
        return Plan(known.layout, b"", known.private, known.sharing, known.pieces, manifest_nbytes)

    def _do(self, message: Message, answers: Any, landing: Landing | None) -> Any:
        try:
            if not isinstance(message, asked.Start):
                return self.session.handle(message, answers)
            with self._starting:
                started = self.session.handle(message)
                self.session.attach(RemoteTrainer(self._link, self.number, self.world))
                return started
        finally:
            if landing is not None:
                landing.close()

    def _told(self, frame: Frame, job: _Posted) -> None:
        self.done += 1
        if self.jobs.broken is not None and not job.refused:
            broken = Closed("the courier of this rank failed", found=text_of(self.jobs.broken))
            self._link.send(Kind.EVENT, self.number, 0, "broken", broken)
        self._link.send(Kind.DONE, self.number, frame.number, frame.name, _outcome(job.result, job.error, job.refused))

    def _late(self, frame: Frame, error: MlflashError) -> None:
        self._link.send(Kind.LATE, self.number, frame.number, frame.name, error)

    def answer(self, frame: Frame) -> None:
        """Answer what is asked beside the jobs."""
        message = wire.decode(wire.known(wire.MESSAGES, frame.name), frame.body)
        result: Any = None
        error: BaseException | None = None
        try:
            result = self.session.answer(message)
        except Exception as problem:  # whatever it is, the trainer waits
            error = problem
        self._link.send(Kind.ANSWER, self.number, frame.number, frame.name, _outcome(result, error, False))

    def told(self, frame: Frame) -> None:
        """Take in what the trainer tells."""
        value = wire.decode(wire.known(wire.TELLS, frame.name), frame.body)
        if frame.name == "plan":
            self._plans = {**dict([*self._plans.items()][-_PLANS:]), value.number: value.plan}
        elif frame.name == "step":
            self.session.context.pace.step()
        else:
            self.session.context.pace.stalled(value)

    def close(self, frame: Frame) -> None:
        """End its jobs, and let go of memory."""
        abandon = wire.decode(bool, frame.body)
        self.jobs.stop(abandon)
        self.session.close(abandon)
        self._link.send(Kind.ANSWER, self.number, frame.number, frame.name, _outcome(None, None, False))

    def _drain_began(self, drain: Drain) -> None:
        self._drains += 1
        number, told_at = self._drains, [0.0]

        def tell() -> None:
            now = time.monotonic()
            if drain.done or now - told_at[0] > _TOLD_S:
                told_at[0] = now
                state = wire.DrainWire(
                    number, drain.step, drain.path, drain.nbytes, drain.written, drain.progress, drain.moved,
                    (tuple(drain.silent[0]), drain.silent[1]), drain.seconds, drain.error, drain.done,
                )  # fmt: skip
                self._link.send(Kind.EVENT, self.number, 0, "drain", state)

        drain.told = tell
        tell()


class Landing:
    """A file into which other ranks' parts go, for the trainer.

    Args:
        fd: of it.
        body: says what goes where.
    """

    def __init__(self, fd: int, body: wire.ExchangeWire):
        self._fd = fd
        size = os.fstat(fd).st_size
        parts = [part for those in body.asked.values() for part in those]
        if any(part.at < 0 or part.nbytes < 0 or part.at + part.nbytes > size for part in parts):
            raise BadMessage("a part goes beyond its file")
        self._view = np.frombuffer(mmap.mmap(fd, size) if size else b"", np.uint8)
        self.asked = {rank: [self._wanted(part) for part in those] for rank, those in body.asked.items()}

    def _wanted(self, part: wire.PartWire) -> WantedPart:
        items = 1
        for length in part.shape:
            items *= length
        target = self._view[part.at : part.at + part.nbytes].reshape(*part.shape, part.nbytes // max(1, items))
        return WantedPart(part.rank, part.number, part.source, part.shape, target)

    def close(self) -> None:
        """Unmap and close it."""
        self.asked, self._view = {}, np.empty(0, np.uint8)
        os.close(self._fd)


def _outcome(result: Any, error: BaseException | None, refused: bool) -> Outcome:
    if isinstance(result, FoundInMemory):
        result = wire.FoundWire(result, None)
    elif hasattr(result, "folder"):
        result = wire.FoundWire(None, result)
    if error is not None and not isinstance(error, MlflashError):
        error = Closed(f"the courier failed: {text_of(error)}")
    return Outcome(error, refused, msgspec.Raw(wire.encode(result if error is None else None)))


class _Forward(logging.Handler):
    """Lets the trainer say what the courier logs."""

    def __init__(self, link: Link):
        super().__init__()
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f": {text_of(record.exc_info[1])}"
        if self._link.is_lost.is_set():
            print(f"mlflash courier: {text}", flush=True)
        self._link.send(Kind.EVENT, 0, 0, "log", (record.levelno, text))


def run(forked: Forked) -> None:
    """Be a courier until the trainer says that it ends, or has ended. The entry point of the forked process."""
    comm = None
    if forked.has_mpi:
        comm = load_mpi().COMM_WORLD
        forked.tell_mpi_is_up()
    link = Link(forked.trainer)
    log.addHandler(_Forward(link))
    log.propagate = False
    sessions: dict[int, Hosted] = {}
    try:
        _serve(forked, link, comm, sessions)
    except BadMessage as error:
        log.error("the courier ends: its trainer sent %s", error)
        link.lose()
    link.lose()
    _finish(sessions)


def _serve(forked: Forked, link: Link, comm: Any, sessions: dict[int, Hosted]) -> None:
    """Do what the trainer says, until it has ended."""
    stream, files, starting = wire.Stream(), deque[int](), threading.Lock()
    poll = select.poll()
    poll.register(link.sock, select.POLLIN)
    poll.register(forked.trainer_pidfd, select.POLLIN)
    while not link.is_lost.is_set():
        ready = [fd for fd, _ in poll.poll()]
        if link.sock.fileno() in ready:
            try:
                received, descriptors, _, _ = socket.recv_fds(link.sock, _READ_NBYTES, 16)
            except OSError:
                return
            files.extend(descriptors)
            if not received:
                return
            for frame in stream.add(received):
                _take(frame, link, comm, sessions, starting, files)
        elif forked.trainer_pidfd in ready:  # what it had sent is read
            return


def _take(frame: Frame, link: Link, comm: Any, sessions: dict[int, Hosted], starting: threading.Lock,
          files: deque[int]) -> None:  # fmt: skip
    if frame.kind is Kind.OPEN:
        opened: wire.Opened = wire.decode(wire.Opened, frame.body)
        if opened.version != wire.VERSION:
            raise BadMessage(f"version {opened.version} of the protocol, and this is {wire.VERSION}")
        log.setLevel(opened.log_level)
        sessions[frame.session] = Hosted(frame.session, link, opened, comm, starting)
        return
    if frame.kind is Kind.REPLY:
        link.replied(frame)
        return
    if frame.session not in sessions:
        raise BadMessage(f"there is no session {frame.session}")
    hosted = sessions[frame.session]
    if frame.kind is Kind.POST:
        hosted.post(frame, files)
    elif frame.kind is Kind.ASK:
        hosted.answer(frame)
    elif frame.kind is Kind.TELL:
        hosted.told(frame)
    elif frame.kind is Kind.CLOSE:
        hosted.is_closed = True
        for number in [number for number, one in sessions.items() if one.is_closed][:-_CLOSED]:
            del sessions[number]
        threading.Thread(target=hosted.close, args=(frame,), name="mlflash-close", daemon=True).start()
    else:
        raise BadMessage(f"a trainer sends no frame of kind {frame.kind}")


def _finish(sessions: dict[int, Hosted]) -> None:
    """Bring to its end what a trainer has posted that is dead, as long as it gets on."""
    end = time.monotonic() + _ORPHAN_S
    for hosted in sessions.values():
        while hosted.done < hosted.posted and time.monotonic() < end:
            time.sleep(_LOOK_S)
    for hosted in sessions.values():
        if not hosted.is_closed and hasattr(hosted.session, "context"):
            hosted.session.answer(asked.GiveUpDrain())
        if hasattr(hosted.session, "context"):
            hosted.session.context.recorder.end()
