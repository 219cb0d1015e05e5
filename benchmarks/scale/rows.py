"""Turns measurements and results of the model into rows of tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.aims import AIMS
from bench.rows import Row
from scale import agreement, drain_commit, forecast, growth, paths, planning, tables

RANK = "What each rank does alone: CPU time"
JOB = "Commits and restores: CPU time of one rank, which includes the simulation of MPI"
PATHS = "Each operation on a checkpoint, copies sent as messages: one rank, and rank 0"
ALONE = "What rank 0 alone does for a drain if all leaves are sharded: CPU time, without the file system"
GROWTH = "What grows with the job, and how fast. All other counts are the same at all sizes"
CORE, MODEL = "One core", "The model"
_GROWS = 0.01


def of_plans(plans: Sequence[planning.Row]) -> Iterator[Row]:
    """Yield rows on losses, and on the time that a rank needs to plan and to choose."""
    for one in plans:
        aimed = one.ranks == planning.AIMED_RANKS
        where = Row(what=f"{one.ranks:,} ranks, {one.scheme}", case=RANK)
        sizes = f"{one.sent_nbytes:.0f} B a node; a rank holds {one.table_mb:.1f} MB"
        chances = f"exact {one.exact:.4f}, simulated {one.simulated:.4f} ± {one.error:.4f}"
        yield _cell(where, "domains", seconds=one.domains_s)
        yield _cell(where, "planning", **_aim(one.planning_s, "planning", aimed), seconds=one.planning_s,
                    figures=vars(one))  # fmt: skip
        yield _cell(where, "inventory of all nodes", **_aim(one.received_mb, "inventory", aimed), note=sizes)
        yield _cell(where, "joined", seconds=one.join_s)
        yield _cell(where, "choice", seconds=one.choose_s)
        yield _cell(where, "memory is enough", note=f"{one.lost} of {one.ranks // tables.PER_NODE:,} lost: {chances}")


def of_jobs(jobs: Sequence[agreement.Row]) -> Iterator[Row]:
    """Yield rows on what the ranks of a job agree on and send."""
    for one in jobs:
        aimed = one.ranks == planning.AIMED_RANKS
        where = Row(what=f"{one.ranks:,} ranks, {one.scheme}{', all alike' * one.alike}, {one.transport}", case=JOB)
        sent = f"{one.allreduce_nbytes} B agreed on; {one.messages} messages, {one.per_byte:.3f} of the state sent"
        yield _cell(where, "start", seconds=one.start_s)
        yield _cell(where, "commit: allreduces", **_aim(one.allreduces + one.of_sharers, "commit", aimed),
                    seconds=one.commit_s, note=sent, figures=vars(one))  # fmt: skip
        if not one.alike:  # see agreement.measure
            received = f"{one.restore_collectives} collectives, {one.restore_received_mb:.2f} MB"
            yield _cell(where, "relaunch", seconds=one.restart_s)
            yield _cell(where, "restore", seconds=one.restore_s, note=received)
            yield _cell(where, "restore, a slot lost", seconds=one.lost_s, note=f"{one.lost_collectives} collectives")


def of_paths(found: Sequence[paths.Row]) -> Iterator[Row]:
    """Yield rows on what each operation costs a rank."""
    for one in found:
        where = Row(what=f"{one.ranks:,} ranks, {one.path}", case=PATHS)
        given = f"a rank {one.rank_nbytes / 1e6:.2f}; first of a node {one.leader_nbytes / 1e6:.2f}"
        yield _cell(where, "CPU time", seconds=one.cpu_s, figures=vars(one))
        yield _cell(where, "allreduces, other collectives", note=f"{one.allreduces}, {one.collectives}")
        yield _cell(where, "messages, MB", note=f"{one.messages}, {one.sent_nbytes / 1e6:.2f}")
        yield _cell(where, "received from collectives, MB", note=f"{given}; rank 0 {one.first_nbytes / 1e6:.2f}")
        yield _cell(where, "files, requests", note=f"{one.files}, {one.requests}")
        yield _cell(where, "files, requests of rank 0", note=f"{one.first_files}, {one.first_requests}")


def of_commits(found: Sequence[drain_commit.Row]) -> Iterator[Row]:
    """Yield rows on what rank 0 does to commit a drained checkpoint, and to delete one."""
    for one in found:
        where = Row(what=f"{one.ranks:,} ranks x {one.leaves:,}, {one.form}", case=ALONE)
        sizes = f"{one.received_mb:.1f} MB; the process grows by {one.held_mb:.0f} MB"
        yield _cell(where, "receipts", seconds=one.receipts_s, note=sizes, figures=vars(one))
        yield _cell(where, "looking for files", seconds=one.stat_s, note=f"{one.requests:,} requests")
        yield _cell(where, "table", seconds=one.table_s)
        yield _cell(where, "listing of tensors", seconds=one.listing_s, note=f"{one.written_mb:.1f} MB")
        yield _cell(where, "deleting", seconds=one.delete_s, note=f"{one.delete_requests:,} requests")


def of_growth(found: Sequence[growth.Series]) -> Iterator[Row]:
    """Yield rows on what grows: the exponent, the limit of it, and the reason."""
    for one in found:
        if abs(one.exponent) > _GROWS:
            where = Row(what=one.what, case=GROWTH)
            for ranks, value in one.points:
                yield _cell(where, f"{ranks:,}", note=f"{value:,.4g}")
            yield _cell(where, "exponent", note=f"{one.exponent:.2f}")
            yield _cell(where, "at most", note=f"{one.most:g}" if one.most else "a logarithm")
            yield _cell(where, "why", note=one.why)


def of_rates(rates: Mapping[str, tuple[float, float, float]]) -> Iterator[Row]:
    """Yield rows on the rates of one core."""
    for name, found in rates.items():
        middle, low, high = (rate / 1e9 for rate in found)
        yield Row(what=name, case=CORE, note=f"{middle:.1f} GB/s ({low:.1f}–{high:.1f})")


def of_points(points: Sequence[forecast.Point]) -> Iterator[Row]:
    """Yield rows on the results of the model."""
    for one in points:
        if one.gpus in forecast.FEW:
            times = f"stall {one.stall_s:.2f} s, committed {one.committed_s:.2f} s, restored {one.restored_s:.2f} s"
            note = f"{times}; lost {one.waste:.2%} ({one.waste_rsc:.2%})"
            where = Row(what=one.line.label, case=MODEL)
            yield _cell(where, f"{one.gpus:,} GPUs", note=note, figures=dataclasses.asdict(one))


def _aim(value: float, name: str, aimed: bool) -> dict[str, Any]:
    """Give the fields of a single value that is compared with a plain number. It is no median."""
    aim = AIMS[name]
    return {"over": {aim.over: value}, **({"shows": name, "aim": (aim.over, aim.most)} if aimed else {})}


def _cell(where: Row, column: str, **more: Any) -> Row:
    made = Row(**where, column=column)
    made.update(more)  # type: ignore[typeddict-item]
    return made
