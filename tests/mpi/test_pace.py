"""The courier's share of the network and of the cores: as small as it was asked to be, and no bit the worse for it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from holds import Hold
from mpi4py import MPI
from waiting import take

from mlflash import Checkpointer
from mlflash.courier.in_process import CourierProcess
from mlflash.mpi.send_rate import SendRate

pytestmark = pytest.mark.mpi(min_size=2)
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
NBYTES = 4 << 20
RATE = 8 << 20


@pytest.mark.parametrize("redundancy", ["copy", pytest.param("xor:3", marks=pytest.mark.mpi(min_size=3))])
def test_a_save_takes_as_long_as_its_bytes_do_at_the_rate_and_a_restore_does_not(
    options: dict[str, Any], redundancy: str, hold_at: Callable[[str], Hold]
) -> None:
    state = {"w": np.random.default_rng(RANK).integers(0, 255, NBYTES, np.uint8)}
    kept = state["w"].copy()
    options["timeout_s"] = 3600.0  # no wait ends at its deadline
    with Checkpointer(**options, redundancy=redundancy, send_rate=RATE) as ckpt:
        ckpt.prepare(state)
        go_on = hold_at("protect.announced")
        snapshot = ckpt.save(1, state)  # nothing was sent yet: a save that waited for it would never return
        assert not snapshot.done
        start = time.monotonic()
        go_on.set()
        snapshot.wait()
        seconds = time.monotonic() - start
        assert seconds > 0.8 * NBYTES / RATE
        assert ckpt.report()["send rate"] == RATE
        state["w"][:] = 0
        assert ckpt.restore(state) == 1
        assert np.array_equal(state["w"], kept)


def test_the_courier_is_as_nice_as_asked_and_nobody_else(options: dict[str, Any]) -> None:
    me = threading.get_native_id()
    before = os.getpriority(os.PRIO_PROCESS, me)
    is_process = os.environ.get("MLFLASH_COURIER") == "process"
    for nice in (min(19, before + 3), 0):  # a smaller one than it has is nothing that a user may ask for
        with Checkpointer(**options, nice=nice) as ckpt:
            assert ckpt.steps() == []
            pid = ckpt._courier._link.pid if is_process else os.getpid()
            threads = [int(thread) for thread in os.listdir(f"/proc/{pid}/task")]  # each has a niceness of its own
            if not is_process:
                threads = [one.native_id or 0 for one in threading.enumerate() if one.name == "mlflash-courier"]
            assert max(os.getpriority(os.PRIO_PROCESS, thread) for thread in threads) == max(before, nice)
            assert os.getpriority(os.PRIO_PROCESS, me) == before


def test_steps_of_one_of_the_optimizers_are_timed_where_they_may_not_be_slowed(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    for pace in (SendRate, CourierProcess):  # whom a trainer tells of its steps: a courier that is a thread, a process

        def step_of(pace: Any, step: Callable[[Any], None] = pace.step) -> None:
            told.append(pace)
            step(pace)

        monkeypatch.setattr(pace, "step", step_of)
    model = torch.nn.Linear(300, 300)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-6) for _ in range(2)]

    def step() -> None:
        model(torch.ones(1, 300)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        take(2e-3)

    with Checkpointer(**options, max_slowdown=0.03) as ckpt:
        ckpt.prepare({"model": model})
        for number in range(1, 100):
            step()
            if number % 10 == 0:
                ckpt.save(number, {"model": model}, until=optimizers).wait()
        assert len(told) == 99 and ckpt.report()["slowdown"] is not None
    for _ in range(3):
        step()
    assert len(told) == 99, "a hook is left that holds a closed Checkpointer"
