"""Which tests are expected to fail with our parts alone, what is not as expected, and the table of all suites.

A list of expected differences has a line for each: the test, where ``*`` stands for anything; what it says when it
fails; and why that is right. A bar between them, with a space at each side. Lines with ``#`` are for who reads it.
What fails with the projects' own parts, too, has no line.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from .outcomes import FAILED, PASSED, SKIPPED, Outcome

HEAD = ("suite", "version", "tests", "pass with theirs", "pass with ours", "fail with both", "fail as listed",
        "fail otherwise", "skipped")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Difference:
    """A test that is expected to fail, what it says then, and why."""

    test: str
    says: str
    why: str

    def covers(self, test: str) -> bool:
        return re.fullmatch(".*".join(map(re.escape, self.test.split("*"))), test) is not None


@dataclasses.dataclass(frozen=True)
class Row:
    """A suite in the table: what became of it with their own parts, and with ours.

    `wrong` has a line for all that is not as expected.
    """

    title: str
    version: str
    own: Sequence[Outcome]
    ours: Sequence[Outcome]
    expected: Sequence[Difference]

    @property
    def wrong(self) -> list[str]:
        found = [] if self.ours else ["no test ran"]
        if {one.test for one in self.own} != {one.test for one in self.ours}:
            found.append("other tests ran with their parts than with ours")
        for outcome in self.ours:
            about = [one for one in self.expected if one.covers(outcome.test)]
            if outcome.test in self._fail_with_theirs:
                found += [f"is in the list, and fails with their parts, too: {outcome.test}"] if about else []
            elif outcome.what == FAILED and not about:
                found.append(f"failed, and is not in the list: {outcome.test}: {short(outcome.why)}")
            elif outcome.what == FAILED and not any(one.says in outcome.why for one in about):
                found.append(f"failed otherwise than the list says ({about[0].says}): {outcome.test}: "
                             f"{short(outcome.why)}")  # fmt: skip
            elif outcome.what != FAILED and about:
                found.append(f"{outcome.what}, and is in the list of those that fail: {outcome.test}")
        found += [f"is in the list, and there is no such test: {one.test}" for one in self.expected
                  if not any(one.covers(outcome.test) for outcome in self.ours)]  # fmt: skip
        return found

    @property
    def cells(self) -> tuple[object, ...]:
        theirs, counted = (Counter(outcome.what for outcome in ended) for ended in (self.own, self.ours))
        both = sum(outcome.what == FAILED and outcome.test in self._fail_with_theirs for outcome in self.ours)
        right = len(self._explained)
        return (self.title, self.version, len(self.ours), theirs[PASSED], counted[PASSED], both, right,
                counted[FAILED] - both - right, counted[SKIPPED])  # fmt: skip

    @property
    def _fail_with_theirs(self) -> set[str]:
        return {outcome.test for outcome in self.own if outcome.what == FAILED}

    @property
    def explained(self) -> list[str]:
        """A line for each reason, with the number of tests that fail for it."""
        return [f"{count} x {why}" for why, count in Counter(self._explained).items()]

    @property
    def _explained(self) -> list[str]:
        """Why each test failed that did so as expected."""
        reasons = [
            [one.why for one in self.expected if one.covers(outcome.test) and one.says in outcome.why]
            for outcome in self.ours if outcome.what == FAILED and outcome.test not in self._fail_with_theirs
        ]  # fmt: skip
        return [found[0] for found in reasons if found]


def read(path: Path) -> list[Difference]:
    """Read a list of expected differences."""
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = [part.strip() for part in line.split(" | ")]
        if len(parts) != 3 or not all(parts):
            raise ValueError(f"{path.name}, line {number}: not 'test | what it says | why': {line}")
        found.append(Difference(*parts))
    return found


def table(rows: Iterable[Row]) -> str:
    lines = [HEAD, ["---"] * len(HEAD), *(row.cells for row in rows)]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def short(why: str) -> str:
    """What was raised, of a whole traceback: the last exception with a text, as a process may tell of another's."""
    said = [line[1:].strip() for line in why.splitlines() if line.startswith("E ")]
    raised = [line for line in said if re.match(r"[\w.]+: ", line)]
    return (raised[-1:] or said or [line for line in why.splitlines() if line.strip()] or ["nothing was said"])[0][:300]
