"""What must hold: the newest step that any rank saw committed, and that the scheme covers, comes back, bit for bit."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from mpi import MpiError

from mlflash.errors import DeadlineExceeded, MlflashError, Unrestorable
from mlflash.placement.redundancy import parse, place
from mlflash.placement.survival import Survival, of
from mlflash.placement.topology import from_node_ids

if TYPE_CHECKING:
    from history import History, Launch, Record

Pair = tuple[int, int]
"""Launch and step of a save."""

_IDLE_S = 5.0  # a job that comes to no crash point for so many virtual seconds does not work


@functools.cache
def _survival(ranks: int, per_node: int, scheme: str) -> Survival:
    nodes = [rank // per_node for rank in range(ranks)]
    topology = from_node_ids([(node * per_node, f"node{node}") for node in nodes])
    return of(topology, place(topology, parse(scheme)))


class Oracle:
    """Knows what a launch must find, and judges what it found.

    Attributes:
        newest: the newest save that some rank saw committed, and that must come back; None: there is none.
        drained: the newest save that is in the directory.
        marked: what all ranks have marked bad.
        is_cut: whether all memory was lost since then, so that only the disks of all nodes have the newest.
        lost: nodes whose memory was lost or damaged since every copy of the newest was in place.
        ranks_of_newest: so many ranks, from rank 0, have state of their own in it.
        ranks_of: the ranks of each launch. What comes back from the directory may be of an earlier one.
    """

    def __init__(self, history: History):
        self._history = history
        self.newest: Pair | None = None
        self.drained: Pair | None = None
        self.marked: set[Pair] = set()
        self.lost: set[int] = set()
        self.is_cut = False
        self.ranks_of_newest = history.setting.ranks
        self.ranks_of: dict[int, int] = {}
        # The layouts that the newest may have: a restore on other ranks commits it in a new one.
        self._layouts = {(history.setting.ranks, history.setting.per_node)}
        self._reprotected: set[tuple[int, int]] = set()
        self._has_receipts = False  # of the newest, on each node
        self._may_be_known = False  # whether memory may know of a step that no rank saw committed

    def covers(self, *nodes: int) -> bool:
        lost, scheme = self.lost | {*nodes}, self._history.setting.scheme
        return not (self.is_cut and lost) and all(
            _survival(ranks, per_node, scheme).survives({node for node in lost if node < ranks // per_node})
            for ranks, per_node in self._layouts
        )

    def adopted(self) -> None:
        """Note that a rank has taken over a slot in a restore, though the restore may not end."""
        self._may_be_known = True

    def reprotected(self, launch: Launch, rank: int) -> None:
        """Note that a rank has seen the reprotection end."""
        self._reprotected.add((launch.number, rank))

    def judge(self, launch: Launch, why: str) -> None:
        """Judge a launch that is over; ``why`` says why it never ended by itself."""
        problems = [*self._of_what_came_back(launch), *self._of_what_failed(launch, why)]
        if "kept" in self._history.setting.special:
            problems += self._history.supervisor.problems(why)
        self._history.problems += [f"launch {launch.number}: {text}" for text in problems]
        self._learn(launch)

    def least(self, launch: Launch) -> Pair | None:
        """What a round must restore that begins now."""
        self.settle(launch)
        seen = {(number, step) for _, number, step, snapshot in launch.snapshots if snapshot.committed}
        return max(seen, default=self.newest) if self.covers() else None

    def settle(self, launch: Launch) -> None:
        """Forget what was lost if it was made again while the job ran."""
        is_reprotected = all((launch.number, rank) in self._reprotected for rank in range(self._history.setting.ranks))
        if is_reprotected or any(snapshot.committed for *_, snapshot in launch.snapshots[launch.loss_at :]):
            self.lost.clear()
            self.is_cut = False

    def lose(self, launch: Launch, node: int) -> None:
        """Note that the memory of a node is lost while the job runs."""
        self.settle(launch)
        self.lost.add(node)
        self._reprotected.clear()
        launch.loss_at = len(launch.snapshots)

    def _of_what_came_back(self, launch: Launch) -> list[str]:
        restored = launch.of("restored") + launch.of("restored certified")
        problems = [f"rank {record.rank}: step {record.step} of launch {record.launch}: other bits in {record.wrong}"
                    for record in restored if record.wrong]  # fmt: skip
        for number in {record.round for record in restored}:
            found = {_pair(record) for record in restored if record.round == number}
            least = max((record.least for record in restored if record.round == number and record.least), default=None)
            problems += [f"a mixture: {sorted(found, key=str)}"] if len(found) > 1 else []
            problems += [f"restored {pair}, which was marked bad" for pair in found & self.marked]
            problems += [f"round {number}: restored {pair}, but {least} was committed"
                         for pair in found if least is not None and (pair is None or pair < least)]  # fmt: skip
        for pair in {_pair(record) for record in launch.of("restored certified")}:
            if pair is not None and self._history.states.is_suspect(pair[1]):
                problems.append(f"restored the suspect step {pair} as a certified one")
        covered = self.covers()
        least = max((pair for pair in (self.newest if covered else None, self.drained) if pair), default=None)
        is_kept = "kept" in self._history.setting.special  # then what is lost is that of the last round
        if least is not None and not launch.wants_certified and not is_kept:
            problems += [f"restored {pair}, but {least} was committed"
                         for pair in map(_pair, restored) if pair is None or pair < least]  # fmt: skip
            problems += [f"rank {record.rank}: {least} was committed, and nodes {self.lost} are lost: {record.text}"
                         for record in launch.of("unrestorable")]  # fmt: skip
        elif self.newest is None and covered and not self._may_be_known and not launch.marks:
            problems += [f"rank {record.rank}: nothing was committed: {record.text}"
                         for record in launch.of("unrestorable")]  # fmt: skip
        is_known = self._has_receipts and len(self.lost) < self._history.setting.nodes and not launch.wants_certified
        if is_known and not is_kept and least is None and any(_pair(record) is None for record in restored):
            problems.append(f"restored nothing, though a node that is left knows that {self.newest} was committed")
        return problems

    def _of_what_failed(self, launch: Launch, why: str) -> list[str]:
        history, setting = self._history, self._history.setting
        problems = [f"logged: {text}" for text in launch.errors_logged]
        problems += [f"it hangs: {why}"] if why and not launch.died else []
        for process, name, error in history.kernel.thread_errors:
            problems.append(f"thread {name} of {process.name} {process.rank}: {error!r}")
        history.kernel.thread_errors.clear()
        problems += self._of_deadlines(launch)
        is_calm = not launch.died and not launch.triggered and launch.plan.stop is None
        is_calm &= launch.is_last or not setting.no_space
        for record in launch.of("error"):
            is_expected = isinstance(record.error, (MlflashError, MpiError))
            if not is_expected or (is_calm and not isinstance(record.error, Unrestorable)):
                problems.append(f"rank {record.rank}: {record.text}")
        if not is_calm:
            return problems
        may_skip = setting.when_busy == "skip"
        problems += [f"rank {record.rank}: step {record.step} failed without a fault: {record.text}"
                     for record in launch.of("failed") if not (may_skip and "skipped" in record.text)]  # fmt: skip
        if launch.is_last or not setting.bad_sync:
            problems += [f"rank {record.rank}: {record.text}" for record in launch.of("drain failed")
                         if "nothing was committed or restored yet" not in record.text
                         and not (launch.flipped and "CorruptSlot" in record.text)]  # fmt: skip
        if launch.is_last and launch.of("restored") and len(launch.of("end")) != setting.ranks:
            problems.append(f"the last launch did not end: {launch.records[-8:]}")
        return problems

    @staticmethod
    def _of_deadlines(launch: Launch) -> list[str]:
        """Nobody waits until its deadline if all ranks are there; afterwards, others are ended by the launcher."""
        first = next((record for record in launch.records if record.event in ("error", "failed")), None)
        is_late = first is not None and (isinstance(first.error, DeadlineExceeded) or "DeadlineExceeded" in first.text)
        if first is None or not is_late or launch.triggered or launch.plan.stop is not None:
            return []
        if first.idle_s < _IDLE_S:  # polls without news take a quarter of a second of virtual time
            return []
        return [f"rank {first.rank}: a wait until the deadline, though all ranks are there: {first.text}"]

    def judge_end(self, launch: Launch) -> None:
        """Judge what a launch has left open that ended by itself."""
        if any(launch.of(event) for event in ("failed", "error", "unrestorable")):
            return
        for network in launch.networks:
            left = sorted(
                {str(key) for key, rank in network.open if key != "world" and network.processes[rank].is_alive}
            )
            if left:
                self._history.problems.append(f"launch {launch.number}: not freed: {left[:4]}")

    def _learn(self, launch: Launch) -> None:
        history, outcomes = self._history, self._history.outcomes
        records = launch.of("restored") + launch.of("restored certified")
        last = max((record.round for record in records), default=1)
        restored = {_pair(record) for record in records if record.round == last}
        marked = [(launch.number, step) for step in launch.marks
                  if len([r for r in launch.of("marked") if r.step == step]) == history.setting.ranks]  # fmt: skip
        self.marked |= {*marked}
        self._may_be_known |= bool(restored - {None} or launch.marks)
        committed = {(number, step) for _, number, step, snapshot in launch.snapshots if snapshot.committed}
        is_reprotected = all((launch.number, rank) in self._reprotected for rank in range(history.setting.ranks))
        outcomes["unrestorable"] += bool(launch.of("unrestorable"))
        outcomes["failed save"] += len(launch.of("failed"))
        outcomes["marked"] += len(marked)
        self.settle(launch)
        layout = history.setting.ranks, history.setting.per_node
        has_room = launch.is_last or not history.setting.no_space  # else a warning may say: no redundancy yet
        is_resharded = bool(restored - {None}) and layout not in self._layouts and has_room
        if is_resharded:
            self.lost.clear()
            self.is_cut = False
        if is_reprotected or committed or is_resharded:
            self._layouts = {layout}
        self._layouts.add(layout)
        if len(restored) == 1:
            (pair,) = restored
            outcomes["restored nothing" if pair is None else "restored"] += 1
            is_certified = bool(launch.of("restored certified"))  # and not the newest one, as none is certified
            if pair is not None and (is_reprotected or is_certified):
                self.newest = pair  # if it is an older one, what came after it was not covered
            if pair is not None and is_certified and self.drained is not None:
                self.drained = min(self.drained, pair)  # what was gone back to may have become the last commit
        good = {pair for pair in committed if not history.states.is_suspect(pair[1])}
        if good:
            self.newest, self.ranks_of_newest = max(good), history.setting.ranks
            has_ended = len(launch.of("end")) == history.setting.ranks
            self._has_receipts = has_ended and "elastic" not in history.setting.special
            outcomes["committed"] += 1
        self.lost |= {node for node, step in launch.flipped.items() if self.newest is None or self.newest[1] <= step}
        if self.newest in self.marked or launch.of("marking"):
            self.newest, self._has_receipts = None, False  # what was saved before it need not be kept
        drained = [record.step for record in launch.of("drained") if record.step is not None]
        if drained and (self.newest is None or self.newest[1] == max(drained)):
            self.drained = self.newest
            outcomes["drained"] += 1


def _pair(record: Record) -> Pair | None:
    return None if record.step is None or record.launch is None else (record.launch, record.step)
