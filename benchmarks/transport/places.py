"""Where the two ranks run: on this host, or on two nodes made of namespaces, each with a network of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from bench import two_nodes as nodes_apart
from bench.launch import Lines, launch

Launch = Callable[[Path, list[str], float], tuple[str, Lines]]
"""Runs a script with arguments (after a file for lines of JSON and a directory in memory) on two ranks, at most so
many seconds; returns what went wrong ("": nothing) and the lines."""


def places() -> dict[str, Callable[[], contextlib.AbstractContextManager[Launch]]]:
    """The places that there are on this machine, with this MPI, by name."""
    found: dict[str, Callable[[], contextlib.AbstractContextManager[Launch]]] = {"one host": _one_host}
    if not nodes_apart.why_not_here():
        for name, environment in nodes_apart.NETWORKS.items():
            found[f"two nodes, {name}"] = _two_nodes_over(environment)
    return found


def _one_host() -> contextlib.AbstractContextManager[Launch]:
    return contextlib.nullcontext(lambda script, arguments, timeout_s: launch(2, script, arguments, timeout_s))


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
