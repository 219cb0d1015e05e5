"""Any tensors on any meshes come back as they were, from memory and from the directory, in the same shards and others.

A description of a state is drawn before anything runs, so that all ranks have the same one. Each number in a tensor
says which tensor it belongs to, on which of the meshes that have its name, and where it is.
"""

from __future__ import annotations

import collections
import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from states import EXAMPLES
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch_jobs import COMM, job

from mlflash import Checkpointer, errors
from mlflash.state.leaves import mesh_name

RANK, SIZE = COMM.rank, COMM.size
SEED = int(os.environ.get("MLFLASH_TEST_SEED") or 1)
WHOLE = ("line", "grid")  # meshes of all ranks
DIMENSIONS = {"line": 1, "grid": 2, "rows": 1, "columns": 1, "pair": 1, "last": 1}


_SPLITS = st.sampled_from([None, 0, 1])
_TENSORS = st.tuples(
    st.sampled_from(sorted(DIMENSIONS)),
    st.lists(st.integers(0, 6), min_size=2, max_size=2).map(tuple),
    st.sampled_from(["float32", "bfloat16", "int64"]),
    st.tuples(_SPLITS, _SPLITS),  # as it is saved
    st.tuples(_SPLITS, _SPLITS),  # as it is restored once
)
_STATES = st.lists(_TENSORS, min_size=1, max_size=6).map(tuple)


def drawn(number: int) -> list[Any]:
    made: list[Any] = []

    @seed(SEED)
    @settings(max_examples=number, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(_STATES)
    def draw(state: Any) -> None:
        made.append(state)

    draw()
    return made


class Meshes:
    """The meshes of a job, of which a name may be on several."""

    def __init__(self, size: int):
        grid = init_device_mesh("cpu", (max(1, size // 2), min(2, size)), mesh_dim_names=("rows", "columns"))
        self._known = {"line": init_device_mesh("cpu", (size,)), "grid": grid, "rows": grid["rows"],
                       "columns": grid["columns"]}  # fmt: skip
        if size == SIZE:
            self._known |= {"pair": DeviceMesh("cpu", [0, 1]), "last": DeviceMesh("cpu", [size - 1])}
        self._groups = {"rows": grid.get_local_rank("columns"), "columns": grid.get_local_rank("rows")}

    def tensor(self, number: int, kind: str, shape: Any, dtype: str, splits: Any, blank: bool) -> Any:
        whole = torch.arange(shape[0] * shape[1]).reshape(shape) + 40 * number + 400 * self._groups.get(kind, 0) + 1
        placements = [Replicate() if dim is None else Shard(dim) for dim in splits[: DIMENSIONS[kind]]]
        whole = (torch.zeros_like(whole) if blank else whole).to(getattr(torch, dtype))
        return distribute_tensor(whole, self._known[kind], placements, src_data_rank=None)


def built(meshes: Meshes, spec: Any, splits: int, blank: bool = False) -> dict[str, Any]:
    """A state, in the shards as which it is saved (3) or in others (4)."""
    tensors = [meshes.tensor(number, *one[:3], one[splits], blank) for number, one in enumerate(spec)]
    inside: Any = collections.OrderedDict((f"{number}.w", tensor) for number, tensor in enumerate(tensors))
    inside._metadata = collections.OrderedDict({} if blank else {"": {"version": 2}})
    return {"model": inside, "seen": collections.Counter({3: 0, "a": 0} if blank else {3: 4, "a": len(spec)})}


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    wrong = [] if found["seen"] == wanted["seen"] else [f"seen: {found['seen']}"]
    wrong += [] if found["model"]._metadata == wanted["model"]._metadata else ["the versions"]
    for name, tensor in wanted["model"].items():
        mine, its = (one.to_local() for one in (found["model"][name], tensor))
        if mine.dtype != its.dtype or not torch.equal(mine, its):
            wrong.append(f"{name} on rank {RANK}: {mine} instead of {its}")
    return wrong


def is_whole(tensor: Any) -> bool:
    """Whether each rank of its mesh held all of it: nobody can say then whether these ranks held the same."""
    kind, _, _, splits, _ = tensor
    return set(splits[: DIMENSIONS[kind]]) == {None}


def one_example(spec: Any, options: dict[str, Any], directory: Path, number: int) -> list[str]:
    """Save a state and restore it in each way; returns what was wrong."""
    wrong: list[str] = []
    of = {**options, "directory": str(directory), "strict": True, "format": ("hdf5", "dcp")[number % 2]}
    open_it = functools.partial(Checkpointer, **{**of, "job": f"t{number}"})
    with job() as comm:
        meshes = Meshes(SIZE)
        with open_it(comm=comm) as ckpt:
            ckpt.save(number + 1, built(meshes, spec, 3)).wait()
            ckpt.drain().wait()
        for where in ("memory", "directory"):
            with Checkpointer(
                comm=comm, **{**of, "job": f"t{number}" if where == "memory" else f"fresh{number}"}
            ) as ckpt:
                for splits in (3, 4):
                    state = built(meshes, spec, splits, blank=True)
                    try:
                        ckpt.restore(state, step=number + 1)
                    except errors.StructureMismatch as refused:
                        name = (refused.tensor or "").removeprefix("model.").removesuffix(".w")
                        if splits == 3 or not name or spec[int(name)][0] in WHOLE or not is_whole(spec[int(name)]):
                            raise
                        continue
                    found = differences(state, built(meshes, spec, splits))
                    wrong += [f"from {where}, shards {splits}: {text}" for text in found]
    if all(one[0] in WHOLE for one in spec):
        with job(2) as comm:
            if comm is not None:
                with open_it(comm=comm) as ckpt:
                    few = Meshes(2)
                    state = built(few, spec, 4, blank=True)
                    ckpt.restore(state, step=number + 1)
                    wrong += [f"on 2 ranks: {text}" for text in differences(state, built(few, spec, 4))]
    return wrong


@pytest.mark.timeout(300 + 3 * EXAMPLES)
def test_any_tensors_on_any_meshes_come_back_as_they_were(options: dict[str, Any], tmp_path: Path) -> None:
    for number, spec in enumerate(drawn(EXAMPLES or 15)):
        wrong: list[str] = []
        try:
            wrong = one_example(spec, options, tmp_path / "d", number)
        except errors.MlflashError as error:
            wrong = [f"{type(error).__name__}: {error}"]
        found = [text for texts in COMM.allgather(wrong) for text in texts]
        assert not found, f"MLFLASH_TEST_SEED={SEED}, example {number}: {spec}\n" + "\n".join(found[:8])


def test_a_mesh_is_named_anew_in_a_job_of_another_size() -> None:
    """As where training goes on with fewer ranks in the same processes: their meshes are equal to earlier ones."""
    kept = []
    with job(2) as comm:
        if comm is not None:
            kept.append(init_device_mesh("cpu", (2,)))
            assert mesh_name(kept[0]) == ""
    with job():
        pair = DeviceMesh("cpu", [0, 1])
        assert mesh_name(pair) == "ranks 0-1" and (not kept or kept[0] == pair)
