"""Light saves: a restore makes steps again, and gives the bits of the newest one, or of an older one and says why."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from digests import digests
from emulated import Nodes, on_node
from mpi4py import MPI
from torch import nn
from torch.distributed.fsdp import fully_shard

import mlflash
from mlflash import Checkpointer
from mlflash.checkpointer import light_saves
from mlflash.errors import StepNotFound
from mlflash.save import repeated_steps
from mlflash.save.snapshot import Snapshot

pytestmark = pytest.mark.mpi(min_size=1)
WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-3),
    "AdamW, for each": lambda p: torch.optim.AdamW(p, 1e-3, foreach=True, amsgrad=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
    "AdamW, one by one": lambda p: torch.optim.AdamW(p, torch.tensor(1e-3), foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD, nesterov, for each": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, foreach=True),
    "SGD, maximize": lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9, maximize=True, weight_decay=0.1, foreach=True),
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": torch.optim.Adagrad,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
}


class Training:
    """A training of this rank alone, with what a step changes besides weights."""

    def __init__(self, make: Callable[[Any], Any] = OPTIMIZERS["AdamW"]):
        torch.manual_seed(RANK)
        self.net = nn.Sequential(nn.Linear(16, 40), nn.BatchNorm1d(40), nn.Dropout(0.1), nn.Linear(40, 4))
        self.optimizer = make(self.net.parameters())
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 100)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        self.state = {"net": self.net, "optimizer": self.optimizer, "schedule": self.schedule, "scaler": self.scaler,
                      "rng": mlflash.rng(), "seen": [0]}  # fmt: skip
        self.in_steps = lambda step: None  # called with each number, after its step of the optimizer
        self.sets_to_none = True
        self.until: Any = None  # what saves get

    def step(self, number: int) -> None:
        for _ in range(2):  # gradients are accumulated
            loss = self.net(torch.randn(8, 16)).square().mean()
            self.scaler.scale(loss * float("inf") if number % 5 == 4 else loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.scaler.step(self.optimizer)  # it leaves out those with infinite gradients
        self.scaler.update()
        self.in_steps(number)
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=self.sets_to_none)
        self.state["seen"][0] += 16

    def train(self, ckpt: Checkpointer | None, first: int, last: int) -> Training:
        for number in range(first, last + 1):
            self.step(number)
            if ckpt is not None:
                ckpt.save(number, self.state, until=self.until)
        if ckpt is not None:
            ckpt.wait()
        return self

    def bits(self) -> dict[str, str]:
        return digests(self.state)


@pytest.fixture
def settings(root: Path) -> dict[str, Any]:
    return {"job": "t", **on_node(root), "transport": "p2p", "timeout_s": 30.0, "light": 4,
            "redundancy": "none" if SIZE == 1 else "copy"}  # fmt: skip


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.set_num_threads(1)
    yield


def said(caplog: pytest.LogCaptureFixture) -> str:
    """What all ranks have logged. Collective."""
    return "".join(WORLD.allgather(caplog.text))


def interrupted(settings: dict[str, Any], last: int, training: Training) -> None:
    """Train, and end without a word."""
    ckpt = Checkpointer(**settings)
    training.train(ckpt, 1, last)
    assert ckpt.abandon()
    WORLD.barrier()


def check_restored(settings: dict[str, Any], step: int, make: Callable[[], Training] = Training) -> None:
    """Restore, and compare with a training that came to this step without an interruption."""
    again = make()
    with Checkpointer(**settings) as ckpt:
        assert ckpt.restore(again.state) == step
        assert again.bits() == make().train(None, 1, step).bits()


@pytest.mark.parametrize(("name", "waits"), [
    *(pytest.param(name, False, marks=() if name.startswith(("AdamW", "SGD")) else pytest.mark.slow)
      for name in OPTIMIZERS),
    ("AdamW", True), ("AdamW, fused", True), ("SGD, nesterov, for each", True),
])  # fmt: skip
def test_the_newest_step_comes_back_and_goes_on_with_the_same_bits(
    settings: dict[str, Any], name: str, waits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    make, first = OPTIMIZERS[name], Training(OPTIMIZERS[name])
    first.until = first.optimizer if waits else None
    interrupted(settings, 9, first)
    assert "be light" not in said(caplog)
    again = Training(make)
    with Checkpointer(**settings) as ckpt:
        assert ckpt.restore(again.state) == 9
        assert again.bits() == Training(make).train(None, 1, 9).bits()
        again.train(ckpt, 10, 13)
    assert again.bits() == Training(make).train(None, 1, 13).bits()
    with Checkpointer(**settings) as ckpt:
        assert ckpt.restore(Training(make).state) == 13


def test_a_fused_step_that_unscales_gradients_is_repeated(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    def training() -> Training:
        fused = Training(OPTIMIZERS["AdamW, fused"])
        fused.scaler.unscale_ = lambda optimizer: None  # the optimizer does it
        return fused

    interrupted(settings, 9, training())
    assert "be light" not in said(caplog)
    check_restored(settings, 9, training)


@pytest.mark.parametrize("kind", ["of a step", "zeroed", "in buckets", "sharded"])
def test_gradients_are_copied_while_training_goes_on_unless_it_changes_them(
    settings: dict[str, Any], process_group: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:  # fmt: skip
    def made() -> Training:
        training = Training()
        net: Any = nn.Sequential(nn.Linear(16, 1024), nn.Linear(1024, 64 * SIZE), nn.Linear(64 * SIZE, 4))
        if kind == "in buckets":
            net = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
        elif kind == "sharded":
            fully_shard(net)
        training.net, training.sets_to_none = net, kind != "zeroed"
        training.optimizer = training.until = OPTIMIZERS["AdamW"](net.parameters())
        training.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(training.optimizer, 100)
        training.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=kind != "sharded")
        training.state = {"net": net, "optimizer": training.optimizer, "schedule": training.schedule,
                          "scaler": training.scaler, "rng": mlflash.rng(), "seen": [0]}  # fmt: skip
        return training

    deferred, found = light_saves._deferred, list[int]()

    def count(*args: Any, **kwargs: Any) -> dict[int, Any]:
        late: dict[int, Any] = deferred(*args, **kwargs)
        found.append(len(late))
        return late

    monkeypatch.setattr(light_saves, "_deferred", count)
    interrupted(settings, 12, made())
    assert "be light" not in said(caplog)
    assert min(found) >= 1 and (max(found[4:]) > 1) == (kind != "in buckets")  # one: the digest
    again = made()
    with Checkpointer(**settings) as ckpt:
        assert ckpt.restore(again.state) == 12
    assert again.bits() == made().train(None, 1, 12).bits()


@pytest.mark.mpi(min_size=2)
def test_a_lost_node_costs_no_step(settings: dict[str, Any], nodes: Nodes) -> None:
    interrupted(settings, 9, Training())
    nodes.lose(1)
    check_restored(settings, 9)


def test_a_whole_save_that_has_not_ended_costs_no_step(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    ckpt = Checkpointer(**settings)
    training.train(ckpt, 1, 5)
    monkeypatch.setattr(ckpt._saves, "save", lambda step, *_: Snapshot(step, lambda: None))  # it never ends
    training.train(ckpt, 6, 8)  # number 9 would wait for it
    assert ckpt.abandon()
    WORLD.barrier()
    check_restored(settings, 8)


@pytest.mark.mpi(min_size=2)
def test_after_a_restore_all_is_protected_again(settings: dict[str, Any], nodes: Nodes) -> None:
    interrupted(settings, 9, Training())
    for lost in (1, 0):
        nodes.lose(lost)
        check_restored(settings, 9)


def test_most_saves_are_light_and_small(settings: dict[str, Any]) -> None:
    training = Training()
    with Checkpointer(**settings) as ckpt:
        nbytes = []
        for number in range(1, 13):
            training.step(number)
            nbytes.append(ckpt.save(number, training.state).nbytes)
    whole = nbytes[0]
    assert [size == whole for size in nbytes] == [number % 5 == 1 for number in range(1, 13)], nbytes


def test_an_older_step_can_be_asked_for(settings: dict[str, Any]) -> None:
    interrupted(settings, 9, Training())
    with Checkpointer(**settings) as ckpt:
        assert ckpt.steps()[-4:] == [6, 7, 8, 9]
        for wanted, step in (({"step": 8}, 8), ({"before": 8}, 7), ({"step": 6}, 6)):
            again = Training()
            assert ckpt.restore(again.state, **wanted) == step
            assert again.bits() == Training().train(None, 1, step).bits()
        with pytest.raises(StepNotFound):
            ckpt.restore(Training().state, step=20)
        again = Training()
        assert ckpt.restore(again.state, before=8) == 7
        again.train(ckpt, 8, 9)
    check_restored(settings, 9)


def clamped(when: str) -> Training:
    """A training that limits its weights in each step."""
    training = Training()

    def clamp(*args: Any) -> None:
        with torch.no_grad():
            training.net[0].weight.clamp_(-0.1, 0.1)

    if when == "after the optimizer":
        training.in_steps = clamp
    else:
        training.net.register_forward_pre_hook(clamp)
    return training


def zeroed() -> Training:
    """A training that sets gradients to zero, and not to None."""
    training = Training()
    training.sets_to_none = False
    return training


@pytest.mark.parametrize("when", ["before it", "after the optimizer"])
@pytest.mark.parametrize("waits", [False, True])
def test_weights_that_something_else_changes_are_saved_whole(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture, when: str, waits: bool
) -> None:
    training = clamped(when)
    training.until = training.optimizer if waits else None
    interrupted(settings, 9, training)
    assert "something other than the optimizer's step has changed weights" in said(caplog)
    again = Training()
    with Checkpointer(**settings) as ckpt:
        assert ckpt.restore(again.state) == 9
    assert again.bits() == clamped(when).train(None, 1, 9).bits()


def test_gradients_that_are_zeroed_in_place_are_copied_before_that(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    interrupted(settings, 9, zeroed())
    assert "be light" not in said(caplog)
    again = Training()
    with Checkpointer(**settings) as ckpt:
        assert ckpt.restore(again.state) == 9
    assert again.bits() == zeroed().train(None, 1, 9).bits()


class Sharded:
    """A training with FSDP2 that changes tensors in ways that PyTorch does not count as changes of these."""

    def __init__(self, how: str):
        torch.manual_seed(0)
        self.how, self.net = how, nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 4))
        fully_shard(self.net)
        make = OPTIMIZERS["SGD, nesterov, for each" if how == "in the step" else "AdamW, for each"]
        self.optimizer = make(self.net.parameters())
        self.state = {"net": self.net, "optimizer": self.optimizer, "rng": mlflash.rng()}

    def train(self, ckpt: Checkpointer | None, first: int, last: int) -> list[torch.Tensor]:
        for number in range(first, last + 1):
            if self.how == "weights":
                with torch.no_grad():
                    torch._foreach_mul_([*self.net.parameters()], 0.99)
            self.net(torch.randn(8, 16)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=self.how != "zeroed")
            if ckpt is not None:
                ckpt.save(number, self.state)
        return [parameter.to_local().clone() for parameter in self.net.parameters()]


@pytest.mark.parametrize("how", ["in the step", "zeroed", "weights"])
def test_changes_of_distributed_tensors_are_seen(
    settings: dict[str, Any], process_group: None, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    ckpt = Checkpointer(**settings)
    Sharded(how).train(ckpt, 1, 9)
    with contextlib.suppress(mlflash.errors.SaveFailed):
        ckpt.wait()
    assert ckpt.abandon()
    WORLD.barrier()
    assert ("something other than the optimizer's step has changed weights" in said(caplog)) == (how == "weights")
    assert ("the next save is whole" in said(caplog)) == (how == "weights")
    again = Sharded(how)
    with Checkpointer(**settings) as ckpt:
        assert ckpt.restore(again.state) == 9
        now = again.train(None, 10, 12)
    assert all(map(torch.equal, now, Sharded(how).train(None, 1, 12)))


def test_a_step_with_a_closure_is_refused_by_name_and_saved_whole(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    weight = nn.Parameter(torch.ones(8) + RANK)
    optimizer = torch.optim.LBFGS([weight])
    state = {"weight": weight, "optimizer": optimizer}

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight - 3).square().sum()
        loss.backward()
        return loss

    with Checkpointer(**settings) as ckpt:
        for number in range(1, 9):
            optimizer.step(closure)
            ckpt.save(number, state)
        ckpt.wait()
        assert "the step of LBFGS gets arguments" in said(caplog)
        kept = weight.detach().clone()
        nn.init.zeros_(weight)
        assert ckpt.restore(state) == 8 and torch.equal(weight.detach(), kept)


def test_where_a_step_made_again_has_other_bits_the_one_before_is_restored(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    interrupted(settings, 9, Training())
    exact, made = repeated_steps.repeat, []

    def repeat(step: Any, optimizers: Any) -> None:
        exact(step, optimizers)
        made.append(step)
        if len(made) == 2:  # the step of number 8
            with torch.no_grad():
                optimizers[0].param_groups[0]["params"][0].view(-1)[:640].add_(1e-3)

    monkeypatch.setattr(light_saves, "repeat", repeat)
    check_restored(settings, 7)
    assert "had other bits when it was made again" in said(caplog)


def test_a_change_that_pytorch_does_not_count_is_never_restored_as_something_else(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    def made() -> Training:
        training = Training()
        training.net[0] = nn.Linear(16, 40)
        training.state["large"] = large = nn.Linear(512, 600)
        training.optimizer.add_param_group({"params": list(large.parameters())})
        training.in_steps = lambda number: prune(large.weight) if number == 12 else None
        return training

    def prune(weight: nn.Parameter) -> None:
        weight.data[300, 100] = 7.0  # one of 307,200

    interrupted(settings, 13, made())
    again = made()
    with Checkpointer(**settings) as ckpt:
        assert ckpt.restore(again.state) == 11
    assert "had other bits when it was made again" in said(caplog)
    assert again.bits() == made().train(None, 1, 11).bits()


def test_an_optimizer_may_make_its_first_step_later(settings: dict[str, Any]) -> None:
    def made() -> Training:
        training = Training()
        training.state["later"] = later = nn.Parameter(torch.zeros(8))
        training.state["optimizer of later"] = optimizer = torch.optim.Adam([later], 0.1)

        def step(number: int) -> None:
            if number % 3 == 0:
                later.grad = torch.randn(8)
                optimizer.step()

        training.in_steps = step
        return training

    with Checkpointer(**settings) as ckpt:
        training = made()
        for number in range(1, 4):
            training.step(number)
            ckpt.save(number, training.state).wait()  # raises if it fails
        assert ckpt.abandon()
        WORLD.barrier()
    check_restored(settings, 3, made)


def test_the_copy_that_makes_steps_as_well_takes_no_random_numbers_of_the_training(settings: dict[str, Any]) -> None:
    class Noisy(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.add_(torch.randn_like(parameter), alpha=0.01)
            return super().step(closure)

    def made() -> Training:
        return Training(lambda parameters: Noisy(parameters, 0.1))

    with Checkpointer(**settings) as ckpt:
        trained = made().train(ckpt, 1, 8)
    assert trained.bits() == made().train(None, 1, 8).bits()


def test_where_no_save_can_be_light_one_fails_and_all_others_are_whole(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    state = {"weight": torch.zeros(8)}
    with Checkpointer(**settings) as ckpt:
        snapshots = [ckpt.save(number, state) for number in range(1, 8)]
        ckpt.wait()
    assert [snapshot.committed for snapshot in snapshots] == [True, False] + [True] * 5
    assert said(caplog).count("no save can be light, and all are whole now: no torch optimizer is in the state") == 1


def test_a_device_that_makes_steps_again_with_other_bits_is_found_before_that_is_needed(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    exact = repeated_steps.repeat

    def repeat(step: Any, optimizers: Any) -> None:
        exact(step, optimizers)
        with torch.no_grad():
            optimizers[0].param_groups[0]["params"][0].add_(1e-3)

    monkeypatch.setattr(repeated_steps, "repeat", repeat)
    interrupted(settings, 9, Training())
    monkeypatch.undo()
    assert "made again on this device gave other bits" in said(caplog)
    check_restored(settings, 9)


def test_memory_keeps_older_steps_for_a_bad_hour(settings: dict[str, Any]) -> None:
    settings = {**settings, "light": 0, "history": 3}
    interrupted(settings, 9, Training())
    for _ in range(2):  # a run that restores keeps them, too
        with Checkpointer(**settings) as ckpt:
            assert ckpt.steps()[-4:] == [6, 7, 8, 9]
            for step in (6, 9, 7):
                again = Training()
                assert ckpt.restore(again.state, step) == step
                assert again.bits() == Training().train(None, 1, step).bits()
