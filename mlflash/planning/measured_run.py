"""What a run has measured, as its report says: the sizes and times that a plan is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a run's reports say.

    Attributes:
        nodes, ranks_per_node: of the run; None where there is only one rank's report.
        nbytes: the largest slot of a rank's own, and what it holds like others.
        alike_nbytes: of these, what the ranks of a node hold alike, stored once.
        stall_s: a save's stall, of the slowest rank, on average.
        commit_s: from the call of a save to its commit, in the same way.
    """

    nodes: int | None
    ranks_per_node: int | None
    nbytes: int
    alike_nbytes: int
    stall_s: float
    commit_s: float


def measured(reports: Any) -> Measured:
    """Read what ``Checkpointer.report()`` gave on one rank, or the list of what it gave on all.

    The first save of a run, which makes the slots, is in the averages: take the report of a run with many saves.

    Raises:
        ConfigError: it is no such report, or of a run that saved nothing.
    """
    every = reports if isinstance(reports, list) else [reports]
    try:
        nodes = [str(report["node"]) for report in every]
        alike = max(sum(_largest(r, "share") for r in every if str(r["node"]) == node) for node in nodes)
        nbytes = max(_largest(report, "own") for report in every) + alike
        saves = min(int(report["counts"].get("saves", 0)) for report in every)
        if min(saves, nbytes) < 1:
            raise ConfigError("the report is of a run that has saved nothing", expected="at least one save")
        if alike and len(every) < (needed := len(every[0]["shared with"])):
            raise ConfigError("this run's ranks share state", found=f"{len(every)} reports",
                              expected=f"those of all {needed} ranks, in a list")  # fmt: skip
        stall_s = max(report["seconds"]["stall"] / report["counts"]["saves"] for report in every)
        behind_s = max(report["seconds"]["protect and commit"] / report["counts"]["saves"] for report in every)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"this is no report: {error!r}", expected="JSON of what Checkpointer.report() gives, or a list of them"
        ) from None
    alone = len(every) == 1
    fullest = max(nodes.count(node) for node in set(nodes))
    count, per_node = (None, None) if alone else (len(set(nodes)), fullest)
    return Measured(count, per_node, nbytes, alike, stall_s, stall_s + behind_s)


def _largest(report: Mapping[str, Any], what: str) -> int:
    return max((int(slot["nbytes"]) for slot in report["slots"] if slot["what"] == what), default=0)
