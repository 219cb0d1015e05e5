"""The tables of benchmarks: rows that never came to an end, or only count, stand in them and hide no others."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from bench import report
from bench.aims import AIMS, MEMCPY, MEMCPY_AND_PUT
from bench.plots import draw
from bench.results import Result, keep, read
from bench.rows import Row, reached, row
from bench.table import grids, markdown

pytestmark = pytest.mark.slow  # a tool beside the engine

BETWEEN = AIMS["committed between hosts"]
TIMED = row("Put", np.array([2.0, 3.0, 4.0]), {MEMCPY: np.array(1.0), MEMCPY_AND_PUT: np.array(2.0)},
            "committed between hosts", case="nodes", column="idle")  # fmt: skip
NEVER = Row(what="fence", case="nodes", column="idle", note="never: not done after 4 s")
COUNT = Row(what="commit", case="job", over={"one": 2.0}, shows="commit", aim=("one", 3.0))


def test_what_never_ended_stands_beside_what_did() -> None:
    for rows in ([TIMED, NEVER], [NEVER, TIMED]):
        (grid,) = grids(rows)
        assert grid.title == "nodes: seconds, / memcpy, / memcpy + Put"
        cells = dict(line[:2] for line in grid.lines)
        assert cells["fence"] == "never: not done after 4 s"
        assert cells["Put"] == "3.000 s; 3.00 (2.50–3.50); 1.50 (1.25–1.75); aim ≤ 1.4 x memcpy + Put: no"


@pytest.mark.parametrize("column", [{}, {"column": "matmul"}], ids=["long", "wide"])
def test_a_table_of_nothing_but_notes(column: dict[str, str]) -> None:
    (grid,) = grids([Row(what="fence", case="nodes", note="failed", **column)])  # type: ignore[typeddict-item]
    assert "failed" in markdown(grid) and "seconds" not in grid.title


def test_an_aim_of_what_never_ended_is_not_reached() -> None:
    never = NEVER | Row(shows="committed between hosts", aim=(BETWEEN.over, BETWEEN.most))
    assert reached(never) is False
    lines = {line[0]: line for line in report.aims([("transport", never), ("scale", COUNT)], {})}
    assert lines[BETWEEN.what][3:6] == ["transport: nodes, fence, idle", "never: not done after 4 s", "no"]
    assert lines[AIMS["commit"].what][4:6] == ["2.00 x one", "yes"]


def test_all_of_them_are_kept_and_drawn(tmp_path: Path) -> None:
    keep(tmp_path / "rows.json", {"mpi": "any"}, [TIMED, NEVER, COUNT])
    kept = read(tmp_path / "rows.json")
    assert json.dumps(kept.rows) == json.dumps([TIMED, NEVER, COUNT])
    assert report.report({}, {"transport": Result(kept.header, kept.rows)}, {}, quick=True).count("never") == 1
    pytest.importorskip("matplotlib")
    draw(tmp_path / "plot.svg", kept.rows, MEMCPY)
    assert "Put" in (tmp_path / "plot.svg").read_text()
