"""The courier, from its fork to its end.

One thread reads what the trainer sends. Each Checkpointer of the trainer has a session, with its own thread for jobs
and its own communicators. When the trainer has ended, the courier goes on with the posted jobs for up to 4 s
(`ORPHAN_S`) and then ends. It drops a commit that takes longer.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import select
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from ..channel.channel import Broken, Call, Channel, Reply
from ..channel.records import SaveRequest
from ..channel.wanted_parts import Landing
from ..config import Config
from ..drain.drain_handle import Drain
from ..errors import Closed, MlflashError, SaveFailed, text_of
from ..events import Event
from ..launch.courier_process import Courier as Forked
from ..memory.own_slots import SlotFile
from ..mpi.job_thread import Job, JobThread
from ..mpi.world import World, load_mpi
from ..protect.deduplication import Piece, Plan, ShareableLeaf, SharingNews
from ..version import __version__
from .session import Session

log = logging.getLogger("mlflash")

ORPHAN_S = 4.0  # limit for posted jobs to end after their trainer; see `fork_server.ENDS_S`
_CLOSED = 8  # sessions that can still be asked for their report
_REPORT_S = 0.05  # shortest time between two reports of a drain's progress
_DRAIN_FIELDS = ("step", "path", "nbytes", "written", "progress", "moved", "silent", "seconds", "error", "done")


def run(forked: Forked) -> None:
    """Be a courier until the trainer closes the connection or ends. The entry point of the forked process."""
    comm = None
    if forked.has_mpi:
        comm = load_mpi().COMM_WORLD
        forked.tell_mpi_is_up()
    connection = TrainerConnection(Channel(forked.channel), forked.trains_on)
    log.addHandler(_Forward(connection))
    log.propagate = False
    sessions: dict[int, SessionThread] = {}
    try:
        _serve(forked, connection, comm, sessions)
    except Broken as error:
        log.error("the courier ends: its trainer sent %s", error)
    connection.lose()
    _finish(sessions)


def _serve(forked: Forked, connection: TrainerConnection, comm: Any, sessions: dict[int, SessionThread]) -> None:
    """Do what the trainer sends, until it has ended."""
    sock = connection.channel.sock
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    poll.register(forked.trainer_pidfd, select.POLLIN)
    while not connection.is_lost.is_set():
        ready = [fd for fd, _ in poll.poll()]
        if sock.fileno() in ready:
            frames = connection.channel.receive()
            if frames is None:
                return
            for frame in frames:
                if isinstance(frame, Reply):
                    connection.replied(frame)
                else:
                    _take(frame, connection, comm, sessions)
        elif forked.trainer_pidfd in ready:  # everything that it had sent has been read
            return


def _take(call: Call, connection: TrainerConnection, comm: Any, sessions: dict[int, SessionThread]) -> None:
    if call.method == "open":
        _open(call.session, connection, comm, sessions, *call.args)
    elif call.session in sessions:
        sessions[call.session].take(call)
        for number in [number for number, session in sessions.items() if session.is_closed][:-_CLOSED]:
            del sessions[number]
    elif call.job:
        raise Broken(f"a job for session {call.session}, which does not exist")
    elif call.number:  # the last courier has freed it
        connection.send(Reply(call.session, call.number, None, Closed("this Checkpointer was closed")))


def _open(
    session: int, connection: TrainerConnection, comm: Any, sessions: dict[int, SessionThread], version: str,
    log_level: int, config: Config, ranks: tuple[int, ...], earlier: int,
) -> None:  # fmt: skip
    if version != __version__:
        raise Broken(f"calls of mlflash {version}, and this is {__version__}")
    log.setLevel(log_level)
    if session in sessions:  # its trainer has introduced it again, not knowing that this courier had heard of it
        return
    sessions[session] = SessionThread(session, connection, comm, list(sessions.values()), config, ranks, earlier)


def _finish(sessions: dict[int, SessionThread]) -> None:
    """Wait up to `ORPHAN_S` for the jobs that the ended trainer has posted, and give up what is left."""
    end = time.monotonic() + ORPHAN_S
    for thread in sessions.values():
        thread.finish(end)
    for thread in sessions.values():
        if hasattr(thread.session, "state"):
            if not thread.is_closed:
                thread.session.give_up_drain()
            thread.session.state.recorder.end()


class SessionThread:
    """A session, and the thread that does its jobs.

    Args:
        comm: of all ranks of these couriers; None if there is one rank.
        before: earlier sessions. This one starts when those with its slots have ended.
        ranks: those that have this Checkpointer, in its order.
        earlier: how many Checkpointers these ranks have had before.

    Raises:
        Broken: its ranks are not ranks of these couriers, or this rank is not among them.
    """

    def __init__(self, number: int, connection: TrainerConnection, comm: Any, before: Iterable[SessionThread],
                 config: Config, ranks: tuple[int, ...], earlier: int):  # fmt: skip
        self.number, self._connection = number, connection
        rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
        self._slots = config.memory, config.job
        self.is_closed, self.has_ended = False, Event()
        self._before = [thread for thread in before if thread.is_closed and thread._slots == self._slots]
        if len({*ranks}) != len(ranks) or rank not in ranks or not {*ranks} <= {*range(size)}:
            raise Broken(f"a session of the ranks {str(ranks)[:80]} for rank {rank} of {size}")
        # Each session has its own communicators from the start, so the other sessions of these ranks do not matter.
        self.world = World(comm, config.here, config.timeout_s, ranks, f"{earlier}")
        self.jobs = JobThread(self.world)
        self.session = Session(config, self.world, self.jobs, self._drain_began, trains_on=connection.trains_on)
        self._drains = 0
        self._posted = self._done = 0  # jobs
        self._ending = threading.Condition()

    def take(self, call: Call) -> None:
        """Do what the trainer calls: post a job, or answer at once."""
        if call.method == "close":
            self.is_closed = True
            threading.Thread(target=self._close, args=(call, *call.args), name="mlflash-close", daemon=True).start()
        elif call.job:
            self._post(call)
        else:
            self._answer(call)

    def _post(self, call: Call) -> None:
        args, landing = call.args, None
        if call.method in Session.ASK_BACK:
            request = args[0] if isinstance(args[0], SaveRequest) else None
            args = (*args, TrainerProxy(self._connection, self.number, self.world, call.number, request))
        elif call.method == "exchange":
            *others, asked = args
            landing = Landing(self._connection.channel.descriptors.popleft())
            args = (*others, landing.wanted(asked))
        self._posted += 1
        work = functools.partial(self._do, call.method, args, landing)
        late = lambda error: self._connection.send(Call(self.number, 0, "late", (call.number, error)))
        self.jobs.post(Job(work, late, functools.partial(self._ended, call)))

    def _do(self, method: str, args: tuple[Any, ...], landing: Landing | None) -> Any:
        try:
            if method == "start":  # what an exception has left is given some time to end
                self.world.wait_for(lambda: all(thread.has_ended.is_set() for thread in self._before))
                self._before = []
            result = self.session.do(method, args)
            if method == "start":
                self.session.attach(TrainerProxy(self._connection, self.number, self.world))
            return result
        finally:
            if landing is not None:
                landing.close()

    def _ended(self, call: Call, job: Job) -> None:
        if self.jobs.broken is not None and not job.is_refused:
            broken = Closed("the courier of this rank failed", found=text_of(self.jobs.broken))
            self._connection.send(Call(self.number, 0, "broke", (broken,)))
        self._reply(call, job.result, job.error, job.is_refused)
        with self._ending:
            self._done += 1
            self._ending.notify_all()

    def finish(self, end: float) -> None:
        """Wait until the jobs posted so far have ended, or until ``end`` (time.monotonic)."""
        with self._ending:
            self._ending.wait_for(lambda: self._done >= self._posted, max(0.0, end - time.monotonic()))

    def _answer(self, call: Call) -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = getattr(self.session, call.method)(*call.args)
        except Exception as problem:  # in any case the trainer waits for an answer
            error = problem
        if call.number:
            self._reply(call, result, error)

    def _reply(self, call: Call, result: Any, error: BaseException | None, refused: bool = False) -> None:
        if error is not None and not isinstance(error, MlflashError):
            error = Closed(f"the courier failed: {text_of(error)}")
        self._connection.send(Reply(self.number, call.number, None if error is not None else result, error, refused))

    def _close(self, call: Call, abandon: bool) -> None:
        """End the jobs and release memory.

        If an exception left the Checkpointer, answer first, so that the trainer does not wait. The posted jobs then
        have up to `ORPHAN_S` to end.
        """
        try:
            if abandon:
                self._reply(call, None, None)
                self.finish(time.monotonic() + ORPHAN_S)
            self.jobs.stop(abandon)
            self.session.end(abandon)
        finally:
            self.has_ended.set()
        if not abandon:
            self._reply(call, None, None)

    def _drain_began(self, drain: Drain) -> None:
        self._drains += 1
        number, reported_at = self._drains, [0.0]

        def tell() -> None:
            now = time.monotonic()
            if drain.done or now - reported_at[0] > _REPORT_S:
                reported_at[0] = now
                progress = {name: getattr(drain, name) for name in _DRAIN_FIELDS}
                self._connection.send(Call(self.number, 0, "drain_moved", (number, progress)))

        drain.on_change = tell
        tell()


class TrainerConnection:
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

        Raises SaveFailed if it has ended, and what the trainer has raised.
        """
        with self._asking:
            self._questions += 1
            number = self._questions
            woken, replies = self._waiting[number] = (Event(), [])
        try:
            self.send(Call(session, number, method, args, job))
            world.wait_for(lambda: woken.is_set() or self.is_lost.is_set())
            if not replies:
                raise SaveFailed("its trainer ended before everything was copied", rank=world.rank)
            return replies[0].value()
        finally:
            del self._waiting[number]

    def replied(self, reply: Reply) -> None:
        """Pass an answer to the thread that waits for it."""
        woken, replies = self._waiting.get(reply.number, (Event(), []))
        replies.append(reply)
        woken.set()


class TrainerProxy:
    """The trainer as a session sees it: see `records.Trainer`.

    Args:
        job: that it is in the middle of; 0: none.
        request: of the save that this is; None: it is none.
    """

    def __init__(
        self,
        connection: TrainerConnection,
        session: int,
        world: World,
        job: int = 0,
        request: SaveRequest | None = None,
    ):
        self._connection, self._session, self._world, self._job = connection, session, world, job
        self._has_deferred = request is not None and request.has_deferred

    def _tell(self, method: str, *args: object) -> None:
        self._connection.send(Call(self._session, 0, method, args, self._job))

    def update(self, files: Sequence[SlotFile], has_free: bool, sharing: SharingNews | None, is_unprotected: bool
               ) -> None:  # fmt: skip
        self._tell("update", files, has_free, sharing, is_unprotected)

    # In the middle of a job

    def _ask(self, method: str, *args: object) -> Any:
        return self._connection.ask(self._world, self._session, self._job, method, *args)

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
        problem, checks = self._ask("finish_deferred") if self._has_deferred else (None, {})
        return problem, checks

    def is_changed(self) -> MlflashError | None:
        try:
            problem: MlflashError | None = self._ask("is_changed") if self._has_deferred else None
        except SaveFailed as error:  # the trainer has ended
            return error
        return problem

    def cancel_deferred(self) -> None:
        if self._has_deferred:
            try:
                self._ask("cancel_deferred")
            except SaveFailed:
                if not self._connection.is_lost.is_set():  # otherwise the trainer's copies have ended with it
                    raise

    def ended(self, error: MlflashError | None, skipped: bool = False, at: float | None = None) -> None:
        self._tell("ended", error, skipped, time.monotonic() if at is None else at)


class _Forward(logging.Handler):
    """Sends what the courier logs to the trainer, which logs it."""

    def __init__(self, connection: TrainerConnection):
        super().__init__()
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f": {text_of(record.exc_info[1])}"
        if self._connection.is_lost.is_set():
            with contextlib.suppress(OSError):  # the launcher, which read the output, may have ended, too
                print(f"mlflash courier: {text}", flush=True)
        self._connection.send(Call(0, 0, "log", (record.levelno, text)))
