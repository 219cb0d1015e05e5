"""Tells how a node is: a process of its agent, which must not be held up by a driver or a file system that hangs.

Questions and answers are lines of JSON on standard input, which is a socket. ``status`` tells of the heartbeats of the
job's ranks on this node, the committed steps that it holds, free memory, and GPUs; ``jobs`` of the jobs that are alive
here. ``clean`` deletes what the job holds here, and ``stacks`` has processes print the stacks of their threads.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from ..errors import MlflashError
from ..framework_files.background_files import leftovers
from ..launch.lines import Lines, pack
from ..memory.node_directory import clean
from ..telemetry.heartbeat import SHOW_STACKS, live_jobs, read_heartbeats
from ..text import last_words
from ..version import __version__
from .node_memory import look

_LARGEST_NBYTES = 1 << 24
_FLAGS_OF, _UP_AND_RUNNING = 0x8913, 0x41  # SIOCGIFFLAGS; IFF_UP | IFF_RUNNING
_ENDS_S = 10.0  # limit for couriers of a job that has just failed to end; see `courier.main.ORPHAN_S`
_GPU_S = 20.0  # nvidia-smi can hang on a GPU that fell off the bus


def status(memory: str, job: str, interface: str) -> dict[str, Any]:
    """The status of this node. Not collective. ``memory_error`` says why no rank can have slots here."""
    memory_error, free = "", 0
    try:
        space = os.statvfs(memory)
        free = space.f_bavail * space.f_frsize
    except OSError as error:
        memory_error = (f"the directory of its slots, {memory}, cannot be used ({error.strerror}): create it, or give "
                        "another one by MLFLASH_MEMORY or --memory")  # fmt: skip
    heard = read_heartbeats(memory, job)
    gpus, gpu_error = _gpus()
    return {
        "host": socket.gethostname(), "free": free, "memory_error": memory_error, "gpus": gpus, "gpu_error": gpu_error,
        "interface": _is_up(interface) if interface else None,
        "heartbeats": heard.heartbeats, "unread": heard.unread, "version": __version__,
        "steps": sorted({header.step for _, header in look(memory, job, "").sealed}),
    }  # fmt: skip


def _jobs(memory: str) -> dict[str, Any]:
    return {"jobs": live_jobs(memory), "version": __version__}


def _clean(memory: str, job: str) -> int:
    """Delete what a job holds on this node as soon as its last courier has ended; return the bytes freed."""
    return clean(memory, job, _ENDS_S) + leftovers(memory, job)


def _stacks(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, SHOW_STACKS)


_ANSWERS: dict[str, Callable[..., Any]] = {"status": status, "jobs": _jobs, "clean": _clean, "stacks": _stacks}


def _gpus() -> tuple[int, str]:
    """Number of GPUs that answer, and what is wrong in words. No GPU is known to answer if nvidia-smi does not."""
    if shutil.which("nvidia-smi") is None:
        return 0, "there is no nvidia-smi"
    process = subprocess.Popen(["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               stdin=subprocess.DEVNULL, errors="replace")  # fmt: skip
    try:
        output, _ = process.communicate(timeout=_GPU_S)
    except subprocess.TimeoutExpired:
        process.kill()  # it may not end by that; its agent starts another process like this one in time
        return 0, f"nvidia-smi took longer than {_GPU_S:g} s"
    return (len(output.splitlines()), "") if process.returncode == 0 else (0, last_words(output))


def _is_up(interface: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = fcntl.ioctl(asked, _FLAGS_OF, struct.pack("16sH14x", interface.encode(), 0))
        except OSError:
            return False
    return bool(struct.unpack("16sH14x", answer)[1] & _UP_AND_RUNNING == _UP_AND_RUNNING)


def main() -> None:
    """Answer until the other end is closed."""
    lines = Lines(_LARGEST_NBYTES)
    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as sock, contextlib.suppress(OSError):
        while received := sock.recv(1 << 16):
            for question in lines.add(received):
                number, what = question.pop("id"), question.pop("do")
                try:
                    answer = {"is": _ANSWERS[what](**question)}
                except (MlflashError, OSError, KeyError, TypeError, ValueError) as error:
                    answer = {"error": str(error) or repr(error)}
                sock.sendall(pack({"id": number, **answer}))


if __name__ == "__main__":
    main()
