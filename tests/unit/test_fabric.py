"""What `transport="auto"` takes, by what lies between the nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlflash.mpi import fabric
from mlflash.mpi.world import World
from mlflash.placement.topology import Topology, this_node


def world_of(nodes: int, others_have_rdma: bool) -> World:
    """The world of the first rank, as far as a choice asks it; the others say whether they have RDMA."""
    world = World(None, this_node(), 1.0)
    world.size = nodes
    world.topology = Topology(tuple(range(nodes)), tuple(f"n{node}" for node in range(nodes)))
    world.least_of = lambda values, comm=None: [min(value, int(others_have_rdma)) for value in values]  # type: ignore
    return world


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this node lists its devices: none yet."""
    monkeypatch.setattr(fabric, "RDMA_DEVICES", (str(tmp_path / "infiniband"), str(tmp_path / "cxi")))
    (tmp_path / "cxi").mkdir()
    return tmp_path


@pytest.mark.parametrize("kind", ["infiniband", "cxi"])
def test_rma_is_taken_only_where_all_nodes_have_a_device(devices: Path, kind: str) -> None:
    assert not fabric.has_rdma()
    assert fabric.choose_transport(world_of(3, True), "auto") == "p2p", "this node has none"
    (devices / kind / "mlx5_0").mkdir(parents=True)
    assert fabric.has_rdma()
    assert fabric.choose_transport(world_of(3, True), "auto") == "rma"
    assert fabric.choose_transport(world_of(3, False), "auto") == "p2p", "another node has none"
    assert fabric.choose_transport(world_of(1, True), "auto") == "p2p", "nothing lies between the nodes"
    assert [fabric.choose_transport(world_of(3, False), asked) for asked in ("rma", "p2p")] == ["rma", "p2p"]
