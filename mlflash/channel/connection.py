"""The connections of this process to its couriers.

All Checkpointers of the job share one. Ranks of a communicator get couriers of their own, if no connection of theirs
has them all: other ranks need not take part in their Checkpointer.

If a courier ends and its trainer did not end it, the epoch ends on all ranks: each rank kills its own courier, and all
start the next ones together. Saves that were under way fail, and the jobs of all ranks match as before. If a trainer
ends without notice, the others stop saving. If a trainer ends by an uncaught exception, it ends all others, like
MPI_Abort. Otherwise they would wait for it, perhaps forever, in a collective call.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import logging
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..config import Config
from ..errors import Closed, DeadlineExceeded, MlflashError, MpiUnavailable, pip_install, text_of
from ..events import Event
from ..launch import program_mpi
from ..launch.agent_client import AgentClient, AgentLost, AgentRefused, Departure, HubLost
from ..launch.courier_cores import own_rank_cores, to_list
from ..launch.courier_mpi import LIBRARY, needs_launcher
from ..launch.couriers import CourierEnded, Couriers, RankDeparted, StartFailed
from ..launch.launcher_variables import KEPT, Launched
from ..launch.rendezvous import Meeting, who_am_i
from ..memory.node_directory import claim_user_directory
from .channel import Broken, Call, Channel, PendingCall, Reply

if TYPE_CHECKING:
    from .client import Client

log = logging.getLogger("mlflash")

ENTRY = "mlflash.courier.main:run"
"""The entry point of a courier."""
_AGENT_S = 60.0  # limit for the imports of an agent, which may come from a slow file system
_ANNOUNCE_S = 10.0  # limit for the store to accept a message
_WHY_LENGTH = 2000  # the most characters of an exception
_NO_MPI = (
    "the courier of this rank ended before it was ready, and the output above says why. If it could not start MPI on "
    "hosts with several networks, MLFLASH_INTERFACE names the one to use. If its trainer has another version of "
    "mlflash, start all of the job from one installation"
)
_IN_VAIN = 3  # if so many couriers in a row end before they are up, no more are started
_ROUND_S = 30.0  # limit for `mlflash run` to replace another rank that keeps this one from having a courier
_LAST_S = 2.0  # limit for posted jobs to end after a rank has left the job


class Connection:
    """The connection of this trainer to its courier, which all Checkpointers of the process share.

    Collective, like `Couriers`.

    Args:
        directory: a private directory of this user, where ranks of one host may meet.
        meeting: see `Couriers`; None: the start may take ``timeout_s`` of the job.
        comm: of mpi4py, whose ranks they are; None: all ranks of the job.
    """

    def __init__(self, config: Config, directory: Path | None, agent: AgentClient,
                 meeting: Meeting | None = None, comm: Any = None):  # fmt: skip
        self._is_job = comm is None or program_mpi.is_whole(comm, os.environ)
        self._group = None if comm is None else comm.Get_group()
        self._timeout_s = config.timeout_s
        self.sessions: weakref.WeakValueDictionary[int, Client] = weakref.WeakValueDictionary()
        self._numbers = itertools.count(1)
        self._opened: collections.Counter[tuple[int, ...]] = collections.Counter()  # Checkpointers of each set of ranks
        self.lost: Closed | None = None  # why there is no courier any more
        self._departed: Departure | None = None  # the first departure reported
        self._closing, self._is_failing = Event(), False
        self._down = threading.Lock()  # held while items are added to `_held` or taken from it
        self._going_down = threading.Lock()
        self._restarting = threading.Lock()  # held by the thread that starts couriers
        self._held: list[PendingCall] | None = None  # items that wait for the next courier; None: there is one
        self.freed: list[str] = []  # sessions whose communicators are freed on all ranks
        self._losses = self._in_vain = 0  # couriers that have ended; the last ones in a row that were never up
        self._rising: threading.Thread | None = None
        self.queue: queue.SimpleQueue[PendingCall | None] = queue.SimpleQueue()
        self._hook_before = sys.excepthook
        self._hook = functools.partial(self._fail, sys.excepthook, os.getpid())
        self.is_kept = KEPT in os.environ  # after a loss the other processes continue, and so does this one
        self._sender = threading.Thread(target=self._send, name="mlflash-send", daemon=True)
        timeout_s = config.timeout_s if meeting is None else meeting.timeout_s
        end = time.monotonic() + timeout_s
        self.couriers = Couriers(ENTRY, os.environ, timeout_s, job=config.job, memory=config.memory,
                                 directory=directory, agent=agent, own_cores=True, meeting=meeting)  # fmt: skip
        if not self.is_kept:
            sys.excepthook = self._hook
        try:
            self._next_epoch(end - time.monotonic())
        except BaseException:
            self.couriers.close()
            self._unhook()
            raise
        # From here on threads read the attributes.
        self._listen()
        self._sender.start()
        threading.Thread(target=self._keep, name="mlflash-epochs", daemon=True).start()

    @property
    def is_closing(self) -> bool:
        """Whether this process needs no courier any more."""
        return self._closing.is_set()

    def group(self) -> Any:
        """The group of these ranks in the MPI of the program; None: the program does not use MPI, or not with these."""
        if self._group is None and self._is_job:
            couriers = self.couriers
            world = program_mpi.world_of(Launched(couriers.rank, couriers.size, None, "MPI"))
            self._group = None if world is None else world.Get_group()
        return self._group

    def ranks_of(self, comm: Any) -> tuple[int, ...] | None:
        """The numbers here of the ranks of a communicator (None: all ranks of the job); None if not all are here."""
        everyone = tuple(range(self.couriers.size))
        if comm is None:
            return everyone if self._is_job else None
        if comm.size == 1 == self.couriers.size:
            return everyone
        group = self.group()
        return None if group is None else program_mpi.ranks_in(comm, group)

    def number(self) -> int:
        """A new number."""
        return next(self._numbers)

    def add(self, number: int, session: Client, ranks: tuple[int, ...]) -> int:
        """Register a Checkpointer for what the courier sends to it. Return how many these ranks have had before.

        Raises Closed if one of the ranks has left the job, or there is no courier any more.
        """
        if self._departed is not None and self._departed.rank in ranks:
            raise Closed(str(self._departed))
        self.sessions[number] = session
        self.check()  # if the courier is lost after this line, this session is told, too
        self._opened[ranks] += 1
        return self._opened[ranks] - 1

    def _listen(self) -> None:
        running = self.couriers.courier
        self.channel, self.pid = Channel(running.channel), running.pid
        where = f"on cores {to_list(running.cores)}" if running.cores else "where its trainer runs"
        self.is_a = f"process (pid {running.pid}, {where}; {self.couriers.met})"
        threading.Thread(target=self._receive, args=(self.channel,), name="mlflash-receive", daemon=True).start()

    def _send(self) -> None:
        while (call := self.queue.get()) is not None:
            with self._down:
                if self._held is None:
                    self._send_one(call)
                elif call.is_job or call.is_kept:
                    self._held.append(call)
                    call.client.fail_later(call)

    def _send_one(self, call: PendingCall) -> None:
        """Send a frame, jobs only once."""
        if call.is_sent:
            return
        call.is_sent = call.is_job
        try:
            if call.is_job:
                call.client.check(call)
            with contextlib.suppress(OSError):  # the receiving thread notices it, too
                self.channel.send(call.frame, call.fds)
            call.sent.set()
        except Exception as error:  # the courier has stopped, or mlflash has a bug
            if call.is_job:
                call.client.refuse(call, error if isinstance(error, MlflashError) else Closed(text_of(error)))
            else:
                log.error("%s", text_of(error))

    def _receive(self, channel: Channel) -> None:
        try:
            while (frames := channel.receive()) is not None:
                for frame in frames:
                    self._take(frame)
            why = "it has ended"
        except Broken as error:
            why = str(error)
        if channel is not self.channel or self.is_closing or self._fails_at_the_start(channel):
            return
        if self._departed is not None:
            self._lose(_ended(f"{why}; and there is no next one: {self._departed}"))
            return
        try:
            self._go_down(why)
            self.couriers.announce_end(_ANNOUNCE_S)
        except (HubLost, AgentLost):  # then all ranks know
            pass
        except (OSError, DeadlineExceeded) as error:
            self._lose(_ended(f"{why}; and the other ranks could not be told: {error}"))

    # Epochs

    def _fails_at_the_start(self, channel: Channel) -> bool:
        """Whether an old courier has ended, or the first one before MPI was up: then another one would fail, too."""
        with self._restarting:
            if channel is not self.channel:
                return True
            try:
                self.couriers.check_start()
                return False
            except StartFailed as error:
                with contextlib.suppress(OSError, DeadlineExceeded):  # first, because `_lose` may end this process
                    self.couriers.depart(f"{_NO_MPI}: {error}", _ANNOUNCE_S, ends_job=False)
                self._lose(Closed(_NO_MPI, found=str(error)), is_own=True)
                return True
            except (OSError, ValueError, DeadlineExceeded):  # it is being closed, or the agent has ended, too
                return False

    def _go_down(self, why: str) -> None:
        with self._down:
            if self.lost is not None:  # there is no next courier to hold items for
                return
            self._held = [] if self._held is None else self._held
            self._losses += 1
        with self._going_down:
            for session in list(self.sessions.values()):
                session.go_down(self.pid, why)

    def _keep(self) -> None:
        """Whenever a courier has ended on any rank, start the next one."""
        try:
            while True:
                with contextlib.suppress(HubLost, AgentLost):  # the next epoch replaces what was lost
                    self.couriers.wait_for_end()
                if self.is_closing:
                    return
                self._go_down("the courier of another rank has ended")
                if self._rising is not None:
                    self._rising.join()
                with self._restarting:
                    self._restart()
        except RankDeparted as departed:
            self._part(departed.departure)
        except Exception as error:
            is_own = isinstance(error, (AgentLost, AgentRefused, CourierEnded))
            self._lose(_ended(f"the next one could not be started: {text_of(error)}"), is_own)

    def _fail(self, print_it: Callable[..., object], pid: int, kind: type[BaseException], error: BaseException,
              *traceback: object) -> None:  # fmt: skip
        """Print an exception that ends this process, and end the other ranks, too. The hook of `sys`."""
        self._is_failing = True
        print_it(kind, error, *traceback)
        if os.getpid() == pid and not self.is_closing:
            with contextlib.suppress(OSError, DeadlineExceeded):
                self.couriers.depart(f"{kind.__name__}: {error}"[:_WHY_LENGTH], _ANNOUNCE_S)

    def _part(self, departure: Departure) -> None:
        """Go on without a rank that has left the job, or end with it."""
        if departure.rank == self.couriers.rank:
            return
        if departure.ends_job and not self._is_failing:
            log.error("%s; this rank ends, too", departure)
            _end_process()
        self._departed = departure
        if self._held is not None:  # a courier had ended just before
            self._lose(Closed(str(departure)))
        end = time.monotonic() + _LAST_S
        for session in [client for client in self.sessions.values() if departure.rank in client.ranks]:
            session.wait_done(end - time.monotonic())
            session.lose(Closed(str(departure)))

    def _restart(self) -> None:
        start = time.monotonic()
        sessions = [session for _, session in sorted(self.sessions.items())]
        for session in sessions:
            session.wait_unused()
        losses = self._losses
        self._next_epoch(self._timeout_s)
        self._listen()
        # On another thread: this one notices if one of them ends again before all are up.
        self._rising = threading.Thread(
            target=self._rise, args=(sessions, start, losses), name="mlflash-rise", daemon=True
        )
        self._rising.start()

    def _next_epoch(self, timeout_s: float) -> None:
        while True:
            try:
                self.couriers.next_epoch(timeout_s, self.freed.copy())
                return
            except (AgentLost, AgentRefused, CourierEnded, HubLost):  # an agent was killed meanwhile, say
                if self.is_closing or not self._may_try_again():
                    raise

    def _rise(self, sessions: Sequence[Client], start: float, losses: int) -> None:
        """Let the next courier continue where the last one has ended, unless another one has ended since ``losses``."""
        try:
            for session in sessions:
                session.come_up()
        except Exception as error:
            if self.is_closing or self.lost is not None:
                return
            is_late = isinstance(error, DeadlineExceeded)
            if is_late or not self._may_try_again():
                self._lose(_ended(f"the next one could not be started: {text_of(error)}"), is_own=not is_late)
            return
        with self._down:
            if self._losses > losses:  # this courier has ended, too
                return
            held, self._held = self._held, None
            for job in held or ():
                self._send_one(job)
        self._in_vain = 0
        log.info("couriers were started anew in %.2g s", time.monotonic() - start)

    def _may_try_again(self) -> bool:
        """Tell all ranks to start couriers anew, because this rank's is not up; False: too many in a row were not."""
        self._in_vain += 1
        if self._in_vain > _IN_VAIN:
            return False
        with contextlib.suppress(OSError, DeadlineExceeded):
            self.couriers.announce_end(_ANNOUNCE_S)
        return True

    def send_first(self, call: PendingCall) -> None:
        """Send something to a courier that is being introduced, before the held items."""
        with self._down:
            self._send_one(call)

    def _take(self, frame: Call | Reply) -> None:
        if isinstance(frame, Call) and frame.method == "log":
            level, text = frame.args
            log.log(level, "%s", text)
            return
        session = self.sessions.get(frame.session)
        if session is not None:
            session.take(frame)

    def _lose(self, why: Closed, is_own: bool = False) -> None:
        """Take for granted that there is no courier any more; ``is_own``: for this rank, and not for another one."""
        with self._down:
            held, self._held = self._held, None
            is_first, self.lost = self.lost is None, self.lost or why
        for call in held or ():
            if call.is_job:
                call.client.refuse(call, why)
        if is_first:
            for session in list(self.sessions.values()):
                session.lose(why)
            # Under `keep_alive` nobody else would notice that this rank does not save any more.
            is_replaced = not self.is_kept or self._departed is not None
            if not is_replaced and not self._closing.wait(0.0 if is_own else _ROUND_S):
                log.error("%s. This process ends, and another one takes rank %d", why, self.couriers.rank)
                _end_process()

    def check(self) -> None:
        """Raise Closed if there is no courier any more."""
        if self.lost is not None:
            raise Closed(self.lost.message, found=self.lost.found)

    def close(self) -> None:
        """End the courier when it has done its jobs."""
        self._closing.set()
        self.queue.put(None)
        self._sender.join(_LAST_S)
        self.couriers.close(kill=False)
        self._lose(Closed("this process has ended its couriers"))  # so that what was left open can be closed
        self._unhook()

    def interrupt(self, why: MlflashError) -> None:
        """Kill the courier, fail everything that waits for it, and start no next one. Not collective; any thread."""
        self._closing.set()
        self._lose(Closed(str(why)))
        self.couriers.give_up()

    def abandon(self, timeout_s: float) -> None:
        """Give up after `interrupt`; afterwards no thread uses the connection any more."""
        self.queue.put(None)
        self._sender.join(timeout_s)
        is_alone = self._restarting.acquire(timeout=timeout_s)  # a thread that starts the next courier gives up, too
        self.couriers.close(timeout_s)
        if is_alone:
            self._restarting.release()
        self._unhook()

    def _unhook(self) -> None:
        if sys.excepthook is self._hook:
            sys.excepthook = self._hook_before


def _end_process() -> NoReturn:
    """End this process from any thread, with what it has printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads the stream any more
            stream.flush()
    os._exit(1)


def _ended(why: str) -> Closed:
    return Closed("the courier of this rank has ended", found=why)


# The connections of this process

_connections: list[Connection] = []  # in the same order on all ranks that have them
_starting: AgentClient | None = None  # its courier is being started; other ranks may be lost meanwhile


def find(comm: Any = None) -> Connection | None:
    """The connection of this process whose couriers are those of all ranks of a communicator; None: there is none yet.

    ``comm``: of mpi4py; None: all ranks of the job. Not collective, and the same on all these ranks.
    """
    return next((connection for connection in _connections if connection.ranks_of(comm) is not None), None)


def get(config: Config, comm: Any = None) -> Connection:
    """The connection of `find`. The first Checkpointer of these ranks makes it, collectively over them.

    Raises:
        Closed: its courier has ended.
        MpiUnavailable: there is no MPI for couriers, or one that only its own launcher can start.
        WorldMismatch: the ranks cannot find each other, or launcher and torch.distributed contradict each other.
        DeadlineExceeded: some ranks did not come in time.
    """
    if (connection := find(comm)) is None:
        me = who_am_i(os.environ) if comm is None else Launched(comm.rank, comm.size, None, "MPI")
        place = _meeting_place(config.memory, config.job)
        connection = _connect(config, place, me.size, _meeting(config, comm, me), comm)
        _connections.append(connection)
    connection.check()
    return connection


def find_agent(config: Config, size: int) -> AgentClient:
    """Connect to the agent that forks the couriers of this process, for a job of so many ranks; start it if needed.

    Raises MpiUnavailable: there is no MPI for couriers, or one that only its own launcher can start.
    """
    rank_cores = own_rank_cores(os.environ).to_text()
    try:
        agent = AgentClient(ENTRY, os.environ, _AGENT_S, job=config.job, memory=config.memory, mpi=size > 1,
                            rank_cores=rank_cores)  # fmt: skip
    except (AgentLost, AgentRefused) as error:
        raise MpiUnavailable(
            f"couriers cannot be started: {error}. If there is no MPI: {pip_install('mpich')}, or name the library of "
            f"your cluster's MPI in {LIBRARY}"
        ) from error
    if needs_launcher(agent.vendor):
        agent.close()
        raise MpiUnavailable(
            f"couriers need an MPI that starts without its launcher: {pip_install('mpich')}, or name the library "
            f"of your cluster's MPICH, Cray MPICH or Intel MPI in {LIBRARY}. The program itself may use "
            f"{agent.vendor}, and its launcher",
            found=agent.vendor,
        )
    return agent


def _meeting(config: Config, comm: Any, me: Launched) -> Meeting | None:
    """How the ranks of a communicator meet: by the program's own MPI. None: as `rendezvous` finds possible."""
    world = program_mpi.world_of(me) if comm is None else comm
    if world is None:
        return None
    share: Callable[[str | None, float], str] = lambda text, timeout_s: program_mpi.share(world, text, timeout_s)
    return Meeting(me, "the program's MPI" if comm is None else "comm=", config.timeout_s, share)


def reset(config: Config, meeting: Meeting) -> None:
    """Make a new connection of this process after `leave`. Collective over the current ranks.

    `interrupt` ends it early, if ``check`` of the meeting raises by then.

    Raises:
        MpiUnavailable: the agent of this node cannot be started.
        DeadlineExceeded: some ranks did not come in time.
    """
    _connections[:] = [_connect(config, None, meeting.me.size, meeting)]


def _connect(config: Config, directory: Path | None, size: int, meeting: Meeting | None,
          comm: Any = None) -> Connection:  # fmt: skip
    global _starting
    _starting = agent = find_agent(config, size)
    try:
        return Connection(config, directory, agent, meeting, comm)
    except BaseException:
        agent.close()
        raise
    finally:
        _starting = None


def interrupt(why: MlflashError) -> None:
    """Fail everything that waits for the courier of this process, permanently. Not collective; any thread."""
    if (agent := _starting) is not None:
        agent.close()
    for connection in _connections:
        connection.interrupt(why)


def leave(timeout_s: float = 10.0) -> None:
    """Give up the connections of this process, after `interrupt`."""
    while _connections:
        _connections.pop().abandon(timeout_s)


def _meeting_place(memory: str, job: str) -> Path | None:
    """Where ranks of one host may meet: this user's directory in memory, or None if there can be none.

    If something is wrong with the directory, the courier finds it later and tells all ranks.
    """
    usual = Path(memory, f"mlflash-{os.getuid()}")  # the meeting makes it
    if os.path.isdir(memory) and not os.path.lexists(usual):
        return usual
    try:
        return Path(claim_user_directory(memory, job))
    except (OSError, MlflashError):
        return None


def close_all() -> None:
    """End the couriers of this process when no Checkpointer needs them any more."""
    while _connections:
        _connections.pop().close()


os.register_at_fork(after_in_child=_connections.clear)
