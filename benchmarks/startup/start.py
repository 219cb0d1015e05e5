"""The program of each rank: it reports when its MPI or its Checkpointer is ready."""

import sys
import time

kind, out, memory = sys.argv[1:]
call_s = 0.0
if kind == "bare":
    import numpy  # noqa: F401
    from mpi4py import MPI  # noqa: F401

    ready = time.monotonic()
else:
    import numpy  # noqa: F401

    import mlflash

    start = time.monotonic()
    ckpt = mlflash.Checkpointer(job=kind, memory=memory, redundancy="none")
    ready = time.monotonic()
    call_s = ready - start
    ckpt.close()
with open(out, "a") as file:
    file.write(f'{{"ready": {ready}, "call": {call_s}}}\n')
