"""Which attempts are held, and which are certified: over any sequence of saves, restores and marks."""

from __future__ import annotations

import random

import pytest

from mlflash.commit.certification import Certification, Saved
from mlflash.memory.inventory import NEWEST, WantedStep
from mlflash.memory.slot import Attempt, Verdict


def saved(step: int) -> Saved:
    return Saved(Attempt(b"r" * 16, step), step)


def steps_of(held: frozenset[Attempt]) -> set[int]:
    return {attempt.generation for attempt in held}


def commit(certification: Certification, step: int, is_suspect: bool = False, is_good: bool = True) -> None:
    if certification.committed(saved(step), is_suspect, True) is not None:
        certification.tried(is_good)


def test_one_is_tried_at_a_time_for_as_many_steps_as_are_asked_for() -> None:
    certification, known = Certification(10, keeps=False), []
    for step in range(0, 60, 4):
        commit(certification, step)
        known.append(None if certification.certified is None else certification.certified.step)
    # 0 is tried from 4 on, and certified at 12; then 12 from 16 on, at 24.
    assert known == [*[None] * 3, *[0] * 3, *[12] * 3, *[24] * 3, *[36] * 3]


@pytest.mark.parametrize("after", [0, 1, 7])
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("history", [0, 3])
def test_there_is_always_a_slot_to_write_and_the_best_that_is_known_is_held(
    after: int, keeps: bool, history: int
) -> None:
    slots = 2 + (after > 0) + (after > 1) + history
    for seed in range(200):
        rng, certification, step = random.Random(seed), Certification(after, keeps, history), 0
        verdicts: dict[int, bool] = {}
        for _ in range(30):
            step += rng.randrange(1, 6)
            if rng.random() < 0.1 and steps_of(certification.held):
                back = saved(rng.choice(sorted(steps_of(certification.held))))
                certification.restored(back, not verdicts.get(back.step, True))
            else:
                verdicts[step] = rng.random() > 0.2
                due = certification.committed(saved(step), not verdicts[step], rng.random() > 0.3)
                assert len(certification.held) < slots + (due is not None)
                if due is not None:
                    assert due.attempt in certification.held and verdicts[due.step] and step - due.step >= after
                    certification.tried(rng.random() > 0.2)
                held = steps_of(certification.held)
                assert step in held or (keeps and not verdicts[step] and any(verdicts[other] for other in held))
            assert len(certification.held) < slots
            if certification.certified is not None:
                assert certification.certified.attempt in certification.held and verdicts[certification.certified.step]


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        (NEWEST, [Verdict.UNKNOWN, Verdict.PASSED, Verdict.CERTIFIED, Verdict.SUSPECT, Verdict.GOOD]),
        (WantedStep(5), [*Verdict]),
        (WantedStep(4), []),
        (WantedStep(before=6), [Verdict.UNKNOWN, Verdict.PASSED, Verdict.CERTIFIED, Verdict.SUSPECT, Verdict.GOOD]),
        (WantedStep(before=5), []),
        (WantedStep(certified=True), [Verdict.CERTIFIED, Verdict.GOOD]),
        (WantedStep(before=5, certified=True), []),
    ],
)
def test_what_is_wanted_of_a_step_5(wanted: WantedStep, fits: list[Verdict]) -> None:
    assert [verdict for verdict in Verdict if wanted.fits(5, verdict)] == fits
