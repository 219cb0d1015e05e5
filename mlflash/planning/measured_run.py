"""The sizes and times for a plan, from the report of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Measured:
    """What the reports of a run measured.

    Attributes:
        nodes, ranks_per_node: size of the run. None if there is only the report of one rank.
        nbytes: size of the largest own slot, plus the state that ranks share.
        alike_nbytes: the part of ``nbytes`` that the ranks of a node share, which is stored once.
        stall_s: average stall of a save on the slowest rank.
        commit_s: average time from the call of a save to its commit, on the slowest rank.
    """

    nodes: int | None
    ranks_per_node: int | None
    nbytes: int
    alike_nbytes: int
    stall_s: float
    commit_s: float


def measured(reports: Any) -> Measured:
    """Read the result of ``Checkpointer.report()`` of one rank, or a list of the results of all ranks.

    The averages include the first save of a run, which makes the slots. Use the report of a run with many saves.

    Raises:
        ConfigError: this is not such a report, or the run saved nothing.
    """
    every = reports if isinstance(reports, list) else [reports]
    try:
        nodes = [str(report["node"]) for report in every]
        alike = max(sum(_largest(r, "share") for r in every if str(r["node"]) == node) for node in nodes)
        nbytes = max(_largest(report, "own") for report in every) + alike
        saves = min(int(report["counts"].get("saves", 0)) for report in every)
        if min(saves, nbytes) < 1:
            raise ConfigError("the run of this report saved nothing", expected="at least one save")
        if alike and len(every) < (needed := len(every[0]["shared with"])):
            raise ConfigError("this run's ranks share state", found=f"{len(every)} reports",
                              expected=f"those of all {needed} ranks, in a list")  # fmt: skip
        stall_s = max(report["seconds"]["stall"] / report["counts"]["saves"] for report in every)
        behind_s = max(report["seconds"]["protect and commit"] / report["counts"]["saves"] for report in every)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"this is not a report: {error!r}", expected="JSON of Checkpointer.report(), or a list of such reports"
        ) from None
    alone = len(every) == 1
    fullest = max(nodes.count(node) for node in set(nodes))
    count, per_node = (None, None) if alone else (len(set(nodes)), fullest)
    return Measured(count, per_node, nbytes, alike, stall_s, stall_s + behind_s)


def _largest(report: Mapping[str, Any], what: str) -> int:
    return max((int(slot["nbytes"]) for slot in report["slots"] if slot["what"] == what), default=0)
