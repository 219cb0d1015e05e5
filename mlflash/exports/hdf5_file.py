"""One HDF5 file with every tensor whole, as a drained checkpoint shows them."""

from __future__ import annotations

from collections.abc import Sequence

from ..draining import hdf5_files
from ..storage.store import Store
from ..storage.whole_state import Whole, Written
from .mapping import plan
from .outputs import Batches
from .rules import Rule

_CHUNK_NBYTES = 8 << 20


def write(whole: Whole, store: Store, rules: Sequence[Rule] = (), name: str = "state.h5") -> Written:
    """Write a checkpoint as one HDF5 file: ``/tensors/<name>``, and everything else as JSON in ``/objects``.

    Collective if reading the checkpoint is. Tied tensors are hard links. With rules the file has only tensors.

    Args:
        whole: the checkpoint.
        store: where the file goes.
        rules: how tensors change on the way.
        name: name of the file.

    Raises:
        ConfigError: a rule does not fit.
    """
    outputs = plan(whole.entries, rules, whole.ties)
    own = [output for output in outputs if output.tie is None]
    ties = {output.entry.name: output.tie for output in outputs if output.tie is not None}
    objects = {} if rules else hdf5_files.readable(whole.tree, list(whole.entries), whole.plain)
    batches = Batches(whole, own)
    skeleton, _ = hdf5_files.tensors(
        [output.entry for output in own], [batches.source(one) for one in own], ties, objects
    )
    try:
        return Written({name: store.write(name, skeleton.stream(_CHUNK_NBYTES))}, len(own), ties)
    finally:
        skeleton.close()
