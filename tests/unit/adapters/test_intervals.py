"""At which steps frameworks' trainings are saved."""

from __future__ import annotations

import pytest

from mlflash.adapters.intervals import check, is_due
from mlflash.errors import ConfigError


@pytest.mark.parametrize(("every", "skip"), [(0, None), (-1, None), (1, 0), (None, -2)])
def test_intervals_below_one_are_refused(every: int | None, skip: int | None) -> None:
    with pytest.raises(ConfigError, match="1 or more"):
        check(every, skip)


def test_a_multiple_is_due_but_not_one_of_what_is_skipped() -> None:
    check(2, 6)
    check(None, None)
    assert [step for step in range(13) if is_due(step, 2, 6)] == [2, 4, 8, 10]
    assert [step for step in range(7) if is_due(step, 3, None)] == [3, 6]
    assert not any(is_due(step, 0, None) for step in range(5))
    assert [step for step in range(5) if is_due(step, None, 3)] == [1, 2, 4]
