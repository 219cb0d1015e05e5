"""How a trainer and the process that is its courier talk: frames on a socket; docs/protocol.md has all of it.

A frame is its length in four bytes, big endian, and a MessagePack array: kind, session, number, name, body. The name
says what the body is; whatever is not exactly of that type ends the connection. Nothing of it is a pickle of the other
side's, and no class is made but those of the tables here. Source of the encoding: msgpack.org.
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
from ..redundancy.deduplication import Piece
from ..redundancy.rank_checkpoint import ShareFiles
from ..redundancy.shareable_leaves import ShareableLeaf, SharingNews
from ..redundancy.slot_plan import Plan

VERSION = 8
LARGEST_NBYTES = 1 << 30
_NOTHING = b"\xc0"  # None, encoded
_LENGTH_NBYTES = 4


class BadMessage(ConnectionError):
    """What was received is no message of this protocol."""


class Kind(enum.IntEnum):
    """Who sends a frame, and what it is.

    From the trainer: OPEN and CLOSE a session; POST a job; ASK something that is answered beside the jobs; TELL
    something; REPLY to a question. From the courier: LATE and DONE, of a job; ANSWER, to what was asked; QUESTION, in
    the middle of a job; EVENT, which is not answered.
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
    """A frame.

    Attributes:
        kind: see there.
        session: the Checkpointer that it is about.
        number: of a job, or of what is asked: the answer has the same.
        name: says what the body is.
        body: encoded.
    """

    kind: Kind
    session: int
    number: int
    name: str
    body: msgspec.Raw


# What crosses in another shape than inside of a process


@dataclasses.dataclass(frozen=True)
class Opened:
    """The body of OPEN: a Checkpointer is made.

    Attributes:
        version: of this protocol.
        config: of the job.
        log_level: of what the courier logs, from which on the trainer wants to have it.
        ranks: of the couriers, those that have this Checkpointer, in its order.
        before: how many Checkpointers these ranks have had before.
    """

    version: int
    config: Config
    log_level: int
    ranks: tuple[int, ...]
    before: int


@dataclasses.dataclass(frozen=True)
class SaveWire:
    """A `SaveRequest`. ``plan`` is the number of one that was told before, or -1; its manifest lies in the slot."""

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
    """A `Plan` without its manifest, and the number by which saves name it from now on."""

    number: int
    plan: Plan


@dataclasses.dataclass(frozen=True)
class PartWire:
    """A `WantedPart`, and where in the file that came with the frame its bytes go."""

    rank: int
    number: int
    source: tuple[int, ...]
    shape: tuple[int, ...]
    at: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class ExchangeWire:
    """An `Exchange` of at most so much as fits into the file that comes with the frame."""

    attempt: Attempt
    homes: Mapping[int, int]
    files: ShareFiles
    asked: Mapping[int, Sequence[PartWire]]


@dataclasses.dataclass(frozen=True)
class FoundWire:
    """What `Choose` gives: one of the two, or none."""

    in_memory: FoundInMemory | None
    in_directory: Listed | None


@dataclasses.dataclass(frozen=True)
class DrainWire:
    """How far a drain is; see `Drain`."""

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
    """How a job, or what was asked, has ended.

    Attributes:
        error: what it raised; then there is no result.
        refused: whether it was not begun, as the courier does nothing any more.
        result: encoded as its name says.
    """

    error: MlflashError | None
    refused: bool
    result: msgspec.Raw


_DIRECT = (asked.Start, asked.GoBeyond, asked.Free, asked.Agree, asked.Gather, asked.Broadcast,
           asked.RaiseTogether, asked.Reserve, asked.FindReplicas, asked.SettleShared, asked.Choose, asked.HoldOlder,
           asked.HealFirst, asked.Restored, asked.HealRestored, asked.MakeRoom, asked.Steps, asked.BeginDrain,
           asked.Scavenge, asked.Mark, asked.HealNewest, asked.AskDrain, asked.GiveUpDrain, asked.Report,
           asked.RunFacts, asked.Survives)  # fmt: skip

# By name: the type of what is posted or asked.
MESSAGES: dict[str, Any] = {one.__name__: one for one in _DIRECT} | {
    "Commit": SaveWire, "CommitRestored": SaveWire, "Exchange": ExchangeWire,
}  # fmt: skip
# By name: the type of what it gives, where that is not nothing.
RESULTS: dict[str, Any] = {
    "Start": Started, "Commit": int, "Agree": list[int], "Gather": list[bytes], "Broadcast": bytes, "Choose": FoundWire,
    "Exchange": bool, "Steps": list[int], "Scavenge": bool, "Mark": int, "HealNewest": int | None,
    "Report": dict[str, Any], "RunFacts": dict[str, Any], "Survives": str,
}  # fmt: skip
# By name: what the courier asks in the middle of a job, and what it gets.
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
# By name: what the courier tells.
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
# By name: what the trainer tells.
TELLS: dict[str, Any] = {"step": None, "stalled": float, "plan": PlanWire}

_ERRORS = {name: getattr(errors, name) for name in errors.__all__}
_MOST = (1 << 63) - 1


@dataclasses.dataclass(frozen=True)
class ErrorWire:
    """An error: the name of its class, of `mlflash.errors`, and its fields."""

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
    """What an error holds, as something that can be sent: anything else as text, and text without lone surrogates."""
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
    raise TypeError(f"{type(value)} is no part of a message")


def _decoded(kind: type, value: Any) -> Any:
    if kind is not MlflashError:
        raise TypeError(f"{kind} is no part of a message")
    told = msgspec.convert(value, ErrorWire)
    if told.name not in _ERRORS:
        raise ValueError(f"no error of mlflash: {told.name[:80]!r}")
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
    """Decode the body of a frame.

    Args:
        kind: what it has to be: of the tables above.

    Raises:
        BadMessage: it is something else.
    """
    try:
        return msgspec.msgpack.decode(body, type=kind, dec_hook=_decoded)
    except (msgspec.DecodeError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadMessage(f"no {getattr(kind, '__name__', kind)}: {error}") from None


def known(table: Mapping[str, Any], name: str) -> Any:
    """What a table says of a name.

    Raises:
        BadMessage: it is not in it.
    """
    if name not in table:
        raise BadMessage(f"no message is called {name[:80]!r}")
    return table[name]


def pack(kind: Kind, session: int, number: int, name: str, body: bytes) -> bytes:
    """Give the bytes of a frame.

    Raises:
        MlflashError: it is too large.
    """
    raw = _encoder.encode(Frame(kind, session, number, name, msgspec.Raw(body)))
    if len(raw) > LARGEST_NBYTES:
        raise MlflashError(
            "a message between trainer and courier is too large", expected=LARGEST_NBYTES, found=len(raw)
        )
    return len(raw).to_bytes(_LENGTH_NBYTES, "big") + raw


class Stream:
    """The frames in what arrives on one socket."""

    def __init__(self) -> None:
        self._received = bytearray()

    def add(self, received: bytes) -> Iterator[Frame]:
        """Take in what has arrived; gives the frames that are whole, one after the other.

        Raises:
            BadMessage: the stream cannot be read on.
        """
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
                raise BadMessage(f"no frame: {error}") from None


def result_of(frame: Frame) -> Any:
    """What a job, or what was asked, has given.

    Raises:
        MlflashError: what it has raised.
        BadMessage: it is something else.
    """
    outcome: Outcome = decode(Outcome, frame.body)
    if outcome.error is not None:
        raise outcome.error
    if frame.name not in RESULTS:
        return None
    result = decode(RESULTS[frame.name], outcome.result) if bytes(outcome.result) != _NOTHING else None
    return (result.in_memory or result.in_directory) if isinstance(result, FoundWire) else result


def save_wire(request: SaveRequest, plan: int, restores: int) -> SaveWire:
    """Give a save as it is sent, with the number of its plan."""
    nbytes = 0 if request.plan is None else request.plan.manifest_nbytes
    return SaveWire(
        request.step, request.problem, request.skip, request.slot, request.share, request.files, request.inode, plan,
        nbytes, tuple(request.checks.items()), request.is_unsettled, request.waits_for_room, request.has_deferred,
        request.begun_s, restores,
    )  # fmt: skip
