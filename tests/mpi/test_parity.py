"""Parity: every loss that a scheme covers is restored bit for bit, every other one is refused."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import flip
from emulated import Nodes
from holds import Hold
from mpi4py import MPI

from mlflash import Checkpointer
from mlflash.errors import SaveFailed, Unrestorable
from mlflash.memory.parity_layout import Stripes
from mlflash.memory.slot import Header, Slot, table_check
from mlflash.state.layout import PAGE_NBYTES

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
SCHEMES = {3: ["xor:3", "rs:2+1"], 4: ["xor:4", "rs:2+2"], 5: ["xor:5", "rs:2+3"], 8: ["xor:8", "rs:6+2"]}
LARGE = SIZE > 5  # many ranks for two cores

pytestmark = pytest.mark.mpi(min_size=3)


def on(*sizes: int) -> pytest.MarkDecorator:
    """Run a test on so many ranks only."""
    return pytest.mark.skipif(SIZE not in sizes, reason=f"runs on {' and '.join(map(str, sizes))} ranks")


def schemes(*sizes: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("scheme", SCHEMES[SIZE if SIZE in sizes else sizes[0]])


def state_at(step: int) -> dict[str, Any]:
    """The state of this rank; slots of different sizes, in blocks of 64 KiB, the last one short."""
    numbers = np.random.default_rng((RANK, step))
    return {"w": numbers.standard_normal(40_000 + 9_000 * (RANK % 3)), "step": step, "b": numbers.integers(0, 99, 5)}


def restored(options: dict[str, Any], state: dict[str, Any] | None = None, **more: Any) -> tuple[int | None, list[Any]]:
    """Restore; returns the step, and what all ranks say: whether the bits are right, and what was counted.

    The step is -1 where checkpoints are there, and none can be restored.
    """
    with Checkpointer(**options, **more) as ckpt:
        try:
            step, loaded = ckpt.load()
        except Unrestorable as error:
            step, loaded = -1, None
            assert len(set(COMM.allgather(str(error)))) == 1 and "no slot and no copy" in error.reasons[2]
        right = step in (None, -1) or (
            loaded["step"] == step
            and all(np.array_equal(loaded[key], state_at(step)[key]) for key in ("w", "b"))
        )  # fmt: skip
        ckpt.wait()
        reports = COMM.allgather((right, ckpt.report()))
    assert all(right for right, _ in reports), "bits differ"
    return step, [report for _, report in reports]


def sealed(nodes: Nodes, node: int, step: int) -> list[tuple[Path, Header]]:
    """The files of a node that hold a step, slot first."""
    return sorted((file for file in nodes.files(node) if file[1].step == step), key=lambda file: file[1].parities)


def save(options: dict[str, Any], *steps: int, **more: Any) -> None:
    with Checkpointer(**options, **more) as ckpt:
        for step in steps:
            ckpt.save(step, state_at(step)).wait()


@on(3, 4, 5, 8)
@schemes(3, 4, 5, 8)
def test_every_loss_that_is_covered_is_restored_and_one_more_is_refused(
    options: dict[str, Any], nodes: Nodes, scheme: str
) -> None:
    options |= {"redundancy": scheme, "strict": True}
    losses = int(scheme.partition("+")[2] or 1)
    save(options, 1, 2)
    nodes.keep()
    for count in range(1, losses + 2):
        subsets = list(itertools.combinations(range(SIZE), count))
        if LARGE and count > losses:
            subsets = random.Random(SIZE).sample(subsets, 3)
        for lost in subsets:
            nodes.bring_back(but=lost)
            step, reports = restored(options)
            nodes_left = SIZE - count  # without any file nobody knows that anything was committed
            assert step == (2 if count <= losses else -1 if nodes_left else None), lost
            if step == 2:
                rebuilt = [report["counts"].get("slots rebuilt", 0) for report in reports]
                assert rebuilt == [int(rank in lost) for rank in range(SIZE)]
    assert {report["scheme"] for report in reports} == {scheme}


class Mapped:
    def __init__(self, path: Path):
        self.name, self.view = path.name, np.memmap(path, dtype=np.uint8, mode="r+")


def damage(path: Path, header: Header, blocks: Sequence[int]) -> None:
    bounds = [header.extents.block(block) for block in blocks]
    flip(path, *(PAGE_NBYTES + (where.start + where.stop) // 2 for where in bounds), bit=4)


@on(3, 4, 5)
@pytest.mark.parametrize(("scheme", "seed"), [*zip(2 * SCHEMES.get(SIZE, SCHEMES[3]), range(4), strict=True)])
def test_blocks_damaged_in_all_members_at_once_are_repaired_where_no_stripe_lost_too_many(
    options: dict[str, Any], nodes: Nodes, scheme: str, seed: int
) -> None:
    options["redundancy"] = scheme
    losses = int(scheme.partition("+")[2] or 1)
    save(options, 1, 2)
    (path, header), (parity_path, parity) = sealed(nodes, RANK, 2)
    stripes = Stripes(tuple(COMM.allgather(header.extents.blocks)), losses)
    first = parity.extents.manifest_room // parity.extents.block_nbytes
    rng = random.Random(seed)
    share = (0.02, 0.05, 0.1, 0.3)[seed]
    bad = [[b for b in range(stripes.blocks[m]) if rng.random() < share] for m in range(SIZE)]
    bad_parity = [[b for b in range(stripes.parity_blocks) if rng.random() < share / 2] for _ in range(SIZE)]
    bad[0] = bad[0] or [0]
    lost = {stripes.unit(m, False, b) for m in range(SIZE) for b in bad[m]}
    lost |= {stripes.unit(m, True, b) for m in range(SIZE) for b in bad_parity[m]}
    damage(path, header, bad[RANK])
    damage(parity_path, parity, [first + b for b in bad_parity[RANK]])
    COMM.Barrier()
    step, reports = restored(options)
    if stripes.rebuild(lost) is None:
        assert step == 1
        return
    assert step == 2
    assert sum(report["counts"].get("blocks repaired", 0) for report in reports) == sum(map(len, bad))
    # Parity was made whole again too: a lost node right away is covered.
    nodes.lose(seed % SIZE)
    assert restored(options)[0] == 2


@on(4)
@pytest.mark.parametrize(
    ("scheme", "what"),
    [("xor:4", "header"), ("rs:2+2", "table"), ("xor:4", "heads"), ("rs:2+2", "parity header"),
     ("xor:4", "parity table"), ("rs:2+2", "manifest")],
)  # fmt: skip
def test_damage_at_any_place_of_one_member_is_repaired(
    options: dict[str, Any], nodes: Nodes, scheme: str, what: str
) -> None:
    options["redundancy"] = scheme
    save(options, 1, 2)
    if RANK == SIZE - 1:
        slot, parity = sealed(nodes, RANK, 2)
        path, header = parity if what in ("heads", "parity header", "parity table") else slot
        at = {"header": 50, "table": header.extents.table_start + 3, "heads": PAGE_NBYTES + 60,
              "manifest": PAGE_NBYTES + 10}[what.removeprefix("parity ")]  # fmt: skip
        flip(path, at)
    COMM.Barrier()
    assert restored(options)[0] == 2
    nodes.lose(0)
    assert restored(options)[0] == 2


@on(4)
@pytest.mark.parametrize(
    ("old", "new"),
    [("copy", "xor:3"), ("xor:3", "rs:2+1"), ("rs:2+1", "none"), ("none", "copy:2"), ("copy:2", "copy")],
)  # fmt: skip
def test_another_scheme_restores_by_the_recorded_one_and_protects_by_the_new(
    options: dict[str, Any], nodes: Nodes, old: str, new: str
) -> None:
    save(options, 1, 2, redundancy=old)
    if old != "none":
        nodes.lose(1)
    step, reports = restored(options, redundancy=new)
    assert step == 2
    files = len(list(nodes.path(RANK).glob("slot-*")))
    assert files == {"none": 2, "copy": 4, "copy:2": 6}.get(new, 4)
    own, inbox = reports[RANK]["slots"][:2], reports[RANK]["slots"][2:]
    if new.startswith(("xor", "rs")):
        assert max(slot["nbytes"] for slot in inbox) < 0.8 * own[0]["nbytes"] + 300_000, "a copy's file holds parity"
    if new != "none":
        nodes.lose(2)
        assert restored(options, redundancy=new)[0] == 2
    with Checkpointer(**options, redundancy=new) as ckpt:
        assert ckpt.restore(state_at(0)) == 2
        ckpt.save(3, state_at(3)).wait()
    if new != "none":
        nodes.lose(0)
        assert restored(options, redundancy=new)[0] == 3


def times(a: int, b: int) -> int:
    """Multiply in GF(256) by the polynomial 0x11d, as the docs say and no faster."""
    product = 0
    while b:
        product ^= a if b & 1 else 0
        a = a << 1 ^ (0x11D if a & 0x80 else 0)
        b >>= 1
    return product


@on(5)
@pytest.mark.parametrize("block_nbytes", [4096])
@pytest.mark.parametrize("scheme", ["xor:5", "rs:2+3"])
def test_the_parity_in_the_files_is_what_docs_format_says(
    options: dict[str, Any], nodes: Nodes, scheme: str, block_nbytes: int
) -> None:
    k = int(scheme.partition("+")[2] or 1)
    m, n, block = SIZE, SIZE - k, block_nbytes
    with Checkpointer(**options, redundancy=scheme) as ckpt:
        ckpt.save(1, {"w": np.random.default_rng(RANK).bytes(20_000 + 7000 * RANK)}).wait()
    if RANK:
        return
    bodies, parity = [], []
    for node in range(SIZE):
        (path, header), (parity_path, parity_header) = sealed(nodes, node, 1)
        extents, raw = header.extents, path.read_bytes()
        bodies.append(raw[PAGE_NBYTES : PAGE_NBYTES + extents.body_nbytes])
        start = PAGE_NBYTES + parity_header.extents.manifest_room
        parity.append(parity_path.read_bytes()[start : start + parity_header.extents.payload_nbytes])
        assert (parity_header.parities, parity_header.group) == (k, tuple(range(SIZE)))
        assert parity_header.scheme == header.scheme == scheme
    rows = -(-max(-(-len(body) // block) for body in bodies) // n)
    product = np.array([[times(a, b) for b in range(256)] for a in range(256)], dtype=np.uint8)
    power = list(itertools.accumulate(range(255), lambda a, _: times(a, 2), initial=1))
    for r, s, j in itertools.product(range(rows), range(m), range(k)):
        total = np.zeros(block, dtype=np.uint8)
        for c in range(n):
            at = (r * n + c) * block
            unit = bodies[(s + k + c) % m][at : at + block].ljust(block, b"\0")
            total ^= product[power[c * j]][np.frombuffer(unit, dtype=np.uint8)]
        at = (r * k + j) * block
        assert parity[(s + j) % m][at : at + block] == total.tobytes()


@pytest.mark.parametrize(("scheme", "how"), [
    ("copy", "changed_after_its_check"),  # as a bad DIMM or wire would change it
    *[pytest.param(scheme, f"{how}_when_sent_for_parity", marks=on(4))
      for scheme in ("xor:4", "rs:2+2") for how in ("changed_and_checked", "changed")],
])  # fmt: skip
def test_a_byte_that_changes_on_the_way_is_found_and_nothing_is_committed(
    options: dict[str, Any], nodes: Nodes, scheme: str, how: str, hold_at: Callable[[str], Hold],
    replace: Callable[[str], None],
) -> None:  # fmt: skip
    options["redundancy"] = scheme
    save(options, 1)
    replace(how)
    with Checkpointer(**options) as ckpt:
        assert ckpt.load()[0] == 1
        ckpt.steps()  # behind the reprotection
        changed = hold_at("changed") if RANK == 1 else None
        with pytest.raises(SaveFailed, match="its copies or parity did not arrive whole"):
            ckpt.save(2, state_at(2)).wait()
        if changed is not None:
            changed.set()
    nodes.lose(1)
    assert restored(options)[0] == 1


@on(4)
@pytest.mark.parametrize("scheme", ["xor:4", "rs:2+2"])
def test_parity_that_is_wrong_though_its_checksums_match_gives_the_older_step_and_never_wrong_bits(
    options: dict[str, Any], nodes: Nodes, scheme: str
) -> None:
    options["redundancy"] = scheme
    save(options, 1, 2)
    _, (path, header) = sealed(nodes, RANK, 2)
    slot = Slot(Mapped(path))  # type: ignore[arg-type]
    slot.payload(header.extents)[:] ^= 1
    table = slot.table(header.extents)
    table[:] = slot.check_blocks(header.extents, 0, header.extents.blocks)
    slot.seal(dataclasses.replace(header, table_check=table_check(table)))
    slot.verify()
    nodes.lose(1)
    assert restored(options)[0] == 1
