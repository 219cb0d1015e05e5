"""Tensors of torchao: the states of its optimizers under FSDP2, and quantized models."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Cluster, own_memory
from wrapped import leaves

from mlflash import Checkpointer, errors

RANKS = 2
QUIET = {"PYTHONWARNINGS": "ignore"}  # of torchao


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """Let its optimizers not compile themselves."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with own_memory() as root:
        yield Cluster(root)


@pytest.mark.parametrize("optimizer", ["AdamW8bit", "AdamWFp8", "float8"])
def test_fsdp2_goes_on_with_the_same_bits_after_a_kill(cluster: Cluster, optimizer: str) -> None:
    done = cluster.run(RANKS, "frameworks/torchao_job.py", optimizer, "0", env=QUIET, timeout=300)
    wanted = [record["digest"] for record in done.of("end")]
    assert len(wanted) == RANKS and all(record["wrapped"] >= 2 for record in done.of("end")), done.log
    cluster.wipe(*range(RANKS))
    killed = cluster.run(RANKS, "frameworks/torchao_job.py", optimizer, "4", env=QUIET, timeout=300)
    assert killed.returncode and not killed.of("end")
    again = cluster.run(RANKS, "frameworks/torchao_job.py", optimizer, "0", env=QUIET, timeout=300)
    found = [(record["first"], record["digest"]) for record in again.of("end")]
    assert found == [(3, one) for one in wanted], again.log
    fewer = cluster.run(1, "frameworks/torchao_job.py", optimizer, "0", env=QUIET, timeout=300)
    assert fewer.returncode and "saved in shards, which are not cut anew" in fewer.log


def torchao(module: str, name: str) -> Any:
    """Something of torchao, which the environments of other frameworks do not have."""
    return getattr(importlib.import_module(f"torchao.{module}"), name)


class Training:
    def __init__(self, seed: int, optimizer: str):
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))
        self.optimizer = torchao("optim", optimizer)(self.model.parameters(), lr=0.01)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def step(self, seed: int) -> None:
        data = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
        self.optimizer.zero_grad()
        self.model(data).square().mean().backward()
        self.optimizer.step()

    def held(self) -> list[torch.Tensor]:
        found = [self.model.state_dict(), self.optimizer.state_dict()["state"]]
        return [one.detach().clone() for one in leaves(dict(enumerate(found)))]


@pytest.fixture
def ckpt(shm: Path) -> Any:
    with Checkpointer(memory=str(shm), redundancy="none", job="ao", strict=True) as made:
        yield made


@pytest.mark.parametrize("optimizer", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
@pytest.mark.parametrize("has_state", [False, True])
def test_an_optimizer_in_few_bits_goes_on(ckpt: Checkpointer, optimizer: str, has_state: bool) -> None:
    one, other = Training(1, optimizer), Training(2, optimizer)
    one.step(1)
    one.step(2)
    ckpt.save(2, one.state).wait()
    if has_state:
        other.step(7)
    assert ckpt.restore(other.state) == 2
    assert len(one.held()) > 10 and equal(one.held(), other.held())
    one.step(3)
    other.step(3)
    assert equal(one.held(), other.held())


@pytest.mark.parametrize("optimizer", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_steps_of_an_optimizer_in_few_bits_are_made_again(
    shm: Path, optimizer: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "mlflash")
    one, other = Training(1, optimizer), Training(2, optimizer)
    settings: dict[str, Any] = {"memory": str(shm), "redundancy": "none", "job": "ao", "strict": True, "light": 4}
    with Checkpointer(**settings) as ckpt:
        for number in range(1, 10):
            one.step(number)
            ckpt.save(number, one.state)
    with Checkpointer(**settings) as ckpt:
        assert ckpt.restore(other.state) == 9
    assert "made the steps after 6 again, up to step 9" in caplog.text and "not checked" not in caplog.text
    assert len(one.held()) > 10 and equal(one.held(), other.held())


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_a_quantized_model_comes_back(ckpt: Checkpointer, config: str) -> None:
    def made(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        torchao("quantization", "quantize_")(model, torchao("quantization", config)())
        return model

    one, other = made(1), made(2)
    ckpt.save(1, {"model": one}).wait()
    assert ckpt.restore({"model": other}) == 1
    assert equal([*leaves(one.state_dict())], [*leaves(other.state_dict())])
    assert torch.equal(one(torch.ones(2, 64)), other(torch.ones(2, 64)))
    plain = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    with pytest.raises(errors.StructureMismatch, match="wraps others in the checkpoint, one that wraps none"):
        ckpt.restore({"model": plain})


def float8_of_fsdp(values: torch.Tensor) -> Any:
    linear = torch.nn.Linear(64, 64, bias=False)
    linear.weight.data = values
    config = torchao("float8", "Float8LinearConfig")(enable_fsdp_float8_all_gather=True)  # as TorchTitan's
    return torchao("float8.float8_linear", "Float8Linear").from_float(linear, config).weight


def mx(values: torch.Tensor) -> Any:
    return torchao("prototype.mx_formats.mx_tensor", "MXTensor").to_mx(values, torch.float8_e4m3fn, 32)


def nvfp4(values: torch.Tensor) -> Any:
    return torchao("prototype.mx_formats.nvfp4_tensor", "NVFP4Tensor").to_nvfp4(values)


@pytest.mark.parametrize("make", [float8_of_fsdp, mx, nvfp4])
def test_a_tensor_in_few_bits_comes_back(ckpt: Checkpointer, make: Any) -> None:
    one, other = (make(torch.randn(64, 64, dtype=torch.bfloat16)) for _ in range(2))
    assert type(one) is not torch.Tensor and not equal([*leaves({"w": one})], [*leaves({"w": other})])
    ckpt.save(1, {"w": one}).wait()
    assert ckpt.restore({"w": other}) == 1
    _, new = ckpt.load()
    for found in (other, new["w"]):
        assert type(found) is type(one) and found.__tensor_flatten__() == one.__tensor_flatten__()
        assert equal([*leaves({"w": one})], [*leaves({"w": found})])


def equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(
        (one.dtype, one.shape) == (other.dtype, other.shape)
        and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
        for one, other in zip(some, others, strict=True)
    )
