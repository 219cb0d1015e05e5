"""Messages between a trainer and a courier that is a process: what is sent arrives, and nothing else is understood."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import random
import re
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mlflash import errors
from mlflash.config import Config
from mlflash.courier import wire_format as wire
from mlflash.courier.wire_format import BadMessage, Frame, Kind, Outcome, Stream
from mlflash.errors import MlflashError, Unrestorable

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
ERRORS = [getattr(errors, name) for name in errors.__all__]
CONFIG = Config(job="a-job", directory="/data/é", drain_every=3, timeout_s=12.5, courier="process")
BODIES = {
    **{f"message {name}": kind for name, kind in wire.MESSAGES.items()},
    **{f"result {name}": kind for name, kind in wire.RESULTS.items()},
    **{f"question {name}": takes for name, (takes, _) in wire.QUESTIONS.items()},
    **{f"answer {name}": gives for name, (_, gives) in wire.QUESTIONS.items()},
    **{f"event {name}": kind for name, kind in wire.EVENTS.items()},
    **{f"tell {name}": kind for name, kind in wire.TELLS.items()},
    "Opened": wire.Opened, "Outcome": Outcome, "number of a job": tuple[int, bytes], "Close": bool,
}  # fmt: skip
INTS = (0, 1, 3, -1, 127, 2**31, 2**53 + 1, 2**63 - 1, 2**64 - 1)
TEXTS = ("", "layer.0.weight", "Knoten é ∑", "x" * 300)
PLAIN = {int, float, str, bool, bytes, list, tuple, dict, frozenset, type(None), msgspec.Raw}


def error_like(rng: random.Random, kind: type[MlflashError]) -> MlflashError:
    more: dict[str, Any] = {"reasons": {3: "torn", 2**40: "é"}} if issubclass(kind, Unrestorable) else {}
    made = kind(
        rng.choice(TEXTS), rank=rng.choice((None, 0, 7)), node=rng.choice((None, "node3")), step=rng.choice((None, 12)),
        tensor=rng.choice((None, "w.0")), expected=rng.choice((None, 3, 2.5, "two")), found=rng.choice((None, 0, "é")),
        ranks=rng.choice(((), (1, 2))), nodes=rng.choice(((), ("a", "b"))), **more,
    )  # fmt: skip
    made.agreed, made.follows = rng.random() < 0.5, rng.random() < 0.5
    return made


def sample(kind: Any, rng: random.Random) -> Any:
    """Build something of a type, whatever the tables have."""
    origin, its = typing.get_origin(kind), typing.get_args(kind)
    if kind is None or kind is type(None):
        return None
    if origin in (typing.Union, types.UnionType):
        return sample(rng.choice(its), rng)
    if origin is tuple:
        of = [its[0]] * rng.randrange(4) if its[1:] == (...,) else [one for one in its if one != ()]
        return tuple(sample(one, rng) for one in of)
    if origin in (list, collections.abc.Sequence):
        return [sample(its[0], rng) for _ in range(rng.randrange(4))]
    if origin is frozenset:
        return frozenset(sample(its[0], rng) for _ in range(3))
    if origin in (dict, collections.abc.Mapping):
        return {sample(its[0], rng): sample(its[1], rng) for _ in range(rng.randrange(4))}
    if kind is MlflashError:
        return error_like(rng, rng.choice(ERRORS))
    if kind is Config:
        return CONFIG
    plain: dict[Any, Callable[[], Any]] = {
        int: lambda: rng.choice(INTS), float: lambda: rng.choice((0.0, -2.5, 1e300, float("inf"))),
        str: lambda: rng.choice(TEXTS), bool: lambda: rng.random() < 0.5,
        bytes: lambda: rng.randbytes(rng.randrange(50)),
        Any: lambda: rng.choice((None, 3, "text", [1, ["a"]], {"k": [1.5]})),
        msgspec.Raw: lambda: msgspec.Raw(wire.encode([1, "two"])),
    }  # fmt: skip
    if kind in plain:
        return plain[kind]()
    if issubclass(kind, enum.Enum):
        return rng.choice([*kind])
    hints = typing.get_type_hints(kind)
    names = kind._fields if hasattr(kind, "_fields") else [field.name for field in dataclasses.fields(kind)]
    return kind(**{name: sample(hints[name], rng) for name in names})


def plainly(value: Any) -> Any:
    """What can be compared: errors are equal where all that they carry is."""
    if isinstance(value, MlflashError):
        return type(value), plainly(value.__dict__)
    if isinstance(value, msgspec.Raw):
        return bytes(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value), [plainly(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, dict):
        return {key: plainly(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [plainly(item) for item in value]
    return value


def types_in(value: Any) -> Iterator[type]:
    yield type(value)
    held: list[Any] = []
    if isinstance(value, dict):
        held = [*value, *value.values()]
    elif isinstance(value, (list, tuple, frozenset)):
        held = [*value]
    elif isinstance(value, MlflashError):
        held = [*value.__dict__.values()]
    elif dataclasses.is_dataclass(value):
        held = [getattr(value, field.name) for field in dataclasses.fields(value)]
    for item in held:
        yield from types_in(item)


def named_by(kind: Any, known: set[Any]) -> set[Any]:
    """The classes that a type has in it."""
    for one in typing.get_args(kind):
        named_by(one, known)
    if isinstance(kind, type) and typing.get_origin(kind) is None and kind not in known:
        known.add(kind)
        if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
            for one in typing.get_type_hints(kind).values():
                named_by(one, known)
    return known


def allowed() -> set[Any]:
    known: set[Any] = set()
    for kind in BODIES.values():
        named_by(kind, known)
    return known | PLAIN | set(ERRORS)


@pytest.mark.parametrize("name", BODIES)
def test_every_body_of_the_tables_arrives_as_it_was_sent(name: str) -> None:
    rng = random.Random(name)
    for _ in range(20):
        sent = sample(BODIES[name], rng)
        assert plainly(wire.decode(BODIES[name], wire.encode(sent))) == plainly(sent)


def test_the_tables_have_what_crosses_in_a_shape_of_its_own() -> None:
    assert wire.MESSAGES["Commit"] is wire.MESSAGES["CommitRestored"] is wire.SaveWire
    assert wire.MESSAGES["Exchange"] is wire.ExchangeWire
    assert wire.RESULTS["Choose"] is wire.FoundWire
    assert wire.RESULTS.keys() <= wire.MESSAGES.keys()


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_errors_arrive_with_all_that_they_carry(kind: type[MlflashError]) -> None:
    rng = random.Random(kind.__name__)
    for _ in range(10):
        sent = error_like(rng, kind)
        got = wire.decode(MlflashError, wire.encode(sent))
        assert plainly(got) == plainly(sent) and str(got) == str(sent)


def test_of_an_error_that_is_a_class_of_somebody_else_the_class_of_ours_arrives() -> None:
    class Theirs(errors.SaveFailed):
        pass

    got = wire.decode(MlflashError, wire.encode(Theirs("no", found=[1, 2])))
    assert type(got) is errors.SaveFailed and got.found == "[1, 2]"


@pytest.mark.parametrize("nbytes", [1, 2, 7, 1 << 20])
def test_frames_arrive_in_whatever_pieces(nbytes: int) -> None:
    rng = random.Random(nbytes)
    sent = [(kind, rng.randrange(9), rng.randrange(2**40), rng.choice(TEXTS), wire.encode([1] * 40)) for kind in Kind]
    raw = b"".join(wire.pack(*one) for one in sent)
    stream, got = Stream(), list[Frame]()
    for start in range(0, len(raw), nbytes):
        got += stream.add(raw[start : start + nbytes])
    assert [(one.kind, one.session, one.number, one.name, bytes(one.body)) for one in got] == sent


def test_a_frame_that_is_too_long_is_refused_before_any_of_it_is_kept() -> None:
    stream = Stream()
    assert list(stream.add((wire.LARGEST_NBYTES + 1).to_bytes(4, "big")[:3])) == []
    with pytest.raises(BadMessage, match="are allowed"):
        list(stream.add((wire.LARGEST_NBYTES + 1).to_bytes(4, "big")[3:]))
    assert list(Stream().add(wire.LARGEST_NBYTES.to_bytes(4, "big"))) == []


def test_names_that_are_in_no_table_are_refused() -> None:
    for table in (wire.MESSAGES, wire.RESULTS, wire.QUESTIONS, wire.EVENTS, wire.TELLS):
        with pytest.raises(BadMessage, match="an unknown message: '__class__'"):
            wire.known(table, "__class__")
    with pytest.raises(BadMessage) as raised:
        wire.known(wire.MESSAGES, "x" * 100_000)
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize(("name", "body"), [
    ("message Agree", [1, 2]), ("message Agree", {"values": ["1"]}), ("message Agree", {}), ("message Commit", None),
    ("event drain", {"number": 1}), ("event log", [10]), ("event log", [10, "a", 3]), ("tell doing", 1),
    ("result Agree", [1, None]), ("Close", 1), ("event broken", ["OSError", "no", {}]),
    ("event broken", ["SaveFailed", "no", {"__class__": 3}]), ("event broken", ["SaveFailed", "no", {"reasons": {}}]),
    ("event broken", ["SaveFailed", 3, {}]), ("event broken", "SaveFailed"), ("event told_sharing", [None, [], 0]),
    ("Opened", {"version": 1, "config": {"job": "../x"}, "log_level": 1, "ranks": [0], "before": 0}),
    ("Opened", {"version": 1, "config": {"job": "x"}, "log_level": 1, "ranks": ["0"], "before": 0}),
])  # fmt: skip
def test_bodies_of_another_type_are_refused(name: str, body: object) -> None:
    with pytest.raises(BadMessage):
        wire.decode(BODIES[name], wire.encode(body))


def error_fields() -> dict[str, Any]:
    """The fields of an error, as they are sent."""
    return msgspec.msgpack.decode(wire.encode(errors.SaveFailed("no", rank=1, step=2)))


@pytest.mark.parametrize(
    ("field", "value"), [("name", "SystemExit"), ("rank", "x"), ("ranks", 3), ("agreed", 1), ("message", None)]
)
def test_fields_of_another_type_are_refused(field: str, value: object) -> None:
    assert wire.decode(MlflashError, wire.encode(error_fields())).rank == 1
    with pytest.raises(BadMessage):
        wire.decode(MlflashError, wire.encode({**error_fields(), field: value}))


@pytest.mark.parametrize("reasons", [3, [1], "text"])
def test_reasons_that_are_no_mapping_are_refused(reasons: object) -> None:
    with pytest.raises(BadMessage):
        wire.decode(MlflashError, wire.encode({**error_fields(), "name": "Unrestorable", "reasons": reasons}))


@pytest.mark.parametrize("found", [2**70, "slot-\udcff"])
def test_errors_arrive_whatever_was_found(found: object) -> None:
    assert wire.decode(MlflashError, wire.encode(errors.SaveFailed("no", found=found))).message == "no"


def mutated(raw: bytes, rng: random.Random) -> bytes:
    """Another frame, of the right length: of the one given with some bytes changed, cut or added, or of nothing."""
    body = bytearray(raw[4:])
    if rng.random() < 0.2:
        body = bytearray(rng.randbytes(rng.randrange(60)))
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(body) + 1)
        match rng.randrange(3):
            case 0:
                body[at : at + 1] = rng.randbytes(1)
            case 1:
                body[at : at + rng.randrange(1, 9)] = b""
            case _:
                body[at:at] = rng.randbytes(rng.randrange(1, 9))
    return len(body).to_bytes(4, "big") + bytes(body)


def test_of_garbage_come_frames_and_bodies_of_the_tables_or_a_bad_message() -> None:
    rng, may_be = random.Random(7), allowed()
    names = list(BODIES)
    counts = collections.Counter[str]()
    for _ in range(2000):
        name = rng.choice(names)
        packed = wire.pack(rng.choice(list(Kind)), 1, 2, name, wire.encode(sample(BODIES[name], rng)))
        try:
            frames = list(Stream().add(mutated(packed, rng)))
        except BadMessage:
            counts["no frame"] += 1
            continue
        assert len(frames) == 1 and type(frames[0]) is Frame and type(frames[0].kind) is Kind
        for kind in (BODIES[name], BODIES[rng.choice(names)]):
            try:
                got = wire.decode(kind, frames[0].body)
            except BadMessage:
                counts["no body"] += 1
                continue
            counts["understood"] += 1
            assert set(types_in(got)) <= may_be
    assert min(counts[what] for what in ("no frame", "no body", "understood")) > 100, counts


def test_the_page_of_the_protocol_has_a_row_for_every_name_and_kind() -> None:
    rows = re.findall(r"^\|(?: \d+ \|)? `(\w+)` \|", PAGE.read_text(), re.M)
    names = [*wire.MESSAGES, *wire.QUESTIONS, *wire.EVENTS, *wire.TELLS, *(kind.name for kind in Kind)]
    assert sorted(rows) == sorted([*names, *Frame.__struct_fields__])
    assert f"Protocol version {wire.VERSION}." in PAGE.read_text()
