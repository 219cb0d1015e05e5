"""A real Megatron Core: its GPT trains, loses a node, and goes on from local checkpoints to the same bits."""

from __future__ import annotations

from typing import Any

import pytest
from emulated import Nodes
from megatron_on_cpu import Training, digest, on_cpu, whole_and_first
from torch_jobs import job

from mlflash.adapters.megatron import work_without_nvrx

pytestmark = [
    pytest.mark.mpi(min_size=4),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),  # its own
]


def aware(training: Training, algo: str) -> Any:
    """What Megatron gives its manager of local checkpoints."""
    from megatron.core.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict

    work_without_nvrx()
    return MCoreTensorAwareStateDict.from_state_dict(training.sharded_state(), algo, training.replicas)[0]


@pytest.mark.parametrize("algo", ["atomic", "fully_parallel"])
@pytest.mark.parametrize(("tensor", "sharded"), [(1, False), (1, True), (2, True)])
def test_training_goes_on_after_a_lost_node_as_if_nothing_had_happened(
    start: Any, nodes: Nodes, tensor: int, sharded: bool, algo: str
) -> None:
    with job(), on_cpu():
        expected, first = whole_and_first(tensor, sharded)
        with start() as manager:
            request = manager.save(aware(first, algo), 3, is_async=True)
            first.train(5)  # the checkpoint must not see this
            request.execute_sync()
    nodes.lose(1)
    with job(), on_cpu():
        again = Training(tensor, sharded)
        with start() as manager:
            assert manager.find_latest() == 3
            loaded, _ = manager.load()
            state = loaded.to_state_dict(again.sharded_state(True), algo, parallelization_group=again.replicas)
            again.load(state)
            again.train(6)
            assert (again.losses, digest(again)) == expected
