"""Add up the reports of all test runs; fail where a test was skipped that this machine could have run."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from pathlib import Path

# A skip for one of these reasons is right on a machine without the thing named.
MAY_SKIP = ("needs CUDA", "needs RDMA", "needs root", "needs netem")
# Tests for a number of ranks that the gate has not.
OTHER_RANKS = ("runs on ", "Test requires ")  # the second by pytest-mpi
NEVER_BEGUN = "never begun"  # how a step ended that waited for one that failed
SHOWN = 15  # failed tests that are named


def tally(
    reports: Path, failed_steps: Mapping[str, str], other_steps: int, may_skip: tuple[str, ...] = MAY_SKIP
) -> int:
    """Print what failed, what was skipped, the slowest tests, and one line of totals; the exit code.

    Args:
        reports: a folder of JUnit's XML.
        failed_steps: how each ended. Each counts as one that failed: one that died without a report counts, too.
        other_steps: so many passed that count no tests of their own.
        may_skip: how the reasons begin for which a test may be skipped in all steps.
    """
    passed, failed = other_steps, len(failed_steps)
    ran: set[str] = set()
    broken: dict[str, None] = {}
    skipped: dict[str, str] = {}
    for name, case, is_first_rank in _cases(reports):
        skip = case.find("skipped")
        if any(child.tag in ("failure", "error") for child in case):
            failed += 1
            broken[name] = None
        elif skip is not None:
            skipped[name] = skip.get("message", "")
        else:
            passed += is_first_rank
            ran.add(_test(name))
    # A test that needs two ranks, or MPICH, is skipped in one step and runs in another: that is no skip.
    never_ran = {name: reason for name, reason in skipped.items() if _test(name) not in ran}
    for name, reason in never_ran.items():
        print(f"skipped: {name}: {reason}")
        failed += not reason.startswith(may_skip)
    if not ran:
        print("no test ran")
        failed += 1
    # Right before the totals, as some who look see only the last lines.
    for name in list(broken)[:SHOWN]:
        print(f"failed: {name}")
    if len(broken) > SHOWN:
        print(f"failed: {len(broken) - SHOWN} more tests")
    never_begun = [step for step, how in failed_steps.items() if how == NEVER_BEGUN]
    if never_begun:
        print(f"failed, as they were never begun: {', '.join(never_begun)}")
    for step, how in failed_steps.items():
        if how != NEVER_BEGUN:
            print(f"failed: {step}: {how}")
    print(f"{passed} passed, {failed} failed, {len(never_ran)} skipped")
    return int(failed > 0)


def _test(name: str) -> str:
    return name.partition(": ")[2]


def _cases(reports: Path) -> Iterator[tuple[str, ElementTree.Element, bool]]:
    """Each test of each report, by a name that is the same for all ranks; and whether the first rank wrote it."""
    for path in sorted(reports.rglob("*.xml")):
        is_first_rank = "-rank" not in path.stem or path.stem.endswith("-rank0")
        for case in ElementTree.parse(path).iter("testcase"):
            yield f"{path.parent.name}: {case.get('classname')}::{case.get('name')}", case, is_first_rank
