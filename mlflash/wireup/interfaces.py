"""Chooses the network interfaces of couriers, from MLFLASH_INTERFACE or else from the variables of NCCL or gloo.

The form is that of NCCL_SOCKET_IFNAME: names or beginnings of names, separated by commas (``eth,ib``); ``=`` before
whole names; ``^`` before names to exclude (``^docker,veth``; ``^=docker0``). GLOO_SOCKET_IFNAME has whole names.


Source: NVIDIA's documentation of NCCL's environment variables; libfabric's fi_tcp(7); UCX's ucx_info -f.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import WorldMismatch

OWN = "MLFLASH_INTERFACE"
_SIOCGIFADDR = 0x8915
_OF_FABRICS = ("/sys/class/infiniband", "/sys/class/cxi")  # EFA and Omni-Path are in the first


def chosen(environment: Mapping[str, str], names: Sequence[str] | None = None) -> list[str] | None:
    """The interfaces of this host to use; None if no variable names any.

    Args:
        environment: of the job.
        names: of the interfaces of this host; None: look them up.

    Raises:
        WorldMismatch: MLFLASH_INTERFACE is given, and this host has none of these interfaces.
    """
    names = [name for _, name in socket.if_nameindex()] if names is None else names
    for variable in (OWN, "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        said = environment.get(variable, "").strip()
        if not said:
            continue
        found = _matching(f"={said}" if variable.startswith("GLOO") else said, names)
        if not found and variable == OWN:
            raise WorldMismatch(
                f"{OWN} names no network interface of this host", expected=said[:80], found=", ".join(names)
            )
        return found or None
    return None


def _matching(said: str, names: Sequence[str]) -> list[str]:
    is_without = said.startswith("^")
    said = said.removeprefix("^")
    is_whole = said.startswith("=")
    words = [word.strip() for word in said.removeprefix("=").split(",") if word.strip()]
    meant = {name for name in names for word in words if name == word or (not is_whole and name.startswith(word))}
    return [name for name in names if (name in meant) != is_without and (name != "lo" or name in words)]


def addresses(name: str) -> list[str]:
    """The numeric addresses of an interface, IPv4 first, without link-local ones."""
    found = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        found.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            figures, *_, its = line.split()
            if its == name:
                found.append(str(ipaddress.IPv6Address(bytes.fromhex(figures))))
    return [address for address in found if not ipaddress.ip_address(address).is_link_local]


def for_mpi(environment: Mapping[str, str], fabrics: Sequence[str] = _OF_FABRICS) -> dict[str, str]:
    """The network variables that MPI's libraries need, without those that the user has set.

    On a host with an RDMA fabric they only concern libfabric's TCP, because UCX would otherwise not use the fabric. On
    a host without one they tell libfabric to use TCP, because its own choice does not work between hosts.

    Args:
        environment: of the job.
        fabrics: directories of Linux that are not empty if there is a fabric.

    Raises:
        WorldMismatch: see `chosen`.
    """
    has_fabric = any(Path(path).is_dir() and any(Path(path).iterdir()) for path in fabrics)
    told: dict[str, str] = {} if has_fabric else {"FI_PROVIDER": "tcp"}
    names = chosen(environment)
    if names is not None:
        told["FI_TCP_IFACE"] = names[0]
        told |= {} if has_fabric else {"UCX_NET_DEVICES": ",".join(names)}
    return {name: value for name, value in told.items() if name not in environment}
