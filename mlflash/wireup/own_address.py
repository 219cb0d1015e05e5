"""The address at which other hosts reach this one."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator, Mapping

from .interfaces import OWN, addresses, chosen

_LOOPBACK = "127.0.0.1"
_ELSEWHERE = ("198.51.100.1", "2001:db8::1")  # addresses for documentation; nothing is sent there


def own_address(one_host: bool, environment: Mapping[str, str]) -> str:
    """Choose the numeric address at which all ranks reach this host.

    If all ranks are on this host, it is loopback. Otherwise it is the first of these that is an address of this host
    and not loopback: that of the interfaces to use (`interfaces`); the address of MASTER_ADDR, which usually is the
    host of rank 0; the address from which this host reaches MASTER_ADDR; the address of its own host name; the address
    from which it reaches the rest of the world; that of any of its interfaces. If there is none, it is loopback.

    Args:
        one_host: whether all ranks are known to be on this host.
        environment: of the job.

    Raises:
        WorldMismatch: MLFLASH_INTERFACE names no interface of this host.
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
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(address[0]) for *_, address in found]


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
