"""The courier's share of the network: as small as it was asked to be, and no bit the worse for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from holds import Hold
from mpi4py import MPI

from mlflash import Checkpointer

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
