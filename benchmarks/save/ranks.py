"""The program of each of the two ranks: it times every kind of save, a memcpy and a raw MPI Put."""

from __future__ import annotations

import shutil
import sys
import warnings
from pathlib import Path

import numpy as np
import torch.distributed.checkpoint as dcp
from bench.aims import MEMCPY
from bench.clock import Action, Bench, cpu
from bench.rows import row
from bench.states import Saver, bytes_of, change, large_state
from bench.yardsticks import Yardsticks, both
from mpi4py import MPI

NO_REDUNDANCY = "no redundancy"
SHARED = (NO_REDUNDANCY, 1.5)


def yardsticks(bench: Bench, beside: Yardsticks, nbytes: int) -> None:
    pieces = bytes_of(large_state(nbytes))
    whole = np.concatenate(pieces)
    samples = bench.repeat({**beside.of(pieces), "whole": lambda: beside.memcpy([whole])})
    over = both(samples)
    bench.rows(
        row("memcpy, tensor by tensor", samples[MEMCPY], over),
        row("memcpy in one piece", samples["whole"], over),  # faster: above about 20 MiB glibc bypasses the caches
        row("raw MPI Put", samples["Put"], over),
    )


def save(bench: Bench, beside: Yardsticks, nbytes: int, redundancy: str, transport: str) -> None:
    state = large_state(nbytes)
    alone = redundancy == "none"
    title = redundancy if alone else f"{redundancy}, {transport}"
    with (
        bench.job(f"{redundancy}-{transport}") as job,
        bench.checkpointer(job, redundancy=redundancy, transport=transport) as ckpt,
    ):
        ckpt.prepare(state)
        actions: dict[str, Action] = {**beside.of(bytes_of(state)), "save": Saver(ckpt, state)}
        samples = bench.repeat(actions, before=lambda: change(state))
    bench.rows(
        row(f"stall, {title}", samples["stall"], both(samples), "stall"),
        row(f"committed, {title}", samples["save"], both(samples), "" if alone else "committed"),
        row(f"CPU seconds, {title}", cpu(samples)["save"], both(cpu(samples)), "cpu" if alone else ""),
    )


def save_shared(bench: Bench, beside: Yardsticks, nbytes: int) -> None:
    """Save the same tensors on both ranks, as under DDP, and compare with a save without redundancy."""
    state = large_state(nbytes)
    with (
        bench.job("alone") as alone,
        bench.job("shared") as shared,
        bench.checkpointer(alone, redundancy="none") as bare,
        bench.checkpointer(shared, redundancy="copy", replicated=True) as ckpt,
    ):
        bare.prepare(state)
        ckpt.prepare(state)
        actions: dict[str, Action] = {
            **beside.of(bytes_of(state)),
            "bare": Saver(bare, state),
            "save": Saver(ckpt, state),
        }
        samples = bench.repeat(actions, before=lambda: change(state))
        held = [sum(slot["nbytes"] for slot in one.report()["slots"]) / 2 / nbytes for one in (bare, ckpt)]
        assert max(held) < 1.01, "more than one state in each of two slots"
    over = both(samples)
    committed = {**over, NO_REDUNDANCY: samples["bare"]}
    bench.rows(
        row("stall, copy, shared by all", samples["stall"], over, "stall"),
        row("committed, copy, shared by all", samples["save"], committed, aim=SHARED),
        row("CPU seconds, copy, shared by all", cpu(samples)["save"], both(cpu(samples))),
    )


def peer(bench: Bench, beside: Yardsticks, nbytes: int) -> None:
    """Save with PyTorch's DCP into /dev/shm, each rank by itself. It makes no copy on another node and no checksum."""
    state = large_state(nbytes)
    path = bench.memory / f"dcp-{bench.comm.rank}"

    def write() -> None:
        dcp.save(state, checkpoint_id=path, no_dist=True)

    def forget() -> None:
        shutil.rmtree(path, ignore_errors=True)
        change(state)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)  # it warns even with no_dist=True
        samples = bench.repeat({**beside.of(bytes_of(state)), "save": write}, before=forget)
    shutil.rmtree(path)
    bench.rows(row("peer: torch DCP save to /dev/shm", samples["save"], both(samples)))


def main() -> None:
    out, memory, nbytes, repetitions = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    bench = Bench(MPI.COMM_WORLD, out, memory, repetitions)
    beside = Yardsticks(bench.comm, memory, nbytes)
    bench.header()
    yardsticks(bench, beside, nbytes)
    save(bench, beside, nbytes, "none", "auto")
    save(bench, beside, nbytes, "copy", "p2p")
    save(bench, beside, nbytes, "copy", "rma")
    save_shared(bench, beside, nbytes)
    peer(bench, beside, nbytes)
    beside.free()


if __name__ == "__main__":
    main()
