"""NaN, infinities, zeros and leaps in bytes of any dtype; and what is no alarm."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlflash.memory.slot import Slot
from mlflash.protect.value_checks import FORMATS, Examiner, Finding, Stored, count, find, largest
from mlflash.state.layout import PAGE_NBYTES, Extents
from mlflash.state.leaves import Entry

TORCH = [name for name in FORMATS if not name.startswith("<") and not name.startswith("complex")]
NAN = float("nan")


def bits_of(values: torch.Tensor) -> np.ndarray:
    return values.contiguous().view(torch.uint8).numpy()


class Bytes(Slot):
    """A slot in plain memory."""

    def __init__(self, extents: Extents):
        super().__init__()
        self.raw = np.zeros(extents.nbytes, np.uint8)

    @property
    def view(self) -> np.ndarray:
        return self.raw


class Model:
    """Tensors, one after the other, as a slot holds them.

    Args:
        sizes: values of each, by name.
        dtype: of all.
        block_nbytes: of a block.
    """

    def __init__(self, sizes: dict[str, int], dtype: str = "float32", block_nbytes: int = 4096):
        self.dtype, self._at, at = dtype, {}, 0
        size = getattr(torch, dtype).itemsize
        self.stored = []
        for name, number in sizes.items():
            entry = Entry(name, "tensor", dtype, (number,), (0,), (number,), at, number * size)
            self.stored.append(Stored(entry, at, number * size))
            self._at[name] = (at, number * size)
            at += -(-number * size // 256) * 256
        self.extents = Extents(PAGE_NBYTES, at, block_nbytes)
        self.slot = Bytes(self.extents)
        self._generation = 0
        for name in sizes:
            self.set(name, torch.linspace(-1.0, 1.0, sizes[name]))

    def set(self, name: str, values: torch.Tensor) -> None:
        at, nbytes = self._at[name]
        self.slot.payload(self.extents)[at : at + nbytes] = bits_of(values.to(getattr(torch, self.dtype)))

    def put(self, name: str, index: int, value: float) -> None:
        at, nbytes = self._at[name]
        raw = self.slot.payload(self.extents)[at : at + nbytes]
        values = torch.from_numpy(raw.copy()).view(getattr(torch, self.dtype))
        values[index] = value
        raw[:] = bits_of(values)

    def save(self, examiner: Examiner) -> list[Finding]:
        self._generation += 1
        examination = examiner.begin(self.slot, self.extents, "key", lambda: self.stored, self._generation)
        for block in range(self.extents.blocks):
            examination.examine(block + 1)
        return examination.findings


@pytest.mark.parametrize("dtype", TORCH)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_largest_magnitude_of_any_run_is_that_which_torch_finds(dtype: str, data: st.DataObject) -> None:
    form, kind = FORMATS[dtype], getattr(torch, dtype)
    raw = np.frombuffer(data.draw(st.binary(min_size=64 * form.nbytes, max_size=64 * form.nbytes)), np.uint8).copy()
    runs = sorted(data.draw(st.sets(st.integers(0, 64), min_size=2, max_size=6)))
    bounds = [runs[0], *[edge for run in runs[1:-1] for edge in (run, run)], 64]
    magnitudes = largest(raw, form, np.array(bounds))
    values = torch.from_numpy(raw).view(kind).to(torch.float64)
    for nth, (low, high) in enumerate(zip(bounds[::2], bounds[1::2], strict=True)):
        part = values[low:high]
        if part.isnan().any():
            assert magnitudes[nth] >= form.nan
            assert count(raw[low * form.nbytes : high * form.nbytes], form)[0] == int(part.isnan().sum())
        else:
            assert form.value(int(magnitudes[nth])) == float(part.abs().max())
            infinite = count(raw[low * form.nbytes : high * form.nbytes], form)
            assert infinite == (0, int(part.isinf().sum()))


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_nan_and_infinity_of_either_sign_are_found_in_every_format(dtype: str, sign: float) -> None:
    kind = getattr(torch, dtype)
    for value, what in ((NAN, "NaN"), (math.inf, "infinite")):
        model, examiner = Model({"a": 3000, "w": 5000, "z": 20}, dtype), Examiner(1.0, [])
        assert not model.save(examiner) and not model.save(examiner)
        model.put("w", 4321, math.copysign(value, sign))
        stored = torch.tensor([value]).to(kind).to(torch.float64)
        expected = "NaN" if stored.isnan().any() else what if stored.isinf().any() else "large"  # of formats without it
        assert {(finding.tensor, finding.what) for finding in model.save(examiner)} == {("w", expected)}


def test_a_tensor_that_becomes_zero_is_suspect_and_one_that_was_is_not() -> None:
    model, examiner = Model({"moment": 1000, "w": 1000}), Examiner(1.0, [])
    model.set("moment", torch.zeros(1000))
    assert not model.save(examiner) and not model.save(examiner)
    model.set("w", torch.zeros(1000))
    assert [(finding.tensor, finding.what) for finding in model.save(examiner)] == [("w", "zero")]
    model.set("moment", torch.full((1000,), 1e-3))
    assert [finding.tensor for finding in model.save(examiner)] == ["w"]


def test_what_is_suspect_stays_so_until_it_is_as_it_was() -> None:
    model, examiner = Model({"w": 1000, "v": 1000}), Examiner(1.0, [])
    model.save(examiner)
    model.set("w", torch.zeros(1000))
    model.put("v", 3, NAN)
    assert [{finding.what for finding in model.save(examiner)} for _ in range(6)] == [{"zero", "NaN"}] * 6
    model.put("v", 3, 0.5)
    assert [{finding.what for finding in model.save(examiner)} for _ in range(2)] == [{"zero"}] * 2
    model.put("w", 3, 1e-3)
    assert not model.save(examiner)


@pytest.mark.parametrize(("value", "is_suspect"), [(1e4, True), (130.0, True), (100.0, False), (-1e30, True)])
def test_a_value_far_beyond_all_before_is_suspect(value: float, is_suspect: bool) -> None:
    model, examiner = Model({"w": 1000}), Examiner(1.0, [])
    model.save(examiner)
    model.put("w", 500, value)
    assert [finding.what for finding in model.save(examiner)] == ["large"] * is_suspect
    model.put("w", 500, 0.5)
    assert not model.save(examiner)


def test_moments_that_grow_from_nothing_and_counters_are_no_alarm() -> None:
    model, examiner = Model({"exp_avg_sq": 1000, "step": 1}), Examiner(1.0, [])
    for exponent in range(-30, 1):
        model.set("exp_avg_sq", torch.full((1000,), 10.0**exponent))
        model.set("step", torch.full((1,), min(1e38, 1000.0 ** (exponent + 31))))
        assert not model.save(examiner), exponent


def test_names_that_are_skipped_and_whole_numbers_are_not_looked_at() -> None:
    model = Model({"attention_mask": 100, "w": 100})
    model.put("attention_mask", 3, NAN)
    assert not model.save(Examiner(1.0, ["*mask*"]))
    assert [finding.tensor for finding in model.save(Examiner(1.0, ["w"]))] == ["attention_mask"]
    whole = [Stored(Entry("n", "tensor", "int64", (9,), (0,), (9,), 0, 72), 0, 72)]
    assert find(whole, model.extents, ()).names == ()
    assert not Examiner(0.0, []).is_on


def test_after_a_restore_all_of_it_is_new() -> None:
    model, examiner = Model({"w": 1000}), Examiner(1.0, [])
    model.save(examiner)
    model.set("w", torch.full((1000,), 1e6))
    examiner.forget()
    assert not model.save(examiner)
