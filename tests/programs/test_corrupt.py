"""The campaigns of `make corrupt`, in short: each class is caught as is claimed, and a clean training is no alarm."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import needs
from harness import TESTS
from processes import ran

from mlflash.run.processes import mpiexec

CAMPAIGNS = TESTS / "campaigns"


@needs.MPI
def test_each_class_of_faults_is_caught_before_its_step_is_certified_and_named(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    words = [sys.executable, str(CAMPAIGNS / "corrupt_campaign.py"), "--seed", "1", "--trials", "1", "--out", str(out)]
    command, environment = mpiexec(3, words, {"OMP_NUM_THREADS": "1"})
    ran(*command, env=environment)
    rows = json.loads(out.read_text())
    assert len(rows) == 9
    unseen = [row for row, count in rows.items() if not count.get("caught")]
    assert unseen == ["weight or moment of one shard: any other bit"], "which no check can see, and it is said so"


def test_a_training_that_nothing_happens_to_is_no_alarm() -> None:
    done = ran(sys.executable, CAMPAIGNS / "clean_campaign.py", "--steps", 40)
    assert done.stdout.count("40 of 40 steps saved, 0 called suspect") == 3
