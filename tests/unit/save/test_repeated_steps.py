"""The tape notes steps of optimizers, and sees what else has changed the weights, however they lie in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from mlflash.save.repeated_steps import Digest, Tape, _checksum

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "channels last": lambda tensor: tensor.contiguous(memory_format=torch.channels_last),
    "a part": lambda tensor: torch.zeros(4, 6, 6, 6)[:, 1:4, :, ::2].copy_(tensor),
}
CHANGES: dict[str, Callable[[nn.Parameter], Any]] = {
    "in place": lambda weight: weight.detach().add_(1.0),
    "not counted": lambda weight: weight.data.add_(1.0),
    "elsewhere": lambda weight: setattr(weight, "data", weight.data.clone()),
}


def stepped(weight: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    weight.grad = torch.ones_like(weight)
    optimizer.step()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_before_a_step", [True, False])
def test_a_change_between_steps_is_seen(layout: str, change: str, is_before_a_step: bool) -> None:
    weight = nn.Parameter(LAYOUTS[layout](torch.zeros(4, 3, 6, 3)))
    optimizer = torch.optim.SGD([weight], 0.1)
    tape = Tape([optimizer])
    for _ in range(3):
        stepped(weight, optimizer)
        assert not tape.problem() and len(tape.steps) == 1
        tape.clear()
    if not is_before_a_step:
        stepped(weight, optimizer)
    CHANGES[change](weight)
    if is_before_a_step:
        stepped(weight, optimizer)
    assert "has changed weights" in tape.problem()
    tape.clear()
    stepped(weight, optimizer)
    assert not tape.problem()


def test_what_changes_weights_while_a_save_takes_its_state_is_seen_at_the_next() -> None:
    weight = nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.SGD([weight], 0.1)
    tape = Tape([optimizer])
    stepped(weight, optimizer)
    assert not tape.problem()
    weight.detach().add_(1.0)  # by a state_dict of a user, for example
    tape.clear()
    stepped(weight, optimizer)
    assert "has changed weights" in tape.problem()


def test_a_restore_begins_anew_though_a_save_before_it_was_left() -> None:
    weight = nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.SGD([weight], 0.1)
    tape = Tape([optimizer])
    stepped(weight, optimizer)
    assert not tape.problem()  # and then its save raises, and clears nothing
    with tape.paused():
        weight.detach().zero_()
    stepped(weight, optimizer)
    assert not tape.problem() and len(tape.steps) == 1


def test_tensors_of_an_unknown_class_do_not_stop_the_training() -> None:
    weight = nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.SGD([weight], 0.1)
    optimizer.state[weight]["both"] = TwoTensor(torch.zeros(8), torch.zeros(8))
    tape = Tape([optimizer])
    for _ in range(2):
        stepped(weight, optimizer)
        assert "class that mlflash does not know" in tape.problem() and not tape.steps
        tape.clear()
    assert Digest([optimizer], 1).value == 0


def test_a_checksum_on_a_device_sees_each_bit() -> None:
    raw = torch.arange(100_001, dtype=torch.int64).to(torch.uint8)
    for checked in (raw, raw[:100_000], raw[1:]):
        before = _checksum(checked)
        for place in (0, 1, 4095, 50_000, len(checked) - 1):
            checked[place] ^= 1 << place % 8
            assert _checksum(checked) != before
            checked[place] ^= 1 << place % 8
        swapped = checked.flip(0)
        assert _checksum(checked) == before != _checksum(swapped)
