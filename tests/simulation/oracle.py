"""What must hold: the newest step that any rank saw committed, and that the scheme covers, comes back, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING


from mpi import MpiError

from mlflash.errors import MlflashError, Unrestorable
from mlflash.placement.protection_groups import place
from mlflash.placement.redundancy_scheme import parse
from mlflash.placement.survival import Survival, of
from mlflash.placement.topology import from_node_ids

if TYPE_CHECKING:
    from faults import Setting
    from history import History, Launch


def survival_of(setting: Setting) -> Survival:
    """Which losses of nodes the scheme of a setting covers."""
    nodes = [rank // setting.per_node for rank in range(setting.ranks)]
    topology = from_node_ids([(node * setting.per_node, f"node{node}") for node in nodes])
    return of(topology, place(topology, parse(setting.scheme)))


class Oracle:
    """Knows what a launch must find, and judges what it found.

    Attributes:
        newest: launch and step of the newest save that some rank saw committed; None: there is none.
        lost: nodes whose memory was lost or damaged since every copy of that was in place.
        ranks_of_newest: number of ranks that saved it.
    """

    def __init__(self, history: History):
        self._history = history
        self.newest: tuple[int, int] | None = None
        self.lost: set[int] = set()
        self._survival = survival_of(history.setting)
        self._healed: set[tuple[int, int]] = set()
        self.ranks_of_newest = history.setting.ranks

    def covers(self, node: int) -> bool:
        """Whether the newest step survives the loss of one more node."""
        return bool(self._survival.survives(self.lost | {node}))

    def healed(self, launch: Launch, rank: int) -> None:
        self._healed.add((launch.number, rank))

    def judge(self, launch: Launch, why: str) -> None:
        """Judge a launch that is over; ``why`` says why it never ended by itself."""
        for text in self._problems(launch, why):
            self._history.problems.append(f"launch {launch.number}: {text}")
        self._learn(launch)

    def _problems(self, launch: Launch, why: str) -> list[str]:
        history = self._history
        problems = [f"logged: {text}" for text in launch.errors_logged]
        if why and not launch.died:
            problems.append(f"it hangs: {why}")
        found = {(record.launch, record.step) for record in launch.of("restored")}
        if len(found) > 1:
            problems.append(f"a mixture: {sorted(found, key=str)}")
        problems += [f"rank {record.rank}: step {record.step} of launch {record.launch}: other bits in {record.wrong}"
                     for record in launch.of("restored") if record.wrong]  # fmt: skip
        covered = self._survival.survives(self.lost)
        if covered and self.newest is not None:
            problems += [f"restored {pair}, but {self.newest} was committed" for pair in found
                         if pair[1] is None or pair < self.newest]  # type: ignore[operator]  # fmt: skip
            problems += [f"rank {record.rank}: {self.newest} was committed, and nodes {self.lost} are lost: {record.text}"
                         for record in launch.of("unrestorable")]  # fmt: skip
        for process, name, error in history.kernel.thread_errors:
            problems.append(f"thread {name} of {process.name} {process.rank}: {error!r}")
        history.kernel.thread_errors.clear()
        is_calm = not launch.died and not launch.triggered and not history.setting.stops and not launch.plan.stop
        is_calm &= launch.is_last or not history.setting.no_space
        for record in launch.of("error"):
            is_known = isinstance(record.error, (MlflashError, MpiError))
            if not is_known or (is_calm and not isinstance(record.error, Unrestorable)):
                problems.append(f"rank {record.rank}: {record.text}")
        if is_calm:
            may_skip = history.setting.when_busy == "skip"
            problems += [f"rank {record.rank}: step {record.step} failed without a fault: {record.text}"
                         for record in launch.of("failed") if not (may_skip and "skipped" in record.text)]  # fmt: skip
            if launch.is_last and launch.of("restored") and len(launch.of("end")) != history.setting.ranks:
                problems.append(f"the last launch did not end: {launch.records[-8:]}")
        return problems

    def judge_end(self, launch: Launch) -> None:
        """Judge what a launch has left open that ended by itself."""
        history = self._history
        for network in launch.networks:
            alive = {(key, rank) for key, rank in network.open if key != "world" and network.processes[rank].is_alive}
            if alive and not launch.of("failed") and not launch.of("error") and not launch.of("unrestorable"):
                history.problems.append(f"launch {launch.number}: left open: {sorted(alive, key=str)[:4]}")

    def _learn(self, launch: Launch) -> None:
        history, outcomes = self._history, self._history.outcomes
        restored = {(record.launch, record.step) for record in launch.of("restored")}
        committed = {step for _, step, snapshot in launch.snapshots if snapshot.committed}
        outcomes["unrestorable"] += bool(launch.of("unrestorable"))
        outcomes["failed save"] += len(launch.of("failed"))
        is_healed = all((launch.number, rank) in self._healed for rank in range(history.setting.ranks))
        if is_healed or committed:
            self.lost.clear()
        if len(restored) == 1:
            (pair,) = restored
            outcomes["restored" if pair[1] is not None else "restored nothing"] += 1
            if pair[1] is not None and is_healed:
                self.newest = max(self.newest or pair, pair)  # type: ignore[assignment,type-var]
        if committed:
            self.newest = (launch.number, max(committed))
            self.ranks_of_newest = history.setting.ranks
            outcomes["committed"] += 1
