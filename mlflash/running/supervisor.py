"""One run of a job after the other, until it ends well or there is no hope.

    start → watch → (end what is left) → judge → look at all nodes → put spares into empty seats → start again

Whatever goes wrong with a look costs time, never the job: what a node does not say is not known, and no more.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import json
import logging
import sys
import time
import uuid
from collections.abc import Sequence
from typing import Any

from ..errors import LaunchFailed
from ..pulse import SHOW_STACKS
from .journal import Journal
from .launcher import Launcher, Step
from .policy import Restarts
from .seats import Seats, reseat, take_seats

log = logging.getLogger("mlflash")

_NAP_S = 0.1
_GONE_S = 3.0  # between two questions whether nodes are in service
_LOOK_S = 20.0  # deadline of a look at the nodes
_SCAVENGE_S = 1800.0


@dataclasses.dataclass(frozen=True)
class Orders:
    """What is to be run.

    Attributes:
        argv: the program of each rank.
        nodes, ranks_per_node: how many.
        least: nodes that will do, for training that reshards; 0: all.
        max_restarts: of them.
        job, memory: where the ranks keep their slots.
        directory: where to scavenge to at the end; None: nothing is scavenged.
        keep_memory: leave the slots where they are at the end.
        hang_timeout_s: seconds without a save after which a run hangs; 0: it never does.
        look_every_s: seconds between two looks at the nodes.
        grace_s: seconds that training has for one more checkpoint, when it is told to end.
        gpus: GPUs that have to answer on each node; 0: nobody asks.
        interface: the network interface that has to be up; "": nobody asks.
    """

    argv: Sequence[str]
    nodes: int
    ranks_per_node: int
    least: int
    max_restarts: int
    job: str
    memory: str
    directory: str | None
    keep_memory: bool
    hang_timeout_s: float
    look_every_s: float
    grace_s: float
    gpus: int
    interface: str


@dataclasses.dataclass
class Outcome:
    """How one start ended.

    Attributes:
        why: "" where all ranks came to their end.
        code: exit code of the launcher; None where it had to be ended.
        lost: nodes that are out of service.
        told: number of the signal that ended it; 0: none did.
    """

    why: str = ""
    code: int | None = None
    lost: dict[str, str] = dataclasses.field(default_factory=dict)
    told: int = 0


@dataclasses.dataclass(frozen=True)
class Failure:
    """The end of a start.

    Attributes:
        last_beat: when a rank got on last, Unix time.
        noticed: when it was found out, and what was left ended.
        saved: the last step that a rank had handed to a save; None: none, or nobody knows.
    """

    last_beat: float
    noticed: float
    saved: int | None


class Supervisor:
    """Runs a job.

    Args:
        launcher: starts ranks.
        orders: what is to be run.
        journal: is told what happens.

    Attributes:
        told: a signal handler puts the number of the signal here: the run is to end.
    """

    def __init__(self, launcher: Launcher, orders: Orders, journal: Journal):
        self._launcher, self._orders, self._journal = launcher, orders, journal
        self._restarts = Restarts(orders.max_restarts)
        self._run = ""  # names this start to its ranks
        self._seen = 0  # ranks of it that have been seen at once
        self._begun, self._suspects = 0.0, ""
        self._looks: dict[str, dict[str, Any]] = {}  # what nodes said when they were looked at last
        self._failure: Failure | None = None  # how the start before this one ended
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "mlflash-look")
        self.told = 0

    def run(self) -> int:
        """Run until the end.

        Returns:
            An exit code: 0 where all ranks came to their end.

        Raises:
            LaunchFailed: the system that starts processes does not work.
        """
        everywhere = self._launcher.hosts()
        seats = take_seats(self._fit(everywhere), self._orders.nodes, self._orders.ranks_per_node, self._orders.least)
        while seats is not None:
            outcome = self._one_run(seats)
            if not outcome.why:
                return self._finish(everywhere, 0, "all ranks came to their end")
            if outcome.told:
                return self._finish(everywhere, 128 + outcome.told, outcome.why)
            newest = self._newest()
            self._say(f"run {self._restarts.done + 1} failed: {outcome.why}; newest checkpoint: {newest}")
            hopeless = self._restarts.after_failure(newest, bool(outcome.lost))
            if hopeless:
                return self._finish(everywhere, outcome.code or 1, hopeless)
            self._pause(self._restarts.pause_s)
            before, seats = seats, reseat(seats, self._fit(everywhere), self._orders.nodes, self._orders.least)
            if seats is not None:
                self._fetch(before, seats)
        why = f"fewer than {self._orders.least or self._orders.nodes} nodes are fit to train"
        return self._finish(everywhere, 1, why)

    def _one_run(self, seats: Seats) -> Outcome:
        """Start the ranks and watch them; nothing of them is left afterwards where it can be reached."""
        self._run, self._seen = uuid.uuid4().hex, 0
        self._journal.note(
            "start", job=self._orders.job, number=self._restarts.done, hosts=list(seats.hosts), ranks=seats.ranks
        )
        before, started = self._failure, time.time()
        env = {"MLFLASH_RUN": self._run, "MLFLASH_JOB": self._orders.job, "MLFLASH_MEMORY": self._orders.memory}
        step = self._launcher.start(seats, self._orders.argv, env)
        try:
            outcome = self._watch(step, seats)
        finally:
            step.end()
        noticed = time.time()
        self._look([host for host in seats.hosts if host not in outcome.lost])
        if outcome.code == 0 and not outcome.why:
            outcome.why = self._not_ended(seats)
        self._journal.note("end", why=outcome.why, code=outcome.code, lost=outcome.lost, newest=self._newest(),
                           **self._recovery(before, started))  # fmt: skip
        beats = [float(pulse["beat"]) for pulse in self._pulses()]
        saved = [int(pulse["saved"]) for pulse in self._pulses() if pulse["saved"] is not None]
        self._failure = Failure(max(beats, default=noticed), noticed, max(saved, default=None))
        return outcome

    def _watch(self, step: Step, seats: Seats) -> Outcome:
        """Wait until a run ends, hangs, loses a node, or is told to end."""
        next_gone = next_look = time.monotonic() + _GONE_S
        look: concurrent.futures.Future[None] | None = None
        self._begun, self._suspects = time.time(), ""
        while (code := step.poll()) is None:
            now = time.monotonic()
            if self.told:
                return self._last_checkpoint(step, seats)
            if now > next_gone:
                next_gone = now + _GONE_S
                if lost := self._launcher.gone(seats.hosts):
                    return Outcome("lost " + ", ".join(f"{host} ({state})" for host, state in lost.items()), lost=lost)
            if look is not None and look.done():
                look = None
                if (outcome := self._judge(seats)) is not None:
                    return outcome
            if look is None and now > next_look:
                next_look = now + self._orders.look_every_s
                look = self._pool.submit(self._look, seats.hosts)
            time.sleep(_NAP_S)
        return Outcome("" if code == 0 else f"exit code {code}", code, self._launcher.gone(seats.hosts))

    def _judge(self, seats: Seats) -> Outcome | None:
        """Say what a look at the nodes of a run that goes on means for it; None: it goes on."""
        if len(self._silent(seats)) == len(seats.hosts):  # Slurm, or the network of this node: nothing is known
            return None
        patience = self._orders.hang_timeout_s
        last_beat = max((float(pulse["beat"]) for pulse in self._pulses()), default=self._begun)
        if patience and time.time() - last_beat > patience:
            self._dump_stacks(seats)
            return Outcome(f"no rank has saved for {patience:g} s")
        before, self._suspects = self._suspects, self._dead(seats)
        # Twice the same: the launcher does not find out by itself, or survivors wait for the dead for ever.
        return Outcome(before, lost=self._silent(seats)) if before and before == self._suspects else None

    def _dead(self, seats: Seats) -> str:
        """Which nodes do not answer, and which ranks are gone without having come to their end, in words."""
        silent = list(self._silent(seats))
        if silent:
            return f"{', '.join(silent)} does not answer"
        pulses = self._pulses()
        gone = [int(pulse["rank"]) for pulse in pulses if pulse["state"] == "started" and not pulse["alive"]]
        if self._seen > len(pulses):  # a node came up again, with nothing in its memory
            gone += sorted({*range(seats.ranks)} - {int(pulse["rank"]) for pulse in pulses})
        self._seen = max(self._seen, len(pulses))
        return f"ranks {gone[:8]} died" if gone else ""

    def _silent(self, seats: Seats) -> dict[str, str]:
        return {host: "silent" for host in seats.hosts if host not in self._looks}

    def _last_checkpoint(self, step: Step, seats: Seats) -> Outcome:
        """Wait for one more checkpoint, as long as there is time."""
        end = time.monotonic() + self._orders.grace_s
        self._look(seats.hosts)
        before = self._newest()
        self._say(f"signal {self.told}: waiting up to {self._orders.grace_s:g} s for a checkpoint after step {before}")
        while step.poll() is None and time.monotonic() < end:
            time.sleep(1.0)
            self._look(seats.hosts)
            newest = self._newest()
            if newest is not None and (before is None or newest > before):
                break
        return Outcome(f"ended by signal {self.told}", step.poll(), told=self.told)

    # Looking at nodes

    def _look(self, hosts: Sequence[str]) -> None:
        """Ask nodes how they are; of those that do not answer nothing is known."""
        more = [self._orders.interface] if self._orders.interface else []
        argv = [sys.executable, "-m", "mlflash.running.node_look", self._orders.memory, self._orders.job, *more]
        looks = dict(self._looks)
        try:
            told = self._launcher.on_each(hosts, argv, _LOOK_S)
        except LaunchFailed as error:
            log.warning("the nodes cannot be looked at: %s", error)
            told = {}
        for host in hosts:
            looks.pop(host, None)
            try:
                looks[host] = json.loads(told[host])
            except (KeyError, ValueError):
                continue
        self._looks = looks

    def _fit(self, hosts: Sequence[str]) -> list[str]:
        """Which nodes can train: they are in service, they answer, and what they say of themselves is well."""
        gone = self._launcher.gone(hosts)
        unwanted = self._launcher.unwanted(hosts)
        for host, state in gone.items():
            self._say(f"{host} is {state}")
        self._look([host for host in hosts if host not in gone])
        fit = []
        for host in (host for host in hosts if host not in gone):
            if wrong := self._wrong_with(host) or unwanted.get(host, ""):
                self._say(f"{host} is not fit to train: {wrong}")
            else:
                fit.append(host)
        return fit

    def _wrong_with(self, host: str) -> str:
        look = self._looks.get(host)
        if look is None:
            return "it does not answer"
        if self._orders.gpus and (look["gpus"] or 0) < self._orders.gpus:
            return f"{look['gpus'] or 0} of {self._orders.gpus} GPUs answer"
        return f"{self._orders.interface} is down" if look["interface"] is False else ""

    def _pulses(self) -> list[dict[str, Any]]:
        """What the ranks of this start have said of themselves."""
        return [pulse for look in self._looks.values() for pulse in look["pulses"] if pulse["run"] == self._run]

    def _newest(self) -> int | None:
        """The newest step that was committed or restored, as far as ranks have said so."""
        steps = [pulse[what] for look in self._looks.values() for pulse in look["pulses"]
                 for what in ("committed", "restored") if pulse[what] is not None]  # fmt: skip
        return max(steps, default=None)

    def _not_ended(self, seats: Seats) -> str:
        """Say which ranks have not said that they came to their end, though the launcher returned 0."""
        pulses = self._pulses()
        if not pulses and len(self._looks) >= len(seats.hosts):
            self._say("no rank made a Checkpointer: the exit code is all there is to go by")
            return ""
        missing = sorted({*range(seats.ranks)} - {int(p["rank"]) for p in pulses if p["state"] == "ended"})
        return f"the launcher returned 0, but ranks {missing[:8]} did not come to their end" if missing else ""

    def _recovery(self, before: Failure | None, started: float) -> dict[str, Any]:
        """How this start came on, for the journal: what it restored, and how long it took after the failure before."""
        pulses = self._pulses()
        times = {what: [pulse["times"][what] for pulse in pulses if what in pulse["times"]]
                 for what in ("made", "restored", "saved")}  # fmt: skip
        found: dict[str, Any] = {what: next((pulse[what] for pulse in pulses if pulse[what]), None)
                                 for what in ("restored", "source")}  # fmt: skip
        if before is None or not all(times.values()):
            return found
        made, restored, saved = (max(times[what]) for what in ("made", "restored", "saved"))
        if before.saved is not None and found["restored"] is not None:
            found["steps_lost"] = before.saved - found["restored"]
        marks = (before.last_beat, before.noticed, started, made, restored, saved)
        spans = [round(after - first, 3) for first, after in itertools.pairwise(marks)]
        names = ("detect_s", "look_s", "launch_s", "restore_s", "first_step_s")
        return found | {"outage_s": round(saved - before.last_beat, 3)} | dict(zip(names, spans, strict=True))

    def _fetch(self, before: Seats, after: Seats) -> None:
        """Bring what is in memory to the directory, where a node that is unfit to train can still be reached."""
        leaving = [host for host in before.hosts if host in self._looks and host not in after.hosts]
        if leaving and self._orders.directory:
            self._say(f"{', '.join(leaving)} leaves: what is in memory goes to {self._orders.directory} first")
            self._scavenge([host for host in before.hosts if host in self._looks])

    # Ending

    def _dump_stacks(self, seats: Seats) -> None:
        """Have every rank print where each of its threads is."""
        by_host = {host: [str(pulse["pid"]) for pulse in self._looks[host]["pulses"] if pulse["run"] == self._run]
                   for host in seats.hosts if host in self._looks}  # fmt: skip
        for host, pids in by_host.items():
            if pids:
                self._launcher.on_each([host], ["kill", f"-{SHOW_STACKS}", *pids], _LOOK_S)
        time.sleep(1.0)

    def _finish(self, hosts: Sequence[str], code: int, why: str) -> int:
        """Bring what is in memory to the directory, and clean up."""
        self._look([host for host in hosts if host not in self._launcher.gone(hosts)])
        there = [host for host in hosts if host in self._looks and self._looks[host]["steps"]]
        scavenged = self._scavenge(there) if self._orders.directory and there else None
        if there and not self._orders.keep_memory and (scavenged is not False):
            clean = [sys.executable, "-m", "mlflash", "clean", self._orders.job, "--memory", self._orders.memory]
            self._launcher.on_each(there, clean, _LOOK_S)
        self._journal.note("finish", code=code, why=why, scavenged=scavenged)
        self._say(f"finished with exit code {code}: {why}")
        return code

    def _scavenge(self, hosts: Sequence[str]) -> bool:
        argv = [sys.executable, "-m", "mpi4py", "-m", "mlflash", "scavenge", str(self._orders.directory),
                "--job", self._orders.job, "--memory", self._orders.memory]  # fmt: skip
        step = self._launcher.start(Seats(tuple(hosts), 1), argv, {})
        end = time.monotonic() + _SCAVENGE_S
        while (code := step.poll()) is None and time.monotonic() < end:
            time.sleep(_NAP_S)
        step.end()
        return code == 0

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.told:
            time.sleep(_NAP_S)

    def _say(self, text: str) -> None:
        print(f"mlflash run: {text}", file=sys.stderr, flush=True)
