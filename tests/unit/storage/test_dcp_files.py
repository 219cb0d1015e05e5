"""PyTorch DCP: what of a state its files hold, as PyTorch writes and reads them, and between its versions."""

from __future__ import annotations

import io
import pickle
import pickletools
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import needs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from waiting import PATIENCE_S

from mlflash import Checkpointer
from mlflash.errors import StructureMismatch
from mlflash.state.leaves import TORCH_ITEM_NBYTES, Entry
from mlflash.storage.dcp_files import (
    Call,
    Contents,
    Global,
    Instance,
    archive_of,
    around_tensor,
    metadata,
    pickle_of,
    tensor_pickle,
)
from mlflash.tools.export_imports import read_dcp

HALF = {"float32": (0,), "float64": (2,)}  # of four elements, where each of two ranks has its own


def file(rank: int, pieces: list[Entry], extras: list[str]) -> Contents:
    places = [(100 * number, 100) for number in range(len(pieces) + len(extras))]
    return Contents(f"__{rank}_0.distcp", pieces, extras, places)


def described(files: list[Contents], paths: dict[str, Any], left_out: dict[str, str] | None) -> Any:
    return pickle.load(io.BytesIO(metadata(files, paths, left_out=left_out)))


def whole(name: str, count: int, dtype: str = "float32") -> Entry:
    return Entry(name, "tensor", dtype, (count,), (0,), (count,), 0, count * 4)


@pytest.mark.parametrize(("files", "has"), [
    ([file(0, [whole("x", 4), whole("y", 3)], []), file(1, [whole("x", 5)], [])], torch.Size([4])),
    ([file(0, [whole("y", 3)], ["x"]), file(1, [whole("x", 5)], [])], None),
    ([file(rank, [Entry("x", "tensor", dtype, (4,), at, (2,), 0, 8), whole("y", 3)][: 2 - rank], [])
      for rank, (dtype, at) in enumerate(HALF.items())], "nothing"),
], ids=["other sizes", "an object and a tensor", "parts of different tensors"])  # fmt: skip
def test_of_different_things_of_one_name_that_of_the_first_rank_is_listed_if_it_is_whole(
    files: list[Contents], has: Any
) -> None:
    paths = {"x": ("x",), "y": ("y",)}
    left_out: dict[str, str] = {}
    listed = described(files, paths, left_out)
    assert [*left_out] == ["x"] and listed.state_dict_metadata["y"].size == torch.Size([3])
    assert {index.fqn for index in listed.storage_data} == {*listed.state_dict_metadata} == {*listed.planner_data}
    if has == "nothing":
        assert "x" not in listed.state_dict_metadata
    else:
        assert getattr(listed.state_dict_metadata["x"], "size", None) == has
    with pytest.raises(StructureMismatch):
        described(files, paths, None)


@needs.MPI
@pytest.mark.parametrize("made", [lambda n: [torch.full((5,), float(n)), n], lambda n: (torch.full((2,), float(n)),),
                                  lambda n: torch.full((3,), float(n))], ids=["list", "tuple", "tensor"])  # fmt: skip
def test_a_state_that_is_no_dict_is_drained_and_comes_back(shm: Path, tmp_path: Path, made: Any) -> None:
    options: dict[str, Any] = {"job": "t", "directory": tmp_path / "pfs", "redundancy": "none", "strict": True}
    with Checkpointer(memory=str(shm), **options) as ckpt:
        ckpt.save(7, made(7)).wait()
        ckpt.drain().wait()
    shutil.rmtree(shm)
    shm.mkdir()
    with Checkpointer(memory=str(shm), **options) as ckpt:
        step, state = ckpt.load()
    assert step == 7 and type(state) is type(made(7)) and repr(state) == repr(made(7))


def test_what_no_file_holds_is_an_error_though_others_are_left_out() -> None:
    with pytest.raises(StructureMismatch, match="no file holds this part of the state"):
        described([file(0, [whole("x", 4)], [])], {"x": ("x",), "z": ("z",)}, {})


def test_what_is_tied_to_something_that_is_left_out_is_left_out() -> None:
    pieces = [[Entry("x", "tensor", dtype, (4,), at, (2,), 0, 8)] for dtype, at in HALF.items()]
    left_out: dict[str, str] = {}
    files, paths = [file(rank, piece, []) for rank, piece in enumerate(pieces)], {"x": ("x",), "tied": ("tied",)}
    listed = pickle.load(io.BytesIO(metadata(files, paths, {"tied": "x"}, left_out=left_out)))
    assert {*left_out} == {"x", "tied"} and not listed.state_dict_metadata and not listed.storage_data


# Versions: 2.15 has added a property of tensors that older ones cannot unpickle


@pytest.mark.parametrize("trust_pickle", [False, True])
def test_what_2_15_has_written_is_read(tmp_path: Path, trust_pickle: bool) -> None:
    with zipfile.ZipFile(Path(__file__).with_name("golden-dcp-2.15.zip")) as golden:
        golden.extractall(tmp_path)
    state = read_dcp(tmp_path, trust_pickle)
    assert torch.equal(state["w"], torch.tensor([[0.0, 3], [1, 4], [2, 5]]))
    assert torch.equal(state["half"], torch.arange(4).bfloat16())
    assert state["nested"] == {"step": 7, "name": "é", "list": [torch.tensor(2.5), 1]}


class Seen(pickle.Unpickler):
    """Notes what was pickled of the properties of tensors."""

    properties: list[tuple[Any, ...]]

    def find_class(self, module: str, name: str) -> Any:
        if name != "TensorProperties":
            return super().find_class(module, name)
        self.properties = []
        return type(name, (), {"__setstate__": lambda _, state: self.properties.append(state)})


def test_what_is_drained_has_the_properties_that_every_version_reads() -> None:
    entry = Entry("w", "tensor", "float32", (2, 3), (0, 0), (2, 3), 0, 24)
    seen = Seen(io.BytesIO(metadata([Contents("__0_0.distcp", [entry], [], [(0, 500)])], {"w": ("w",)})))
    seen.load()
    assert [len(state) for state in seen.properties] == [5] and seen.properties[0][0] is torch.float32


# Pickles and archives that are made without PyTorch


DTYPES = [name for name in TORCH_ITEM_NBYTES if hasattr(torch, name) and not name.startswith("bits")]
SHAPES: list[tuple[int, ...]] = [(), (0,), (3,), (2, 0, 3), (2, 3), (1, 2, 3, 4)]
plain = st.recursive(st.none() | st.booleans() | st.integers() | st.text(),
                     lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner) |
                     st.lists(inner).map(tuple), max_leaves=20)  # fmt: skip


@given(plain)
def test_plain_values_come_back(value: Any) -> None:
    assert pickle.loads(pickle_of(value)) == value


def test_many_texts_are_each_written_once() -> None:
    value = [str(number) for number in range(700)] * 2
    assert pickle.loads(pickle_of(value)) == value
    assert pickle_of(value).count(b"X\x03\x00\x00\x00699") == 1


def test_classes_functions_and_instances_come_back_by_their_names() -> None:
    counter, fraction = Global("collections", "Counter"), Global("fractions", "Fraction")
    assert pickle.loads(pickle_of([counter, Call(fraction, (1, 2)), Call(counter, ({"a": 2},))])) == [
        pickle.loads(b"ccollections\nCounter\n."), pickle.loads(pickle.dumps(__import__("fractions").Fraction(1, 2))),
        {"a": 2}]  # fmt: skip
    made = pickle.loads(pickle_of(Instance(Global("types", "SimpleNamespace"), {"x": 1})))
    assert made.x == 1
    with pytest.raises(TypeError, match="object"):
        pickle_of(object())


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tensor_has_the_pickle_of_torch_save_and_loads(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    tensor = torch.arange(torch.Size(shape).numel() * TORCH_ITEM_NBYTES[dtype], dtype=torch.uint8) % 2
    tensor = (tensor if tensor.numel() else torch.empty(0, dtype=torch.uint8)).view(getattr(torch, dtype)).view(shape)
    raw = io.BytesIO()
    torch.save(tensor, raw)
    of_torch = zipfile.ZipFile(raw).read("archive/data.pkl")
    assert pickletools.optimize(tensor_pickle(dtype, shape)) == pickletools.optimize(of_torch)
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
    assert torch.load(io.BytesIO(archive_of(pickle.dumps(value, 2)))) == value


def test_nothing_of_it_imports_torch() -> None:
    program = "import sys; from mlflash.storage import dcp_files; dcp_files.around_tensor('float32', (2,)); "
    subprocess.run([sys.executable, "-c", f"{program} assert 'torch' not in sys.modules"], check=True,
                   timeout=PATIENCE_S)  # fmt: skip
