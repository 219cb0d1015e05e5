"""Says why an aim is missed or not measured. These sentences are written by hand, from profiles.

If a row of RESULTS.md misses its aim and has no sentence here, RESULTS.md says that the reason is not known yet.
"""

from __future__ import annotations

from .rows import Row

NOT_MEASURED = {
    "committed between hosts": "this run had one node: only root can make two nodes of network namespaces",
    "gpu stall": "this machine has no GPU",
    "gpu lazy": "this machine has no GPU",
}

# (aim, beginning of case or what): why. If several keys fit, the longest counts.
NOT_REACHED: dict[tuple[str, str], str] = {
    ("stall", "8 ranks"): (
        "8 ranks and their 8 couriers share 2 cores, so a rank also waits for other ranks' couriers; during the "
        "memcpys no courier works"
    ),
    ("stall", "stall, copy, shared by all"): (
        "1.03 to 1.10 from run to run: a rank copies half of the state and makes checksums of the other half, "
        "which takes as long"
    ),
    ("gpu stall", ""): "not known; 1.06 in a run of a day before (benchmarks/gpu/README.md)",
    ("committed between hosts", ""): (
        "1.34 to 1.43 from run to run, with each transport: it reaches its aim in some runs"
    ),
    ("views", ""): (
        "3 to 8 ms from run to run, for two ranks that find the checkpoint, agree, and wake each other's threads "
        "on 2 cores"
    ),
    ("dcp", "64"): (
        "2.05 to 2.3 from run to run: 1.7 as for any restore, which checks everything before it copies; the rest "
        "is DCP's planning, which does not depend on the number of bytes"
    ),
    ("cpu", "8 ranks"): (
        "16 MiB take 3 ms to copy; the agreement takes CPU time that does not depend on the size (not profiled further)"
    ),
    ("small", ""): (
        "the copies take 0.8 of the loop; the rest asks each tensor for memory, shape, dtype and device, so that "
        "a tensor of another shape is not mistaken for that of the save before. This takes 0.6 µs per tensor; a "
        "copy in the loop takes 1.5 µs"
    ),
    ("first", "stall, unprepared"): (
        "this save makes the pages of all slots, and the courier has everything when it returns: call "
        "prepare(state) or restore before it, or use until="
    ),
    ("first", "committed, unprepared"): "for the same reason as its stall",
    ("first", "committed, unprepared, until="): "the state is copied to the slots through ordinary memory",
    ("restore", ""): (
        "everything is checked before a byte of the live state is changed, so that a damaged checkpoint leaves "
        "the state as it was; a check during the copy would come too late"
    ),
    ("lazy", "Megatron"): (
        "the rest is not copying: for each save Megatron makes and translates its sharded state, 0.3 ms per "
        "tensor, because CUDA is pretended here and each call of torch goes through Python"
    ),
    ("lazy", "Transformers"): (
        "the rest is not copying: 3 to 5 ms, whatever the number of bytes, in which it describes its state"
    ),
    ("lazy", "Lightning"): "as with the Trainer",
    ("lazy", "DeepSpeed"): "as with the Trainer",
    ("stall", "201 tensors"): (
        "a loop of copy_ takes 1.04; the rest is 1 ms to ask 201 tensors for their properties and to tell the courier"
    ),
    ("committed", "committed, copy, rma"): (
        "transport='auto' does not choose rma on one host: there MPICH moves a Put in cells of 8 KiB, one cell "
        "per call into MPI"
    ),
    ("dcp", "1000"): "with many small tensors, DCP and Python spend the time on each tensor, not on bytes",
    ("wall time", "10 steps"): "1.00 to 1.02 from run to run: it reaches its aim in some runs",
    ("start", "2 ranks"): "0.97 to 1.02 from run to run: it reaches its aim in some runs",
    ("start", "4 ranks"): "4 trainers, 4 zygotes and 4 couriers import and start MPI on 2 cores",
    ("slowed", "A step of a training (waits for a device)"): "1.05 to 1.08 from run to run: as with matrix products",
    ("slowed", "A step of a training (matrix products)"): (
        "training and courier pass the interpreter's lock back and forth (benchmarks/training/README.md)"
    ),
}


def why_not(one: Row) -> str:
    """Return why a row does not reach the aim that it shows."""
    where = (one.get("case", ""), one["what"])
    fitting = [
        (len(start), text)
        for (shows, start), text in NOT_REACHED.items()
        if shows == one.get("shows") and any(text_of.startswith(start) for text_of in where)
    ]
    return max(fitting)[1] if fitting else "not known yet"
