"""The nodes themselves: what they share and do not share, and how a peer sees their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster.nodes import HEAD, Nodes
from harness import SUPPORT, TESTS
from waiting import PATIENCE_S, until

LISTEN = """
import socket
server = socket.create_server(("", 7000))
while True:
    peer, _ = server.accept()
    while peer.recv(1 << 20):
        peer.send(b"x")
    peer.close()
"""
TALK = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 7000), timeout=60)
for line in sys.stdin:
    peer.settimeout(float(line))
    try:
        peer.send(b"x")
        print("answer" if peer.recv(1) else "closed", flush=True)
    except TimeoutError:
        print("silence", flush=True)
    except ConnectionError:
        print("closed", flush=True)
"""
SEND = """
import socket, sys, time
peer, began, nbytes = socket.create_connection((sys.argv[1], 7000), timeout=60), time.monotonic(), int(sys.argv[2])
peer.sendall(bytes(nbytes))
peer.shutdown(socket.SHUT_WR)
while peer.recv(1 << 20):
    pass
print(time.monotonic() - began)
"""


class Talk:
    """A connection from a node to another one, kept open."""

    def __init__(self, nodes: Nodes, one: str, other: str):
        listen(nodes, other)
        command = nodes.command(one, [sys.executable, "-c", TALK, other])
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def say(self, patience_s: float) -> str:
        """Send a byte: "answer", "closed", or "silence" where neither comes in time."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{patience_s}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()


def listen(nodes: Nodes, host: str) -> None:
    # The shell returns at once: PID 1 of the node takes the server over.
    nodes.run(host, "sh", "-c", '"$0" -c "$1" >/dev/null 2>&1 &', sys.executable, LISTEN)
    until(lambda: "1B58" in nodes.run(host, "cat", "/proc/net/tcp"), "somebody listens to port 7000")


def test_each_node_has_a_name_a_memory_and_processes_of_its_own(nodes: Nodes) -> None:
    before = set(os.listdir("/dev/shm"))
    for host in nodes.names:
        assert nodes.run(host, "hostname").strip() == host
        for place in ("/dev/shm", "/tmp"):
            nodes.run(host, "sh", "-c", f'test -z "$(find {place} -xdev -type f)" && echo {host} > {place}/{host}')
        assert nodes.run(host, "sh", "-c", "echo /proc/[0-9]*").count("/proc/") <= 3, "it sees processes of others"
    assert {host for host in nodes.names if nodes.run(host, "cat", f"/dev/shm/{host}").strip() != host} == set()
    assert not {*nodes.names} & (set(os.listdir("/dev/shm")) - before)
    assert nodes.run(HEAD, "hostname").strip() == HEAD


def test_a_crashed_node_loses_its_memory_and_comes_back_by_the_same_name(nodes: Nodes) -> None:
    for power_cut in (False, True):
        nodes.run("host2", "sh", "-c", "head -c 1M /dev/zero > /dev/shm/slot")
        nodes.crash("host2", power_cut)
        with pytest.raises(KeyError):
            nodes.run("host2", "true")
        nodes.boot("host2")
        assert nodes.run("host2", "ls", "/dev/shm") == ""
        with Talk(nodes, "host1", "host2") as talk:
            assert talk.say(PATIENCE_S) == "answer"


def test_a_peer_hears_of_a_crash_and_does_not_hear_of_a_power_cut(nodes: Nodes) -> None:
    with Talk(nodes, "host1", "host2") as crash, Talk(nodes, "host1", "host3") as power_cut:
        assert crash.say(PATIENCE_S) == power_cut.say(PATIENCE_S) == "answer"
        nodes.crash("host2")
        nodes.crash("host3", power_cut=True)
        assert crash.say(PATIENCE_S) == "closed"
        assert power_cut.say(1) == "silence"


def test_a_peer_hears_of_a_crash_even_behind_what_a_slow_cable_still_carries(nodes: Nodes) -> None:
    listen(nodes, "host3")
    with Talk(nodes, "host1", "host2") as talk:
        assert talk.say(PATIENCE_S) == "answer"
        nodes.limit_rate("host2", 20)
        send = '"$0" -c "$1" host3 100000000 >/dev/null 2>&1 &'
        before = nodes.sent_nbytes("host2")
        nodes.run("host2", "sh", "-c", send, sys.executable, SEND)
        until(lambda: nodes.sent_nbytes("host2") >= before + 300_000, "some of it is sent")
        nodes.crash("host2")
        assert talk.say(PATIENCE_S) == "closed"


def test_a_cable_that_is_plugged_in_again_brings_what_was_sent_meanwhile(nodes: Nodes) -> None:
    with Talk(nodes, "host1", "host2") as talk:
        assert talk.say(PATIENCE_S) == "answer"
        nodes.cut("host2")
        assert talk.say(1) == "silence"
        nodes.plug("host2")
        assert talk.say(PATIENCE_S) == "answer"


def test_a_rate_limit_slows_both_ways_down_and_bytes_are_counted(nodes: Nodes) -> None:
    listen(nodes, "host2")
    listen(nodes, "host1")
    nbytes, mbit = 4_000_000, 80
    nodes.limit_rate("host1", mbit)
    for one, other in (("host1", "host2"), ("host2", "host1")):
        before = nodes.sent_nbytes(one)
        seconds = float(nodes.run(one, sys.executable, "-c", SEND, other, str(nbytes)))
        assert seconds > 0.8 * 8 * nbytes / (mbit * 1e6)
        assert nodes.sent_nbytes(one) - before > nbytes


def test_the_remote_shell_runs_commands_and_says_so_where_a_node_is_gone(nodes: Nodes) -> None:
    def ssh(host: str) -> subprocess.CompletedProcess[str]:
        words = [str(nodes.shell), "-x", host, "hostname;", "exit", "7"]
        return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    assert (ssh("host1").stdout, ssh("host1").returncode) == ("host1\n", 7)
    nodes.crash("host1")
    nodes.cut("host2")
    for host in ("host1", "host2"):
        assert (ssh(host).stdout, ssh(host).returncode) == ("", 255)
        assert "No route to host" in ssh(host).stderr


def test_two_sets_live_side_by_side_and_nothing_is_left_of_one_that_failed(nodes: Nodes) -> None:
    with pytest.raises(ZeroDivisionError), Nodes(["host1", "host2"]) as others:
        others.run("host1", "touch", "/dev/shm/theirs")
        others.run("host1", "sh", "-c", "sleep 1000 >/dev/null 2>&1 &")
        # The shell does not wait until it runs.
        sleeping = until(lambda: others.running("host1", "1000"), "the sleep begins")
        assert nodes.run("host1", "ls", "/dev/shm") == ""
        others.cut("host1")
        _ = 1 / 0
    assert not others.path.exists()
    assert not [pid for pid in sleeping if Path(f"/proc/{pid}").exists()]
    assert str(others.path) not in Path("/proc/self/mountinfo").read_text()
    assert not [name for name in os.listdir("/sys/class/net") if name.startswith("port")]
    others.close()  # twice does no harm
    with Talk(nodes, "host1", "host2") as talk:
        assert talk.say(PATIENCE_S) == "answer"


def test_nodes_end_with_the_process_that_made_them_even_if_it_is_killed(may_make_nodes: None, shm: Path) -> None:
    program = """
from cluster.nodes import Nodes
from waiting import hang
nodes = Nodes(["host1"])
print(nodes.path, *(p.read_text() for p in sorted(nodes.path.glob("*.pid"))), flush=True)
hang()
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (SUPPORT, TESTS)))}
    maker = subprocess.Popen([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    path, *pids = maker.stdout.readline().split()
    assert len(pids) == 2 and all(Path(f"/proc/{pid}").exists() for pid in pids)
    maker.send_signal(signal.SIGKILL)
    maker.communicate(timeout=PATIENCE_S)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the end of the nodes")
    subprocess.run(["rm", "-r", path], check=True)  # the one thing that nobody was left to remove
