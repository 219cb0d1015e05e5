"""All schedulers, optimizers and modules of torch: restored at any step, they go on with the same bits."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.optim import lr_scheduler, swa_utils
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_leaves
from unit.stored import Store

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
State = dict[str, Any]

_SCHEDULERS: dict[str, Callable[[Any], Any]] = {
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
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.MultiStepLR(o, [4, 6], 0.5)], o),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.MultiStepLR(o, [2, 4], 0.5)], [4]),
}  # fmt: skip
_OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "LBFGS": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=2),
    **{name: (lambda p, name=name: getattr(torch.optim, name)(p)) for name in (
        "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop")},
}  # fmt: skip
_OF_SOME: dict[str, Callable[[], Any]] = {  # a model that they take
    "SparseAdam": lambda: Chosen(sparse=True),
    "Muon": lambda: nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False)),
}


class Chosen(nn.Module):
    """Rows of a table, of which the numbers of an input choose some."""

    def __init__(self, sparse: bool):
        super().__init__()
        self.table = nn.Embedding(7, 2, sparse=sparse)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.table((10 * inputs).long() % 7)
        return rows


def classes(module: Any, base: type) -> set[str]:
    return {name for name, one in vars(module).items() if inspect.isclass(one) and issubclass(one, base)}


def test_each_class_of_torch_is_tried() -> None:
    assert classes(lr_scheduler, lr_scheduler.LRScheduler) - {"LRScheduler", "_LRScheduler"} == set(_SCHEDULERS)
    assert classes(torch.optim, torch.optim.Optimizer) - {"Optimizer"} == {*_OPTIMIZERS, *_OF_SOME}


def trained(state: State, steps: range) -> list[Any]:
    found: list[Any] = []
    for step in steps:
        torch.manual_seed(step)
        inputs = torch.randn(4, 3)

        def loss(inputs: torch.Tensor = inputs) -> torch.Tensor:
            state["optimizer"].zero_grad()
            value: torch.Tensor = state["model"](inputs).square().mean()
            value.backward()
            return value

        state["optimizer"].step(loss)
        if "schedule" in state:
            plateau = isinstance(state["schedule"], lr_scheduler.ReduceLROnPlateau)
            state["schedule"].step(*([float(step % 3)] if plateau else []))
        found += [group["lr"] for group in state["optimizer"].param_groups]
    return [*found, *(parameter.detach().clone() for parameter in state["model"].parameters())]


def dense() -> Any:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def made(optimizer: Callable[[Any], Any], schedule: Callable[[Any], Any] | None = None,
         make: Callable[[], Any] = dense) -> State:  # fmt: skip
    torch.manual_seed(0)
    model = make()
    state: State = {"model": model, "optimizer": optimizer(model.parameters())}
    if schedule is not None:
        state["schedule"] = schedule(state["optimizer"])
    return state


def goes_on(store: Store, make: Callable[[], State], moments: Iterable[int] = range(1, 12)) -> None:
    whole = trained(make(), range(1, 13))
    for at in moments:
        state = make()
        before = trained(state, range(1, at + 1))[: -len(list(state["model"].parameters()))]
        store.write(state)
        state = make()
        if at % 2:  # what a restore into a training that has gone on leaves behind, as in a rollback
            trained(state, range(50, 51 + at))
        store.fill(state)
        after = trained(state, range(at + 1, 13))
        for one, other in zip([*before, *after], whole, strict=True):
            assert torch.equal(one, other) if torch.is_tensor(one) else one == other, at


def beyond(names: Iterable[str], *gate: str) -> list[Any]:
    """Of some names, all but these few are left to make full."""
    return [name if name in gate else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", beyond(_SCHEDULERS, "SequentialLR", "ReduceLROnPlateau", "LambdaLR"))
def test_a_schedule_goes_on(node_memory: Any, name: str) -> None:
    goes_on(Store(node_memory), lambda: made(_OPTIMIZERS["SGD"], _SCHEDULERS[name]))


@pytest.mark.slow
def test_a_sequence_of_any_two_schedules_goes_on(node_memory: Any) -> None:
    names = [name for name in _SCHEDULERS if name not in ("ReduceLROnPlateau", "ChainedScheduler", "SequentialLR")]
    for first, second in itertools.product(names, names):

        def both(o: Any, first: str = first, second: str = second) -> Any:
            return lr_scheduler.SequentialLR(o, [_SCHEDULERS[first](o), _SCHEDULERS[second](o)], [4])

        goes_on(Store(node_memory), functools.partial(made, _OPTIMIZERS["SGD"], both), (3, 4, 6))


@pytest.mark.parametrize("name", beyond(_OPTIMIZERS, "AdamW", "LBFGS"))
def test_an_optimizer_goes_on(node_memory: Any, name: str) -> None:
    goes_on(Store(node_memory), lambda: made(_OPTIMIZERS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", _OF_SOME)
def test_an_optimizer_of_some_models_goes_on(node_memory: Any, name: str) -> None:
    goes_on(Store(node_memory), lambda: made(getattr(torch.optim, name), make=_OF_SOME[name]))


# Modules, with the arguments and inputs that torch's own tests have for them

_WRAPPED: dict[str, Callable[[], Any]] = {
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(3, 4)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 4)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(3, 4)),
    "older spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(3, 4)),
    "averaged": lambda: swa_utils.AveragedModel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), use_buffers=True),
    "fake quantized": lambda: torch.ao.quantization.FakeQuantize.with_args(
        observer=torch.ao.quantization.MovingAverageMinMaxObserver)(),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(3, 4), "weight", 0.5),
}  # fmt: skip


def is_restored(store: Store, make: Callable[[], Any], use: Callable[[Any], Any]) -> None:
    """Check that what another module has learnt makes a new one the same, in what it holds and what it computes."""
    torch.manual_seed(1)
    model = make()
    for _ in range(2):
        use(model)
    store.write({"model": model})
    saved = {name: value.clone() if torch.is_tensor(value) else value for name, value in model.state_dict().items()}
    torch.manual_seed(2)
    other = make()
    use(other)
    store.fill({"model": other})
    found = other.state_dict()
    assert found.keys() == saved.keys() and found._metadata == model.state_dict()._metadata
    assert all(torch.equal(value, found[name]) if torch.is_tensor(value) else value == found[name]
               for name, value in saved.items())  # fmt: skip
    results = []
    for one in (model, other):
        torch.manual_seed(3)
        results.append(tree_leaves(use(one)))
    assert all(torch.equal(*pair) if torch.is_tensor(pair[0]) else pair[0] == pair[1]
               for pair in zip(*results, strict=True))  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("info", module_db, ids=lambda info: info.name)
def test_a_module_is_as_it_was(node_memory: Any, info: Any) -> None:
    tried = 0
    for case in info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=False, training=True):
        built, given = case.constructor_input, case.forward_input
        if given is None or not info.module_cls(*built.args, **built.kwargs).state_dict():
            continue
        tried += 1
        is_restored(Store(node_memory), lambda built=built: info.module_cls(*built.args, **built.kwargs).float(),
                    lambda model, given=given: model(*given.args, **given.kwargs))  # fmt: skip
        if tried == 2:
            break


@pytest.mark.parametrize("name", _WRAPPED)
def test_a_wrapped_module_is_as_it_was(node_memory: Any, name: str) -> None:
    def use(model: Any) -> Any:
        if isinstance(model, swa_utils.AveragedModel):
            model.update_parameters(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
        return model(torch.randn(5, 3))

    is_restored(Store(node_memory), _WRAPPED[name], use)


# Modules whose loading looks at what their state dict says of their versions


class Gate(nn.Module):
    """Version 1 kept the logarithm of the scale; version 2 keeps the scale."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 0.5))

    def _load_from_state_dict(self, state_dict: State, prefix: str, local_metadata: State, *rest: Any) -> None:
        if local_metadata.get("version", 0) < 2:
            state_dict[prefix + "scale"] = state_dict[prefix + "scale"].exp()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def test_versions_of_modules_are_those_that_were_saved(node_memory: Any) -> None:
    store = Store(node_memory)
    saved = nn.ModuleDict({"gate": Gate(), "norm": nn.BatchNorm1d(3)})
    store.write({"model": saved, "as a dict": saved.state_dict()})
    live = nn.ModuleDict({"gate": Gate(), "norm": nn.BatchNorm1d(3)})
    with torch.no_grad():
        live["gate"].scale.zero_()
    other = live.state_dict()
    other._metadata["gate"] = {"version": 1}  # type: ignore[attr-defined]
    store.fill({"model": live, "as a dict": other})
    assert live["gate"].scale.tolist() == [0.5] * 3
    for state in (other, store.load()["model"], store.load()["as a dict"]):
        assert state._metadata == saved.state_dict()._metadata  # type: ignore[attr-defined]
        live.load_state_dict(state)
        assert live["gate"].scale.tolist() == [0.5] * 3


def test_a_state_dict_whose_versions_change_is_another_structure(node_memory: Any) -> None:
    store, state = Store(node_memory), nn.Linear(2, 2).state_dict()
    for version in (1, 1, 2, True):
        state._metadata[""] = {"version": version}  # type: ignore[attr-defined]
        store.write({"s": state})
        found = store.load()["s"]._metadata[""]["version"]
        assert type(found) is type(version) and found == version
