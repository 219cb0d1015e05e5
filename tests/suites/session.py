"""pytest on one rank, with the parts in their places: ``python -m suites.session FOLDER PYTEST'S ARGUMENTS``.

A process that the tests spawn imports this module anew, as its main one: the parts are put in their places there, too.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

_SUITE = importlib.import_module(f"suites.{os.environ['SUITE']}")
_HERE = contextlib.ExitStack()  # never left
_HERE.enter_context(_SUITE.around())
if os.environ["SUITE_PARTS"] == "ours":
    _SUITE.put_in_place()


class _Writer:
    """Writes a line of JSON for each test that there is, and for what becomes of it, at once: a rank may die."""

    def __init__(self, path: Path):
        self._file = path.open("w", buffering=1)

    def pytest_collection_finish(self, session: Any) -> None:
        for item in session.items:
            self._write(item.nodeid, "")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or not report.passed:
            why = report.longreprtext if report.failed else str(report.longrepr[2]) if report.longrepr else ""
            self._write(report.nodeid, report.outcome, why)

    def pytest_collectreport(self, report: Any) -> None:
        if not report.passed:
            self.pytest_runtest_logreport(report)

    def _write(self, test: str, what: str, why: str = "") -> None:
        self._file.write(json.dumps([test, what, why]) + "\n")


class _Around:
    """What a suite does around its tests, with our parts."""

    def pytest_collection_finish(self, session: Any) -> None:
        if hasattr(_SUITE, "when_collected"):
            _SUITE.when_collected(session.items)

    def pytest_runtest_teardown(self, item: Any) -> None:
        if hasattr(_SUITE, "after_test"):
            _SUITE.after_test()


if __name__ == "__main__":
    import pytest

    plugins: list[object] = [_Writer(Path(sys.argv[1]) / f"{os.environ.get('RANK', '0')}.jsonl")]
    if os.environ["SUITE_PARTS"] == "ours":
        plugins.append(_Around())
    ended = pytest.main(sys.argv[2:], plugins)
    sys.exit(0 if ended == pytest.ExitCode.TESTS_FAILED else ended)  # else torchrun would end the other ranks
