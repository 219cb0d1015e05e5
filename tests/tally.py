"""Add up the reports of all test runs; fail where a test was skipped that this machine could have run.

Usage: tally.py DIRECTORY [OTHER RESULTS...]   where other results are "name=0" (passed) or "name=1" (failed).
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

# A skip for one of these reasons is right on a machine without the thing named.
MAY_SKIP = ("needs CUDA", "needs RDMA", "needs root", "needs netem")


def main() -> int:
    passed = failed = 0
    ran: set[str] = set()
    skipped: dict[str, str] = {}
    for path in sorted(Path(sys.argv[1]).rglob("*.xml")):
        first_rank = "-rank" not in path.stem or path.stem.endswith("-rank0")
        for case in ElementTree.parse(path).iter("testcase"):
            name = f"{path.parent.name}: {case.get('classname')}::{case.get('name')}"
            bad = [child for child in case if child.tag in ("failure", "error")]
            skip = case.find("skipped")
            if bad:
                failed += 1
                print(f"failed in {path}: {name}")
            elif skip is not None:
                skipped[name] = skip.get("message", "")
            else:
                passed += first_rank
                ran.add(name)
    for other in sys.argv[2:]:
        name, _, code = other.partition("=")
        passed, failed = passed + (code == "0"), failed + (code != "0")
        if code != "0":
            print(f"failed: {name}")
    # A test that needs two ranks is skipped on one and runs on two: that is no skip.
    never_ran = {name: reason for name, reason in skipped.items() if name not in ran}
    for name, reason in never_ran.items():
        print(f"skipped: {name}: {reason}")
        failed += not reason.startswith(MAY_SKIP)
    if not ran:
        print("no test ran")
        failed += 1
    print(f"{passed} passed, {failed} failed, {len(never_ran)} skipped")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
