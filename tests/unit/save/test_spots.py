"""Bytes noted here and there: a write that torch does not count is found in the copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mlflash.errors import StateError
from mlflash.save.deferred_copies import DeferredCopies, SampledBytes
from mlflash.state.leaves import as_bytes

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
