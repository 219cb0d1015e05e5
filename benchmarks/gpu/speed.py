"""Times eager and lazy saves, a step during them, and a restore, and compares them with the device's own copies."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from bench.aims import ALONE, D2H
from bench.clock import Bench
from bench.rows import Samples, row

from mlflash import Checkpointer
from mlflash.tools.bench_training import Copies, Device, Training, Waits

H2D = "cudaMemcpyAsync to the device"
COPIES = 4.0  # a step takes at least this many times as long as the copy


def measure(bench: Bench, device: Device, nbytes: int) -> None:
    """Time everything, and compare the bits after each save."""
    training = Training(device, nbytes)
    waits = Waits(training)
    copies = Copies(device, training.tensors())
    copy_s = min(copies.to_host() for _ in range(5))
    step_s = training.lasting(COPIES * copy_s)
    bench.header(**{"MiB saved": copies.nbytes >> 20, "D2H GB/s": round(copies.nbytes / copy_s / 1e9, 1),
                    "step, ms": round(step_s * 1e3, 1)})  # fmt: skip
    with bench.job("gpu") as job, bench.checkpointer(job, redundancy="none") as ckpt:
        ckpt.prepare(training.state)
        timed = _Timed(ckpt, training, waits)
        first = timed.save("first", None)["first stall"]
        ckpt.wait()
        samples = bench.repeat({
            "D2H": lambda: {D2H: copies.to_host()}, "H2D": lambda: {H2D: copies.to_device()}, "alone": timed.alone,
            "eager": lambda: timed.save("eager", None), "lazy": lambda: timed.save("lazy", training.optimizer),
            "restore": timed.restore,
        })  # fmt: skip
    waits.close()
    bench.rows(*_rows(samples, first, device.is_cuda))


class _Timed:
    """Times saves and restores, and compares the bits of each.

    Args:
        ckpt: the checkpointer that saves.
        training: the model and optimizer to save.
        waits: measures the waits in the hooks of that optimizer.
    """

    def __init__(self, ckpt: Checkpointer, training: Training, waits: Waits):
        self._ckpt, self._training, self._waits = ckpt, training, waits
        self._number = 0
        self._fresh = Training(training.device, sum(tensor.nbytes for tensor in training.tensors()))

    def alone(self) -> dict[str, float]:
        """Time a step."""
        device = self._training.device
        device.sync()
        start = time.perf_counter()
        self._training.step()
        device.sync()
        return {ALONE: time.perf_counter() - start}

    def save(self, name: str, until: Any) -> dict[str, float]:
        """Save, make a step at once and further ones until the commit, then compare the saved bits."""
        self._number += 1
        device, kept = self._training.device, self._training.kept()
        start = time.perf_counter()
        snapshot = self._ckpt.save(self._number, self._training.state, until=until)
        stall_s = time.perf_counter() - start
        self._training.step()
        device.sync()
        step_s = time.perf_counter() - start
        waited_s = self._waits.seconds()
        further = []
        while not snapshot.done:
            further.append(self.alone()[ALONE])
        snapshot.wait()
        self._training.forget()
        self._ckpt.restore(self._fresh.state)
        assert self._fresh.differing(kept) == 0, f"{name}: the save stored other bits"
        self._ckpt.restore(self._training.state)
        assert self._training.differing(kept) == 0, f"{name}: a restore in place gave other bits"
        return {f"{name} stall": stall_s, f"{name} wait": waited_s, f"{name} both": stall_s + waited_s,
                f"{name} step": step_s, f"{name} committed": snapshot.commit_s or 0.0,
                f"{name} further": float(np.mean(further)) if further else np.nan}  # fmt: skip

    def restore(self) -> dict[str, float]:
        """Time a restore directly to the device, which checks every byte."""
        device = self._training.device
        device.sync()
        start = time.perf_counter()
        self._ckpt.restore(self._fresh.state)
        device.sync()
        return {"restored": time.perf_counter() - start}


def _rows(samples: Samples, first_s: float, is_cuda: bool) -> list[Any]:
    stall, lazy = ("gpu stall", "gpu lazy") if is_cuda else ("", "")  # a dry run is compared with no aim
    copies, steps = {D2H: samples[D2H]}, {ALONE: samples[ALONE]}
    eager_s = float(np.median(samples["eager stall"]))
    return [
        row(D2H, samples[D2H], copies),
        row("stall of an eager save", samples["eager stall"], copies, stall,
            note=f"the first one after prepare: {first_s / eager_s:.2f} times as long"),
        row("stall of a lazy save, and the device's wait in optimizer.step()", samples["lazy both"], copies, lazy),
        row(ALONE, samples[ALONE], steps),
        row("a step with an eager save", samples["eager step"], steps),
        row("a step with a lazy save", samples["lazy step"], steps),
        *(row(f"a step while the courier works, {name}", samples[f"{name} further"], steps)
          for name in ("eager", "lazy") if not np.isnan(samples[f"{name} further"]).any()),
        row("committed, eager", samples["eager committed"], copies),
        row("committed, lazy", samples["lazy committed"], copies),
        row("restore straight to the device, every byte checked", samples["restored"], {H2D: samples[H2D]}),
    ]  # fmt: skip
