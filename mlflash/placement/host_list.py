"""Host lists as Slurm writes them: ``n[001-016],gpu1`` → the hosts."""

from __future__ import annotations

import itertools
import re

from ..errors import ConfigError

MOST_HOSTS = 100_000
LONGEST_NAME = 255

_ITEM = re.compile(r"(?:[^\s,\[\]]|\[[^\s\[\]]*\])+")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def expand_hosts(text: str, where: str = "host list") -> tuple[str, ...]:
    """Expand a host list, in its order.

    Args:
        text: names separated by commas, with any number of brackets each; a number is as wide as its range begins.
        where: how an error names the origin of the text.

    Example:
        ``n[08-10,12],gpu1`` → ``n08 n09 n10 n12 gpu1``; ``x[0-1]y[0-1]`` → ``x0y0 x0y1 x1y0 x1y1``.

    Raises:
        ConfigError: it is not a host list, names more than 100,000 hosts, or a name is longer than 255 characters.

    Source: ``scontrol show hostnames`` of Slurm 22.05 gives the same where it reads the text; it
        refuses a name that continues after its last bracket, and passes over empty names.
    """
    hosts: list[str] = []
    items = _ITEM.findall(text)
    # What the pattern does not match is missing in `items`.
    readable = ",".join(items) == text
    for item in items if readable else ():
        # Every second part comes from brackets.
        parts = re.split(r"\[([^\]]*)\]", item)
        brackets = [_ranges(part) for part in parts[1::2]]
        # Count before expanding.
        count = 1
        longest = sum(map(len, parts[::2])) + sum(max((len(high) for _, high in b), default=0) for b in brackets)
        for ranges in brackets:
            count *= sum(int(high) - int(low) + 1 for low, high in ranges)
        if not count or len(hosts) + count > MOST_HOSTS or longest > LONGEST_NAME:
            readable = False
            break
        numbers = [[f"{n:0{len(lo)}d}" for lo, hi in b for n in range(int(lo), int(hi) + 1)] for b in brackets]
        for chosen in itertools.product(*numbers):
            hosts.append("".join(itertools.chain(*itertools.zip_longest(parts[::2], chosen, fillvalue=""))))
    if not readable:
        raise ConfigError(
            f"{where}: no host list",
            expected=f"names such as node[001-016],gpu1: at most {MOST_HOSTS} of at most {LONGEST_NAME} characters",
            found=repr(text[:80]),
        )
    return tuple(hosts)


def _ranges(text: str) -> list[tuple[str, str]]:
    """Read what is in brackets: "08-10,12" → [("08", "10"), ("12", "12")]; none if any of it makes no sense."""
    found = [_RANGE.fullmatch(part) for part in text.split(",")]
    ranges = [(match[1], match[2] or match[1]) for match in found if match]
    sound = len(ranges) == len(found) and all(int(low) <= int(high) for low, high in ranges)
    return ranges if sound else []
