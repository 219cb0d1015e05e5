"""What became of each test, which failures are expected with our parts alone, and the table of all suites.

A list of expected differences has a line for each: the test, where ``*`` stands for anything; what it says when it
fails; and why that is right. A bar between them, with a space at each side. Lines with ``#`` are for who reads it.
What fails with the projects' own parts, too, has no line.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
HEAD = ("suite", "version", "tests", "pass with theirs", "pass with ours", "fail with both", "fail as listed",
        "fail otherwise", "skipped")  # fmt: skip
Outcomes = dict[str, tuple[str, str]]
"""Of each test what became of it, and all that was said where it failed or was skipped."""


class Difference(NamedTuple):
    """A test that is expected to fail, what it says then, and why."""

    test: str
    says: str
    why: str

    def covers(self, test: str) -> bool:
        return re.fullmatch(".*".join(map(re.escape, self.test.split("*"))), test) is not None


class Row:
    """A suite in the table: what became of it with their own parts, and with ours.

    Attributes:
        reasons: why tests failed that did so as expected, and how many for each.
        wrong: a line for all that is not as expected.
    """

    def __init__(self, title: str, version: str, own: Outcomes, ours: Outcomes, expected: list[Difference]):
        self.title, self.version = title, version
        self.reasons, self.wrong = Counter[str](), [] if ours else ["no test ran"]
        if own.keys() != ours.keys():
            self.wrong.append("other tests ran with their parts than with ours")
        theirs, counted = (Counter(what for what, _ in ended.values()) for ended in (own, ours))
        both = 0
        for test, (what, said) in ours.items():
            about = [difference for difference in expected if difference.covers(test)]
            reasons = [difference.why for difference in about if difference.says in said]
            fails_with_theirs = own.get(test, ("", ""))[0] == FAILED
            both += fails_with_theirs and what == FAILED
            if fails_with_theirs:
                self.wrong += [f"is in the list, and fails with their parts, too: {test}"] if about else []
            elif what == FAILED and reasons:
                self.reasons[reasons[0]] += 1
            elif what == FAILED:
                listed = f"otherwise than the list says ({about[0].says})" if about else "and is not in the list"
                self.wrong.append(f"failed, {listed}: {test}: {short(said)}")
            elif about:
                self.wrong.append(f"{what}, and is in the list of those that fail: {test}")
        self.wrong += [f"is in the list, and there is no such test: {difference.test}" for difference in expected
                       if not any(map(difference.covers, ours))]  # fmt: skip
        listed = self.reasons.total()
        self.cells = (title, version, len(ours), theirs[PASSED], counted[PASSED], both, listed,
                      counted[FAILED] - both - listed, counted[SKIPPED])  # fmt: skip


def read_expected(path: Path) -> list[Difference]:
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    return [Difference(*(part.strip() for part in line.split(" | "))) for line in lines]


def read_outcomes(folder: Path) -> Outcomes:
    """Read what all ranks have written: what failed on one has failed, and so has what has no end on one."""
    ranks = []
    for path in sorted(folder.glob("*.jsonl")):
        ranks.append(rank := Outcomes())
        for test, what, why in map(json.loads, path.read_text().splitlines()):
            if rank.get(test, ("", ""))[0] != FAILED:  # a test that failed is torn down all the same
                rank[test] = what, why
    found = Outcomes()
    for test in dict.fromkeys(test for rank in ranks for test in rank):
        ends = [rank.get(test) or ("", "") for rank in ranks]
        failed = [why or "it has no end on some rank" for what, why in ends if what in (FAILED, "")]
        skipped = all(what == SKIPPED for what, _ in ends)
        found[test] = (FAILED, "\n".join(failed)) if failed else (SKIPPED if skipped else PASSED, ends[0][1])
    return found


def table(rows: Iterable[Row]) -> str:
    lines = [HEAD, ["---"] * len(HEAD), *(row.cells for row in rows)]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def short(why: str) -> str:
    """What was raised, of a whole traceback: the last exception with a text, as a process may tell of another's."""
    said = [line[1:].strip() for line in why.splitlines() if line.startswith("E ")]
    raised = [line for line in said if re.match(r"[\w.]+: ", line)]
    return (raised[-1:] or said or [line for line in why.splitlines() if line.strip()] or ["nothing was said"])[0][:300]
