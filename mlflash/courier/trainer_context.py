"""What saving and restoring work with in the trainer, and how the courier updates it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..config import Config
from ..memory.copy_threads import CopyThreads
from ..memory.node_directory import NodeDirectory
from ..memory.own_slots import OwnSlots, SlotFile
from ..protect.deduplication import SharingNews, key_of
from ..state.leaves import Leaf
from ..telemetry.recorder import TrainerRecorder
from .ranks import Ranks

if TYPE_CHECKING:
    from .client import Client


@dataclasses.dataclass
class TrainerContext:
    """What saving and restoring work with in the trainer."""

    config: Config
    courier: Client
    ranks: Ranks
    memory: NodeDirectory
    slots: OwnSlots
    copy_threads: CopyThreads
    recorder: TrainerRecorder
    provenance: Mapping[str, Any]
    sharing: SharingNews = dataclasses.field(default_factory=SharingNews)
    is_unhealed: bool = False  # whether the restored step does not have full redundancy yet

    def is_shared(self, leaf: Leaf) -> bool:
        """Whether the ranks have agreed that all that share hold this leaf alike."""
        return key_of(leaf.entry) in self.sharing.agreed

    def freed(self) -> None:
        self.slots.freed()

    def update(self, files: Iterable[SlotFile]) -> None:
        self.slots.update(files)

    def set_sharing(self, sharing: SharingNews) -> None:
        self.sharing = sharing

    def set_unhealed(self, is_unhealed: bool) -> None:
        self.is_unhealed = is_unhealed
