"""The Checkpointer on real ranks: what it promises while nobody dies."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from holds import Hold
from mpi4py import MPI
from waiting import PATIENCE_S, until

import mlflash
from mlflash import Checkpointer, errors
from mlflash.memory.slot_header import HEADER_NBYTES, Header, unpack

pytestmark = pytest.mark.mpi
two = pytest.mark.mpi(min_size=2)
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def state_at(step: int, n: int = 200_000) -> dict[str, Any]:
    random = np.random.default_rng((RANK, step))
    return {"w": random.standard_normal(n + RANK), "b": [random.integers(0, 9, 7), step, f"{RANK}"], "t": (step, None)}


def set_to(state: dict[str, Any], new: dict[str, Any]) -> None:
    state["w"][:], state["b"][0][:] = new["w"], new["b"][0]
    state["b"][1:], state["t"] = new["b"][1:], new["t"]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def descriptors_and_threads() -> tuple[int, list[str]]:
    """Open files and running threads, but for the one that faults pages in and then ends."""
    threads = [t.name for t in threading.enumerate() if t.name != "mlflash-prefault"]
    return len(os.listdir("/proc/self/fd")), sorted(threads)


def test_what_was_saved_is_restored_although_it_was_changed_at_once(options: dict[str, Any]) -> None:
    state = state_at(0)
    with Checkpointer(**options) as ckpt:
        assert ckpt.restore(state) is None
        for step in (1, 2, 3):
            set_to(state, state_at(step))
            begun = time.perf_counter()
            snapshot = ckpt.save(step, state)
            assert 0 < snapshot.stall_s <= time.perf_counter() - begun
            set_to(state, state_at(99))
        assert snapshot.wait() is snapshot
        assert snapshot.committed and snapshot.done and snapshot.error is None
        assert snapshot.commit_s is not None and 0 < snapshot.commit_s <= time.perf_counter() - begun
        assert snapshot.nbytes > state["w"].nbytes
        assert ckpt.steps() == [2, 3]
        assert ckpt.restore(state) == 3
        assert same(state, state_at(3))
        assert ckpt.load(2)[0] == 2
        assert same(ckpt.load(2)[1], state_at(2))
        with pytest.raises(errors.StepNotFound, match=r"steps in memory: \[2, 3\]"):
            ckpt.restore(state, step=7)
        assert same(state, state_at(3)), "a failed restore changed the state"


def test_a_new_checkpointer_goes_on_where_the_last_one_ended(options: dict[str, Any]) -> None:
    state = state_at(0)
    for start in (None, 2, 4):
        with Checkpointer(**options) as ckpt:
            assert ckpt.restore(state) == start
            assert same(state, state_at(start or 0))
            for step in ((start or 0) + 1, (start or 0) + 2):
                set_to(state, state_at(step))
                ckpt.save(step, state)
    files = sorted(Path(ckpt.report()["memory"]).glob("slot-*"))
    assert len(files) == (4 if SIZE > 1 else 2)


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


def test_prepare_sizes_everything_before_the_first_save(options: dict[str, Any]) -> None:
    with Checkpointer(**options) as ckpt:
        ckpt.prepare(state_at(0))
        sizes = [slot["nbytes"] for slot in ckpt.report()["slots"]]
        assert len(sizes) == (4 if SIZE > 1 else 2) and min(sizes) > 1_600_000
        files = {slot["file"] for slot in ckpt.report()["slots"]}
        for step in (1, 2, 3):
            ckpt.save(step, state_at(step)).wait()
        assert {slot["file"] for slot in ckpt.report()["slots"]} == files
        assert [slot["nbytes"] for slot in ckpt.report()["slots"]] == sizes


def test_a_restore_that_finds_nothing_prepares_and_one_that_finds_something_makes_room_too(
    options: dict[str, Any], root: Path
) -> None:
    count = 4 if SIZE > 1 else 2
    for start in (None, 1):
        with Checkpointer(**options) as ckpt:
            assert ckpt.restore(state_at(0)) == start
            ckpt.steps()  # behind the heal
            assert [slot["nbytes"] > 1_600_000 for slot in ckpt.report()["slots"]] == [True] * count
            files = {slot["file"] for slot in ckpt.report()["slots"]}
            ckpt.save((start or 0) + 1, state_at(1)).wait()
            assert {slot["file"] for slot in ckpt.report()["slots"]} == files
            assert ckpt.report()["restored_from"] == ("" if start is None else f"node{RANK}")


def spoil_what_arrives(home: Path) -> None:
    """Change the checksums in each slot of this node that has no header, as in one that is being received."""
    slots = [np.memmap(path, np.uint8, mode="r+") for path in home.glob("slot-*") if path.stat().st_size]
    (extents,) = {header.extents for slot in slots if (header := read_header(slot)) is not None and header.rank}
    for slot in slots:
        if read_header(slot) is None:
            slot[extents.table_start : extents.table_start + 8 * extents.blocks] ^= 1


def read_header(slot: np.ndarray) -> Header | None:
    try:
        return unpack(slot[:HEADER_NBYTES].tobytes())
    except errors.CorruptSlot:
        return None


@pytest.mark.mpi(min_size=3)
def test_a_heal_that_fails_is_tried_again_and_saving_goes_on_on_ranks_that_moved(
    options: dict[str, Any], comm: Any, caplog: pytest.LogCaptureFixture, hold_at: Callable[[str], Hold]
) -> None:
    with Checkpointer(**options) as ckpt:
        ckpt.save(1, state_at(1)).wait()
    home = Path(ckpt.report()["memory"])
    comm.Barrier()
    home.rename(home.with_name(f"moving{RANK}"))
    comm.Barrier()
    home.with_name(f"moving{RANK}").rename(home.with_name(f"node{(RANK - 1) % SIZE}"))
    comm.Barrier()
    heals = hold_at("heal.begun")
    with caplog.at_level(logging.WARNING, "mlflash"), Checkpointer(**options) as ckpt:
        state = state_at(0)
        assert ckpt.restore(state) == 1 and same(state, state_at(1))
        arrives = hold_at("transfer.received") if RANK == 0 else None
        heals.set()
        if arrives is not None:
            until(lambda: arrives.is_reached, "a copy of another rank's slot to arrive")
            spoil_what_arrives(Path(ckpt.report()["memory"]))
            arrives.set()
        for step in (2, 3):
            ckpt.save(step, state_at(step)).wait()
        assert caplog.text.count("the restored step has no full redundancy") == int(RANK == 0)  # where it failed
        assert ckpt.steps() == [2, 3] and same(ckpt.load()[1], state_at(3))


def test_reserve_allocates_at_the_start(options: dict[str, Any]) -> None:
    with Checkpointer(**options, reserve=1_000_000) as ckpt:
        assert all(slot["nbytes"] >= 1_000_000 for slot in ckpt.report()["slots"])


def test_state_that_grows_and_shrinks(options: dict[str, Any]) -> None:
    with Checkpointer(**options) as ckpt:
        for step, n in enumerate((1000, 300_000, 10, 900_000, 900_001), start=1):
            ckpt.save(step, state_at(step, n)).wait()
            assert same(ckpt.load()[1], state_at(step, n))


def test_only_one_rank_grows(options: dict[str, Any]) -> None:
    with Checkpointer(**options) as ckpt:
        for step in range(1, 6):
            n = 1000 if RANK else 1000 * 4**step
            ckpt.save(step, state_at(step, n))
        ckpt.wait()
        assert same(ckpt.load()[1], state_at(5, n))


@pytest.mark.slow
def test_200_saves_in_a_row_neither_hang_nor_leak(options: dict[str, Any]) -> None:
    state = state_at(0, 2000)
    with Checkpointer(**options) as ckpt:
        ckpt.save(0, state).wait()
        before = descriptors_and_threads()
        for step in range(1, 201):
            set_to(state, state_at(step, 2000))
            snapshot = ckpt.save(step, state)
        snapshot.wait()
        assert ckpt.report()["counts"]["committed"] == 201
        assert descriptors_and_threads() == before
        assert same(ckpt.load()[1], state_at(200, 2000))


def test_a_main_thread_that_computes_does_not_keep_a_step_from_being_committed(options: dict[str, Any]) -> None:
    matrix = np.ones((300, 300))
    with Checkpointer(**options) as ckpt:
        ckpt.prepare(state_at(0))
        for step in (1, 2, 3):
            snapshot = ckpt.save(step, state_at(step))
            end = time.monotonic() + PATIENCE_S
            while not snapshot.committed and time.monotonic() < end:
                matrix @ matrix
            assert snapshot.committed, snapshot.error


def test_training_may_use_mpi_meanwhile(options: dict[str, Any]) -> None:
    with Checkpointer(**options) as ckpt:
        for step in range(1, 8):
            ckpt.save(step, state_at(step))
            for _ in range(20):
                assert MPI.COMM_WORLD.allreduce(RANK) == SIZE * (SIZE - 1) // 2
        ckpt.wait()
        assert ckpt.report()["counts"]["committed"] == 7


@two
def test_a_leaf_that_one_rank_cannot_save_fails_the_step_everywhere_and_nothing_else(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "mlflash"), Checkpointer(**options) as ckpt:
        ckpt.save(1, state_at(1)).wait()
        if RANK == SIZE - 1:
            with pytest.raises(errors.StateError, match="cannot be saved") as caught:
                ckpt.save(2, {"bad": {"leaf": object()}})
            assert caught.value.tensor == "bad.leaf"
        else:
            with pytest.raises(errors.SaveFailed, match=r"bad\.leaf"):
                ckpt.save(2, state_at(2)).wait()
        ckpt.save(3, state_at(3)).wait()
        assert ckpt.steps() == [1, 3]
        assert same(ckpt.load()[1], state_at(3))


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


@two
def test_a_load_error_on_one_rank_is_raised_on_all(options: dict[str, Any]) -> None:
    class Fussy:
        def state_dict(self) -> dict[str, Any]:
            return {"x": np.zeros(3)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if RANK == SIZE - 1:
                raise KeyError("not mine")

    with Checkpointer(**options) as ckpt:
        ckpt.save(1, {"f": Fussy()}).wait()
        with pytest.raises(errors.StructureMismatch, match="loading failed: KeyError"):
            ckpt.restore({"f": Fussy()})


def test_when_busy_skip_skips_on_all_ranks_or_on_none(options: dict[str, Any]) -> None:
    with Checkpointer(**options, when_busy="skip") as ckpt:
        snapshots = [ckpt.save(step, state_at(step)) for step in range(1, 31)]
        ckpt.wait()
        mine = [(s.committed, s.skipped) for s in snapshots]
        assert MPI.COMM_WORLD.allgather(mine) == [mine] * SIZE
        assert all(committed != skipped for committed, skipped in mine)
        assert any(committed for committed, _ in mine)
        newest = max(s.step for s in snapshots if s.committed)
        step, state = ckpt.load()
        assert step == newest and same(state, state_at(newest))
        for snapshot in snapshots:
            if snapshot.skipped:
                with pytest.raises(errors.SaveFailed, match="both slots"):
                    snapshot.wait()


@two
def test_strict_raises_what_failed_in_the_background(options: dict[str, Any]) -> None:
    ckpt = Checkpointer(**options, strict=True)
    ckpt.save(1, state_at(1)).wait()
    if RANK == 0:
        with pytest.raises(errors.StateError):
            ckpt.save(2, {"bad": object()})
    else:
        with pytest.raises(errors.SaveFailed):  # by the save itself, where it has failed so soon
            ckpt.save(2, state_at(2))
            ckpt.wait()
    ckpt.wait()
    assert ckpt.steps() == [1]
    ckpt.close()


def test_two_jobs_with_one_name_are_refused_on_all_ranks(options: dict[str, Any]) -> None:
    with Checkpointer(**options) as ckpt:
        with pytest.raises(errors.JobInUse, match="job"):
            Checkpointer(**options)
        ckpt.save(1, state_at(1)).wait()
        with Checkpointer(**{**options, "job": "other"}) as other:
            assert other.restore(state_at(0)) is None
            other.save(7, state_at(7)).wait()
        assert ckpt.steps() == [1]


def test_memory_that_is_too_small_is_refused_before_anything_is_allocated(
    options: dict[str, Any], comm: Any, root: Path
) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root: mounts a small tmpfs")
    small = root / "small"
    if RANK == 0:
        small.mkdir()
        assert os.system(f"mount -t tmpfs -o size=60m,mode=1777 tmpfs {small}") == 0
    comm.Barrier()
    try:
        with Checkpointer(**{**options, "memory": str(small)}) as ckpt:
            snapshot = ckpt.save(1, state_at(1, 4_000_000))  # training goes on
            with pytest.raises(errors.SaveFailed, match="do not fit into its memory"):
                snapshot.wait()
            with pytest.raises(errors.MemoryTooSmall, match="free space of"):
                ckpt.prepare(state_at(1, 4_000_000))
            assert sum(f.stat().st_size for f in small.rglob("slot-*")) == 0
            ckpt.save(2, state_at(2, 1000)).wait()
            assert same(ckpt.load()[1], state_at(2, 1000))
        comm.Barrier()
    finally:
        if RANK == 0:
            assert os.system(f"umount -l {small}") == 0


def test_a_communicator_of_ones_own(options: dict[str, Any], comm: Any) -> None:
    half = comm.Split(RANK % 2, -RANK)  # two jobs side by side, ranks in reverse order
    with Checkpointer(**{**options, "job": f"half{RANK % 2}"}, comm=half) as ckpt:
        assert ckpt.report()["rank"] == half.rank
        ckpt.save(RANK % 2 + 1, state_at(1)).wait()
        assert ckpt.steps() == [RANK % 2 + 1]
    half.Free()


def test_survives_and_report_say_what_is_there(options: dict[str, Any]) -> None:
    with Checkpointer(**options) as ckpt:
        text = ckpt.survives
        assert text.startswith("any process")
        assert ("no node" in text) == (SIZE == 1)
        report = ckpt.report()
        assert report["node"] == f"node{RANK}"
        assert (report["partners"] == []) == (SIZE == 1)
        assert report["memory"].endswith(f"/t/node{RANK}")
        ckpt.save(1, state_at(1)).wait()
        counts = MPI.COMM_WORLD.allgather(ckpt.report()["counts"])
        assert all(c["saves"] == c["committed"] == 1 for c in counts)


def test_nodes_of_several_ranks_share_one_directory(options: dict[str, Any]) -> None:
    with Checkpointer(**{**options, "ranks_per_node": 2}) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_at(step)).wait()
        report = ckpt.report()
        assert report["memory"].endswith(f"node{RANK // 2}")
        state = state_at(0)
        assert ckpt.restore(state) == 3 and same(state, state_at(3))


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


def test_a_tensor_state_with_modules_and_random_numbers(options: dict[str, Any]) -> None:
    import random

    import torch

    def build() -> dict[str, Any]:
        model = torch.nn.Linear(50, 40)
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "rng": mlflash.rng()}

    def train(state: dict[str, Any]) -> None:
        state["model"](torch.randn(3, 50)).sum().backward()
        state["optimizer"].step()

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    torch.manual_seed(RANK)
    state = build()
    train(state)
    with Checkpointer(**options) as ckpt:
        ckpt.save(1, state).wait()
        expected, numbers = [p.detach().clone() for p in state["model"].parameters()], draw()
        train(state)
        fresh = build()
        assert ckpt.restore(fresh) == 1
        assert all(torch.equal(a, b) for a, b in zip(fresh["model"].parameters(), expected, strict=True))
        assert draw() == numbers
        assert fresh["optimizer"].state_dict()["state"][0]["step"] == 1


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
def test_a_dtensor_is_saved_by_its_local_shard_with_its_place_in_the_whole(options: dict[str, Any], comm: Any) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    store = dist.TCPStore(os.environ["MASTER_ADDR"], 0, None, True) if RANK == 0 else None
    port = comm.bcast(store.port if store else None)
    store = store or dist.TCPStore(os.environ["MASTER_ADDR"], port, None, False)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=SIZE)
    try:
        mesh = init_device_mesh("cpu", (SIZE,))
        whole = torch.arange(7 * 3, dtype=torch.float32).reshape(7, 3)  # 7 rows: uneven shards
        state = {"s": distribute_tensor(whole, mesh, [Shard(0)]), "r": distribute_tensor(whole, mesh, [Replicate()])}
        with Checkpointer(**options) as ckpt:
            ckpt.save(1, state).wait()
            opened = ckpt.adapting.open()
            entries = {entry.name: entry for entry in opened.olds[RANK].entries}
            opened.close()
            rows = -(-7 // SIZE)
            start = min(7, rows * RANK)
            assert entries["s"].global_shape == (7, 3)
            assert entries["s"].shape == (max(0, min(rows, 7 - start)), 3)
            assert entries["s"].shape[0] == 0 or entries["s"].offset == (start, 0)
            assert entries["r"].shape == entries["r"].global_shape == (7, 3)
            live = {"s": distribute_tensor(torch.zeros(7, 3), mesh, [Shard(0)]),
                    "r": distribute_tensor(torch.zeros(7, 3), mesh, [Replicate()])}  # fmt: skip
            assert ckpt.restore(live) == 1
            assert torch.equal(live["s"].full_tensor(), whole) and torch.equal(live["r"].to_local(), whole)
            other = {"s": distribute_tensor(torch.zeros(7, 3), mesh, [Shard(1)]), "r": live["r"]}
            assert ckpt.restore(other) == 1 and torch.equal(other["s"].full_tensor(), whole)
            other = {"s": distribute_tensor(torch.zeros(8, 3), mesh, [Shard(0)]), "r": live["r"]}
            with pytest.raises(errors.StructureMismatch, match="s: tensor float32"):
                ckpt.restore(other)
            partial = torch.distributed.tensor.DTensor.from_local(whole, mesh, [Partial()])
            with pytest.raises(errors.StateError, match="partial placement"):
                ckpt.save(2, {"p": partial})
    finally:
        comm.Barrier()
        dist.destroy_process_group()
