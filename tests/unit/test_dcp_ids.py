"""Which steps checkpoint ids mean."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch.distributed.checkpoint")

from mlflash.adapters.dcp import MemoryReader, MemoryWriter, step_of
from mlflash.errors import StepNotFound


@pytest.mark.parametrize(
    ("name", "step"),
    [(12, 12), (0, 0), ("12", 12), ("step-00000012", 12), ("/path/to/step-12", 12), ("/path/to/step-12/", 12),
     (Path("a/epoch=3-step=70"), 70), ("run7/ckpt_9", 9), ("checkpoint-0", 0)],
)  # fmt: skip
def test_an_id_ends_with_the_number_of_its_step(name: object, step: int) -> None:
    assert step_of(name) == step
    assert MemoryWriter.validate_checkpoint_id(name) and MemoryReader.validate_checkpoint_id(name)


@pytest.mark.parametrize("name", ["", "newest", "step-12.pt", "12a", "run7/best", "/", "step-1234567890123456789"])
def test_other_ids_are_refused(name: str) -> None:
    with pytest.raises(StepNotFound, match="end with the number"):
        step_of(name)
    assert not MemoryWriter.validate_checkpoint_id(name) and not MemoryReader.validate_checkpoint_id(name)
