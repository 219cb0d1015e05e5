"""What is given as a setting or as a step is converted or refused by name; nothing of it ends saving."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

from mlflash import Checkpointer, errors


@pytest.mark.parametrize(
    ("name", "given", "is_"),
    [
        ("keep_last", 5.0, 5), ("reserve", 1e6, 1_000_000), ("strict", "no", False), ("strict", np.bool_(True), True),
        ("timeout_s", "60", 60.0), ("timeout_s", 60, 60.0), ("timeout_s", np.float32(60), 60.0), ("keep_last", "3", 3),
        ("keep_last", np.int64(2), 2), ("job", 123, "123"), ("skip_stuck", True, 1),
    ],
)  # fmt: skip
def test_a_setting_of_another_type_is_converted(shm: pathlib.Path, name: str, given: Any, is_: Any) -> None:
    with Checkpointer(**{"memory": shm, "job": "j", "redundancy": "none", name: given}) as ckpt:
        found = getattr(ckpt._config, name)
        assert type(found) is type(is_) and found == is_
        ckpt.save(1, {"x": np.ones(3)}).wait()


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("keep_last", 5.5), ("keep_last", "five"), ("strict", 3), ("strict", "perhaps"), ("timeout_s", float("nan")),
        ("timeout_s", object()), ("skip_stuck", 10**30), ("keep_last", [1]), ("job", 1.5j), ("transport", b"p2p"),
    ],
)  # fmt: skip
def test_what_cannot_be_converted_is_refused_and_the_next_one_works(shm: pathlib.Path, name: str, given: Any) -> None:
    with pytest.raises(errors.ConfigError, match=f"{name}|is not of its type"):
        Checkpointer(**{"memory": str(shm), "job": "j", "redundancy": "none", name: given})
    with Checkpointer(memory=str(shm), job="j", redundancy="none", strict=True) as ckpt:
        assert ckpt.save(1, {"x": np.ones(3)}).wait().committed


def test_a_step_that_is_none_is_refused_by_its_number_and_the_next_one_is_saved(shm: pathlib.Path) -> None:
    with Checkpointer(memory=str(shm), job="j", redundancy="none", strict=True) as ckpt:
        for step in (1 << 63, -1, 1.0, True, "1", None):
            with pytest.raises(errors.StepOrderError) as caught:
                ckpt.save(step, {"x": np.ones(3)})
            assert caught.value.found == repr(step) and "step -1" not in str(caught.value)
        for number in (np.int64(3), (1 << 63) - 1):
            assert ckpt.save(number, {"x": np.ones(3)}).wait().committed
        for ask in (lambda: ckpt.restore({"x": np.ones(3)}, 1 << 63), lambda: ckpt.mark_bad(-1)):
            with pytest.raises(errors.StepNotFound, match="no step has such a number"):
                ask()
        assert ckpt.restore({"x": np.ones(3)}, np.int64((1 << 63) - 1)) == (1 << 63) - 1


@pytest.mark.parametrize("scheme", ["file://", "FILE://", "local://"])
def test_a_file_url_is_a_path(tmp_path: pathlib.Path, shm: pathlib.Path, scheme: str) -> None:
    place = tmp_path / "a b"
    settings = {"memory": str(shm), "job": "j", "redundancy": "none", "strict": True}
    with Checkpointer(f"{scheme}{tmp_path}/a%20b", **settings) as ckpt:
        ckpt.save(1, {"x": np.ones(3)}).wait()
        ckpt.drain().wait()
    with Checkpointer(place, **{**settings, "job": "other"}) as ckpt:
        state = {"x": np.zeros(3)}
        assert ckpt.restore(state) == 1 and state["x"].tolist() == [1, 1, 1]
        assert ckpt.load(source=f"{scheme}{tmp_path}/a%20b")[0] == 1
