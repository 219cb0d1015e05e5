"""What a rank can report about itself."""

from __future__ import annotations

import os
from typing import Any

from ..draining.drain import Drain
from ..placement.survival import describe, of
from ..startup.context import Context
from ..version import __version__


def survives(context: Context) -> str:
    """What may fail without the loss of a committed step; see `Checkpointer.survives`."""
    survival = of(context.world.topology, context.protection.placement, context.shares)
    return describe(survival, context.domains_by_kind)


def run_facts(context: Context) -> dict[str, Any]:
    """Facts that do not change during this run, for its recorder."""
    world, config, protection = context.world, context.config, context.protection
    return {
        "ranks": world.size, "nodes": list(world.topology.node_names), "redundancy": protection.scheme,
        "transport": protection.transport, "partners": list(protection.partners), "job": config.job,
        "directory": config.directory, "drain_every": config.drain_every, "pid": os.getpid(),
        "version": __version__,
    }  # fmt: skip


def report_of(context: Context, drain: Drain | None) -> dict[str, Any]:
    """Counters, seconds per verb, and the placement of this rank.

    Returns:
        ``enabled`` (False if mlflash is off; then all other values are empty), ``rank``, ``node``, ``scheme``,
        ``group`` (ranks that protect each other), ``partners`` (ranks that hold copies), ``shared with`` (ranks that
        together store what they hold alike), ``transport``, ``job``, ``memory`` (its directory there),
        ``restored_from`` (the source of this rank's state at the last restore: the node whose memory had it, the folder
        of the directory, or ""), ``drain`` (step, path, seconds, bytes and error of the newest one, or None),
        ``send rate`` (largest number of bytes per second; None: no limit), ``slots`` (for each: what it holds, file,
        use, rank, step and bytes), ``counts`` and ``seconds``.
    """
    world, replicas = context.world, context.replicas
    holds = {
        id(slot): what for what, pair in (("own", context.pool.own), ("share", context.pool.shares)) for slot in pair
    }
    slots = [
        {"what": holds.get(id(s), "of others"), "file": s.name, "use": s.use.value, "nbytes": s.view.nbytes,
         "rank": None if s.header is None else s.header.rank, "step": None if s.header is None else s.header.step}
        for s in context.pool.all()
        if s.segment is not None or s not in context.pool.shares
    ]  # fmt: skip
    drained = None if drain is None else {
        "step": drain.step, "path": drain.path, "seconds": drain.seconds, "nbytes": drain.nbytes,
        "error": None if drain.error is None else str(drain.error),
    }  # fmt: skip
    return {
        "enabled": True,
        "rank": world.rank,
        "node": world.node_name,
        "scheme": context.protection.scheme,
        "group": list(context.protection.group),
        "partners": list(context.protection.partners),
        "shared with": [] if replicas is None or replicas.sharing is None else list(replicas.sharing.ranks),
        "transport": context.protection.transport,
        "job": context.config.job,
        "memory": context.memory.path,
        "restored_from": context.restored_from,
        "drain": drained,
        "send rate": context.pace.rate or None,
        "slots": slots,
        "counts": dict(context.recorder.counts) | ({} if replicas is None else {"tensors diverged": replicas.diverged}),
        "seconds": dict(context.recorder.seconds),
    }
