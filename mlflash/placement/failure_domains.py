"""Where nodes are: the racks, leaf switches or blocks that are lost with everything in them.

`slurm_topology` reads what Slurm knows about this; what Slurm does not know is in a file or a mapping
(:func:`from_argument`).
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import ConfigError
from .host_list import expand_hosts


@dataclasses.dataclass(frozen=True)
class Domains:
    """Failure domains of some hosts.

    Args:
        kinds: names of the levels, outermost first: ``("switch", "leaf switch")``, ``("block",)``.
        of: the domain of each host at each level, outermost first, as many as there are kinds.
    """

    kinds: tuple[str, ...]
    of: Mapping[str, tuple[str, ...]]

    def names(self, host: str) -> tuple[str, ...]:
        """Name the domains of a host, by its full or short name; an unknown host is a domain of its own.

        Example:
            With ``of={"n1": ("s0", "s4")}``: ``n1`` and ``n1.cluster`` → ``("s0", "s4")``;
            ``n2`` → ``("node n2", "node n2")``, which nothing in Slurm or a file is called (the space).
        """
        return self.of.get(host) or self.of.get(short_name(host)) or (f"node {host}",) * len(self.kinds)

    def knows(self, host: str) -> bool:
        """Whether a host has an entry, under its full or short name."""
        return host in self.of or short_name(host) in self.of


def join(parts: Sequence[tuple[str, Domains | None]]) -> Domains | None:
    """Combine what all nodes know about themselves; None if no node knows anything.

    Levels are aligned at the innermost. If a node knows fewer, its outermost domain stands for the missing ones; a node
    that knows nothing is a domain of its own. Slurm refuses two switches of one name. So one name below two parents is
    one switch, seen before and after a change of topology.conf: names stay as they are.

    Args:
        parts: host and its own domains (:func:`slurm_topology.discover`) of each node; the first entry for a host
            counts.

    Example:
        ``[("a", ("s0", "s4")), ("b", ("s5",)), ("c", None)]`` → ``a`` in ``("s0", "s4")``, ``b`` in
        ``("s5", "s5")``, ``c`` in ``("node c", "node c")``.
    """
    kinds = max((own.kinds for _, own in parts if own), key=len, default=())
    of: dict[str, tuple[str, ...]] = {}
    for host, own in parts:
        if own and own.kinds:
            of.setdefault(host, fill_gaps([""] * (len(kinds) - len(own.kinds)) + [*own.names(host)]))
    return Domains(kinds, of) if kinds else None


def from_argument(value: object) -> Domains | None:
    """Read what ``Checkpointer(domains=...)`` takes.

    Args:
        value: the path of a file (:func:`from_lines`); or a mapping from host, or host list, to its domain or the
            tuple of its domains, outermost first; or None, for None.

    Raises:
        ConfigError: it is none of these, or the places make no sense.
    """
    if value is None:
        return None
    if isinstance(value, str | os.PathLike):
        try:
            text = Path(value).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the failure domains in {os.fspath(value)!r}: {error}") from None
        return from_lines(text, os.fspath(value))
    if not isinstance(value, Mapping):
        raise ConfigError("bad setting domains", expected="a path, or a mapping host -> domain", found=repr(value))
    rows = []
    for hosts, given in value.items():
        domains = tuple(given) if isinstance(given, tuple | list) else (given,)
        if not all(isinstance(name, str) and name.strip() for name in (hosts, *domains)):
            raise ConfigError(f"domains[{hosts!r}] is no name, or no tuple of names", found=repr(given))
        rows.append((f"domains[{hosts!r}]", hosts, domains))
    return _by_path(rows, None, "domains")


def from_lines(text: str, source: str = "domains") -> Domains:
    """Read lines of a host, or a host list, and its domains, outermost first; ``#`` begins a comment.

    A first line ``levels: row rack`` names the levels. Without it, a single level is called "domain"; of several, the
    first column is called "level-1 domain", the next "level-2 domain".

    Args:
        source: how errors name them: the name of the file.

    Example:
        ``node[001-016] row1 rack1`` → ``node001`` in ``("row1", "row1/rack1")``: domains are named by their paths,
        so that rack1 of row1 and rack1 of row2 are two.

    Raises:
        ConfigError: two lines differ in their number of columns, a host has two places, or a line cannot be read.
    """
    kinds: tuple[str, ...] | None = None
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        first, *names = line.split("#", 1)[0].split() or [""]
        if first and first != "levels:":
            rows.append((f"{source}, line {number}", first, tuple(names)))
        elif first and (rows or kinds or not names):
            raise ConfigError(f"{source}, line {number}", expected="'levels: NAME ...' once, first", found=line[:80])
        elif first:
            kinds = tuple(names)
    return _by_path(rows, kinds, source)


def _by_path(rows: Sequence[tuple[str, str, tuple[str, ...]]], kinds: tuple[str, ...] | None, source: str) -> Domains:
    """Make rows of (where it is written, host list, domains outermost first) into domains named by their paths."""
    declared = "the line 'levels:'"
    if kinds is None:
        declared, _, columns = rows[0] if rows else ("", "", ())
        kinds = tuple(f"level-{i + 1} domain" for i in range(len(columns))) if len(columns) > 1 else ("domain",)
    seen: dict[str, tuple[str, tuple[str, ...]]] = {}
    for where, hosts, domains in rows:
        if len(domains) != len(kinds):
            wanted = f"{len(kinds)} after the host ({', '.join(kinds)})" + f", as in {declared}" * (where != declared)
            raise ConfigError(where, expected=wanted, found=f"{len(domains)} ({' '.join(domains)[:80]})")
        if any("/" in name for name in domains[:-1]):
            raise ConfigError(where, expected="'/' in the innermost domain only", found=" ".join(domains)[:80])
        path = tuple(itertools.accumulate(domains, "{}/{}".format))
        for host in expand_hosts(hosts, where):
            before, there = seen.setdefault(host, (where, path))
            if there != path:
                raise ConfigError(
                    f"{where}: host {host!r} has two places", expected=f"{there[-1]}, as in {before}", found=path[-1]
                )
    if not seen:
        raise ConfigError(f"{source}: no host is named", expected="lines such as 'node[001-016] row1 rack1'")
    return Domains(kinds, {host: path for host, (_, path) in seen.items()})


def fill_gaps(names: Sequence[str]) -> tuple[str, ...]:
    """Close the gaps between names, at least one of them known, from the outside.

    Example:
        ``("core", "", "leaf")`` and ``("", "core", "leaf")`` → ``("core", "core", "leaf")``.
    """
    known = [name for name in names if name]
    return (known[0],) * (len(names) - len(known)) + tuple(known)


def short_name(host: str) -> str:
    """Cut the domain name off: n1.cluster → n1."""
    return host.split(".")[0]
