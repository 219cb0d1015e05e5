"""What is said of a suite, and where its checkout is."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Suite:
    """The tests of another project.

    Attributes:
        name: of its module in `suites`, and of its list of expected differences.
        title: in the table.
        checkout: the name of its folder, which may go on with a dash and the version.
        tests: files of tests, of which a checkout may not have all, and arguments of pytest that choose among them.
        package: what of theirs is installed, and tested; none: the checkout is.
        paths: that modules are imported from, relative to the checkout; ``*`` stands for anything.
        ranks: that torchrun starts; 0: the tests start theirs themselves, or have none.
        limit_s: after so many seconds it is ended, and what has not ended has failed.
        variables: of the environment.
    """

    name: str
    title: str
    checkout: str
    tests: tuple[str, ...]
    package: str = ""
    paths: tuple[str, ...] = ("",)
    ranks: int = 0
    limit_s: float = 900
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def find(self, source: Path) -> Path | None:
        """Its checkout below a folder, the newest by name; None where there is none."""
        return max((*source.glob(self.checkout), *source.glob(f"{self.checkout}-*")), default=None)

    def arguments(self, checkout: Path) -> list[str]:
        return [test for test in self.tests if not test.endswith(".py") or (checkout / test).exists()]

    def version(self, checkout: Path) -> str:
        """What a checkout is: the rest of its folder's name, or what git says of it; and what is tested with it."""
        told = checkout.name.removeprefix(self.checkout).strip("-")
        if not told and (checkout / ".git").exists():
            asked = ["git", "-C", str(checkout), "describe", "--tags", "--always"]
            told = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
        tested = f"tests of {told or '?'} on {self.package} {metadata.version(self.package)}" if self.package else told
        return tested or "unknown"
