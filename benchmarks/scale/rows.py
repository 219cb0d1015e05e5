"""Turns measurements and results of the model into rows of tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.aims import AIMS
from bench.rows import Row
from scale import agreement, drain_commit, forecast, growth, paths, planning, tables

RANK = "What each rank does alone: processor time"
JOB = "Commits and restores: processor time of one rank, the simulation of MPI in it"
PATHS = "Each way of a checkpoint, copies by messages: one rank, and what rank 0 has more"
ALONE = "What rank 0 alone does for a drain, all leaves being shards, without the file system: processor time"
GROWTH = "What grows with the job, and how fast; all else that was counted is the same at all sizes"
CORE, MODEL = "One core", "The model"
_GROWS = 0.01


def of_plans(plans: Sequence[planning.Row]) -> Iterator[Row]:
    """Losses, and what a rank takes to plan and to choose."""
    for one in plans:
        aimed = one.ranks == planning.AIMED_RANKS
        where = Row(what=f"{one.ranks:,} ranks, {one.scheme}", case=RANK)
        sizes = f"{one.sent_nbytes:.0f} B a node; a rank holds {one.table_mb:.1f} MB"
        chances = f"exact {one.exact:.4f}, simulated {one.simulated:.4f} ± {one.error:.4f}"
        yield _cell(where, "domains", seconds=one.domains_s)
        yield _cell(where, "planning", **_aim(one.planning_s, "planning", aimed), seconds=one.planning_s,
                    figures=vars(one))  # fmt: skip
        yield _cell(where, "inventory of all nodes", **_aim(one.received_mb, "inventory", aimed), note=sizes)
        yield _cell(where, "put together", seconds=one.join_s)
        yield _cell(where, "choice", seconds=one.choose_s)
        yield _cell(where, "memory is enough", note=f"{one.lost} of {one.ranks // tables.PER_NODE:,} lost: {chances}")


def of_jobs(jobs: Sequence[agreement.Row]) -> Iterator[Row]:
    """What the ranks of a job agree on and send."""
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
    """What each way asks of a rank."""
    for one in found:
        where = Row(what=f"{one.ranks:,} ranks, {one.path}", case=PATHS)
        given = f"{one.rank_nbytes / 1e6:.2f}; first of a node {one.leader_nbytes / 1e6:.2f}"
        yield _cell(where, "processor", seconds=one.cpu_s, figures=vars(one))
        yield _cell(where, "allreduces, other collectives", note=f"{one.allreduces}, {one.collectives}")
        yield _cell(where, "messages, MB", note=f"{one.messages}, {one.sent_nbytes / 1e6:.2f}")
        yield _cell(where, "given by collectives, MB", note=f"{given}; rank 0 {one.first_nbytes / 1e6:.2f}")
        yield _cell(where, "files, requests", note=f"{one.files}, {one.requests}")
        yield _cell(where, "of rank 0", note=f"{one.first_files}, {one.first_requests}")


def of_commits(found: Sequence[drain_commit.Row]) -> Iterator[Row]:
    """What rank 0 does to commit a drain, and to delete one."""
    for one in found:
        where = Row(what=f"{one.ranks:,} ranks x {one.leaves:,}, {one.form}", case=ALONE)
        sizes = f"{one.received_mb:.1f} MB; grows by {one.held_mb:.0f} MB"
        yield _cell(where, "receipts", seconds=one.receipts_s, note=sizes, figures=vars(one))
        yield _cell(where, "looking for files", seconds=one.stat_s, note=f"{one.requests:,} requests")
        yield _cell(where, "table", seconds=one.table_s)
        yield _cell(where, "listing of tensors", seconds=one.listing_s, note=f"{one.written_mb:.1f} MB")
        yield _cell(where, "deleting", seconds=one.delete_s, note=f"{one.delete_requests:,} requests")


def of_growth(found: Sequence[growth.Series]) -> Iterator[Row]:
    """What grows: its exponent, how fast it may, and why."""
    for one in found:
        if abs(one.exponent) > _GROWS:
            where = Row(what=one.what, case=GROWTH)
            for ranks, value in one.points:
                yield _cell(where, f"{ranks:,}", note=f"{value:,.4g}")
            yield _cell(where, "exponent", note=f"{one.exponent:.2f}")
            yield _cell(where, "at most", note=f"{one.most:g}" if one.most else "that of a logarithm")
            yield _cell(where, "as", note=one.why)


def of_rates(rates: Mapping[str, tuple[float, float, float]]) -> Iterator[Row]:
    """What one core does."""
    for name, found in rates.items():
        middle, low, high = (rate / 1e9 for rate in found)
        yield Row(what=name, case=CORE, note=f"{middle:.1f} GB/s ({low:.1f}–{high:.1f})")


def of_points(points: Sequence[forecast.Point]) -> Iterator[Row]:
    """What the model says."""
    for one in points:
        if one.gpus in forecast.FEW:
            times = f"stall {one.stall_s:.2f} s, committed {one.committed_s:.2f} s, restored {one.restored_s:.2f} s"
            note = f"{times}; lost {one.waste:.2%} ({one.waste_rsc:.2%})"
            where = Row(what=one.line.label, case=MODEL)
            yield _cell(where, f"{one.gpus:,} GPUs", note=note, figures=dataclasses.asdict(one))


def _aim(value: float, name: str, aimed: bool) -> dict[str, Any]:
    """What is compared with a plain number, and is no median of several."""
    aim = AIMS[name]
    return {"over": {aim.over: value}, **({"shows": name, "aim": (aim.over, aim.most)} if aimed else {})}


def _cell(where: Row, column: str, **more: Any) -> Row:
    made = Row(**where, column=column)
    made.update(more)  # type: ignore[typeddict-item]
    return made
