"""Checks that nothing grows beyond tests/budget.toml: lines of Python for each folder, words of all pages.

A change that needs more takes it from elsewhere, or says in its message why the budget grows. ``--used`` prints what
there is, and checks nothing.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

REPO = Path(__file__).parents[1]
BUDGET = REPO / "tests" / "budget.toml"


def budget(text: str) -> dict[str, int]:
    """Read ``"folder" = number`` lines, as Python 3.10 has no tomllib."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    pairs = [line.partition("=") for line in lines if line]
    return {name.strip().strip('"'): int(number) for name, _, number in pairs}


def main() -> int:
    """Print what is above its budget."""
    allowed = budget(BUDGET.read_text())
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=REPO, capture_output=True, text=True,
                            check=False)  # fmt: skip
    used: Counter[str] = Counter()
    for path in listed.stdout.splitlines():
        file = REPO / path
        if file.is_symlink() or not file.is_file():
            continue
        if path.endswith(".md"):
            used["words"] += len(file.read_text().split())
        elif path.endswith(".py"):
            count = len(file.read_text().splitlines())  # of its folder, and of those above
            used.update({name: count for name in allowed if path.startswith(f"{name}/")})
    if "--used" in sys.argv:
        print("\n".join(f'"{name}" = {used[name]}' for name in allowed))
        return 0
    above = {name: count for name, count in used.items() if count > allowed[name]}
    for name, count in above.items():
        what = "words of all pages" if name == "words" else f"lines in {name}"
        print(f"{count} {what}, above the {allowed[name]} of tests/budget.toml")
    return int(bool(above))


if __name__ == "__main__":
    sys.exit(main())
