"""What is copied after `save` has returned: tensors that nothing changes before an optimizer's next step.

The courier copies while training computes; when training comes to the step, it copies what is left (the idea is
DataStates-LLM's, Maurya et al., HPDC 2024). A tensor that was nevertheless written to in between has another version,
or other bytes than were noted (`SampledBytes`). Then the save fails: no torn copy is committed.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..crash_points import reach
from ..errors import DeadlineExceeded, StateError, text_of
from ..events import Event
from ..state.leaves import flat_bytes

if TYPE_CHECKING:
    from ..memory.shared_memory_segment import Segment

Work = Callable[[], None]

LARGE_NBYTES = 64 << 10  # to remember the place of a smaller tensor takes as long as its copy

_CHANGED = (
    "it was changed before it was copied, and not by a step of an optimizer that mlflash hears of (it does not "
    "hear of steps in a CUDA graph or in another program): call wait_staged() before you change it, or save "
    "without until= (MLFLASH_LAZY=0)"
)


@dataclasses.dataclass(frozen=True)
class Computed:
    """A leaf, an array, that is computed while training goes on; until then, ``watched`` tensors must not change."""

    value: Callable[[], np.ndarray]
    watched: Sequence[Any]


class DeferredCopies:
    """The copies of one save that need not be made when it returns.

    Args:
        pieces: each copies a part of a CPU tensor; in any order, on any thread.
        tensors: names and tensors that must not change before everything is copied.
        timeout_s: how long anything here waits at most; after that the save fails.
    """

    def __init__(
        self,
        pieces: Sequence[Work],
        transfers: Sequence[DeviceCopies],
        tensors: Iterable[tuple[str, Any]],
        timeout_s: float,
        samples: SampledBytes | None = None,
    ):
        self._spots = samples or SampledBytes()
        self._pieces = collections.deque(pieces)
        self._pieces_left = len(self._pieces)
        self._transfers = list(transfers)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._versions = [(name, tensor, tensor._version) for name, tensor in tensors]
        self._made = Event()  # set when all pieces are copied
        self.error: StateError | None = None
        self.when_made: list[Callable[[], object]] = []  # called when all pieces are copied, before `finish` returns
        # called if something other than an optimizer's step changed a tensor; on any thread
        self.tell_changed: Callable[[], object] = lambda: None
        # whether the save has ended, so that nothing needs to wait any more
        self.is_over = False
        if not self._pieces:
            self._made.set()

    @property
    def is_done(self) -> bool:
        """Whether nothing is written any more."""
        return self._made.is_set() and all(transfer.is_done for transfer in self._transfers)

    def help(self) -> None:
        """Copy pieces until none is left to begin; other threads may still be copying theirs."""
        while True:
            try:
                piece = self._pieces.popleft()
            except IndexError:
                return
            try:
                reach("lazy.piece")
                piece()
            except BaseException as error:
                self._fail(StateError(f"the state could not be copied: {text_of(error)}"))
                if not isinstance(error, Exception):  # from a signal handler, on the training thread
                    raise
            finally:
                self._count(1)

    def hold_back(self) -> None:
        """Make everything that the caller does from now on, or gives a device to do, come after the copies."""
        self.help()
        self._await_pieces()
        for transfer in self._transfers:
            transfer.hold_back()
        with self._lock:
            self._check()
            self._versions.clear()  # from now on tensors may change

    def finish(self) -> None:
        """Make all copies that are left, and wait until all are made."""
        self.help()
        self._await_pieces()
        for call in self.when_made:
            call()
        for transfer in self._transfers:
            if not transfer.wait(self._timeout_s):
                self._fail(StateError(f"a device did not finish its copies within {self._timeout_s:g} s"))
        self.check_unchanged()
        if self.error is None and (name := self._spots.changed()) is not None:
            self._fail_changed(name, " (by a write that torch does not count, such as to .data)")

    def check_unchanged(self) -> None:
        """Check whether something other than an optimizer's step changed a tensor.

        Call it once more when the slot is sealed: an operation counts its change only when it ends.
        """
        with self._lock:  # a thread that waits for the lock may step as soon as it has it
            self._check()

    def cancel(self) -> None:
        """Drop the copies not begun, and wait for the others. Raises DeadlineExceeded if one is still being made."""
        dropped = 0
        while self._pieces:
            try:
                self._pieces.popleft()
                dropped += 1
            except IndexError:
                break
        self._count(dropped)
        made = self._made.wait(self._timeout_s)
        if not made or not all(transfer.wait(self._timeout_s) for transfer in self._transfers):
            raise DeadlineExceeded(f"a copy did not finish within {self._timeout_s:g} s")
        with self._lock:
            self._versions.clear()
        self.is_over = True

    def _count(self, number: int) -> None:
        with self._lock:
            self._pieces_left -= number
            if self._pieces_left == 0:
                self._made.set()

    def _await_pieces(self) -> None:
        if not self._made.wait(self._timeout_s):
            self._fail(StateError(f"a copy did not finish within {self._timeout_s:g} s"))

    def _check(self) -> None:
        changed = [name for name, tensor, version in self._versions if tensor._version != version]
        if changed:
            self._fail_changed(changed[0])

    def _fail_changed(self, name: str, how: str = "") -> None:
        self.tell_changed()
        self._fail(StateError(_CHANGED + how, tensor=name))

    def _fail(self, error: StateError) -> None:
        self.error = self.error or error


_PIECE_NBYTES = 32 << 20  # half a millisecond of a fast link; each piece costs the host 10 us
_POLL_S = 2e-4  # between two checks whether copies have ended: a wait in the driver would have no deadline

_streams: dict[Any, Any] = {}


class DeviceCopies:
    """Copies from one device to pinned memory, which begin when this is made; ``segments`` note them as writers.

    They come after everything that the caller's stream has been given so far. The tensors are kept until the copies are
    made; otherwise the caching allocator could give their memory to others.
    """

    def __init__(self, device: Any, targets: Sequence[Any], values: Sequence[Any], segments: Sequence[Segment] = ()):
        torch = sys.modules["torch"]
        self._event: Any = None
        for segment in segments:  # before the first copy begins, in case of an exception in between
            segment.writers.append(self)
        self._api, self._device = getattr(torch, device.type), device
        stream = _streams.get(device)
        if stream is None:
            stream = _streams[device] = self._api.Stream(device)
        stream.wait_stream(self._api.current_stream(device))
        self._values: list[Any] = []
        with self._api.stream(stream), torch.no_grad():
            for target, value in zip(targets, values, strict=True):
                # Conjugate and negate now, if PyTorch has only marked the tensor for it: it would change the target
                # after the copy.
                value = value.detach().resolve_conj().resolve_neg()
                self._values.append(value)
                for into, part in _parts(target, value):
                    into.copy_(part, non_blocking=True)
            event = self._api.Event()
            event.record(stream)
        self._event = event

    @property
    def is_done(self) -> bool:
        return self._event is not None and bool(self._event.query())

    def hold_back(self) -> None:
        """Make what the caller's stream is given from now on come after the copies; the host does not wait."""
        self._api.current_stream(self._device).wait_event(self._event)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the copies are made; False if they are not made in time."""
        end = time.monotonic() + timeout_s
        while not self.is_done:
            if time.monotonic() > end:
                return False
            time.sleep(_POLL_S)
        self._values.clear()
        return True


def _parts(target: Any, value: Any) -> list[tuple[Any, Any]]:
    nbytes = value.numel() * value.element_size()
    if nbytes <= _PIECE_NBYTES or not value.is_contiguous():
        return [(target, value)]
    step = _PIECE_NBYTES // value.element_size()
    return list(zip(target.view(-1).split(step), value.view(-1).split(step), strict=True))


_APART_NBYTES, _LEAST = 128 << 10, 16  # one byte in each run of so many, but at least so many per part


class SampledBytes:
    """Some bytes of the parts of a state that are copied later."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._lives: list[np.ndarray] = []
        self._rooms: list[np.ndarray] = []
        self._noted: np.ndarray = np.empty(0, dtype=np.uint8)
        self._elsewhere: list[tuple[Any, list[str], list[np.ndarray]]] = []

    def add(self, name: str, live: np.ndarray, room: np.ndarray) -> None:
        """Add a part in the host's memory: its live bytes, and the room that they are copied to."""
        step = _step(room.nbytes)
        self._names.append(name)
        self._lives.append(live[::step])
        self._rooms.append(room[::step])

    def note(self) -> None:
        """Note the bytes of what was added."""
        self._noted = _together(self._lives)
        self._lives.clear()

    def note_on(self, device: Any, names: list[str], values: list[Any], rooms: list[np.ndarray]) -> tuple[Any, Any]:
        """Note bytes of tensors on a device, on its current stream.

        Return a CPU tensor, and one on the device that must be copied into it before `changed` is called.
        """
        torch = sys.modules["torch"]
        with torch.no_grad():
            samples = [
                flat_bytes(value.detach())[:: _step(room.nbytes)] for value, room in zip(values, rooms, strict=True)
            ]
            noted = torch.cat(samples)
        into = torch.empty(noted.shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._elsewhere.append((into, names, [room[:: _step(room.nbytes)] for room in rooms]))
        return into, noted

    def changed(self) -> str | None:
        """Return the name of a tensor whose copy does not have the noted bytes; None if all have them."""
        name = _first_unlike(self._noted, self._names, self._rooms)
        for into, names, rooms in self._elsewhere:
            name = name or _first_unlike(into.numpy(), names, rooms)
        return name


def _step(nbytes: int) -> int:
    # Odd, so that every byte of a number is sampled somewhere: a small change alters the last ones only.
    return max(1, min(_APART_NBYTES, nbytes // _LEAST)) | 1


def _together(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint8)


def _first_unlike(noted: np.ndarray, names: list[str], rooms: list[np.ndarray]) -> str | None:
    if np.array_equal(noted, _together(rooms)):
        return None
    at = 0
    for name, room in zip(names, rooms, strict=True):
        if not np.array_equal(noted[at : at + len(room)], room):
            return name
        at += len(room)
    raise AssertionError("bytes differ in no part")
