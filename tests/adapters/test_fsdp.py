"""Local, sharded and full state of FSDP models: saved by groups of ranks, restored to the bit, refused by name."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import s3
import torch
import torch.distributed as dist
from damage import damage
from fsdp_models import fsdp1, fsdp2, settings
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch_jobs import COMM, job
from waiting import PATIENCE_S

from mlflash import errors
from mlflash.adapters import fsdp

RANK, SIZE = COMM.rank, COMM.size


def saved_local(root: Path, make: Any, replicas: int, shards: int, steps: int = 3) -> list[float]:
    """Train, save the local state at a step under an id for each shard; returns the losses after it."""
    with job(), fsdp.Checkpoints(**settings(root)) as checkpoints:
        run = make(replicas, shards)
        run.train(steps)
        state = fsdp.local_state_dict(run.model, run.optimizer)
        checkpoints.async_save(state, f"run/step-{steps}/tp0_ep0_fsdp{run.shard}", run.replicas)
        losses = run.train(3)  # changes what was staged, if that were not a copy
        checkpoints.maybe_finalize_async_calls(process_group=run.replicas)
        return losses


def loaded_local(root: Path, make: Any, replicas: int, shards: int, steps: int = 3) -> list[float] | None:
    with job(replicas * shards) as comm:
        if comm is None:
            return None
        with fsdp.Checkpoints(**settings(root)) as checkpoints:
            run = make(replicas, shards, seed=1)
            reader = fsdp.DistributedFileSystemReader(f"run/tp0_ep0_fsdp{run.shard}")
            state = fsdp.local_state_dict(run.model, run.optimizer)
            with pytest.raises(errors.StructureMismatch, match="init_optim_state"):
                checkpoints.load(state, process_group=run.replicas, storage_reader=reader)
            fsdp.init_optim_state(run.optimizer)
            state = fsdp.local_state_dict(run.model, run.optimizer)
            assert checkpoints.load(state, process_group=run.replicas, storage_reader=reader) == steps
            fsdp.load_local_state_dict(run.model, run.optimizer, state)
            run.steps = steps
            return run.train(3)


@pytest.mark.parametrize("make", [fsdp2, fsdp1])
@pytest.mark.parametrize("replicas", [pytest.param(2, marks=pytest.mark.gate), 1])
def test_local_state_goes_back_to_any_number_of_replicas(root: Path, make: Any, replicas: int) -> None:
    expected = saved_local(root, make, 2, 2)
    found = loaded_local(root, make, replicas, 2)
    assert found is None or found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("make", [fsdp2, fsdp1])
def test_what_optimizers_hold_is_copied_until_they_step_and_is_what_it_was_at_the_save(
    root: Path, make: Any, came: list[None]
) -> None:
    make = functools.partial(make, width=8001)  # small tensors are copied at once
    with job(), fsdp.Checkpoints(**settings(root)) as checkpoints:
        run = make(1, SIZE)
        run.train(1)
        for step in range(1, 6):
            state, name = fsdp.local_state_dict(run.model, run.optimizer), f"run/step-{step}/tp0_ep0_fsdp{run.shard}"
            checkpoints.async_save(state, name, run.replicas, until=[run.optimizer])
            losses = run.train(1)  # as early as it may
            checkpoints.maybe_finalize_async_calls(process_group=run.replicas)
        expected = [*losses, *run.train(2)]
    assert loaded_local(root, make, 1, SIZE, steps=5) == expected
    assert COMM.allreduce(len(came)) >= 2, "steps did not have to wait"


def test_the_step_before_is_loaded_where_the_newest_is_damaged_beyond_repair(root: Path) -> None:
    with job(), fsdp.Checkpoints(**settings(root)) as checkpoints:
        for step in (3, 4):
            state = {"w": torch.full((100,), float(step)), "step": step}
            checkpoints.async_save(state, f"run/step-{step}/rank{RANK}").result(PATIENCE_S)
            checkpoints.maybe_finalize_async_calls()
    if RANK == 0:
        assert damage(root, 4)
    COMM.Barrier()
    with job(), fsdp.Checkpoints(**settings(root)) as checkpoints:
        state = {"w": torch.zeros(100), "step": 0}
        assert checkpoints.load(state, f"run/rank{RANK}") == 3
        assert state["step"] == 3 and (state["w"] == 3).all()


def test_another_number_of_shards_is_refused_and_both_are_named(root: Path) -> None:
    saved_local(root, fsdp2, 2, 2)
    with job(), fsdp.Checkpoints(**settings(root)) as checkpoints:
        run = fsdp2(1, 4, seed=1)
        fsdp.init_optim_state(run.optimizer)
        before = [param.to_local().clone() for param in run.model.parameters()]
        state = fsdp.local_state_dict(run.model, run.optimizer)
        group = dist.new_group([rank for rank in range(4) if rank % 2 == RANK % 2], use_local_synchronization=True)
        with pytest.raises(errors.StructureMismatch, match=r"expected: sharded over 2(.|\n)*found: .*sharded over 4"):
            checkpoints.load(state, f"run/tp0_ep0_fsdp{RANK % 2}", group)
        assert all(torch.equal(p.to_local(), old) for p, old in zip(run.model.parameters(), before, strict=True))


@pytest.mark.parametrize("make", [fsdp2, fsdp1])
def test_a_local_state_dict_sends_nothing(make: Any) -> None:
    with job():
        run = make(2, 2)
        run.train(1)
        with CommDebugMode() as counted:
            state = fsdp.local_state_dict(run.model, run.optimizer)
            fsdp.load_local_state_dict(run.model, run.optimizer, state)
        assert counted.get_total_counts() == 0
        with CommDebugMode() as counted:
            run.train(1)
        assert counted.get_total_counts() > 0, "the counter counts nothing"
        assert set(state) == {"model", "optimizer", "sharded over 2"} and "calls" in state["model"]
        assert "scratch" not in state["model"]


@pytest.mark.parametrize("make", [fsdp2, fsdp1])
def test_sharded_state_goes_to_another_number_of_ranks(root: Path, make: Any) -> None:
    with job(), fsdp.Checkpoints(**settings(root)) as checkpoints:
        run = make(1, 4)
        run.train(3)
        checkpoints.async_save(fsdp.sharded_state_dict(run.model, run.optimizer), "run/step-3/sharded")
        checkpoints.maybe_finalize_async_calls()
        full = copy.deepcopy(fsdp.full_state_dict(run.model, run.optimizer))  # on the CPU buffers are the live ones
        expected = run.train(3)
    with job(2) as comm:
        if comm is not None:
            with fsdp.Checkpoints(**settings(root)) as checkpoints:
                run = make(1, 2, seed=1)
                state = fsdp.sharded_state_dict(run.model, run.optimizer)
                assert checkpoints.load(state, "run/sharded") == 3
                fsdp.load_sharded_state_dict(run.model, run.optimizer, state)
                found = fsdp.full_state_dict(run.model, run.optimizer)
                assert bool(found["model"]) == (RANK == 0)
                for name, tensor in found["model"].items():
                    assert torch.equal(tensor, full["model"][name]), name
                for name, values in found.get("optimizer", {}).get("state", {}).items():
                    for key, value in values.items():
                        assert torch.equal(value, full["optimizer"]["state"][name][key]), (name, key)
                run.steps = 3
                assert run.train(3) == pytest.approx(expected, rel=1e-5)


@pytest.mark.gate
def test_groups_save_under_their_ids_at_once_and_nothing_is_mixed(root: Path) -> None:
    ranks = [0, 1] if RANK < 2 else [2, 3]
    for attempt in (1, 2):
        with job(), fsdp.Checkpoints(**settings(root)) as checkpoints:
            group = dist.new_group(ranks, use_local_synchronization=True)
            mine = f"tp{RANK // 2}_ep0_fsdp1"
            if attempt == 1:
                for step in range(3):  # an id without a step gets the next one
                    value = torch.full((5,), 10.0 * step + RANK // 2)
                    future = checkpoints.async_save({"w": value, "step": step}, mine, group,
                                                    coordinator_rank=max(ranks))  # fmt: skip
                    value.zero_()
                    assert future.result(30) is not None
                checkpoints.maybe_finalize_async_calls(process_group=group)
            state = {"w": torch.zeros(5), "step": -1}
            assert checkpoints.load(state, mine, group) == 2
            assert state["w"].tolist() == [20.0 + RANK // 2] * 5 and state["step"] == 2
            assert checkpoints.load(dict(state), f"elsewhere/{mine}", group) is None
            with pytest.raises(errors.StepNotFound):
                checkpoints.load(state, f"step-7/{mine}", group)
            with pytest.raises(errors.WorldMismatch, match="coordinator"):
                checkpoints.async_save(state, mine, group, coordinator_rank=(ranks[0] + 2) % 4)


def test_groups_of_which_some_have_committed_a_step_more_go_back_to_the_one_that_all_have(root: Path) -> None:
    """As after a crash between the commits of two groups: parts of different steps are never put together."""
    ranks, part = ([0, 1], "tp0_ep0") if RANK < 2 else ([2, 3], "tp1_ep0")

    def save(checkpoints: fsdp.Checkpoints, group: Any, value: float) -> None:
        checkpoints.async_save({"w": torch.full((5,), value)}, part, group)
        checkpoints.maybe_finalize_async_calls(process_group=group)

    def load(checkpoints: fsdp.Checkpoints, group: Any) -> tuple[int | None, float]:
        state = {"w": torch.zeros(5)}
        return checkpoints.load(state, part, group), state["w"][0].item()

    with job(), fsdp.Checkpoints(**settings(root)) as checkpoints:
        group = dist.new_group(ranks, use_local_synchronization=True)
        assert load(checkpoints, group) == (None, 0.0)
        save(checkpoints, group, 10.0)
        if RANK < 2:
            save(checkpoints, group, 11.0)
    with job(), fsdp.Checkpoints(**settings(root)) as checkpoints:
        group = dist.new_group(ranks, use_local_synchronization=True)
        assert load(checkpoints, group) == (0, 10.0)
        save(checkpoints, group, 12.0)
        assert load(checkpoints, group) == (1, 12.0)
        state, checkpoint_id = {"w": torch.zeros(5)}, "step-7/alone" if RANK < 2 else part
        if RANK < 2:
            checkpoints.async_save(state, checkpoint_id, group).result(PATIENCE_S)
        with pytest.raises(errors.Unrestorable, match=r"no step in common(.|\n)*alone: 7; tp1_ep0: 0, 1"):
            checkpoints.load(state, checkpoint_id.removeprefix("step-7/"), group)
        with pytest.raises(errors.StepNotFound, match=r"this step was not saved|another process group"):
            checkpoints.load(state, checkpoint_id if RANK < 2 else f"step-3/{part}", group)
        assert checkpoints.load(state, checkpoint_id, group) == (7 if RANK < 2 else 1)


def test_what_has_other_ids_is_drained_to_other_folders(root: Path) -> None:
    """All of it has the same steps."""
    part, ranks = (f"run/tp{RANK // 2}_ep0", [0, 1] if RANK < 2 else [2, 3])
    drains = settings(root, directory=root / "pfs", drain_every=1)

    def load(directory: Path, **more: Any) -> tuple[int | None, list[float]]:
        with job(), fsdp.Checkpoints(**(drains | {"directory": directory, "job": "new"} | more)) as checkpoints:
            state = {"w": torch.zeros(3)}
            group = dist.new_group(ranks, use_local_synchronization=True)
            return checkpoints.load(state, part, group), state["w"].tolist()

    with job(), fsdp.Checkpoints(**drains) as checkpoints:
        group = dist.new_group(ranks, use_local_synchronization=True)
        checkpoints.async_save({"w": torch.full((3,), 1.0 + RANK // 2)}, part, group)
        checkpoints.maybe_finalize_async_calls(process_group=group)
    COMM.Barrier()  # the other group has drained its part, too
    assert load(root / "pfs") == (0, [1.0 + RANK // 2] * 3)


@pytest.mark.gate
def test_a_node_of_each_set_of_replicas_may_be_lost(root: Path) -> None:
    expected = saved_local(root, fsdp2, 2, 2)
    COMM.Barrier()
    if RANK == 0:
        lost = sorted(root.glob(f"node[23]/mlflash-{os.getuid()}/smp.*"))
        assert len(lost) == 2, "one job of each shard"
        for path in lost:
            for file in path.iterdir():
                file.unlink()
    COMM.Barrier()
    assert loaded_local(root, fsdp2, 2, 2) == expected


def test_empty_shards_may_be_left_without_optimizer_state() -> None:
    with job():
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)  # two rows on four ranks
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
        for skip in (True, False):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            before = [param.to_local().clone() for param in model.parameters()]
            fsdp.init_optim_state(optimizer, skip_empty_param=skip)
            assert len(optimizer.state) == (2 if RANK < 2 or not skip else 0)
            assert all(torch.equal(p.to_local(), old) for p, old in zip(model.parameters(), before, strict=True))
            assert optimizer.param_groups[0]["lr"] == 0.1 and all(p.grad is None for p in model.parameters())
            state = {param: dict(values) for param, values in optimizer.state.items()}
            fsdp.init_optim_state(optimizer)  # has its state: nothing happens
            assert all(optimizer.state[param]["step"] is values["step"] for param, values in state.items())


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(s3.served()).address if RANK == 0 else None
        stack.enter_context(s3.used(COMM.bcast(address), AWS_MAX_ATTEMPTS="2"))
        if RANK == 0:
            fsspec.filesystem("s3").mkdir("checkpoints")
        COMM.Barrier()
        yield "s3://checkpoints/run"


def test_an_s3_url_is_written_and_read_there(root: Path, bucket: str) -> None:
    with job(), fsdp.Checkpoints(**settings(root)) as checkpoints:
        run = fsdp2(1, 4)
        run.train(2)
        for _ in range(2):  # the second replaces the first
            checkpoints.async_save(fsdp.sharded_state_dict(run.model, run.optimizer), f"{bucket}/step-2")
            expected = run.train(1)
            checkpoints.maybe_finalize_async_calls()
        other = fsdp2(1, 4, seed=1)
        state = fsdp.sharded_state_dict(other.model, other.optimizer)
        assert checkpoints.load(state, f"{bucket}/step-2") == 0
        fsdp.load_sharded_state_dict(other.model, other.optimizer, state)
        other.steps = run.steps - 1
        assert other.train(1) == expected
        assert not list(root.rglob("slot-*")), "what goes to S3 does not go to memory"
        with pytest.raises(errors.StructureMismatch, match=r"step-3|No such|not found|NoSuch"):
            checkpoints.load(state, f"{bucket}/step-3")


def test_where_it_is_off_urls_go_on_and_memory_has_nothing(options: dict[str, Any], root: Path, enabled: bool) -> None:
    with job(), fsdp.Checkpoints(enabled=enabled, **options) as checkpoints:
        assert not checkpoints.enabled
        pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        mine = pairs[dist.get_rank() // 2]
        state = {"weights": torch.full((7,), 1.0 + dist.get_rank() // 2)}
        metadata = checkpoints.async_save(state, "run/step-1/half", mine).result(0)
        assert metadata.state_dict_metadata == {}
        checkpoints.maybe_finalize_async_calls(process_group=mine)
        checkpoints.maybe_finalize_async_calls(blocking=False)
        assert checkpoints.load(state, "run/half", mine) is None
        assert not list(root.glob("node*/*"))
        COMM.Barrier()
        url = f"file://{root}/half{dist.get_rank() // 2}"
        checkpoints.async_save(state, url, mine)
        checkpoints.maybe_finalize_async_calls(process_group=mine)
        COMM.Barrier()
        found = {"weights": torch.zeros(7)}
        assert checkpoints.load(found, url, mine) == 0 and torch.equal(found["weights"], state["weights"])
        names = [thread.name for thread in threading.enumerate() if "mlflash-answers" in thread.name]
        assert not names and not list(root.glob("node*/*"))
        COMM.Barrier()
