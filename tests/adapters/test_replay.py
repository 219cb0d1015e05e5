"""Steps that other ranks compute again: they change no bit of training, and a rank that computes wrongly is named."""

from __future__ import annotations

import functools
import logging
import math
import socket
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_models import fsdp1
from replayed import MODELS, WRAPPERS, Counted, Faulty, Halves, Noisy, Training, ddp, fsdp2, loss_of, mlp, training
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_jobs import COMM, job

from mlflash import errors
from mlflash.adapters.replay import Replay

RANK, SIZE = COMM.rank, COMM.size

pytestmark = [
    pytest.mark.mpi(min_size=4),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),  # torch's
]


def same_bits(size: int, make: Any, compute: Any = loss_of, every: int = 2, parts: int = 1) -> None:
    with job(size) as comm:
        if comm is None:
            return
        plain, checked = (make(one).train(4, compute, parts) for one in (None, every))
        assert checked.check is not None and checked.check.replays == 4 * parts / every
        assert checked.check.mismatches == [] and checked.check.largest == 0.0
        assert checked.bits == plain.bits


KINDS = [(kind, wrap) for kind in MODELS for wrap in WRAPPERS if (kind, wrap) != ("normed", "fsdp2_bf16")]
"""All but what torch cannot do itself: a BatchNorm whose weights are bfloat16 and whose statistics are not."""


@pytest.mark.parametrize(("kind", "wrap"), KINDS)
def test_training_has_the_same_bits_with_and_without_a_replay(kind: str, wrap: str) -> None:
    same_bits(SIZE, lambda every: training(MODELS[kind], WRAPPERS[wrap], every))


@pytest.mark.parametrize("wrap", [ddp, fsdp2])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_so_it_is_on_any_number_of_ranks(size: int, wrap: Any) -> None:
    same_bits(size, lambda every: training(mlp, wrap, every), every=1)


@pytest.mark.parametrize("wrap", [ddp, fsdp2, WRAPPERS["fsdp2_bf16"]])
def test_so_it_is_where_gradients_are_accumulated(wrap: Any) -> None:
    same_bits(SIZE, lambda every: training(mlp, wrap, every), parts=3)


@pytest.mark.parametrize("options", [
    {"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True},
    {"broadcast_buffers": False},
], ids=str)  # fmt: skip
def test_so_it_is_with_what_ddp_can_be_told(options: dict[str, Any]) -> None:
    kind = Halves if "find_unused_parameters" in options else Counted
    same_bits(SIZE, lambda every: training(kind, functools.partial(ddp, **options), every))


def test_so_it_is_in_groups_of_which_each_has_a_model_of_its_own() -> None:
    with job():
        pairs = [dist.new_group(ranks) for ranks in ([0, 1], [3, 2])]
        group = pairs[RANK // 2]
        wrap = functools.partial(ddp, process_group=group)
        plain = training(mlp, wrap).train(3)
        checked = training(mlp, wrap, 1, group=group).train(3)
        assert checked.bits == plain.bits and checked.check is not None and checked.check.mismatches == []
        faulty = training(mlp, wrap, 1, group=group).train(1, Faulty(3, {0}))
        assert culprits(faulty.check) == ([3] if RANK >= 2 else [])


@pytest.mark.parametrize("wrap", [ddp, fsdp2])
def test_so_it_is_where_activations_are_computed_again(wrap: Any) -> None:
    def compute(model: nn.Module, batch: Any) -> torch.Tensor:
        out = checkpoint(model, batch["x"], use_reentrant=False) if wrap is ddp else model(batch["x"])
        return out.square().mean() * batch["scale"]

    def kind() -> nn.Module:
        model = mlp()
        first = model[0].forward
        model[0].forward = lambda x: checkpoint(first, x, use_reentrant=False)
        return model

    same_bits(SIZE, lambda every: training(mlp if wrap is ddp else kind, wrap, every), compute)


@pytest.mark.parametrize("wrap", [ddp, fsdp2])
def test_so_it_is_where_the_model_is_compiled(wrap: Any) -> None:
    def kind() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        for layer in model:
            layer.compile(backend="aot_eager")
        return model

    same_bits(SIZE, lambda every: training(kind, wrap, every))


# What is found


def replayed(compute: Any, wrap: Any = fsdp2, kind: Any = mlp, steps: int = 3, **options: Any) -> Training:
    return training(kind, wrap, **({"every": 2} | options)).train(steps, compute)


def culprits(check: Replay | None) -> list[int | None]:
    assert check is not None
    return [one.culprit and one.culprit.rank for one in check.mismatches]


@pytest.mark.parametrize("in_backward", [False, True], ids=["activation", "gradient"])
@pytest.mark.parametrize("wrap", [*WRAPPERS])
def test_who_computes_a_step_wrongly_once_is_named(
    wrap: str, in_backward: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mlflash")
    bit = 4 if wrap == "fsdp2_bf16" else 20
    with job():
        # Its passes: step 0, its replay, step 1, step 2, its replay, and two more
        run = replayed(Faulty(2, {3}, bit, in_backward), WRAPPERS[wrap])
        assert run.check is not None and run.check.replays == 2
        (found,) = run.check.mismatches
        assert (found.step, found.subject.rank, found.culprit) == (2, 2, found.subject)
        assert found.witness.rank not in (2, None) and found.difference > 1e-5
        assert ("loss" in found.names) != in_backward
        assert any(name.endswith("3.weight") for name in found.names)
        said = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
        assert len(said) == (RANK == 0)
        for line in said:
            assert f"rank 2 ({socket.gethostname()}, cpu) is wrong" in line and "3.weight" in line
            assert "other bits than in its step" in line and str(found.witness) in line
        assert RANK or "step 0 was computed again by other ranks: the same bits" in caplog.text


@pytest.mark.parametrize("wrap", [ddp, fsdp2])
def test_who_always_computes_wrongly_is_named_as_the_one_of_both_micro_batches(wrap: Any) -> None:
    with job():
        run = replayed(Faulty(1, None), wrap, steps=1)
        assert culprits(run.check) == [1, 1]
        assert run.check is not None
        as_subject, as_witness = sorted(run.check.mismatches, key=lambda one: one.subject.rank != 1)
        assert as_subject.subject.rank == 1 and "got the same bits again" in as_subject.reason
        assert as_witness.witness.rank == 1 and "got the same bits as" in as_witness.reason


@pytest.mark.gate
def test_who_computes_a_replay_wrongly_is_named() -> None:
    with job():
        run = replayed(Faulty(3, {1}), steps=1)
        assert culprits(run.check) == [3]
        assert run.check is not None and run.check.mismatches[0].witness.rank == 3


@pytest.mark.parametrize(("passes", "culprit", "reason"), [
    ({0}, 1, "it got other bits than before"), ({1}, 1, "it got other bits than before"),
    (None, None, "there is no third rank"),
], ids=["step", "replay", "always"])  # fmt: skip
def test_of_two_ranks_the_one_that_differs_from_itself_is_named(
    passes: set[int] | None, culprit: int | None, reason: str
) -> None:
    with job(2) as comm:
        if comm is not None:
            run = replayed(Faulty(1, passes), steps=1)
            assert run.check is not None and set(culprits(run.check)) == {culprit}
            assert all(reason in one.reason for one in run.check.mismatches)
            assert len(run.check.mismatches) == (1 if passes else 2)


@pytest.mark.parametrize("wrap", [ddp, fsdp2])
def test_kernels_that_are_not_deterministic_are_within_a_measured_bound_and_faults_beyond_it(
    wrap: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mlflash")
    with job():
        unmeasured = replayed(Noisy(), wrap)
        assert set(culprits(unmeasured.check)) == {None} and len(culprits(unmeasured.check)) == SIZE
        assert unmeasured.check is not None
        assert all("kernels that are not deterministic" in one.reason for one in unmeasured.check.mismatches)
        measuring = replayed(Noisy(), wrap, steps=9, bound=math.inf).check
        assert measuring is not None and measuring.mismatches == [] and 1e-7 < measuring.largest < 1e-3
        caplog.clear()
        bounded = replayed(Noisy(), wrap, bound=10 * measuring.largest)
        assert bounded.check is not None and bounded.check.mismatches == []
        assert RANK or "within the measured bound" in caplog.text
        faulty = replayed(Noisy(rank=1, passes={3}, bit=27), wrap, bound=10 * measuring.largest)
        assert culprits(faulty.check) == [1]


@pytest.mark.parametrize("wrap", [ddp, fsdp2])
@pytest.mark.parametrize("kind", ["mlp", "normed", "counted"])
def test_a_replay_that_finds_something_changes_no_bit_either(kind: str, wrap: Any) -> None:
    with job():
        plain = training(MODELS[kind], wrap).train(3, Faulty(2, {0}))
        checked = training(MODELS[kind], wrap, 1).train(3, Faulty(2, {0}))
        assert checked.bits == plain.bits and checked.check is not None and checked.check.largest > 0
        loud = training(MODELS[kind], wrap, 1, on_mismatch="raise")
        with pytest.raises(errors.ReplayMismatch, match="a rank computes wrongly: step 0") as caught:
            loud.train(1, Faulty(2, {0}))
        assert (caught.value.rank, caught.value.step) == (2, 0) and caught.value.tensor and caught.value.node
        assert loud.bits_now() == plain.bits[0], "gradients are there, and the optimizer has not stepped"


# What is refused, and what is off


def test_settings_that_make_no_sense_are_refused() -> None:
    with job():
        model = fsdp2(mlp())
        for settings, text in [
            ({"every": -1}, "every"), ({"every": 2.0}, "every"), ({"every": 1, "bound": math.nan}, "bound"),
            ({"every": 1, "bound": -1.0}, "bound"), ({"every": 1, "on_mismatch": "cry"}, "on_mismatch"),
        ]:  # fmt: skip
            with pytest.raises(errors.ConfigError, match=text):
                Replay(model, **settings)
        with pytest.raises(errors.ConfigError, match="the same on all ranks"):
            Replay(model, 1, bound=float(RANK))
        with pytest.raises(errors.ConfigError, match="FSDP1"):
            Replay(fsdp1(1, SIZE).model, 1)
    if not dist.is_initialized():
        with pytest.raises(errors.ConfigError, match="init_process_group"):
            Replay(mlp(), 1)


def test_what_keeps_one_rank_from_a_replay_is_raised_on_all() -> None:
    with job():
        run = training(mlp, fsdp2, 1)
        assert run.check is not None
        with pytest.raises(errors.ConfigError, match=r"batch cannot be sent.*lock") as caught:
            batch: Any = threading.Lock() if RANK == 2 else None
            run.check.forward_backward(0, batch, lambda model, _: model(torch.ones(2, 8)).sum())
        assert caught.value.rank == 2
        other = mlp()
        with pytest.raises(errors.ConfigError, match="use the model that it is given"):
            run.check.forward_backward(0, None, lambda *_: other(torch.ones(2, 8)).sum())
        inputs = torch.ones(2, 8, requires_grad=True)
        with pytest.raises(errors.ConfigError, match="a backward within backward: set use_reentrant=False"):
            run = training(mlp, ddp, 1)
            run.check.forward_backward(0, inputs, lambda *given: checkpoint(*given, use_reentrant=True).sum())


def test_where_it_is_off_it_is_forward_and_backward_and_nothing_else(
    enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "new_group", None)
    model = mlp()
    check = Replay(model, 1, on_mismatch="no such word", enabled=enabled)
    loss = check.forward_backward(0, torch.ones(2, 8), lambda model, batch: model(batch).sum())
    assert check.replays == 0 and not loss.requires_grad
    assert all(one.grad is not None for one in model.parameters())
