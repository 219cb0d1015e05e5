"""What came of the faults of `kept_campaign.py`: a line for each, and tables of all."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PARTS = ("detect", "leave", "wait", "couriers", "checkpointer", "groups", "restore", "step")
OFTEN = 5  # recoveries of a process, from which on it is looked at for leaks


def line(one: dict[str, Any]) -> str:
    """One fault."""
    what = f"{one['job']}: {one.get('fault', one['kind'])} of {one.get('ranks', '?')}: "
    if "wrong" in one:
        return what + "WRONG: " + one["wrong"]
    if "again" in one:
        return what + "started again: " + "; ".join(one["again"])
    late = f", late: {one['late']}" if one["late"] else ""
    parts = ", ".join(f"{part} {one.get(part, 0):.2f}" for part in PARTS)
    return f"{what}{one['seconds']:.2f} s ({parts}), {one['steps lost']} steps lost{late}"


def table(results: Sequence[dict[str, Any]]) -> str:
    """All of them: medians for each kind, and what processes had in the beginning and in the end."""
    head = "| fault | faults | recovered | started again | wrong | seconds: median | worst | "
    lines = [head + " | ".join(PARTS) + " |", "|---" * (7 + len(PARTS)) + "|"]
    for kind in [*dict.fromkeys(one["kind"] for one in results), ""]:
        mine = [one for one in results if one["kind"] == kind or not kind]
        well = [one for one in mine if "seconds" in one and "wrong" not in one]
        counts = [len(mine), len(well), sum("again" in one for one in mine), sum("wrong" in one for one in mine)]
        row = [kind or "all", *map(str, counts)]
        if well:
            seconds = [one["seconds"] for one in well]
            row += [f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}"]
            row += [f"{statistics.median(one.get(part, 0.0) for one in well):.2f}" for part in PARTS]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join([*lines, "", *leaks(results)])


def leaks(results: Sequence[dict[str, Any]]) -> list[str]:
    """Memory, descriptors and threads of processes that have come through many recoveries, after two and after all."""
    seen: dict[tuple[int, str], list[Any]] = {}
    for one in results:
        for process, size in one.get("sizes", {}).items():
            seen.setdefault((one["job"], process), []).append(size)
    lines = ["| process | recoveries | KiB after 2 | in the end | descriptors | | threads | |", "|---" * 8 + "|"]
    for (job, process), sizes in seen.items():
        if len(sizes) >= OFTEN:
            (name, *first), (_, *last) = sizes[1], sizes[-1]
            both = " | ".join(f"{a} | {b}" for a, b in zip(first, last, strict=True))
            lines.append(f"| {job} {name} {process} | {len(sizes)} | {both} |")
    return lines


def size_of(pid: int) -> list[Any] | None:
    """What a process is, its memory (KiB), its descriptors and threads; None: it has ended, or is none of Python."""
    folder = Path(f"/proc/{pid}")
    try:
        words = (folder / "cmdline").read_text().split("\0")
        status = dict(text.split(":", 1) for text in (folder / "status").read_text().splitlines())
        counts = [len([*(folder / what).iterdir()]) for what in ("fd", "task")]
    except OSError:
        return None
    names = [Path(word).name for word in words[1:]]
    name = next((word for word in names if word in ("mlflash", "kept_trainer.py", "mlflash.launcher.host_agent")), "")
    return [name, int(status["VmRSS"].split()[0]), *counts] if name and "VmRSS" in status else None
