"""What programs take for granted of CUDA, on CPUs: its devices, streams and random numbers, and NCCL by gloo."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class Stream:
    """A stream of CUDA, in which everything has happened already."""

    device = CPU

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class OnCpu(TorchFunctionMode):
    """Makes tensors that are to be on "cuda" on the CPU, and says of them that they are on "cuda"."""

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        found = function(*args, **kwargs)
        if function is torch.Tensor.type and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.")
        return found


def _is_cuda(device: Any) -> bool:
    return type(device) is int or str(device).startswith("cuda")


PRETENDED: list[tuple[Any, str, Any]] = [
    (torch.cuda, "current_device", lambda: CPU),
    (torch.cuda, "Stream", Stream),
    (torch.cuda, "stream", contextlib.nullcontext),
    (torch.cuda, "current_stream", lambda device=None: Stream()),
    (torch.cuda, "synchronize", lambda device=None: None),
    (torch.cuda, "get_device_properties", lambda device=None: types.SimpleNamespace(major=10)),
    (torch.cuda, "manual_seed", torch.manual_seed),
    (torch.cuda, "get_rng_state", lambda device=None: torch.get_rng_state()),
    (torch.cuda, "set_rng_state", lambda state, device=None: torch.set_rng_state(state)),
]


@contextlib.contextmanager
def pretend(more: Iterable[tuple[Any, str, Any]] = ()) -> Iterator[None]:
    """Let programs run here without CUDA; more: objects, names of what is replaced in them, and by what."""
    pretended = [*PRETENDED, *more]
    before = [getattr(where, name) for where, name, _ in pretended]
    for where, name, made in pretended:
        setattr(where, name, made)
    try:
        with OnCpu():
            yield
    finally:
        for (where, name, _), was in zip(pretended, before, strict=True):
            setattr(where, name, was)


def _by_gloo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have process groups over gloo that are to be over NCCL."""

    def other(value: Any) -> Any:
        return "gloo" if isinstance(value, str) and "nccl" in value.split(":") else value

    @functools.wraps(function)
    def made(*args: Any, **kwargs: Any) -> Any:
        return function(*map(other, args), **{name: other(value) for name, value in kwargs.items()})

    return made


def devices(count: int = 1) -> list[tuple[Any, str, Any]]:
    """What besides lets tests of others run here: so many devices to each process, and NCCL."""
    groups = [(where, name, _by_gloo(getattr(where, name))) for where in (dist, dist.distributed_c10d)
              for name in ("init_process_group", "new_group")]  # fmt: skip
    return [(torch.cuda, "device_count", lambda: count), (torch.cuda, "set_device", lambda device: None),
            (torch.accelerator, "set_device_index", lambda device: None), *groups]  # fmt: skip
