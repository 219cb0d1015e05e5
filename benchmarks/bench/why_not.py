"""Why an aim is missed or not measured, by the name of the aim and the part of it. Written by hand, from profiles.

If a row of RESULTS.md misses its aim and has no sentence here, RESULTS.md says that the reason is not known yet.
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
    ("stall", "8 ranks"): "8 ranks and their 8 couriers on 2 cores: what one rank waits for is in part another's "
    "courier; beside the memcpys no courier is at work",
    ("stall", "stall, copy, shared by all"): "1.03 to 1.10 from run to run: a rank copies half of it and makes "
    "checksums of the other half, which takes as long",
    ("gpu stall", ""): "not known; 1.06 in a run of a day before (benchmarks/gpu/README.md)",
    ("committed between hosts", ""): "1.34 to 1.43 from run to run, with each transport: it is at its aim",
    ("views", ""): "3 to 8 ms from run to run, of two ranks that find, agree, and wake each other's threads on 2 cores",
    (
        "dcp",
        "64",
    ): "2.05 to 2.3 from run to run: 1.7 as any restore, which checks all before it copies; the rest is what "
    "DCP plans, whatever the bytes",
    ("cpu", "8 ranks"): "16 MiB take 3 ms to copy; to agree takes CPU whatever the size (not profiled further)",
    (
        "small",
        "",
    ): "the copies are 0.8 of the loop; to ask each tensor for memory, shape, dtype and device, so that none of "
    "another shape is taken for that of the save before, takes 0.6 µs for each, and a copy in the loop 1.5",
    (
        "first",
        "stall, unprepared",
    ): "the pages of all slots are made by this very save, and the courier has all when it "
    "returns: call prepare(state), or restore, before it, or say until=",
    ("first", "committed, unprepared"): "as its stall",
    ("first", "committed, unprepared, until="): "the state goes to the slots by way of plain memory",
    (
        "restore",
        "",
    ): "all is checked before a byte of the live state is changed (a damaged checkpoint leaves it as it was); "
    "what is checked while it is copied cannot be taken back",
    (
        "lazy",
        "Megatron",
    ): "what is left is no copy: Megatron makes and translates its sharded state for each save, 0.3 ms for "
    "each tensor, where CUDA is pretended and each call of torch goes through Python",
    (
        "lazy",
        "Transformers",
    ): "what is left is no copy: 3 to 5 ms, whatever the bytes, in which it says what its state is",
    ("lazy", "Lightning"): "as with the Trainer",
    ("lazy", "DeepSpeed"): "as with the Trainer",
    ("stall", "201 tensors"): "a loop of copy_ takes 1.04; the rest is 1 ms to ask 201 tensors and to tell the courier",
    ("committed", "committed, copy, rma"): "transport='auto' does not take it on one host: there MPICH moves a Put in "
    "cells of 8 KiB, one for each call that it gets",
    ("dcp", "1000"): "many small tensors cost DCP's and Python's handling of each, not their bytes",
    ("wall time", "10 steps"): "1.00 to 1.02 from run to run: it is at its aim",
    ("start", "2 ranks"): "0.97 to 1.02 from run to run: it is at its aim",
    ("start", "4 ranks"): "4 trainers, 4 zygotes and 4 couriers import and start MPI on 2 cores",
    ("slowed", "A step of a training (waits for a device)"): "1.05 to 1.08 from run to run: as with matrix products",
    ("slowed", "A step of a training (matrix products)"): "training and courier hand the interpreter's lock back and "
    "forth (benchmarks/training/README.md)",
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
