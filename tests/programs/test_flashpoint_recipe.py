"""The section "PyTorch DCP" of ML Flashpoint's guide; that on Megatron is in tests/faults/test_megatron.py."""

from __future__ import annotations

from pathlib import Path

import needs
import pytest
from flashpoint import assert_it_recovers


@needs.MPI
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_recipe_recovers_from_the_long_term_checkpoint_and_then_from_memory(shm: Path) -> None:
    assert_it_recovers(shm, "dcp", first=0)
