"""Where nodes are: the racks, leaf switches or blocks that are lost with everything in them.

Slurm knows this (`discover`, `ask_slurm`), or a file or a mapping says it (`from_argument`).
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ..errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Domains:
    """Failure domains of some hosts."""

    kinds: tuple[str, ...]  # names of the levels, outermost first: ("switch", "leaf switch"), ("block",)
    # the domain of each host at each level, outermost first, as many as there are kinds
    of: Mapping[str, tuple[str, ...]]

    def names(self, host: str) -> tuple[str, ...]:
        """Name the domains of a host, by its full or short name; an unknown host is a domain of its own.

        Example:
            With ``of={"n1": ("s0", "s4")}``: ``n1`` and ``n1.cluster`` → ``("s0", "s4")``;
            ``n2`` → ``("node n2", "node n2")``, which nothing in Slurm or a file is called (the space).
        """
        return self.of.get(host) or self.of.get(short_name(host)) or (f"node {host}",) * len(self.kinds)

    def knows(self, host: str) -> bool:
        return host in self.of or short_name(host) in self.of


def join(parts: Sequence[tuple[str, Domains | None]]) -> Domains | None:
    """Combine what all nodes know about themselves; None if no node knows anything.

    Levels are aligned at the innermost. If a node knows fewer, its outermost domain stands for the missing ones; a node
    that knows nothing is a domain of its own. Slurm refuses two switches of one name. So one name below two parents is
    one switch, seen before and after a change of topology.conf: names stay as they are.

    Args:
        parts: host and its own domains (`discover`) of each node; the first entry for a host
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
            before, path_before = seen.setdefault(host, (where, path))
            if path_before != path:
                raise ConfigError(f"{where}: host {host!r} has two places", found=path[-1],
                                  expected=f"{path_before[-1]}, as in {before}")  # fmt: skip
    if not seen:
        raise ConfigError(f"{source}: no host is named", expected="lines such as 'node[001-016] row1 rack1'")
    return Domains(kinds, {host: path for host, (_, path) in seen.items()})


def fill_gaps(names: Sequence[str]) -> tuple[str, ...]:
    """Close gaps, from the outside: ("core", "", "leaf") and ("", "core", "leaf") → ("core", "core", "leaf")."""
    known = [name for name in names if name]
    return (known[0],) * (len(names) - len(known)) + tuple(known)


def short_name(host: str) -> str:
    """Cut the domain name off: n1.cluster → n1."""
    return host.split(".")[0]


# Host lists as Slurm writes them: ``n[001-016],gpu1`` → the hosts


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
    matches = [_RANGE.fullmatch(part) for part in text.split(",")]
    ranges = [(match[1], match[2] or match[1]) for match in matches if match]
    sound = len(ranges) == len(matches) and all(int(low) <= int(high) for low, high in ranges)
    return ranges if sound else []


# What Slurm knows about the places of nodes


log = logging.getLogger("mlflash")

_FIELD = re.compile(r'(\w+)=(?:"([^"]*)"|(\S*))')
_KINDS = {
    "SwitchName": "switch", "AggregatedBlock": "aggregated block", "BlockName": "block", "RingName": "ring",
    "TorusName": "torus",
}  # fmt: skip


def discover(env: Mapping[str, str], host: str) -> Domains | None:
    """Read this node's own domains from the environment; None if Slurm gives none for this node.

    ``srun`` gives each node its own address, but ``mpiexec`` in an sbatch script may hand the first
    node's environment to all ranks: an address that ends with another name than ``host`` does not belong to this node.

    Args:
        host: name of this node, full or short; the answer is given under this name.
    """
    try:
        own = from_slurm_address(env.get("SLURM_TOPOLOGY_ADDR", ""), env.get("SLURM_TOPOLOGY_ADDR_PATTERN", ""))
    except ConfigError as error:
        # Training must also start under a future Slurm with another output. Only placement is worse then.
        log.debug("the failure domains of %s are unknown: %s", host, error)
        return None
    if own is None:
        return None
    ((node, names),) = own.of.items()
    if node in (host, short_name(host)) or short_name(node) == host:
        return Domains(own.kinds, {host: names})
    log.debug("the failure domains of %s are unknown: SLURM_TOPOLOGY_ADDR belongs to %s", host, node)
    return None


def from_slurm_address(addr: str, pattern: str) -> Domains | None:
    """Read what Slurm says of one node; None where it says nothing (no topology plugin: the pattern is ``node``).

    A level at which the node has no switch is empty (``root..leaf.n1``, in a tree of unequal depth); one with several
    is a host list, taken as one opaque name (``core.s[0-1].n1``). Only the node's name may hold dots. Of a torus
    (``torus:x:y:z.node``) the name counts, not the place in it.

    Example:
        ``s0.s4.n1``, ``switch.switch.node`` → kinds ``("switch", "leaf switch")``, ``n1`` in ``("s0", "s4")``.

    Raises:
        ConfigError: the address does not follow the pattern.

    Source: ``topology_p_get_node_addr`` of Slurm's plugins tree, block, flat (22.05 to 25.05) and torus3d (26.05).
    """
    if not addr and not pattern:
        return None
    *kinds, last = pattern.split(".")
    *names, node = addr.split(".", len(kinds))
    if last != "node" or not all(kinds) or len(names) != len(kinds) or not node:
        raise ConfigError(
            "SLURM_TOPOLOGY_ADDR does not follow SLURM_TOPOLOGY_ADDR_PATTERN",
            expected=f"one name for each part of {pattern!r}, the node's name last",
            found=repr(addr),
        )
    names = [name.split(":")[0] if ":" in kind else name for name, kind in zip(names, kinds, strict=True)]
    return Domains(_slurm_kinds(kind.split(":")[0] for kind in kinds), {node: fill_gaps(names)}) if any(names) else None


def ask_slurm(timeout_s: float = 10) -> Domains | None:
    """Ask Slurm for the domains of all nodes; None if there is no answer, or no topology.

    Not collective; call it on one rank, because each call is a request to the cluster's only slurmctld.
    """
    # Old Slurm cuts lines at 512 bytes, unless this variable names a length, which it allocates on its stack. New Slurm
    # cuts lines at this length.
    env = {**os.environ, "SLURM_TOPO_LEN": "1000000"}
    try:
        shown = subprocess.run(
            ["scontrol", "show", "topology"],
            env=env, timeout=timeout_s, stdin=subprocess.DEVNULL, capture_output=True, check=True,
        )  # fmt: skip
        domains = from_scontrol(shown.stdout.decode(errors="replace"))
    except (OSError, subprocess.SubprocessError, ConfigError) as error:
        log.debug("scontrol show topology gave no failure domains: %s", error)
        return None
    return domains if domains.of else None


def from_scontrol(text: str) -> Domains:
    """Read the output of ``scontrol show topology``, a line for each switch or block; other lines are passed over.

    A switch of any level lists all nodes below it. A level that a host is missing from is filled as in
    `join`; two switches of one level are named together (``s0,s1``).

    Example:
        ``SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[1-2]`` and
        ``SwitchName=s9 Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=s[0-1]`` → ``n1`` in ``("s9", "s0")``.

    Raises:
        ConfigError: a number or a host list cannot be read; the text names the line.

    Source: ``_print_topo_record`` of Slurm's plugins tree, block (23.11 to 25.05), ring and torus3d (26.05).
    """
    kinds: dict[int, str] = {}
    names: dict[str, dict[int, str]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        fields = {key: quoted or plain for key, quoted, plain in _FIELD.findall(line)}
        key = next((key for key in _KINDS if fields.get(key)), None)
        if key is None or not fields.get("Nodes"):
            continue
        where = f"scontrol show topology, line {number}"
        hosts = expand_hosts(fields["Nodes"], where)
        # Blocks have no level. Aggregated blocks of one level have the same size.
        level = fields.get("BlockSize", str(len(hosts))) if key == "AggregatedBlock" else fields.get("Level", "0")
        if not re.fullmatch("[0-9]{1,9}", level):
            raise ConfigError(f"{where}: unknown level or size", expected="a number", found=repr(level[:80]))
        kinds.setdefault(int(level), _KINDS[key])
        for host in hosts:
            at = names.setdefault(host, {})
            at[int(level)] = f"{at[int(level)]},{fields[key]}" if int(level) in at else fields[key]
    levels = sorted(kinds, reverse=True)
    of = {host: fill_gaps([at.get(level, "") for level in levels]) for host, at in names.items()}
    return Domains(_slurm_kinds(kinds[level] for level in levels), of)


def _slurm_kinds(kinds: Iterable[str]) -> tuple[str, ...]:
    """Name the innermost of several levels of switches "leaf switch"."""
    named = tuple(kinds)
    return (*named[:-1], "leaf switch") if len(named) > 1 and named[-1] == "switch" else named
