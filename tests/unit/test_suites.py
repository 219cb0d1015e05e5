"""The table of `make suites`, the lists of expected differences beside it, and what the runner takes for wrong."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from suites import outcomes, verdict
from suites.outcomes import FAILED, PASSED, SKIPPED, Outcome
from suites.suite import Suite
from suites.verdict import Difference, Row

LISTS = sorted(Path(verdict.__file__).parent.glob("*.txt"))
REMOVES = Difference("t.py::test_a[*]", "FileNotFoundError", "it removes a file of theirs")


def row(*ended: Outcome, own: Sequence[Outcome] = (), expected: tuple[Difference, ...] = (REMOVES,)) -> Row:
    passed = [dataclasses.replace(one, what=PASSED, why="") for one in ended]
    return Row("Theirs", "1.2", own or passed, ended, expected)


GONE = Outcome("t.py::test_a[x]", FAILED, "trace\nE   FileNotFoundError: no such file")


def test_what_fails_as_the_list_says_is_right_and_stands_in_the_table_with_its_reason() -> None:
    its = row(GONE, Outcome("t.py::test_b", PASSED), Outcome("t.py::test_c", SKIPPED, "needs 8 GPUs"))
    assert its.wrong == [] and its.explained == ["1 x it removes a file of theirs"]
    assert verdict.table([its]).splitlines()[-1] == "| Theirs | 1.2 | 3 | 3 | 1 | 0 | 1 | 0 | 1 |"


@pytest.mark.parametrize(
    ("ended", "expected", "wrong"),
    [
        ([], (), "no test ran"),
        ([GONE], (), "failed, and is not in the list: t.py::test_a[x]: FileNotFoundError: no such file"),
        ([Outcome(GONE.test, FAILED, "E   ValueError: 3")], (REMOVES,),
         "failed otherwise than the list says (FileNotFoundError): t.py::test_a[x]: ValueError: 3"),
        ([Outcome(GONE.test, PASSED)], (REMOVES,), "passed, and is in the list of those that fail: t.py::test_a[x]"),
        ([Outcome(GONE.test, SKIPPED)], (REMOVES,), "skipped, and is in the list of those that fail: t.py::test_a[x]"),
        ([Outcome("t.py::test_ab[x]", PASSED)], (REMOVES,),
         "is in the list, and there is no such test: t.py::test_a[*]"),
    ],
)  # fmt: skip
def test_all_else_is_wrong(ended: list[Outcome], expected: tuple[Difference, ...], wrong: str) -> None:
    assert row(*ended, expected=expected).wrong == [wrong]


def test_a_failure_is_counted_as_expected_only_where_it_says_what_the_list_says() -> None:
    its = row(GONE, Outcome("t.py::test_a[y]", FAILED, "E   ValueError: 3"), Outcome("t.py::test_b", FAILED, "no"))
    assert its.cells[3:] == (3, 0, 0, 1, 2, 0) and len(its.wrong) == 2


def test_what_fails_with_their_parts_too_needs_no_line_and_may_have_none() -> None:
    its = row(GONE, own=[GONE], expected=())
    assert its.wrong == [] and its.cells[3:] == (0, 0, 1, 0, 0, 0)
    assert row(GONE, own=[GONE]).wrong == ["is in the list, and fails with their parts, too: t.py::test_a[x]"]


def test_both_runs_have_the_same_tests() -> None:
    assert row(GONE, own=[Outcome("t.py::test_b", PASSED)]).wrong == [
        "other tests ran with their parts than with ours"]  # fmt: skip


def test_a_test_of_several_ranks_has_passed_where_it_failed_on_none_and_ended_on_all(tmp_path: Path) -> None:
    ranks: list[list[list[str]]] = [
        [["a", "", ""], ["b", "", ""], ["c", "", ""], ["d", "", ""], ["e", "", ""], ["a", PASSED, ""],
         ["b", PASSED, ""], ["c", SKIPPED, "needs"], ["d", FAILED, "E  one"], ["d", PASSED, ""], ["e", PASSED, ""]],
        [["a", "", ""], ["b", "", ""], ["c", "", ""], ["d", "", ""], ["e", "", ""], ["a", PASSED, ""],
         ["b", SKIPPED, "here"], ["c", SKIPPED, "needs"], ["d", PASSED, ""]],
    ]  # fmt: skip
    for rank, lines in enumerate(ranks):
        (tmp_path / f"{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert outcomes.read(tmp_path) == [
        Outcome("a", PASSED), Outcome("b", PASSED), Outcome("c", SKIPPED, "needs"), Outcome("d", FAILED, "E  one"),
        Outcome("e", FAILED, "it has no end on some rank"),
    ]  # fmt: skip


TESTS = """
import pytest
def test_a(): pass
def test_b(): assert 0, 'why'
@pytest.mark.skip('needs it')
def test_c(): pass
@pytest.fixture
def broken():
    yield
    raise OSError('late')
def test_d(broken): pass
"""
RUN = """
import pathlib, pytest, sys
from suites.outcomes import Writer
pytest.main(sys.argv[1:], [Writer(pathlib.Path("0.jsonl"))])
"""


def test_each_test_is_written_down_as_it_ends(tmp_path: Path) -> None:
    (tmp_path / "test_good.py").write_text(TESTS)
    (tmp_path / "test_bad.py").write_text("import nothing_of_that_name")
    words = ["--rootdir=.", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    here = {**os.environ, "PYTHONPATH": str(LISTS[0].parents[1])}
    subprocess.run([sys.executable, "-c", RUN, *words], cwd=tmp_path, env=here, timeout=60, check=True)
    ended = {one.test.partition("::")[2] or one.test: one for one in outcomes.read(tmp_path)}
    assert {test: one.what for test, one in ended.items()} == {
        "test_a": PASSED, "test_b": FAILED, "test_c": SKIPPED, "test_d": FAILED, "test_bad.py": FAILED}  # fmt: skip
    assert verdict.short(ended["test_b"].why) == "AssertionError: why" and "needs it" in ended["test_c"].why
    assert verdict.short(ended["test_d"].why) == "OSError: late"
    assert verdict.short(ended["test_bad.py"].why).startswith("ModuleNotFoundError: ")


def test_a_checkout_is_found_by_its_name_and_tells_its_version(tmp_path: Path) -> None:
    suite = Suite("x", "X", "x-lm", ("t.py",))
    assert suite.find(tmp_path) is None
    for name in ("x-lm-1.2", "x-lm-1.3", "x-lmore-9"):
        (tmp_path / name).mkdir()
    found = suite.find(tmp_path)
    assert found == tmp_path / "x-lm-1.3" and suite.version(found) == "1.3"
    (tmp_path / "x-lm").mkdir()
    assert suite.version(tmp_path / "x-lm") == "unknown"


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_the_lists_are_lines_of_test_text_and_reason(path: Path) -> None:
    assert (path.with_suffix(".py")).exists() and verdict.read(path) is not None


def test_a_line_without_a_reason_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("# all of them\n\nt.py::test_a | FileNotFoundError |\n")
    with pytest.raises(ValueError, match=r"x\.txt, line 3"):
        verdict.read(tmp_path / "x.txt")
