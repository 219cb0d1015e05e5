"""The places where the two ranks run (this host, or two nodes made of namespaces), and the software fabrics."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from bench import two_nodes as nodes_apart
from bench.launch import Lines, launch

Launch = Callable[[Path, list[str], float], tuple[str, Lines]]
"""Runs a script on two ranks, with arguments and a limit in seconds. Before these arguments the ranks get a file for
lines of JSON and a directory in memory. Returns what went wrong ("" if nothing did) and the lines."""
Places = dict[str, Callable[[], contextlib.AbstractContextManager[Launch]]]
"""Functions that open a place, by name."""

_UCX = {"MPIR_CVAR_NOLOCAL": "1", "MPIR_CVAR_CH4_NETMOD": "ucx"}
_OFI = {"MPIR_CVAR_NOLOCAL": "1", "MPIR_CVAR_CH4_NETMOD": "ofi"}
# The ways of UCX and libfabric to send without a network card, by name. MPICH uses its network for all messages. The
# first one is like RDMA: only its Put needs no call at its target, because the kernel copies between the processes.
_ON_ONE_HOST = {
    "UCX cma": {**_UCX, "UCX_TLS": "posix,cma,self"},
    "UCX posix": {**_UCX, "UCX_TLS": "posix,self"},
    "UCX tcp": {**_UCX, "UCX_TLS": "tcp,self"},
    "libfabric shm": {**_OFI, "FI_PROVIDER": "shm"},
    "libfabric tcp": {**_OFI, "FI_PROVIDER": "tcp"},
    "libfabric sockets": {**_OFI, "FI_PROVIDER": "sockets"},
    "libfabric udp": {**_OFI, "FI_PROVIDER": "udp;ofi_rxd"},
}
_BETWEEN_NODES = {"libfabric sockets": {**_OFI, "FI_PROVIDER": "sockets"}}


def places() -> Places:
    """Return the places of this machine, with the default settings of this MPI."""
    found: Places = {"one host": lambda: _one_host_over({})}
    if not nodes_apart.why_not_here():
        for name, environment in nodes_apart.NETWORKS.items():
            found[f"two nodes, {name}"] = _two_nodes_over(environment)
    return found


def fabrics() -> Places:
    """Return the software fabrics that replace hardware ones, on one host and between nodes. Only MPICH has them."""
    if "ucx" not in nodes_apart.NETWORKS:
        return {}
    found: Places = {}
    for name, environment in _ON_ONE_HOST.items():
        found[f"one host, {name}"] = lambda environment=environment: _one_host_over(environment)  # type: ignore[misc]
    if not nodes_apart.why_not_here():
        for name, environment in _BETWEEN_NODES.items():
            found[f"two nodes, {name}"] = _two_nodes_over(environment)
    return found


def _one_host_over(environment: Mapping[str, str]) -> contextlib.AbstractContextManager[Launch]:
    return contextlib.nullcontext(
        lambda script, arguments, timeout_s: launch(2, script, arguments, timeout_s, environment=environment)
    )


def _two_nodes_over(environment: Mapping[str, str]) -> Callable[[], contextlib.AbstractContextManager[Launch]]:
    @contextlib.contextmanager
    def two_nodes() -> Iterator[Launch]:
        with nodes_apart.Nodes(nodes_apart.HOSTS, shm="4g") as nodes:

            def launch_on_nodes(script: Path, arguments: list[str], timeout_s: float) -> tuple[str, Lines]:
                try:
                    return nodes_apart.launch_on(nodes, script, arguments, timeout_s, environment)
                finally:
                    for name in nodes_apart.HOSTS:
                        nodes.run(name, "find", "/dev/shm", "-mindepth", "1", "-delete")

            yield launch_on_nodes

    return two_nodes
