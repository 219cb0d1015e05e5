"""Write one file in the format of ``torch.save``, with the whole state or with its tensors by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..state.paths import plain_leaves
from ..state.plain_values import decode_plain
from ..storage.file_holes import FileWithHoles
from ..storage.store import Store
from ..storage.torch_files import hollow, save
from ..storage.whole_state import Whole, Written, build, tensor_dtype
from .mapping import plan
from .outputs import Batches, Output
from .rules import Rule

_CHUNK_NBYTES = 64 << 20


def write(
    whole: Whole, store: Store, rules: Sequence[Rule] = (), name: str = "state.pt", flat: bool = False
) -> Written:
    """Write a checkpoint as one file for ``torch.load``.

    Collective if reading the checkpoint is. Tied tensors stay tied. Arrays become tensors, and numbers of numpy become
    numbers of Python, so that ``torch.load(weights_only=True)`` accepts the file.

    Args:
        whole: the checkpoint.
        store: where the file goes.
        rules: how tensors change on the way. With rules the file is flat.
        name: name of the file.
        flat: write a dict of the tensors by name, without plain leaves, instead of the nested state.

    Raises:
        StateError: torch has no dtype for an array. The error names it.
        ConfigError: a rule does not fit.
    """
    outputs = plan(whole.entries, rules, whole.ties)
    flat = flat or bool(rules)
    own = outputs if flat else _in_order_of_tree(whole, outputs)
    own = [output for output in own if output.tie is None]
    ties = {output.entry.name: output.tie for output in outputs if output.tie is not None}
    empty = hollow([(tensor_dtype(output.entry), output.entry.shape) for output in own])
    tensors = dict(zip((output.entry.name for output in own), empty, strict=True))
    state = _flat(outputs, tensors) if flat else _nested(whole, ties, tensors)
    batches = Batches(whole, own)
    skeleton = FileWithHoles()
    try:
        for start, output in zip(save(state, skeleton), own, strict=True):
            skeleton.place(start, output.entry.nbytes, batches.source(output))
        nbytes = store.write(name, skeleton.stream(_CHUNK_NBYTES))
    finally:
        skeleton.close()
    return Written({name: nbytes}, len(own), ties, tuple(plain_leaves(whole.tree)) if flat else ())


def _in_order_of_tree(whole: Whole, outputs: Sequence[Output]) -> list[Output]:
    """Return the outputs in the order in which torch numbers storages. A tie comes after its original in any order."""
    numbers: list[int] = []
    build(whole.tree, numbers.append, lambda _: None)
    return [outputs[number] for number in numbers]


def _flat(outputs: Sequence[Output], tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {output.entry.name: tensors[output.tie or output.entry.name] for output in outputs}


def _nested(whole: Whole, ties: Mapping[str, str], tensors: Mapping[str, Any]) -> Any:
    names = list(whole.entries)

    def tensor(number: int) -> Any:
        return tensors[ties.get(names[number], names[number])]

    return build(whole.tree, tensor, lambda number: _python(decode_plain(whole.plain[number])))


def _python(value: Any) -> Any:
    """Turn a number of numpy into one of Python, if Python has one."""
    if isinstance(value, np.generic) and isinstance(item := value.item(), (bool, int, float, complex, str, bytes)):
        return item
    return value
