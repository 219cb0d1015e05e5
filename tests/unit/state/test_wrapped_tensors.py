"""Tensors that wrap others, such as quantized ones: saved as what they wrap, put back into it, or refused by name."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from mlflash import Checkpointer, errors
from mlflash.state import wrapped_tensors
from mlflash.state.leaves import class_name


class Rounding(enum.Enum):
    NEAREST = 1
    STOCHASTIC = 2


class Limits(NamedTuple):
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Recipe:
    rounding: Rounding
    block: torch.Size
    limits: Limits


class Coded(torch.Tensor):
    """Codes of 8 bits and a scale for each row; its context has all that one may hold."""

    codes: torch.Tensor
    scale: torch.Tensor
    recipe: Recipe | None

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, recipe: Recipe | None = None) -> Coded:
        made: Coded = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes, made.scale, made.recipe = codes, scale, recipe
        return made

    @classmethod
    def of(cls, numbers: int, recipe: Recipe | None = None) -> Coded:
        generator = torch.Generator().manual_seed(numbers)
        return cls(torch.randint(0, 255, (3, 5), dtype=torch.uint8, generator=generator),
                   torch.rand(3, generator=generator), recipe)  # fmt: skip

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], {"recipe": self.recipe, "to": torch.bfloat16, "more": [1, (2.5, None), {"a": True}]}

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Any], context: Any, size: Any, stride: Any) -> Coded:
        assert context["to"] is torch.bfloat16 and context["more"] == [1, (2.5, None), {"a": True}]
        return cls(inner["codes"], inner["scale"], context["recipe"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default, torch.ops.aten.clone.default):
            its = args[0]
            return cls(its.codes.clone(), its.scale.clone(), its.recipe)
        if function is torch.ops.aten.copy_.default:
            to, its = args
            assert isinstance(its, cls), "what was saved is not what is loaded"
            to.codes.copy_(its.codes)
            to.scale.copy_(its.scale)
            return to
        raise NotImplementedError(function)


RECIPE = Recipe(Rounding.STOCHASTIC, torch.Size([1, 5]), Limits(-1.5, 1.5))
OPTIONS: dict[str, Any] = {"redundancy": "none", "job": "wrapped", "strict": True}


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch, in_couriers: Callable[[str], None]) -> None:
    name = class_name(Coded.of(1))
    monkeypatch.setattr(wrapped_tensors, "CLASSES", wrapped_tensors.CLASSES | {name})
    in_couriers(f"from mlflash.state import wrapped_tensors as known; known.CLASSES = known.CLASSES | {{{name!r}}}")


@pytest.fixture
def ckpt(shm: Path) -> Iterator[Checkpointer]:
    with Checkpointer(memory=str(shm), **OPTIONS) as made:
        yield made


def same(one: Coded, other: Coded) -> bool:
    if isinstance(one.codes, Coded):
        return isinstance(other.codes, Coded) and same(one.codes, other.codes) and torch.equal(one.scale, other.scale)
    return torch.equal(one.codes, other.codes) and torch.equal(one.scale, other.scale) and one.recipe == other.recipe


def test_it_comes_back_in_place_as_new_and_in_a_module(ckpt: Checkpointer) -> None:
    class Module(torch.nn.Module):
        def __init__(self, numbers: int) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(Coded.of(numbers, RECIPE), requires_grad=False)

    for step in (1, 2):
        saved = {"in a list": [Coded.of(step, RECIPE)], "module": Module(10 + step), "other": torch.ones(2)}
        ckpt.save(step, saved).wait()
        live = {"in a list": [Coded.of(98, RECIPE)], "module": Module(99), "other": torch.zeros(2)}
        kept = live["in a list"][0], live["module"].weight  # type: ignore[index, union-attr]
        assert ckpt.restore(live) == step
        assert kept[0] is live["in a list"][0] and same(kept[0], Coded.of(step, RECIPE))  # type: ignore[index]
        assert kept[1] is live["module"].weight and same(kept[1], Coded.of(10 + step, RECIPE))  # type: ignore[union-attr, arg-type]
        _, found = ckpt.load()
        assert same(found["in a list"][0], Coded.of(step, RECIPE)) and same(found["module"]["weight"], kept[1])


def test_what_it_wraps_may_wrap_others_and_what_it_is_besides_may_change_from_save_to_save(ckpt: Checkpointer) -> None:
    for step, recipe in enumerate((None, RECIPE, dataclasses.replace(RECIPE, rounding=Rounding.NEAREST)), 1):
        deep = Coded(Coded.of(step, recipe), Coded.of(step).scale, recipe)
        ckpt.save(step, {"w": deep}).wait()
        _, found = ckpt.load()
        assert same(found["w"], deep) and type(found["w"]) is Coded


def test_only_a_tensor_of_the_same_class_and_the_same_context_is_filled(ckpt: Checkpointer) -> None:
    ckpt.save(1, {"w": Coded.of(1, RECIPE), "plain": torch.ones(3, 5)}).wait()
    others = {
        "another recipe": {"w": Coded.of(2, dataclasses.replace(RECIPE, rounding=Rounding.NEAREST))},
        "a plain tensor": {"w": torch.zeros(3, 5)},
        "wraps none in the checkpoint": {"plain": Coded.of(3, RECIPE)},
        "other sizes": {"w": Coded(torch.zeros(2, 5, dtype=torch.uint8), torch.zeros(2), RECIPE)},
    }
    for what, other in others.items():
        live = {"w": Coded.of(9, RECIPE), "plain": torch.zeros(3, 5), **other}
        with pytest.raises(errors.StructureMismatch, match=next(iter(other))):
            ckpt.restore(live)
        untouched = live["plain"] if "plain" not in other else live["plain"].codes  # type: ignore[attr-defined]
        assert not untouched.any() or "plain" in other, what
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.zeros(3, 5))
    other_module = torch.nn.Module()
    other_module.weight = torch.nn.Parameter(Coded.of(1, RECIPE), requires_grad=False)
    ckpt.save(2, {"m": other_module}).wait()
    with pytest.raises(errors.StructureMismatch, match="wraps others in the checkpoint, one that wraps none"):
        ckpt.restore({"m": module})


def test_other_classes_and_other_contexts_are_refused_by_name(
    ckpt: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Foreign:
        pass

    contexts: list[Any] = [Foreign(), np.float32(1), float("nan"), {1: 2}]
    for step, context in enumerate(contexts, 1):
        with pytest.raises(errors.StateError, match="the context of this tensor"):
            ckpt.save(step, {"w": Coded.of(1, context)})
    monkeypatch.setattr(wrapped_tensors, "CLASSES", frozenset())
    with pytest.raises(errors.StateError, match="save its codes, its scale"):
        ckpt.save(9, {"w": Coded.of(1)})


def test_a_class_that_is_not_loaded_is_asked_for_and_not_imported(
    ckpt: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt.save(1, {"w": Coded.of(1, RECIPE)}).wait()
    monkeypatch.setattr(wrapped_tensors, "_loaded", lambda name: None)  # as for a module that nobody has imported
    with pytest.raises(errors.StructureMismatch, match=r"is not loaded: import it"):
        ckpt.load()


def test_a_context_names_only_classes_of_the_tensor_s_package() -> None:
    package = Coded.__module__.partition(".")[0]
    for code in (["enum", "signal.Signals", "SIGKILL"], ["data", "subprocess.Popen", ["dict"]], ["dtype", "load"]):
        with pytest.raises(errors.StructureMismatch, match="is not loaded"):
            wrapped_tensors._decode(code, package)
