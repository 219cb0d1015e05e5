"""pytest on one rank, with the parts in their places: ``python -m suites.session FOLDER PYTEST'S ARGUMENTS``.

A process that the tests spawn imports this module anew, as its main one: the parts are put in their places there, too.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from pathlib import Path
from typing import Any

_SUITE = importlib.import_module(f"suites.{os.environ['SUITE']}")
_HERE = contextlib.ExitStack()  # never left
_HERE.enter_context(_SUITE.around())
if os.environ["SUITE_PARTS"] == "ours":
    _SUITE.put_in_place()


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

    from suites.outcomes import Writer

    plugins = [Writer(Path(sys.argv[1]) / f"{os.environ.get('RANK', '0')}.jsonl")]
    if os.environ["SUITE_PARTS"] == "ours":
        plugins.append(_Around())
    ended = pytest.main(sys.argv[2:], plugins)
    sys.exit(0 if ended == pytest.ExitCode.TESTS_FAILED else ended)  # else torchrun would end the other ranks
