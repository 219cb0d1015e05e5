"""Small models in training, some of whose steps are replayed; and what a faulty device does to a rank's passes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import mlflash
from mlflash.adapters.replay import Replay


class Words(nn.Module):
    """A small transformer, its output layer tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True) for _ in range(2))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = (x * 5).long() % 11
        return self.layers(self.embedding(words)) @ self.embedding.weight.T


class Halves(nn.Module):
    """Which half is used depends on the batch: DDP has to look for parameters that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList(nn.Linear(8, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.halves[int(x.sum() > 0)](x)


class Counted(nn.Module):
    """What it gives depends on a buffer that each pass changes by its batch; another one is a new tensor each time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("calls", torch.ones(1))
        self.register_buffer("last", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.calls *= 1 + 0.1 * x.mean()
            self.last = x.mean().reshape(1)
        return self.layer(x) * self.calls


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 33), nn.Dropout(0.3), nn.Tanh(), nn.Linear(33, 5))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "normed": normed, "words": Words, "counted": Counted}


def ddp(model: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, **options)


def fsdp2(model: nn.Module, replicas: int = 1, **options: Any) -> nn.Module:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (replicas, size // replicas), mesh_dim_names=("replica", "shard"))
    mesh = mesh if replicas > 1 else mesh["shard"]
    for layer in [module for module in model.modules() if isinstance(module, (nn.Linear, nn.TransformerEncoderLayer))]:
        if not any(layer in other.modules() for other in model.modules()
                   if isinstance(other, nn.TransformerEncoderLayer) and other is not layer):  # fmt: skip
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp2_bf16(model: nn.Module) -> nn.Module:
    return fsdp2(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


WRAPPERS: dict[str, Callable[..., nn.Module]] = {"ddp": ddp, "fsdp2": fsdp2, "fsdp2_bf16": fsdp2_bf16}


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["x"]).float().square().mean() * batch["scale"]


def batch_of(step: int, rank: int, length: int = 6) -> dict[str, torch.Tensor]:
    """A batch that is a view of more, of a length of its own on each rank."""
    numbers = torch.Generator().manual_seed(100 * step + rank)
    return {"x": torch.randn(64, 8, generator=numbers)[3 : 3 + length], "scale": torch.tensor(1.0 + rank)}


@dataclasses.dataclass
class Training:
    """A model in training on all ranks of a job.

    Attributes:
        bits: what each step has left on this rank, as a digest: gradients, and all that the next step begins with.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    check: Replay | None = None
    bits: list[str] = dataclasses.field(default_factory=list)

    def train(self, steps: int, compute: Any = loss_of, parts: int = 1) -> Training:
        rank = dist.get_rank()
        for step in range(steps):
            for part in range(parts):
                with self._reducing(part == parts - 1):
                    number = step * parts + part
                    self._one(number, batch_of(number, rank, 6 + rank % 2), compute)
            left = self.bits_now()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.bits += [left, self.bits_now()]
        return self

    def _one(self, number: int, batch: Any, compute: Any) -> None:
        if self.check is None:
            compute(self.model, batch).backward()
        else:
            loss = self.check.forward_backward(number, batch, compute)
            assert not loss.requires_grad and loss.numel() == 1

    @contextlib.contextmanager
    def _reducing(self, last: bool) -> Iterator[None]:
        if isinstance(self.model, DistributedDataParallel):
            with contextlib.nullcontext() if last else self.model.no_sync():
                yield
        else:
            self.model.set_requires_gradient_sync(last)
            yield

    def bits_now(self) -> str:
        state = mlflash.rng().state_dict()
        random = [state["torch"], torch.from_numpy(state["numpy"]["keys"].astype("int64")), state["python"]["words"]]
        kept = [value for of in self.optimizer.state.values() for value in of.values()]
        parameters = list(self.model.parameters())
        held = [*parameters, *self.model.buffers(), *kept, *random, *(parameter.grad for parameter in parameters)]
        digest = xxhash.xxh3_64()
        for tensor in held:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            content = None if local is None else torch.as_tensor(local).detach().reshape(-1).contiguous()
            digest.update(b"none" if content is None else content.view(torch.uint8).numpy())
        return digest.hexdigest()


def training(kind: Callable[[], nn.Module], wrap: Callable[..., nn.Module], every: int | None = None, **options: Any
             ) -> Training:  # fmt: skip
    """Make a model, the same on all ranks, whose dropout differs between them; ``every``: it is replayed."""
    torch.manual_seed(0)
    model = wrap(kind())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(dist.get_rank())
    return Training(model, optimizer, None if every is None else Replay(model, every, **options))


# Faults


class _Flip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bit: int, in_backward: bool) -> torch.Tensor:
        ctx.bit = bit if in_backward else -1
        return x.clone() if in_backward else flipped(x, bit)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.clone() if ctx.bit < 0 else flipped(gradient, ctx.bit), None, None


def flipped(x: torch.Tensor, bit: int) -> torch.Tensor:
    """A copy with one bit of its first element the other way."""
    other = x.detach().contiguous().clone()
    other.view(torch.int32 if x.dtype == torch.float32 else torch.int16).view(-1)[0] ^= 1 << bit
    return other


class Faulty:
    """Computes the loss, on one rank wrongly in some of its passes.

    Args:
        rank: which.
        passes: numbers of its passes that are wrong, from 0; None: all.
        bit: of one activation, or of its gradient, that is flipped.
    """

    def __init__(self, rank: int, passes: set[int] | None, bit: int = 20, in_backward: bool = False):
        self.rank, self.passes, self.bit, self.in_backward, self.calls = rank, passes, bit, in_backward, 0

    def __call__(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        wrong = dist.get_rank() == self.rank and (self.passes is None or self.calls in self.passes)
        self.calls += 1
        out = model(batch["x"])
        if wrong:
            out = _Flip.apply(out, self.bit, self.in_backward)
        return out.float().square().mean() * batch["scale"]


class Noisy(Faulty):
    """Computes the loss with noise in its last bits, other noise each time, as atomic additions make it."""

    def __init__(self, size: float = 1e-4, **fault: Any):
        super().__init__(**({"rank": -1, "passes": None} | fault))
        self.size, self.numbers = size, torch.Generator().manual_seed(1000 + dist.get_rank())

    def __call__(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = super().__call__(model, batch)
        return loss * (1 + self.size * float(torch.rand((), generator=self.numbers)))
