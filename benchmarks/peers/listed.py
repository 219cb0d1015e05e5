"""The libraries: how to install each one, what it writes, and what it guarantees for a checkpoint."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

NONE, COPY = "mlflash, none", "mlflash, copy"  # mlflash without redundancy, and with a copy on the other node


@dataclass(frozen=True)
class Listed:
    """A library.

    Attributes:
        name: on the command line and in tables.
        implementation: a class in a module of this folder, which is a `Peer`.
        package: the package to import.
        distribution: the distribution whose version is shown.
        install: the shell command that installs it.
        writes: what it writes, and where.
        whole: what is true when the library calls a checkpoint complete.
        beside: `COPY` if it keeps a copy on the other node, else `NONE`.
    """

    name: str
    implementation: str
    package: str
    distribution: str
    install: str
    writes: str
    whole: str
    beside: str = NONE

    def version(self) -> str:
        """Return the version, or "" if the library is not installed."""
        if importlib.util.find_spec(self.package) is None:
            return ""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return "unknown"


_TORCH = ("torch", "torch", "pip install torch==2.13.0")
_FILES = "one file per rank and .metadata in one directory in /dev/shm"
_AGREED = "all ranks have closed their files, rank 0 has renamed .metadata; no checksums of tensors, no copy elsewhere"
_OURS = ("mlflash", "mlflash", "pip install mlflash")

OURS = (
    Listed(NONE, "ours.Alone", *_OURS, "two slots per rank in /dev/shm",
           "all ranks have agreed on it; every byte checksummed in its slot"),
    Listed(COPY, "ours.Copied", *_OURS, "two slots per rank in /dev/shm, two more on the other node",
           "all ranks have agreed on it; slot and copy on the other node checksummed at both ends", COPY),
)  # fmt: skip

PEERS = (
    Listed("torch.save", "torch_save.Library", *_TORCH, "one zip file per rank in /dev/shm",
           "the file is renamed on this rank; CRC-32 of each record; the ranks do not agree, no copy elsewhere"),
    Listed("dcp.save", "torch_dcp.Sync", *_TORCH, _FILES, _AGREED),
    Listed("dcp.async_save, thread", "torch_dcp.Thread", *_TORCH, f"a copy staged in memory; {_FILES}", _AGREED),
    Listed("dcp.async_save, process", "torch_dcp.Process", *_TORCH, f"a copy staged in shared memory; {_FILES}",
           _AGREED),
    Listed("torchsnapshot", "torchsnapshot_async.Library", "torchsnapshot", "torchsnapshot",
           "pip install --no-deps torchsnapshot==0.1.0 aiofiles==25.1.0 nest-asyncio==1.6.0 importlib-metadata==8.7.1 "
           "zipp==4.1.2",
           "files of up to 128 MiB, with small tensors in common, in /dev/shm",
           "all ranks have closed their files, rank 0 has written .snapshot_metadata; no checksums, no copy elsewhere"),
    Listed("DLRover", "dlrover_flash.Library", "dlrover", "dlrover",
           "pip install --no-deps dlrover==0.6.1 grpcio==1.85.1 protobuf==7.36.2 deprecated==1.3.1 wrapt==2.5.2 "
           "nvidia-ml-py==13.615.71",
           "one segment of shared memory per rank, overwritten in place",
           "copied on this rank; one copy of one step, no checksums, no agreement, no copy elsewhere"),
    Listed("NVRx, clique of 2", "nvrx_local.Library", "nvidia_resiliency_ext", "nvidia-resiliency-ext",
           "nvidia-resiliency-ext==0.7.0, unpacked: see peers/nvrx_local.py",
           "one file per rank in /dev/shm, and one of the other rank's",
           "all ranks have agreed on both files of each; no checksums", COPY),
    Listed("ML Flashpoint", "flashpoint.Library", "ml_flashpoint", "ml-flashpoint",
           "ml-flashpoint==0.0.10, built: see peers/flashpoint.py",
           "one file per rank in /dev/shm, and one of the other rank's",
           "all ranks have agreed on their own files and the replicas were acknowledged; no checksums", COPY),
)  # fmt: skip

BY_NAME = {one.name: one for one in OURS + PEERS}
