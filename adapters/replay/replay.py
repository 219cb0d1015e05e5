"""Run forward and backward of a step, and in some steps let other ranks compute them again."""

from __future__ import annotations

import logging
import math
import pickle
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from mlflash.checkpointer.disabled import turned_off
from mlflash.errors import ConfigError, ReplayMismatch

from .gradients import LOSS, Signatures, backward, backward_aside, names_of
from .packed_inputs import pack, unpack
from .ring import Ring
from .undisturbed import Synced, buffers_of, fill_buffers, generators, set_generators, undisturbed
from .verdicts import Mismatch, Place, differing, judge

log = logging.getLogger("mlflash")

Compute = Callable[[Any, Any], torch.Tensor]
_SAID = 4  # mismatches that a text lists


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
        if any(one != settings[0] for one in settings):
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
        return [one for theirs in ring.tell(mine) for one in theirs]

    def _say(self, ring: Ring, step: int, most: float | None) -> None:
        """Report what was found, by a log line of the first rank, an exception or a call on all ranks.

        Args:
            ring: the ring of all ranks.
            step: the replayed step.
            most: the largest difference on any rank. None: all bits are the same.
        """
        found = self.mismatches
        if not found:
            result = "the same bits"
            if most is not None:
                result = f"bits differ by {most:.1e} at most, within the measured bound ({self._bound:.1e})"
            if ring.place == 0:
                log.info("step %d was computed again by other ranks: %s", step, result)
            return
        more = f"\n  and {len(found) - _SAID} more" if len(found) > _SAID else ""
        text = "\n  ".join(str(one) for one in found[:_SAID]) + more
        if callable(self._on_mismatch):
            self._on_mismatch(found)
        elif self._on_mismatch == "raise":
            wrong = next((one.culprit for one in found if one.culprit), None)
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
    if any(isinstance(one, FullyShardedDataParallel) for one in model.modules()):
        raise ConfigError("FSDP1 reduces gradients before a replay can see them: use FSDP2", expected="fully_shard")


def _agree(ring: Ring, step: int, problem: str) -> None:
    """If any rank has a problem that prevents the replay, raise it on all ranks. Collective."""
    for rank, said in zip(ring.ranks, ring.tell(problem), strict=True):
        if said:
            raise ConfigError(f"this step cannot be replayed: {said}", rank=rank, step=step)


def _here(model: nn.Module) -> Place:
    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    name = str(device)
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        name += f" {about.name} {getattr(about, 'uuid', '')}".rstrip()
    return Place(dist.get_rank(), socket.gethostname(), name)
