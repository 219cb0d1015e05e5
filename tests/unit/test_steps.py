"""The steps that land a change: what runs when, which part of the big matrices, and how it is added up."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import share
import steps
from stacks import FAILED, LATE
from tally import NEVER_BEGUN, tally

REPO = Path(__file__).parents[2]
EVERY = [*steps._ENVIRONMENTS, *steps._GATE, *steps._CORE, *steps._REST]


def test_each_step_is_a_target_of_make_and_waits_for_steps_that_there_are() -> None:
    makefile = (REPO / "Makefile").read_text()
    names = [step.name for step in EVERY]
    assert len(names) == len({*names})
    for step in EVERY:
        assert {*step.after} <= {*names[: names.index(step.name)]}, f"{step.name} would wait for ever"
        for target in [word for word in shlex.split(step.make) if re.fullmatch(r"[a-z-]+", word)]:
            assert re.search(rf"^[^\t:=]*\b{target}\b[^\n]*:", makefile, re.M), target


def test_the_shares_have_each_step_between_them_and_all_the_same_number_of_each_matrix() -> None:
    chosen = [{step.name for step in steps.chosen("share", "mpich", number)[0]} for number in range(share.SHARES)]
    assert set.union(*chosen) == {step.name for step in EVERY}
    assert sorted(name for its in steps._QUESTIONS for name in its) == sorted(
        path.parent.name for path in (REPO / "benchmarks").glob("*/run.py")
    )
    matrices = {step.part[:2] for step in EVERY if step.part}
    for matrix, parts in matrices:
        its = {step.name: step.part[2] for step in EVERY if step.part and step.part[0] == matrix}
        cases = [{case for name, case in its.items() if name in one} for one in chosen]
        assert {len(one) for one in cases} <= {(several := len({*its.values()})) // parts, -(-several // parts)}, matrix
        assert sum(map(len, cases)) == share.SHARES * several / parts, matrix
        for one, share_of in zip(chosen, cases, strict=True):
            assert {name for name in its if name in one} == {name for name in its if its[name] in share_of}, matrix
    for step in [step for step in EVERY if step.instead_of]:
        assert all((step.name in one) != (step.instead_of in one) for one in chosen), step.name
    everything, left_out = steps.chosen("share", "mpich", None)
    assert not left_out and {step.name for step in everything} == set.union(*chosen)


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_no_two_steps_make_one_environment_at_a_time(mpi: str) -> None:
    """Each environment that several steps use is made by one that they wait for."""
    known = {step.name: step for step in EVERY}

    def before(step: steps.Step) -> set[str]:
        return {name for one in step.after for name in ({one} | before(known[one]))}

    for what in ("share", "test"):
        made: dict[str, set[str]] = {}
        chosen = steps.chosen(what, mpi, None)[0]
        for step in chosen:
            dry = ["make", "--dry-run", "--always-make", "--no-print-directory", *shlex.split(step.make)]
            said = subprocess.run(dry, cwd=REPO, capture_output=True, text=True, timeout=60, check=True).stdout
            for folder in {*re.findall(r"touch (\.venv[a-z-]*)/", said)}:
                made.setdefault(folder, set()).add(step.name)
        for folder, names in made.items():
            first = folder.replace(".venv", "env") if len(names) > 1 else next(iter(names))
            first = "env" if folder == ".venv-build" else first
            late = [step.name for step in chosen if step.name in names - {first} and first not in before(step)]
            assert first in names and not late, f"{folder} is made by {late} too"


class Item:
    """As much of a test of pytest as is looked at."""

    def __init__(self, nodeid: str, indices: dict[str, int] | None):
        self.nodeid = nodeid
        if indices is not None:
            params = {name: f"value {index}" for name, index in indices.items()}
            self.callspec = type("CallSpec", (), {"indices": indices, "params": params})()


@pytest.mark.parametrize("is_open_mpi", [False, True])
def test_each_case_is_in_as_many_shares_as_the_table_says(is_open_mpi: bool) -> None:
    items = [Item(f"{matrix.tests}x.py::test_{name}[{case}]", {matrix.by or "case": case})
             for matrix in share.MATRICES for name in "abc" for case in range(12)]  # fmt: skip
    texts = [(matrix.tests, matrix.by_text) for matrix in share.MATRICES if matrix.by_text]
    items += [Item(f"{tests}::test_{name}[{case}]", {text: case}) for tests, text in texts for name in "ab"
              for case in range(5)]  # fmt: skip
    items += [Item("tests/unit/test_x.py::test_a[1]", {"case": 1}), Item("tests/cluster/test_cables.py::test_b", None)]
    items.append(Item("tests/packaging/test_extras.py::test_c", None))
    in_shares = {id(item): 0 for item in items}
    for number in range(share.SHARES):
        mine, others = share.divide(items, number, is_open_mpi)  # type: ignore[arg-type]
        assert sorted(map(id, [*mine, *others])) == sorted(map(id, items))
        assert len(mine) < len(items)
        for item in mine:
            in_shares[id(item)] += 1
    for item in items[:-3]:
        matrix = next(one for one in share.MATRICES if item.nodeid.startswith(one.tests))
        parts = matrix.open_mpi or matrix.parts if is_open_mpi else matrix.parts
        assert in_shares[id(item)] == share.SHARES / parts, item.nodeid
    assert [in_shares[id(item)] for item in items[-3:]] == [12, 3 if is_open_mpi else 12, 2]


def test_cases_with_the_same_text_of_a_parameter_go_together() -> None:
    (matrix,) = [one for one in share.MATRICES if one.by_text]
    one, other = (Item(f"{matrix.tests}::test_{name}", {"own_saves": 3, "more": 1}) for name in "ab")
    other.callspec.indices["own_saves"] = 4  # its place in the table of another test
    for number in range(share.SHARES):
        assert len(share.divide([one, other], number, False)[0]) in (0, 2)  # type: ignore[list-item]


def test_each_matrix_names_tests_that_there_are_and_stands_in_contributing() -> None:
    page = (REPO / "CONTRIBUTING.md").read_text()
    for matrix in share.MATRICES:
        assert (REPO / matrix.tests).exists(), matrix.tests
        assert share.SHARES % matrix.parts == 0 == share.SHARES % (matrix.open_mpi or 1)
        several = str(matrix.parts) if matrix.open_mpi in (0, matrix.parts) else f"{matrix.parts}; {matrix.open_mpi}"
        assert f"| {matrix.what} | `{matrix.tests}` | {several} |" in page, matrix.what


def test_a_share_that_does_not_exist_is_refused() -> None:
    assert [share.taken(said) for said in ("0", "11", "all")] == [0, 11, None]
    for wrong in ("12", "-1", "a", "1.5"):
        with pytest.raises(ValueError, match="a number below 12, or all"):
            share.taken(wrong)
    assert share.of_tree("ff") == 255 % 12


STUBS = f"""
all: fine fails hangs never
fine: ; @echo this is $(WHO) $$MLFLASH_TEST_SHARE
fails: ; @echo words && exit 3
hangs: ; @echo '{FAILED}one: why' && echo 'a_test has not ended after 90 s{LATE}' && echo stack && sleep 1000
"""


def test_steps_wait_for_others_fail_with_them_and_are_ended_at_their_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "Makefile").write_text(STUBS)
    monkeypatch.setattr(steps, "REPO", tmp_path)
    monkeypatch.setattr(steps, "REPORTS", tmp_path)
    monkeypatch.setattr(steps.Step, "limit", property(lambda step: step.seconds))
    made = [
        steps.Step("first", "fine WHO=me", 60, (), gate=True),
        steps.Step("second", "fails", 60, ("first",)),
        steps.Step("third", "fine", 60, ("second",)),
        steps.Step("fourth", "hangs", 0.5, ("first",), waits=True),
    ]
    run = steps.Run(made, {**os.environ, "MLFLASH_TEST_SHARE": "7"})
    run.all()
    assert sorted(run.failed) == ["fourth", "second", "third"] and set(run.took) == {"first", "second", "fourth"}
    printed = capsys.readouterr().out
    assert "this is me 7\n=== first: exit 0 after" in printed and "=== fourth: ended at its limit" in printed
    assert "--- third" not in printed
    assert run.failed["third"] == NEVER_BEGUN
    said = rf"{FAILED}one: why; a_test has not ended .* s{LATE}"
    assert re.fullmatch(f"ended at its limit after . s; {said}", run.failed["fourth"])
    assert re.fullmatch(r"exit 2 after 0 s; its last line: make.*Error 3", run.failed["second"])


def test_nothing_else_begins_where_the_gate_is_shut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Makefile").write_text(STUBS)
    monkeypatch.setattr(steps, "REPO", tmp_path)
    monkeypatch.setattr(steps, "REPORTS", tmp_path)
    run = steps.Run(
        [steps.Step("lint", "fails", 1, (), gate=True), steps.Step("long", "fine", 9, ())], dict(os.environ)
    )
    run.all()
    assert list(run.failed) == ["lint", "long"] and set(run.took) == {"lint"}


CASES = """<testsuites><testsuite>
<testcase classname="tests.a" name="passes" time="3.5"/>
<testcase classname="tests.a" name="{name}" time="1"><{what} message="{reason}"/></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize(
    ("what", "reason", "line", "code"),
    [
        ("failure", "", "1 passed, 1 failed, 0 skipped", 1),
        ("skipped", "needs CUDA", "1 passed, 0 failed, 1 skipped", 0),
        ("skipped", "tmux is not installed", "1 passed, 1 failed, 1 skipped", 1),
    ],
)
def test_a_skip_that_this_machine_need_not_make_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str, reason: str, line: str, code: int
) -> None:
    (tmp_path / "x.xml").write_text(CASES.format(name="other", what=what, reason=reason))
    assert tally(tmp_path, {}, 0) == code
    printed = capsys.readouterr().out
    last = f"{line}\n" if what == "skipped" else f"failed: {tmp_path.name}: tests.a::other\n{line}\n"
    assert printed.endswith(last) and "3.5  " in printed


def test_what_ran_on_some_ranks_is_not_skipped_and_counts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("test-1-rank0", "test-2-rank0", "test-2-rank1"):
        text = CASES.format(name="on two", what="skipped", reason="MPI requires at least 2 processes")
        if "test-2" in name:
            text = text.replace("<skipped", "<properties")
        (tmp_path / f"{name}.xml").write_text(text)
    assert tally(tmp_path, {"lint": "exit 1"}, 2) == 1
    assert capsys.readouterr().out.endswith("failed: lint: exit 1\n5 passed, 1 failed, 0 skipped\n")


def test_a_test_that_needs_what_is_not_installed_is_skipped_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((REPO / "tests" / "conftest.py").read_text())
    (tmp_path / "test_a.py").write_text("import no_such_package\n")
    (tmp_path / "test_b.py").write_text("import mlflash.no_such_module\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", "."]
    environment = {**os.environ, "PYTHONPATH": str(REPO / "tests")}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert "needs no_such_package: pip install 'mlflash[test]'" in done.stdout, done.stdout
    assert "1 skipped, 1 error" in done.stdout and done.returncode != 0
