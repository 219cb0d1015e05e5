"""Which saves copy while training continues, until an optimizer's next step; if they do not, the log says why, once.

A user's loop asks for this with ``until=``. Adapters give the optimizers of their framework, or the reason why their
steps cannot be used. Only optimizers that were heard to step are used: some change tensors in backward, and never step.
If something other than a step changed a tensor, so that a save failed, later saves copy at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..state.leaves import Flat
from .deferred_copies import DeferredCopies
from .lazy_leaves import LazyLeaves, Until, is_torch_optimizer
from .optimizer_steps import HOOK, Steps
from .staging import NOTHING

log = logging.getLogger("mlflash")

_CHANGED = "something other than an optimizer's step changed a tensor before it was copied"


class LazySaves:
    """Decides this for the saves of this rank.

    Args:
        is_on: whether any save may copy later.
        speaks: whether this rank logs why one does not.
    """

    def __init__(self, is_on: bool, speaks: bool):
        self._is_on, self._speaks = is_on, speaks
        self._leaves, self.steps = LazyLeaves(), Steps()
        self._said: set[str] = set()
        self._was_changed = False
        self._is_first = True

    def stepped(self) -> Sequence[Any] | str:
        """Return torch's optimizers that have stepped, as `until` takes them, if the framework's are not known.

        Steps are heard from the first call on. The first time there may be none.
        """
        HOOK.register()
        heard = sorted(HOOK.heard, key=id)
        is_first, self._is_first = self._is_first, False
        return heard if heard or is_first else "mlflash has not heard any torch optimizer step"

    def until(self, optimizers: Sequence[Any] | str, owned: Callable[[], Iterable[Any]] = lambda: ()) -> Until | None:
        """Return what a save of an adapter waits for; None: it copies at once.

        Args:
            optimizers: those of the framework, of any class; or why it is not known where they change tensors.
        """
        if isinstance(optimizers, str):
            self._say(optimizers)
            return None
        if not optimizers or not self._is_on:
            return None
        others = [type(one).__name__ for one in optimizers if not is_torch_optimizer(one)]
        is_first, self._is_first = self._is_first, False
        HOOK.register()
        heard = tuple(one for one in optimizers if one in HOOK.heard)
        if others:
            self._say(f"{others[0]} is not a torch optimizer, so mlflash does not hear its steps")
        elif self._was_changed:
            self._say(_CHANGED)
        elif not heard and not is_first:
            self._say(f"mlflash has not heard {type(optimizers[0]).__name__} step")
        return None if others or self._was_changed or not heard else Until(heard, owned)

    def find(self, flat: Flat, until: Any) -> Mapping[int, Any]:
        """The leaves of a state that are copied later, see `LazyLeaves.find`.

        Args:
            until: a torch optimizer, or several, or `Until`; None: everything is copied at once.

        Raises:
            StateError: it is something else.
        """
        if until is None or not self._is_on:
            return NOTHING
        found = self._leaves.find(flat, until)
        if self._leaves.why:
            self._say(self._leaves.why)
        return found

    def begin(self, later: DeferredCopies) -> None:
        """Make any optimizer's next step wait for copies."""
        later.tell_changed = self._note_changed
        self.steps.before_next(later)

    def _note_changed(self) -> None:
        self._was_changed = True

    def _say(self, why: str) -> None:
        if self._is_on and self._speaks and why not in self._said:
            log.info("saves copy everything before they return, and not while training continues: %s", why)
        self._said.add(why)
