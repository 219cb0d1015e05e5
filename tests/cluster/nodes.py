"""Several nodes on one Linux machine, made of namespaces: they can crash, lose their cable, and come back empty.

Each node has a network, UTS, mount, IPC and PID namespace, so its own hostname, /dev/shm, /tmp and processes.
Cables (veth pairs) join the nodes to a bridge in a "switch" namespace; the machine's own network is untouched.
One more node, the head, is where mpiexec runs; it shares the machine's process numbers, since only from there
can every node be entered.

Needs root, iproute2 and util-linux.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TextIO

from waiting import PATIENCE_S, until

HERE = Path(__file__).parent
HEAD = "head"
TOOLS = ("hostname", "ip", "mount", "nsenter", "tc", "unshare")
_SUBNET = "10.77.0"  # in namespaces of our own: it can clash with nothing


class Nodes:
    """Nodes with these hostnames, up and connected.

    All see the directory ``path`` of the machine, and ``shell`` is an executable that does what ssh does. They end with
    `close`, and by themselves when this process dies.
    """

    def __init__(self, names: Sequence[str]):
        self.names = tuple(names)
        self._addresses = {name: f"{_SUBNET}.{i}" for i, name in enumerate((HEAD, *names), 1)}
        self._up: dict[str, _Node] = {}
        self._dead: dict[str, _Node] = {}  # crashed, and not booted since
        self._boots = 0
        self._switch: subprocess.Popen[str] | None = None
        # Not in /tmp, which every node has of its own.
        self.path = Path(tempfile.mkdtemp(prefix="mlflash-nodes-", dir="/var/tmp"))
        try:
            self._write_files()
            self._plug_in_switch()
            self._boot([HEAD, *names])
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()

    def address(self, name: str) -> str:
        return self._addresses[name]

    # Life and death

    def boot(self, name: str) -> None:
        """Bring a crashed node up again: same name and address, nothing in its memory."""
        self._boot([name])

    def crash(self, name: str, power_cut: bool = False) -> None:
        """Take a node down with all that is in its memory.

        In a power cut the cable goes first, so that no peer hears of it (no FIN, no RST). Otherwise the node's kernel
        closes its connections, and lives on for as long as that takes on a slow cable.
        """
        if power_cut:
            self.cut(name)
        node = self._up.pop(name)
        self._state(name, "pid").unlink()
        node.kill()
        until(lambda: not _processes({node.network}), "processes of a crashed node end")
        self._dead[name] = node

    def close(self) -> None:
        """End all nodes and everything that runs on them, and remove every trace. May be called twice."""
        processes = [node.process for node in self._up.values()] + ([self._switch] if self._switch else [])
        networks = {network for process in processes if (network := _network(process.pid))}
        networks.discard(_network(os.getpid()))  # of a node that died while it was made
        for process in processes:
            process.kill()
        _kill_until_none(lambda: _processes(networks))
        for process in processes:
            _end(process)
        for node in (*self._up.values(), *self._dead.values()):
            node.release_network()
        self._up, self._dead, self._switch = {}, {}, None
        shutil.rmtree(self.path, ignore_errors=True)

    # The network

    def cut(self, name: str) -> None:
        """Pull the cable of a node: packets vanish, connections stay."""
        self._state(name, "dark").touch()
        self._ip_switch(f"link set {self._up[name].port} down")

    def plug(self, name: str) -> None:
        self._ip_switch(f"link set {self._up[name].port} up")
        self._state(name, "dark").unlink()

    def limit_rate(self, name: str, mbit: int) -> None:
        """Limit what a node's cable carries, each way, to so many Mbit/s."""
        assert self._switch is not None
        node = self._up[name]
        for pid, port in ((self._switch.pid, node.port), (node.pid, "eth0")):
            shape = ["root", "tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms"]
            _run(["nsenter", "--target", str(pid), "--net", "tc", "qdisc", "replace", "dev", port, *shape])

    def sent_nbytes(self, name: str) -> int:
        """Bytes that a node has sent over its cable since it was booted."""
        assert self._switch is not None
        lines = Path(f"/proc/{self._switch.pid}/net/dev").read_text().splitlines()
        counts = {port.strip(): numbers.split() for port, _, numbers in (line.partition(":") for line in lines)}
        return int(counts[self._up[name].port][0])

    # Processes

    def command(self, name: str, argv: Sequence[str]) -> list[str]:
        pids = [] if name == HEAD else ["--pid"]
        spaces = ["--net", "--uts", "--mount", "--ipc", *pids]
        return ["nsenter", "--target", str(self._up[name].pid), *spaces, "--wdns=/", *argv]

    def run(self, name: str, *argv: str) -> str:
        return _run(self.command(name, argv))

    def running(self, name: str, word: str = "") -> list[int]:
        """Process numbers (of the machine) of what runs on a node, where ``word`` is one of its arguments."""
        if name not in self._up:
            return []
        node = self._up[name]
        found = [pid for pid in _processes({node.network}) if pid not in (node.pid, node.process.pid)]
        return [pid for pid in found if not word or word in _arguments(pid)]

    def stop_all(self) -> None:
        """Kill whatever runs on the nodes and the head; the nodes stay up, with their memory."""
        _kill_until_none(lambda: [pid for name in self._up for pid in self.running(name)])

    # Making them

    def _write_files(self) -> None:
        hosts = "".join(f"{address} {name}\n" for name, address in self._addresses.items())
        (self.path / "hosts").write_text("127.0.0.1 localhost\n" + hosts)
        self.shell = self.path / "ssh"
        command = shlex.join([sys.executable, "-I", str(HERE / "remote_shell.py"), str(self.path)])
        self.shell.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        self.shell.chmod(0o700)

    def _plug_in_switch(self) -> None:
        # cat ends when this process does, as the nodes do.
        self._switch = _start(["unshare", "--net", "cat"])
        own, switch = _network(os.getpid()), self._switch
        until(lambda: _network(switch.pid) not in (None, own), "the switch has a network")
        self._ip_switch("link add br0 type bridge\nlink set br0 up")

    def _boot(self, names: Sequence[str]) -> None:
        for name in names:  # all at once, as each takes a moment
            assert name not in self._up, f"{name} is up"
            if (dead := self._dead.pop(name, None)) is not None:
                self._ip_switch(f"link del {dead.port}")
                dead.release_network()
            self._boots += 1
            with self._state(name, "log").open("w") as log:
                self._up[name] = _Node(self._start_init(name, log), f"port{self._boots}")
        for name in names:
            node = self._up[name]
            node.wait_ready(self._state(name, "log"))
            self._connect(name, node)
            self._state(name, "dark").unlink(missing_ok=True)
            self._state(name, "pid").write_text(str(node.pid))

    def _start_init(self, name: str, log: TextIO) -> subprocess.Popen[str]:
        scratch = self.path / f"{name}.scratch"
        scratch.mkdir(exist_ok=True)
        needed = {os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, HERE.parents[1])}
        keep = sorted(path for path in needed if path.startswith("/tmp/"))
        own_pids = name != HEAD
        spec = {"name": name, "hosts": str(self.path / "hosts"), "scratch": str(scratch), "keep": keep,
                "own_pids": own_pids}  # fmt: skip
        pids = ["--pid", "--fork", "--kill-child"] if own_pids else []
        spaces = ["--net", "--uts", "--mount", "--ipc", *pids]
        return _start(["unshare", *spaces, sys.executable, "-I", str(HERE / "init.py"), json.dumps(spec)], log)

    def _connect(self, name: str, node: _Node) -> None:
        address = self._addresses[name]
        # A card address that stays over a reboot: peers need not forget the old one.
        card = "02:00:00:00:00:{:02x}".format(int(address.rpartition(".")[2]))
        self._ip_switch(
            f"link add {node.port} type veth peer name eth0 address {card} netns {node.pid}\n"
            f"link set {node.port} master br0 up"
        )
        _ip(node.pid, f"link set lo up\naddr add {address}/24 dev eth0\nlink set eth0 up")

    def _ip_switch(self, batch: str) -> None:
        assert self._switch is not None
        _ip(self._switch.pid, batch)

    def _state(self, name: str, kind: str) -> Path:
        return self.path / f"{name}.{kind}"


class _Node:
    """A node that is up; ``port`` is the switch's end of its cable."""

    def __init__(self, process: subprocess.Popen[str], port: str):
        self.process, self.port = process, port
        self.pid = process.pid  # its PID 1, by the machine's numbers; the init of the head
        self.network = ""  # everything on a node is in this namespace
        self._network_fd = -1  # the network stays while this is open, without a process in it

    def wait_ready(self, log: Path) -> None:
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
        if not readable or self.process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{log.stem} did not come up:\n{log.read_text()}")
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        self.pid = int(children[0]) if children else self.process.pid
        self._network_fd = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self.network = _network(self.pid) or ""

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        _end(self.process)

    def release_network(self) -> None:
        if self._network_fd >= 0:
            os.close(self._network_fd)
            self._network_fd = -1


def _start(command: list[str], log: TextIO | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd="/",
                            start_new_session=True)  # fmt: skip


def _end(process: subprocess.Popen[str]) -> None:
    """Wait for a killed process and close its pipes."""
    process.wait(PATIENCE_S)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _run(command: list[str], stdin: str = "") -> str:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} ended with {done.returncode}:\n{stdin}{done.stdout}{done.stderr}")
    return done.stdout


def _ip(pid: int, batch: str) -> None:
    """Run ip's commands, one a line, in the network of a process."""
    _run(["nsenter", "--target", str(pid), "--net", "ip", "-batch", "-"], batch + "\n")


def _network(pid: int) -> str | None:
    """The network namespace of a process, or None where it is gone."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None


def _processes(networks: set[str]) -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and _network(int(name)) in networks]


def _arguments(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def _kill_until_none(find: Callable[[], list[int]]) -> None:
    def none_left() -> bool:
        found = find()
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        return not found

    until(none_left, "killed processes end")
