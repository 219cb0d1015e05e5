"""The tables that a run prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from scale import agreement, forecast, planning


def plans(console: Console, rows: Sequence[planning.Row]) -> None:
    """Losses, and what a rank takes to plan and to choose."""
    losses = Table("ranks", "scheme", "groups", "nodes lost at once", "memory is enough", "simulated", "± error")
    costs = Table("ranks", "scheme", "domains, s", "planning, s", "a node's inventory, B", "all, MB",
                  "table of a rank, MB", "put together, s", "choice, s")  # fmt: skip
    for row in rows:
        aimed, end = row.ranks <= planning.AIMED_RANKS, row.scheme == planning.SCHEMES[-1]
        losses.add_row(f"{row.ranks:,}", row.scheme, f"{row.groups:,}", str(row.lost), f"{row.exact:.4f}",
                       f"{row.simulated:.4f}", f"{row.error:.4f}", end_section=end)  # fmt: skip
        costs.add_row(f"{row.ranks:,}", row.scheme, f"{row.domains_s:.3f}",
                      _aim(row.planning_s, planning.PLANNING_S, aimed, 3), f"{row.sent_nbytes:.0f}",
                      _aim(row.received_mb, planning.INVENTORY_MB, aimed, 2), f"{row.table_mb:.1f}",
                      f"{row.join_s:.2f}", f"{row.choose_s:.2f}", end_section=end)  # fmt: skip
    _print(console, losses, costs)
    console.print(f"aims up to {planning.AIMED_RANKS:,} ranks: planning ≤ {planning.PLANNING_S:g} s; inventory of all "
                  f"nodes ≤ {planning.INVENTORY_MB:g} MB")  # fmt: skip


def jobs(console: Console, rows: Sequence[agreement.Row]) -> None:
    """What the ranks of a job agree on and send."""
    commits = Table("ranks", "scheme", "transport", "allreduces of a commit", "among sharers", "their bytes",
                    "steps of each", "messages", "bytes sent / state")  # fmt: skip
    seconds = Table("ranks", "scheme", "transport", "ranks run", "start, s", "commit, s", "relaunch, s", "restore, s",
                    "collectives", "received, MB", "slot lost: restore, s", "collectives")  # fmt: skip
    for before, row in zip([None, *rows], rows, strict=False):
        name = f"{row.scheme}, all alike" if row.alike else row.scheme
        if before is not None and before.ranks != row.ranks:
            commits.add_section()
            seconds.add_section()
        both = _aim(float(row.allreduces), agreement.ALLREDUCES - row.of_sharers, True, 0)
        commits.add_row(f"{row.ranks:,}", name, row.transport, both, str(row.of_sharers), str(row.allreduce_nbytes),
                        str(row.steps), str(row.messages), f"{row.per_byte:.3f}")  # fmt: skip
        restored = ["-"] * 6 if row.alike else [
            f"{row.restart_s:.2f}", f"{row.restore_s:.2f}", str(row.restore_collectives),
            f"{row.restore_received_mb:.2f}", f"{row.lost_s:.2f}", str(row.lost_collectives),
        ]  # fmt: skip
        seconds.add_row(f"{row.ranks:,}", name, row.transport, str(row.live), f"{row.start_s:.2f}",
                        f"{row.commit_s:.3f}", *restored)  # fmt: skip
    _print(console, commits, seconds, words=3)
    console.print(
        f"aim: a commit takes ≤ {agreement.ALLREDUCES} allreduces; seconds are processor time of one rank, with the "
        "simulation of MPI in it",
        highlight=False,
    )


def rates(console: Console, found: Mapping[str, tuple[float, float, float]]) -> None:
    """What one core does."""
    table = Table("one core", "GB/s", "quartiles", "/ memcpy")
    for name, (middle, low, high) in found.items():
        table.add_row(name, f"{middle / 1e9:.1f}", f"{low / 1e9:.1f} to {high / 1e9:.1f}",
                      f"{middle / found['memcpy'][0]:.2f}")  # fmt: skip
    _print(console, table, words=1)


def points(console: Console, rows: Sequence[forecast.Point]) -> None:
    """What the model says."""
    table = Table("model", "GPUs", "stall, s", "committed, s", "restored, s", "lost, %", "lost, % (RSC)")
    for row in rows:
        if row.gpus in forecast.FEW:
            table.add_row(row.line.label, f"{row.gpus:,}", f"{row.stall_s:.2f}", f"{row.committed_s:.2f}",
                          f"{row.restored_s:.2f}", f"{100 * row.waste:.2f}", f"{100 * row.waste_rsc:.2f}",
                          end_section=row.gpus == 100_000)  # fmt: skip
    _print(console, table, words=1)


def _print(console: Console, *tables: Table, words: int = 2) -> None:
    for table in tables:
        for column in table.columns[words:]:
            column.justify = "right"
        console.print(table)


def _aim(value: float, most: float, aimed: bool, digits: int) -> str:
    style = "" if not aimed else "[green]" if value <= most else "[red]"
    return f"{style}{value:.{digits}f}"
