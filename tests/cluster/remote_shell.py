"""Run a command on a node, in the way of ssh: ``remote_shell.py STATE [-options] HOST COMMAND...``.

MPI's launchers start their daemons through it. Only the command travels; what the daemons say to each other
goes over the nodes' network. Where ssh would hang because a cable is cut, this hangs too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from waiting import until

UNREACHABLE = 255  # ssh's own exit code


def main(state: Path, *arguments: str) -> int:
    host, *command = arguments[next(i for i, word in enumerate(arguments) if not word.startswith("-")) :]
    pid, dark = state / f"{host}.pid", state / f"{host}.dark"
    if dark.exists() or not pid.exists():
        print(f"connect to host {host}: No route to host", file=sys.stderr)
        return UNREACHABLE
    home = {name: os.environ[name] for name in ("HOME", "LANG", "PATH", "USER") if name in os.environ}
    enter = ["nsenter", "--target", pid.read_text(), "--net", "--uts", "--mount", "--ipc", "--pid", "--wdns=/"]
    code = subprocess.run([*enter, "sh", "-c", " ".join(command)], env=home, check=False).returncode
    until(lambda: not dark.exists(), "a cable", float("inf"))  # no FIN comes through one that is cut
    return code if code >= 0 and pid.exists() else UNREACHABLE


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
