"""Checkpoint ids: one rule by which all adapters find the step and the name in an id.

An id is a path. A part of it contains the step if a number is next to one of the words `step`, `iter`, `iteration`,
`checkpoint` and `ckpt`: ``step-100``, ``global_step100``, ``iter_0000100``, ``100steps``. The word and the number may
be part of a name: ``gpt-100steps``, ``step-100_ckpt``. The last part also contains the step if it is only a number:
``run/100``. If several parts contain a step, the last one counts. A number right after letters (``tp0_ep0_fsdp1``)
belongs to the name. Any other number next to a step (``epoch=3-step=100``) belongs to neither.
"""

from __future__ import annotations

import os
import re

from mlflash.errors import StepNotFound

RULE = ("step-100, step=100, iter_0000100, checkpoint-100, ckpt-100 or 100steps, alone or within a name such as "
        "gpt-100steps or step-100_ckpt; or the number alone as the last part (run/100)")  # fmt: skip

_WORD = r"(?:steps?|iter(?:ation)?s?|checkpoint|ckpt)"
_WORD_FIRST = re.compile(rf"(?<![A-Za-z])(?:global[-_]?)?{_WORD}[-_=]?(\d{{1,18}})(?![0-9A-Za-z]|\.\d)", re.IGNORECASE)
_NUMBER_FIRST = re.compile(r"(?<![0-9A-Za-z.])(\d{1,18})[-_]?(?:steps?|iter(?:ation)?s?)(?![A-Za-z])", re.IGNORECASE)
_ALONE = re.compile(r"\d{1,18}")
_SET_APART = re.compile(r"(?:=|(?<![0-9A-Za-z]))\d+(?:\.\d+)*(?![0-9A-Za-z])")
_UNREAD = re.compile(r"(?<![A-Za-z])steps?[-_=]?\d|\d[-_]?steps?(?![A-Za-z])", re.IGNORECASE)


def read(checkpoint_id: str | os.PathLike[str]) -> tuple[str, int | None]:
    """Give the name in an id and its step. The step is None if the id contains none. Not collective.

    Example:
        ``"run/step-100/tp0_ep0_fsdp1"`` → ``("run/tp0_ep0_fsdp1", 100)``; ``"gpt-100steps"`` → ``("gpt", 100)``;
        ``"tp0_ep0_fsdp1"`` → ``("tp0_ep0_fsdp1", None)``.

    Raises:
        StepNotFound: the id contains a number that may be meant as the step, but does not follow the rule.
    """
    parts = [part for part in os.fspath(checkpoint_id).split("/") if part not in ("", ".")]
    for at in reversed(range(len(parts))):
        if (found := _read_part(parts[at], is_last=at == len(parts) - 1)) is not None:
            rest, step = found
            return "/".join([*parts[:at], *([rest] if rest else []), *parts[at + 1 :]]), step
    if parts and (_SET_APART.search(parts[-1]) or any(_UNREAD.search(part) for part in parts)):
        raise StepNotFound(
            "mlflash cannot tell whether a number in this checkpoint id is the step: write the step in one of the "
            "forms below, and other numbers right after letters, as in tp0", expected=RULE, found=repr(checkpoint_id),
        )  # fmt: skip
    return "/".join(parts), None


def step_of(checkpoint_id: str | os.PathLike[str] | int) -> int:
    """Give the step of a checkpoint id: 12 for 12, ``"12"``, ``"step-00000012"`` and ``"/path/12steps"``.

    Not collective.

    Raises:
        StepNotFound: the id contains no step.
    """
    if isinstance(checkpoint_id, int):
        return checkpoint_id
    step = read(checkpoint_id)[1]
    if step is None:
        raise StepNotFound("a checkpoint id must contain the step", expected=RULE, found=repr(checkpoint_id))
    return step


def names_a_step(checkpoint_id: str | os.PathLike[str] | int) -> bool:
    """Whether `step_of` finds a step in an id. Not collective."""
    try:
        return step_of(checkpoint_id) >= 0
    except StepNotFound:
        return False


def _read_part(part: str, is_last: bool) -> tuple[str, int] | None:
    """Give the name in a part without the step, and the step. None if the part contains no step."""
    if is_last and _ALONE.fullmatch(part):
        return "", int(part)
    for form in (_WORD_FIRST, _NUMBER_FIRST):
        if (found := [*form.finditer(part)]) and (last := found[-1]):
            rest = (_SET_APART.sub("", piece).strip("-_=. ") for piece in (part[: last.start()], part[last.end() :]))
            return "-".join(piece for piece in rest if piece), int(last[1])
    return None
