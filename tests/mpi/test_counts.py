"""What one save takes once it is in its stride, in numbers that do not vary: a guard against getting slower unseen."""

from __future__ import annotations

import gc
import resource
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import in_couriers
import numpy as np
import pytest
import torch
import xxhash
from mpi4py import MPI
from waiting import until as until_true

from mlflash import Checkpointer
from mlflash.channel.client import Client
from mlflash.save.stage import Staging
from mlflash.state import copy_kernel

pytestmark = pytest.mark.mpi
SIZE = MPI.COMM_WORLD.size
LARGE, SMALL = 4, 200
STATE_NBYTES = LARGE * (6 << 20) + SMALL * 4096
WARM_UP, SAVES = 4, 5


@pytest.fixture
def counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, replace: Callable[[str], None]
) -> Callable[[], Counter[str]]:
    """Bytes that were copied and checked so far, by any thread of this process and its courier, and its collectives."""
    path = tmp_path / f"counts-{MPI.COMM_WORLD.rank}"
    of_courier, counted = in_couriers.Counts(path), Counter[str]()
    monkeypatch.setenv(in_couriers.COUNTS, str(path))
    replace("counted")
    copy, fill, digest = np.copyto, copy_kernel.fill, xxhash.xxh3_64_intdigest

    def counting_copy(target: np.ndarray, source: Any, *args: Any) -> None:
        counted["copied"] += target.nbytes
        copy(target, source, *args)

    def counting_fill(body: np.ndarray, block_nbytes: int, parts: np.ndarray, todo: np.ndarray, *args: Any) -> None:
        fill(body, block_nbytes, parts, todo, *args)
        for number in np.flatnonzero(todo[args[0] : args[1]]) + args[0]:
            start, end = number * block_nbytes, min((number + 1) * block_nbytes, body.nbytes)
            inside = np.minimum(parts["start"] + parts["nbytes"], end) - np.maximum(parts["start"], start).astype(float)
            counted["copied"] += int(inside[inside > 0].sum())
            counted["checked"] += int(end - start) * (todo[number] == copy_kernel.Todo.COPY_AND_CHECK)

    def counting_digest(data: Any, *args: Any) -> int:
        counted["checked"] += memoryview(data).nbytes
        return digest(data, *args)

    monkeypatch.setattr(np, "copyto", counting_copy)
    monkeypatch.setattr(copy_kernel, "fill", counting_fill)
    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", counting_digest)
    return lambda: counted + of_courier.all()


def state_and_optimizer() -> tuple[dict[str, Any], torch.optim.Optimizer]:
    large = [torch.nn.Parameter(torch.full((6 << 18,), float(i))) for i in range(LARGE)]
    small = [torch.nn.Parameter(torch.full((1024,), float(i))) for i in range(SMALL)]
    return {"large": large, "small": small, "step": 0}, torch.optim.SGD(large + small, lr=0.1)


def faults() -> int:
    """Page faults of this thread."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


@pytest.mark.parametrize(
    ("redundancy", "lazy"),
    [
        pytest.param("none", False, marks=pytest.mark.slow),
        pytest.param("copy", True, marks=pytest.mark.mpi(min_size=2)),
    ],
    ids=["none-at once", "copy-until"],
)
def test_a_save_copies_once_checks_once_at_each_end_and_agrees_three_times(
    options: dict[str, Any], counts: Callable[[], Counter[str]], redundancy: str, lazy: bool
) -> None:
    if options["transport"] == "rma" and redundancy == "none":
        options["transport"] = "p2p"  # nothing is sent
    state, optimizer = state_and_optimizer()
    until = optimizer if lazy else None
    # The scrubber checks, too, where a save waits for a busy machine.
    with Checkpointer(**options, redundancy=redundancy, scrub_rate=0.0) as ckpt:
        ckpt.prepare(state)
        for step in range(WARM_UP):
            ckpt.save(step, state, until=until).wait()
        for step in range(WARM_UP, WARM_UP + SAVES):
            ckpt.steps()  # a save is over for the courier a moment after its end is known here
            before, faulted = counts(), faults()
            snapshot = ckpt.save(step, state, until=until)
            at_save = faults() - faulted
            snapshot.wait()
            made = counts() - before
            assert at_save <= 8, "pages of the slot, or of new buffers, were faulted in"
            assert made["copied"] == STATE_NBYTES
            ends = 1 if redundancy == "none" else 2
            # Manifest, gaps and block tables are checked, too.
            assert ends * STATE_NBYTES <= made["checked"] <= ends * (STATE_NBYTES + (300 << 10))
            agreed = sum(made[name] for name in in_couriers.COLLECTIVES)
            assert agreed <= 3 and made["Iallreduce"] == agreed and (SIZE == 1 or agreed)


def test_a_restore_waits_for_its_courier_seven_times_at_most(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    state, _ = state_and_optimizer()
    with Checkpointer(**options) as ckpt:
        ckpt.save(1, state).wait()
    with Checkpointer(**options) as ckpt:
        waits, really = list[str](), Client._result_of
        monkeypatch.setattr(Client, "_result_of", lambda me, job: [waits.append(job.method), really(me, job)][1])
        assert ckpt.restore(state) == 1
    assert 4 <= waits.index("free") <= 7, waits


@pytest.mark.parametrize("lazy", [False, True], ids=["at once", "until"])
def test_a_save_keeps_no_memory_and_takes_little_for_a_while(options: dict[str, Any], lazy: bool) -> None:
    state, optimizer = state_and_optimizer()
    until = optimizer if lazy else None
    threads = threading.active_count()
    # The scrubber, which is no part of a save, knows of what it verifies until it looks again.
    with Checkpointer(**options, redundancy="none", scrub_rate=0.0) as ckpt:
        ckpt.prepare(state)
        for step in range(WARM_UP):
            ckpt.save(step, state, until=until).wait()
        tracemalloc.start()
        try:
            ckpt.save(WARM_UP, state, until=until).wait()
            ckpt.steps()  # a save is over for the courier a moment after its end is known here
            gc.collect()
            before, _ = tracemalloc.get_traced_memory()
            for step in range(WARM_UP + 1, WARM_UP + 1 + SAVES):
                tracemalloc.reset_peak()
                ckpt.save(step, state, until=until).wait()
                peak = tracemalloc.get_traced_memory()[1]
                assert peak - before < 200 << 10, "a save of 200 tensors takes more than 200 KiB of Python's memory"
            ckpt.steps()

            def is_as_before() -> bool:  # at some moment: a thread that receives has a buffer of 64 KiB for a while
                gc.collect()  # at each look: a thread that ends its part of a save fills Python's free lists
                return tracemalloc.get_traced_memory()[0] - before < 4 << 10

            until_true(is_as_before, "the end of what saves leave behind", timeout_s=10)
        finally:
            tracemalloc.stop()
        copying = ckpt._trainer.copy_threads.threads - 1  # as many as help, which is measured
        assert threading.active_count() <= threads + copying + 2  # one answers the courier, one looks at its deadlines


@pytest.mark.parametrize("replicated", [False, True], ids=["own", "shared"])
def test_a_first_save_waits_for_its_own_slot_alone(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, replicated: bool
) -> None:
    stage, there = Staging.copy, []

    def look_and_copy(*args: Any) -> Any:
        there.append(sum(path.stat().st_size for path in memory.glob("slot-*")))
        return stage(*args)

    monkeypatch.setattr(Staging, "copy", look_and_copy)
    with Checkpointer(**options, replicated=replicated or None) as ckpt:
        memory = Path(ckpt.report()["memory"])
        state = {"own": np.full(1 << 20, MPI.COMM_WORLD.rank, np.uint8), "alike": np.ones(1 << 20, np.uint8)}
        ckpt.save(1, state).wait()
        assert 1 << 20 < there[0] < 3 << 20, there
        after = sum(path.stat().st_size for path in memory.glob("slot-*"))
        assert after > there[0] + (2 << 20), "no other slots are made"
