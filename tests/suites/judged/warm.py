"""A process that has imported what a training needs, and forks it again and again: imports take most of its time.

Usage: python warm.py SOCKET SCRIPT

Whoever connects to the socket sends where output goes, and, as JSON, arguments, environment, and whether ckpt-chaos
arms itself in the training, as in any process that it starts. It gets the number of the process, and its status.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
from pathlib import Path

from ckpt_chaos.targets.common import arm_from_env

HERE = Path(__file__).parent


def main(path: str, script: str) -> None:
    runpy.run_path(str(HERE / script))
    import torch._dynamo  # noqa: F401  # as any optimizer does at its first step

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            client, _ = listener.accept()
            if not os.fork():
                break
            client.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    said, fds, _, _ = socket.recv_fds(client, 1 << 20, 2)
    arguments, environment, is_armed = json.loads(said)
    if pid := os.fork():
        client.sendall(f"{pid}\n".encode())
        client.sendall(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())
        os._exit(0)
    client.close()
    for number, fd in enumerate(fds, 1):
        os.dup2(fd, number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = [script, *arguments]
    if is_armed:
        arm_from_env(0, lazy=True)
    runpy.run_path(str(HERE / script), run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
