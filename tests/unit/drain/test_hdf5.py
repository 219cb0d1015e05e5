"""Drained files in HDF5, as programs read them that know nothing of mlflash; and files with holes for tensors."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlflash import Checkpointer
from mlflash.drain import hdf5_format
from mlflash.drain.index import CARD_NBYTES
from mlflash.state.leaves import TORCH_ITEM_NBYTES, Entry, array_entry, live_bytes, tensor_entry
from mlflash.storage.file_holes import FileWithHoles, Source
from mlflash.storage.store import Directory

MIB = 1 << 20


TORCH_DTYPES = [name for name in TORCH_ITEM_NBYTES if hasattr(torch, name)]
# bits8 and the like can hardly be made in PyTorch.
MAKEABLE = [name for name in TORCH_DTYPES if not name.startswith("bits")]
NUMPY_DTYPES = ["|b1", "<i2", ">f8", "<f2", "<c8", "<U3", "|S5", "<M8[ns]", "<m8[s]", "<f16", "|u1", ">u4", "<c32"]
RAW = {"complex32", "bcomplex32", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
       "float4_e2m1fn_x2"}  # fmt: skip
ODD = ["a/b", "a", ".", "..", "", "%", "%2E", "%2F", "a%b", "s~%b%d", "é→\U0001f680", "nul\0in", " ", "x" * 10_000,
       "a.b", "\\", "'\"", "mlflash", "/", "//"]  # fmt: skip


def pieces_of(values: Mapping[str, Any]) -> tuple[list[Entry], list[Source]]:
    """Entries of live tensors, and their bytes."""
    entries = [
        (array_entry(value, name) if isinstance(value, np.ndarray) else tensor_entry(torch, value, name))[1]
        for name, value in values.items()
    ]
    return entries, [lambda value=value: live_bytes(value) for value in values.values()]


def write(path: Path, skeleton: FileWithHoles) -> None:
    Directory(str(path.parent)).write(path.name, skeleton.stream(MIB))
    skeleton.close()


def written(path: Path, values: Mapping[str, Any], ties: Mapping[str, str] | None = None, objects: Any = None
            ) -> tuple[list[Entry], list[int]]:  # fmt: skip
    entries, sources = pieces_of(values)
    skeleton, starts = hdf5_format.tensors(entries, sources, ties or {}, objects)
    hdf5_format.add_index(skeleton, b"index")
    skeleton.patch(0, b"a card".ljust(CARD_NBYTES))
    write(path, skeleton)
    return entries, starts


def elsewhere(program: str, *arguments: object) -> None:
    """Run a program in a process that has no mlflash."""
    program = f"import sys\nsys.modules['mlflash'] = None\nimport h5py, numpy as np\n{program}"
    subprocess.run([sys.executable, "-W", "error", "-c", program, *map(str, arguments)], check=True, timeout=60)


READER = """
import pickle
found = {}
with h5py.File(sys.argv[1]) as file:
    for name, dataset in file["tensors"].items():
        attrs = dataset.attrs
        found[name] = (dataset[...], attrs["dtype"], "raw" in attrs, tuple(attrs["global_shape"]))
    found["*objects"] = file["objects"][()]
with open(sys.argv[2], "wb") as out:
    pickle.dump(found, out)
"""


def read_elsewhere(path: Path, tmp_path: Path) -> dict[str, Any]:
    """What plain h5py finds in a file: by name value, dtype, whether it is raw, global shape."""
    import pickle

    elsewhere(READER, path, tmp_path / "found")
    return pickle.loads((tmp_path / "found").read_bytes())


def random_tensor(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    nbytes = math.prod(shape) * TORCH_ITEM_NBYTES[dtype]
    raw = np.random.default_rng(7).integers(0, 2 if dtype == "bool" else 256, nbytes, dtype=np.uint8)
    return torch.from_numpy(raw).view(getattr(torch, dtype)).reshape(shape)


def test_every_dtype_of_pytorch_is_stored_and_read_as_what_it_is_or_marked_as_raw(tmp_path: Path) -> None:
    values = {name: random_tensor(name, (3, 4)) for name in MAKEABLE}
    entries, starts = written(tmp_path / "rank.h5", values)
    content = (tmp_path / "rank.h5").read_bytes()
    datasets = read_elsewhere(tmp_path / "rank.h5", tmp_path)
    for entry, start in zip(entries, starts, strict=True):
        value, (read, dtype, raw, shape) = values[entry.name], datasets[entry.name]
        bits = live_bytes(value).tobytes()
        assert content[start : start + entry.nbytes] == bits, "the bytes of the slot, unchanged"
        assert (dtype, raw, shape) == (entry.name, entry.name in RAW, (3, 4))
        if raw:
            assert read.tobytes() == bits and read.dtype == np.uint8
        elif entry.name in ("bfloat16", "float8_e5m2"):
            np.testing.assert_array_equal(read, value.float().numpy())
        else:
            assert read.tobytes() == bits and read.dtype == value.numpy().dtype


def test_every_dtype_of_numpy_is_stored_and_read_as_what_it_is_or_marked_as_raw(tmp_path: Path) -> None:
    values = {}
    for name in NUMPY_DTYPES:
        nbytes = 6 * np.dtype(name).itemsize
        raw = np.random.default_rng(1).integers(1, 2 if name in ("|b1", "<U3") else 256, nbytes, dtype=np.uint8)
        values[name] = np.frombuffer(raw.tobytes(), dtype=name).reshape(2, 3)
    values["<U3"] = np.array([["é", "", "abc"], ["\U0001f680", "x", "yz"]])
    written(tmp_path / "rank.h5", values)
    datasets = read_elsewhere(tmp_path / "rank.h5", tmp_path)
    for name, value in values.items():
        read, dtype, raw, _ = datasets[name]
        assert dtype == name
        assert raw == (value.dtype.kind in "UmM" or (value.dtype.kind == "c" and value.dtype.itemsize > 16)), name
        if raw:
            assert read.tobytes() == value.tobytes()
        else:  # h5py may give the machine's order of bytes
            assert read.dtype == value.dtype.newbyteorder("=") or read.dtype == value.dtype
            assert read.astype(value.dtype).tobytes() == value.tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2"])
def test_every_bit_pattern_of_bfloat16_and_e5m2_is_the_number_that_pytorch_takes_it_for(
    tmp_path: Path, dtype: str
) -> None:
    patterns = np.arange(65_536, dtype="<u2") if dtype == "bfloat16" else np.arange(256, dtype=np.uint8)
    tensor = torch.from_numpy(patterns.view(np.uint8).copy()).view(getattr(torch, dtype))
    written(tmp_path / "rank.h5", {"x": tensor})
    read, wanted = read_elsewhere(tmp_path / "rank.h5", tmp_path)["x"][0], tensor.float().numpy()
    assert np.isnan(read).tolist() == np.isnan(wanted).tolist()
    good = ~np.isnan(wanted)
    assert read[good].astype("<f4").tobytes() == wanted[good].tobytes(), "signs of zero, subnormals, infinities"


def test_odd_names_are_kept_apart_and_can_be_told_from_the_names_in_the_file(tmp_path: Path) -> None:
    values = {name: np.full(3, n) for n, name in enumerate(ODD)}
    written(tmp_path / "rank.h5", values)
    names = [hdf5_format.dataset_name(name) for name in ODD]
    assert len(set(names)) == len(ODD) and not any("/" in name for name in names)
    datasets = read_elsewhere(tmp_path / "rank.h5", tmp_path)
    assert {name: datasets[name][0].tolist() for name in names} == {name: [n] * 3 for n, name in enumerate(names)}


@given(one=st.text(max_size=8), other=st.text(max_size=8))
def test_different_names_are_different_in_the_file(one: str, other: str) -> None:
    assert (hdf5_format.dataset_name(one) == hdf5_format.dataset_name(other)) == (one == other)


def test_scalars_and_empty_tensors_keep_their_shapes(tmp_path: Path) -> None:
    values = {
        "scalar": torch.tensor(2.5), "none": torch.zeros(0), "rows": torch.zeros(0, 7), "columns": torch.zeros(3, 0),
        "raw scalar": torch.tensor(3).to(torch.float8_e4m3fn), "raw none": torch.zeros(0, 2).to(torch.float8_e4m3fn),
        "number": np.array(7), "words": np.zeros(0, dtype="<U3"),
    }  # fmt: skip
    written(tmp_path / "rank.h5", values)
    datasets = read_elsewhere(tmp_path / "rank.h5", tmp_path)
    for name, value in values.items():
        read, _, raw, shape = datasets[name]
        assert shape == tuple(value.shape)
        assert raw or read.shape == shape, name
    assert (datasets["scalar"][0], datasets["number"][0], datasets["raw scalar"][0]) == (2.5, 7, 68)


def test_tied_tensors_are_hard_links_and_objects_are_json(tmp_path: Path) -> None:
    ties = {"b/c": "a", "d": "a"}
    written(tmp_path / "rank.h5", {"a": np.arange(1000)}, ties, {"lr": 0.1, "w": {"$tensor": "a"}})
    elsewhere(
        "import json\nfile = h5py.File(sys.argv[1])\ntensors = file['tensors']\n"
        "assert tensors['a'] == tensors['b%2Fc'] == tensors['d'] and h5py.h5o.get_info(tensors['a'].id).rc == 3\n"
        "assert tensors.get('d', getlink=True).__class__ is h5py.HardLink\n"
        "assert json.loads(file['objects'][()]) == {'lr': 0.1, 'w': {'$tensor': 'a'}}\nfile.close()",
        tmp_path / "rank.h5",
    )
    assert (tmp_path / "rank.h5").stat().st_size < 2 * 8000


@pytest.mark.parametrize("most", [1, 2])
def test_a_master_that_would_list_too_many_pieces_shows_none_and_all_comes_back(
    shm: Path, tmp_path: Path, in_couriers: Callable[[str], None], most: int
) -> None:
    in_couriers(f"from mlflash.drain.hdf5_format import Hdf5; Hdf5.most_pieces = {most}")
    state, blank = ({name: np.full(1000, value) for name, value in zip("ab", values, strict=True)}
                    for values in ((1.0, 2.0), (0.0, 0.0)))  # fmt: skip
    options: dict[str, Any] = {"job": "t", "directory": tmp_path / "pfs", "redundancy": "none", "format": "hdf5"}
    with Checkpointer(memory=str(shm), **options) as ckpt:
        ckpt.save(7, state).wait()
        ckpt.drain().wait()
    shutil.rmtree(shm / "t", ignore_errors=True)
    (shm / "other").mkdir()
    with Checkpointer(memory=str(shm / "other"), **options) as ckpt:
        assert ckpt.restore(blank) == 7 and all(np.array_equal(blank[name], state[name]) for name in "ab")
    elsewhere(
        "with h5py.File(sys.argv[1]) as file:\n"
        f"    assert sorted(file['tensors']) == {['a', 'b'] if most == 2 else []}\n"
        "    assert sorted(file['ranks/00000']) == ['a', 'b'] and file['ranks/00000/b'][999] == 2.0",
        tmp_path / "pfs" / "step-00000007" / "checkpoint.h5",
    )


# Files with holes


@settings(max_examples=50, deadline=None)
@given(
    parts=st.lists(st.tuples(st.binary(max_size=40), st.binary(max_size=200)), max_size=5),
    chunk=st.sampled_from([1, 7, 64, 5000]),
)
def test_the_stream_is_the_file(parts: list[tuple[bytes, bytes]], chunk: int) -> None:
    skeleton, wanted = FileWithHoles(), bytearray()
    for content, hole in parts:
        skeleton.file.seek(len(wanted))
        skeleton.file.write(content)
        wanted += content
        skeleton.place(len(wanted), len(hole), lambda hole=hole: np.frombuffer(hole, dtype=np.uint8))
        wanted += hole
    pieces = [bytes(piece) for piece in skeleton.stream(chunk)]
    assert b"".join(pieces) == wanted and skeleton.nbytes == len(wanted)
    assert all(0 < len(piece) <= chunk for piece in pieces)
    assert b"".join(skeleton.stream(chunk)) == wanted, "as often as one likes"
    skeleton.close()
    skeleton.close()
