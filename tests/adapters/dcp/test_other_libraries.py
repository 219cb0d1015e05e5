"""DCP's Hugging Face storage and torch_checkpointing, on all ranks, beside saves to memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from cuda_on_cpu import OnCpu
from mpi4py import MPI
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from waiting import PATIENCE_S

from mlflash.errors import StructureMismatch
from mlflash.exports.imports import read_dcp

from .conftest import Dcp

COMM = MPI.COMM_WORLD
pytestmark = [pytest.mark.mpi(min_size=4)]

WHOLE = {
    "rows": torch.arange(200.0).reshape(10, 20),
    "columns": torch.arange(60.0).double().reshape(3, 20),
    "alike": torch.ones(5, 2).bfloat16(),
}
CUTS = (Shard(0), Shard(1), Replicate())


def cut(by: int, *cuts: Any) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (COMM.size,))
    return {"model": {name: distribute_tensor(tensor * by, mesh, [how], src_data_rank=None)
                      for (name, tensor), how in zip(WHOLE.items(), cuts, strict=True)}}  # fmt: skip


def check(state: dict[str, Any]) -> None:
    for name, tensor in WHOLE.items():
        found = state["model"][name].full_tensor()
        assert found.dtype == tensor.dtype and torch.equal(found, tensor), name


def shared(path: Path) -> Path:
    return Path(COMM.bcast(str(path)))


def test_files_of_hugging_face_are_written_beside_saves_to_memory(dcp_job: Dcp, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    out, state = shared(tmp_path) / "hf", cut(1, *CUTS)
    writer = torch_dcp.HuggingFaceStorageWriter(str(out), save_distributed=True, enable_consolidation=True)
    theirs = torch_dcp.async_save(state, storage_writer=writer, process_group=dist.new_group(backend="gloo"))
    in_memory = dcp_job.save(state, "step-3", "thread")
    theirs.result(PATIENCE_S)
    in_memory()
    found = read_dcp(out)
    assert found.keys() == {f"model.{name}" for name in WHOLE}
    assert all(torch.equal(found[f"model.{name}"], tensor) for name, tensor in WHOLE.items())
    others = cut(0, Shard(1), Shard(0), Shard(0))
    check(dcp_job.load(others, "step-3"))
    others = cut(0, Shard(1), Shard(0), Shard(0))
    torch_dcp.load(others, storage_reader=torch_dcp.HuggingFaceStorageReader(str(out)))
    check(others)
    COMM.Barrier()
    with pytest.raises(StructureMismatch, match="enable_consolidation=True"):
        read_dcp(out / "sharded")


def test_a_lost_part_of_a_rank_is_not_noticed_by_dcp_and_refused_by_us(dcp_job: Dcp, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    out = shared(tmp_path) / "hf"
    writer = torch_dcp.HuggingFaceStorageWriter(str(out), save_distributed=True)
    torch_dcp.save(cut(1, *CUTS), storage_writer=writer)
    if COMM.rank == 0:
        (out / "shard-00001-model-00001-of-00001.safetensors").unlink()
    COMM.Barrier()
    state = {"model": {"rows": torch.full((10, 20), -1.0)}}
    torch_dcp.load(state, storage_reader=torch_dcp.HuggingFaceStorageReader(str(out)))
    assert (state["model"]["rows"][:3] == -1).all(), "docs/dcp.md says that DCP does not notice"
    with pytest.raises(StructureMismatch, match="nothing says how many ranks there were"):
        read_dcp(out)


def test_parts_that_ranks_wrote_over_each_other_are_refused(dcp_job: Dcp, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    out = shared(tmp_path) / "hf"
    torch_dcp.save(cut(1, *CUTS), storage_writer=torch_dcp.HuggingFaceStorageWriter(str(out)))
    COMM.Barrier()
    texts = "only a part of this tensor|no file has|more bytes than|cannot be read"  # by who came last
    with pytest.raises(StructureMismatch, match=texts):
        read_dcp(out)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_torch_checkpointing_writes_beside_saves_to_memory_and_fills_other_shards(dcp_job: Dcp, tmp_path: Path) -> None:
    library = pytest.importorskip("torch_checkpointing")
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    place = str(shared(tmp_path) / "step-1")
    theirs = library.CheckpointManager(
        library.CheckpointManager.Config(
            items={"model": library.ItemSpec(resharder=DefaultResharder())}, save=library.SyncCheckpointSaverConfig(),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )
    )  # fmt: skip
    in_memory = dcp_job.save(cut(2, *CUTS), "step-1", "thread")
    with OnCpu():  # it exchanges what says how tensors are cut on CUDA devices only
        theirs.save(place, {**cut(1, *CUTS), "step": 1})
    in_memory()
    state = cut(0, Shard(1), Shard(0), Shard(0))
    assert theirs.load(place, into={**state, "step": 0}, strict=True)["step"] == 1
    theirs.close()
    check(state)
    dcp_job.save(state, "step-2")()
    check(dcp_job.load(cut(0, *CUTS), "step-2"))
