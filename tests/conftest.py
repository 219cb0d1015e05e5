"""Fixtures of all tests, and what happens where a package is missing."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from ci.stacks import AFTER, FAILED, Watch

try:
    from hypothesis import settings
except ModuleNotFoundError:
    pass
else:
    # A busy machine is no failure, and each run has the same examples.
    settings.register_profile("mlflash", deadline=None, derandomize=True)
    settings.load_profile("mlflash")


# What tests start imports from support/, too: whatever starts it, and wherever it is.
_SUPPORT = str(Path(__file__).with_name("support"))
_PATHS = os.environ.get("PYTHONPATH", "").split(os.pathsep)
os.environ["PYTHONPATH"] = os.pathsep.join([_SUPPORT, *(path for path in _PATHS if path not in ("", _SUPPORT))])

_WATCH = pytest.StashKey[Watch]()


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Know the settings of pytest-timeout where it is not installed."""
    parser.addini(AFTER, "seconds after which the stacks of a test that goes on are printed", default="90")
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds that a test may take, if pytest-timeout is installed")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_WATCH] = Watch(float(config.getini(AFTER)))
    if not hasattr(config, "workerinput"):  # where pytest-xdist has workers, they tell this process
        config.pluginmanager.register(FailuresAtOnce(config.stash[_WATCH]))
    for marker in ("mpi(min_size)", "timeout(seconds)"):
        config.addinivalue_line("markers", f"{marker}: known without its plugin, too")


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_WATCH].end()


class FailuresAtOnce:
    """Says which test has failed, and why, when it has.

    Args:
        watch: prints it.
    """

    def __init__(self, watch: Watch):
        self._watch = watch

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            last = report.longreprtext.rstrip().rpartition("\n")[2]
            why = crash.message.partition("\n")[0] if crash else last
            self._watch.say(f"{FAILED}{report.nodeid} ({report.when}): {why}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Print the stacks of a test that takes too long."""
    marker = item.get_closest_marker("timeout")
    given = marker.args[0] if marker else item.config.getoption("timeout", None) or item.config.getini("timeout")
    item.config.stash[_WATCH].begin(item.nodeid, float(given or 0))
    try:
        return (yield)
    finally:
        item.config.stash[_WATCH].begin("")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip a module that imports what this environment lacks, and say what; in CI a skip is a failure (tally.py)."""
    report = yield
    missing = re.search(r"ModuleNotFoundError: No module named '(\w+)", str(report.longrepr)) if report.failed else None
    if missing and missing[1] != "mlflash":
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: needs {missing[1]}: make .venv/.tests")
    return report


@pytest.fixture
def shm() -> Iterator[Path]:
    """A directory of our own in /dev/shm, removed afterwards."""
    from harness import own_memory  # not above: tests of this file run a copy of it, without support/

    with own_memory() as path:
        yield path


@pytest.fixture
def small(shm: Path) -> Iterator[Path]:
    """A memory file system of 64 MiB. Needs root."""
    place = shm / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={64 << 20}", "tmpfs", str(place)], check=True, timeout=30)
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True, timeout=30)
