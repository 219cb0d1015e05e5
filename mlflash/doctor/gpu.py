"""GPUs, and whether memory of the memory file system can be pinned for them."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .findings import Finding, fine, warning

_DEVICES = ("nvidia[0-9]*", "nvidiactl", "kfd", "dxg")
_NBYTES = 1 << 20


def gpus(memory: str, dev: str = "/dev") -> Iterator[Finding]:
    """Count the GPUs that PyTorch sees, and pin some memory for them. PyTorch is imported only if there are GPUs.

    Args:
        memory: the memory file system.
        dev: directory of the device files.
    """
    if not any(path for pattern in _DEVICES for path in Path(dev).glob(pattern)):
        yield fine("GPU", "no GPU here")
        return
    try:
        import torch
    except ImportError as error:
        yield warning("GPU", "this node has a GPU, but PyTorch cannot be imported: {error}", "install PyTorch",
                      error=str(error))  # fmt: skip
        return
    if not torch.cuda.is_available():
        yield warning(
            "GPU", "this node has a GPU, but PyTorch {version} sees none",
            "install PyTorch for this GPU (not a +cpu build), ask Slurm for GPUs (--gpus-per-task), and check "
            "CUDA_VISIBLE_DEVICES and the driver", version=torch.__version__,
        )  # fmt: skip
        return
    yield fine("GPU", "{gpus} x {name}", gpus=torch.cuda.device_count(), name=torch.cuda.get_device_name(0))
    yield pinning(torch.cuda.cudart(), memory)


def pinning(cudart: Any, memory: str) -> Finding:
    """Pin a piece of a file in memory, as mlflash pins slots.

    Args:
        cudart: an object with ``cudaHostRegister`` and ``cudaHostUnregister``.
        memory: the memory file system.
    """
    with tempfile.TemporaryFile(dir=memory) as file:
        file.truncate(_NBYTES)
        view = np.frombuffer(mmap.mmap(file.fileno(), _NBYTES), dtype=np.uint8)
        status = int(cudart.cudaHostRegister(view.ctypes.data, _NBYTES, 0))
        if status == 0:
            cudart.cudaHostUnregister(view.ctypes.data)
            return fine("pinning", "cudaHostRegister pins memory of {memory}", memory=memory)
    return warning(
        "pinning", "cudaHostRegister cannot pin memory of {memory}: CUDA error {status}",
        "saves copy from the GPU several times slower without pinning: raise the limit of locked memory (memlock), and "
        "give a container IPC_LOCK", memory=memory, status=str(status),
    )  # fmt: skip
