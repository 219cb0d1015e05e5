"""ML Flashpoint, through its core and its PyTorch adapter, in the order in which its Megatron adapter calls them.

It plans, stages and begins to write while training waits. A thread writes, because ML Flashpoint's own process would
copy the tensors once more. Then it replicates, writes metadata and finalizes. ML Flashpoint drops the futures of the
replicas and calls the checkpoint complete. Here a checkpoint counts as whole when the replicas have been acknowledged.
As in its NeMo adapter, buffers come from a pool and plans are cached.

Both nodes write to the same paths. So each rank needs its own tmpfs there, as a mount that only this rank sees. Run it
as root. This builds it, with the Abseil of grpcio instead of the one that its build would fetch:

    pip download --no-deps --no-binary :all: ml-flashpoint==0.0.10 grpcio==1.80.0
    tar xf ml_flashpoint-0.0.10.tar.gz && tar xf grpcio-1.80.0.tar.gz
    absl=$PWD/grpcio-1.80.0/third_party/abseil-cpp && cp benchmarks/peers/abseil.cmake $absl/CMakeLists.txt
    pip install --target pybind --no-deps pybind11==2.13.6
    cmake -G Ninja -S ml_flashpoint-0.0.10 -B build -DCMAKE_BUILD_TYPE=Release -DBUILD_TESTING=OFF \
        -DFETCHCONTENT_SOURCE_DIR_ABSEIL-CPP=$absl -Dpybind11_DIR=$PWD/pybind/pybind11/share/cmake/pybind11
    ninja -C build buffer_object_ext transfer_service_ext
    export PYTHONPATH=$PWD/ml_flashpoint-0.0.10/src
"""

from __future__ import annotations

import concurrent.futures
import copy
import ctypes
import dataclasses
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from interface import Peer, Place, State
from ml_flashpoint.adapter.pytorch import custom_state_dict_saver as saving
from ml_flashpoint.adapter.pytorch.memory_storage_reader import MemoryStorageReader
from ml_flashpoint.adapter.pytorch.memory_storage_writer import MemoryStorageWriter
from ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
from ml_flashpoint.core.buffer_pool import BufferPoolConfig
from ml_flashpoint.core.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.core.checkpoint_loader import DefaultMLFlashpointCheckpointLoader
from ml_flashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver
from ml_flashpoint.replication.replication_manager import PairwiseReplicationStrategy, ReplicationManager
from ml_flashpoint.replication.transfer_service import transfer_service_ext
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

CLONE_NEWNS, MS_BIND = 0x20000, 0x1000
DEADLINE_S = 60.0


def as_from_gpu(bucket: Any) -> Any:
    """Copy the tensors. Version 0.0.10 stages with ``to("cpu")``, which does not copy tensors that are on a CPU."""
    return dataclasses.replace(bucket, tensor_data=[(item, tensor.clone()) for item, tensor in bucket.tensor_data])


class Library(Peer):
    """Makes ML Flashpoint's replication strategy itself, because ML Flashpoint looks for GPUs when it makes one."""

    def __init__(self, place: Place, state: State):
        self._base = self._own_directory(place)
        nbytes = sum(value.nbytes for value in state.values())
        mesh = init_device_mesh("cpu", (place.comm.size,))
        self._model = {"model": {name: DTensor.from_local(value, mesh, [Shard(0)], run_check=False)
                                 for name, value in state.items()}}  # fmt: skip
        size = nbytes + (len(state) << 10) + (1 << 20)  # with headers
        pool = BufferPoolConfig(pool_dir_path=f"{self._base}/buffer_pool", rank=place.rank, num_buffers=2,
                                buffer_size=size)  # fmt: skip
        objects = CheckpointObjectManager(pool_config=pool)
        replication = self._replication(objects, place)
        self._saver = DefaultMLFlashpointCheckpointSaver(
            dist.get_rank, lambda: 0, dist.barrier, objects, replication, initial_buffer_size_bytes=size
        )
        self._loader = DefaultMLFlashpointCheckpointLoader(
            objects, replication, global_rank_getter=dist.get_rank, local_rank_getter=lambda: 0,
            broadcast_object_list_func=dist.broadcast_object_list, all_gather_object_func=dist.all_gather_object,
            world_size_getter=dist.get_world_size,
        )  # fmt: skip
        self._shared: Any = concurrent.futures.Future()
        self._shared.set_result(torch.multiprocessing.get_context("spawn").Manager())
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self._cached: Any = None
        self._metadata: Any = None
        self._everyone = _DistWrapper(group=None, use_dist=True, coordinator_rank=0)

    def save(self, step: int, state: State) -> None:
        self._id = CheckpointContainerId(f"{self._base}/step-{step}_ckpt")
        self._saver.initialize_checkpoint(self._id)
        self._writer = MemoryStorageWriter(self._saver, self._shared)
        self._writer.reset(self._id.data)
        buckets, metadata, *self._cached = saving.generate_plan(
            self._id, self._model, self._writer, dcp.DefaultSavePlanner(), self._everyone, self._cached
        )
        self._metadata = metadata or self._metadata
        staged = self._writer.stage_write_data_buckets(self._id, buckets)
        self._staged = [as_from_gpu(bucket) for bucket in staged]
        self._written = self._thread.submit(saving.write_data, self._id, self._writer, self._staged, False)

    def wait(self) -> None:
        self._written.result(DEADLINE_S)
        replicas = self._writer.replicate_written_objects({bucket.object_id for bucket in self._staged})
        saving.finish_write(self._id, self._writer, copy.deepcopy(self._metadata), self._everyone)
        deletes = self._saver.finalize_checkpoint(self._id)
        for replica in replicas:
            assert replica.result(DEADLINE_S).success
        if deletes is not None:
            deletes.wait(DEADLINE_S)

    def load(self, state: State) -> None:
        reader = MemoryStorageReader(self._id.data, self._loader)
        dcp.load(self._model, storage_reader=reader)

    def close(self) -> None:
        self._thread.shutdown()
        self._shared.result().shutdown()

    def _own_directory(self, place: Place) -> Path:
        own, seen = place.memory / f"flashpoint-node{place.rank}", place.memory / "flashpoint"
        for path in (own, seen):
            path.mkdir(exist_ok=True)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNS) or libc.mount(bytes(own), bytes(seen), None, MS_BIND, None):
            raise OSError(ctypes.get_errno(), "ML Flashpoint on emulated nodes needs its own mounts: run this as root")
        return seen

    def _replication(self, objects: Any, place: Place) -> Any:
        os.environ |= {"NNODES": str(place.comm.size), "LOCAL_RANK": "0"}  # one rank on each node
        service = transfer_service_ext.TransferService()
        port = service.initialize(0, global_rank=place.rank)
        addresses = place.comm.allgather(f"127.0.0.1:{port}")
        replication = ReplicationManager()
        replication.initialize(
            objects, replication_transfer_service=service, repl_strategy=PairwiseReplicationStrategy(addresses, 1)
        )
        return replication
