"""Print the status of one node: ``python -m mlflash.launcher.node_status MEMORY [JOB [INTERFACE]]``.

The output is one JSON document: the heartbeats of the job's ranks on this node, the committed steps that it holds, free
memory, and GPUs. Without a job it lists the jobs that are alive on this node.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import struct
import sys
from typing import Any

from ..errors import LaunchFailed
from ..human_readable.wording import last_words
from ..inspection.node_memory import look
from ..telemetry.heartbeat import live_jobs, read_heartbeats
from ..version import __version__
from .processes import ask_within

_FLAGS_OF, _UP_AND_RUNNING = 0x8913, 0x41  # SIOCGIFFLAGS; IFF_UP | IFF_RUNNING
_GPU_S = 20.0  # nvidia-smi can hang on a GPU that fell off the bus


def main() -> int:
    """Print the status of this node."""
    if len(sys.argv) == 2:
        print(json.dumps({"jobs": live_jobs(sys.argv[1]), "version": __version__}), flush=True)
        return 0
    memory, job, *interface = sys.argv[1:]
    space = os.statvfs(memory)
    heard = read_heartbeats(memory, job)
    gpus, gpu_error = _gpus()
    found: dict[str, Any] = {
        "host": socket.gethostname(), "free": space.f_bavail * space.f_frsize, "gpus": gpus, "gpu_error": gpu_error,
        "interface": _is_up(interface[0]) if interface else None,
        "heartbeats": heard.heartbeats, "unread": heard.unread, "version": __version__,
        "steps": sorted({header.step for _, header in look(memory, job, "").sealed}),
    }  # fmt: skip
    print(json.dumps(found), flush=True)
    return 0


def _gpus() -> tuple[int, str]:
    """Number of GPUs that answer, and what is wrong in words. No GPU is known to answer if nvidia-smi does not."""
    if shutil.which("nvidia-smi") is None:
        return 0, "there is no nvidia-smi"
    try:
        done = ask_within(["nvidia-smi", "-L"], _GPU_S)
    except LaunchFailed as error:
        return 0, error.message
    return (len(done.stdout.splitlines()), "") if done.returncode == 0 else (0, last_words(done.stdout + done.stderr))


def _is_up(interface: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = fcntl.ioctl(asked, _FLAGS_OF, struct.pack("16sH14x", interface.encode(), 0))
        except OSError:
            return False
    return bool(struct.unpack("16sH14x", answer)[1] & _UP_AND_RUNNING == _UP_AND_RUNNING)


if __name__ == "__main__":
    sys.exit(main())
