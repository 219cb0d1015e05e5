"""The table of docs/launchers.md says what was run: each row by a test that there is, and every launcher has a row."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from harness import LAUNCHERS

REPO = Path(__file__).parents[2]
TESTS = REPO / "tests"


def rows() -> list[list[str]]:
    page = (REPO / "docs" / "launchers.md").read_text()
    table = page.partition("## What was run")[2].partition("\n## ")[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")
    ][2:]


def test_each_row_names_tests_that_there_are() -> None:
    functions = {
        node.name
        for path in TESTS.rglob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    assert len(rows()) >= 10
    for row in rows():
        named = re.findall(r"`([^`]+)`", row[3])
        assert named, row
        for name in named:
            assert name in functions or (REPO / name).is_file(), name


def test_every_launcher_of_the_tests_and_of_the_code_has_a_row() -> None:
    words = " ".join(row[0] for row in rows())
    by_hand = ast.parse((TESTS / "programs" / "test_launchers.py").read_text()).body
    (variables,) = (
        node.value for node in by_hand if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "RANKS"
    )
    assert isinstance(variables, ast.Dict)
    known = {str(ast.literal_eval(key)) for key in variables.keys if key is not None}
    known |= {*LAUNCHERS, "hydra", "prterun", "srun", "--mpi=none"}
    assert not {name for name in known if name not in words}
