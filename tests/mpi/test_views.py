"""Loading without copies: the bits are those that were saved, and what is done to the views never reaches the slot."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emulated import Nodes, on_node
from mpi4py import MPI

from mlflash import Checkpointer, errors

pytestmark = pytest.mark.mpi
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def state_of(step: int) -> dict[str, Any]:
    shared = torch.arange(50_000, dtype=torch.float32) + step
    return {"own": torch.full((300, 1000), 100.0 * RANK + step, dtype=torch.bfloat16), "shared": shared, "tied": shared,
            "array": np.arange(step + 7, dtype="<i2"), "none": torch.empty(0, 3), "step": step}  # fmt: skip


def is_of(state: dict[str, Any], step: int) -> bool:
    wanted = state_of(step)
    return all(np.array_equal(np.asarray(value), np.asarray(saved)) if isinstance(saved, np.ndarray)
               else torch.equal(value, saved) if isinstance(saved, torch.Tensor) else value == saved
               for value, saved in zip(state.values(), wanted.values(), strict=True))  # fmt: skip


@pytest.fixture(params=[pytest.param(None, id="own", marks=pytest.mark.slow), pytest.param(True, id="shared")])
def settings(request: pytest.FixtureRequest, options: dict[str, Any]) -> dict[str, Any]:
    """Each rank stores all of its own; or its share of what all have."""
    replicated = {"shared*": True, "tied*": True, "array*": True} if request.param and SIZE > 1 else None
    return {**options, "replicated": replicated}


def test_views_are_what_was_saved_and_what_is_written_to_them_stays_here(settings: dict[str, Any]) -> None:
    with Checkpointer(**settings) as ckpt:
        ckpt.save(1, state_of(1)).wait()
    with Checkpointer(**settings) as ckpt:
        step, views = ckpt.load(copy=False)
        assert step == 1 and is_of(views, 1)
        assert views["tied"].data_ptr() == views["shared"].data_ptr()
        views["own"].zero_()
        views["array"][:] = 0
        assert ckpt.load()[0] == 1 and is_of(ckpt.load()[1], 1)  # every byte verified


def test_a_slot_is_not_written_as_long_as_anybody_has_a_view_of_it(settings: dict[str, Any]) -> None:
    with Checkpointer(**settings, when_busy="skip") as ckpt:
        ckpt.save(1, state_of(1)).wait()
        step, views = ckpt.load(copy=False)
        assert step == 1
        ckpt.steps()  # comes after the reprotection, which may keep slots to itself for a moment
        assert ckpt.save(2, state_of(2)).wait().committed
        kept = views["own"][3:]
        tail = views["shared"][-5:]
        del views
        gc.collect()
        ckpt.save(3, state_of(3))
        ckpt.wait()
        assert ckpt.report()["counts"]["skipped"] == 1  # the one holds step 2, the other is looked at
        assert torch.equal(kept, state_of(1)["own"][3:]) and torch.equal(tail, state_of(1)["shared"][-5:])
        MPI.COMM_WORLD.Barrier()
        del kept, tail
        gc.collect()
        MPI.COMM_WORLD.Barrier()
        assert ckpt.save(4, state_of(4)).wait().committed
        assert is_of(ckpt.load(copy=False)[1], 4)


def test_headers_and_tables_are_verified_and_bytes_are_not(options: dict[str, Any], nodes: Nodes) -> None:
    with Checkpointer(**options, redundancy="none") as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step)).wait()
        newest = next(slot for slot in ckpt.report()["slots"] if slot["step"] == 2)
        file = Path(ckpt.report()["memory"], newest["file"])
    with Checkpointer(**options, redundancy="none") as ckpt:
        with file.open("r+b") as raw:
            raw.seek(100_000)
            raw.write(b"damaged")
        step, views = ckpt.load(copy=False)
        assert step == 2 and not is_of(views, 2)
        del views
        assert ckpt.load()[0] == 1
        with file.open("r+b") as raw:
            raw.write(bytes(4096))
        step, views = ckpt.load(copy=False)
        assert step == 1 and is_of(views, 1)


@pytest.mark.mpi(min_size=2)
def test_what_has_to_come_from_another_node_is_verified_on_its_way(options: dict[str, Any], nodes: Nodes) -> None:
    with Checkpointer(**options) as ckpt:
        ckpt.save(1, state_of(1)).wait()
    nodes.lose(SIZE - 1)
    with Checkpointer(**options) as ckpt:
        step, views = ckpt.load(copy=False)
        assert step == 1 and is_of(views, 1)
        with pytest.raises(errors.StepNotFound):
            ckpt.load(7, copy=False)


def grown(step: int) -> dict[str, Any]:
    return {**state_of(step), "more": np.full(300_000, step)}


def test_views_stay_as_they_are_through_restores_loads_saves_and_growth(settings: dict[str, Any]) -> None:
    with Checkpointer(**settings, when_busy="skip") as ckpt:
        ckpt.save(1, state_of(1)).wait()
        views = ckpt.load(copy=False)[1]
        for step in (2, 3, 4):
            assert ckpt.restore(ckpt.load()[1]) == ckpt.load(copy=False)[0] == ckpt.last_step
            for _ in range(2):
                ckpt.save(ckpt.last_step + 1, grown(step) if step == 3 else state_of(step))
                ckpt.wait()
            assert is_of(views, 1), "written by a save after a restore"
            MPI.COMM_WORLD.Barrier()
        del views
        gc.collect()
        MPI.COMM_WORLD.Barrier()
        assert ckpt.save(ckpt.last_step + 1, state_of(9)).wait().committed


@pytest.mark.mpi(min_size=2)
def test_views_stay_as_they_are_where_another_process_gets_their_file(options: dict[str, Any], nodes: Nodes) -> None:
    options |= {**on_node(nodes.root, SIZE), "redundancy": "none", "timeout_s": 60.0}
    with Checkpointer(**options) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step)).wait()
        views, older = ckpt.load(copy=False)[1], ckpt.load(1, copy=False)[1]
    turned = MPI.COMM_WORLD.Split(0, SIZE - RANK)
    with Checkpointer(**options, comm=turned) as ckpt:
        assert ckpt.restore(ckpt.load()[1]) == 2
        for step in (3, 4, 5, 6):  # no save waits for views of which nobody here knows when they end
            assert ckpt.save(step, grown(step) if step > 4 else state_of(step)).wait().committed
            assert is_of(views, 2) and is_of(older, 1)
            MPI.COMM_WORLD.Barrier()
        assert ckpt.load()[0] == 6
    turned.Free()
