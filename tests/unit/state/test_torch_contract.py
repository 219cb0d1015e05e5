"""All that torch and torchdata have in a training: restored at any step, it goes on with the same bits.

The trainings are those of `torch_table`. Here they are tried in one process; `tests/programs/test_trainings.py`
kills the process that saved them.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
import torch
from digests import digests
from torch import nn
from torch.optim import lr_scheduler, swa_utils
from torch_table import OPTIMIZERS, PLAIN, REFUSED, SCHEDULES, TABLE, VERSIONED, made, of_kind, stepped
from unit.stored import Store

from mlflash.errors import StateError
from mlflash.state.flatten import flatten
from mlflash.state.rebuild import Filling

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
State = dict[str, Any]
LAST = 12


def in_one_process() -> list[Any]:
    names = [name for name in of_kind(PLAIN) if not TABLE[name].has_processes]
    return [pytest.param(name, marks=pytest.mark.slow) if TABLE[name].is_dear else name for name in names]


@pytest.mark.parametrize("name", in_one_process())
def test_a_training_goes_on(node_memory: Any, name: str) -> None:
    """Restored into one that is new, and into one that has gone on, as a rollback finds it."""
    training, stores, whole = made(PLAIN, name), {}, {}
    for number in range(1, LAST + 1):
        whole[number] = stepped(name, training, number)
        stores[number] = Store(node_memory)
        stores[number].write(training.state)
    for at in range(1, LAST):
        other = made(PLAIN, name)
        if at % 2:
            for number in range(50, 51 + at % 4):
                stepped(name, other, number)
        stores[at].fill(other.state)
        other.begin()
        for number in range(at + 1, LAST + 1):
            assert stepped(name, other, number) == whole[number], (at, number)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_saved_is_refused_with_what_to_do(name: str) -> None:
    make, path, message = REFUSED[name]
    with pytest.raises(StateError, match=message) as caught:
        flatten({"it": make()})
    assert caught.value.tensor == path


@pytest.mark.parametrize("name", ["loader in order, 0 workers", "nodes Batcher"])
def test_a_loader_that_has_not_begun_does_not_begin_by_a_restore(node_memory: Any, name: str) -> None:
    saved, store = made(PLAIN, name), Store(node_memory)
    first = digests(saved.step(1))
    store.write(saved.state)
    second = digests(saved.step(2))
    for fails in (False, True):
        other = made(PLAIN, name)
        loader = other.state["loader"]
        loader.state_dict = lambda: pytest.fail("asked for its state")
        filling = Filling(other.state, store.manifest.tree, store.manifest.entries, store.manifest.plain, store.read)
        filling.keep(filling.objects)
        filling.load(filling.objects)
        assert not fails or filling.put_back()
        del loader.state_dict
        assert digests(other.step(1)) == (first if fails else second)
    # As before, where it was asked: torchdata itself would go on with the iterator that it has made for that.
    other = made(PLAIN, name)
    other.state["loader"].state_dict()
    store.fill(other.state)
    assert digests(other.step(2)) == second


def classes(base: Any, modules: list[Any]) -> list[Any]:
    kinds = [kind for module in modules for kind in vars(module).values() if inspect.isclass(kind)]
    return [kind for kind in kinds if issubclass(kind, base) and kind is not base and kind.__name__[0] != "_"]


def test_each_optimizer_schedule_and_module_of_torch_is_in_the_table_or_is_plain() -> None:
    """A module is plain that has no version, and no state besides parameters and buffers: as those of other lines."""
    modules = classes(nn.Module, [module for name, module in sys.modules.items() if name.startswith("torch.nn")])
    versioned = [kind for kind in modules if kind.__module__.startswith("torch.nn.")
                 and (kind._version != 1 or kind.get_extra_state is not nn.Module.get_extra_state)]  # fmt: skip
    schedules = classes(lr_scheduler.LRScheduler, [lr_scheduler, swa_utils])
    optimizers = classes(torch.optim.Optimizer, [torch.optim])
    for table, kinds in ((OPTIMIZERS, optimizers), (SCHEDULES, schedules), (VERSIONED, versioned)):
        assert {kind.__name__ for kind in kinds} == table.keys()


# Modules whose loading looks at what their state dict says of their versions


class Gate(nn.Module):
    """Version 1 kept the logarithm of the scale; version 2 keeps the scale."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 0.5))

    def _load_from_state_dict(self, state_dict: State, prefix: str, local_metadata: State, *rest: Any) -> None:
        if local_metadata.get("version", 0) < 2:
            state_dict[prefix + "scale"] = state_dict[prefix + "scale"].exp()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def test_versions_of_modules_are_those_that_were_saved(node_memory: Any) -> None:
    store = Store(node_memory)
    saved = nn.ModuleDict({"gate": Gate(), "norm": nn.BatchNorm1d(3)})
    store.write({"model": saved, "as a dict": saved.state_dict()})
    live = nn.ModuleDict({"gate": Gate(), "norm": nn.BatchNorm1d(3)})
    with torch.no_grad():
        live["gate"].scale.zero_()
    other = live.state_dict()
    other._metadata["gate"] = {"version": 1}  # type: ignore[attr-defined]
    store.fill({"model": live, "as a dict": other})
    assert live["gate"].scale.tolist() == [0.5] * 3
    for state in (other, store.load()["model"], store.load()["as a dict"]):
        assert state._metadata == saved.state_dict()._metadata  # type: ignore[attr-defined]
        live.load_state_dict(state)
        assert live["gate"].scale.tolist() == [0.5] * 3


def test_a_state_dict_whose_versions_change_is_another_structure(node_memory: Any) -> None:
    store, state = Store(node_memory), nn.Linear(2, 2).state_dict()
    for version in (1, 1, 2, True):
        state._metadata[""] = {"version": version}  # type: ignore[attr-defined]
        store.write({"s": state})
        found = store.load()["s"]._metadata[""]["version"]
        assert type(found) is type(version) and found == version
