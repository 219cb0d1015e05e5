"""Find out which of the ranks that computed the same micro-batch is wrong, and say so in words."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from mlflash.text import listed

from .gradients import Signatures, difference

_NAMED = 8  # differing gradients that a text lists
_LIKELY = ", as with kernels that are not deterministic"


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

    told, steady = same(step, again), same(first, second)
    if witnesses[0] == subject:
        return subject, "it computed both"
    if witnesses[0] != witnesses[1]:
        if same(step, second):
            return witnesses[0], f"{witnesses[1]} got the same bits as {subject}"
        if steady:
            now = "the same bits again" if told else "other bits than in its step"
            why = f"{witnesses[1]} got the same bits as {witnesses[0]}; when {subject} computed once more, it got {now}"
            return subject, why
        return None, "no two of three ranks got the same bits" + ("" if told else _LIKELY)
    if told == steady:
        return None, "each of the two gets the same bits every time, and there is no third rank" if told else (
            "each of the two got other bits than before when it computed once more" + _LIKELY)  # fmt: skip
    wrong, right = (witnesses[0], subject) if told else (subject, witnesses[0])
    return wrong, f"when it computed once more, it got other bits than before, and {right} got the same bits"
