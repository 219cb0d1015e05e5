"""What one arrangement of ranks saved, any other one loads: every dtype, every shape, every bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from dcp import Kept, bits, spoil
from mpi4py import MPI
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch_jobs import job

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size

ROWS, COLUMNS, WHOLE = Shard(0), Shard(1), Replicate()


def wholes(seed: int) -> dict[str, torch.Tensor]:
    """Tensors of all kinds; the first ones can be cut along two dimensions."""
    numbers = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=numbers) * 100

    return {
        "f32": some(10, 33), "bf16": some(7, 5).bfloat16(), "few rows": some(3, 9), "one": some(1, 1),
        "f64": some(5, 70).double(), "fp8": some(6, 9).to(torch.float8_e4m3fn),
        "c64": torch.complex(some(9, 5), some(9, 5)),
        "bool": some(11, 3) > 0, "i64": (some(6, 6) * 1000).long(), "empty": some(0, 4), "no columns": some(4, 0),
        "deep": some(5, 3, 2),
    }  # fmt: skip


def state_of(seed: int, mesh: Any, placements: list[Placement]) -> dict[str, Any]:
    """Those as DTensors, and more that all ranks have alike."""
    made = wholes(seed)
    cut = {name: distribute_tensor(whole, mesh, placements, src_data_rank=None) for name, whole in made.items()}
    wide, nan = made["f32"], torch.tensor([float("nan"), -0.0, float("inf")])
    return {"cut": cut, "plain": made, "scalar": wide[0, 0].clone(), "half": wide[0, 1].bfloat16(), "nan": nan * seed,
            "none": torch.empty(0), "turned": wide.clone().t(), "every other": wide.clone()[::2, 1::3],
            "nested": {"list": [wide[0].clone(), {"x": wide[1].clone()}], "number": seed, "text": ("a", seed)},
            }  # fmt: skip


ONE_MESH = [[ROWS], [COLUMNS], [WHOLE]]
TWO_MESH = [[ROWS, COLUMNS], [COLUMNS, ROWS], [ROWS, ROWS], [WHOLE, ROWS], [COLUMNS, WHOLE]]


@pytest.mark.gate
def test_two_dimensional_meshes_load_each_other(dcp_job: Any) -> None:
    flat, square = init_device_mesh("cpu", (SIZE,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    cases = [(flat, placements) for placements in ONE_MESH[:2]] + [(square, placements) for placements in TWO_MESH]
    for step, (mesh, placements) in enumerate(cases, 1):
        dcp_job.save(state_of(step, mesh, placements), step)()
        for other, others in (cases[step % len(cases)], cases[(step + 3) % len(cases)]):
            found = dcp_job.load(state_of(70, other, others), step)
            Kept.of(state_of(step, other, others)).check(found)


@pytest.mark.parametrize(("old", "new"), [pytest.param(4, 2, marks=pytest.mark.gate), (2, 4), (4, 3), (3, 4)])
def test_another_number_of_ranks_loads(started: Callable[..., Any], old: int, new: int) -> None:
    with job(old) as comm:
        if comm is not None:
            with started(comm) as running:
                mesh = init_device_mesh("cpu", (old,))
                running.save(state_of(1, mesh, [ROWS]), 1)()
                running.save(state_of(2, mesh, [COLUMNS]), 2, "thread")()
    with job(new) as comm:
        if comm is not None:
            with started(comm) as running:
                mesh = init_device_mesh("cpu", (new,))
                for placement in (ROWS, COLUMNS, WHOLE):
                    found = running.load(state_of(70, mesh, [placement]))
                    Kept.of(state_of(2, mesh, [placement])).check(found)
                running.save(state_of(3, mesh, [ROWS]), 3)()
                Kept.of(state_of(3, mesh, [COLUMNS])).check(running.load(state_of(70, mesh, [COLUMNS])))


def chunks(*shards: tuple[tuple[int, int], tuple[int, int], int]) -> EnumerableShardingSpec:
    return EnumerableShardingSpec(
        [ShardMetadata(shard_offsets=list(at), shard_sizes=list(size), placement=f"rank:{rank}/cpu")
         for at, size, rank in shards])  # fmt: skip


SPECS = [
    ChunkShardingSpec(dim=0, placements=[f"rank:{rank}/cpu" for rank in range(4)]),
    ChunkShardingSpec(dim=1, placements=[f"rank:{rank}/cpu" for rank in (3, 1, 2, 0)]),
    ChunkShardingSpec(dim=0, placements=[f"rank:{rank}/cpu" for rank in (0, 1, 1, 0, 3)]),
    chunks(((0, 0), (9, 20), 2), ((9, 0), (1, 20), 0)),
    chunks(((0, 0), (5, 7), 3), ((5, 0), (5, 7), 1), ((0, 7), (10, 12), 1), ((0, 19), (10, 1), 2)),
]


@pytest.mark.parametrize("how", ["sync", "thread", "process"])
def test_sharded_tensors_of_any_spec_load_each_other(dcp_job: Any, how: str) -> None:
    def sharded(spec: Any, whole: torch.Tensor) -> Any:
        made = sharded_tensor.zeros(spec, 10, 20, init_rrefs=False)
        for shard in made.local_shards():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.copy_(whole[row : row + rows, column : column + columns])
        return made

    for step, spec in enumerate(SPECS, 1):
        whole = torch.arange(200.0).reshape(10, 20) * step
        state = {"table": sharded(spec, whole), "in": [{"table": sharded(SPECS[0], -whole)}]}
        done = dcp_job.save(state, step, how)
        spoil(state)
        done()
        for other in SPECS:
            found = {"table": sharded(other, torch.zeros_like(whole)), "in": [{"table": sharded(other, whole)}]}
            dcp_job.load(found, step)
            Kept.of({"table": sharded(other, whole), "in": [{"table": sharded(other, -whole)}]}).check(found)


if hasattr(torch.distributed.checkpoint, "CheckpointableTensor"):  # since PyTorch 2.14

    def placed(whole: torch.Tensor, cuts: int, nth: int) -> torch.Tensor:
        """Every so many-th rows of a tensor, in one that says where each of them belongs."""
        rows = [*range(nth, len(whole), cuts)]
        made = torch.cat([whole[row : row + 1] for row in rows] + [torch.zeros(1, whole.shape[1])])
        made.global_shape = tuple(whole.shape)  # type: ignore[attr-defined]
        made.global_offsets = tuple((row, 0) for row in rows)  # type: ignore[attr-defined]
        made.local_offsets = tuple((n, 0) for n in range(len(rows)))  # type: ignore[attr-defined]
        made.local_sizes = ((1, whole.shape[1]),) * len(rows)  # type: ignore[attr-defined]
        return made

    @pytest.mark.parametrize("how", ["sync", "thread", "process"])
    def test_tensors_that_say_where_their_parts_belong_load_each_other(dcp_job: Any, how: str) -> None:
        for step in (1, 2, 3):  # of the same shapes, in other places
            whole = wholes(step)["f32"].float()
            nth = (RANK + step) % SIZE
            dcp_job.save({"w": placed(whole, SIZE, nth), "plain": whole}, step, how)()
            found = {"w": placed(torch.zeros_like(whole), SIZE, RANK), "plain": torch.zeros_like(whole)}
            dcp_job.load(found, step)
            assert torch.equal(found["w"], placed(whole, SIZE, RANK)) and torch.equal(found["plain"], whole)
            mesh = init_device_mesh("cpu", (SIZE,))
            into = distribute_tensor(torch.zeros_like(whole), mesh, [COLUMNS])
            dcp_job.load({"w": into}, step)
            assert torch.equal(into.full_tensor(), whole)


def test_some_names_load_alone_and_missing_ones_are_refused_unless_asked_for(dcp_job: Any) -> None:
    mesh = init_device_mesh("cpu", (SIZE,))
    dcp_job.save(state_of(1, mesh, [ROWS]), 1)()
    kept = {name: bits(whole) for name, whole in wholes(1).items()}
    whole = {"cut": {name: torch.zeros_like(tensor) for name, tensor in list(wholes(70).items())[::2]}}
    dcp_job.load(whole, 1)
    assert {name: bits(tensor) for name, tensor in whole["cut"].items()} == {name: kept[name] for name in whole["cut"]}
    for name in ("cut", "nested"):
        more = {name: {"unknown": torch.ones(3)}, "plain": {"f32": torch.zeros(10, 33)}}
        with pytest.raises(CheckpointException, match=f"Missing key in checkpoint state_dict: {name}.unknown"):
            dcp_job.load(more, 1)
        dcp_job.load(more, 1, DefaultLoadPlanner(allow_partial_load=True))
        assert more[name]["unknown"].tolist() == [1.0] * 3 and bits(more["plain"]["f32"]) == kept["f32"]
    with pytest.raises(CheckpointException, match="Size mismatch"):
        dcp_job.load({"plain": {"f32": torch.zeros(10, 34)}}, 1)
    other = dcp_job.load({"plain": {"f32": torch.zeros(10, 33, dtype=torch.float64)}}, 1)["plain"]["f32"]
    assert torch.equal(other, wholes(1)["f32"].double())
    strided = torch.zeros(33, 20)
    dcp_job.load({"plain": {"f32": strided[:, ::2].t()}}, 1)
    assert torch.equal(strided[:, ::2].t(), wholes(1)["f32"]) and not strided[:, 1::2].any()


def test_what_the_checkpointer_itself_saved_loads(dcp_job: Any) -> None:
    mesh = init_device_mesh("cpu", (SIZE,))
    cut = {name: distribute_tensor(w, mesh, [ROWS], src_data_rank=None) for name, w in wholes(1).items()}
    own = {"array": np.arange(6.0).reshape(2, 3), "dates": np.array(["2026-11-21"], dtype="M8[D]"),
           "of rank": torch.tensor(RANK)}  # fmt: skip
    dcp_job.ckpt.save(1, {**cut, **own, "scalar": torch.tensor(3.5), "lr": 0.1, "name": "run"}).wait()
    for placement in (ROWS, COLUMNS, WHOLE):
        blank = {name: distribute_tensor(torch.zeros_like(w), mesh, [placement], src_data_rank=None)
                 for name, w in wholes(1).items()}  # fmt: skip
        blank |= {"array": torch.zeros(2, 3, dtype=torch.float64), "of rank": torch.tensor(-1)}
        found = dcp_job.load({**blank, "scalar": torch.tensor(0.0), "lr": 0.0, "name": ""}, 1)
        like = {name: distribute_tensor(w, mesh, [placement], src_data_rank=None) for name, w in wholes(1).items()}
        like |= {"array": torch.from_numpy(own["array"]), "of rank": own["of rank"]}
        wanted = {**like, "scalar": torch.tensor(3.5), "lr": 0.1, "name": "run"}
        Kept.of(wanted).check(found)
