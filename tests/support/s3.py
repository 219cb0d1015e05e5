"""A real S3 server (moto's) in a process of its own on loopback, which can be stopped and started again."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

_PROGRAM = """
import sys
from moto.server import ThreadedMotoServer
port, server = 0, None
for line in sys.stdin:
    if line == "start\\n":
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
        server.start()
        port = server._server.port
    else:
        server.stop()
    print(port, flush=True)
"""


class Server:
    """The server; what is in its buckets outlives a stop, and so does its address."""

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process
        self.address = ""
        self.start()

    def start(self) -> None:
        self.address = f"http://127.0.0.1:{self._tell('start')}"

    def stop(self) -> None:
        self._tell("stop")

    def _tell(self, what: str) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()


@contextlib.contextmanager
def served() -> Iterator[Server]:
    process = subprocess.Popen([sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, text=True)  # fmt: skip
    try:
        yield Server(process)
    finally:
        process.communicate(timeout=30)


@contextlib.contextmanager
def used(address: str, **more: str) -> Iterator[None]:
    """Let S3 clients of this process find a server, as users do it: in the environment."""
    settings = {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
                "AWS_DEFAULT_REGION": "us-east-1", **more}  # fmt: skip
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
