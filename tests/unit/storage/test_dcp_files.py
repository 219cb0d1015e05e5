"""What of a state is in a directory of PyTorch DCP, where DCP cannot hold all of it; and any state is drained so."""

from __future__ import annotations

import io
import pickle
import shutil
from pathlib import Path
from typing import Any

import needs
import pytest
import torch

from mlflash import Checkpointer
from mlflash.errors import StructureMismatch
from mlflash.state.leaves import Entry
from mlflash.storage.dcp_files import Contents, metadata

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
