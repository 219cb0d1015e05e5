"""When a step of an optimizer waits for what is copied behind training: before it changes anything, and not earlier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mlflash.save.deferred_copies import DeferredCopies
from mlflash.save.until import HOOK, Steps

DEADLINE = 60.0
# All that torch has; each steps as it is made by default.
OPTIMIZERS = sorted({kind for kind in vars(torch.optim).values() if isinstance(kind, type)
                     and issubclass(kind, torch.optim.Optimizer)} - {torch.optim.Optimizer}, key=str)  # fmt: skip


class Copy:
    """A copy of a parameter that is made as late as it may, noted in `seen`."""

    def __init__(self, parameter: torch.Tensor):
        self.seen: list[torch.Tensor] = []
        self.before = parameter.detach().clone()
        self.later = DeferredCopies([lambda: self.seen.append(parameter.detach().clone())], [], [("p", parameter)],
                                    DEADLINE)  # fmt: skip

    def is_whole(self) -> bool:
        return torch.equal(self.seen[0], self.before) and self.later.error is None


@pytest.fixture
def steps() -> Iterator[Steps]:
    steps = Steps()
    yield steps
    steps.close()


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_the_copies_have_until_the_end_of_the_closure_that_a_step_of_torchs_begins_with(
    steps: Steps, kind: Any, by_name: bool
) -> None:
    layer = torch.nn.Embedding(8, 4, sparse=kind is torch.optim.SparseAdam)
    optimizer = kind(layer.parameters())
    copy = Copy(layer.weight)
    calls = []

    def closure() -> torch.Tensor:
        calls.append(len(copy.seen))
        optimizer.zero_grad()
        loss = (layer(torch.arange(8)) ** 2).sum()
        loss.backward()
        return loss

    steps.before_next(copy.later)
    result = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    assert calls[0] == 0 and result is not None  # nothing was copied when forward began
    assert copy.is_whole() and not torch.equal(layer.weight, copy.before)
    optimizer.step(closure)
    assert len(copy.seen) == 1


class Perturbed(torch.optim.SGD):
    """One that changes the weights before it calls its closure, as sharpness-aware ones do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(0.5)
        return super().step(torch.enable_grad()(closure))


def shifts(parameter: torch.Tensor) -> Callable[..., None]:
    """A hook that changes a parameter, by a write that torch does not count."""

    def hook(*args: Any) -> None:
        parameter.data.add_(0.5)

    return hook


def by_class(parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
    return Perturbed([parameter], lr=0.1)


def by_own_hook(parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.register_step_pre_hook(shifts(parameter))
    return optimizer


def by_hook_for_all(parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter], lr=0.1)


@pytest.mark.parametrize("make", [by_class, by_own_hook, by_hook_for_all])
def test_where_something_may_change_before_the_closure_the_step_waits_before_it(steps: Steps, make: Any) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = make(parameter)
    copy = Copy(parameter)
    steps.before_next(copy.later)
    handle = None
    if make is by_hook_for_all:
        handle = register_optimizer_step_pre_hook(shifts(parameter))
    try:
        optimizer.step(lambda: parameter.square().sum())
    finally:
        if handle is not None:
            handle.remove()
    assert copy.is_whole()


def test_an_exception_of_the_closure_leaves_the_copies_to_the_next_step(steps: Steps) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    copy = Copy(parameter)

    def closure() -> torch.Tensor:
        raise KeyError

    steps.before_next(copy.later)
    with pytest.raises(KeyError):
        optimizer.step(closure)
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert copy.is_whole() and not torch.equal(parameter, copy.before)


def test_a_step_that_is_captured_ends_lazy_saves_and_asks_no_device(
    steps: Steps, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(HOOK, "is_passed_by", False)
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.ones(3)
    copy = Copy(parameter)
    steps.before_next(copy.later)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    optimizer.step()
    assert not copy.seen and HOOK.is_passed_by and "captured in a CUDA graph" in caplog.text
    copy.later.finish()
    assert "it was changed before it was copied" in str(copy.later.error)
