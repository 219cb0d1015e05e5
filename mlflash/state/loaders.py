"""Loaders of torchdata that have not begun: asked for their state, they begin, and that changes what a restore does.

A ``StatefulDataLoader`` starts its workers and draws a random number for them. A loader of ``torchdata.nodes`` goes on
with the iterator that it made for this, and ignores the state that is loaded after it. Nothing imports torchdata here.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

_ITERATOR_AND_LOADED = {
    ("torchdata.stateful_dataloader.stateful_dataloader", "StatefulDataLoader"): ("_iterator", "next_iter_state"),
    ("torchdata.nodes.loader", "Loader"): ("_it", "_next_iter_state_dict"),
}
"""Names of a class, of the attribute with its iterator and of the one with a state that the next iterator will take."""


def has_not_begun(live: Any) -> bool:
    """Whether an object is such a loader, and has no iterator."""
    names = _names(live)
    return names is not None and getattr(live, names[0], live) is None


@dataclasses.dataclass(frozen=True)
class Unbegun:
    """What a loader had that has not begun: the state that its first iterator will take, if one was loaded."""

    loaded: Any

    @classmethod
    def of(cls, live: Any) -> Unbegun:
        return cls(getattr(live, _attributes(live)[1]))

    def put_back(self, live: Any) -> None:
        """Let a loader be as it was, whatever it has loaded since."""
        iterator, loaded = _attributes(live)
        setattr(live, iterator, None)
        setattr(live, loaded, self.loaded)


def forget_early_iterator(live: Any) -> None:
    """Let a loader go on with the state that it has loaded, not with the iterator that it made when it was asked."""
    if _names(live) is not None and hasattr(live, "_iter_for_state_dict"):
        live._iter_for_state_dict = False


def _attributes(live: Any) -> tuple[str, str]:
    names = _names(live)
    assert names is not None, "a loader of torchdata"
    return names


def _names(live: Any) -> tuple[str, str] | None:
    for (module, name), names in _ITERATOR_AND_LOADED.items():
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(live, kind):
            return names
    return None
