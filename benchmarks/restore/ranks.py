"""The program of each rank: it makes a new Checkpointer, as a relaunched job does, restores, and times a memcpy."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch.distributed.checkpoint as dcp
from bench.clock import Action, Bench
from bench.rows import Samples, row
from bench.states import Saver, State, bytes_of, change, large_state
from bench.yardsticks import Yardsticks, both
from mpi4py import MPI

from mlflash import Checkpointer

MS = {"1 ms": np.array(1e-3)}
Work = Callable[[Checkpointer], dict[str, float]]


def relaunched(bench: Bench, beside: Yardsticks, state: State, work: Work, wipe: bool = False) -> Samples:
    """Save a state once. Then time something with a new Checkpointer of the same job in each repetition.

    Args:
        bench: the clock.
        beside: the yardsticks.
        state: the state to save, and to restore into.
        work: what is timed. It returns further seconds by name.
        wipe: whether the second node loses its slots before each repetition.
    """
    with bench.job("restore") as job:
        with bench.checkpointer(job, redundancy="copy") as ckpt:
            Saver(ckpt, state)()

        def relaunch() -> dict[str, float]:
            if wipe and bench.comm.rank == 1:
                for file in (bench.memory / f"mlflash-{os.getuid()}" / job / "node1").glob("slot-*"):
                    file.unlink()
            bench.comm.Barrier()
            made = time.perf_counter()
            with bench.checkpointer(job, redundancy="copy") as ckpt:  # its exit waits until all copies are healed
                made = time.perf_counter() - made
                bench.comm.Barrier()
                start = time.perf_counter()
                more = work(ckpt)
                return {"work": time.perf_counter() - start, "made": made, **more}

        actions: dict[str, Action] = {**beside.of(bytes_of(state)), "relaunch": relaunch}
        return bench.repeat(actions, before=lambda: change(state))


def in_place(bench: Bench, beside: Yardsticks, nbytes: int, wipe: bool) -> None:
    """Time restores into live tensors. The Checkpointer itself counts the times of the parts."""
    state = large_state(nbytes)

    def restore(ckpt: Checkpointer) -> dict[str, float]:
        assert ckpt.restore(state) == 1
        seconds = ckpt.report()["seconds"]
        return {"find": seconds["find and fetch"], "load": seconds["load"]}

    samples = relaunched(bench, beside, state, restore, wipe)
    assert all(bool((value == i).all()) for i, value in enumerate(state.values())), "restored another state"
    over, where = both(samples), "one node wiped" if wipe else "on the same node"
    find = "find, check, fetch every byte" if wipe else "find and check every byte"
    bench.rows(
        row(f"restore, {where}", samples["work"], over, "" if wipe else "restore"),
        row(f"restore, {where}: {find}", samples["find"], over),
        row(f"restore, {where}: copy into live tensors", samples["load"], over),
        row(f"Checkpointer(...) before the restore, {where}", samples["made"], over),
    )


def anew(bench: Bench, beside: Yardsticks, nbytes: int) -> None:
    """Time `Checkpointer.load`. It makes fresh tensors, so each of their pages is faulted in."""
    state = large_state(nbytes)

    def load(ckpt: Checkpointer) -> dict[str, float]:
        step, found = ckpt.load()
        assert step == 1 and found["layer1"][0] == 1
        return {"find": ckpt.report()["seconds"]["find and fetch"]}

    samples = relaunched(bench, beside, state, load)
    bench.rows(
        row("load, into fresh tensors", samples["work"], both(samples)),
        row("load, into fresh tensors: find and check every byte", samples["find"], both(samples)),
    )


def views(bench: Bench, beside: Yardsticks, nbytes: int) -> None:
    """Time `Checkpointer.load(copy=False)`, which gives unchecked views of what is in memory."""
    state = large_state(nbytes)

    def view(ckpt: Checkpointer) -> dict[str, float]:
        step, found = ckpt.load(copy=False)
        assert step == 1 and len(found) == len(state)
        return {"last": float(found["layer1"][-1])}

    samples = relaunched(bench, beside, state, view)
    assert (samples["last"] == 1).all(), "the views show another state"
    bench.rows(row("load(copy=False): views, unchecked", samples["work"], {**both(samples), **MS}, "views"))


def peer(bench: Bench, beside: Yardsticks, nbytes: int) -> None:
    """Time PyTorch's DCP, which loads from /dev/shm without a checksum of the content. Each rank loads by itself."""
    state = large_state(nbytes)
    path = bench.memory / f"dcp-{bench.comm.rank}"

    def load() -> None:
        dcp.load(state, checkpoint_id=path, no_dist=True)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)  # it warns even with no_dist=True
        dcp.save(state, checkpoint_id=path, no_dist=True)
        samples = bench.repeat({**beside.of(bytes_of(state)), "load": load}, before=lambda: change(state))
    shutil.rmtree(path)
    bench.rows(row("peer: torch DCP load", samples["load"], both(samples)))


def main() -> None:
    out, memory, nbytes, repetitions = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    bench = Bench(MPI.COMM_WORLD, out, memory, repetitions)
    beside = Yardsticks(bench.comm, memory, nbytes)
    bench.header()
    logging.getLogger("mlflash").setLevel("ERROR")  # it warns of a step that is restored again and again
    in_place(bench, beside, nbytes, wipe=False)
    in_place(bench, beside, nbytes, wipe=True)
    anew(bench, beside, nbytes)
    views(bench, beside, nbytes)
    peer(bench, beside, nbytes)
    beside.free()


if __name__ == "__main__":
    main()
