"""The channel between a trainer and its courier: what goes in comes out, and each method that is called exists."""

from __future__ import annotations

import ast
import inspect
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlflash
from mlflash.channel import channel
from mlflash.channel.channel import Broken, Call, Channel, Reply
from mlflash.channel.client import Client, TrainerState
from mlflash.channel.records import Trainer
from mlflash.courier.session import Session
from mlflash.errors import Closed, MlflashError

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=300),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)  # fmt: skip


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    first, second = socket.socketpair()
    with first, second:
        for sock in (first, second):
            sock.settimeout(20)
        yield Channel(first), Channel(second)


@given(values=st.lists(PLAIN, min_size=1, max_size=5), cut=st.integers(1, 50))
def test_frames_arrive_as_they_were_sent_however_the_bytes_come(values: list[object], cut: int) -> None:
    sent = [Call(1, number, "method", (value,)) for number, value in enumerate(values)]
    sent += [Reply(1, 2, values, Closed("ended", rank=3))]
    first, second = socket.socketpair()
    with first, second:
        sender = Channel(first)
        for frame in sent:
            sender.send(frame)
        first.shutdown(socket.SHUT_WR)
        raw = b"".join(iter(lambda: second.recv(1 << 20), b""))
    frames: list[Call | Reply] = []
    first, second = socket.socketpair()
    with first, second:
        receiver = Channel(second)
        for at in range(0, len(raw), cut):
            first.sendall(raw[at : at + cut])
            frames += receiver.receive() or []
    assert frames[:-1] == sent[:-1]
    (reply,) = frames[-1:]
    assert isinstance(reply, Reply) and reply.result == values
    with pytest.raises(Closed, match="ended") as raised:
        reply.value()
    assert raised.value.rank == 3


def received(end: Channel, count: int = 1) -> list[Call | Reply]:
    frames: list[Call | Reply] = []
    while len(frames) < count:
        frames += end.receive() or pytest.fail("the other end has gone")
    return frames


def test_a_long_tuple_travels_once(ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = ends
    layouts = [tuple((n, i) for i in range(1000)) for n in range(12)]
    for layout in [layouts[0], layouts[0], *layouts, layouts[0], layouts[11]]:
        sender.send(Call(1, 0, "save", (layout, 5)))
        (call,) = received(receiver)
        assert call.args == (layout, 5)
    first = call.args[0]
    monkeypatch.setattr(channel, "_READ_NBYTES", 400)  # no more is sent of it
    sender.send(Call(1, 0, "save", (layouts[11],)))
    (call,) = received(receiver)
    assert call.args[0] is first


def test_what_cannot_be_sent_is_an_error_and_the_next_frame_arrives(ends: tuple[Channel, Channel]) -> None:
    first, second = ends
    layout = tuple(range(100))
    with pytest.raises(MlflashError, match="cannot be sent"):
        first.send(Call(1, 0, "save", (layout, lambda: None)))
    for _ in range(2):
        first.send(Call(1, 0, "save", (layout,)))
    assert [call.args for call in received(second, 2)] == [(layout,)] * 2


def test_other_bytes_are_no_frame(ends: tuple[Channel, Channel]) -> None:
    first, second = ends
    first.sock.sendall((20).to_bytes(8, "big") + b"no pickle, no pickle")
    with pytest.raises(Broken, match="cannot be read"):
        second.receive()


def calls(*names: str) -> dict[str, set[str]]:
    """The methods that are called by name, by the function that calls them."""
    called: dict[str, set[str]] = {name: set() for name in names}
    root = Path(mlflash.__file__).parent
    for path in {*root.rglob("*.py")} - {
        path for name in ("launch", "telemetry") for path in (root / name).rglob("*.py")
    }:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names:
                position = 2 if node.func.attr == "together_then" else 0
                arg = node.args[position] if len(node.args) > position else None
                if isinstance(arg, ast.Constant) and isinstance(arg.value, str):
                    called[node.func.attr].add(arg.value)
    return called


def test_each_method_that_is_called_by_name_exists() -> None:
    by_caller = calls("call", "job", "ask", "notify", "together_then", "_ask", "_tell")
    jobs = by_caller["call"] | by_caller["job"] | by_caller["together_then"]
    assert len(jobs) > 20 and len(by_caller["ask"]) > 3 and len(by_caller["_ask"]) > 5
    called = (jobs | by_caller["ask"] | by_caller["notify"]) - {"close"}  # which ends the thread of jobs, too
    assert {name for name in called if not inspect.isfunction(getattr(Session, name, None))} == set()
    assert jobs >= Session.ASK_BACK
    ends = (Trainer, TrainerState, Client)
    asked = by_caller["_ask"] | by_caller["_tell"]
    assert {name for name in asked if not any(hasattr(end, name) for end in ends)} == set()
