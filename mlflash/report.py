"""What a rank can tell about itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .parts import Parts


def report_of(parts: Parts, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Give counters, seconds per verb, and how this rank is placed; see `Checkpointer.report`. Not collective."""
    world, replicas = parts.world, parts.replicas
    holds = {
        id(slot): what for what, pair in (("own", parts.shelf.own), ("share", parts.shelf.shares)) for slot in pair
    }
    slots = [
        {"what": holds.get(id(s), "of others"), "file": s.name, "use": s.use.value, "nbytes": s.view.nbytes,
         "rank": None if s.header is None else s.header.rank, "step": None if s.header is None else s.header.step}
        for s in parts.shelf.all()
        if s.segment is not None or s not in parts.shelf.shares
    ]  # fmt: skip
    return {
        "rank": world.rank,
        "node": world.node_name,
        "scheme": parts.protection.scheme,
        "group": parts.protection.group,
        "partners": parts.protection.partners,
        "shared with": () if replicas is None or replicas.sharing is None else replicas.sharing.ranks,
        "transport": parts.protection.transport,
        "job": parts.config.job,
        "memory": parts.memory.path,
        "restored_from": parts.restored_from,
        "slots": slots,
        "counts": dict(parts.counts) | ({} if replicas is None else {"tensors diverged": replicas.diverged}),
        "seconds": dict(seconds),
    }
