"""The files of a node → the ranks that take them over."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from .inventory import Inventory, file_number
from .slot_header import Attempt, Kind


@dataclasses.dataclass
class AssignedFiles:
    """The files that a rank takes over: numbers, or None if there is none yet.

    The first of each kind is for the attempt that was chosen, the next one for the next save.

    Attributes:
        own: the rank's slots.
        inbox: by owner, copies of another rank's slots; under the rank's own number, its parity files.
        share: files of shared state.
    """

    own: list[int | None]
    inbox: dict[int, list[int | None]]
    share: list[int | None]


def assign(
    found: Inventory,
    names: Sequence[str],
    node: int,
    chosen: Attempt | None,
    same_ranks: bool,
    inboxes: Mapping[int, Sequence[int]],
    shares: Mapping[int, tuple[int, int]],
    own: int = 2,
    copies: int = 2,
    certified: Attempt | None = None,
) -> tuple[dict[int, AssignedFiles], list[int]]:
    """Divide the files of a node among its ranks, so that ranks that moved do not double the memory.

    A file of the chosen attempt goes to the rank that it concerns: the rank whose state it has, or that holds this
    copy, this parity or this share. The other files of that attempt come last, because they must not be written until
    the redundancy is whole in its new places.

    Args:
        names: all slot files of this node, sealed or not.
        same_ranks: whether that attempt's ranks are the ranks of this run (same world size).
        inboxes: for each rank of this node, the ranks whose copies it holds, and itself if it holds parity.
        shares: for each rank of this node that stores a share of shared state, the numbers of set and share.
        own: number of slots for a rank's own state, and for its share.
        copies: number of slots for each copy, and for parity.
        certified: the attempt that must be kept in addition.

    Returns:
        The files of each rank here, and the numbers of those left over (to be deleted once the redundancy is whole in
        its new places).
    """
    unused = _Unused(found.on(node), names, chosen, certified)
    files = {
        rank: AssignedFiles([None] * own, {owner: [None] * copies for owner in inboxes[rank]}, [None] * own)
        for rank in inboxes
    }
    pairs: list[tuple[tuple[Kind, object], list[int | None]]]
    pairs = [((Kind.SLOT, rank), files[rank].own) for rank in inboxes]
    pairs += [
        ((Kind.PARITY if owner == rank else Kind.SLOT, owner), pair)
        for rank in inboxes
        for owner, pair in files[rank].inbox.items()
    ]
    pairs += [((Kind.SHARE, shares[rank]), files[rank].share) for rank in inboxes if rank in shares]
    if same_ranks:
        for (kind, what), pair in pairs:
            pair[0] = unused.take(True, kind, what)
    for index in range(max(copies, own)):
        those = [(content, pair) for content, pair in pairs if index < len(pair)]
        for (kind, what), pair in those:
            if pair[index] is None:
                pair[index] = unused.take(False, kind, what)
        for (kind, _), pair in those:
            if pair[index] is None:  # keep the kind: slots and parity have different sizes
                pair[index] = unused.take(False, kind, fills=True)
    for (kind, _), pair in pairs:
        if pair[1] is None and pair[0] not in unused.kept:  # so that one of the two can always be written
            pair[1] = unused.take(True, kind)
    return files, sorted(unused.numbers)


class _Unused:
    """The files of a node that no rank has taken over yet, the certified ones first; ``kept`` are the chosen ones."""

    def __init__(self, here: Inventory, names: Sequence[str], chosen: Attempt | None, certified: Attempt | None):
        self._certified = set(here.of(certified).rows["file"].tolist()) if certified else set[int]()
        self.numbers = sorted(map(file_number, names), key=lambda number: (number not in self._certified, number))
        self.kept = {int(file) for file in here.of(chosen).rows["file"]} if chosen else set()
        self._content: dict[int, tuple[Kind, object]] = {}
        for row in here.rows:
            kind = Kind(row["kind"])
            of_share = (int(row["shared_by"]), int(row["number"]))
            self._content[int(row["file"])] = (kind, of_share if kind is Kind.SHARE else int(row["rank"]))

    def take(self, is_kept: bool, kind: Kind, what: object = None, fills: bool = False) -> int | None:
        """Take the first file of a kind, or one that holds nothing; with ``what``, the one that holds that.

        Args:
            fills: it will be written: leave the certified ones to the slots that they are for.
        """
        for number in self.numbers:
            its_kind, holds = self._content.get(number, (kind, None))
            may_be = (number in self.kept) is is_kept and not (fills and number in self._certified)
            if may_be and its_kind is kind and what in (None, holds):
                self.numbers.remove(number)
                return number
        return None
