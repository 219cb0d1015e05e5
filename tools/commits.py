"""Checks the messages of the commits that origin/main does not have; does nothing without a history.

A subject is ``scope: do something``, in at most 72 characters, and a body says why.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

_SUBJECT = re.compile(r"[a-z0-9_.,/ -]+: (?P<verb>\w+)\b.*[^.]")
_NO_IMPERATIVE = re.compile(r".*(ed|ing)|adds|fixes|makes|removes|says|lets", re.I)
_BUT = {"embed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed", "bring", "ring", "string"}


def faults(message: str) -> list[str]:
    """What is wrong with a message."""
    subject, _, body = message.strip().partition("\n")
    found = [f"the subject has {len(subject)} characters, more than 72"] if len(subject) > 72 else []
    told = _SUBJECT.fullmatch(subject)
    if told is None:
        found.append("the subject is not 'scope: do something'")
    elif _NO_IMPERATIVE.fullmatch(verb := told["verb"]) and verb.lower() not in _BUT:
        found.append(f"the subject is not imperative: {verb!r}")
    if not re.sub(r"(?m)^[\w-]+-by: .*$", "", body).strip():
        found.append("no body says why")
    return found


def main() -> int:
    """Print the faults of all new commits."""
    listed = subprocess.run(["git", "log", "--no-merges", "-z", "--format=%h %B", "HEAD", "^origin/main"],
                            cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)  # fmt: skip
    if listed.returncode:
        return 0
    wrong = [(commit, fault) for commit in filter(None, listed.stdout.split("\0"))
             for fault in faults(commit.partition(" ")[2])]  # fmt: skip
    for commit, fault in wrong:
        print(f"{commit.splitlines()[0]}: {fault}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
