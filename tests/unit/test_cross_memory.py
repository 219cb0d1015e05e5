"""Whether ranks of a node can read each other's memory."""

from __future__ import annotations

import pytest

from mlflash.wireup.cross_memory import is_whole, settings


@pytest.mark.parametrize(
    ("nodes", "reaches", "whole"),
    [
        ([0, 0, 1, 1], ["1 2", "1 2", "3 4", "3 4"], True),
        ([0, 1, 0, 1], ["1 2", "3 4", "1 2", "3 4"], True),
        ([0, 0], ["1 2", "3 2"], False),
        ([0, 0, 1], ["1 2", "1 3", "1 2"], False),
        ([0, 0], ["", ""], False),
        ([0, 1], ["", "1 2"], True),
    ],
)
def test_ranks_of_a_node_need_the_same_namespaces(nodes: list[int], reaches: list[str], whole: bool) -> None:
    assert is_whole(nodes, reaches) is whole


def test_mpi_is_told_to_copy_through_shared_memory_but_not_against_its_user() -> None:
    assert settings(True, {}) == {}
    assert set(settings(False, {})) == {"MPIR_CVAR_CH4_CMA_ENABLE", "UCX_POSIX_USE_PROC_LINK"}
    assert "MPIR_CVAR_CH4_CMA_ENABLE" not in settings(False, {"MPIR_CVAR_CH4_CMA_ENABLE": "1"})
