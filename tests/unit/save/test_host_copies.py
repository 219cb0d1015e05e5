"""Copies of states in plain memory, made where slots are too small."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mlflash.memory.copy_threads import CopyThreads
from mlflash.save import stage
from mlflash.save.stage import copy_to_host
from mlflash.state.flatten import flatten
from mlflash.state.leaves import Flat, as_bytes


def copied(state: Any, local_size: int = 1) -> Flat | None:
    return copy_to_host(flatten(state), 4.0, "/dev/shm", local_size, CopyThreads(1))


def test_leaves_of_any_kind_are_copied_bit_for_bit() -> None:
    large = torch.randn(1 << 20)
    state = {
        "large": large, "tied": large, "strided": torch.randn(4, 6).t(), "bool": torch.tensor([True, False]),
        "bits": torch.tensor([7], dtype=torch.uint8).view(torch.bool), "bfloat16": torch.randn(3).bfloat16(),
        "float8": torch.randn(5).to(torch.float8_e4m3fn), "conjugate": torch.randn(2, dtype=torch.complex64).conj(),
        "empty": torch.empty(0, 3), "scalar": torch.tensor(3), "array": np.arange(6).reshape(2, 3).T, "number": 5,
        "parameter": torch.nn.Parameter(torch.randn(2)),
    }  # fmt: skip
    before = flatten(state)
    made = copied(state)
    assert made is not None
    assert (made.structure, made.plain) == (before.structure, before.plain)
    for entry, value, live in zip(made.structure.entries, made.values, before.values, strict=True):
        live = live if isinstance(live, np.ndarray) else live.detach().resolve_conj()
        copied_now = np.ascontiguousarray(live) if isinstance(live, np.ndarray) else live.contiguous()
        assert np.array_equal(as_bytes(value), as_bytes(copied_now)), entry.name
        assert value.shape == live.shape, entry.name
    assert made.values[0].data_ptr() == made.values[1].data_ptr()
    large.zero_()
    assert made.values[0].abs().sum() > 0


def test_a_node_without_memory_for_it_besides_all_slots_makes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"a": torch.zeros(1 << 18)}  # 1 MiB, of which there are 5 with slots and copies, and 1 to spare
    for free, local_size, is_made in ((6 << 20, 1, True), (5 << 20, 1, False), (6 << 20, 2, False)):
        monkeypatch.setattr(stage, "available", lambda _, free=free: {"this": free, "that": 1 << 40})
        assert (copied(state, local_size) is not None) is is_made
