"""Messages between a trainer and a courier that is a process: what is sent arrives, and nothing else is understood."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mlflash import errors
from mlflash.courier import wire_format as wire
from mlflash.courier.wire_format import BadMessage, Frame, Kind
from mlflash.errors import MlflashError

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
BROKEN = wire.EVENTS["broken"]


def test_of_an_error_that_is_a_class_of_somebody_else_the_class_of_ours_arrives() -> None:
    class Theirs(errors.SaveFailed):
        pass

    got = wire.decode(MlflashError, wire.encode(Theirs("no", found=[1, 2])))
    assert type(got) is errors.SaveFailed and got.found == "[1, 2]"


def test_names_that_are_in_no_table_are_refused() -> None:
    for table in (wire.MESSAGES, wire.RESULTS, wire.QUESTIONS, wire.EVENTS, wire.TELLS):
        with pytest.raises(BadMessage, match="an unknown message: '__class__'"):
            wire.known(table, "__class__")
    with pytest.raises(BadMessage) as raised:
        wire.known(wire.MESSAGES, "x" * 100_000)
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize(("kind", "body"), [
    (wire.MESSAGES["Agree"], [1, 2]), (wire.MESSAGES["Agree"], {"values": ["1"]}), (wire.MESSAGES["Commit"], None),
    (wire.EVENTS["log"], [10]), (wire.EVENTS["log"], [10, "a", 3]), (wire.TELLS["doing"], 1),
    (BROKEN, ["OSError", "no", {}]), (BROKEN, ["SaveFailed", "no", {"__class__": 3}]), (BROKEN, "SaveFailed"),
    (wire.Opened, {"version": 1, "config": {"job": "../x"}, "log_level": 1, "ranks": [0], "before": 0}),
    (wire.Opened, {"version": 1, "config": {"job": "x"}, "log_level": 1, "ranks": ["0"], "before": 0}),
])  # fmt: skip
def test_bodies_of_another_type_are_refused(kind: Any, body: object) -> None:
    with pytest.raises(BadMessage):
        wire.decode(kind, wire.encode(body))


@pytest.mark.parametrize("found", [2**70, "slot-\udcff"])
def test_errors_arrive_whatever_was_found(found: object) -> None:
    assert wire.decode(MlflashError, wire.encode(errors.SaveFailed("no", found=found))).message == "no"


def test_the_page_of_the_protocol_has_a_row_for_every_name_and_kind() -> None:
    rows = re.findall(r"^\|(?: \d+ \|)? `(\w+)` \|", PAGE.read_text(), re.M)
    names = [*wire.MESSAGES, *wire.QUESTIONS, *wire.EVENTS, *wire.TELLS, *(kind.name for kind in Kind)]
    assert sorted(rows) == sorted([*names, *Frame.__struct_fields__])
    assert f"Protocol version {wire.VERSION}." in PAGE.read_text()
