"""Run forward and backward of a step, and in some steps let other ranks compute them again."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import math
import pickle
import random
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import mlflash
from mlflash.checkpointer.off import turned_off
from mlflash.errors import ConfigError, ReplayMismatch
from mlflash.text import listed

from ..left_steps import groups_of
from .gradients import LOSS, Signatures, backward, backward_aside, difference, names_of

log = logging.getLogger("mlflash")

Compute = Callable[[Any, Any], torch.Tensor]
_SAID = 4  # mismatches that a text lists
_NAMED = 8  # differing gradients that a text lists
_LIKELY = ", as with kernels that are not deterministic"


class Replay:
    """Lets other ranks compute some micro-batches again before the optimizer steps, and compares the bits.

    Collective over ``group``. It does not change the model. A step has the same gradients, buffers and generators, bit
    by bit, with and without a replay.

    Args:
        model: a DDP, a model of ``fully_shard``, or a plain model whose gradients you reduce yourself.
        every: replay steps that are multiples of this. 0: none.
        group: ranks that hold the same parameters and compute different batches. These are all data-parallel ranks,
            with HSDP both shards and replicas. None: the default group.
        bound: ignore differences up to this, relative to the largest element of a gradient. With 0.0 all bits must be
            the same. If kernels are not deterministic, measure it: it is ``largest`` after replays with ``math.inf``.
        seed: seed for the order in which ranks compute for each other.
        on_mismatch: "warn"; "raise", which raises on all ranks of the group before the optimizer steps; or a function
            that all ranks call with the list of mismatches.
        enabled: False, or ``MLFLASH_DISABLE=1``: it only runs forward and backward.

    Attributes:
        replays: number of replays so far.
        largest: the largest difference that any replay has found on any rank, with mismatches. 0.0: none.
        mismatches: mismatches of the last replay.

    Raises:
        ConfigError: a setting makes no sense or differs between ranks, the model uses FSDP1, or torch.distributed is
            not set up.
    """

    def __init__(self, model: nn.Module, every: int, *, group: Any = None, bound: float = 0.0, seed: int = 0,
                 on_mismatch: str | Callable[[list[Mismatch]], None] = "warn", enabled: bool = True):  # fmt: skip
        self.replays, self.largest = 0, 0.0
        self.mismatches: list[Mismatch] = []
        self._model, self._every, self._bound, self._on_mismatch = model, every, bound, on_mismatch
        self._ring: Ring | None = None
        if turned_off(enabled):
            return
        _check(model, every, bound, on_mismatch)
        self._ring = Ring(group, seed)
        settings = self._ring.tell((every, bound, seed))
        if any(setting != settings[0] for setting in settings):
            raise ConfigError("every=, bound= and seed= must be the same on all ranks of the group",
                              expected=str(settings[0]), found=str(settings))  # fmt: skip

    def forward_backward(self, step: int, batch: Any, compute: Compute) -> torch.Tensor:
        """Compute a micro-batch and its gradients. In some steps let other ranks compute it again.

        Collective over the group. In a replayed step all ranks of the group compute one more pass. If bits differ by
        more than the bound on any rank, they compute three.

        Args:
            step: training step, the same on all ranks. It decides whether the step is replayed.
            batch: everything that the computation of this rank needs besides model and generators. It may be anything
                that pickle accepts. Tensors are sent without the storage around them.
            compute: ``compute(model, batch)`` gives the loss: one element, with its graph. It must not call backward.
                It is called again with batches of other ranks. So it must take everything from its arguments, and
                change nothing except buffers and the global random generators.

        Returns:
            The loss, without its graph.

        Raises:
            ReplayMismatch: with ``on_mismatch="raise"``, on all ranks: bits differ by more than the bound.
            ConfigError: on all ranks: a batch cannot be sent, the model got no gradients, or activations are
                checkpointed with ``use_reentrant=True``.
        """
        if self._ring is None or self._every == 0 or step % self._every:
            loss = compute(self._model, batch)
            loss.backward()
            return loss.detach()
        return self._replayed(self._ring, step, batch, compute)

    def _replayed(self, ring: Ring, step: int, batch: Any, compute: Compute) -> torch.Tensor:
        begun, problem = _Begun(self._model, compute), ""
        try:
            begun.packed = pack((batch, generators(), buffers_of(self._model)))
        except Exception as error:  # the other ranks must hear of any error
            problem = f"its batch cannot be sent to another rank: {error!r}"
        loss = compute(self._model, batch)
        in_step, hidden = backward(self._model, begun.names, loss)
        loss = loss.detach()
        if in_step.keys() <= {LOSS}:
            problem = problem or "the model got no gradient: compute must use the model that it is given"
        if hidden:
            problem = problem or f"{hidden[0]} gets its gradient in a backward within backward: set use_reentrant=False"
        _agree(ring, step, problem)
        first, second = ring.distances(self.replays)
        with undisturbed(self._model):
            passes = [in_step, begun.computed_by(ring, first)]
            found, other_bits = (differing(in_step, passes[1], bound) for bound in (self._bound, 0.0))
            most = max(other_bits.values()) if other_bits else None
            said = ring.tell((bool(found), most, _here(self._model)))
            if any(differs for differs, *_ in said):
                passes += [begun.computed_by(ring, second), begun.computed_by(ring, 0)]
        self.replays += 1
        apart = [by for _, by, _ in said if by is not None]
        self.largest = max([self.largest, *apart])
        self.mismatches = self._judged(ring, step, passes, found, [place for *_, place in said], (first, second))
        self._say(ring, step, max(apart, default=None))
        return loss

    def _judged(self, ring: Ring, step: int, passes: list[Signatures], found: dict[str, float], places: list[Place],
                distances: tuple[int, int]) -> list[Mismatch]:  # fmt: skip
        """Give the mismatches of all ranks. Collective."""
        if len(passes) == 2:
            return []
        mine: list[Mismatch] = []
        if found:
            subject = places[ring.place]
            first, second = (places[(ring.place + distance) % ring.size] for distance in distances)
            culprit, reason = judge(passes, subject, (first, second), self._bound)
            mine = [Mismatch(step, tuple(found), max(found.values()), subject, first, culprit, reason)]
        return [mismatch for mismatches in ring.tell(mine) for mismatch in mismatches]

    def _say(self, ring: Ring, step: int, most: float | None) -> None:
        """Report what was found, by a log line of the first rank, an exception or a call on all ranks."""
        found = self.mismatches
        if not found:
            result = "the same bits"
            if most is not None:
                result = f"bits differ by {most:.1e} at most, within the measured bound ({self._bound:.1e})"
            if ring.place == 0:
                log.info("step %d was computed again by other ranks: %s", step, result)
            return
        more = f"\n  and {len(found) - _SAID} more" if len(found) > _SAID else ""
        text = "\n  ".join(str(mismatch) for mismatch in found[:_SAID]) + more
        if callable(self._on_mismatch):
            self._on_mismatch(found)
        elif self._on_mismatch == "raise":
            wrong = next((mismatch.culprit for mismatch in found if mismatch.culprit), None)
            rank, node = (wrong.rank, wrong.host) if wrong else (None, None)
            raise ReplayMismatch(f"a rank computes wrongly: {text}", step=step, tensor=found[0].names[0], rank=rank,
                                 node=node)  # fmt: skip
        elif ring.place == 0:
            log.warning("a rank computes wrongly: %s", text)


class _Begun:
    """A micro-batch of this rank, with the state that its computation begins with. Make it before the computation."""

    def __init__(self, model: nn.Module, compute: Compute):
        self._model, self._compute, self._synced = model, compute, Synced(model)
        self.names = names_of(model)
        self.packed = b""  # batch, generators, buffers

    def computed_by(self, ring: Ring, distance: int) -> Signatures:
        """Let the rank at this distance compute it, while this rank computes another's. Collective."""
        batch, state, buffers = unpack(ring.pass_on(self.packed, distance))
        # If DDP sends the buffers of its first rank to all ranks, that rank needs its own buffers.
        fill_buffers(self._model, unpack(self.packed)[2] if self._synced else buffers)
        set_generators(state)
        with self._synced.again():
            found = backward_aside(self._model, self.names, self._compute(self._model, batch))
        theirs: Signatures = pickle.loads(ring.pass_on(pickle.dumps(found), -distance))
        return theirs


def _check(model: nn.Module, every: int, bound: float, on_mismatch: Any) -> None:
    if not isinstance(every, int) or every < 0:
        raise ConfigError("bad setting every", expected="a number of steps, or 0 for no replay", found=every)
    if not bound >= 0.0 or math.isnan(bound):
        raise ConfigError("bad setting bound", expected="0.0 or more", found=bound)
    if on_mismatch not in ("warn", "raise") and not callable(on_mismatch):
        raise ConfigError("bad setting on_mismatch", expected='"warn", "raise" or a function', found=on_mismatch)
    if not dist.is_initialized():
        raise ConfigError("a replay needs torch.distributed: call init_process_group first")
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ConfigError("FSDP1 reduces gradients before a replay can see them: use FSDP2", expected="fully_shard")


def _agree(ring: Ring, step: int, problem: str) -> None:
    """If any rank has a problem that prevents the replay, raise it on all ranks. Collective."""
    for rank, said in zip(ring.ranks, ring.tell(problem), strict=True):
        if said:
            raise ConfigError(f"this step cannot be replayed: {said}", rank=rank, step=step)


def _here(model: nn.Module) -> Place:
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    name = str(device)
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        name += f" {about.name} {getattr(about, 'uuid', '')}".rstrip()
    return Place(dist.get_rank(), socket.gethostname(), name)


# Find out which of the ranks that computed the same micro-batch is wrong, and say so in words.


@dataclasses.dataclass(frozen=True)
class Place:
    """A rank and the place where it computes.

    Attributes:
        rank: rank of the world.
        host: name of its node.
        device: torch's name of the device, with the model and UUID of a GPU.
    """

    rank: int
    host: str
    device: str

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, {self.device})"


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A micro-batch for which two ranks computed different gradients.

    Attributes:
        step: the replayed step.
        names: names of parameters whose gradients differ, or ``"loss"``. The largest difference comes first.
        difference: the largest difference, relative to the largest element (`gradients.difference`).
        subject: the rank that the micro-batch belongs to.
        witness: the rank that computed it again.
        culprit: the one of these two that is wrong. None if mlflash cannot tell.
        reason: what else was computed, and what follows from it.
    """

    step: int
    names: tuple[str, ...]
    difference: float
    subject: Place
    witness: Place
    culprit: Place | None
    reason: str

    def __str__(self) -> str:
        wrong = f"{self.culprit} is wrong" if self.culprit else "which of them is wrong cannot be told"
        return (
            f"step {self.step}: {self.witness} computed the micro-batch of {self.subject} again and got other bits; "
            f"{wrong}: {self.reason}. They differ by {self.difference:.1e} at most, in "
            f"{listed(self.names, _NAMED)}"
        )


def differing(one: Signatures, other: Signatures, bound: float) -> dict[str, float]:
    """Give what differs between two passes, by name. The largest difference comes first."""
    found = {}
    for name in one.keys() | other.keys():
        if name not in one or name not in other:
            found[name] = math.inf
        elif one[name].digest != other[name].digest:
            found[name] = difference(one[name], other[name])
    found = {name: by for name, by in found.items() if bound == 0.0 or by > bound}
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def judge(passes: Sequence[Signatures], subject: Place, witnesses: tuple[Place, Place], bound: float
          ) -> tuple[Place | None, str]:  # fmt: skip
    """Find out which of two ranks is wrong, from four passes of the same micro-batch.

    Args:
        passes: of the subject in its step, of the first witness, of the second witness, and of the subject again.
        subject: the rank that the micro-batch belongs to.
        witnesses: the first and the second witness. With two ranks both are the same.
        bound: as in `differing`.

    Returns:
        The rank that is wrong, or None, and the reason.
    """
    step, first, second, again = passes

    def same(one: Signatures, other: Signatures) -> bool:
        return not differing(one, other, bound)

    is_steady, agree = same(step, again), same(first, second)
    if witnesses[0] == subject:
        return subject, "it computed both"
    if witnesses[0] != witnesses[1]:
        if same(step, second):
            return witnesses[0], f"{witnesses[1]} got the same bits as {subject}"
        if agree:
            now = "the same bits again" if is_steady else "other bits than in its step"
            why = f"{witnesses[1]} got the same bits as {witnesses[0]}; when {subject} computed once more, it got {now}"
            return subject, why
        return None, "no two of three ranks got the same bits" + ("" if is_steady else _LIKELY)
    if is_steady == agree:
        return None, "each of the two gets the same bits every time, and there is no third rank" if is_steady else (
            "each of the two got other bits than before when it computed once more" + _LIKELY)  # fmt: skip
    wrong, right = (witnesses[0], subject) if is_steady else (subject, witnesses[0])
    return wrong, f"when it computed once more, it got other bits than before, and {right} got the same bits"


# Convert a micro-batch and the state that its computation began with to bytes, from which another rank computes. They
# may be any nested structure that pickle accepts. Only the elements of a tensor are sent, not the storage around
# them, because a batch is often a view of all data. Strides are kept, because they decide which kernels run.


_Packed = tuple[bytes, torch.dtype, tuple[int, ...], tuple[int, ...], str, bool]


def pack(inputs: Any) -> bytes:
    """Give the inputs as bytes. Not collective. You may change the inputs when this returns, but not before."""
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(inputs)
    return file.getvalue()


def unpack(packed: bytes) -> Any:
    """Make the inputs from bytes. Tensors of an accelerator go to the current one of this rank. Not collective.

    Args:
        packed: bytes from another rank of this job. They may run any code, as objects in torch.distributed may.
    """
    return _Unpickler(io.BytesIO(packed)).load()


class _Pickler(pickle.Pickler):
    def persistent_id(self, thing: Any) -> _Packed | None:
        if type(thing) is not torch.Tensor or thing.layout != torch.strided or thing.is_quantized:
            return None
        tensor = thing.detach().resolve_conj().resolve_neg()
        size, stride = tuple(tensor.shape), tuple(tensor.stride())
        length = 1 + sum((n - 1) * by for n, by in zip(size, stride, strict=True)) if tensor.numel() else 0
        elements = tensor.as_strided((length,), (1,)).cpu().contiguous().view(torch.uint8)
        is_leaf = thing.requires_grad and thing.is_leaf
        return elements.numpy().tobytes(), tensor.dtype, size, stride, tensor.device.type, is_leaf


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, packed: _Packed) -> torch.Tensor:
        content, dtype, size, stride, device, requires_grad = packed
        if not content:
            return torch.empty_strided(size, stride, dtype=dtype, device=device, requires_grad=requires_grad)
        elements = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype).to(device)
        return elements.as_strided(size, stride).requires_grad_(requires_grad)


# The ranks that compute each other's micro-batches: which rank computes for which, and how they exchange data. They
# use gloo, in a group of their own.


class Ring:
    """The ranks of a process group as a ring, in the order of the group.

    Collective over the group.

    Args:
        group: ranks that hold the same model and compute different batches. None: the default group.
        seed: seed for the order of the distances.

    Example:
        With 4 ranks and distance 3, rank 0 computes the batch of rank 1, and rank 3 computes that of rank 0.
    """

    def __init__(self, group: Any, seed: int):
        self.ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        every = self.ranks == tuple(range(dist.get_world_size()))
        of_some = {} if every else {"ranks": list(self.ranks), "use_local_synchronization": True}
        self._group = dist.new_group(backend="gloo", **of_some)
        self.place = self.ranks.index(dist.get_rank())
        self.size = len(self.ranks)
        self._distances = list(range(1, self.size))
        random.Random(seed).shuffle(self._distances)

    def distances(self, number: int) -> tuple[int, int]:
        """Give the distances from a rank to its first and its second witness in a replay.

        Each of ``size - 1`` successive replays has another first distance, so that every rank checks every other. With
        two ranks both distances are the same, and with one rank both are 0.
        """
        if not self._distances:
            return 0, 0
        return self._distances[number % (self.size - 1)], self._distances[(number + 1) % (self.size - 1)]

    def rank_at(self, distance: int) -> int:
        rank: int = self.ranks[(self.place + distance) % self.size]
        return rank

    def tell(self, value: Any) -> list[Any]:
        """Gather a value from each rank of the group, in its order, on all of them. Collective over the group."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def pass_on(self, content: bytes, distance: int) -> bytes:
        """Send bytes to the rank at this distance, and receive from the rank at the same distance before this one.

        Collective over the group.
        """
        if distance % self.size == 0:
            return content
        length = torch.tensor([len(content)])
        coming = self._exchange(length, torch.zeros(1, dtype=torch.int64), distance)
        room = torch.empty(int(coming.item()), dtype=torch.uint8)
        self._exchange(torch.frombuffer(bytearray(content), dtype=torch.uint8), room, distance)
        return bytes(room.numpy())

    def _exchange(self, content: torch.Tensor, room: torch.Tensor, distance: int) -> torch.Tensor:
        sent = dist.isend(content, self.rank_at(distance), group=self._group)
        got = dist.irecv(room, self.rank_at(-distance), group=self._group)
        for work in (sent, got):
            if work is not None:
                work.wait()
        return room


# Undo what a pass changes other than gradients: buffers, generators, and what DDP and FSDP2 remember.


_OF_GROUPS = ("reduce_grads", "all_reduce_grads")


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Give all buffers of a model by name, including those that are in no state dict. Not collective."""
    return dict(model.named_buffers(remove_duplicate=False))


def generators() -> dict[str, Any]:
    """Read the states of the global generators; for CUDA only that of this rank's device. Not collective."""
    state = mlflash.rng().state_dict()
    if "cuda" in state:
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_generators(state: Mapping[str, Any]) -> None:
    """Set generator states that `generators` has read on this or another rank. Not collective."""
    mlflash.rng().load_state_dict({name: value for name, value in state.items() if name != "cuda"})
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def fill_buffers(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Copy values into the buffers of these names. Use it within `undisturbed`. Not collective."""
    with torch.no_grad():
        for name, buffer in buffers_of(model).items():
            if (value := values.get(name)) is None:
                continue
            if value.shape == buffer.shape:
                buffer.copy_(value)
            else:
                _put(model, name, value)


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """At the end of the block, put back generators, buffers, and what DDP and FSDP2 remember of forward passes.

    Not collective. Within the block no wrapper reduces gradients. Buffers stay the same tensors.
    """
    state, buffers = mlflash.rng().state_dict(), buffers_of(model)
    copies = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                stack.enter_context(module.no_sync())
            elif isinstance(module, FSDPModule):
                for group in groups_of(module):
                    stack.enter_context(_attributes(group, dict.fromkeys(_OF_GROUPS, False)))
        try:
            yield
        finally:
            mlflash.rng().load_state_dict(state)
            now = buffers_of(model)
            with torch.no_grad():
                for name, buffer in buffers.items():
                    if now.get(name) is not buffer:
                        _put(model, name, buffer)
                    buffer.copy_(copies[name])


class Synced:
    """Remembers before a step whether the DDPs of a model send the buffers of their first rank to all ranks.

    A pass after the step can then do what the step did, and leave the setting unchanged. By itself, DDP would not send
    buffers in the first pass after one that reduces nothing.

    Not collective.
    """

    def __init__(self, model: nn.Module):
        self._found = [
            (module, bool(module.require_forward_param_sync), bool(module.will_sync_module_buffers()))
            for module in model.modules() if isinstance(module, DistributedDataParallel)
        ]  # fmt: skip

    def __bool__(self) -> bool:
        return any(syncs for *_, syncs in self._found)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for module, flag, _ in self._found:
                stack.enter_context(_attributes(module, {"require_forward_param_sync": flag}))
            yield


@contextlib.contextmanager
def _attributes(thing: Any, values: Mapping[str, Any]) -> Iterator[None]:
    before = {name: getattr(thing, name) for name in values}
    try:
        for name, value in values.items():
            setattr(thing, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(thing, name, value)


def _put(model: nn.Module, name: str, buffer: torch.Tensor) -> None:
    module, _, key = name.rpartition(".")
    setattr(model.get_submodule(module), key, buffer)
