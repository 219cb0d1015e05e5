"""What adapters replace in a framework for a while becomes again exactly what it was."""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from collections.abc import Callable

import pytest

from mlflash.adapters.replacing import replaced


class Base:
    def step(self) -> str:
        return "inherited"

    @staticmethod
    def make() -> str:
        return "static"


class Trainer(Base):
    pass


def said(what: str) -> Callable[[], str]:
    return lambda: what


def test_what_was_inherited_is_inherited_again_and_what_was_its_own_is_its_own() -> None:
    trainer, own = Trainer(), said("own")
    with replaced(trainer, step=said("new")):
        assert trainer.step() == "new" and Trainer().step() == "inherited"
    assert vars(trainer) == {}
    trainer.step = own  # type: ignore[method-assign]
    with replaced(trainer, step=said("new"), make=said("made")):
        assert (trainer.step(), trainer.make()) == ("new", "made")
    assert vars(trainer) == {"step": own}


def test_an_exception_passes_and_finds_all_put_back() -> None:
    trainer = Trainer()
    with pytest.raises(ZeroDivisionError), replaced(trainer, step=said("new")):
        raise ZeroDivisionError
    assert vars(trainer) == {}


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("before", [None, said("own")])
def test_left_in_any_order_the_newest_that_is_in_place_holds(
    order: tuple[int, ...], before: Callable[[], str] | None
) -> None:
    trainer = Trainer()
    if before is not None:
        trainer.step = before  # type: ignore[method-assign]
    undos = [replaced(trainer, step=said(str(number))) for number in range(3)]
    in_place = {0, 1, 2}
    for number in order:
        assert trainer.step() == str(max(in_place))
        undos[number].close()
        in_place.remove(number)
    assert vars(trainer) == ({} if before is None else {"step": before})


def test_it_keeps_nothing_alive_and_stays_where_it_is_never_undone() -> None:
    trainer = Trainer()
    replaced(trainer, step=said("new"))
    gc.collect()
    assert trainer.step() == "new"
    with replaced(trainer, step=said("newer")):
        pass
    assert trainer.step() == "new"
    with contextlib.ExitStack() as stack:
        trainer.kept = replaced(trainer, make=stack.close)  # type: ignore[attr-defined]
    there = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert there() is None
