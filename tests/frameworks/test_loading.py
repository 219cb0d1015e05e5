"""What goes wrong on one rank when a framework loads its objects from memory: each adapter raises it on all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from frameworks.test_contract import RANKS, losses, run
from harness import Cluster

MODEL, OPTIMIZER = "torch.nn.Module.load_state_dict", "torch.optim.Optimizer.load_state_dict"
WRAPPED = "accelerate.optimizer.AcceleratedOptimizer.load_state_dict"
LOADS = [
    ("lightning", "fsdp2", MODEL), ("lightning", "ddp", OPTIMIZER),
    ("transformers", "ddp", MODEL), ("transformers", "fsdp2", WRAPPED), ("deepspeed", "zero1", MODEL),
    ("torchtitan", "fsdp2", OPTIMIZER), ("nemo", "megatron", MODEL),
]  # fmt: skip


@pytest.mark.parametrize(("framework", "variant", "call"), LOADS)
def test_an_object_that_cannot_be_loaded_on_one_rank_ends_the_start_on_all(
    shm: Path, framework: str, variant: str, call: str
) -> None:
    common = {"job": "spoilt", "variant": variant}
    result = run(
        Cluster(shm), framework,
        {"name": "first", "last": 4, **common},
        {"name": "spoilt", "last": 6, "spoilt": call, **common},
        timeout=90,
    )  # fmt: skip
    assert len(result.of("done")) == 2 * RANKS and not losses(result, "spoilt"), result.log
    said = [record["error"] for record in result.of("refused")]
    assert len(said) == RANKS, result.log
    for error in said:
        assert error.startswith("StructureMismatch: loading failed: ") and "spoilt on purpose" in error, said
        assert "now undefined" in error and "rank 1" in error, said
