"""Which network interfaces are meant, and what MPI is told of them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from mlflash.errors import WorldMismatch
from mlflash.launch.interfaces import chosen, for_mpi

HERE = ["lo", "eth0", "eth1", "ib0", "docker0", "veth12"]


@pytest.mark.parametrize(
    ("variable", "said", "found"),
    [
        ("MLFLASH_INTERFACE", "ib0", ["ib0"]),
        ("MLFLASH_INTERFACE", "eth", ["eth0", "eth1"]),
        ("MLFLASH_INTERFACE", "ib, eth1", ["eth1", "ib0"]),
        ("MLFLASH_INTERFACE", "=eth", None),
        ("MLFLASH_INTERFACE", "=eth1", ["eth1"]),
        ("MLFLASH_INTERFACE", "^docker,veth", ["eth0", "eth1", "ib0"]),
        ("MLFLASH_INTERFACE", "^=eth0,docker0,veth12", ["eth1", "ib0"]),
        ("MLFLASH_INTERFACE", "lo", ["lo"]),
        ("MLFLASH_INTERFACE", "", []),
        ("NCCL_SOCKET_IFNAME", "eth,ib", ["eth0", "eth1", "ib0"]),
        ("NCCL_SOCKET_IFNAME", "wlan", []),
        ("GLOO_SOCKET_IFNAME", "eth0,ib0", ["eth0", "ib0"]),
        ("GLOO_SOCKET_IFNAME", "eth", []),
    ],
)
def test_interfaces_are_meant_as_nccl_and_gloo_mean_them(variable: str, said: str, found: list[str] | None) -> None:
    if found is None:
        with pytest.raises(WorldMismatch, match="MLFLASH_INTERFACE names no network interface of this host") as caught:
            chosen({variable: said}, HERE)
        assert caught.value.found == ", ".join(HERE)
    else:
        assert chosen({variable: said}, HERE) == (found or None)


def test_the_own_word_comes_before_that_for_others() -> None:
    said = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth1", "MLFLASH_INTERFACE": "ib"}
    assert chosen(said, HERE) == ["ib0"]
    assert chosen(said | {"MLFLASH_INTERFACE": ""}, HERE) == ["eth1"]
    assert chosen({"GLOO_SOCKET_IFNAME": "eth0"}, HERE) == ["eth0"] and chosen({}, HERE) is None


def test_mpi_is_told_what_the_user_has_not_told_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(HERE)))
    none, some = [str(tmp_path / "none"), str(tmp_path)], [str(tmp_path)]
    assert for_mpi({}, none) == {"FI_PROVIDER": "tcp"}
    assert for_mpi({"NCCL_SOCKET_IFNAME": "eth"}, none) == {
        "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "eth0", "UCX_NET_DEVICES": "eth0,eth1"}  # fmt: skip
    said = {"MLFLASH_INTERFACE": "ib0", "FI_PROVIDER": "verbs", "UCX_NET_DEVICES": "all"}
    assert for_mpi(said, none) == {"FI_TCP_IFACE": "ib0"}
    (tmp_path / "mlx5_0").mkdir()
    assert for_mpi({}, some) == {}, "a fabric with RDMA is left to find its way"
    assert for_mpi({"MLFLASH_INTERFACE": "eth1"}, some) == {"FI_TCP_IFACE": "eth1"}
