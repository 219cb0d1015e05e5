"""Which of the ranks that computed the same micro-batch is wrong, and how that is said."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from .gradients import Signatures
from .signatures import difference

_NAMED = 8  # of the gradients that differ, in a text
_LIKELY = ", as with kernels that are not deterministic"


@dataclasses.dataclass(frozen=True)
class Place:
    """A rank, and where it computes.

    Attributes:
        rank: of the world.
        host: name of its node.
        device: as torch names it, with the model of a GPU and its UUID.
    """

    rank: int
    host: str
    device: str

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, {self.device})"


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A micro-batch of which two ranks have computed different gradients.

    Attributes:
        step: that it was in.
        names: of the parameters whose gradients differ, or ``"loss"``; the largest difference first.
        difference: the largest of them, relative to the largest element (`signatures.difference`).
        subject: whose micro-batch it is.
        witness: who has computed it again.
        culprit: which of them is wrong; None where that cannot be told.
        reason: what else was computed, and what that says.
    """

    step: int
    names: tuple[str, ...]
    difference: float
    subject: Place
    witness: Place
    culprit: Place | None
    reason: str

    def __str__(self) -> str:
        more = f" and {len(self.names) - _NAMED} more" if len(self.names) > _NAMED else ""
        wrong = f"{self.culprit} is wrong" if self.culprit else "which of them is wrong cannot be told"
        return (
            f"step {self.step}: {self.witness} computed the micro-batch of {self.subject} again and got other bits; "
            f"{wrong}: {self.reason}. They differ by {self.difference:.1e} at most, in "
            f"{', '.join(self.names[:_NAMED])}{more}"
        )


def differing(one: Signatures, other: Signatures, bound: float) -> dict[str, float]:
    """What of two passes is not the same, the largest difference first.

    Args:
        one, other: of the same micro-batch.
        bound: differences up to it do not count; with 0.0 all bits have to be the same.
    """
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
    """Find out who of two ranks is wrong, of what was computed of the same micro-batch.

    Args:
        passes: of the subject in its step, of the first witness, of the second one, and of the subject again.
        subject: whose micro-batch it is.
        witnesses: the first and the second one, which is the same where there are two ranks.
        bound: as in `differing`.

    Returns:
        Who is wrong, or None; and why that is so.
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
