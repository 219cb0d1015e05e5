"""What a check may look at."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Mapping
from typing import Any

from ..config import Config
from ..launch.launcher_variables import Launched
from ..mpi.world import World


@dataclasses.dataclass
class Context:
    """What a check may look at."""

    settings: Config
    environment: Mapping[str, str]
    launched: Launched  # this process, according to its launcher
    nbytes: int | None = None  # state of each rank of the job that the user plans. None: unknown
    own_slots: int = 2  # of each rank of that job
    copy_slots: int = 2  # of each copy or parity file
    nodes: int | None = None  # nodes, ranks_per_node: size of that job. None: as started
    ranks_per_node: int | None = None
    uid: int = dataclasses.field(default_factory=os.geteuid)
    root: str = "/"  # the directory that contains /etc, /dev and /proc
    mpi: Any = None  # the module of mpi4py. None: it is not started yet, or cannot be
    world: World | None = None  # None: not known yet

    @property
    def ranks(self) -> World:
        assert self.world is not None
        return self.world

    @property
    def rank(self) -> int:
        return self.launched.rank if self.world is None or self.world.world is None else self.world.rank

    @property
    def ranks_on(self) -> dict[str, tuple[int, ...]]:
        """The ranks of each node. Nodes of the same name count as one."""
        if self.world is None or self.world.world is None:
            return {socket.gethostname(): (self.rank,)}
        found: dict[str, tuple[int, ...]] = {}
        for name, ranks in zip(self.world.topology.node_names, self.world.topology.ranks_on, strict=True):
            found[name] = found.get(name, ()) + ranks
        return found

    @property
    def shape(self) -> tuple[int, int]:
        """Nodes and ranks per node of the job: as given, or as started."""
        return self.nodes or len(self.ranks_on), self.ranks_per_node or max(map(len, self.ranks_on.values()))
