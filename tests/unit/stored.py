"""One slot, written as a save does and read as a restore does, without ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlflash.memory.copy_threads import ALONE
from mlflash.memory.shared_memory_segment import create
from mlflash.memory.slot import Slot
from mlflash.save.stage import Staging
from mlflash.state import manifest
from mlflash.state.flatten import Flattener
from mlflash.state.layout import Extents
from mlflash.state.rebuild import Filling, compare, materialize


class Store:
    """A slot in a private directory, written by Stage and read back through the manifest."""

    def __init__(self, memory: Any):
        self.memory = memory
        self.stage, self.flattener = Staging(ALONE, 10.0), Flattener()

    def write(self, state: Any) -> None:
        flat = self.flattener.flatten(state)
        plan = self.stage.plan(flat)
        self.slot = Slot(create(self.memory, plan.layout.extents.nbytes))
        self.slot.segment.prefault()
        self.stage.copy(flat, plan, self.slot)
        self.extents: Extents = plan.layout.extents
        body = self.slot.view[4096 : 4096 + len(plan.manifest)].tobytes()
        self.manifest = manifest.decode(body, self.extents.payload_nbytes)

    def read(self, entry: Any) -> np.ndarray:
        payload = self.slot.payload(self.extents)
        return payload[entry.start : entry.start + entry.nbytes]

    def load(self) -> Any:
        return materialize(self.manifest.tree, self.manifest.entries, self.manifest.plain, self.read)

    def fill(self, state: Any) -> None:
        assert compare(state, self.manifest.tree, self.manifest.entries) == []
        filling = Filling(state, self.manifest.tree, self.manifest.entries, self.manifest.plain, self.read)
        filling.load(filling.objects)
        filling.fill_leaves()
