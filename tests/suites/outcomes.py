"""What became of each test: written by each rank as it goes, so that it is there where a rank is killed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a test on all ranks, and all that was said where it failed or was skipped."""

    test: str
    what: str
    why: str = ""


class Writer:
    """A plugin of pytest: writes a line of JSON for each test that there is, and for what becomes of it."""

    def __init__(self, path: Path):
        self._file = path.open("w", buffering=1)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._write(report.nodeid, FAILED, report.longreprtext)
        elif report.skipped:
            self._write(report.nodeid, SKIPPED, str(report.longrepr[2]))

    def pytest_collection_finish(self, session: Any) -> None:
        for item in session.items:
            self._write(item.nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._write(report.nodeid, FAILED, report.longreprtext)
        elif report.skipped:
            self._write(report.nodeid, SKIPPED, str(report.longrepr[2]) if report.longrepr else "")
        elif report.when == "call":
            self._write(report.nodeid, PASSED)

    def _write(self, test: str, what: str = "", why: str = "") -> None:
        self._file.write(json.dumps([test, what, why]) + "\n")


def read(folder: Path) -> list[Outcome]:
    """Read what all ranks have written: what failed on one has failed, and so has what has no end on one."""
    ranks = [_of_rank(path) for path in sorted(folder.glob("*.jsonl"))]
    found = []
    for test in dict.fromkeys(test for rank in ranks for test in rank):
        ends = [rank.get(test, ("", "")) for rank in ranks]
        failed = [why for what, why in ends if what == FAILED]
        if not failed and any(not what for what, _ in ends):
            failed = ["it has no end on some rank"]
        skipped = [why for what, why in ends if what == SKIPPED]
        if failed:
            found.append(Outcome(test, FAILED, "\n".join(failed)))
        elif len(skipped) == len(ends):
            found.append(Outcome(test, SKIPPED, skipped[0]))
        else:
            found.append(Outcome(test, PASSED))
    return found


def _of_rank(path: Path) -> dict[str, tuple[str, str]]:
    """What became of each test on a rank; empty where it has no end."""
    found: dict[str, tuple[str, str]] = {}
    for line in path.read_text().splitlines():
        test, what, why = json.loads(line)
        if found.get(test, ("", ""))[0] != FAILED:  # a test that failed is torn down all the same
            found[test] = what, why
    return found
