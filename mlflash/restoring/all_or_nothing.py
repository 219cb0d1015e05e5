"""A state is filled on all ranks or on none: an error on any rank is raised on all, and what was loaded is put back.

    objects whose saved state is small    one after the other; their previous values are kept meanwhile
    large ones, then tensors and arrays   there is no room to keep their previous values: if this fails, the state is
                                          undefined, and nothing is saved until a restore has succeeded
    objects of a framework                likewise: adapters load them, see `Loading.changing`

The rows come in this order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import xxhash

from ..crash_points import reach
from ..errors import DeadlineExceeded, MlflashError, StructureMismatch
from ..protocol.ranks import Ranks
from ..saving.save_queue import SaveQueue
from ..state.rebuild import Filling

T = TypeVar("T")

_KEPT_NBYTES = 64 << 20  # of everything that a rank keeps to put it back
_UNDEFINED = ("the state that you gave is now undefined: restore again, or begin anew; save refuses until a "
              "restore succeeds")  # fmt: skip


class Loading:
    """Fills states.

    Args:
        ranks: of this run.
        saves: told if a state is undefined.
    """

    def __init__(self, ranks: Ranks, saves: SaveQueue):
        self._ranks, self._saves = ranks, saves

    def together(self, step: int, work: Callable[[], T]) -> T:
        """Do something with the state on this rank; raise on all ranks what goes wrong on any.

        Collective over the world.
        """
        return self._ranks.together(work, lambda why: StructureMismatch(f"loading failed: {why}"), step)

    @contextlib.contextmanager
    def changing(self, step: int) -> Iterator[None]:
        """Change a state that cannot be put back: if that fails, the state is undefined."""
        self._saves.undefined = _half_loaded(step)
        try:
            yield
        except DeadlineExceeded:
            raise
        except MlflashError as error:  # the same on all ranks
            self._stay_undefined(error)
            raise
        self._saves.undefined = ""

    def _stay_undefined(self, error: MlflashError) -> None:
        self._saves.undefined = str(error)
        error.message += f"; {_UNDEFINED}"

    def fill(self, step: int, filling: Filling) -> None:
        """Fill a state that was already compared with the checkpoint. Collective over the world.

        Raises:
            MlflashError: on all ranks, what went wrong on any. The state is as it was before, or the text says that it
                is undefined.
        """
        small = self._small(filling)

        def load_small() -> None:
            filling.keep(small)
            filling.load(small)

        def load_rest() -> None:
            filling.load([path for path in filling.objects if path not in small])
            filling.fill_leaves()

        reach("restore.loading")
        before = self._saves.undefined
        self._saves.undefined = _half_loaded(step)  # it must stay undefined after an interrupt, too
        try:
            self.together(step, load_small)
            self.together(step, load_rest)
        except DeadlineExceeded:  # the ranks cannot agree on anything now
            raise
        except MlflashError as error:  # the same on all ranks
            whole = filling.put_back()
            if self._ranks.agree([int(whole)])[0]:
                self._saves.undefined = before
            else:
                self._stay_undefined(error)
            raise
        self._saves.undefined = ""

    def _small(self, filling: Filling) -> list[str]:
        """The objects that are kept, the same on all ranks: what they do may be collective. Collective over the world.

        If the ranks have different objects, none is kept.
        """
        sizes = {path: filling.nbytes_of(path) for path in filling.objects}
        name = xxhash.xxh3_64_intdigest("\n".join(sizes).encode()) >> 1  # to fit an int64

        if self._ranks.agree([name, -name]) != [name, -name] or not sizes:
            return []
        largest = [-most for most in self._ranks.agree([-nbytes for nbytes in sizes.values()])]
        small, left = set(), _KEPT_NBYTES
        for nbytes, path in sorted(zip(largest, sizes, strict=True)):
            left -= nbytes
            if left >= 0:
                small.add(path)
        return [path for path in sizes if path in small]


def _half_loaded(step: int) -> str:
    return f"the load of step {step} did not finish"
