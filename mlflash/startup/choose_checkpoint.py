"""Chooses which attempt to restore and from where, by what the nodes hold. Pure: every rank makes the same choice."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from ..memory.inventory import Inventory, Place
from ..memory.parity_layout import recoverable
from ..memory.slot_header import Attempt, Kind, Verdict
from ..memory.wanted_step import NEWEST, WantedStep


@dataclasses.dataclass(frozen=True)
class ParityGroup:
    """The existing parity files of a group, for one attempt.

    Attributes:
        ranks: of the group, ascending.
        losses: how many of them may be lost.
        files: for each of these ranks, the place of its parity; None: lost.
    """

    ranks: tuple[int, ...]
    losses: int
    files: tuple[Place | None, ...]


@dataclasses.dataclass(frozen=True)
class Choice:
    """An attempt that can be restored.

    Attributes:
        source: for each rank, the place of its slot; None: the slot must be rebuilt.
        rebuilt: the group of each rank whose slot must be rebuilt.
        parity: all groups that have parity files.
        shares: the places of the files of shared state, by number of the set and of the share. There may be several.
        restores: how many runs have restored the attempt so far.
        verdict: what is known about its values.
    """

    attempt: Attempt
    step: int
    world_size: int
    source: tuple[Place | None, ...]
    restores: int = 0
    rebuilt: Mapping[int, ParityGroup] = dataclasses.field(default_factory=dict)
    parity: tuple[ParityGroup, ...] = ()
    shares: Mapping[tuple[int, int], tuple[Place, ...]] = dataclasses.field(default_factory=dict)
    verdict: Verdict = Verdict.UNKNOWN

    def group_of(self, rank: int) -> ParityGroup | None:
        """The group that can repair a rank's slot; None if there is none."""
        known = self.rebuilt.get(rank)
        return known or next((group for group in self.parity if rank in group.ranks), None)


def choose(found: Inventory, node_of: Sequence[int], wanted: WantedStep = NEWEST, skip_stuck: int = 0,
           skip_suspect: bool = False) -> Choice | None:  # fmt: skip
    """Choose the newest attempt that has, for every rank, a slot or enough parity to rebuild it.

    It need not have been committed: an attempt that is sealed on all ranks rolls forward.

    Args:
        found: all sealed files of all nodes.
        node_of: current node of each rank. A slot on the rank's own node is preferred, then one on the lowest node.
        wanted: conditions for the attempt.
        skip_stuck: skip attempts that this many runs have restored, if there is an older one; 0: never.
        skip_suspect: skip attempts whose values are suspect, if there is an older one.
    """
    newest: Choice | None = None
    for attempt, its_step, world_size in found.attempts():
        if not wanted.fits_step(its_step) or (newest is not None and world_size != newest.world_size):
            continue
        its = found.of(attempt)
        if not wanted.fits(its_step, its.verdict):
            continue
        choice = _sources(its, attempt, its_step, world_size, node_of)
        if choice is None:
            continue
        is_stuck = skip_stuck > 0 and choice.restores >= skip_stuck
        if not is_stuck and not (skip_suspect and choice.verdict is Verdict.SUSPECT):
            return choice
        newest = newest or choice
    return newest


def _sources(found: Inventory, attempt: Attempt, step: int, world_size: int, node_of: Sequence[int]) -> Choice | None:
    """Where each rank's slot of an attempt is, or how to rebuild it. None if one cannot be obtained."""
    slots: dict[int, Place] = {}
    parity: dict[tuple[int, int], dict[int, Place]] = collections.defaultdict(dict)
    rows = found.rows[np.lexsort([found.rows[name] for name in ("file", "node", "rank")])]
    shares: dict[tuple[int, int], list[Place]] = {}
    columns = [rows[name].tolist() for name in ("rank", "node", "file", "group", "shared_by", "kind", "number")]
    is_share, is_parity, size = int(Kind.SHARE), int(Kind.PARITY), len(node_of)  # looked up once, not once per file
    for rank, node, file, group, set_of, kind, number in zip(*columns, strict=True):
        if kind == is_share:
            shares.setdefault((set_of, number), []).append((node, file))
            continue
        known = parity[group, number] if kind == is_parity else slots
        if rank not in known or (rank < size and node_of[rank] == node and known[rank][0] != node):
            known[rank] = (node, file)
    groups = tuple(
        ParityGroup(found.groups[number], losses, tuple(files.get(rank) for rank in found.groups[number]))
        for (number, losses), files in parity.items()
    )
    rebuilt: dict[int, ParityGroup] = {}
    if missing := set(range(world_size)) - slots.keys():
        for group in groups:
            no_slot = [nth for nth, rank in enumerate(group.ranks) if rank in missing]
            if not no_slot:
                continue
            no_parity = [nth for nth, place in enumerate(group.files) if place is None]
            if recoverable(len(group.ranks), group.losses, no_slot, no_parity):
                rebuilt |= {group.ranks[nth]: group for nth in no_slot if group.ranks[nth] not in rebuilt}
    if missing - rebuilt.keys() or not _shares_complete(rows, shares):
        return None
    restores = int(found.rows["restores"].max())
    source = tuple(slots.get(rank) for rank in range(world_size))
    places = {share: tuple(found) for share, found in shares.items()}
    return Choice(attempt, step, world_size, source, restores, rebuilt, groups, places, found.verdict)


def _shares_complete(rows: np.ndarray, shares: Mapping[tuple[int, int], object]) -> bool:
    """Whether every share of all shared state has a file."""
    files = rows[rows["kind"] == Kind.SHARE]
    counts = dict(zip(files["shared_by"].tolist(), files["shares"].tolist(), strict=True))
    needed = set(rows["shared_by"].tolist()) - {-1}
    return all((number, share) in shares for number in needed for share in range(counts.get(number, 1)))
