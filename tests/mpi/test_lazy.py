"""Saves that copy while training goes on: the bits are those of the moment of the save, or there is no checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import holds
import pytest
import torch
from emulated import on_node
from holds import Hold
from mpi4py import MPI

from mlflash import Checkpointer, errors
from mlflash.save import save_queue
from mlflash.save.deferred_copies import DeferredCopies
from mlflash.state.flatten import flatten

pytestmark = pytest.mark.mpi
two = pytest.mark.mpi(min_size=2)
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


class Training:
    """A model with a buffer, its optimizer, and an average of its weights, all different on each rank."""

    averaging = True

    def __init__(self, width: int = 400, seed: int = RANK, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width),
                                         torch.nn.Linear(width, 3))  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, **options)
        self.average = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.steps, self.width = 0, width

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "average": self.average, "steps": self.steps}

    def step(self) -> None:
        self.model(torch.randn(8, self.width)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for name, parameter in self.model.named_parameters() if self.averaging else ():
            self.average[name].lerp_(parameter.detach(), 0.5)
        self.steps += 1

    def copy(self) -> dict[str, Any]:
        """What a save has to keep."""
        tensors = {f"model.{k}": v.clone() for k, v in self.model.state_dict().items()}
        tensors |= {f"average.{k}": v.clone() for k, v in self.average.items()}
        moments = {
            f"{i}.{k}": v.clone() for i, vs in self.optimizer.state_dict()["state"].items() for k, v in vs.items()
        }
        return {**tensors, **moments, "steps": torch.tensor(self.steps)}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def assert_restored(ckpt: Checkpointer, step: int, training: Training, kept: dict[str, Any]) -> None:
    """Restore a step into a new training, which is then as what was kept."""
    training.step()
    state = training.state
    assert ckpt.restore(state, step=step) == step
    training.steps = state["steps"]
    assert same(training.copy(), kept), step


@pytest.mark.parametrize(
    ("point", "how"),
    [(None, {}), ("commit.released", {"fused": True}), ("protect.announced", {"foreach": False}),
     ("transfer.sent", {"fused": True}), ("commit.seen", {"foreach": False})],
    ids=str,
)  # fmt: skip
def test_what_is_restored_is_the_state_at_the_save_however_early_training_goes_on(
    options: dict[str, Any], slow_at: Any, point: str | None, how: dict[str, Any]
) -> None:
    training = Training(**how)
    training.step()
    if point is not None:
        slow_at(point, 0.05)
    with Checkpointer(**options) as ckpt:
        ckpt.prepare(training.state)
        kept = {}
        for _ in range(6):
            kept[training.steps] = training.copy()
            ckpt.save(training.steps, training.state, until=training.optimizer)
            training.step()  # writes to all there is, as early as it may
        ckpt.wait()
        holds.let_go()
        steps = ckpt.steps()
        assert steps == [5, 6]
        for step in steps:
            assert_restored(ckpt, step, Training(**how), kept[step])


def in_backward(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """An optimizer for each parameter, which steps as soon as backward has its gradient."""
    optimizers = {parameter: torch.optim.AdamW([parameter], lr=0.1) for parameter in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return list(optimizers.values())


def of_two_on_shared_weights(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9), torch.optim.SGD(model[0].parameters(), lr=1e-6)]


@pytest.mark.parametrize("make", [in_backward, of_two_on_shared_weights])
def test_any_of_several_optimizers_may_be_the_first_to_step(options: dict[str, Any], slow_at: Any, make: Any) -> None:
    def train() -> None:
        model(torch.randn(8, 400)).square().sum().backward()
        for optimizer in reversed(optimizers) if make is of_two_on_shared_weights else ():
            optimizer.step()

    model = torch.nn.Sequential(torch.nn.Linear(400, 400), torch.nn.Linear(400, 300))
    optimizers = make(model)
    train()
    state = {"model": model, "optimizers": optimizers}
    slow_at("commit.released", 0.05)
    with Checkpointer(**options) as ckpt:
        ckpt.prepare(state)
        for step in range(1, 5):
            flat = flatten(state)
            kept = [value.clone() for value in flat.values]
            assert ckpt.save(step, state, until=optimizers if step % 2 else optimizers[:1]).later is not None
            train()
        ckpt.wait()
        assert ckpt.restore(state) == 4
        assert all(map(torch.equal, flatten(state).values, kept))


class Parallel(Training):
    """The same, over all ranks: by DDP, all hold the same; by FSDP2, each a shard.

    Forward and backward put other tensors in the place of FSDP2's shards, and write to these.
    """

    def __init__(self, how: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        super().__init__(seed=0)
        self.averaging = False
        if how == "fsdp2":
            mesh = init_device_mesh("cpu", (SIZE,))
            for layer in (self.model[0], self.model[2]):
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        else:
            self.model = torch.nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def copy(self) -> dict[str, Any]:
        flat = flatten(self.state)
        return {entry.name: value.clone() for entry, value in zip(flat.structure.entries, flat.values, strict=True)}


@two
@pytest.mark.parametrize(("how", "per_node"), [
    ("ddp", 1), ("fsdp2", 1),
    # Two ranks of a node share out what they hold alike, and their couriers need the checksums that are made late.
    ("ddp", 2),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*barrier.*:UserWarning")
def test_nothing_of_ddp_or_fsdp2_writes_to_what_is_copied_late(
    options: dict[str, Any], root: Path, process_group: None, slow_at: Any, how: str, per_node: int
) -> None:
    training = Parallel(how)
    training.step()
    replicated = True if how == "ddp" else None
    with Checkpointer(**{**options, **on_node(root, per_node)}, replicated=replicated, strict=True) as ckpt:
        ckpt.prepare(training.state)
        slow_at("commit.released", 0.05)
        kept, lazy = {}, 0
        for _ in range(5):
            kept[training.steps] = training.copy()
            snapshot = ckpt.save(training.steps, training.state, until=training.optimizer)
            lazy += snapshot.later is not None
            training.step()
        ckpt.wait()
        holds.let_go()
        assert lazy >= 4  # the first may be the one that agrees on what is shared
        for step in (4, 5):
            assert_restored(ckpt, step, Parallel(how), kept[step])


def _by_numpy(weight: torch.Tensor) -> None:
    weight.detach().numpy()[:] *= 2


@two
@pytest.mark.parametrize(
    ("write", "replicated"),
    [(lambda weight: weight.mul_(2), None), (lambda weight: weight.data.mul_(2), True), (_by_numpy, None),
     (_by_numpy, True)],
)  # fmt: skip
def test_a_step_that_was_written_to_too_early_is_on_no_rank_a_checkpoint(
    options: dict[str, Any], hold_at: Callable[[str], Hold], write: Callable[[torch.Tensor], object],
    replicated: bool | None,
) -> None:  # fmt: skip
    options["replicated"] = replicated
    training = Training(seed=0)
    training.step()
    with Checkpointer(**options) as ckpt:
        ckpt.prepare(training.state)
        hold = hold_at("commit.seen")  # the courier is busy for as long as the test says, once the first save has ended
        ckpt.save(1, training.state, until=training.optimizer).wait()
        kept = training.copy()
        training.steps = 2
        snapshot = ckpt.save(2, training.state, until=training.optimizer)
        if RANK == 0 or replicated:
            with torch.no_grad():
                write(training.model[0].weight)  # by hand, not by an optimizer
        hold.set()
        with pytest.raises(errors.SaveFailed, match="changed before it was copied"):
            snapshot.wait()
        assert ckpt.steps() == [1]
        ckpt.save(3, training.state, until=training.optimizer).wait()
        snapshot = ckpt.save(4, training.state, until=training.optimizer)
        snapshot.wait_staged()
        with torch.no_grad():
            training.model[0].weight.mul_(2)  # now it may
        snapshot.wait()
        assert ckpt.restore(Training().state, step=3) == 3
    assert kept["steps"] == 1


@two
def test_a_failed_save_writes_nothing_into_the_slot_that_the_next_one_gets(options: dict[str, Any]) -> None:
    training = Training()
    training.step()
    with Checkpointer(**options) as ckpt:
        ckpt.prepare(training.state)
        ckpt.save(1, training.state, until=training.optimizer).wait()
        bad = training.state | ({"bad": object()} if RANK == SIZE - 1 else {})
        try:
            snapshot = ckpt.save(2, bad, until=training.optimizer)
        except errors.StateError:
            snapshot = None
        ckpt.wait()
        assert snapshot is None or isinstance(snapshot.error, errors.SaveFailed)
        kept = training.copy()
        good = ckpt.save(3, training.state, until=training.optimizer)
        training.step()  # what was left of step 2 must not be copied by this
        good.wait()
        assert_restored(ckpt, 3, Training(), kept)


@two
@pytest.mark.parametrize(
    "error", [errors.DeadlineExceeded("a copy did not finish"), RuntimeError("CUDA error")], ids=str
)
def test_a_device_that_fails_on_one_rank_costs_the_save_whose_copies_it_makes_and_no_other(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Other ranks' slots have begun to arrive where a slot is given up."""
    finish, cancel = DeferredCopies.finish, DeferredCopies.cancel

    def finish_or_fail(copies: DeferredCopies) -> None:
        finish(copies)
        if step == 3:
            copies.error = errors.StateError("a device did not finish its copies")

    def cancel_or_fail(copies: DeferredCopies) -> None:
        cancel(copies)
        if step in (3, 5):
            raise error

    if RANK == 0:
        monkeypatch.setattr(DeferredCopies, "finish", finish_or_fail)
        monkeypatch.setattr(DeferredCopies, "cancel", cancel_or_fail)
    training = Training()
    training.step()
    with Checkpointer(**options) as ckpt:
        for step in range(1, 6):
            snapshot = ckpt.save(step, training.state, until=training.optimizer)
            if step == 3:
                with pytest.raises(errors.SaveFailed, match="did not finish its copies"):
                    snapshot.wait()
            else:
                snapshot.wait()
        assert ckpt.steps() == [4, 5]


def test_a_restore_and_the_next_save_do_not_come_between(options: dict[str, Any]) -> None:
    training = Training()
    training.step()
    with Checkpointer(**options) as ckpt:
        ckpt.prepare(training.state)
        ckpt.save(1, training.state, until=training.optimizer)
        kept = training.copy()
        ckpt.save(2, training.state, until=training.optimizer)
        assert ckpt.restore(training.state) == 2  # writes to what is saved
        assert same(training.copy(), kept)
        training.step()
        ckpt.save(3, training.state, until=[training.optimizer])
        kept = training.copy()
    training.step()
    with Checkpointer(**options) as ckpt:
        assert ckpt.steps()[-1] == 3
        assert_restored(ckpt, 3, Training(), kept)


def test_where_it_is_turned_off_all_is_copied_at_once(options: dict[str, Any]) -> None:
    layer = torch.nn.Linear(200, 200)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with Checkpointer(**options, lazy=False) as ckpt:
        assert ckpt.adapting.save_or_warn(1, {"layer": layer}, [optimizer]).later is None  # type: ignore[union-attr]
        assert ckpt.save(2, {"layer": layer}, until=optimizer).later is None


# Saves whose slots are not there yet, or are too small: training goes on before they are made


def state_of(value: float, numbers: int = 1000) -> dict[str, Any]:
    tensor = torch.full((numbers,), value)
    return {"a": tensor, "tied": tensor, "b": torch.full((3, 5), value + RANK).t(), "c": [torch.tensor([value > 0])]}


def optimizer_of(state: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD([state["a"]], lr=0.1)


def add_one(state: dict[str, Any]) -> None:
    for tensor in (state["a"], state["b"]):
        tensor.add_(1)
    state["c"][0].logical_not_()


def same_tensors(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in "ab") and torch.equal(first["c"][0], second["c"][0])


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_training_goes_on_while_slots_are_made_and_what_is_committed_is_the_state_at_the_save(
    options: dict[str, Any], hold_at: Callable[[str], Hold], shared: bool
) -> None:
    with Checkpointer(**options, replicated=shared or None) as ckpt:
        for step, numbers in ((1, 1000), (2, 500_000)):  # the first one, and one that has grown
            state = state_of(step, numbers)
            held = hold_at("room.created")
            snapshot = ckpt.save(step, state, until=optimizer_of(state))  # it would not return if it waited for room
            add_one(state)
            held.set()
            snapshot.wait()
            newest, loaded = ckpt.load()
            assert newest == step
            assert same_tensors(loaded, state_of(step, numbers))
            assert loaded["a"].data_ptr() == loaded["tied"].data_ptr()


@pytest.mark.parametrize("slots_only", [0, RANK])
def test_where_a_node_has_memory_for_the_slots_only_the_save_waits_for_them(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, slots_only: int
) -> None:
    if slots_only == RANK:  # on each rank, or on one of them
        monkeypatch.setattr(save_queue, "copy_to_host", lambda *_: None)
    with Checkpointer(**options) as ckpt:
        state = state_of(1)
        snapshot = ckpt.save(1, state, until=optimizer_of(state))
        add_one(state)
        snapshot.wait()
        assert same_tensors(ckpt.load()[1], state_of(1))
