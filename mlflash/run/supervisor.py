"""Runs a job again and again, until it ends well or another start has no chance.

start → watch → (end the remaining ranks) → judge → look at all nodes → put spares into empty seats → start again

`node_watch` interprets the status of the nodes.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from ..config import FRESH, PREFER_CERTIFIED
from ..errors import LaunchFailed
from ..launch.cause import PROGNOSES, Cause
from ..launch.own_process import running
from ..telemetry.recorder import FAILED_AT
from ..text import listed, many
from .agents import Agents
from .node_watch import Heartbeat, Looks, Watch, certified, is_suspect, recovery, unrestorable
from .processes import KILL_WAIT_S
from .started_ranks import RunLog, Start, StartedRanks, start

log = logging.getLogger("mlflash")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_SAME_STEP = 2  # failures without a newer checkpoint between them, after which the job is not started again
UNRESTORABLE = 65  # exit code if there are checkpoints and none can be restored: another start would find the same
SAME_ERROR = 70  # exit code if the same error came twice after the same step, so that another start would not help
GONE_S = 3.0  # seconds between two checks whether nodes are in service
_NAP_S = 0.1
_LOST_WAIT_S = 3.0
_NAMED = 8  # nodes named in a line
_SCAVENGE_S = 1800.0


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """What to run, and how."""

    argv: Sequence[str]
    nodes: int
    ranks_per_node: int
    least: int  # smallest number of nodes that is enough, for training that reshards; 0: all
    max_restarts: int
    job: str  # job, memory: where the ranks keep their slots
    memory: str
    directory: str | None  # where to copy the newest checkpoint at the end; None: nowhere
    keep_memory: bool  # whether the slots stay in memory at the end
    hang_timeout_s: float  # seconds without a save after which a run counts as hanging; 0: never
    look_every_s: float  # seconds between two looks at the nodes
    grace_s: float  # seconds that training has for one more checkpoint after a signal to end
    gpus: int
    interface: str  # the network interface that must be up; "": no check


def choose_nodes(before: Sequence[str], fit: Sequence[str], nodes: int, least: int = 0) -> tuple[str, ...] | None:
    """Choose the nodes of the next start: nodes that can stay keep their places, and spares take the empty ones.

    If there are not enough spares, there are fewer nodes. They grow again as soon as there are enough.

    Args:
        least: smallest number of nodes that is enough; 0: all that are wanted.

    Example:
        (a, b, c) with a, c, d, e fit → (a, d, c); with a and c fit, and ``least=2`` → (a, c).
    """
    spares = iter([host for host in fit if host not in before])
    places: list[str | None] = [host if host in fit else next(spares, None) for host in before]
    places += [next(spares, None) for _ in range(nodes - len(places))]
    taken = tuple(host for host in places if host is not None)
    return None if len(taken) < (least or nodes) else taken


@dataclasses.dataclass
class Restarts:
    """The failures so far, and what follows from them."""

    most: int
    done: int = 0
    goes_back: bool = False
    """Whether the next start takes the newest certified step, and not the newest step."""
    is_same_error: bool = False
    """Whether there is no further restart because the same error came twice after the same step."""
    _cause: Cause | None = None  # of the last failure that was no loss of a node, since the newest checkpoint
    _newest: int | None = None  # newest checkpoint at the last failure
    _left: int | None = None  # the newest checkpoint when the job went back to the certified one
    _back_to: int | None = None  # the certified step that it went back to last
    _since: int = 0  # failures since the newest checkpoint was committed
    _in_vain: int = 0  # those of them without a lost node

    def after_failure(self, newest: int | None, node_lost: bool, certified: int | None = None, is_suspect: bool = False,
                      cause: Cause | None = None, is_repeated: bool = False) -> str:  # fmt: skip
        """Say why there is no further restart; "" if there is one.

        The kind of failure decides where the next start goes on. After a lost node that is the newest step. If the same
        step failed twice, or the values of the last save are suspect, it is the certified step, once for each certified
        step.

        Args:
            node_lost: whether a node or a GPU was lost. Then the training is not to blame.
            cause: why it failed, if that is known.
            is_repeated: whether the same error came twice after the same step in this start alone.
        """
        if self.goes_back and newest in (self._left, self._back_to):  # nothing was saved since then
            newest = self._back_to
        else:
            self.goes_back, self._left = False, None
        if newest is not None and (self._newest is None or newest > self._newest):
            self._newest, self._since, self._in_vain, self._cause = newest, 0, 0, None
        self._since += 1
        self._in_vain += not node_lost
        is_same_error = is_repeated or (cause is not None and cause.is_again(self._cause))
        self._cause = self._cause if node_lost else cause
        can_go_back = certified is not None and certified not in (self._back_to, newest) and not node_lost
        if can_go_back and self.done < self.most and (is_suspect or is_same_error or self._in_vain >= _SAME_STEP):
            self.goes_back, self._left, self._back_to = True, newest, certified
            self._newest, self._since, self._in_vain, is_same_error = certified, 1, 0, False
        where = "before the first checkpoint" if self._newest is None else f"after step {self._newest}"
        self.is_same_error = is_same_error
        if is_same_error:
            return f"the same error came again {where}"
        if self.done >= self.most:
            return f"{self.done} of {self.most} restarts are used up"
        if self._in_vain >= _SAME_STEP:
            return f"it failed {self._in_vain} times {where} without a newer checkpoint"
        self.done += 1
        return ""

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next start: twice as long after each failure without a newer checkpoint."""
        return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (self._since - 2)) if self._since > 1 else 0.0


@dataclasses.dataclass
class Outcome:
    """How one start ended."""

    why: str = ""  # the reason; "" if all ranks finished
    code: int | None = None
    lost: dict[str, str] = dataclasses.field(default_factory=dict)
    hosts: tuple[str, ...] = ()  # where the ranks were then
    heartbeats: Sequence[Heartbeat] = ()  # the last ones of its ranks
    cause: Cause | None = None  # the first one; None if it is unknown
    is_repeated: bool = False  # see `StartedRanks`
    unrestorable: str = ""  # why none of the existing checkpoints could be restored, as ranks reported; "" if not so

    def __str__(self) -> str:
        """What failed, and what shows it."""
        if self.cause is None:
            return self.why
        return str(self.cause) if self.cause.text == self.why else f"{self.why}: {self.cause}"

    @property
    def prognosis(self) -> str:
        """Why the next start may not fail in the same way, as the end of a sentence."""
        return "" if self.cause is None else f": {PROGNOSES[self.cause.kind]}"


def _lost(hosts: Mapping[str, str]) -> str:
    return "lost " + ", ".join(f"{host} ({why})" for host, why in hosts.items())


class Supervisor:
    """Runs a job. ``start``: starts the ranks that train."""

    def __init__(self, agents: Agents, options: RunOptions, run_log: RunLog, start: Start):
        self._agents, self._options, self._run_log, self._start = agents, options, run_log, start
        self._restarts = Restarts(options.max_restarts)
        self._looks = Looks(agents, options.memory, options.job, options.gpus, options.interface)
        self._before: Sequence[Heartbeat] = ()  # the last ones of the start before this one
        self._noticed: float | None = None  # when it was noticed that this start had failed
        self._avoided = set[str]()  # nodes with a GPU that failed
        self._moved = set[tuple[str, str]]()  # nodes that ranks should leave, and why they did not; "": they did
        self.signal_number = 0  # a signal handler puts the number of the signal here, to end the run

    def run(self) -> int:
        before: tuple[str, ...] = ()
        while (hosts := self._choose(before)) is not None:
            if self.signal_number:
                break
            self._fetch(before, hosts)
            outcome = self._one_run(hosts)
            if not outcome.why:
                return self._finish(0, "all ranks came to their end")
            if outcome.unrestorable:
                return self._leave(outcome.unrestorable)
            if self.signal_number:
                break
            newest, number, good = self._looks.newest(), self._restarts.done + 1, certified(outcome.heartbeats)
            hopeless = self._restarts.after_failure(
                newest, bool(outcome.lost) or self._avoid(outcome.cause), good, is_suspect(outcome.heartbeats),
                outcome.cause, outcome.is_repeated,
            )  # fmt: skip
            then = f"does not start again: {hopeless}" if hopeless else f"starts again{outcome.prognosis}"
            self._say(f"start {number} failed: {outcome}; newest checkpoint: {newest}; it {then}")
            if hopeless:
                return self._finish(SAME_ERROR if self._restarts.is_same_error else outcome.code or 1, hopeless)
            if self._restarts.goes_back:
                self._say(f"the next start goes back to step {good}, which is certified")
            self._pause(self._restarts.pause_s)
            before = outcome.hosts
        if self.signal_number:
            return self._finish(128 + self.signal_number, f"ended by signal {self.signal_number}")
        fewest = self._options.least or self._options.nodes
        why = f"fewer than {fewest} nodes are fit to train, of {listed(self._agents.hosts, _NAMED)}"
        return self._finish(1, why)

    def _choose(self, before: Sequence[str]) -> tuple[str, ...] | None:
        """The nodes of the next start: if there are enough, none with a GPU that failed."""
        fit, nodes = self._fit(), self._options.nodes
        whole = choose_nodes(before, [host for host in fit if host not in self._avoided], nodes)
        return whole or choose_nodes(before, fit, nodes, self._options.least)

    def _avoid(self, cause: Cause | None) -> bool:
        """Avoid the node of a GPU that failed. Return whether there are enough others, as far as that is known."""
        if cause is None or cause.kind != "device":
            return False
        self._avoided.add(cause.host)
        return len(self._agents.hosts) - len(self._avoided) >= self._options.nodes

    def _one_run(self, hosts: tuple[str, ...]) -> Outcome:
        """Start the ranks and watch them. No rank that can be reached runs on afterwards."""
        ranks = len(hosts) * self._options.ranks_per_node
        run = uuid.uuid4().hex  # name of this start, for its ranks
        self._run_log.note("start", job=self._options.job, number=self._restarts.done, hosts=list(hosts), ranks=ranks)
        self._say(f"start {self._restarts.done + 1}: {many(ranks, 'rank')} on {listed(hosts, _NAMED)}")
        started = time.time()
        env = {"MLFLASH_RUN": run, "MLFLASH_JOB": self._options.job, "MLFLASH_MEMORY": self._options.memory}
        env |= {PREFER_CERTIFIED: "1"} if self._restarts.goes_back else {}
        env |= {FAILED_AT: str(self._noticed)} if self._noticed is not None else {}
        step = self._start(hosts, self._options.ranks_per_node, self._options.argv, env)
        watch = Watch(self._looks, run, hosts, ranks, self._options.hang_timeout_s)
        outcome = Outcome()
        try:
            outcome = self._watch(step, watch)
            outcome.hosts = step.hosts
        finally:
            # If a node is lost, the other ranks wait for it.
            step.end(_LOST_WAIT_S if outcome.lost else KILL_WAIT_S)
        noticed = time.time()
        outcome.cause, outcome.is_repeated = outcome.cause or step.cause, step.is_repeated
        if outcome.lost and (outcome.cause is None or outcome.cause.follows):
            outcome.cause = Cause("node", _lost(outcome.lost))
        self._looks.look([host for host in outcome.hosts if host not in outcome.lost])
        if outcome.code == 0 and not outcome.why and not step.replaces:
            outcome.why = watch.not_ended()
        outcome.heartbeats = self._looks.heartbeats(run)
        # Replaced ranks may run on other nodes than those that hold their slots. A start on these nodes may restore.
        outcome.unrestorable = unrestorable(outcome.heartbeats) if step.rounds == 1 else ""
        self._run_log.note("end", why=outcome.why, code=outcome.code, lost=outcome.lost, newest=self._looks.newest(),
                           cause=None if outcome.cause is None else outcome.cause.fields,
                           **recovery(outcome.heartbeats, started, self._before, self._noticed))  # fmt: skip
        self._before, self._noticed = outcome.heartbeats, noticed
        return outcome

    def _watch(self, step: StartedRanks, watch: Watch) -> Outcome:
        """Wait until a run ends, hangs, loses a node that it does not replace, or must end by a signal."""
        next_gone = next_look = time.monotonic() + GONE_S
        is_looking, answers = False, queue.SimpleQueue[Any]()
        while (code := step.poll()) is None:
            now, hosts = time.monotonic(), step.hosts
            if self.signal_number:
                return self._last_checkpoint(step)
            if now > next_gone:
                next_gone = now + GONE_S
                if step.replaces:
                    self._leave_drained(step)
                elif lost := self._agents.system.gone(hosts):
                    return Outcome(_lost(lost), lost=lost)
            if not answers.empty():
                is_looking = False
                self._looks.take(*answers.get())
                if (outcome := self._judge(step, hosts, watch)) is not None:
                    return outcome
            if not is_looking and now > next_look:
                is_looking, next_look = True, now + self._options.look_every_s
                # On a thread of its own: nodes that do not answer hold up nothing else.
                ask = lambda at: answers.put((at, *self._looks.ask(at)))  # noqa: E731
                threading.Thread(target=ask, args=(hosts,), name="mlflash-look", daemon=True).start()
            time.sleep(_NAP_S)
        lost = {**step.lost, **self._agents.system.gone(step.hosts)}
        return Outcome("" if code == 0 else f"exit code {code}", code, lost)

    def _leave_drained(self, step: StartedRanks) -> None:
        """Let ranks leave the nodes on which nothing new should run."""
        for host, why in self._agents.system.unwanted(step.hosts).items():
            why_not = step.ask_move(host)
            if (host, why_not) not in self._moved:
                self._moved.add((host, why_not))
                self._say(f"{host} is {why}: " + (f"its ranks stay, because {why_not}" if why_not else
                                                  "its ranks move after the next save"))  # fmt: skip

    def _judge(self, step: StartedRanks, hosts: Sequence[str], watch: Watch) -> Outcome | None:
        """What the status of the nodes means for a run that goes on; None: it goes on."""
        silent = self._looks.silent(hosts)
        if len(silent) == len(hosts):  # the fault is in Slurm or in the network of this node: nothing is known
            return None
        if watch.hangs():
            self._looks.show_stacks(hosts, watch.run)
            why = f"no rank has saved for {self._options.hang_timeout_s:g} s"
            return Outcome(why, cause=Cause("hang", why, "the stacks of all ranks, above"))
        dead = "" if step.replaces else watch.dead()
        return Outcome(dead, lost=dict.fromkeys(silent, "silent")) if dead else None

    def _last_checkpoint(self, step: StartedRanks) -> Outcome:
        """Wait for one more checkpoint, as long as there is time."""
        end = time.monotonic() + self._options.grace_s
        self._looks.look(step.hosts)
        before = self._looks.newest()
        self._say(f"signal {self.signal_number}: waiting up to {self._options.grace_s:g} s for a checkpoint after step "
                  f"{before}")  # fmt: skip
        while step.poll() is None and time.monotonic() < end:
            time.sleep(1.0)
            self._looks.look(step.hosts)
            newest = self._looks.newest()
            if newest is not None and (before is None or newest > before):
                break
        return Outcome(f"ended by signal {self.signal_number}", step.poll())

    def _fit(self) -> list[str]:
        """The nodes that can train: they are in service, they answer, and their status is good."""
        hosts, system = self._agents.hosts, self._agents.system
        gone, unwanted = system.gone(hosts), system.unwanted(hosts)
        for host, state in gone.items():
            self._say(f"{host} is {state}")
        there = [host for host in hosts if host not in gone]
        self._looks.look(there)
        wrong = {host: self._looks.wrong_with(host) or unwanted.get(host, "") for host in there}
        for host, why in wrong.items():
            if why:
                self._say(f"{host} is not fit to train: {why}")
        return [host for host in there if not wrong[host]]

    def _fetch(self, before: Sequence[str], after: Sequence[str]) -> None:
        """Copy the newest checkpoint in memory to the directory if a node that leaves the job can still be reached."""
        silent = self._looks.silent(before)
        there = [host for host in before if host not in silent]
        leaving = [host for host in there if host not in after]
        if leaving and self._options.directory:
            self._say(f"{', '.join(leaving)} leaves: the newest checkpoint in memory is copied to "
                      f"{self._options.directory} first")  # fmt: skip
            scavenge(self._agents, self._options, there)

    def _finish(self, code: int, why: str) -> int:
        scavenged = wind_up(self._agents, self._looks, self._options)
        if scavenged is False:
            there = ", ".join(self._looks.holding(self._agents.hosts))
            self._say(
                f"the newest checkpoint could not be copied to {self._options.directory}; it is in memory of {there}"
            )
            code = code or 1
        self._run_log.note("finish", code=code, why=why, scavenged=scavenged)
        self._say(f"finished with exit code {code}: {why}")
        return code

    def _leave(self, why: str) -> int:
        """End without touching memory: when a lost node is back, its checkpoint may be complete again."""
        self._run_log.note("finish", code=UNRESTORABLE, why=why, scavenged=None)
        self._say(f"finished with exit code {UNRESTORABLE}: {why}\n"
                  f"what is in memory stays there: start the job again when the lost nodes are back, begin anew with "
                  f"{FRESH}=1, or delete it with `mlflash clean {self._options.job}`")  # fmt: skip
        return UNRESTORABLE

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.signal_number:
            time.sleep(_NAP_S)

    def _say(self, text: str) -> None:
        print(f"mlflash run: {text}", file=sys.stderr, flush=True)


# The end of a job: copy the newest checkpoint in memory to the directory, then clean the memory of the nodes.


def wind_up(agents: Agents, looks: Looks, options: RunOptions) -> bool | None:
    """Scavenge what the nodes hold in memory and clean their memory. No rank may still run there."""
    gone = agents.system.gone(agents.hosts)
    there = [host for host in agents.hosts if host not in gone]
    looks.look(there)
    holding = looks.holding(there)
    scavenged = scavenge(agents, options, holding) if options.directory and holding else None
    if holding and not options.keep_memory and scavenged is not False:
        looks.clean(holding)
    return scavenged


def scavenge(agents: Agents, options: RunOptions, hosts: Sequence[str]) -> bool:
    """Copy the newest checkpoint in the memory of these nodes to the directory. Return whether that succeeded."""
    words = [*running("mlflash.tools.run_on_ranks"), "-m", "mlflash", "scavenge", str(options.directory),
             "--job", options.job, "--memory", options.memory]  # fmt: skip
    try:
        step = start(agents, hosts, 1, words, {"MLFLASH_JOB": options.job, "MLFLASH_MEMORY": options.memory})
    except LaunchFailed as error:
        log.warning("the newest checkpoint in memory cannot be copied to %s: %s", options.directory, error)
        return False
    end = time.monotonic() + _SCAVENGE_S
    while (code := step.poll()) is None and time.monotonic() < end:
        time.sleep(_NAP_S)
    step.end()
    return code == 0
