"""What is written without PyTorch is what PyTorch writes, and reads."""

from __future__ import annotations

import io
import pickle
import pickletools
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from waiting import PATIENCE_S

from mlflash.state.leaves import TORCH_ITEM_NBYTES
from mlflash.storage.torch_pickles import Call, Global, Instance, archive, around_tensor, pickled, tensor_pickle

DTYPES = [name for name in TORCH_ITEM_NBYTES if hasattr(torch, name) and not name.startswith("bits")]
SHAPES: list[tuple[int, ...]] = [(), (0,), (3,), (2, 0, 3), (2, 3), (1, 2, 3, 4)]
plain = st.recursive(st.none() | st.booleans() | st.integers() | st.text(),
                     lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner) |
                     st.lists(inner).map(tuple), max_leaves=20)  # fmt: skip


@given(plain)
def test_plain_values_come_back(value: Any) -> None:
    assert pickle.loads(pickled(value)) == value


def test_many_texts_are_each_written_once() -> None:
    value = [str(number) for number in range(700)] * 2
    assert pickle.loads(pickled(value)) == value
    assert pickled(value).count(b"X\x03\x00\x00\x00699") == 1


def test_classes_functions_and_instances_come_back_by_their_names() -> None:
    counter, fraction = Global("collections", "Counter"), Global("fractions", "Fraction")
    assert pickle.loads(pickled([counter, Call(fraction, (1, 2)), Call(counter, ({"a": 2},))])) == [
        pickle.loads(b"ccollections\nCounter\n."), pickle.loads(pickle.dumps(__import__("fractions").Fraction(1, 2))),
        {"a": 2}]  # fmt: skip
    made = pickle.loads(pickled(Instance(Global("types", "SimpleNamespace"), {"x": 1})))
    assert made.x == 1
    with pytest.raises(TypeError, match="object"):
        pickled(object())


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tensor_has_the_pickle_of_torch_save_and_loads(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    tensor = torch.arange(torch.Size(shape).numel() * TORCH_ITEM_NBYTES[dtype], dtype=torch.uint8) % 2
    tensor = (tensor if tensor.numel() else torch.empty(0, dtype=torch.uint8)).view(getattr(torch, dtype)).view(shape)
    raw = io.BytesIO()
    torch.save(tensor, raw)
    its = zipfile.ZipFile(raw).read("archive/data.pkl")
    assert pickletools.optimize(tensor_pickle(dtype, shape)) == pickletools.optimize(its)
    before, after = around_tensor(dtype, shape)
    assert len(before) % 64 == 0
    content = bytes(tensor.view(torch.uint8).flatten().tolist()) if tensor.numel() and shape else bytes(
        tensor.reshape(-1).view(torch.uint8).tolist())  # fmt: skip
    (tmp_path / "a.pt").write_bytes(before + content + after)
    for is_mapped in (False, True):
        loaded = torch.load(tmp_path / "a.pt", mmap=is_mapped)
        assert (loaded.dtype, loaded.shape, loaded.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        assert bytes(loaded.reshape(-1).view(torch.uint8).tolist()) == content


@pytest.mark.parametrize("nbytes", [(1 << 31) - 1, 1 << 31, 3 << 30, (1 << 32) - 1, 5 << 30])
def test_a_tensor_of_gigabytes_loads(tmp_path: Path, nbytes: int) -> None:
    shape = (nbytes,)
    before, after = around_tensor("uint8", shape)
    with open(tmp_path / "large.pt", "wb") as file:
        file.write(before)
        file.seek(len(before) + shape[0] - 1)
        file.write(b"\x07" + after)
    loaded = torch.load(tmp_path / "large.pt", mmap=True)
    assert loaded.shape == shape and loaded[-1] == 7 and loaded[0] == 0


def test_an_object_without_tensors_is_an_archive_that_torch_loads() -> None:
    value = {"step": 3, "rates": [0.1, 0.2]}
    assert torch.load(io.BytesIO(archive(pickle.dumps(value, 2)))) == value


def test_nothing_of_it_imports_torch() -> None:
    program = "import sys; from mlflash.storage import torch_pickles as made; made.around_tensor('float32', (2,)); "
    subprocess.run([sys.executable, "-c", f"{program} assert 'torch' not in sys.modules"], check=True,
                   timeout=PATIENCE_S)  # fmt: skip
