"""Pickles that older builds wrote: NumPy's values, files in memory and dtypes as pickle itself says them."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mlflash.adapters.pickles import dump, load
from mlflash.errors import CorruptSlot

GOLDEN = Path(__file__).with_name("golden-pickle-older.bin")
"""Written by `pickles.dump` of the commit before 5508150, with Python 3.11 and NumPy 2."""


def test_what_an_older_build_has_written_comes_back() -> None:
    back = load(GOLDEN.read_bytes(), [torch.ones(2)])
    args = back["args"]
    assert (args.params_dtype, args.layout, args.lr, args.seed) == (torch.bfloat16, torch.strided, 1e-4, 7)
    expected: dict[str, Any] = {
        "numbers": np.arange(6, dtype=">i2").reshape(2, 3), "fortran": np.arange(4.0).reshape(2, 2),
        "text": np.array(["a", "bc"]), "objects": np.array([1, "a", None, [2]], dtype=object).reshape(2, 2),
        "none": np.zeros((0, 3), dtype=bool),
    }  # fmt: skip
    for name, array in expected.items():
        assert np.array_equal(back[name], array) and back[name].dtype == array.dtype.newbyteorder("="), name
        assert back[name].shape == array.shape and back[name].flags.writeable, name
    assert back["scalars"] == [1.5, True, "x"]
    assert [type(one) for one in back["scalars"]] == [np.float32, np.bool_, np.str_]
    assert back["dtype"] == np.dtype("<i4") and back["random"][1].tolist() == [0, 1, 2]
    assert back["extra"].getvalue() == b"fp8" and back["extra"].tell() == 2
    assert isinstance(back["weight"], torch.nn.Parameter) and not back["weight"].requires_grad
    assert back["twice"] is back["numbers"]
    again = load(dump(back)[0], [torch.ones(2)])
    assert again["objects"].tolist() == expected["objects"].tolist(), "and is written as today"


class Made:
    """Pickled as something made of a function and a state."""

    def __init__(self, *reduced: Any):
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


EMPTY = (np.zeros(0).__reduce__()[0], (np.ndarray, (0,), b"b"))
RAW = np.dtype("i4")
FIELDS = (3, "<", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 27)


@pytest.mark.parametrize(
    "value",
    [
        Made(*EMPTY, (1, (1000,), RAW, False, b"short")),
        Made(*EMPTY, (1, (-1,), RAW, False, b"")),
        Made(*EMPTY, (1, (2,), np.dtype(object), False, [1])),
        Made(*EMPTY, (1, (1,), np.dtype(object), False, b"12345678")),
        Made(*EMPTY, (1, (1,), np.dtype("V8"), False, [1])),
        Made(EMPTY[0], (np.ndarray, (5,), b"b")),
        Made(np.dtype, ("V8", False, True), FIELDS),
        Made(np.dtype, ("i4", False, True), (3, "<", None, None, None, 4000, -1, 0)),
        Made(np.dtype, ("i4", False, True), (3, "<", None, None, None, -1, -1, 63)),
        Made(np.dtype, ("i4,O", False, True)),
        Made(io.BytesIO, (), (b"", 0, {"read": 1})),
        torch.save, np.load, np.dtype([("a", "O")]),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_no_build_has_written_is_refused(value: Any) -> None:
    with pytest.raises(CorruptSlot):
        load(pickle.dumps(value, 4), [])
