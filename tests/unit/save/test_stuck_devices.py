"""A device that does not end its copies, on torch's stand-in for one: its streams are the host, its events ours."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from waiting import until

from mlflash import Checkpointer, errors
from mlflash.save import stage
from mlflash.state.leaves import Entry, from_bytes

TIMEOUT_S = 1.0  # of the device, which never comes: the test has to wait for it


@pytest.fixture
def device_goes_on(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let tensors of 20,000 numbers be on a device; its copies end when this is set."""
    goes_on = threading.Event()
    goes_on.set()

    class Event(torch.cpu.Event):
        def query(self) -> bool:
            return goes_on.is_set()

    monkeypatch.setattr(torch.cpu, "Event", Event)
    add = stage._Kinds.add

    def add_on_device(kinds: stage._Kinds, place: stage.Place, value: Any, raw: np.ndarray, entry: Entry) -> None:
        if value.numel() == 20_000:
            targets, numbers = kinds.on_devices.setdefault(torch.device("cpu"), ([], []))
            targets.append(from_bytes(entry, raw))
            numbers.append(place.leaf)
            kinds.of_devices.append(place)
        else:
            add(kinds, place, value, raw, entry)

    monkeypatch.setattr(stage._Kinds, "add", add_on_device)
    return goes_on


@pytest.fixture
def ckpt(shm: Path) -> Iterator[Checkpointer]:
    with Checkpointer(memory=str(shm), job="j", redundancy="none", timeout_s=TIMEOUT_S) as ckpt:
        yield ckpt


def state_of(step: int) -> dict[str, Any]:
    return {"x": torch.full((20_000,), float(step)), "n": torch.full((10,), step)}


def test_a_copy_that_never_ends_costs_one_slot_and_no_later_save_waits_for_it(
    ckpt: Checkpointer, device_goes_on: threading.Event, shm: Path
) -> None:
    ckpt.save(1, state_of(1)).wait()
    ckpt.save(2, state_of(2)).wait()
    device_goes_on.clear()
    stuck = ckpt.save(3, state_of(3))
    with pytest.raises(errors.SaveFailed, match="a device did not finish its copies"):
        stuck.wait()
    (file,) = until(lambda: ckpt._trainer.slots._quarantined, "the slot is given up")
    assert file.name not in {path.name for path in shm.rglob("slot-*")}  # nobody else takes it over
    start = time.monotonic()
    for step in (4, 5):
        with pytest.raises(errors.SaveFailed, match="has not finished its copies for an earlier save"):
            ckpt.save(step, state_of(step)).wait()
    assert time.monotonic() - start < TIMEOUT_S  # none of them waited for the device
    device_goes_on.set()
    for step in (6, 7, 8):
        ckpt.save(step, state_of(step)).wait()
        assert torch.equal(ckpt.load()[1]["x"], state_of(step)["x"])
    assert not ckpt._trainer.slots.is_device_stuck
    assert not file.view.nbytes  # unmapped, now that nothing writes to it


@pytest.mark.slow
def test_a_lazy_copy_that_never_ends_ends_its_save_and_leaves_its_slot_alone(
    ckpt: Checkpointer, device_goes_on: threading.Event
) -> None:
    model = torch.nn.Linear(2000, 10, bias=False)  # 20,000 numbers
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in (1, 2):
        ckpt.save(step, {"m": model}, until=optimizer).wait()
    device_goes_on.clear()
    snapshot = ckpt.save(3, {"m": model}, until=optimizer)
    until(lambda: snapshot.done and isinstance(snapshot.error, errors.SaveFailed), "the end of the save")
    assert until(lambda: ckpt._trainer.slots._quarantined, "the slot is given up")
    device_goes_on.set()
    ckpt.save(4, {"m": model}, until=optimizer).wait()
    assert ckpt.steps()[-1] == 4
