"""What adapters replace in a framework for a while becomes again exactly what it was."""

from __future__ import annotations

import contextlib
import gc
import itertools
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from mlflash.adapters.replacing import replaced
from mlflash.errors import ConfigError


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


def test_attributes_of_classes_and_modules_too() -> None:
    module, static = types.ModuleType("framework"), vars(Base)["make"]
    module.load = load = said("load")  # type: ignore[attr-defined]
    with replaced(Base, make=staticmethod(said("new"))), replaced(Trainer, make=said("newer")):
        assert (Base().make(), Trainer.make()) == ("new", "newer")
    assert vars(Base)["make"] is static and "make" not in vars(Trainer)
    with replaced(module, load=said("new")):
        assert module.load() == "new"
    assert module.load is load


def test_none_is_a_value_like_any_other() -> None:
    holder = types.SimpleNamespace(found=None)
    with replaced(holder, found=3):
        assert holder.found == 3
    assert vars(holder) == {"found": None}
    with replaced(holder, found=None):
        pass
    assert vars(holder) == {"found": None}


def test_an_exception_passes_and_finds_all_put_back() -> None:
    trainer = Trainer()
    with pytest.raises(ZeroDivisionError), replaced(trainer, step=said("new")):
        raise ZeroDivisionError
    assert vars(trainer) == {}


def test_a_name_that_the_framework_does_not_have_is_refused_and_nothing_is_replaced() -> None:
    trainer, module = Trainer(), types.ModuleType("framework.inside")
    with pytest.raises(ConfigError, match=r"Trainer\.stepp"):
        replaced(trainer, step=said("new"), stepp=said("new"))
    assert vars(trainer) == {}
    with pytest.raises(ConfigError, match=r"framework\.inside\.load"):
        replaced(module, load=said("new"))


def test_where_one_cannot_be_set_those_before_it_are_put_back() -> None:
    class Guarded(Base):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "make":
                raise TypeError("read only")
            super().__setattr__(name, value)

    guarded = Guarded()
    with pytest.raises(TypeError, match="read only"):
        replaced(guarded, step=said("new"), make=said("new"))
    assert vars(guarded) == {} and guarded.step() == "inherited"


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


def test_the_same_value_may_come_and_go_between_others() -> None:
    trainer, first, second = Trainer(), said("first"), said("second")
    undos = [replaced(trainer, step=new) for new in (first, second, first)]
    undos[2].close()
    assert trainer.step is second
    undos[0].close()
    assert trainer.step is second
    undos[1].close()
    assert vars(trainer) == {}


def test_left_twice_it_touches_nothing_that_came_since() -> None:
    trainer = Trainer()
    undo = replaced(trainer, step=said("new"))
    undo.close()
    with replaced(trainer, step=said("newer")):
        undo.close()
        assert trainer.step() == "newer"
    assert vars(trainer) == {}


def test_what_others_have_put_there_since_stays() -> None:
    trainer, theirs = Trainer(), said("theirs")
    with replaced(trainer, step=said("new")):
        trainer.step = theirs  # type: ignore[method-assign]
    assert vars(trainer) == {"step": theirs}
    with replaced(trainer, step=said("new")):
        del trainer.step
    assert vars(trainer) == {}


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
