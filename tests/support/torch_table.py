"""Everything of torch and torchdata that has a state and takes part in a training, as one table of small trainings.

Each entry makes a training and takes its steps. A training that is restored has to go on with the bits of one that
nothing happened to. `tests/unit/state/test_torch_contract.py` tries it in one process, `programs/contract_job.py` in
new processes, with DDP and FSDP2, too. torchdata is imported where it is used: other environments may not have it.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from digests import digests
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, prune
from torch.optim import lr_scheduler, swa_utils
from torch.utils.data import Dataset, IterableDataset

import mlflash

PLAIN, DDP, FSDP2 = KINDS = ("plain", "ddp", "fsdp2")
EPOCH = 4  # batches of each loader
State = dict[str, Any]


class Training:
    """The live objects that are saved of a training, and its steps."""

    state: State

    def begin(self) -> None:
        """Leave behind what a restore does not change: it is called after each."""

    def step(self, number: int) -> Any:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Entry:
    """A line of the table.

    Attributes:
        make: makes the training, spread over ranks in one of `KINDS`.
        kinds: in which it can be.
        has_processes: it starts some.
        is_dear: or the like of it is tried elsewhere; it is left to `make full`.
        unlike: a pattern of paths in its results and its state that what made it does not restore, with any library.
    """

    make: Callable[[str], Training]
    kinds: tuple[str, ...] = KINDS
    has_processes: bool = False
    is_dear: bool = True
    unlike: str = ""


def devices() -> list[torch.device]:
    return [torch.device("cpu"), *(torch.device("cuda", n) for n in range(torch.cuda.device_count()))]


# Models with optimizers and schedules


def numbers(step: int, *shape: int) -> torch.Tensor:
    """What a rank draws at a step, from no generator of the process."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * step + rank))


class Learning(Training):
    """A model that learns.

    Args:
        kind: one of `KINDS`.
        model: not yet spread over ranks.
        shape: of its inputs.
        make: makes the optimizer of its parameters.
        schedule: makes a schedule of the optimizer.
    """

    def __init__(self, kind: str, model: nn.Module, shape: tuple[int, ...], make: Callable[[Any], Any],
                 schedule: Callable[[Any], Any] | None = None):  # fmt: skip
        self.whole, self._shape = spread(kind, model), shape
        self.state = {"model": model, "optimizer": make(model.parameters())}
        if schedule is not None:
            self.state["schedule"] = schedule(self.state["optimizer"])

    def loss(self, step: int) -> torch.Tensor:
        value: torch.Tensor = self.whole(numbers(step, *self._shape)).square().mean()
        return value

    def step(self, number: int) -> Any:
        torch.manual_seed(number)  # of what a module draws
        optimizer, schedule = self.state["optimizer"], self.state.get("schedule")

        def again() -> torch.Tensor:
            optimizer.zero_grad()
            loss = self.loss(number)
            loss.backward()
            losses.append(loss.detach())
            return loss

        losses: list[torch.Tensor] = []
        found: list[Any] = [losses]
        if isinstance(optimizer, torch.optim.LBFGS):
            found.append(optimizer.step(again))
        else:
            again()
            optimizer.step()
        if schedule is not None:
            schedule.step(*([float(number % 3)] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []))
        return found + [group["lr"] for group in optimizer.param_groups]


def spread(kind: str, model: nn.Module) -> Any:
    if kind == DDP:
        return nn.parallel.DistributedDataParallel(model)
    if kind == FSDP2:
        fully_shard(model)
    return model


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [3, 5, 5], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 6, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, mode="exp_range", gamma=0.9),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.01, anneal_epochs=5),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.MultiStepLR(o, [4, 6], 0.5)], o),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.MultiStepLR(o, [2, 4], 0.5)], [4]),
}  # fmt: skip
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": sgd,
    "LBFGS": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=2),
    **{name: (lambda p, name=name: getattr(torch.optim, name)(p)) for name in (
        "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop",
        "SparseAdam", "Muon")},
}  # fmt: skip


class Chosen(nn.Module):
    """Rows of a table, of which the numbers of an input choose some."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 2, sparse=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.table((10 * inputs).long() % 7)
        return rows


_OF_SOME: dict[str, Callable[[], nn.Module]] = {  # a model that they take
    "SparseAdam": Chosen,
    "Muon": lambda: nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False)),
}


# Modules with a version, with an extra state, or with parts that others put into them


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen, self.mean = nn.Linear(3, 2), 0, torch.zeros(3)

    def get_extra_state(self) -> State:
        return {"seen": self.seen, "mean": self.mean}

    def set_extra_state(self, state: State) -> None:
        self.seen, self.mean = state["seen"], state["mean"]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += len(inputs)
        self.mean = self.mean + inputs.mean(0) / self.seen
        found: torch.Tensor = self.layer(inputs + self.mean)
        return found


class Quantizing(nn.Module):
    """Learns in which range its values are."""

    def __init__(self) -> None:
        super().__init__()
        from torch.ao import quantization

        self.layer = nn.Linear(3, 4)
        observer = quantization.MovingAverageMinMaxObserver
        self.quantize = quantization.FakeQuantize.with_args(observer=observer)()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.quantize(self.layer(inputs))
        return found


VERSIONED: dict[str, tuple[int, ...]] = {  # classes of torch.nn with a version, and shapes of their inputs
    **{f"{lazy}{name}{n}d": (4, 3, *[3] * n) for lazy in ("", "Lazy") for name in ("BatchNorm", "InstanceNorm")
       for n in (1, 2, 3)},
    "SyncBatchNorm": (4, 3, 3, 3),
}  # fmt: skip
OTHERS: dict[str, Callable[[], nn.Module]] = {  # with parts that torch puts into them, or with an extra state
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(3, 4)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 4)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(3, 4)),
    "older weight norm": lambda: nn.utils.weight_norm(nn.Linear(3, 4)),
    "older spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(3, 4)),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(3, 4), "weight", 0.5),
    "fake quantized": Quantizing,
    "extra state": Counting,
}


def versioned(kind: str, name: str) -> Training:
    options: State = {"affine": True, "track_running_stats": True}
    module: nn.Module = getattr(nn, name)(**options if name.startswith("Lazy") else {"num_features": 3, **options})
    if name.startswith("Lazy"):
        module(numbers(0, *VERSIONED[name]))
    if name == "SyncBatchNorm" and kind != PLAIN:
        module.eval()  # on CPUs it cannot exchange what it sees
    return Learning(kind, module, VERSIONED[name], sgd)


class Averaged(Learning):
    def __init__(self, kind: str, options: State):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        average = swa_utils.AveragedModel(model, **options)
        super().__init__(kind, model, (4, 3), sgd, SCHEDULES["SWALR"])
        if kind == FSDP2:
            fully_shard(average, reshard_after_forward=True)
        self.state["average"] = average

    def step(self, number: int) -> Any:
        found = super().step(number)
        self.state["average"].update_parameters(self.state["model"])
        return [found, self.state["average"].eval()(numbers(number, 4, 3)).detach()]


class Scaled(Learning):
    """A loss that is scaled, and overflows at each third step."""

    def __init__(self, kind: str):
        super().__init__(kind, dense(), (4, 3), OPTIMIZERS["AdamW"])
        self.state["scaler"] = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def step(self, number: int) -> Any:
        optimizer, scaler = self.state["optimizer"], self.state["scaler"]
        optimizer.zero_grad()
        loss = self.loss(number) * (float("inf") if number % 3 == 0 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return [loss.detach(), scaler.get_scale()]


# Random generators


class Drawing(Training):
    def __init__(self, kind: str) -> None:
        self.state = {"rng": mlflash.rng()}

    def step(self, number: int) -> Any:
        drawn = [random.random(), random.gauss(0, 1), np.random.random(3), np.random.normal()]
        return [*drawn, *(torch.rand(3, device=device) for device in devices())]


class Generator:
    """A generator as an object of a state: torch's own has no ``state_dict``."""

    def __init__(self, device: torch.device):
        self.generator = torch.Generator(device).manual_seed(1)

    def state_dict(self) -> State:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: State) -> None:
        self.generator.set_state(state["generator"])


class DrawingOwn(Training):
    def __init__(self, kind: str) -> None:
        self.state = {str(device): Generator(device) for device in devices()}

    def step(self, number: int) -> Any:
        generators = [stateful.generator for stateful in self.state.values()]
        return [torch.rand(3, generator=generator, device=generator.device) for generator in generators]


# Loaders of torchdata


class Numbers(Dataset):  # type: ignore[misc]
    """As many samples as two epochs of `EPOCH` single ones have."""

    def __len__(self) -> int:
        return 2 * EPOCH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), 0.5])


class Stream(IterableDataset):  # type: ignore[misc]
    """Samples of one worker after the other, which know their position."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = torch.utils.data.get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        while self.at < 2 * EPOCH // workers:
            self.at += 1
            yield torch.tensor([float(number), float(self.at)])
        self.at = 0

    def state_dict(self) -> State:
        return {"at": self.at}

    def load_state_dict(self, state: State) -> None:
        self.at = state["at"]


class Drawn(Training):
    def __init__(self, loader: Any):
        self.state = {"loader": loader}
        self.begin()

    def begin(self) -> None:
        self._batches: Iterator[Any] | None = None

    def step(self, number: int) -> Any:
        for _ in range(2):
            if self._batches is None:
                self._batches = iter(self.state["loader"])
            for batch in self._batches:
                return batch
            self.begin()
        raise AssertionError("an epoch without batches")


def loader(kind: str, order: str, workers: int, **options: Any) -> Training:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import RandomSampler, StatefulDistributedSampler

    data, numbers = Stream() if order == "of a stream" else Numbers(), torch.Generator().manual_seed(3)
    if order == "shuffled":
        options["sampler"] = RandomSampler(data, generator=torch.Generator().manual_seed(4))
    if order == "dealt":
        options["sampler"] = StatefulDistributedSampler(data, 2, 1, shuffle=True)
    options["shuffle"] = order == "shuffled by the generator of the workers" or None
    return Drawn(StatefulDataLoader(data, 2, num_workers=workers, generator=numbers, **options))


class Shuffled(torch.utils.data.Sampler):  # type: ignore[misc]
    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(EPOCH, generator=torch.Generator().manual_seed(self.epoch)).tolist()


def plus_half(value: Any) -> Any:
    return value + 0.5


def _weighted(criterion: str) -> Callable[[Any], Any]:
    def make(n: Any) -> Any:
        sources = {"a": n.IterableWrapper(range(EPOCH)), "b": n.IterableWrapper(range(10, 10 + EPOCH))}
        return n.MultiNodeWeightedSampler(sources, {"a": 0.4, "b": 0.6}, getattr(n.StopCriteria, criterion))

    return make


NODES: dict[str, Callable[[Any], Any]] = {
    "IterableWrapper": lambda n: n.IterableWrapper(range(EPOCH)),
    "IterableWrapper of a Stateful": lambda n: n.IterableWrapper(Stream()),
    "SamplerWrapper": lambda n: n.SamplerWrapper(Shuffled()),
    "MapStyleWrapper": lambda n: n.MapStyleWrapper([10 * k for k in range(EPOCH)], Shuffled()),
    "Batcher": lambda n: n.Batcher(n.IterableWrapper(range(2 * EPOCH)), 2),
    "Unbatcher": lambda n: n.Unbatcher(n.Batcher(n.IterableWrapper(range(2 * EPOCH)), 4)),
    "Mapper": lambda n: n.Mapper(n.SamplerWrapper(Shuffled()), plus_half),
    "ParallelMapper": lambda n: n.ParallelMapper(n.SamplerWrapper(Shuffled()), plus_half, 2),
    "ParallelMapper of processes": lambda n: n.ParallelMapper(
        n.SamplerWrapper(Shuffled()), plus_half, 2, method="process", multiprocessing_context="fork"),
    "Prefetcher": lambda n: n.Prefetcher(n.SamplerWrapper(Shuffled()), 2),
    "Prefetcher with few snapshots": lambda n: n.Prefetcher(n.SamplerWrapper(Shuffled()), 2, snapshot_frequency=3),
    **{f"MultiNodeWeightedSampler {name}": _weighted(name) for name in (
        "CYCLE_UNTIL_ALL_DATASETS_EXHAUSTED", "ALL_DATASETS_EXHAUSTED", "FIRST_DATASET_EXHAUSTED", "CYCLE_FOREVER")},
}  # fmt: skip
if torch.cuda.is_available():
    NODES["PinMemory"] = lambda n: n.PinMemory(n.Mapper(n.IterableWrapper(range(EPOCH)), torch.tensor))


def of_nodes(kind: str, name: str, begins_again: bool = False) -> Training:
    from torchdata import nodes

    return Drawn(nodes.Loader(NODES[name](nodes), restart_on_stop_iteration=begins_again))


# The table


def _of(make: Callable[..., Training], *args: Any, **fields: Any) -> Entry:
    return Entry(lambda kind: make(kind, *args), **fields)


def _learning(make: Callable[[], nn.Module], optimizer: Any, schedule: Any = None) -> Callable[[str], Training]:
    return lambda kind: Learning(kind, make(), (4, 3), optimizer, schedule)


_LOADED = (PLAIN, DDP)  # whose data are no matter of a model


def _loading(order: str, workers: int, unlike: str = "", **options: Any) -> Entry:
    if workers:  # what seeds them in the next epoch
        unlike = ".*_base_seed"
    return Entry(functools.partial(loader, order=order, workers=workers, **options), _LOADED, workers > 0,
                 is_dear=workers > 0, unlike=unlike)  # fmt: skip


TABLE: dict[str, Entry] = {
    **{f"schedule {name}": Entry(_learning(dense, sgd, make),
                                 is_dear=name not in ("SequentialLR", "ReduceLROnPlateau", "LambdaLR"))
       for name, make in SCHEDULES.items()},
    **{f"optimizer {name}": Entry(_learning(_OF_SOME.get(name, dense), make), is_dear=name not in ("AdamW", "LBFGS"))
       for name, make in OPTIMIZERS.items()},
    **{f"module {name}": _of(versioned, name, is_dear=name != "BatchNorm1d") for name in VERSIONED},
    **{f"module {name}": Entry(_learning(make, sgd), is_dear=False) for name, make in OTHERS.items()},
    "average": _of(Averaged, {"use_buffers": True}, is_dear=False),
    "average EMA": _of(Averaged, {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)}),
    "scaler": _of(Scaled, is_dear=False),
    "rng": _of(Drawing, is_dear=False),
    "generators": _of(DrawingOwn, is_dear=False),
    **{f"loader {order}, {workers} workers": _loading(order, workers)
       for workers in (0, 2) for order in ("in order", "shuffled", "of a stream", "dealt")},
    # Two draw from one generator, in another order after a restore: the next epochs are other ones.
    "loader shuffled by the generator of the workers": _loading(
        "shuffled by the generator of the workers", 0, unlike="result|.*generator"),
    "loader with few snapshots": _loading("shuffled", 2, snapshot_every_n_steps=3),
    "loader with lasting workers": _loading("shuffled", 2, persistent_workers=True),
    **{f"nodes {name}": _of(of_nodes, name, kinds=_LOADED, has_processes=name.endswith("processes"),
                            is_dear=name != "Batcher") for name in NODES},
    # After a restore on the last batch of an epoch it gives the same state for the whole of the next.
    "nodes that begin again": _of(of_nodes, "MapStyleWrapper", True, kinds=_LOADED, unlike="state"),
}  # fmt: skip


def made(kind: str, name: str) -> Training:
    """Make an entry of the table, the same in every process."""
    torch.manual_seed(0)
    return TABLE[name].make(kind)


# Torch itself does not train these, spread in such a way over CPUs.
NOT_BY_TORCH = {("module SyncBatchNorm", DDP), ("optimizer Adafactor", FSDP2), ("optimizer Rprop", FSDP2),
                ("optimizer SparseAdam", FSDP2)}  # fmt: skip


def of_kind(kind: str) -> list[str]:
    """Names of what is in the table and can be spread in such a way."""
    return [name for name, entry in TABLE.items() if kind in entry.kinds and (name, kind) not in NOT_BY_TORCH]


def stepped(name: str, training: Training, number: int) -> dict[str, str]:
    """Take a step of a training of the table, and return what all of it computed, and its state, but what is unlike."""
    if name == "rng":  # the only one that draws from the generators of this process
        computed = training.step(number)
    else:
        with torch.random.fork_rng():
            computed = training.step(number)
    found = {**digests(computed, "result"), **digests(training.state, "state")}
    return {key: value for key, value in found.items() if not re.match(TABLE[name].unlike or "(?!)", key)}


# What is refused, with the path and the message


def _node() -> Any:
    from torchdata import nodes

    return nodes.IterableWrapper(range(EPOCH))


_PLAIN = "save tensors, arrays, .* or objects with state_dict and load_state_dict"
REFUSED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "a generator": (torch.Generator, "it", "whose state_dict calls get_state.. and whose load_state_dict set_state"),
    "a node outside of a loader": (_node, "it", "this one has no load_state_dict"),
    "a lazy module": (lambda: nn.LazyLinear(3), "it.weight", "has no values yet: give its module an input first"),
    "a quantized tensor": (lambda: torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8), "it", "only dense"),
    "a sparse tensor": (lambda: torch.eye(3).to_sparse(), "it", "only dense tensors with memory of their own"),
    "a dtype": (lambda: torch.float32, "it", _PLAIN),
}
"""What makes each, the path that is named, and a part of the message."""
