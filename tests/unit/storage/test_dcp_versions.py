"""Checkpoints of PyTorch DCP between versions: 2.15 has added a property of tensors that older ones cannot unpickle."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from mlflash.state.leaves import Entry
from mlflash.storage.dcp_files import Contents, metadata
from mlflash.tools.export_imports import read_dcp


@pytest.mark.parametrize("trust_pickle", [False, True])
def test_what_2_15_has_written_is_read(tmp_path: Path, trust_pickle: bool) -> None:
    with zipfile.ZipFile(Path(__file__).with_name("golden-dcp-2.15.zip")) as golden:
        golden.extractall(tmp_path)
    found = read_dcp(tmp_path, trust_pickle)
    assert torch.equal(found["w"], torch.tensor([[0.0, 3], [1, 4], [2, 5]]))
    assert torch.equal(found["half"], torch.arange(4).bfloat16())
    assert found["nested"] == {"step": 7, "name": "é", "list": [torch.tensor(2.5), 1]}


class Seen(pickle.Unpickler):
    """Notes what was pickled of the properties of tensors."""

    found: list[tuple[Any, ...]]

    def find_class(self, module: str, name: str) -> Any:
        if name != "TensorProperties":
            return super().find_class(module, name)
        self.found = []
        return type(name, (), {"__setstate__": lambda _, state: self.found.append(state)})


def test_what_is_drained_has_the_properties_that_every_version_reads() -> None:
    entry = Entry("w", "tensor", "float32", (2, 3), (0, 0), (2, 3), 0, 24)
    seen = Seen(io.BytesIO(metadata([Contents("__0_0.distcp", [entry], [], [(0, 500)])], {"w": ("w",)})))
    seen.load()
    assert [len(state) for state in seen.found] == [5] and seen.found[0][0] is torch.float32
