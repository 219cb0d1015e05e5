"""Restarts on other numbers of ranks, and in other shards: every bit of every tensor is where it belongs."""

from __future__ import annotations

import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import pytest
import torch
import torch.distributed as dist
from emulated import Nodes, on_node
from holds import Hold
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from mpi4py import MPI
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch_jobs import job

import mlflash
from mlflash import Checkpointer, errors
from mlflash.restore import open_in_memory

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.filterwarnings("ignore:.*barrier.*:UserWarning")]
on_5 = pytest.mark.skipif(SIZE != 5, reason="runs on 5 ranks")


@pytest.fixture
def block_nbytes() -> int:
    return 16_384


@pytest.fixture
def options(root: Path) -> dict[str, Any]:
    return {"job": "t", **on_node(root), "transport": "p2p", "timeout_s": 30.0,
            "redundancy": "copy"}  # fmt: skip


def wholes(step: int) -> dict[str, torch.Tensor]:
    """The tensors as they are, whatever their shards: sizes that do not divide, more than a chunk, 0-d."""
    numbers = np.random.default_rng(step)
    return {
        "w": torch.from_numpy(numbers.standard_normal((211, 130))),
        "b": torch.from_numpy(numbers.standard_normal(3)).bfloat16(),
        "deep": torch.from_numpy(numbers.standard_normal((5, 7, 3))).float(),
    }


def state_at(step: int, placement: Placement, blank: bool = False) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = {name: torch.zeros_like(whole) if blank else whole for name, whole in wholes(step).items()}
    at = {name: Shard(min(placement.dim, w.ndim - 1)) if isinstance(placement, Shard) else placement
          for name, w in tensors.items()}  # fmt: skip
    return {
        "model": {name: distribute_tensor(whole.clone(), mesh, [at[name]]) for name, whole in tensors.items()},
        "tied": tensors["b"].clone(),
        "scale": torch.tensor(0.0 if blank else float(step)),
        "private": torch.full((4,), -1 if blank else dist.get_rank()),
        "epoch": -1 if blank else step * 10, "of rank": -1 if blank else dist.get_rank(),
    }  # fmt: skip


def check(state: dict[str, Any], step: int, old_size: int) -> None:
    for name, whole in wholes(step).items():
        found = state["model"][name]
        assert torch.equal(found.full_tensor(), whole), name
    assert torch.equal(state["tied"], wholes(step)["b"]) and state["scale"] == float(step)
    own = dist.get_rank() if dist.get_rank() < old_size else -1 if old_size > 1 else 0  # one is alike with itself
    assert state["private"].tolist() == [own] * 4
    assert (state["epoch"], state["of rank"]) == (step * 10, own)


def save(options: dict[str, Any], size: int, placement: Placement, *steps: int) -> None:
    with job(size) as comm:
        if comm is not None:
            with Checkpointer(comm=comm, strict=True, **options) as ckpt:
                ckpt.restore(state_at(0, placement, blank=True)) if steps[0] == 1 else None
                for step in steps:
                    ckpt.save(step, state_at(step, placement)).wait()
                if "directory" in options:
                    ckpt.drain().wait()


def restored(options: dict[str, Any], size: int, placement: Placement, old_size: int) -> dict[str, Any] | None:
    """Restore step 2 on so many ranks; check every bit, and return the report."""
    with job(size) as comm:
        if comm is None:
            return None
        with Checkpointer(comm=comm, **options) as ckpt:
            state = state_at(0, placement, blank=True)
            assert ckpt.restore(state) == 2 == ckpt.steps()[-1]
            check(state, 2, old_size)
            return ckpt.report()


class Layout(NamedTuple):
    ranks: int
    per_node: int
    placement: Placement

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.per_node)

    def may_lose(self, redundancy: str) -> int:
        nodes, losses = {"copy": (2, 1), "xor:3": (3, 1), "rs:2+2": (4, 2)}[redundancy]
        return losses if self.nodes == nodes or (self.nodes > nodes and losses == 1) else 0


class Change(NamedTuple):
    """A restart on other ranks, or in other shards, of what is left in memory, or of what was drained."""

    old: Layout
    new: Layout
    redundancy: str
    lost: frozenset[int]
    drained: bool


PLACEMENTS = st.sampled_from([Shard(0), Shard(1), Replicate()])
LAYOUTS = [(ranks, per_node) for ranks in range(1, SIZE + 1) for per_node in range(1, ranks + 1)]


@st.composite
def changes(draw: st.DrawFn) -> Change:
    old = Layout(*draw(st.sampled_from(LAYOUTS)), draw(PLACEMENTS))
    redundancy = draw(st.sampled_from(["copy", "xor:3", "rs:2+2"]))
    least, drained = old.nodes - old.may_lose(redundancy), draw(st.booleans())
    news = [Layout(*layout, Shard(0)) for layout in LAYOUTS]
    new = draw(st.sampled_from([layout for layout in news if drained or layout.nodes >= least]))
    lost = draw(st.frozensets(st.integers(0, old.nodes - 1), max_size=old.nodes if drained else old.nodes - least))
    return Change(old, new._replace(placement=draw(PLACEMENTS)), redundancy, lost, drained)


# A rank whose slot was fetched had another rank's in its second one: none was left for its new shards.
FETCHED = Change(Layout(SIZE, 1, Shard(1)), Layout(SIZE, 1, Shard(0)), "copy", frozenset({SIZE - 2}), False)


@settings(derandomize=True, database=None, deadline=None, max_examples=16,
          phases=[Phase.explicit, Phase.generate],
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@example(change=FETCHED)
@given(change=changes())
def test_any_ranks_in_any_shards_go_on_from_any_others_that_lost_what_is_covered(
    options: dict[str, Any], root: Path, nodes: Nodes, monkeypatch: pytest.MonkeyPatch, change: Change
) -> None:
    monkeypatch.setattr(open_in_memory, "_PARTS", 2)  # ranks ask in turns, some of them in more than others
    problem = ""
    try:
        restart(options | {"redundancy": change.redundancy}, root, nodes, change)
    except Exception:  # each rank must take the same examples
        problem = traceback.format_exc()
    left = [root / "pfs", *map(nodes.path, range(SIZE))]
    nodes.on_rank_0(lambda: [shutil.rmtree(path, ignore_errors=True) for path in left])
    assert (problems := [*filter(None, COMM.allgather(problem))]) == [], problems[0]


def restart(options: dict[str, Any], root: Path, nodes: Nodes, change: Change) -> None:
    old, new, pfs = change.old, change.new, root / "pfs"
    options |= {"directory": pfs, "format": "hdf5"} if change.drained else {}
    save(options | on_node(root, old.per_node), old.ranks, old.placement, 1, 2)

    def lose() -> None:
        lost = range(old.nodes) if change.drained else change.lost
        for node in lost:
            shutil.rmtree(nodes.path(node))
        for number, node in enumerate(node for node in range(old.nodes) if node not in lost):
            nodes.path(node).rename(nodes.path(number))

    nodes.on_rank_0(lose)
    if change.drained:
        with h5py.File(pfs / "step-00000002" / "checkpoint.h5") as file:
            assert file["tensors/model.w"][...].tobytes() == wholes(2)["w"].numpy().tobytes()
    options |= on_node(root, new.per_node)
    report = restored(options, new.ranks, new.placement, old.ranks)
    is_same = (old.ranks, old.placement) == (new.ranks, new.placement)
    assert report is None or change.drained or is_same or report["counts"]["resharded"] == 1
    # It is a checkpoint of the new ranks now, with its own redundancy, and the old slots may go.
    nodes.lose(*range(min(1, new.may_lose(change.redundancy))))
    report = restored(options, new.ranks, new.placement, old.ranks)
    assert report is None or "resharded" not in report["counts"]
    held = [header.world_size for node in range(new.nodes) for _, header in nodes.files(node)]
    assert held.count(new.ranks) * 2 >= len(held), "one slot of each pair may have an old step, until the next save"


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("where", ["memory", "directory"])
def test_a_step_that_fewer_ranks_save_again_is_no_mixture(
    options: dict[str, Any], root: Path, nodes: Nodes, where: str
) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#5604: files of ranks that were gone stayed in the folder of the step, and counted."""
    options |= {"directory": root / "pfs"} if where == "directory" else {}
    for size, value in ((SIZE, 1.0), (2, 2.0)):
        with job(size) as comm:
            if comm is not None:
                with Checkpointer(comm=comm, strict=True, fresh=value == 2, **options) as ckpt:
                    assert ckpt.restore(sharded(0.0)) is None
                    ckpt.save(10, sharded(value)).wait()
                    ckpt.drain().wait() if where == "directory" else None
    nodes.lose(*range(SIZE if where == "directory" else 0))
    with job(SIZE) as comm, Checkpointer(comm=comm, **options) as ckpt:
        state = sharded(0.0)
        assert ckpt.restore(state) == 10
        assert (state["w"].full_tensor() == 2).all() and (state["moments"].to_local() == 2).all()


def sharded(value: float) -> dict[str, Any]:
    """Tensors in as many shards as there are ranks in this job, all of one value."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: distribute_tensor(torch.full((8 * SIZE + 1, 3), value), mesh, [Shard(0)]) for name in ("w", "moments")
    }


@on_5
def test_what_does_not_go_together_is_refused_on_all_ranks(options: dict[str, Any], root: Path) -> None:
    save(options, 4, Shard(0), 1, 2)
    with job(2) as comm:
        if comm is not None:
            with Checkpointer(comm=comm, **options) as ckpt:
                state = state_at(0, Shard(0), blank=True)
                state["scale"] = torch.zeros(2)
                with pytest.raises(errors.StructureMismatch, match="scale"):
                    ckpt.restore(state)
                with pytest.raises(errors.WorldSizeChanged, match="restore\\(state\\) converts it"):
                    ckpt.load()
                state = state_at(0, Shard(0), blank=True)
                state["object"] = Stubborn()
                with pytest.raises(errors.StructureMismatch, match="could not be read"):
                    ckpt.restore(state)
                assert ckpt.restore(state_at(0, Shard(0), blank=True)) == 2
                sums = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (2,)), [Partial()])
                with pytest.raises(errors.StateError, match="partial placement"):
                    ckpt.save(3, {"sums": sums})
                ckpt.save(4, state_at(4, Shard(0))).wait()


class Stubborn:
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("no")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise RuntimeError("no")


@on_5
def test_parts_that_are_damaged_on_their_way_are_refused(
    options: dict[str, Any], hold_at: Callable[[str], Hold], replace: Callable[[str], None]
) -> None:
    replace("damaged_on_its_way")
    save(options, 4, Shard(0), 1, 2)
    with job(3) as comm:
        if comm is not None:
            with Checkpointer(comm=comm, **options) as ckpt:
                state = state_at(0, Shard(0), blank=True)
                changed = hold_at("changed") if RANK == 1 else None
                with pytest.raises(errors.CorruptSlot, match="did not arrive whole"):
                    ckpt.restore(state)
                assert not state["model"]["w"].to_local().any(), "something was loaded"
                if changed is not None:
                    changed.set()
                assert ckpt.restore(state) == 2
                check(state, 2, 4)


class Reader:
    """The position of a data loader, of which each rank has its own."""

    rank_private = True

    def __init__(self, position: int):
        self.position = {"at": torch.tensor([position]), "epoch": position}

    def state_dict(self) -> dict[str, Any]:
        return self.position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    said = [record.getMessage() for record in caplog.records if "each rank had its own " in record.getMessage()]
    return said + [record.getMessage() for record in caplog.records if "left behind" in record.getMessage()]


@on_5
def test_what_fewer_ranks_leave_behind_is_named_once_and_what_was_drained_still_has_it(
    options: dict[str, Any], root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = str(tmp_path)
    with job(4) as comm:
        if comm is not None:
            with Checkpointer(directory, comm=comm, **options) as ckpt:
                ckpt.save(1, {"w": np.arange(9), "reader": Reader(10 + RANK), "mean": RANK / 8}).wait()
                ckpt.drain().wait()
    with job(2) as comm:
        if comm is not None:
            with Checkpointer(comm=comm, **options) as ckpt:
                state = {"w": np.zeros(9, dtype=int), "reader": Reader(0), "mean": 0.0}
                assert ckpt.restore(state) == 1 and state["reader"].position["epoch"] == 10 + RANK
            assert len(warned(caplog)) == int(RANK == 0)
            for said in ("saved by 4 ranks, and this run has 2", "what ranks 2-3 had", "mean, reader.at, reader.epoch",
                         "load(1, source=directory) on 4 ranks"):  # fmt: skip
                assert RANK or said in warned(caplog)[0]
    with job(4) as comm:
        if comm is not None:
            with Checkpointer(comm=comm, **options | {"job": "other"}) as ckpt:
                _, state = ckpt.load(1, source=directory)
                assert (state["reader"]["at"], state["mean"]) == (10 + RANK, RANK / 8)


@on_5
def test_new_ranks_have_nothing_to_keep_where_an_object_has_no_state_yet(options: dict[str, Any], root: Path) -> None:
    for size in (2, 4):
        with job(size) as comm:
            if comm is not None:
                with Checkpointer(comm=comm, **options) as ckpt:
                    state = {"reader": Reader(10 + RANK), "w": np.arange(9)}
                    if size == 2:
                        ckpt.save(1, state).wait()
                        continue
                    state["reader"].position = {}
                    assert ckpt.restore(state) == 1
                    assert state["reader"].position["at"] == 10 + RANK % 2, "neither zeros nor what nobody saved"


@on_5
def test_random_generators_of_new_ranks_stay_and_are_named(
    options: dict[str, Any], root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for size, steps in ((2, (1, 2)), (3, ())):
        with job(size) as comm:
            if comm is None:
                continue
            np.random.seed(RANK)
            state = {"w": np.arange(50_000), "rng": mlflash.rng()}
            with Checkpointer(comm=comm, **options) as ckpt:
                for step in steps:
                    ckpt.save(step, state).wait()
                if not steps:
                    np.random.seed(70 + RANK)
                    assert ckpt.restore(state) == 2
                    seed = RANK if RANK < 2 else 70 + RANK
                    assert np.random.random() == np.random.RandomState(seed).random_sample()
                    assert len(warned(caplog)) == int(RANK == 0)
                    assert all("rng" in text and "no rank 2" in text for text in warned(caplog))


def part_of(whole: torch.Tensor, dim: int, rank: int, size: int, blank: bool = False) -> torch.Tensor:
    """A part of a tensor that says where it belongs, as PyTorch's `CheckpointableTensor`; between other elements."""
    parts = [*whole.tensor_split(size, dim)]
    offset = [0] * whole.ndim
    offset[dim] = sum(part.shape[dim] for part in parts[:rank])
    part = torch.full_like(parts[rank], -1) if blank else parts[rank]
    made = torch.nn.functional.pad(part, (1, 2) * whole.ndim, value=-5)
    has_some = part.numel() > 0
    made.global_shape = tuple(whole.shape)
    made.global_offsets = (tuple(offset),) * has_some
    made.local_offsets = ((1,) * whole.ndim,) * has_some
    made.local_sizes = (tuple(part.shape),) * has_some
    return made


def parts_at(step: int, dim: int, rank: int, blank: bool = False) -> dict[str, Any]:
    named = {name: whole for name, whole in wholes(step).items() if whole.ndim > 1}
    return {"parts": {name: part_of(whole, dim, rank, dist.get_world_size(), blank) for name, whole in named.items()}}


def equal_parts(state: dict[str, Any], step: int, dim: int, rank: int) -> bool:
    return all(torch.equal(state["parts"][name], part) for name, part in parts_at(step, dim, rank)["parts"].items())


@pytest.mark.parametrize("new", [pytest.param(2, marks=pytest.mark.gate), 3])
def test_a_tensor_that_says_where_it_belongs_comes_back_in_other_parts(
    options: dict[str, Any], root: Path, new: int
) -> None:
    options["directory"] = root / "pfs"
    with job(SIZE) as comm, Checkpointer(comm=comm, strict=True, **options) as ckpt:
        other = SIZE - 1 - RANK  # what is saved last lies elsewhere, in tensors of the same shapes where they are even
        for step, dim, rank in ((1, 0, RANK), (2, 0, other), (3, 1, other)):
            ckpt.save(step, parts_at(step, dim, rank)).wait()
            found = parts_at(step, 0, RANK, blank=True)
            assert ckpt.restore(found) == step and equal_parts(found, step, 0, RANK)
        mesh = init_device_mesh("cpu", (SIZE,))
        into = {name: distribute_tensor(torch.zeros_like(wholes(3)[name]), mesh, [Shard(1)]) for name in ("w", "deep")}
        assert ckpt.restore({"parts": into}) == 3
        assert all(torch.equal(tensor.full_tensor(), wholes(3)[name]) for name, tensor in into.items())
        ckpt.drain().wait()
    for memory in (root, root / "empty"):
        memory.mkdir(exist_ok=True)
        with job(new) as comm:
            if comm is not None:
                with Checkpointer(comm=comm, **options | {"memory": str(memory)}) as ckpt:
                    found = parts_at(3, 0, dist.get_rank(), blank=True)
                    assert ckpt.restore(found) == 3 and equal_parts(found, 3, 0, dist.get_rank())


def test_a_tensor_whose_place_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    made, two = (part_of(wholes(1)["w"], 0, 0, 2) for _ in range(2))
    made.global_offsets = ((200, 0),)
    for name in ("global_offsets", "local_offsets", "local_sizes"):
        setattr(two, name, 2 * getattr(two, name))
    with Checkpointer(comm=COMM, **options) as ckpt:
        with pytest.raises(errors.StateError, match=r"(?s)or not in the larger one.*\[200, 0\]"):
            ckpt.save(1, {"w": made})
        with pytest.raises(errors.StateError, match=r"(?s)several parts .*2 parts of \[211, 130\]"):
            ckpt.save(2, {"w": two})


def test_a_dtensor_of_the_optimizer_needs_its_state_first(options: dict[str, Any], root: Path) -> None:
    with job(SIZE) as comm:
        assert comm is not None
        mesh = init_device_mesh("cpu", (SIZE,))

        class Sharded:
            def __init__(self, held: dict[str, Any]):
                self.held = held

            def state_dict(self) -> dict[str, Any]:
                return self.held

            def load_state_dict(self, held: dict[str, Any]) -> None:
                self.held = held

        whole = torch.arange(10.0 * SIZE)
        weight = distribute_tensor(whole, mesh, [Shard(0)])
        with Checkpointer(comm=comm, **options) as ckpt:
            ckpt.save(1, {"w": weight, "o": Sharded({"m": 2 * weight})}).wait()
        replicated = DTensor.from_local(torch.zeros(10 * SIZE), mesh, [Replicate()])
        with Checkpointer(comm=comm, **options) as ckpt:
            with pytest.raises(errors.StructureMismatch, match="create the optimizer's state first"):
                ckpt.restore({"w": replicated, "o": Sharded({})})
            assert ckpt.restore(state := {"w": replicated, "o": Sharded({"m": replicated.clone()})}) == 1
            assert torch.equal(state["o"].held["m"].full_tensor(), 2 * whole)
            assert torch.equal(replicated.full_tensor(), whole)
