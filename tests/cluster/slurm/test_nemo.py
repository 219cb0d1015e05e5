"""NeMo's training, from the shipped template, loses a node of a real Slurm and ends with the same losses."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster.slurm.daemons import Slurm
from cluster.slurm.trained import Losses, Training, uninterrupted

LAST = 60
SCRIPT = Path(__file__).with_name("nemo_pretrain.py")
NAMES = ("loss",)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    out = tmp_path_factory.mktemp("uninterrupted")
    return uninterrupted(out, NAMES, LAST, SCRIPT, "--log-dir", str(out), "--last", str(LAST))


@pytest.mark.timeout(300)
def test_nemo_loses_a_node_and_goes_on_with_a_spare(slurm: Slurm, expected: Losses) -> None:
    words = ["--log-dir", "$directory", "--flash", "$flash", "--last", str(LAST)]
    training = Training(slurm, "nemo", SCRIPT, words, NAMES)
    training.loses_a_node_and_ends_as(expected)
