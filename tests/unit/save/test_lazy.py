"""Lazy copies: what may wait, who makes them, and that a torn one is never taken for good."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import holds
import pytest
import torch

from mlflash import Checkpointer
from mlflash.errors import StateError
from mlflash.save.deferred_copies import DeferredCopies, DeviceCopies
from mlflash.save.until import HOOK, LazyLeaves
from mlflash.state.flatten import Flattener

DEADLINE = 60.0


def model_and_optimizer(**options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.BatchNorm1d(256),
                                torch.nn.Linear(256, 128, bias=False))  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    model(torch.randn(5, 128)).sum().backward()
    optimizer.step()
    return model, optimizer


def names(flattener: Flattener, leaves: LazyLeaves, state: Any, until: Any) -> set[str]:
    flat = flattener.flatten(state)
    return {flat.structure.entries[number].name for number in leaves.find(flat, until)}


def test_steps_of_cuda_graphs_and_of_others_are_not_waited_for() -> None:
    model, optimizer = model_and_optimizer()
    optimizer.param_groups[0]["capturable"] = True
    assert names(Flattener(), LazyLeaves(), {"model": model}, optimizer) == set()
    with pytest.raises(StateError, match="torch optimizers"):
        names(Flattener(), LazyLeaves(), {"model": model}, model)


def test_copies_of_a_device_come_before_what_it_is_given_later() -> None:
    """On torch's stand-in for a device, whose streams do nothing: all calls are there, and the bits."""
    values = [torch.randn(5 << 20), torch.randn(7, 3).t(), torch.randn(9, dtype=torch.cfloat).conj()]
    targets = [torch.zeros_like(value.resolve_conj()) for value in values]
    kept = [value.clone() for value in values]
    transfer = DeviceCopies(torch.device("cpu"), targets, values)
    later = DeferredCopies([], [transfer], [("first", values[0])], DEADLINE)
    later.hold_back()
    values[0].add_(1)
    later.finish()
    assert later.error is None
    assert all(map(torch.equal, targets, kept))


class Plain(torch.optim.Optimizer):
    """An optimizer whose step is one graph; none of torch's own is, they leave it by themselves."""

    def __init__(self, params: Any):
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-group["lr"])


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch's, as if it had compiled nothing so far."""
    monkeypatch.setattr(HOOK, "is_passed_by", False)
    torch._dynamo.reset()
    yield functools.partial(torch.compile, backend="eager")
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["step", "training step"])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}, {"fullgraph": True}], ids=str)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.usefixtures("held_couriers")
def test_a_compiled_step_waits_for_the_copies_or_leaves_none_to_wait_for(
    shm: Path, compiler: Any, options: dict[str, Any], what: str
) -> None:
    whole = options == {"fullgraph": True}
    model, optimizer = model_and_optimizer(**({} if whole else options))
    if whole:
        optimizer = Plain(model.parameters())

    def train() -> None:
        optimizer.step()

    step = compiler(train if what == "training step" else optimizer.step, fullgraph=whole)
    step()  # compiled before anything is saved
    state = {"model": model, "optimizer": optimizer}
    with Checkpointer(job="compiled", memory=str(shm), redundancy="none") as ckpt:
        ckpt.prepare(state)
        for number in range(1, 4):
            if number != 1:  # nothing is copied behind
                holds.hold("protect.announced")
            kept = {name: value.clone() for name, value in model.state_dict().items()}
            snapshot = ckpt.save(number, state, until=optimizer)
            assert snapshot.later is None if whole and number > 1 else whole or snapshot.later is not None
            if number == 1:
                snapshot.wait()
            step()
            assert not torch.equal(model[0].weight, kept["0.weight"])
            holds.let_go()
            snapshot.wait()
            _, found = ckpt.load()
            assert all(torch.equal(found["model"][name], value) for name, value in kept.items())
