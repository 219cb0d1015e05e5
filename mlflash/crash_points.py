"""Named points in the course of a save and a restore, where tests stop or kill a process.

Without a test nothing is armed, and `reach` returns at once. tests/faults kills each rank and each node at each of
them. docs/guarantees.md lists what can then be restored.
"""

from __future__ import annotations

from collections.abc import Callable

POINTS = {
    "stage.begun": "a free slot is taken; it still holds an older step",
    "stage.unsealed": "the slot's old header is gone, nothing is copied yet",
    "stage.copied": "the state is in the slot, but for what is copied later",
    "lazy.piece": "a piece of that is copied next",
    "protect.announced": "all ranks know what comes",
    "room.begun": "a slot is too small, and not larger yet",
    "room.created": "the larger slot is there, its pages are not",
    "share.agreed": "the ranks that share state hold the same, their shares are not sealed",
    "share.sealed": "this rank's share is sealed, its slot is not",
    "transfer.sent": "a chunk of a slot is on its way",
    "transfer.arrived": "a chunk was received and checked",
    "transfer.received": "all chunks were, the header is not written",
    "transfer.sealed": "the received slot is sealed, the sender does not know yet",
    "parity.sent": "a block is on its way to where it is coded",
    "parity.gathered": "all blocks of a stripe are there",
    "parity.coded": "its parity is made (or a lost block is), not sent yet",
    "parity.arrived": "a coded block is in its place",
    "parity.received": "all parity of this rank is in place, and all heads, its header is not written",
    "parity.sealed": "the parity file is sealed",
    "keep.sealed": "the own state, or its share, is on the disk of this node, too",
    "protect.sealed": "the own slot is sealed, all copies of and for this rank are in place",
    "commit.agreed": "all ranks agreed, no receipt is written",
    "commit.half_recorded": "the own slot has its receipt, the copies do not",
    "commit.recorded": "all receipts are written, older slots are not free yet",
    "commit.released": "older slots are free, the snapshot does not say so yet",
    "commit.seen": "the snapshot says committed",
    "drain.begun": "a committed checkpoint is about to be drained; its slots are kept from being written",
    "drain.dealt": "the ranks know who writes what",
    "drain.verified": "what a rank writes was checked, its file is not there yet",
    "drain.file_made": "a file is there under its temporary name, empty",
    "drain.file_written": "all its bytes are written, not synced",
    "drain.file_synced": "it has its temporary name still",
    "drain.file_renamed": "it has its name, the directory is not synced",
    "drain.written": "the files of all ranks are there",
    "drain.committing": "the file that commits the checkpoint is about to be written",
    "drain.committed": "it is there; older checkpoints are not deleted yet",
    "drain.uncommitted": "the file that commits an older one is deleted, its other files are not",
    "drain.ended": "all is done, its slots are kept from being written still",
    "restore.listed": "all ranks know what all nodes hold",
    "restore.copied": "a slot was copied from a disk of its node to memory",
    "restore.verified": "all slots that will be used were checked on all ranks",
    "restore.adopted": "the files belong to the ranks of this run",
    "restore.rebuilt": "lost slots and damaged blocks are made again from parity",
    "restore.fetched": "slots from other nodes are here",
    "restore.gathered": "each node has all shares of what its ranks share",
    "restore.resharded": "the state is put together from those of other ranks, its slot is not sealed",
    "restore.loading": "the state was compared, nothing of it is changed",
    "restore.loaded": "all ranks have loaded",
    "reprotect.begun": "the ranks know which copies are missing",
    "reprotect.copied": "the copies are made again",
    "reprotect.freed": "files that nobody needs may be reused",
    "reprotect.done": "the next save will find room",
    "repair.begun": "the ranks know that something at rest is damaged, nothing is repaired yet",
    "repair.blocks": "damaged blocks of own slots are what they were",
    "repair.copied": "copies and parity are made again, those that were damaged are still there",
    "repair.done": "these are gone",
    "close.asked": "a rank has come to its end, and waits for the others before it frees what they share",
    "close.freed": "all ranks had, and that is freed; its trainer does not know",
    "round.left": "training has left its step, as another rank was lost, and has said so",
    "round.seated": "it has a rank of the next round",
    "round.couriers": "the couriers of the ranks that there are now are there",
    "round.open": "so is a Checkpointer",
    "round.groups": "process groups are connected, the state is not restored",
    "round.restored": "it is, and training is about to be called",
}
"""In the order in which they are reached."""

_action: Callable[[str], None] | None = None


def reach(point: str) -> None:
    """Note that this process has reached a point."""
    if _action is not None:
        _action(point)


def arm(action: Callable[[str], None] | None) -> None:
    """Call ``action(point)`` at every point from now on, on the thread that reaches it; None: stop that."""
    global _action
    _action = action
