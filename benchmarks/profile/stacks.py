"""Converts the stacks that py-spy counts to seconds by function."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping

_SOURCE = re.compile(r"^(?P<function>.+) \((?:[^()]*/)?(?P<file>[^()/]+?)(?:\.py)?(?::[0-9]+)?\)$")
_COURIER = "JobThread._run (job_thread)"  # below everything that the courier's thread does
_FIRST = ("(checkpointer)", _COURIER)  # the ends of the frames with which training and the courier enter the library


@dataclasses.dataclass
class Stacks:
    """The samples of one thread, as a tree of functions.

    Attributes:
        name: the function, with its file.
        seen: how often it was on the stack.
        itself: how often it was the innermost function.
        calls: the functions that it called, by name.
    """

    name: str
    seen: int = 0
    itself: int = 0
    calls: dict[str, Stacks] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_lines(cls, lines: Iterable[str]) -> Stacks:
        """Read lines such as ``outer (file:line);inner (file:line) 17``. Frames outside of mlflash are left out."""
        tree = cls("")
        for line in lines:
            frames, _, count = line.rpartition(" ")
            names = list(itertools.dropwhile(lambda name: not name.endswith(_FIRST), map(_tidy, frames.split(";"))))
            if names:
                tree.add(names, int(count))
        return tree

    def add(self, names: list[str], count: int) -> None:
        self.seen += count
        if names:
            self.calls.setdefault(names[0], Stacks(names[0])).add(names[1:], count)
        else:
            self.itself += count

    def walk(self, least: float, depth: int = 0) -> Iterator[tuple[int, Stacks]]:
        """Yield depth and function of all seen ``least`` times or more: callers first, and the most frequent first."""
        for one in sorted(self.calls.values(), key=lambda one: -one.seen):
            if one.seen >= least:
                yield depth, one
                yield from one.walk(least, depth + 1)


def _tidy(frame: str) -> str:
    """``Way.copy (ways.py:62)`` → ``Way.copy (ways)``."""
    found = _SOURCE.match(frame)
    return f"{found['function'].replace('.<locals>', '')} ({found['file']})" if found else frame


def by_thread(text: str) -> Mapping[str, list[str]]:
    """Split the output of ``py-spy record --format raw`` by thread: "courier", and "training" for all others."""
    threads: dict[str, list[str]] = {}
    for line in text.splitlines():
        inside = _COURIER in map(_tidy, line.rpartition(" ")[0].split(";"))
        threads.setdefault("courier" if inside else "training", []).append(line)
    return threads
