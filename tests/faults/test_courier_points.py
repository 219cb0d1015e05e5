"""What test_crash_points.py asks, where couriers are processes: of these each may die alone, as may its trainer.

A trainer that dies alone leaves to its courier what it has handed over; a courier that dies alone costs a save, and
training goes on. The relaunch comes at once, and may meet couriers that are still at what dead trainers have left.
"""

from __future__ import annotations

from pathlib import Path

import needs
import pytest
from faults.test_crash_points import Case, cases, crash_and_relaunch

pytestmark = needs.PMI_1


@pytest.mark.parametrize("case", cases("process"), ids=str)
def test_the_relaunch_restores_exactly_what_it_must_whoever_dies(
    shm: Path, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    monkeypatch.setenv("MLFLASH_COURIER", "process")
    crash_and_relaunch(shm, case)
