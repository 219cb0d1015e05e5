"""What is copied after `save` has returned: tensors that nothing changes before an optimizer's next step.

The courier copies while training computes; training copies what is left when it comes to the step (the idea is
DataStates-LLM's, Maurya et al., HPDC 2024). A tensor that was written to in between all the same has
another version, or other bytes than were noted (`sampled_bytes`), and then the save fails: no torn copy is committed.
"""

from __future__ import annotations

import collections
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..crash_points import reach
from ..errors import DeadlineExceeded, StateError, text_of
from ..state.leaves import Flat, Structure
from .device_copies import DeviceCopies
from .mutation_check import SampledBytes

log = logging.getLogger("mlflash")

Work = Callable[[], None]

_CHANGED = (
    "it was changed before it was copied, and not by an optimizer's step (one that runs in a CUDA graph or in another "
    "program is none that mlflash hears of): call wait_staged() before that, or save without until="
)
LARGE_NBYTES = 64 << 10  # to remember where a smaller tensor is takes as long as to copy it


class DeferredCopies:
    """The copies of one save that need not have been made when it returns.

    Args:
        pieces: each copies a part of a CPU tensor; in any order, on any thread.
        transfers: copies that devices are making.
        tensors: names and tensors that must not change before all is copied.
        timeout_s: how long anything here waits at most; after it the save fails.
        samples: bytes that the copies must have.

    Attributes:
        is_empty: whether there were none.
        is_over: whether the save has ended: nobody need wait any more.
        error: why what was copied is of no use.
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
        self._left = len(self._pieces)
        self._transfers = list(transfers)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._versions = [(name, tensor, tensor._version) for name, tensor in tensors]
        self._made = threading.Event()  # all pieces
        self.error: StateError | None = None
        self.is_empty = self.is_over = not self._pieces and not self._transfers
        if not self._pieces:
            self._made.set()

    @property
    def is_done(self) -> bool:
        """Whether nothing is written any more. Not collective."""
        return self._made.is_set() and all(transfer.is_done for transfer in self._transfers)

    def help(self) -> None:
        """Make pieces until none is left to begin; others may still be making theirs. Not collective."""
        while True:
            try:
                piece = self._pieces.popleft()
            except IndexError:
                return
            try:
                piece()
                reach("lazy.piece")
            except BaseException as error:
                self._fail(StateError(f"the state could not be copied: {text_of(error)}"))
                if not isinstance(error, Exception):  # of a signal handler, on the thread of training
                    raise
            finally:
                self._count(1)

    def hold_back(self) -> None:
        """Let whatever the caller does from now on, or gives a device to do, come after the copies.

        Not collective.
        """
        self.help()
        self._await_pieces()
        for transfer in self._transfers:
            transfer.hold_back()
        with self._lock:
            self._check()
            self._versions.clear()  # from now on it may be changed

    def finish(self) -> None:
        """Make all copies that are left, and wait until all are made. Not collective."""
        self.help()
        self._await_pieces()
        for transfer in self._transfers:
            if not transfer.wait(self._timeout_s):
                self._fail(StateError(f"a device had not made its copies after {self._timeout_s:g} s"))
        self.look()
        if self.error is None and (name := self._spots.changed()) is not None:
            self._fail(StateError(_CHANGED + " (by a write that torch does not count, such as to .data)", tensor=name))

    def look(self) -> None:
        """Look whether something else than an optimizer's step has changed a tensor.

        Not collective. To be called once more when the slot is sealed: an operation tells of its change when it ends.
        """
        with self._lock:  # who waits for it may step as soon as it has it
            self._check()

    def cancel(self) -> None:
        """Let what is not begun be, and wait for what is: from then on nothing is written any more.

        Not collective.

        Raises:
            DeadlineExceeded: something is still being written.
        """
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
            raise DeadlineExceeded(f"a copy is not made after {self._timeout_s:g} s")
        with self._lock:
            self._versions.clear()
        self.is_over = True

    def _count(self, number: int) -> None:
        with self._lock:
            self._left -= number
            if self._left == 0:
                self._made.set()

    def _await_pieces(self) -> None:
        if not self._made.wait(self._timeout_s):
            self._fail(StateError(f"a copy was not made after {self._timeout_s:g} s"))

    def _check(self) -> None:
        changed = [name for name, tensor, version in self._versions if tensor._version != version]
        if changed:
            self._fail(StateError(_CHANGED, tensor=changed[0]))

    def _fail(self, error: StateError) -> None:
        self.error = self.error or error


class Steps:
    """Hears of the steps of all torch optimizers there are, before they are made."""

    def __init__(self) -> None:
        self._laters: list[DeferredCopies] = []
        self._told: Callable[[], None] | None = None
        self._counted: Callable[[], Any] = lambda: None  # one of several optimizers: a training step is a step of it

    def before_next(self, later: DeferredCopies) -> None:
        """Make any optimizer's next step wait for copies. Not collective."""
        self._laters = [*(one for one in self._laters if not one.is_over), later]
        self._listen()

    def tell(self, told: Callable[[], None]) -> None:
        """Call a function before each training step of an optimizer. Not collective."""
        self._told = told
        self._listen()

    def hold_back(self) -> None:
        """Let what changes the state from now on come after the copies. Not collective."""
        while self._laters:
            self._laters.pop().hold_back()

    def close(self) -> None:
        """Leave optimizers alone from now on."""
        self._laters.clear()
        _HOOK.listeners.discard(self)

    def _listen(self) -> None:
        if self not in _HOOK.listeners:
            _HOOK.listeners.add(self)
            _HOOK.register()

    def before_step(self, optimizer: Any) -> None:
        """Hear of a step (for the hook)."""
        self.hold_back()
        if self._told is None:
            return
        counted = self._counted()
        if counted is None:
            self._counted = weakref.ref(optimizer)
        if counted in (None, optimizer):
            self._told()


class _Hook:
    """The hook before each step, which is torch's, for all optimizers there are: one for this process.

    It stays registered, as compiled code is made again whenever the hooks have changed.

    Attributes:
        listeners: those who want to hear of steps.
        is_passed_by: whether steps are compiled that run without it (``fullgraph=True``): nothing may wait for a step.
    """

    def __init__(self) -> None:
        self.listeners: weakref.WeakSet[Steps] = weakref.WeakSet()
        self.is_passed_by = False
        self._is_registered = False

    def register(self) -> None:
        """Have torch call it from now on."""
        if self._is_registered:
            return
        self._is_registered = True
        import torch
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        tell = torch.compiler.disable(self._tell)  # never traced: compiled code is left for it, and entered again
        passes_by = torch.compiler.assume_constant_result(_is_passed_by)  # run while a step is compiled, not in it

        def hook(optimizer: Any, *args: Any) -> None:
            if not (torch.compiler.is_compiling() and passes_by()):
                tell(optimizer)

        register_optimizer_step_pre_hook(hook)

    def _tell(self, optimizer: Any) -> None:
        for steps in list(self.listeners):
            steps.before_step(optimizer)

    def pass_by(self) -> None:
        """Make the copies that wait for a step, as none is heard of any more."""
        if not self.is_passed_by:
            log.warning("a step of an optimizer is compiled as one graph (fullgraph=True), and no hook runs in it: "
                        "with until= all is copied before save() returns")  # fmt: skip
        self.is_passed_by = True
        for steps in list(self.listeners):
            steps.hold_back()


_HOOK = _Hook()


def _is_passed_by() -> bool:
    """Whether the step that torch compiles just now must be one graph: then nothing of ours can run in it."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        now = InstructionTranslator.current_tx()
        whole = bool(now.one_graph or getattr(now, "error_on_graph_break", False))
    except (ImportError, AttributeError):  # another version of torch: it says itself what it cannot compile
        return False
    if whole:
        _HOOK.pass_by()
    return whole


class Unchanging:
    """Which leaves of a state nothing but given optimizers' steps changes. Not collective."""

    def __init__(self) -> None:
        self._structure: Structure | None = None
        self._optimizers: tuple[Any, ...] = ()
        self._places: dict[int, int] = {}
        self._numbers: frozenset[int] = frozenset()

    def find(self, flat: Flat, until: Any) -> frozenset[int]:
        """The numbers of those leaves.

        Args:
            flat: the state.
            until: a torch optimizer, or several.

        Raises:
            StateError: it is something else.
        """
        optimizers = tuple(until) if isinstance(until, (list, tuple)) else (until,)
        _check(optimizers)
        if _HOOK.is_passed_by:
            return frozenset()
        known = flat.structure is self._structure and optimizers == self._optimizers
        if known and all(flat.values[n].data_ptr() == at for n, at in self._places.items()):
            return self._numbers
        if _HOOK.is_passed_by or any(
            group.get("capturable") for optimizer in optimizers for group in optimizer.param_groups
        ):
            numbers = []  # its steps may be replayed by a CUDA graph, past all hooks
        else:
            owned = {_place(tensor) for optimizer in optimizers for tensor in _tensors_of(optimizer)}
            numbers = [n for n, value in enumerate(flat.values) if _is_lazy(value) and _place(value) in owned]
        self._structure = None  # an exception, as of a signal handler, may come in between
        self._optimizers, self._numbers = optimizers, frozenset(numbers)
        self._places = {n: flat.values[n].data_ptr() for n in numbers}
        self._structure = flat.structure
        return self._numbers


def _check(optimizers: tuple[Any, ...]) -> None:
    torch = sys.modules.get("torch")
    for optimizer in optimizers:
        if torch is None or not isinstance(optimizer, torch.optim.Optimizer):
            raise StateError("until= wants torch optimizers: others do not say when they step", found=type(optimizer))


def _tensors_of(optimizer: Any) -> Iterable[Any]:
    torch = sys.modules["torch"]
    for group in optimizer.param_groups:
        yield from (local(tensor) for tensor in group["params"])
    for values in optimizer.state.values():
        yield from (local(value) for value in values.values() if isinstance(value, torch.Tensor))


def local(tensor: Any) -> Any:
    """The shard of a DTensor that is here; another tensor itself."""
    return tensor._local_tensor if type(tensor).__name__ == "DTensor" else tensor


def _is_lazy(value: Any) -> bool:
    torch = sys.modules["torch"]
    if not isinstance(value, torch.Tensor) or value.is_inference() or value.is_conj() or value.is_neg():
        return False
    nbytes: int = value.numel() * value.element_size()
    return nbytes > 0 and value.is_contiguous() and (value.device.type != "cpu" or nbytes >= LARGE_NBYTES)


def _place(tensor: Any) -> tuple[Any, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
