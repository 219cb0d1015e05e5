"""The messages between a trainer and its courier: frames on a socket. docs/protocol.md describes all of them.

A frame is its length in four bytes, big endian, and a MessagePack array: kind, session, number, name, body. The name
determines the type of the body. A body that is not exactly of that type ends the connection. No message is a pickle,
and a decoder creates only the classes of the tables below. Source of the encoding: msgpack.org.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from .. import errors
from ..config import Config
from ..draining.checkpoint_directory import Listed
from ..errors import MlflashError
from ..memory.own_slots import SlotFile, SlotId
from ..memory.slot_header import Attempt
from ..protocol import messages as asked
from ..protocol.messages import FoundInMemory, Started
from ..protocol.save_request import SaveRequest
from ..redundancy.deduplication import Piece, Plan, ShareableLeaf, SharingNews
from ..redundancy.rank_checkpoint import ShareFiles

VERSION = 9
LARGEST_NBYTES = 1 << 30
_NOTHING = b"\xc0"  # None, encoded
_LENGTH_NBYTES = 4


class BadMessage(ConnectionError):
    """The bytes received are no message of this protocol."""


class Kind(enum.IntEnum):
    """Who sends a frame, and what it is.

    From the trainer: OPEN and CLOSE a session; POST a job; ASK a question outside of jobs; TELL something; REPLY to a
    question. From the courier: LATE and DONE, about a job; ANSWER to an ASK; QUESTION in the middle of a job; EVENT,
    which gets no answer.
    """

    OPEN = 1
    CLOSE = 2
    POST = 3
    ASK = 4
    TELL = 5
    REPLY = 6
    LATE = 7
    DONE = 8
    ANSWER = 9
    QUESTION = 10
    EVENT = 11


class Frame(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A frame."""

    kind: Kind
    session: int
    number: int  # of a job or a question; the answer has the same number
    name: str
    body: msgspec.Raw


# Messages whose form differs from that inside a process


@dataclasses.dataclass(frozen=True)
class Opened:
    """The body of OPEN: the trainer has made a Checkpointer."""

    version: int
    config: Config
    log_level: int
    ranks: tuple[int, ...]  # the couriers that have this Checkpointer, in its order
    before: int  # number of Checkpointers that these ranks have had before


@dataclasses.dataclass(frozen=True)
class SaveWire:
    """A `SaveRequest`. ``plan`` is the number of a plan sent before, or -1. The manifest of the plan is in the slot."""

    step: int
    problem: MlflashError | None
    skip: bool
    slot: int | None
    share: int | None
    files: tuple[int, int]
    inode: int
    plan: int
    manifest_nbytes: int
    checks: tuple[tuple[Piece, int], ...]
    is_unsettled: bool
    waits_for_room: bool
    has_deferred: bool
    begun_s: float
    restores: int = 0


@dataclasses.dataclass(frozen=True)
class PlanWire:
    """A `Plan` without its manifest, and the number by which saves refer to it from now on."""

    number: int
    plan: Plan


@dataclasses.dataclass(frozen=True)
class PartWire:
    """A `WantedPart`, and where its bytes go in the file that came with the frame."""

    rank: int
    number: int
    source: tuple[int, ...]
    shape: tuple[int, ...]
    at: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class ExchangeWire:
    """An `Exchange` that asks for no more than fits into the file that comes with the frame."""

    attempt: Attempt
    homes: Mapping[int, int]
    files: ShareFiles
    asked: Mapping[int, Sequence[PartWire]]


@dataclasses.dataclass(frozen=True)
class FoundWire:
    """The result of `Choose`: one of the two, or neither."""

    in_memory: FoundInMemory | None
    in_directory: Listed | None


@dataclasses.dataclass(frozen=True)
class DrainWire:
    """The progress of a drain; see `Drain`."""

    number: int
    step: int
    path: str
    nbytes: int
    written: int
    progress: int
    moved: float
    silent: tuple[tuple[int, ...], str]
    seconds: float | None
    error: MlflashError | None
    done: bool


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job or a question has ended."""

    error: MlflashError | None
    refused: bool  # whether it was not begun, because the courier has stopped working
    result: msgspec.Raw


_DIRECT = (asked.Start, asked.GoBeyond, asked.ProtectLeft, asked.Free, asked.Agree, asked.Gather, asked.Broadcast,
           asked.RaiseTogether, asked.Reserve, asked.FindReplicas, asked.SettleShared, asked.Choose, asked.HoldOlder,
           asked.HealFirst, asked.Restored, asked.HealRestored, asked.MakeRoom, asked.Steps, asked.BeginDrain,
           asked.Scavenge, asked.Mark, asked.HealNewest, asked.AskDrain, asked.GiveUpDrain, asked.Report,
           asked.RunFacts, asked.Survives)  # fmt: skip

# By name: the type of a job or question.
MESSAGES: dict[str, Any] = {one.__name__: one for one in _DIRECT} | {
    "Commit": SaveWire, "CommitRestored": SaveWire, "Exchange": ExchangeWire,
}  # fmt: skip
# By name: the type of its result, if it has one.
RESULTS: dict[str, Any] = {
    "Start": Started, "ProtectLeft": tuple[int | None, int], "Commit": int, "Agree": list[int], "Gather": list[bytes],
    "Broadcast": bytes, "Choose": FoundWire, "Exchange": bool, "Steps": list[int], "Scavenge": bool, "Mark": int,
    "HealNewest": int | None, "Report": dict[str, Any], "RunFacts": dict[str, Any], "Survives": str,
}  # fmt: skip
# By name: the types of a question of the courier in the middle of a job, and of its answer.
QUESTIONS: dict[str, tuple[Any, Any]] = {
    "prepare": (tuple[list[tuple[SlotId, int]], list[SlotId]], list[SlotId]),
    "shareable": (tuple[()], list[ShareableLeaf]),
    "digests": (tuple[list[int]], dict[int, int]),
    "lay_out": (tuple[()], tuple[int, int]),
    "stage": (tuple[()], tuple[int, tuple[tuple[Piece, int], ...], bool]),
    "finish_deferred": (tuple[()], tuple[MlflashError | None, tuple[tuple[Piece, int], ...]]),
    "is_changed": (tuple[()], MlflashError | None),
    "cancel_deferred": (tuple[()], None),
}
# By name: the type of a notice from the courier.
EVENTS: dict[str, Any] = {
    "update": list[SlotFile],
    "told_sharing": SharingNews,
    "told_unhealed": bool,
    "begin_deferred": None,
    "handed_over": None,
    "ended": tuple[MlflashError | None, bool, float],
    "drain": DrainWire,
    "log": tuple[int, str],
    "broken": MlflashError,
}
# By name: the type of a notice from the trainer.
TELLS: dict[str, Any] = {"doing": str, "plan": PlanWire}

_ERRORS = {name: getattr(errors, name) for name in errors.__all__}
_MOST = (1 << 63) - 1


@dataclasses.dataclass(frozen=True)
class ErrorWire:
    """An error: the name of its class in `mlflash.errors`, and its fields."""

    name: str
    message: str
    rank: int | None
    node: str | None
    step: int | None
    tensor: str | None
    expected: bool | int | float | str | None
    found: bool | int | float | str | None
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    agreed: bool
    follows: bool
    reasons: tuple[tuple[int, str], ...]


def _plain(value: object) -> Any:
    """A field of an error in a form that can be sent: other types become text, and text loses lone surrogates."""
    if value is None or type(value) in (bool, float) or (type(value) is int and abs(value) <= _MOST):
        return value
    return str(value).encode("utf-8", "replace").decode()


def _number(value: Any) -> int | None:
    return None if value is None else int(value)


def _encoded(value: object) -> Any:
    if isinstance(value, MlflashError):
        name = next(one.__name__ for one in type(value).__mro__ if one.__name__ in _ERRORS)
        reasons = value.reasons if isinstance(value, errors.Unrestorable) else {}
        return ErrorWire(
            name, _plain(value.message), _number(value.rank), _plain(value.node), _number(value.step),
            _plain(value.tensor), _plain(value.expected), _plain(value.found), tuple(map(int, value.ranks)),
            tuple(map(_plain, value.nodes)), value.agreed, value.follows,
            tuple((int(step), _plain(why)) for step, why in reasons.items()),
        )  # fmt: skip
    raise TypeError(f"{type(value)} cannot be part of a message")


def _decoded(kind: type, value: Any) -> Any:
    if kind is not MlflashError:
        raise TypeError(f"{kind} cannot be part of a message")
    told = msgspec.convert(value, ErrorWire)
    if told.name not in _ERRORS:
        raise ValueError(f"an unknown error of mlflash: {told.name[:80]!r}")
    more = {"reasons": dict(told.reasons)} if told.reasons else {}
    error = _ERRORS[told.name](told.message, **more)
    for field in ("rank", "node", "step", "tensor", "expected", "found", "ranks", "nodes", "agreed", "follows"):
        setattr(error, field, getattr(told, field))
    return error


_encoder = msgspec.msgpack.Encoder(enc_hook=_encoded)
_frames = msgspec.msgpack.Decoder(Frame)


def encode(value: object) -> bytes:
    """Encode the body of a frame."""
    return _encoder.encode(value)


NOTHING = msgspec.Raw(encode(None))


def decode(kind: Any, body: msgspec.Raw | bytes) -> Any:
    """Decode the body of a frame as a type from the tables above. Raises BadMessage if it has another type."""
    try:
        return msgspec.msgpack.decode(body, type=kind, dec_hook=_decoded)
    except (msgspec.DecodeError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadMessage(f"a body that is no {getattr(kind, '__name__', kind)}: {error}") from None


def known(table: Mapping[str, Any], name: str) -> Any:
    """The entry of a table for a name. Raises BadMessage if the table has no such name."""
    if name not in table:
        raise BadMessage(f"an unknown message: {name[:80]!r}")
    return table[name]


def pack(kind: Kind, session: int, number: int, name: str, body: bytes) -> bytes:
    """Encode a frame. Raises MlflashError if it is too large."""
    raw = _encoder.encode(Frame(kind, session, number, name, msgspec.Raw(body)))
    if len(raw) > LARGEST_NBYTES:
        raise MlflashError(
            "a message between trainer and courier is too large", expected=LARGEST_NBYTES, found=len(raw)
        )
    return len(raw).to_bytes(_LENGTH_NBYTES, "big") + raw


class Stream:
    """The frames in the bytes that arrive on one socket."""

    def __init__(self) -> None:
        self._received = bytearray()

    def add(self, received: bytes) -> Iterator[Frame]:
        """Add the bytes that have arrived, and yield the frames that are complete. May raise BadMessage."""
        self._received += received
        while len(self._received) >= _LENGTH_NBYTES:
            nbytes = int.from_bytes(self._received[:_LENGTH_NBYTES], "big")
            if nbytes > LARGEST_NBYTES:
                raise BadMessage(f"a frame of {nbytes} bytes, where {LARGEST_NBYTES} are allowed")
            end = _LENGTH_NBYTES + nbytes
            if len(self._received) < end:
                return
            raw = bytes(self._received[_LENGTH_NBYTES:end])
            del self._received[:end]
            try:
                yield _frames.decode(raw)
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                raise BadMessage(f"bytes that are no frame: {error}") from None


def result_of(frame: Frame) -> Any:
    """Return the result of a job or a question, or raise its error; BadMessage if the frame is something else."""
    outcome: Outcome = decode(Outcome, frame.body)
    if outcome.error is not None:
        raise outcome.error
    if frame.name not in RESULTS:
        return None
    result = decode(RESULTS[frame.name], outcome.result) if bytes(outcome.result) != _NOTHING else None
    return (result.in_memory or result.in_directory) if isinstance(result, FoundWire) else result


def save_wire(request: SaveRequest, plan: int, restores: int) -> SaveWire:
    """Encode a save for the courier, with the number of its plan."""
    nbytes = 0 if request.plan is None else request.plan.manifest_nbytes
    return SaveWire(
        request.step, request.problem, request.skip, request.slot, request.share, request.files, request.inode, plan,
        nbytes, tuple(request.checks.items()), request.is_unsettled, request.waits_for_room, request.has_deferred,
        request.begun_s, restores,
    )  # fmt: skip
