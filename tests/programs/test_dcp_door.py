"""The door through which DCP's checkpoint process asks its parent: who is let in, and that nobody holds it up."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from processes import killed_in_the_end, ran
from waiting import until

from mlflash.adapters.dcp.process import Door, open_door
from mlflash.errors import DeadlineExceeded

END_S = 60

NO_DESCRIPTORS = """
import json, resource, sys, time
from mlflash.adapters.dcp.process import open_door
import waiting

door = open_door(lambda question: question + 1)
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
print(json.dumps([door.address, door.key.hex()]), flush=True)
sys.stdin.readline()
before, wall = time.process_time(), time.monotonic()
waiting.take(1)
print((time.process_time() - before) / (time.monotonic() - wall), flush=True)
sys.stdin.readline()
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
sys.stdin.readline()
"""

STRANGER = """
import os, socket, sys
os.setgid(65534)
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as stranger:
    stranger.settimeout(30)
    stranger.connect(bytes.fromhex(sys.argv[1]))
    try:
        print(len(stranger.recv(1)))
    except ConnectionResetError:
        print(0)
"""


def refuse(question: object) -> object:
    raise ValueError(f"no answer to {question}")


def connected(door: Door) -> socket.socket:
    line = socket.socket(socket.AF_UNIX)
    line.settimeout(END_S)
    line.connect(door.address)
    return line


def test_what_is_asked_is_answered_or_raised() -> None:
    assert open_door(lambda question: [question, None]).ask("a", END_S) == ["a", None]
    with pytest.raises(ValueError, match="no answer to a"):
        open_door(refuse).ask("a", END_S)


def test_who_connects_and_says_nothing_holds_nobody_up() -> None:
    door = open_door(lambda question: question + 1)
    with connected(door) as silent, connected(door) as other:
        assert silent.recv(1) and other.recv(1)  # both have been let in
        assert door.ask(1, END_S) == 2


def test_more_silent_connections_than_it_hears_are_closed() -> None:
    door = open_door(lambda question: question + 1)
    with contextlib.ExitStack() as silent:
        heard = [silent.enter_context(connected(door)) for _ in range(64)]
        assert all(line.recv(1) for line in heard)
        assert not silent.enter_context(connected(door)).recv(1)
        heard[0].close()
        until(lambda: asked(door) == 2, "there is room for another one")


def asked(door: Door) -> object:
    try:
        return door.ask(1, END_S)
    except (EOFError, ConnectionError):  # it is closed at once
        return None


def test_who_asks_waits_no_longer_than_it_said_whatever_the_parent_does() -> None:
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(f"\0mlflash-test-{os.urandom(8).hex()}")
        hung.listen()
        with pytest.raises(DeadlineExceeded, match="did not answer for 1 s"):
            Door(hung.getsockname().decode(), b"key").ask("a", 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_another_user_is_let_go_before_anything_is_said() -> None:
    door = open_door(lambda question: question)
    assert ran(sys.executable, "-S", "-c", STRANGER, door.address.encode().hex()).stdout == "0\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_what_another_user_has_opened_is_not_asked() -> None:
    name = f"mlflash-test-{os.urandom(8).hex()}"
    program = "import os, socket, sys; os.setgid(65534); os.setuid(65534); s = socket.socket(socket.AF_UNIX)\n" \
              f"s.bind('\\0{name}'); s.listen(); print(flush=True); sys.stdin.read()"  # fmt: skip
    command = [sys.executable, "-S", "-c", program]
    with killed_in_the_end(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as there:
        there.stdout.readline()
        with pytest.raises(PermissionError, match="belongs to user 65534"):
            Door(f"\0{name}", b"key").ask("a", END_S)


def test_without_descriptors_it_rests_and_answers_as_soon_as_there_is_one(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    with errors.open("w") as stderr, killed_in_the_end(
        [sys.executable, "-c", NO_DESCRIPTORS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
    ) as parent:  # fmt: skip
        address, key = json.loads(parent.stdout.readline())
        door = Door(address, bytes.fromhex(key))
        with connected(door):  # for which the descriptor was there already
            until(lambda: "Too many open files" in errors.read_text(), errors.read_text, END_S)
            print(file=parent.stdin, flush=True)  # it goes on
            share = float(parent.stdout.readline())
            assert share < 0.2, f"it kept a core busy for {share:.0%} of the time"
            print(file=parent.stdin, flush=True)
            assert door.ask(1, END_S) == 2
        assert errors.read_text().count("cannot be heard") == 1
