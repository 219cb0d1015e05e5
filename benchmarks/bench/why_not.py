"""Why an aim is not reached, or not measured: by the name of the aim, and what of it. Written by hand, from profiles.

A row of RESULTS.md that is not reached and has no sentence here says that nobody knows yet.
"""

from __future__ import annotations

from .rows import Row

NOT_MEASURED = {
    "committed between hosts": "this run had no two nodes: those of transport are network namespaces, which need root",
    "gpu stall": "no GPU was there",
    "gpu lazy": "no GPU was there",
}

# (aim, beginning of case or what): why. The longest that fits counts.
NOT_REACHED: dict[tuple[str, str], str] = {
    ("first", "stall, unprepared"): "the slots are made and their pages faulted in by this very save: "
    "call prepare(state), or restore, before it",
    ("first", "committed, unprepared"): "as its stall",
    ("first", "stall, just prepared"): "prepare(state) faults the pages in behind, and the save comes before it is "
    "through",
    ("first", "committed, just prepared"): "as its stall",
    ("dcp", "1000"): "many small tensors cost DCP's and Python's handling of each, not their bytes",
}


def why_not(one: Row) -> str:
    """Say why a row does not reach the aim that it shows."""
    where = (one.get("case", ""), one["what"])
    fitting = [
        (len(start), text)
        for (shows, start), text in NOT_REACHED.items()
        if shows == one.get("shows") and any(text_of.startswith(start) for text_of in where)
    ]
    return max(fitting)[1] if fitting else "not known yet"
