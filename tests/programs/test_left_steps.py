"""Steps that are left at a collective, as where a rank is lost: what goes on in the same objects afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_S

torch_distributed = pytest.importorskip("torch.distributed")

_LIMIT_S = 3 * PATIENCE_S  # 20 trainings of two ranks, beside ranks of Open MPI that spin
PROGRAM = Path(__file__).with_name("left_step_rank.py")


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("DDP", 2),
        ("FSDP2", 2),
        ("FSDP2 in parts", 2),
        ("HSDP", 4),
        ("TP", 2),
        ("DDP compiled", 2),
        ("FSDP2 compiled", 2),
        ("TP compiled", 2),
    ],
)
def test_a_step_that_is_left_at_any_collective_is_done_again_with_the_same_bits(kind: str, ranks: int) -> None:
    store = torch_distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    started = [subprocess.Popen([sys.executable, str(PROGRAM), str(rank), str(ranks), kind, str(store.port)],
                                env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True)
               for rank in range(ranks)]  # fmt: skip
    try:
        said = [json.loads(process.communicate(timeout=_LIMIT_S)[0]) for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate(timeout=PATIENCE_S)
    for one in said:
        assert one["same"] == [True] * one["collectives"] and one["collectives"] >= 2, one
        assert one["opened"][-1] == one["opened"][1], "descriptors and threads"
    last = said[-1]
    assert len(last["raised"]) == last["collectives"], "which drops its connections"
    print(kind, [round(1e3 * max(one["took"])) for one in said], "ms at most")
