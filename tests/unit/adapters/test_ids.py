"""What checkpoint ids say: the step, and what is saved besides. The table of docs/dcp.md is the rule."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch.distributed.checkpoint")

from mlflash.adapters.dcp import MemoryReader, MemoryWriter, step_of
from mlflash.adapters.ids import names_a_step, read
from mlflash.errors import StepNotFound

PAGE = (Path(__file__).parents[3] / "docs" / "dcp.md").read_text()
ROWS = re.findall(r"^\| `([^`]+)` \| (`[^`]*`|-|refused) \| (\d+|-|refused) \|", PAGE, re.M)


def test_the_table_of_ids_is_what_is_done() -> None:
    assert len(ROWS) >= 12
    for name, names, step in ROWS:
        if step == "refused":
            with pytest.raises(StepNotFound):
                read(name)
        else:
            expected = "" if names == "-" else names.strip("`"), None if step == "-" else int(step)
            assert read(name) == expected, name


@pytest.mark.parametrize(
    ("name", "step"),
    [(12, 12), (0, 0), ("12", 12), ("step-00000012", 12), ("/path/to/step-12", 12), ("/path/to/step-12/", 12),
     (Path("a/epoch=3-step=70"), 70), ("run7/ckpt_9", 9), ("checkpoint-0", 0), ("step-12.pt", 12)],
)  # fmt: skip
def test_a_storage_of_dcp_knows_the_step_of_an_id(name: object, step: int) -> None:
    assert step_of(name) == step
    assert MemoryWriter.validate_checkpoint_id(name) and MemoryReader.validate_checkpoint_id(name)


@pytest.mark.parametrize("name", ["", "newest", "12a", "run7/best", "/", "step-1234567890123456789", "gpt-7", "tp0"])
def test_other_ids_are_refused_and_the_rule_is_said(name: str) -> None:
    with pytest.raises(StepNotFound, match="100steps(.|\n)*" + (re.escape(name) or "''")):
        step_of(name)
    assert not MemoryWriter.validate_checkpoint_id(name) and not MemoryReader.validate_checkpoint_id(name)


NAMES = st.from_regex(r"[a-z]{1,6}(_[a-z]{1,4}[0-9]{0,2}){0,2}", fullmatch=True).filter(
    lambda name: not re.search("step|iter|ckpt|checkpoint", name)
)


@given(path=st.lists(NAMES, min_size=1, max_size=3), steps=st.lists(st.integers(0, 10**17), min_size=2, max_size=2),
       form=st.sampled_from(["{}/step-{}", "{}/iter_{:07d}", "{}-{}steps", "{}/{}", "{}-step={}", "{}_checkpoint-{}",
                             "{}/step-{}_ckpt", "{}/global_step{}"]))  # fmt: skip
def test_ids_that_differ_by_their_step_alone_name_the_same_thing(path: list[str], steps: list[int], form: str) -> None:
    found = [read(form.format("/".join(path), step)) for step in steps]
    assert found[0][0] == found[1][0] and [step for _, step in found] == steps
    assert names_a_step(form.format("x", steps[0]))


@given(st.text(max_size=30))
def test_whatever_an_id_is_it_is_read_or_refused(name: str) -> None:
    try:
        _, step = read(name)
    except StepNotFound:
        return
    assert step is None or 0 <= step < 10**18
