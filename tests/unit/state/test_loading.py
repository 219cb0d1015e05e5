"""A restore fills all of a state or none of it; what it cannot put back is said, and not saved."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mlflash import Checkpointer, errors
from mlflash.restore import load as restore_load
from mlflash.state.flatten import flatten
from mlflash.state.rebuild import compare
from mlflash.state.torch_objects import load


@pytest.fixture
def ckpt(shm: Path) -> Iterator[Checkpointer]:
    with Checkpointer(memory=str(shm), job="j", redundancy="none", strict=True) as checkpointer:
        yield checkpointer


def net(last: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, last))


def trained(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return optimizer


class Keeper:
    """An object whose load may fail, half-way."""

    def __init__(self, value: float, size: int = 10):
        self.values, self.fails = {"a": np.full(size, value), "b": value}, False

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values["b"] = state["b"]
        if self.fails:
            raise OSError("this object cannot be loaded")
        self.values["a"] = state["a"]


def bits(state: Any) -> list[Any]:
    flat = flatten(state)
    values = [value.detach().numpy() if isinstance(value, torch.Tensor) else value for value in flat.values]
    return [flat.structure.tree, flat.plain, *(np.asarray(value).tobytes() for value in values)]


@pytest.mark.parametrize("change", ["last layer", "parameter groups", "a tensor beside them"])
def test_a_state_that_is_refused_has_changed_nowhere(ckpt: Checkpointer, change: str) -> None:
    model = net()
    ckpt.save(1, {"o": trained(model, 0.5), "m": model, "w": torch.zeros(3)}).wait()
    other = net(4 if change == "last layer" else 3)
    optimizer = trained(other, 0.1)
    if change == "parameter groups":
        optimizer = torch.optim.AdamW([{"params": [p]} for p in other.parameters()], lr=0.1)
    state = {"m": other, "o": optimizer, "w": torch.ones(4 if change == "a tensor beside them" else 3)}
    before = bits(state)
    texts = {"last layer": "m.2.weight: .3, 5. in the checkpoint, .4, 5. in the state given",
            "parameter groups": "o: an optimizer of groups of .4. parameters in the checkpoint, of .1, 1, 1, 1.",
            "a tensor beside them": "w: tensor float32 .3. in the checkpoint"}  # fmt: skip
    with pytest.raises(errors.StructureMismatch, match=texts[change]) as caught:
        ckpt.restore(state)
    assert bits(state) == before and "undefined" not in str(caught.value)
    ckpt.save(2, state).wait()


def test_an_optimizer_that_was_not_saved_is_not_touched(ckpt: Checkpointer) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#5680: a step with zeros, which makes the moments, stayed in such an optimizer."""
    ckpt.save(1, {"m": net()}).wait()
    for makes_a_step in (False, True):
        model = net()
        optimizer = trained(model, 0.1) if makes_a_step else torch.optim.AdamW(model.parameters(), lr=0.1)
        state = {"m": model, "o": optimizer}
        before = bits(state)
        with pytest.raises(errors.StructureMismatch, match="o: in the state given, not in the checkpoint"):
            ckpt.restore(state)
        assert bits(state) == before and (len(optimizer.state) > 0) is makes_a_step


def test_what_was_loaded_before_another_object_failed_is_put_back(ckpt: Checkpointer) -> None:
    model = net()
    ckpt.save(1, {"o": trained(model, 0.5), "m": model, "k": Keeper(1.0), "n": 1, "t": (1, [1])}).wait()
    other = net()
    state = {"o": torch.optim.AdamW(other.parameters(), lr=0.1), "m": other, "k": Keeper(2.0), "n": 2, "t": (2, [2])}
    before = bits(state)
    state["k"].fails = True
    with pytest.raises(errors.StructureMismatch, match=r"OSError: this object cannot be loaded") as caught:
        ckpt.restore(state)
    assert "undefined" in str(caught.value), "this object cannot be put back either"
    state["k"].fails, state["k"].values = False, Keeper(2.0).values
    assert bits(state) == before
    assert ckpt.restore(state) == 1 and state["k"].values["b"] == 1.0 and state["n"] == 1


class Once(Keeper):
    """Takes back what it had, but nothing else."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.fails = state["b"] == 1.0
        super().load_state_dict(state)


def test_what_is_too_large_to_be_put_back_is_not_saved_until_a_restore_has_succeeded(
    ckpt: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore_load, "_KEPT_NBYTES", 1000)
    ckpt.save(1, {"large": Keeper(1.0, size=1000), "small": Keeper(1.0)}).wait()
    state = {"large": Once(2.0, size=1000), "small": Keeper(2.0)}
    with pytest.raises(
        errors.StructureMismatch, match="the state that you gave is now undefined: restore again, or begin"
    ):
        ckpt.restore(state)
    assert state["small"].values["b"] == 2.0, "small objects load first, and are put back"
    with pytest.raises(errors.StateError, match="the state is undefined"):
        ckpt.save(2, state)
    assert ckpt.steps() == [1]
    with pytest.raises(errors.StructureMismatch, match="loading failed") as caught:
        ckpt.restore({"large": Keeper(2.0, size=1000), "small": Once(2.0)})  # put back, to what is undefined
    assert "undefined" not in str(caught.value)
    with pytest.raises(errors.StateError, match="the state is undefined"):
        ckpt.save(3, state)
    state["large"] = Keeper(2.0, size=1000)
    assert ckpt.restore(state) == 1 and state["large"].values["a"][0] == 1.0
    ckpt.save(4, state).wait()
    assert ckpt.steps()[-1] == 4


def test_a_restore_that_is_interrupted_leaves_a_state_that_is_not_saved(ckpt: Checkpointer) -> None:
    class Interrupted(Keeper):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyboardInterrupt

    ckpt.save(1, {"x": Keeper(1.0)}).wait()
    with pytest.raises(KeyboardInterrupt):
        ckpt.restore({"x": Interrupted(2.0)})
    with pytest.raises(errors.StateError, match="the state is undefined"):
        ckpt.save(2, {"x": Keeper(2.0)})


# Nothing is refused that loading accepts, and what strict loading refuses is known before.


class Renaming(nn.Linear):
    def __init__(self, a: int, b: int):
        super().__init__(a, b)
        self.register_load_state_dict_pre_hook(lambda module, state, prefix, *_: state.update(
            {f"{prefix}weight": state.pop(f"{prefix}w")} if f"{prefix}w" in state else {}))  # fmt: skip


def of_old_names() -> nn.Module:
    model = nn.Module()
    model.w, model.bias = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3))
    return model


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"calls": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


class Lenient(nn.Linear):
    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state, strict=False, assign=assign)


def tied(size: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(size, size), nn.Linear(size, size))
    model[1].weight = model[0].weight
    return model


def without_last() -> nn.Module:
    model = net()
    model[2] = None
    return model


def scalar(*shape: int) -> nn.Module:
    model = nn.Module()
    model.x = nn.Parameter(torch.ones(shape))
    return model


PAIRS: list[tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = [
    (net, net), (net, lambda: net(4)), (lambda: nn.Linear(3, 3), lambda: nn.Linear(3, 3, bias=False)),
    (lambda: nn.Linear(3, 3, bias=False), lambda: nn.Linear(3, 3)), (lambda: tied(2), lambda: tied(2)),
    (lambda: tied(2), lambda: tied(3)), (of_old_names, lambda: Renaming(3, 3)),
    (lambda: Extra(3, 3), lambda: Extra(3, 3)), (lambda: nn.Linear(3, 3), lambda: Lenient(3, 3, bias=False)),
    (net, without_last), (without_last, net), (lambda: nn.BatchNorm1d(3), lambda: nn.BatchNorm1d(3)),
    (lambda: nn.BatchNorm1d(3, track_running_stats=False), lambda: nn.BatchNorm1d(3)),
    (lambda: scalar(1), lambda: scalar()), (lambda: scalar(), lambda: scalar(1)),
    (lambda: nn.Linear(3, 3), lambda: nn.LazyLinear(3)),
    (lambda: nn.MultiheadAttention(4, 2), lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True)),
    (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), lambda: nn.Linear(3, 3)),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*Lazy.*:UserWarning")
@pytest.mark.parametrize("pair", PAIRS)
def test_a_module_is_refused_only_where_loading_would(pair: tuple[Any, Any]) -> None:
    saved, live = pair[0](), pair[1]()
    flat = flatten({"m": saved})
    differences = compare({"m": live}, flat.structure.tree, flat.structure.entries)
    try:
        live.load_state_dict(dict(saved.state_dict()))
    except RuntimeError as error:
        assert differences, f"known too late: {error}"
    else:
        assert not differences


@pytest.mark.parametrize(("live", "why"), [
    (lambda: nn.Linear(3, 3).bfloat16(), "m.weight: float32 in the checkpoint, bfloat16 in the state given"),
    (lambda: nn.Linear(3, 3, device="meta"), "m.weight: on the meta device in the state given"),
])  # fmt: skip
def test_what_torch_would_convert_or_not_load_is_refused(live: Callable[[], nn.Module], why: str) -> None:
    flat = flatten({"m": nn.Linear(3, 3)})
    differences = compare({"m": live()}, flat.structure.tree, flat.structure.entries)
    assert len(differences) == 2 and any(difference.startswith(why) for difference in differences)


def test_moments_of_another_dtype_than_their_parameter_keep_their_bits() -> None:
    def made(steps: int) -> torch.optim.Optimizer:
        parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        if steps:
            optimizer.state[parameter] = {"momentum_buffer": torch.tensor([1 / 3, 1e-40, -0.0]), "parts": [
                {"x": torch.tensor([1 / 7])}], "pair": (torch.tensor([1 / 9]), torch.tensor([1 << 40]))}  # fmt: skip
        return optimizer

    saved = made(1).state_dict()
    for live in (made(0), made(1)):
        load(live, saved, "optimizer")
        state = live.state_dict()["state"][0]
        assert torch.equal(state["momentum_buffer"].view(torch.int32),
                           saved["state"][0]["momentum_buffer"].view(torch.int32))  # fmt: skip
        assert torch.equal(state["parts"][0]["x"], torch.tensor([1 / 7]))
        assert torch.equal(state["pair"][0], torch.tensor([1 / 9])) and state["pair"][1].tolist() == [1 << 40]


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for of_parameter in optimizer.state.values() for value in of_parameter.values()]


def test_an_optimizers_tensors_stay_where_they_are(ckpt: Checkpointer) -> None:
    model = net()
    optimizer = trained(model, 0.1)
    state = {"model": model, "optimizer": optimizer}
    saved = [tensor.clone() for tensor in moments(optimizer)]
    ckpt.save(1, state).wait()
    places = [tensor.data_ptr() for tensor in moments(optimizer)]
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert ckpt.restore(state) == 1
    assert [tensor.data_ptr() for tensor in moments(optimizer)] == places
    assert all(torch.equal(now, then) for now, then in zip(moments(optimizer), saved, strict=True))


@pytest.mark.parametrize("kind", ["expanded", "twice", "overlapping", "needs gradients"])
def test_tensors_that_cannot_be_written_to_each_by_itself_are_made_anew(ckpt: Checkpointer, kind: str) -> None:
    both = torch.full((6,), 7.0)
    live = {
        "expanded": (both[:1].expand(4), both[1:]),
        "twice": (both, both),
        "overlapping": (both[:4], both[2:]),
        "needs gradients": (both.clone().requires_grad_(), both[2:]),
    }[kind]
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    a, b = (torch.arange(tensor.numel()) + number for number, tensor in zip((0.5, 10.5), live, strict=True))
    optimizer.state[parameter] = {"a": a, "b": b}
    saved = {name: tensor.clone() for name, tensor in optimizer.state[parameter].items()}
    ckpt.save(1, {"optimizer": optimizer}).wait()
    optimizer.state[parameter] = dict(zip("ab", live, strict=True))
    assert ckpt.restore({"optimizer": optimizer}) == 1
    assert all(torch.equal(optimizer.state[parameter][name], tensor) for name, tensor in saved.items())
    assert not any(tensor.requires_grad for tensor in optimizer.state[parameter].values())


class KeepsWhatItLoads(nn.Linear):
    """Has a tensor besides its parameters, which it does not copy."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.extra = torch.ones(5)

    def get_extra_state(self) -> torch.Tensor:
        return self.extra

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.extra = state


class Assigns(nn.Linear):
    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        self.weight = nn.Parameter(state[prefix + "weight"])


@pytest.mark.parametrize("make", [KeepsWhatItLoads, lambda: nn.Sequential(Assigns(3, 3)), lambda: nn.Sequential(
    KeepsWhatItLoads())])  # fmt: skip
def test_what_a_module_keeps_of_what_it_loads_is_its_own(ckpt: Checkpointer, make: Callable[[], nn.Module]) -> None:
    model = make()
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    ckpt.save(1, {"model": model}).wait()
    model = make()
    ckpt.restore({"model": model})
    for number in (2, 3, 4):  # other bytes in all slots
        ckpt.save(number, {"model": [torch.full((400,), 9.0)]}).wait()
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items() if "bias" not in name)


@pytest.mark.parametrize("was_enabled", [True, False])
def test_collections_go_on_after_a_load_as_before_it_also_if_it_fails(was_enabled: bool) -> None:
    enabled: list[bool] = []

    def work() -> None:
        enabled.append(gc.isenabled())
        raise errors.StructureMismatch("it fails")

    before = gc.isenabled()
    try:
        (gc.enable if was_enabled else gc.disable)()
        with pytest.raises(errors.StructureMismatch):
            restore_load.without_collections(work)()
        assert enabled == [False] and gc.isenabled() is was_enabled
    finally:
        (gc.enable if before else gc.disable)()
