"""Megatron-LM's own training, from the shipped template, loses a node of a real Slurm and ends with the same losses."""

from __future__ import annotations

import pytest
from cluster.slurm.daemons import Slurm
from cluster.slurm.trained import Losses, Training, uninterrupted
from harness import SUPPORT

LAST = 40
SCRIPT = SUPPORT / "megatron_pretrain.py"
FLAGS = f"--use-distributed-optimizer --global-batch-size 4 --exit-interval {LAST}"
NAMES = ("loss", "norm")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    return uninterrupted(tmp_path_factory.mktemp("uninterrupted"), NAMES, LAST, SCRIPT, *FLAGS.split())


@pytest.mark.timeout(300)
def test_megatron_loses_a_node_and_goes_on_with_a_spare(slurm: Slurm, expected: Losses) -> None:
    # The template says 20; what is said last holds.
    words = [*FLAGS.split(), "--non-persistent-save-interval", "2"]
    Training(slurm, "megatron", SCRIPT, words, NAMES).loses_a_node_and_ends_as(expected)
