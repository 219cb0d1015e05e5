"""Format version 1 of drained checkpoints is read: 4 ranks of a model in 2 replicas, each in 2 shards, HDF5 and DCP."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mlflash.drain import checkpoint_directory
from mlflash.drain.checkpoint_directory import Listed
from mlflash.errors import CorruptSlot
from mlflash.mpi.world import World
from mlflash.placement.topology import this_node
from mlflash.restore.open_in_directory import OpenInDirectory
from mlflash.state.rebuild import materialize
from mlflash.storage.store import Directory

ALONE = World(None, this_node(), math.inf)
W = torch.arange(35, dtype=torch.float32).reshape(7, 5)


@pytest.fixture(params=["hdf5", "dcp"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with zipfile.ZipFile(Path(__file__).with_name("golden-drained-v1.zip")) as golden:
        golden.extractall(tmp_path)
    return tmp_path / str(request.param)


@pytest.fixture
def opened(folder: Path) -> Iterator[OpenInDirectory]:
    (listed,) = checkpoint_directory.list_checkpoints(Directory(str(folder)))
    checkpoint = OpenInDirectory(ALONE, Directory(str(folder)), listed)
    yield checkpoint
    checkpoint.close()


def state_of(opened: OpenInDirectory, rank: int) -> Any:
    manifest, read, wanted = opened.state(rank)
    assert opened.read(wanted), opened.damage
    return materialize(manifest.tree, manifest.entries, manifest.plain, read)


def test_each_rank_gets_its_state_back(opened: OpenInDirectory) -> None:
    opened.verify_together()
    for rank in range(4):
        state = state_of(opened, rank)
        rows, columns = ((0, 4), (4, 7))[rank % 2], ((0, 3), (3, 5))[rank % 2]
        assert torch.equal(state["model"]["w"], W[slice(*rows)])
        assert torch.equal(state["model"]["v"], W[:, slice(*columns)] + 100)
        assert state["tied"].dtype == torch.bfloat16 and state["tied"].tolist() == [0, 1, 2]
        assert state["again"].tolist() == [0, 1, 2] and state["scale"].item() == 2.5
        assert state["own"].tolist() == [rank] * 4 and np.array_equal(state["array"], np.arange(6).reshape(2, 3))
        assert state["empty"].shape == (0, 2)
        assert (state["epoch"], state["of rank"], state["name"]) == (3, rank, "golden")


def test_one_damaged_byte_of_any_file_is_found_or_does_not_matter(folder: Path) -> None:
    store = Directory(str(folder))
    (listed,) = checkpoint_directory.list_checkpoints(store)
    chance = np.random.default_rng(0)
    detected = 0
    for path in sorted((folder / listed.folder).iterdir()):
        good = path.read_bytes()
        for at in chance.integers(0, len(good), 4):
            path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
            listed_now = checkpoint_directory.list_checkpoints(store)
            state = rank_1_of(store, listed_now[0]) if listed_now else None
            detected += state is None
            if state is not None:
                assert torch.equal(state["model"]["w"], W[4:7]) and torch.equal(state["model"]["v"], W[:, 3:] + 100)
                assert state["own"].tolist() == [1] * 4 and (state["epoch"], state["of rank"]) == (3, 1)
        path.write_bytes(good)
    assert detected


def rank_1_of(store: Directory, listed: Listed) -> Any:
    """The state of a rank; None where a damage is noticed."""
    try:
        opened = OpenInDirectory(ALONE, store, listed)
        manifest, read, wanted = opened.state(1)
    except CorruptSlot:
        return None
    is_intact = opened.read(wanted)
    opened.close()
    return materialize(manifest.tree, manifest.entries, manifest.plain, read) if is_intact else None
