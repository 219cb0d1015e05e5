"""Silent divergence between ranks that should hold the same tensors."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlflash


@pytest.fixture
def options(options: dict[str, Any]) -> dict[str, Any]:
    """Ranks that only compare: what they may store together is for test_sharing."""
    return options | {"share": False}


def state_of(seed: int = 0) -> dict[str, Any]:
    """A state that is the same on every rank: small and large tensors, some not a multiple of a block."""
    random = np.random.default_rng(seed)
    model = {f"layer{i}.weight": random.standard_normal(size) for i, size in enumerate((7, 100_000, 8_192, 3))}
    return {"model": model, "rng": mlflash.rng(), "step": seed}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "though it should be" in r.getMessage()]


@pytest.mark.mpi(min_size=2)
def test_a_step_at_which_replicas_differ_is_not_certified(comm: Any, options: dict[str, Any]) -> None:
    with mlflash.Checkpointer(**options, replicated=comm, certify_after=1) as ckpt:
        for step in (1, 2, 3):
            state = state_of(step)
            if comm.rank == comm.size - 1 and step == 2:
                state["model"]["layer1.weight"].view(np.uint8)[0] ^= 1  # which no look at values can see
            ckpt.save(step, state).wait()
    with mlflash.Checkpointer(**options, replicated=comm) as ckpt:
        assert ckpt.load(certified=True)[0] == 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["layer0.weight", "layer1.weight", "layer3.weight"])
def test_one_bit_on_one_rank_is_named_once(
    comm: Any, options: dict[str, Any], caplog: pytest.LogCaptureFixture, name: str
) -> None:
    odd = comm.size - 1
    with mlflash.Checkpointer(**options, replicated=comm, strict=True) as ckpt:
        for step in (1, 2, 3):
            state = state_of(step)
            if comm.rank == odd and step > 1:
                state["model"][name].view(np.uint8)[-1] ^= 1
            ckpt.save(step, state).wait()
            ckpt.steps()  # the courier compares after the commit
            said = warnings(caplog)
            if comm.rank == 0 and step > 1:
                assert len(said) == 1 and f"model.{name} (" in said[0] and "step 2 is not the same" in said[0]
                others = f"0-{odd - 1}" if odd > 1 else "0"
                where = f" on node{odd}" if comm.size > 2 else ""  # of two nobody knows who is wrong
                assert f"rank {odd}{where} differs from {others}" in said[0]
            else:
                assert said == []
        assert ckpt.report()["counts"]["tensors diverged"] == 1


@pytest.mark.mpi(min_size=2)
def test_other_tensors_of_a_rank_and_other_shards_are_not_compared(
    comm: Any, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with mlflash.Checkpointer(**options, replicated=list(range(comm.size)), strict=True) as ckpt:
        for step in (1, 2):
            state = state_of(step) | {f"of rank {comm.rank}": np.full(10, comm.rank)}
            state["shard"] = np.arange(10 + comm.rank)
            ckpt.save(step, state).wait()
        ckpt.steps()
        assert warnings(caplog) == []
        state = state_of(3)
        state["model"]["layer2.weight"] += comm.rank
        ckpt.save(3, state).wait()
    assert len(warnings(caplog)) == int(comm.rank == 0)


@pytest.mark.mpi(min_size=4)
def test_two_groups_that_differ_from_each_other(
    comm: Any, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    mine = comm.Split(comm.rank % 2)
    with mlflash.Checkpointer(**options, replicated=mine.Get_group(), strict=True) as ckpt:
        ckpt.save(1, state_of(comm.rank % 2)).wait()
        ckpt.steps()
        assert warnings(caplog) == []
        state = state_of(comm.rank % 2)
        state["model"]["layer0.weight"][0] += comm.rank == 3
        ckpt.save(2, state).wait()
    assert len(warnings(caplog)) == int(comm.rank == 1)
    mine.Free()


@pytest.mark.mpi(min_size=2)
def test_a_process_group_of_torch_names_the_ranks(
    comm: Any, root: Path, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(str(root / "store"), comm.size), rank=comm.rank,
                            world_size=comm.size)  # fmt: skip
    try:
        with mlflash.Checkpointer(**options, replicated=dist.group.WORLD, strict=True) as ckpt:
            ckpt.save(1, {"w": np.arange(5) + (comm.rank == 1)}).wait()
            ckpt.steps()
    finally:
        dist.destroy_process_group()
    assert len(warnings(caplog)) == int(comm.rank == 0)


def test_nonsense_is_refused_on_all_ranks(comm: Any, options: dict[str, Any]) -> None:
    for replicated in ([comm.size], "dp", [] if comm.rank == 0 else True):
        if comm.size == 1 and replicated == []:
            continue
        with pytest.raises(mlflash.errors.ConfigError, match="replicated="):
            mlflash.Checkpointer(**options, replicated=replicated)


@pytest.fixture(autouse=True)
def warn_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "mlflash")
