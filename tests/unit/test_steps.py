"""The closing line of CI: a step that fails, and a skip that need not be, are failures."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ci import lanes, steps
from ci.stacks import FAILED, LATE
from ci.tally import MAY_SKIP, NEVER_BEGUN, OTHER_RANKS, tally

REPO = Path(__file__).parents[2]


STUBS = f"""
all: fine fails hangs never
fine: ; @echo this is $(WHO)
fails: ; @echo words && exit 3
hangs: ; @echo '{FAILED}one: why' && echo 'a_test has not ended after 90 s{LATE}' && echo stack && sleep 1000
"""


def test_steps_wait_for_others_fail_with_them_and_are_ended_at_their_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "Makefile").write_text(STUBS)
    monkeypatch.setattr(lanes, "REPO", tmp_path)
    monkeypatch.setattr(lanes, "REPORTS", tmp_path)
    monkeypatch.setattr(steps.Step, "limit", property(lambda step: step.seconds))
    made = [
        steps.Step("first", "fine WHO=me", 60, (), is_first=True),
        steps.Step("second", "fails", 60, ("first",)),
        steps.Step("third", "fine", 60, ("second",)),
        steps.Step("fourth", "hangs", 0.5, ("first",), waits=True),
    ]
    run = lanes.Run(made)
    run.all()
    assert sorted(run.failed) == ["fourth", "second", "third"]
    assert set(run.ended) == {"first", "second", "fourth"}
    printed = capsys.readouterr().out
    assert "this is me\n=== first: exit 0 after" in printed and "=== fourth: ended at its limit" in printed
    assert "--- third" not in printed
    assert run.failed["third"] == NEVER_BEGUN
    said = rf"{FAILED}one: why; a_test has not ended .* s{LATE}"
    assert re.fullmatch(f"ended at its limit after . s; {said}", run.failed["fourth"])
    assert re.fullmatch(r"exit 2 after 0 s; its last line: make.*Error 3", run.failed["second"])


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
        ("skipped", "runs on 5 ranks", "1 passed, 1 failed, 1 skipped", 1),
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
    assert tally(tmp_path, {}, 0, MAY_SKIP + OTHER_RANKS) == (0 if reason.startswith("runs on") else code)


def test_what_ran_on_some_ranks_is_not_skipped_and_counts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("test-1-rank0", "test-2-rank0", "test-2-rank1"):
        text = CASES.format(name="on two", what="skipped", reason="Test requires 2 MPI processes, only 1")
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
    assert "needs no_such_package: make .venv/.tests" in done.stdout, done.stdout
    assert "1 skipped, 1 error" in done.stdout and done.returncode != 0
