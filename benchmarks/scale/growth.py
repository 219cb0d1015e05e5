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

LINEAR_MOST = 1.05  # for counts and bytes; ranks times their logarithm would give 1.11 from 1,024 to 131,072
SECONDS_MOST = 1.25  # for seconds and memory, which differ from run to run
LEAST_S, LEAST_MB = 0.25, 64.0
_NEAR = 1.02  # headers and compressed tables differ by some bytes

COUNTS = {
    "allreduces": "allreduces", "collectives": "other collectives", "messages": "messages",
    "sent_nbytes": "B sent by messages", "files": "files opened", "requests": "requests to the directory",
    "first_files": "files opened by rank 0", "first_requests": "requests by rank 0",
    "leader_nbytes": "B received by the first rank of a node", "rank_nbytes": "B received by another rank",
    "first_nbytes": "B received by rank 0", "dealt_nbytes": "B received in an all-to-all",
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
    **{(paths.DRAIN, name): "a row for each rank; only rank 0 writes it" for name in ("leader_nbytes", "rank_nbytes")},
    (paths.DRAIN, "first_nbytes"): "receipts of all ranks",
    (paths.DRAIN, "first_requests"): "rank 0 looks for the file of each rank",
    (paths.RESHARD, "dealt_nbytes"): "8 B for each rank: how much this rank asks it for",
}  # fmt: skip
"""What may grow linearly, by operation (`paths.PATHS`) and field, and the reason."""


@dataclasses.dataclass(frozen=True)
class Series:
    """One quantity at several sizes of the job.

    Attributes:
        what: name of the quantity.
        points: pairs of ranks and value.
        most: largest exponent allowed. If None, the quantity may grow like the logarithm of the ranks.
        why: reason why it may grow faster than a logarithm.
        least: smaller values count as this value in the check, because small measured values are mostly noise.
    """

    what: str
    points: tuple[tuple[int, float], ...]
    most: float | None = None
    why: str = ""
    least: float = 0.0

    @property
    def exponent(self) -> float:
        """The exponent of growth; 0 if all values are 0."""
        return _slope(self.points)

    @property
    def wrong(self) -> str:
        """A message if the quantity grows too fast, else an empty string."""
        if len(self.points) < 2:
            return ""
        (few, least), (many, most) = self.points[0], self.points[-1]
        if self.most is None and most > least * math.log2(many) / math.log2(few) * _NEAR:
            grown = f"{least:g} at {few:,} ranks and {most:g} at {many:,}"
            return f"{self.what}: {grown}, which grows faster than a logarithm"
        exponent = _slope([(ranks, max(value, self.least)) for ranks, value in self.points])
        if self.most is not None and exponent > self.most:
            return f"{self.what}: grows with exponent {exponent:.2f}, allowed are {self.most:g}"
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
    """Yield counts and bytes of all operations. They are the same in each run, except for compressed sizes."""
    for path in paths.PATHS:
        found = paths.of_path(rows, path)
        for name, words in COUNTS.items():
            points = tuple((row.ranks, float(getattr(row, name))) for row in found)
            why = LINEAR.get((path, name), "")
            if any(value for _, value in points):
                yield Series(f"{path}: {words}", points, LINEAR_MOST if why else None, why)


def of_plans(rows: Sequence[planning.Row]) -> Iterator[Series]:
    """Yield what every rank computes alone, and the tables that it holds."""
    for scheme in planning.SCHEMES:
        pairs = [(row.ranks, row) for row in rows if row.scheme == scheme]
        every = "each rank computes it for all ranks"
        yield from _measured(f"{scheme}", pairs, {"planning_s": "s, planning", "join_s": "s, inventories joined",
                                                  "choose_s": "s, choice"}, every)  # fmt: skip
        tables = {"received_mb": "MB, inventories of all nodes", "table_mb": "MB, table of a rank"}
        yield from _measured(f"{scheme}", pairs, tables, _INVENTORY, LINEAR_MOST)


def of_jobs(rows: Sequence[agreement.Row]) -> Iterator[Series]:
    """Yield what a commit and restores take with each scheme."""
    named = {"allreduces": "allreduces of a commit", "of_sharers": "allreduces among ranks that share state",
             "messages": "messages of a commit", "sent_nbytes": "B sent by a commit",
             "restore_collectives": "collectives of a restore",
             "lost_collectives": "collectives, a slot lost"}  # fmt: skip
    for scheme, transport, alike in agreement.JOBS:
        pairs = [(row.ranks, row) for row in rows
                 if (row.scheme, row.transport, row.alike) == (scheme, transport, alike)]  # fmt: skip
        what = f"{scheme}, {transport}{', all alike' * alike}"
        yield from _measured(what, pairs, named, "", None)
        yield from _measured(what, pairs, {"restore_received_mb": "MB received in a restore"}, _INVENTORY, LINEAR_MOST)


def of_seconds(rows: Sequence[paths.Row]) -> Iterator[Series]:
    """Yield the CPU time of all operations."""
    for path in paths.PATHS:
        pairs = [(row.ranks, row) for row in paths.of_path(rows, path)]
        yield from _measured(path, pairs, {"cpu_s": "s of a rank"}, "each rank looks at all ranks")
        yield from _measured(path, pairs, {"alone_s": "s of rank 0 alone"}, "the files of all ranks")


def of_commits(rows: Sequence[drain_commit.Row]) -> Iterator[Series]:
    """Yield what rank 0 alone does for a drain."""
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
    """Yield what a rank needs to learn what all ranks of a checkpoint hold, by the number of these ranks."""
    for where in ("memory", "directory"):
        pairs = [(ranks, rows[where]) for ranks, rows in learnt.items()]
        what = f"learning old ranks, {where}"
        yield from _measured(what, pairs, {"seconds": "s", "mb": "MB held"}, _TABLE)
        yield from _measured(what, pairs, {"received_mb": "MB received"}, _TABLE, LINEAR_MOST)
        yield from _measured(what, pairs, {"collectives": "collectives", "ranks": "ranks read from"}, "", None)


def _measured(what: str, pairs: Sequence[tuple[int, Any]], named: Mapping[str, str], why: str,
              most: float | None = SECONDS_MOST) -> Iterator[Series]:  # fmt: skip
    """Yield fields of rows, by the number of ranks."""
    for name, words in named.items():
        points = tuple((ranks, float(getattr(row, name))) for ranks, row in sorted(pairs, key=lambda pair: pair[0]))
        if any(value for _, value in points):
            least = 0.0 if most != SECONDS_MOST else LEAST_MB if words.startswith("MB") else LEAST_S
            yield Series(f"{what}: {words}", points, most, why, least)
