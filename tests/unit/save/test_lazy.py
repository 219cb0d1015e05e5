"""Lazy copies: what may wait, who makes them and when, and that a torn one is never taken for good."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import holds
import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mlflash import Checkpointer
from mlflash.errors import StateError
from mlflash.save.deferred_copies import DeferredCopies, DeviceCopies, SampledBytes
from mlflash.save.lazy_saves import HOOK, LazyLeaves, Steps
from mlflash.state.flatten import Flattener
from mlflash.state.leaves import as_bytes

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


# When a step of an optimizer waits for what is copied behind training: before it changes anything, and not earlier


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


# Bytes noted here and there: a write that torch does not count is found in the copy


SIZES = [1, 15, 16_384, 100_003, 3 << 20]


def noted(tensors: list[torch.Tensor], on_device: bool) -> tuple[SampledBytes, list[np.ndarray], Callable[[], None]]:
    """Sampled bytes of some tensors, where they are to be copied to, and what copies them."""
    samples, lives = SampledBytes(), [as_bytes(tensor) for tensor in tensors]
    rooms = [np.empty_like(live) for live in lives]
    names = [f"t{number}" for number in range(len(tensors))]
    extra: list[tuple[Any, Any]] = []
    if on_device:
        extra.append(samples.note_on(torch.device("cpu"), names, tensors, rooms))
    else:
        for name, live, room in zip(names, lives, rooms, strict=True):
            samples.add(name, live, room)
    samples.note()

    def copy() -> None:
        for live, room in zip(lives, rooms, strict=True):
            np.copyto(room, live)
        for into, value in extra:
            into.copy_(value)

    return samples, rooms, copy


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64], ids=str)
def test_a_small_change_of_a_whole_tensor_is_found(dtype: torch.dtype, on_device: bool) -> None:
    torch.manual_seed(0)
    for size in SIZES[2:]:
        tensors = [torch.randn(size).to(dtype) for _ in range(3)]
        samples, _, copy = noted(tensors, on_device)
        tensors[1].data.mul_(1.01)
        copy()
        assert samples.changed() == "t1"


@pytest.mark.parametrize("on_device", [False, True])
def test_what_was_not_changed_has_the_bytes_that_were_noted(on_device: bool) -> None:
    tensors = [torch.full((size,), float("nan")) for size in SIZES]
    samples, _, copy = noted(tensors, on_device)
    copy()
    for tensor in tensors:
        tensor.data.zero_()  # after the copy it may
    assert samples.changed() is None
    assert SampledBytes().changed() is None


def test_a_write_between_two_pieces_is_found_in_the_second() -> None:
    tensor = torch.randn(8 << 20)
    samples, (room,), _ = noted([tensor], on_device=False)
    half, live = room.nbytes // 2, as_bytes(tensor)
    np.copyto(room[:half], live[:half])
    tensor.data.add_(1e-3)
    np.copyto(room[half:], live[half:])
    assert samples.changed() == "t0"


def test_a_save_of_what_was_written_to_past_torch_fails() -> None:
    weight = torch.nn.Parameter(torch.randn(1000, 100))
    before = weight.detach().clone()
    samples, rooms, copy = noted([weight.detach()], on_device=False)
    later = DeferredCopies([copy], [], [("t0", weight.detach())], 10.0, samples)
    weight.data.copy_(before * 0.5)
    later.finish()
    assert isinstance(later.error, StateError) and later.error.tensor == "t0"
    assert "wait_staged" in str(later.error)
    assert not np.array_equal(rooms[0], as_bytes(before))
