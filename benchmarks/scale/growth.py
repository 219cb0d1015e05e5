"""How fast counted and measured values grow with the job: exponents, and limits for them.

An exponent is the slope of a straight line through the logarithms (least squares): 1 is linear, 0 does not grow. Values
with a reason in `LINEAR` may grow linearly at most. All others may grow like the logarithm of the ranks at most.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from scale import agreement, drain_commit, old_ranks, paths, planning

LINEAR_MOST = 1.05  # of counts and bytes; ranks times their logarithm have 1.11 from 1,024 to 131,072
SECONDS_MOST = 1.25  # of seconds and of memory, which are not the same twice
LEAST_S, LEAST_MB = 0.25, 64.0
_NEAR = 1.02  # headers and compressed tables are some bytes larger or smaller

COUNTS = {
    "allreduces": "allreduces", "collectives": "other collectives", "messages": "messages",
    "sent_nbytes": "B sent by messages", "files": "files opened", "requests": "requests to the directory",
    "first_files": "files opened by rank 0", "first_requests": "requests by rank 0",
    "leader_nbytes": "B given to the first rank of a node", "rank_nbytes": "B given to another rank",
    "first_nbytes": "B given to rank 0", "dealt_nbytes": "B of an all-to-all",
}  # fmt: skip
"""Fields of `paths.Row`, in words."""
_INVENTORY = "inventories of all nodes"
_TABLE = "a row of numbers for each old rank"
_WHERE = "on which node each rank is"
_RESTORES = (paths.RESTORE, paths.LOST, paths.OUT_OF_DIRECTORY, paths.RESHARD, paths.RESHARD_OUT_OF_DIRECTORY)
LINEAR: dict[tuple[str, str], str] = {
    **{(paths.START, name): _WHERE for name in ("leader_nbytes", "rank_nbytes", "first_nbytes")},
    **{(path, name): _INVENTORY for path in _RESTORES
       for name in ("leader_nbytes", "rank_nbytes", "first_nbytes")},
    **{(paths.RESHARD, name): _TABLE for name in ("leader_nbytes", "rank_nbytes", "first_nbytes")},
    **{(paths.DRAIN, name): "a row for each rank; rank 0 alone writes it" for name in ("leader_nbytes", "rank_nbytes")},
    (paths.DRAIN, "first_nbytes"): "receipts of all ranks",
    (paths.DRAIN, "first_requests"): "it looks for the file of each rank",
    (paths.RESHARD, "dealt_nbytes"): "8 B for each rank: how much is asked of it",
}  # fmt: skip
"""What grows linearly, by `paths.PATHS` and field, and why."""


@dataclasses.dataclass(frozen=True)
class Series:
    """One thing at several sizes.

    Attributes:
        what: it, in words.
        points: ranks, and how much of it.
        most: exponent that is the most; None: it may grow as the logarithm of the ranks.
        why: it grows faster than a logarithm.
        least: less than this much is taken for it where growth is judged: what is measured and small says nothing.
    """

    what: str
    points: tuple[tuple[int, float], ...]
    most: float | None = None
    why: str = ""
    least: float = 0.0

    @property
    def exponent(self) -> float:
        """How fast it grows; 0 where there is nothing of it."""
        return _slope(self.points)

    @property
    def wrong(self) -> str:
        """Says that it grows too fast; "": it does not."""
        if len(self.points) < 2:
            return ""
        (few, least), (many, most) = self.points[0], self.points[-1]
        if self.most is None and most > least * math.log2(many) / math.log2(few) * _NEAR:
            return f"{self.what}: {least:g} at {few:,} ranks and {most:g} at {many:,}, which is more than a logarithm"
        exponent = _slope([(ranks, max(value, self.least)) for ranks, value in self.points])
        if self.most is not None and exponent > self.most:
            return f"{self.what} grows with exponent {exponent:.2f}, at most {self.most:g}"
        return ""


def _slope(points: Sequence[tuple[int, float]]) -> float:
    values = [value for _, value in points]
    if not any(values) or len(values) < 2:
        return 0.0
    if not all(value > 0 for value in values):
        return math.inf
    slope, _ = np.polyfit(np.log([ranks for ranks, _ in points]), np.log(values), 1)
    return float(slope)


def of_counts(rows: Sequence[paths.Row]) -> Iterator[Series]:
    """Counts and bytes of all ways: the same each time, but for some bytes of what is compressed."""
    for path in paths.PATHS:
        found = paths.of_path(rows, path)
        for name, words in COUNTS.items():
            points = tuple((row.ranks, float(getattr(row, name))) for row in found)
            why = LINEAR.get((path, name), "")
            if any(value for _, value in points):
                yield Series(f"{path}: {words}", points, LINEAR_MOST if why else None, why)


def of_plans(rows: Sequence[planning.Row]) -> Iterator[Series]:
    """What every rank computes alone, and the tables that it has."""
    for scheme in planning.SCHEMES:
        pairs = [(row.ranks, row) for row in rows if row.scheme == scheme]
        every = "each rank computes it for all"
        yield from _measured(f"{scheme}", pairs, {"planning_s": "s, planning", "join_s": "s, inventories put together",
                                                  "choose_s": "s, choice"}, every)  # fmt: skip
        tables = {"received_mb": "MB, inventories of all nodes", "table_mb": "MB, table of a rank"}
        yield from _measured(f"{scheme}", pairs, tables, _INVENTORY, LINEAR_MOST)


def of_jobs(rows: Sequence[agreement.Row]) -> Iterator[Series]:
    """What a commit takes with each scheme, and restores."""
    named = {"allreduces": "allreduces of a commit", "of_sharers": "allreduces of those that share",
             "messages": "messages of a commit", "sent_nbytes": "B sent by a commit",
             "restore_collectives": "collectives of a restore",
             "lost_collectives": "collectives, a slot lost"}  # fmt: skip
    for scheme, transport, alike in agreement.JOBS:
        pairs = [(row.ranks, row) for row in rows
                 if (row.scheme, row.transport, row.alike) == (scheme, transport, alike)]  # fmt: skip
        what = f"{scheme}, {transport}{', all alike' * alike}"
        yield from _measured(what, pairs, named, "", None)
        yield from _measured(what, pairs, {"restore_received_mb": "MB given by a restore"}, _INVENTORY, LINEAR_MOST)


def of_seconds(rows: Sequence[paths.Row]) -> Iterator[Series]:
    """Processor time of all ways."""
    for path in paths.PATHS:
        pairs = [(row.ranks, row) for row in paths.of_path(rows, path)]
        yield from _measured(path, pairs, {"cpu_s": "s of a rank"}, "each rank looks at all")
        yield from _measured(path, pairs, {"alone_s": "s of rank 0 beside"}, "the files of all ranks")


def of_commits(rows: Sequence[drain_commit.Row]) -> Iterator[Series]:
    """What rank 0 alone does for a drain."""
    named = {"receipts_s": "s, receipts", "stat_s": "s, looking for files", "table_s": "s, table",
             "listing_s": "s, listing", "delete_s": "s, deleting", "held_mb": "MB held"}  # fmt: skip
    counted = {"received_mb": "MB of receipts", "written_mb": "MB written", "requests": "requests",
               "delete_requests": "requests, deleting"}  # fmt: skip
    for form in drain_commit.FORMS:
        pairs = [(row.ranks, row) for row in rows if row.form == form]
        why = "the files of all ranks"
        yield from _measured(f"rank 0, {form}", pairs, named, why)
        yield from _measured(f"rank 0, {form}", pairs, counted, why, LINEAR_MOST)


def of_learnt(learnt: Mapping[int, Mapping[str, old_ranks.Row]]) -> Iterator[Series]:
    """What a rank needs to know all ranks of a checkpoint, by how many there are."""
    for where in ("memory", "directory"):
        pairs = [(ranks, rows[where]) for ranks, rows in learnt.items()]
        what = f"learning old ranks, {where}"
        yield from _measured(what, pairs, {"seconds": "s", "mb": "MB held"}, _TABLE)
        yield from _measured(what, pairs, {"received_mb": "MB told"}, _TABLE, LINEAR_MOST)
        yield from _measured(what, pairs, {"collectives": "collectives", "ranks": "ranks read from"}, "", None)


def _measured(what: str, pairs: Sequence[tuple[int, Any]], named: Mapping[str, str], why: str,
              most: float | None = SECONDS_MOST) -> Iterator[Series]:  # fmt: skip
    """Fields of rows, by how many ranks each is for."""
    for name, words in named.items():
        points = tuple((ranks, float(getattr(row, name))) for ranks, row in sorted(pairs, key=lambda pair: pair[0]))
        if any(value for _, value in points):
            least = 0.0 if most != SECONDS_MOST else LEAST_MB if words.startswith("MB") else LEAST_S
            yield Series(f"{what}: {words}", points, most, why, least)
