"""Cases that could spoil saved bits: freed memory that is reused at once, and steps in a CUDA graph."""

from __future__ import annotations

import gc
from typing import Any

import torch
from bench.clock import Bench
from bench.rows import Row

from mlflash.tools.bench_training import Device, Training

CASE = "Saved bits"


def compare(bench: Bench, device: Device, nbytes: int) -> None:
    """Try all cases. If bits differ, an assertion fails."""
    for name, lazy in (("eager", False), ("lazy", True)):
        found = freed(bench, device, nbytes, lazy)
        what = "freed memory is overwritten right after save"
        _note(bench, f"{name}: {what}", found)
    for name, lazy in (("eager", False), ("lazy", True)):
        if device.is_cuda:
            replayed(bench, device, nbytes, lazy)
            _note(bench, f"{name}: a captured step is replayed right after save")
        else:
            _note(bench, f"{name}: a captured step", "needs CUDA")
    if device.is_cuda:
        replayed_sgd(bench, device, nbytes)
    _note(bench, "lazy: a captured step of SGD after wait_staged()",
          "bits equal" if device.is_cuda else "needs CUDA")  # fmt: skip


def freed(bench: Bench, device: Device, nbytes: int, lazy: bool) -> str:
    """Free the tensors during their save, and fill their memory with other tensors. Says how much was reused."""
    fresh = Training(device, nbytes)
    with bench.job("freed") as job, bench.checkpointer(job, redundancy="none") as ckpt:
        ckpt.prepare(fresh.state)
        training = Training(device, nbytes)
        kept = [tensor.cpu() for tensor in training.kept()]
        sizes, places = zip(*((tensor.shape, tensor.data_ptr()) for tensor in training.tensors()), strict=True)
        if device.is_cuda:
            torch.cuda._sleep(50_000_000)  # delays the copies of a lazy save until the model is freed
        snapshot = ckpt.save(1, training.state, until=training.optimizer if lazy else None)
        del training
        gc.collect()
        others = [torch.full(size, 7.0, device=device.torch_device) for size in sizes for _ in range(2)]
        device.sync()
        snapshot.wait()
        _assert_restored(ckpt, fresh, kept)
        reused = len({*places} & {other.data_ptr() for other in others})
        return f"bits equal; {reused} of {len(places)} tensors' memory was given to others"


def replayed(bench: Bench, device: Device, nbytes: int, lazy: bool) -> None:
    """Save, and replay a captured step at once: even a lazy save must copy what the step writes before it returns."""
    training, fresh = (Training(device, nbytes, capturable=True) for _ in range(2))
    graph = _captured(training.step)
    with bench.job("graph") as job, bench.checkpointer(job, redundancy="none") as ckpt:
        ckpt.prepare(training.state)
        for number in range(1, 4):
            graph.replay()
            kept = [tensor.cpu() for tensor in training.kept()]
            snapshot = ckpt.save(number, training.state, until=training.optimizer if lazy else None)
            for _ in range(3):
                graph.replay()
            device.sync()
            snapshot.wait()
            assert training.differing([tensor.to(device.torch_device) for tensor in kept]), "the graph changed nothing"
            _assert_restored(ckpt, fresh, kept)


def replayed_sgd(bench: Bench, device: Device, nbytes: int) -> None:
    """Replay a captured step of SGD, which does not say that it may be captured: call `wait_staged` before it."""
    training, fresh = (Training(device, nbytes) for _ in range(2))
    parameters = list(training.model.parameters())
    sgd = torch.optim.SGD(parameters, lr=1e-3, foreach=True)

    def step() -> None:
        training.compute()
        sgd.step()

    graph = _captured(step)
    with bench.job("sgd") as job, bench.checkpointer(job, redundancy="none") as ckpt:
        ckpt.prepare(training.state)
        kept = [tensor.cpu() for tensor in training.kept()]
        snapshot = ckpt.save(1, training.state, until=sgd)
        snapshot.wait_staged()
        graph.replay()
        device.sync()
        snapshot.wait()
        _assert_restored(ckpt, fresh, kept)


def _captured(step: Any) -> Any:
    """Capture a step. First run it on a side stream, as torch's documentation asks."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def _assert_restored(ckpt: Any, fresh: Training, kept: list[torch.Tensor]) -> None:
    fresh.forget()
    ckpt.restore(fresh.state)
    found = fresh.differing([tensor.to(fresh.device.torch_device) for tensor in kept])
    assert found == 0, f"{found} of {len(kept)} restored tensors differ from what was saved"


def _note(bench: Bench, what: str, found: str = "bits equal") -> None:
    bench.rows(Row(what=what, case=CASE, note=found))
