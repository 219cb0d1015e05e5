"""The manager of local checkpoints behaves as NVRx's, and where that fails, as it should."""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import Nodes, on_node
from tensor_aware import Aware, Hole, Quantized
from torch_jobs import COMM, job

from mlflash.adapters.megatron import CheckpointingException, LocalCheckpoints, allow
from mlflash.adapters.megatron.request import wait_for
from mlflash.errors import Unrestorable

RANK, SIZE = COMM.rank, COMM.size
allow(Aware, Hole, Quantized)


def state_of(seed: int, rank: int = RANK) -> dict[str, Any]:
    numbers = torch.Generator().manual_seed(100 * seed + rank)
    weights = [torch.randn(50, 7, generator=numbers), torch.randn(300, generator=numbers).bfloat16()]
    scale = torch.full((3,), float("nan"))
    return {"model": {"weights": weights, "mxfp8": Quantized(torch.arange(12, dtype=torch.uint8) + seed, scale[:1])},
            "common": {"args": argparse.Namespace(lr=seed / 7), "iteration": seed}}  # fmt: skip


def check(loaded: Any, seed: int, rank: int = RANK) -> None:
    assert type(loaded) is Aware and not loaded.is_hollow and loaded.moved == 1
    mine, theirs = state_of(seed, rank), loaded.state
    assert theirs["common"] == mine["common"]
    for one, other in zip(theirs["model"]["weights"], mine["model"]["weights"], strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    one, other = theirs["model"]["mxfp8"], mine["model"]["mxfp8"]
    assert type(one) is Quantized and torch.equal(one._raw, other._raw)
    assert torch.equal(one._scale.view(torch.uint8), other._scale.view(torch.uint8))


def save(manager: LocalCheckpoints, *iterations: int) -> None:
    for iteration in iterations:
        manager.save(Aware(state_of(iteration)), iteration)


def goes_on(manager: LocalCheckpoints, iteration: int) -> None:
    """Assert that this iteration is the newest and comes back."""
    assert manager.find_latest() == iteration
    check(manager.load()[0], iteration)


@pytest.mark.parametrize("is_async", [False, True])
def test_what_was_saved_is_loaded_again_and_again_also_by_a_relaunch(start: Any, is_async: bool) -> None:
    with job(), start() as manager:
        assert manager.find_latest() == -1
        with pytest.raises(CheckpointingException, match="'find_latest' method must be called"):
            manager.load()
        for iteration in (3, 5):
            state = Aware(state_of(iteration))
            request = manager.save(state, iteration, is_async)
            for tensor in state.state["model"]["weights"]:  # still the caller's own
                tensor.zero_()
            if is_async:
                assert pickle.loads(pickle.dumps(request._replace(finalize_fns=[]))).async_fn is wait_for
                request.execute_sync()
            assert manager.latest_iteration == -1 and manager.find_latest() == iteration == manager.latest_iteration
        for _ in range(2):
            loaded, ckpt_id = manager.load()
            assert ckpt_id == (5, RANK, "s")
            check(loaded, 5)
        with pytest.raises(AssertionError, match="newer checkpoint is already available"):
            manager.save(Aware(state_of(4)), 4)
        with pytest.raises(CheckpointingException, match="Invalid iteration"):
            manager.save(Aware(state_of(4)), -1)
    with job(), start() as manager:
        goes_on(manager, 5)
        save(manager, 6)
        assert manager.find_latest() == 6


@pytest.mark.parametrize(("on_disk", "said"), [("", "the newest on disk is none"), ("4", "the newest on disk is 4"),
                                               ("5", "")])  # fmt: skip
def test_at_the_end_a_line_says_what_is_in_memory_only(
    start: Any, root: Path, caplog: pytest.LogCaptureFixture, on_disk: str, said: str
) -> None:
    """Megatron-Bridge#5922: a local checkpoint counts as the one that is saved at the exit."""
    if RANK == 0 and on_disk:
        (root / "save").mkdir()
        (root / "save" / "latest_checkpointed_iteration.txt").write_text(on_disk)
    with job(), start() as manager:
        manager.persistent_save = root / "save"
        save(manager, 3, 5)
    lines = [one.getMessage() for one in caplog.records if "in memory only" in one.getMessage()]
    assert len(lines) == (1 if said and RANK == 0 else 0)
    assert all("iteration 5 is in memory only" in line and said in line for line in lines)


@pytest.mark.parametrize("strategy", ["copy", "xor:3", argparse.Namespace(replication_factor=2)])
def test_a_lost_node_is_made_up_for_and_its_redundancy_made_whole(start: Any, nodes: Nodes, strategy: Any) -> None:
    per_node = on_node(nodes.root, 1 if strategy == "xor:3" else 2)
    with job(), start(strategy, **per_node) as manager:
        save(manager, 3)
    for lost in (0, 1):  # the second loss is survived only because the first load has reprotected
        nodes.lose(lost)
        with job(), start(strategy, **per_node) as manager:
            goes_on(manager, 3)


def test_without_replication_a_lost_node_is_a_lost_checkpoint(start: Any, nodes: Nodes) -> None:
    with job(), start(None) as manager:
        save(manager, 3)
    with job(), start(None) as manager:
        assert manager.find_latest() == 3
    nodes.lose(1)
    lost = pytest.raises(Unrestorable, match=r"step 3: no slot and no copy of ranks 2-3 of 4")
    with job(), start(None) as manager, lost:
        manager.find_latest()
    with job(), start(None, fresh=True) as manager:
        assert manager.find_latest() == -1
        save(manager, 4)
        assert manager.find_latest() == 4


def test_where_training_can_go_on_from_something_else_a_lost_checkpoint_is_a_warning(
    start: Any, nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    with job(), start(None) as manager:
        save(manager, 3)
    nodes.lose(1)
    with job(), start(None, instead="/lustre/run/iter_0000001") as manager:
        assert manager.find_latest() == -1
    assert COMM.rank or "continuing from /lustre/run/iter_0000001, because" in caplog.text


class Whole(Aware):
    """One that only pickles, as some of NVRx's users have them."""

    def pop_tensors(self) -> Any:
        raise NotImplementedError

    insert_tensors = pop_tensors

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        self.moved += 1


@pytest.mark.parametrize("is_async", [False, True])
def test_a_state_dict_that_only_pickles_is_saved_with_its_tensors(start: Any, is_async: bool) -> None:
    allow(Whole)
    with job(), start() as manager:
        state = Whole(state_of(3))
        request = manager.save(state, 3, is_async)
        for tensor in state.state["model"]["weights"]:
            tensor.zero_()
        if is_async:
            request.execute_sync()
    with job(), start() as manager:
        assert manager.find_latest() == 3
        loaded, _ = manager.load()
        assert type(loaded) is Whole
        loaded.__class__ = Aware
        check(loaded, 3)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_manager_that_is_made_anew_takes_over_and_the_one_before_may_come_back(
    options: dict[str, Any], is_async: bool
) -> None:
    first, second = (LocalCheckpoints("/local", "s", "copy", **options) for _ in range(2))
    with job():
        request = first.save(Aware(state_of(3)), 3, is_async)
        goes_on(second, 3)
        if is_async:
            request.execute_sync()
        save(second, 5)
        goes_on(first, 5)
        second.close()
        first.close()
    with job():
        assert first.checkpointer.steps() == [3, 5]
        first.close()


class Broken(Aware):
    def __init__(self, state: dict[str, Any]):
        super().__init__(state)
        self.file = open("/dev/null")  # noqa: SIM115


@pytest.mark.parametrize("is_async", [False, True])
def test_a_save_that_fails_on_one_rank_fails_on_all_and_the_older_one_stays(start: Any, is_async: bool) -> None:
    with job(), start() as manager:
        save(manager, 3)
        state = Broken(state_of(4)) if RANK == 1 else Aware(state_of(4))
        with pytest.raises(CheckpointingException, match="Failure during saving local checkpoint from iteration 4"):
            request = manager.save(state, 4, is_async)
            request.execute_sync()
        assert not state.is_hollow
        goes_on(manager, 3)
        if RANK == 1:
            state.file.close()
        save(manager, 4)  # once more
        goes_on(manager, 4)


def test_the_older_one_is_found_where_the_newer_is_damaged_beyond_repair(start: Any, nodes: Nodes) -> None:
    with job(), start() as manager:
        save(manager, 3, 5)

    def damage() -> None:
        for path, header in nodes.files(0) + nodes.files(1):
            if header.step == 5 and header.rank == 1:
                raw = bytearray(path.read_bytes())
                raw[header.extents.payload_start + 1000] ^= 1
                path.write_bytes(raw)

    nodes.on_rank_0(damage)
    with job(), start() as manager:
        goes_on(manager, 3)
        save(manager, 5)
        goes_on(manager, 5)


def test_an_iteration_that_one_rank_lacks_is_passed_over_and_can_be_saved_again(start: Any, nodes: Nodes) -> None:
    with job(), start(None) as manager:
        save(manager, 3, 5)

    def unseal() -> None:
        for path, header in nodes.files(0):
            if header.step == 5 and header.rank == 1:  # as a save leaves it that was killed
                with path.open("r+b") as file:
                    file.write(bytes(8))

    nodes.on_rank_0(unseal)
    with job(), start(None) as manager:
        goes_on(manager, 3)
        save(manager, 5)
        assert manager.find_latest() == 5


def test_an_older_iteration_of_a_new_manager_does_not_win(start: Any) -> None:
    with job(), start() as manager:
        save(manager, 3, 5)
    with job(), start() as manager:  # which has not asked for the newest
        save(manager, 4)
        goes_on(manager, 5)


def test_what_was_drained_is_loaded_where_memory_has_nothing_newer(start: Any, nodes: Nodes, root: Path) -> None:
    with job(), start(directory=root / "pfs", drain_every=1) as manager:
        save(manager, 3, 5)
    nodes.lose(0, 1)
    with job(), start(directory=root / "pfs") as manager:
        goes_on(manager, 5)
        save(manager, 7)
        goes_on(manager, 7)
    with job(2) as comm:
        if comm is not None:
            with start(directory=root / "pfs", comm=comm, **on_node(nodes.root)) as manager:
                assert manager.find_latest() == -1, "saved by other ranks"


def test_another_session_is_another_training(start: Any, options: dict[str, Any]) -> None:
    names = {**options, "job": None}
    managers = [LocalCheckpoints("/local", session, "none", **names) for session in ("a", "b")]
    with job():
        for iteration, manager in enumerate(managers, 1):
            save(manager, iteration)
        assert [manager.find_latest() for manager in managers] == [1, 2]
        for manager in managers:
            manager.close()
    assert [str(manager.local_ckpt_dir) for manager in managers] == ["/local/a/0", "/local/b/0"]
