"""Who a commit waits for, by what all ranks bring to its agreement; and when that is worth a word in the log."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from mlflash.telemetry.recorder import NUMBERS, PHASES, Late, Lateness, PhaseSample, Straggler, Stragglers, is_notable

USUAL = {"training": 0.5, "copy": 1.0, "deferred": 0.2, "checksums": 2.0, "transfer": 3.0}
FINE, LATE = Late(5, "copy", 0.01), Late(3, "copy", 2.0)


def heard_by_all(ranks: Sequence[Mapping[str, float]], generation: int = 7) -> list[Lateness | None]:
    """What each rank makes of what all of them bring; minimum of each number, as MPI takes it."""
    size = len(ranks)
    samples = [PhaseSample(rank, size, generation, took) for rank, took in enumerate(ranks)]
    brought = np.array([sample.numbers for sample in samples], dtype=np.int64)
    assert brought.shape == (size, NUMBERS)
    least = [int(number) for number in brought.min(axis=0)]
    return [sample.merge(least, lambda rank: f"n{rank}") for sample in samples]


def job(size: int, **late: tuple[int, float]) -> list[dict[str, float]]:
    """Ranks that differ by up to 10 ms, and for each phase one that takes longer by so many seconds."""
    dice = random.Random(size)
    ranks = [{phase: seconds + dice.uniform(0, 0.01) for phase, seconds in USUAL.items()} for _ in range(size)]
    for phase, (rank, seconds) in late.items():
        ranks[rank][phase] += seconds
    return ranks


@pytest.mark.parametrize("phase", ["copy", "deferred", "checksums", "transfer"])
@pytest.mark.parametrize("size", [2, 3, 4, 200])
def test_all_ranks_know_who_is_late_in_which_phase_and_by_how_much(size: int, phase: str) -> None:
    for generation in range(2 if size > 4 else 20):
        found = heard_by_all(job(size, **{phase: (1, 1.5)}), generation)
        for rank, one in enumerate(found):
            assert one is not None and one.slowest[:2] == (1, phase) and one.node == "n1"
            assert one.slowest.seconds == pytest.approx(1.5, abs=0.05)
            assert one.own.rank == rank
            assert one.own.seconds == pytest.approx(1.5 if rank == 1 else 0.0, abs=0.05)


def told(commits: Sequence[Late], commit_s: float = 3.0) -> list[Straggler | None]:
    stragglers = Stragglers()
    return [stragglers.add(late, commit_s) for late in commits]


def test_a_straggler_is_told_of_once_when_it_has_been_late_again_and_again() -> None:
    found = told([LATE, FINE, LATE, LATE._replace(seconds=8.0), *[LATE] * 100])
    assert [at for at, one in enumerate(found) if one is not None] == [3]
    assert found[3] == Straggler(LATE, 3, 4)


def test_the_noise_of_saves_is_not_told_of() -> None:
    dice = random.Random(1)
    noise = [Late(dice.randrange(64), dice.choice([*PHASES]), dice.expovariate(1 / 0.5)) for _ in range(1000)]
    assert not any(told(noise))
    assert not any(told([LATE, FINE, FINE, FINE, FINE, FINE] * 50)), "late now and then"
    assert not any(told([Late(3, "copy", 0.2)] * 50, 0.3)), "too short to matter"
    assert not any(told([LATE] * 50, 20.0)), "a small part of a long commit"
    assert is_notable(0.25, 1.25) and not is_notable(0.25, 1.26) and not is_notable(0.24, 0.3)
