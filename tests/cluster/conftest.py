"""Nodes for the tests of this folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from cluster.nodes import TOOLS, Nodes

HOSTS = ("host1", "host2", "host3", "host4")


@pytest.fixture(scope="session")
def may_make_nodes() -> None:
    """Whether this machine can have nodes: an unprivileged run skips, a machine that lacks a tool fails."""
    if os.geteuid() != 0:
        pytest.skip("needs root: nodes are made of namespaces")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    assert not missing, f"not installed: {', '.join(missing)} (packages hostname, iproute2, mount, util-linux)"


@pytest.fixture
def nodes(may_make_nodes: None) -> Iterator[Nodes]:
    """Four nodes of this test's own: host1 to host4."""
    with Nodes(HOSTS) as nodes:
        yield nodes
    assert not nodes.path.exists()
