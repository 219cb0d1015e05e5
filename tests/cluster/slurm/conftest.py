"""Slurm for the tests of this folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from cluster.nodes import Nodes
from cluster.slurm.daemons import TOOLS, Slurm


@pytest.fixture(scope="session")
def may_run_slurm(may_make_nodes: None) -> None:
    """Whether this machine can have a Slurm: one that lacks its programs skips."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs Slurm: no {', '.join(missing)} (packages slurm-wlm, munge)")


@pytest.fixture
def slurm(may_run_slurm: None, nodes: Nodes) -> Iterator[Slurm]:
    """Slurm on this test's own nodes host1 to host4, all idle; the head is the login node."""
    with Slurm(nodes) as slurm:
        yield slurm
    assert not slurm.path.exists()
