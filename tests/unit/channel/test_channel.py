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
    one, other = socket.socketpair()
    with one, other:
        for sock in (one, other):
            sock.settimeout(20)
        yield Channel(one), Channel(other)


@given(values=st.lists(PLAIN, min_size=1, max_size=5), cut=st.integers(1, 50))
def test_frames_arrive_as_they_were_sent_however_the_bytes_come(values: list[object], cut: int) -> None:
    sent = [Call(1, number, "method", (value,)) for number, value in enumerate(values)]
    sent += [Reply(1, 2, values, Closed("ended", rank=3))]
    one, other = socket.socketpair()
    with one, other:
        sender = Channel(one)
        for frame in sent:
            sender.send(frame)
        one.shutdown(socket.SHUT_WR)
        raw = b"".join(iter(lambda: other.recv(1 << 20), b""))
    got: list[Call | Reply] = []
    one, other = socket.socketpair()
    with one, other:
        receiver = Channel(other)
        for at in range(0, len(raw), cut):
            one.sendall(raw[at : at + cut])
            got += receiver.receive() or []
    assert got[:-1] == sent[:-1]
    (reply,) = got[-1:]
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
    one, other = ends
    layouts = [tuple((n, i) for i in range(1000)) for n in range(12)]
    for layout in [layouts[0], layouts[0], *layouts, layouts[0], layouts[11]]:
        one.send(Call(1, 0, "save", (layout, 5)))
        (call,) = received(other)
        assert call.args == (layout, 5)
    first = call.args[0]
    monkeypatch.setattr(channel, "_READ_NBYTES", 400)  # no more is sent of it
    one.send(Call(1, 0, "save", (layouts[11],)))
    (call,) = received(other)
    assert call.args[0] is first


def test_what_cannot_be_sent_is_an_error_and_the_next_frame_arrives(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    layout = tuple(range(100))
    with pytest.raises(MlflashError, match="cannot be sent"):
        one.send(Call(1, 0, "save", (layout, lambda: None)))
    for _ in range(2):
        one.send(Call(1, 0, "save", (layout,)))
    assert [call.args for call in received(other, 2)] == [(layout,)] * 2


def test_other_bytes_are_no_frame(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    one.sock.sendall((20).to_bytes(8, "big") + b"no pickle, no pickle")
    with pytest.raises(Broken, match="cannot be read"):
        other.receive()


def calls(*names: str) -> dict[str, set[str]]:
    """The methods that are called by name, by the function that calls them."""
    found: dict[str, set[str]] = {name: set() for name in names}
    root = Path(mlflash.__file__).parent
    for path in {*root.rglob("*.py")} - {
        path for name in ("launch", "telemetry") for path in (root / name).rglob("*.py")
    }:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names:
                position = 2 if node.func.attr == "together_then" else 0
                arg = node.args[position] if len(node.args) > position else None
                if isinstance(arg, ast.Constant) and isinstance(arg.value, str):
                    found[node.func.attr].add(arg.value)
    return found


def test_each_method_that_is_called_by_name_exists() -> None:
    found = calls("call", "job", "ask", "notify", "together_then", "_ask", "_tell")
    jobs = found["call"] | found["job"] | found["together_then"]
    assert len(jobs) > 20 and len(found["ask"]) > 3 and len(found["_ask"]) > 5
    called = (jobs | found["ask"] | found["notify"]) - {"close"}  # which ends the thread of jobs, too
    assert {name for name in called if not inspect.isfunction(getattr(Session, name, None))} == set()
    assert jobs >= Session.ASK_BACK
    ends = (Trainer, TrainerState, Client)
    asked = found["_ask"] | found["_tell"]
    assert {name for name in asked if not any(hasattr(end, name) for end in ends)} == set()
