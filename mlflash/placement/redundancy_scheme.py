"""Redundancy schemes: ``none``, ``copy:k``, ``xor:n``, ``rs:n+k``.

A group of `members` ranks on different nodes loses nothing as long as at most `losses` of them are lost.
"""

from __future__ import annotations

import dataclasses
import re

from ..errors import ConfigError

MAX_LOSSES = 3
MAX_MEMBERS = 16  # if the number of nodes does not divide, groups have up to twice as many members

_FORM = re.compile(r"(none)|copy(?::(\d{1,2}))?|xor:(\d{1,3})|rs:(\d{1,3})\+(\d{1,2})")
EXPECTED = (
    f"none, copy, copy:k, xor:n (3 <= n <= {MAX_MEMBERS} nodes per group) or rs:n+k (n >= 2, 1 <= k <= {MAX_LOSSES}, "
    f"n + k <= {MAX_MEMBERS})"
)


@dataclasses.dataclass(frozen=True)
class Scheme:
    """One scheme, with the numbers of a full group."""

    kind: str  # "none", "copy", "xor" or "rs"
    members: int  # ranks of a group, all on different nodes
    losses: int  # how many of them may be lost

    @property
    def parity(self) -> bool:
        return self.kind in ("xor", "rs")

    def sized(self, members: int) -> Scheme:
        return dataclasses.replace(self, members=members)

    @property
    def overhead(self) -> float:
        """Bytes of redundancy per byte of state: copy:1 → 1, xor:8 → 1/7, rs:6+2 → 1/3."""
        return self.losses / (self.members - self.losses) if self.parity else float(self.losses)

    def __str__(self) -> str:
        """The scheme as the user writes it: ``copy``, ``copy:2``, ``xor:8``, ``rs:6+2``."""
        if self.kind == "none" or (self.kind == "copy" and self.losses == 1):
            return self.kind
        if self.kind == "rs":
            return f"rs:{self.members - self.losses}+{self.losses}"
        return f"{self.kind}:{self.losses if self.kind == 'copy' else self.members}"


def parse(text: str) -> Scheme:
    """Read a scheme: ``parse("rs:6+2") == Scheme("rs", members=8, losses=2)``. Raises ConfigError if it is none."""
    form = _FORM.fullmatch(text)
    scheme = None
    if form is not None:
        none, copies, xor, data, parities = form.groups()
        if none:
            scheme = Scheme("none", 1, 0)
        elif xor:
            scheme = Scheme("xor", int(xor), 1)
        elif data:
            scheme = Scheme("rs", int(data) + int(parities), int(parities))
        else:
            scheme = Scheme("copy", 1 + int(copies or 1), int(copies or 1))
    if scheme is None or not _makes_sense(scheme):
        raise ConfigError("this is no redundancy scheme", expected=EXPECTED, found=repr(text))
    return scheme


def _makes_sense(scheme: Scheme) -> bool:
    if scheme.kind == "none":
        return True
    enough = not scheme.parity or scheme.members >= scheme.losses + 2  # with one data unit, parity is a copy
    return 1 <= scheme.losses <= MAX_LOSSES and scheme.members <= MAX_MEMBERS and enough
