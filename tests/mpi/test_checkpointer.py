"""The Checkpointer on real ranks: what it promises while nobody dies."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damage import flip
from holds import Hold
from mpi4py import MPI
from states import differences
from waiting import until

from mlflash import Checkpointer, errors

pytestmark = pytest.mark.mpi
two = pytest.mark.mpi(min_size=2)
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def state_at(step: int, n: int = 200_000) -> dict[str, Any]:
    random = np.random.default_rng((RANK, step))
    return {"w": random.standard_normal(n + RANK), "b": [random.integers(0, 9, 7), step, f"{RANK}"], "t": (step, None)}


def set_to(state: dict[str, Any], new: dict[str, Any]) -> None:
    state["w"][:], state["b"][0][:] = new["w"], new["b"][0]
    state["b"][1:], state["t"] = new["b"][1:], new["t"]


def same(loaded: object, saved: object) -> bool:
    return differences(saved, loaded, "", loaded=True) == []


def descriptors_and_threads() -> tuple[int, list[str]]:
    """Open files and running threads, but for the one that faults pages in and then ends."""
    threads = [t.name for t in threading.enumerate() if t.name != "mlflash-prefault"]
    return len(os.listdir("/proc/self/fd")), sorted(threads)


def of_courier(ckpt: Checkpointer) -> tuple[int, int]:
    """Open files and running threads of the courier."""
    (pid,) = re.findall(r"pid (\d+)", ckpt.report()["courier"])
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


def test_what_was_saved_is_restored_although_it_was_changed_at_once(options: dict[str, Any]) -> None:
    state = state_at(0)
    with Checkpointer(**options) as ckpt:
        assert ckpt.restore(state) is None
        for step in (1, 2, 3):
            set_to(state, state_at(step))
            start = time.perf_counter()
            snapshot = ckpt.save(step, state)
            assert 0 < snapshot.stall_s <= time.perf_counter() - start
            set_to(state, state_at(99))
        assert snapshot.wait() is snapshot
        assert snapshot.committed and snapshot.done and snapshot.error is None
        assert snapshot.commit_s is not None and 0 < snapshot.commit_s <= time.perf_counter() - start
        assert snapshot.nbytes > state["w"].nbytes
        assert ckpt.steps() == [2, 3]
        assert ckpt.restore(state) == 3
        assert same(state, state_at(3))
        assert ckpt.load(2)[0] == 2
        assert same(ckpt.load(2)[1], state_at(2))
        with pytest.raises(errors.StepNotFound, match=r"steps in memory: \[2, 3\]"):
            ckpt.restore(state, step=7)
        assert same(state, state_at(3)), "a failed restore changed the state"


def test_a_fresh_training_over_old_memory_does_not_lose_the_old_step_before_its_own_first_commit(
    options: dict[str, Any],
) -> None:
    with Checkpointer(**options) as ckpt:
        ckpt.save(50, state_at(50)).wait()
    with Checkpointer(**options) as ckpt:  # no restore: it starts from step 1 again
        assert ckpt.steps() == [50]
        ckpt.save(1, state_at(1)).wait()
        assert ckpt.load()[0] == 1
        ckpt.save(2, state_at(2)).wait()
        assert ckpt.steps() == [1, 2]


def test_a_restore_that_finds_nothing_prepares_and_one_that_finds_something_makes_room_too(
    options: dict[str, Any],
) -> None:
    count = 4 if SIZE > 1 else 2
    for start in (None, 1):
        with Checkpointer(**options) as ckpt:
            assert ckpt.restore(state_at(0)) == start
            ckpt.steps()  # behind the reprotection
            assert [slot["nbytes"] > 1_600_000 for slot in ckpt.report()["slots"]] == [True] * count
            files = {slot["file"] for slot in ckpt.report()["slots"]}
            ckpt.save((start or 0) + 1, state_at(1)).wait()
            assert {slot["file"] for slot in ckpt.report()["slots"]} == files
            assert ckpt.report()["restored_from"] == ("" if start is None else f"node{RANK}")


def test_reserve_allocates_at_the_start(options: dict[str, Any]) -> None:
    with Checkpointer(**options, reserve=1_000_000) as ckpt:
        assert all(slot["nbytes"] >= 1_000_000 for slot in ckpt.report()["slots"])


def test_state_that_grows_and_shrinks(options: dict[str, Any]) -> None:
    with Checkpointer(**options) as ckpt:
        for step, n in enumerate((1000, 300_000, 10, 900_000, 900_001), start=1):
            ckpt.save(step, state_at(step, n)).wait()
            assert same(ckpt.load()[1], state_at(step, n))


@pytest.mark.slow
def test_200_saves_in_a_row_neither_hang_nor_leak(options: dict[str, Any]) -> None:
    state = state_at(0, 2000)
    with Checkpointer(**options) as ckpt:
        ckpt.save(0, state).wait()
        before, before_there = descriptors_and_threads(), of_courier(ckpt)
        for step in range(1, 201):
            set_to(state, state_at(step, 2000))
            snapshot = ckpt.save(step, state)
        snapshot.wait()
        assert ckpt.report()["counts"]["committed"] == 201
        assert descriptors_and_threads() == before
        until(lambda: of_courier(ckpt) == before_there, "the courier to have no more files and threads than before")
        assert same(ckpt.load()[1], state_at(200, 2000))


def test_training_may_use_mpi_meanwhile(options: dict[str, Any]) -> None:
    with Checkpointer(**options) as ckpt:
        for step in range(1, 8):
            ckpt.save(step, state_at(step))
            for _ in range(20):
                assert MPI.COMM_WORLD.allreduce(RANK) == SIZE * (SIZE - 1) // 2
        ckpt.wait()
        assert ckpt.report()["counts"]["committed"] == 7


@two
def test_ranks_that_save_different_steps_are_told_so(options: dict[str, Any]) -> None:
    with Checkpointer(**options) as ckpt:
        with pytest.raises(errors.SaveFailed, match=r"not saving the same step") as caught:
            ckpt.save(10 + RANK, state_at(1)).wait()
        assert f"found:    steps 10 to {9 + SIZE}, {10 + RANK} here" in str(caught.value)
        ckpt.save(100, state_at(2)).wait()


def test_steps_must_grow(options: dict[str, Any]) -> None:
    with Checkpointer(**options) as ckpt:
        ckpt.save(5, state_at(5)).wait()
        for step in (5, 4, -1, "6"):
            with pytest.raises(errors.StepOrderError, match="steps must grow") as caught:
                ckpt.save(step, state_at(5))  # type: ignore[arg-type]
            assert "expected: a whole number, 6 or more" in str(caught.value)
        ckpt.save(6, state_at(6)).wait()
        assert ckpt.steps() == [5, 6]


def test_a_changed_structure_names_both_sides_and_changes_nothing(options: dict[str, Any]) -> None:
    with Checkpointer(**options) as ckpt:
        ckpt.save(1, state_at(1)).wait()
        other = {"w": np.zeros(3, dtype=np.float32), "b": [np.zeros(7, dtype=np.int64), 1, ""], "extra": 1}
        with pytest.raises(errors.StructureMismatch) as caught:
            ckpt.restore(other)
        text = str(caught.value)
        assert "w: array <f8 [20000" in text and "in the checkpoint, array <f4 [3] in the state given" in text
        assert "extra: in the state given, not in the checkpoint" in text
        assert "t: in the checkpoint, not in the state given" in text
        assert other["w"].tolist() == [0, 0, 0]
        state = state_at(0)
        assert ckpt.restore(state) == 1


def test_when_busy_skip_skips_on_all_ranks_or_on_none(options: dict[str, Any]) -> None:
    with Checkpointer(**options, when_busy="skip") as ckpt:
        snapshots = [ckpt.save(step, state_at(step)) for step in range(1, 31)]
        ckpt.wait()
        outcomes = [(s.committed, s.skipped) for s in snapshots]
        assert MPI.COMM_WORLD.allgather(outcomes) == [outcomes] * SIZE
        assert all(committed != skipped for committed, skipped in outcomes)
        assert any(committed for committed, _ in outcomes)
        newest = max(s.step for s in snapshots if s.committed)
        step, state = ckpt.load()
        assert step == newest and same(state, state_at(newest))
        for snapshot in snapshots:
            if snapshot.skipped:
                with pytest.raises(errors.SaveFailed, match="all slots"):
                    snapshot.wait()


def test_after_close_nothing_works_and_the_slots_stay(options: dict[str, Any]) -> None:
    ckpt = Checkpointer(**options)
    ckpt.save(1, state_at(1))
    ckpt.close()
    ckpt.close()
    for call in (lambda: ckpt.save(2, {}), lambda: ckpt.restore({}), ckpt.steps, ckpt.wait, ckpt.load):
        with pytest.raises(errors.Closed):
            call()
    with Checkpointer(**options) as again:
        assert again.steps() == [1]


@two
def test_torch_ranks_that_differ_from_mpi_ranks_are_refused(options: dict[str, Any], comm: Any) -> None:
    import torch.distributed as dist

    reverse = SIZE - 1 - RANK
    store = dist.TCPStore("127.0.0.1", 0, None, True) if reverse == 0 else None
    port = comm.bcast(store.port if store else None, root=SIZE - 1)
    store = store or dist.TCPStore("127.0.0.1", port, None, False)
    dist.init_process_group("gloo", store=store, rank=reverse, world_size=SIZE)
    try:
        with pytest.raises(errors.WorldMismatch) as caught:
            Checkpointer(**options)
        assert "torch.distributed and MPI number the ranks differently" in str(caught.value)
        ordered = comm.Split(0, reverse)
        with Checkpointer(**options, comm=ordered) as ckpt:
            ckpt.save(1, state_at(1)).wait()
        ordered.Free()
    finally:
        comm.Barrier()
        dist.destroy_process_group()


@two
@pytest.mark.parametrize("redundancy", ["copy", pytest.param("xor:3", marks=pytest.mark.mpi(min_size=3))])
def test_a_save_takes_as_long_as_its_bytes_do_at_the_rate_and_a_restore_does_not(
    options: dict[str, Any], redundancy: str, hold_at: Callable[[str], Hold]
) -> None:
    nbytes, rate = 4 << 20, 8 << 20
    state = {"w": np.random.default_rng(RANK).integers(0, 255, nbytes, np.uint8)}
    kept = state["w"].copy()
    options["timeout_s"] = 3600.0  # no wait ends at its deadline
    with Checkpointer(**options, redundancy=redundancy, send_rate=rate) as ckpt:
        ckpt.prepare(state)
        go_on = hold_at("protect.announced")
        snapshot = ckpt.save(1, state)  # nothing was sent yet: a save that waited for it would never return
        assert not snapshot.done
        start = time.monotonic()
        go_on.set()
        snapshot.wait()
        seconds = time.monotonic() - start
        assert seconds > 0.8 * nbytes / rate
        assert ckpt.report()["send rate"] == rate
        state["w"][:] = 0
        assert ckpt.restore(state) == 1
        assert np.array_equal(state["w"], kept)


# Several threads per rank


def tensors_at(step: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(100 * RANK + step)
    shapes = [(3_000_001,), (5, 7), (1024, 1500), (0,), (2_500_000,)]
    return {f"t{i}": torch.randn(shape) for i, shape in enumerate(shapes)}


def test_a_crew_saves_restores_and_finds_damage_as_one_thread_does(
    options: dict[str, Any], replace: Callable[[str], None]
) -> None:
    replace("three_copy_threads")
    options["redundancy"] = "none"
    with Checkpointer(**options) as ckpt:
        assert ckpt._trainer.copy_threads.threads == 3
        for step in (1, 2):
            state = tensors_at(step)
            ckpt.save(step, state).wait()
            state["t0"].zero_()
        newest = next(slot for slot in ckpt.report()["slots"] if slot["step"] == 2)
        file = Path(ckpt.report()["memory"], newest["file"])
    with Checkpointer(**options) as ckpt:
        state = tensors_at(3)
        assert ckpt.restore(state) == 2
        assert all(map(torch.equal, state.values(), tensors_at(2).values()))
    for at in (13_000_000, 20_000_000):
        flip(file, at)
    with Checkpointer(**options) as ckpt:
        assert ckpt.restore(state) == 1
        assert all(map(torch.equal, state.values(), tensors_at(1).values()))
