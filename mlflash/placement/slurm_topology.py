"""What Slurm knows about the places of nodes → failure domains.

Each rank reads what its environment says about its own node (:func:`discover`, then :func:`failure_domains.join`); one
rank may ask for the whole cluster (:func:`ask_slurm`).
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
from collections.abc import Iterable, Mapping

from ..errors import ConfigError
from .failure_domains import Domains, fill_gaps, short_name
from .host_list import expand_hosts

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
        found = from_scontrol(shown.stdout.decode(errors="replace"))
    except (OSError, subprocess.SubprocessError, ConfigError) as error:
        log.debug("scontrol show topology gave no failure domains: %s", error)
        return None
    return found if found.of else None


def from_scontrol(text: str) -> Domains:
    """Read the output of ``scontrol show topology``, a line for each switch or block; other lines are passed over.

    A switch of any level lists all nodes below it. A level that a host is missing from is filled as in
    :func:`failure_domains.join`; two switches of one level are named together (``s0,s1``).

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
    found = tuple(kinds)
    return (*found[:-1], "leaf switch") if len(found) > 1 and found[-1] == "switch" else found
