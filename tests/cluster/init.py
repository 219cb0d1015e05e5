"""PID 1 of a node: give it its own /proc, /dev/shm, /tmp and hostname, then reap orphans until the test run is gone.

Started by `nodes.py` in fresh namespaces, as ``init.py '{"name": ..., ...}'``. It says "ready" on stdout.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys


def furnish(name: str, hosts: str, scratch: str, keep: list[str], own_pids: bool) -> None:
    """Make this mount and UTS namespace a node.

    ``hosts`` becomes /etc/hosts, the empty directory ``scratch`` is used as a mount point for a moment, and the node
    still needs the directories ``keep`` below /tmp.
    """
    if own_pids:
        mount("-t", "proc", "proc", "/proc")
    mount("-t", "tmpfs", "-o", "size=256m,mode=1777", "tmpfs", scratch)
    for path in keep:
        place = scratch + path.removeprefix("/tmp")
        os.makedirs(place, exist_ok=True)
        mount("--bind", path, place)
    mount("--move", scratch, "/tmp")
    mount("-t", "tmpfs", "-o", "size=1g,mode=1777", "tmpfs", "/dev/shm")
    mount("--bind", hosts, "/etc/hosts")
    subprocess.run(["hostname", name], check=True)


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def reap(*_: object) -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    furnish(**json.loads(sys.argv[1]))
    signal.signal(signal.SIGCHLD, reap)
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    print("ready", flush=True)
    # Nobody writes: stdin ends when the test run does, however it dies, and the node goes with its PID 1.
    sys.stdin.read()
