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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..errors import WorldMismatch

OWN = "MLFLASH_INTERFACE"
_SIOCGIFADDR = 0x8915
_OF_FABRICS = ("/sys/class/infiniband", "/sys/class/cxi")  # EFA and Omni-Path are in the first


def chosen(environment: Mapping[str, str], names: Sequence[str] | None = None) -> list[str] | None:
    """The interfaces of this host to use, among ``names`` or all; None if no variable names any.

    Raises WorldMismatch: MLFLASH_INTERFACE is given, and this host has none of these interfaces.
    """
    names = [name for _, name in socket.if_nameindex()] if names is None else names
    for variable in (OWN, "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = environment.get(variable, "").strip()
        if not value:
            continue
        matching = _matching(f"={value}" if variable.startswith("GLOO") else value, names)
        if not matching and variable == OWN:
            raise WorldMismatch(
                f"{OWN} names no network interface of this host", expected=value[:80], found=", ".join(names)
            )
        return matching or None
    return None


def _matching(pattern: str, names: Sequence[str]) -> list[str]:
    is_without = pattern.startswith("^")
    pattern = pattern.removeprefix("^")
    is_whole = pattern.startswith("=")
    words = [word.strip() for word in pattern.removeprefix("=").split(",") if word.strip()]
    meant = {name for name in names for word in words if name == word or (not is_whole and name.startswith(word))}
    return [name for name in names if (name in meant) != is_without and (name != "lo" or name in words)]


def addresses(name: str) -> list[str]:
    """The numeric addresses of an interface, IPv4 first, without link-local ones."""
    numeric = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        numeric.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            figures, *_, interface = line.split()
            if interface == name:
                numeric.append(str(ipaddress.IPv6Address(bytes.fromhex(figures))))
    return [address for address in numeric if not ipaddress.ip_address(address).is_link_local]


def for_mpi(environment: Mapping[str, str], fabrics: Sequence[str] = _OF_FABRICS) -> dict[str, str]:
    """The network variables that MPI's libraries need, without those that the user has set.

    On a host with an RDMA fabric they only concern libfabric's TCP, because UCX would otherwise not use the fabric. On
    a host without one they tell libfabric to use TCP, because its own choice does not work between hosts. Raises
    WorldMismatch as `chosen` does.
    """
    has_fabric = any(Path(path).is_dir() and any(Path(path).iterdir()) for path in fabrics)
    variables: dict[str, str] = {} if has_fabric else {"FI_PROVIDER": "tcp"}
    names = chosen(environment)
    if names is not None:
        variables["FI_TCP_IFACE"] = names[0]
        variables |= {} if has_fabric else {"UCX_NET_DEVICES": ",".join(names)}
    return {name: value for name, value in variables.items() if name not in environment}


_LOOPBACK = "127.0.0.1"
_ELSEWHERE = ("198.51.100.1", "2001:db8::1")  # addresses for documentation; nothing is sent there


def own_address(one_host: bool, environment: Mapping[str, str]) -> str:
    """Choose the numeric address at which all ranks reach this host.

    If all ranks are on this host, it is loopback. Otherwise it is the first of these that is an address of this host
    and not loopback: that of the interfaces to use (`chosen`); the address of MASTER_ADDR, which usually is the
    host of rank 0; the address from which this host reaches MASTER_ADDR; the address of its own host name; the address
    from which it reaches the rest of the world; that of any of its interfaces. If there is none, it is loopback.

    Raises WorldMismatch: MLFLASH_INTERFACE names no interface of this host.
    """
    if one_host:
        return _LOOPBACK
    return next(filter(_is_own, _candidates(environment)), _LOOPBACK)


def _candidates(environment: Mapping[str, str]) -> Iterator[str]:
    for name in chosen(environment) or ():
        yield from addresses(name)
    main_host = environment.get("MASTER_ADDR")
    if main_host:
        yield from _meanings(main_host)
        yield from speaking_to(main_host)
    yield from _meanings(socket.gethostname())
    for host in _ELSEWHERE:
        yield from speaking_to(host)
    for name in chosen({OWN: "^docker"}) or ():  # no route leads elsewhere, and no name means an address of this host
        yield from addresses(name)


def _meanings(host: str) -> list[str]:
    try:
        results = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(address[0]) for *_, address in results]


def speaking_to(host: str) -> list[str]:
    """The address from which this host reaches another one; [] if it cannot. Nothing is sent."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.connect(address)  # with UDP this only looks up the route
            return [str(sock.getsockname()[0])]
    except OSError:
        return []


def _is_own(address: str) -> bool:
    try:
        if ipaddress.ip_address(address).is_loopback or ipaddress.ip_address(address).is_link_local:
            return False
        socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET).close()
    except (OSError, ValueError):
        return False
    return True
