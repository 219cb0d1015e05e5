"""At rest: what is damaged while a job runs is said, repaired before the next save, and restored bit for bit."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from damage import flip, slot
from emulated import Nodes
from holds import Hold
from mpi4py import MPI
from waiting import until

from mlflash import Checkpointer
from mlflash.memory.slot import HEADER_NBYTES, Header, unpack

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
COUNTED = ("files damaged", "blocks repaired", "files made again", "committed", "failed")
SCHEME = {2: "copy", 3: "xor:3", 4: "rs:2+2"}.get(SIZE, "copy")

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.skipif(SIZE > 4, reason="runs on 2 to 4 ranks")]


def state_at(step: int) -> dict[str, Any]:
    numbers = np.random.default_rng((RANK, step))
    return {"w": numbers.standard_normal(60_000 + 9_000 * RANK), "step": step}


def damage_at(path: Path, header: Header, place: str) -> None:
    """Damage a file: a byte of its header, of its table, of its first or second block, or of the first and the last."""
    extents = header.extents
    ends = [5_000, 4096 + extents.body_nbytes - 9]
    at = {"header": [40], "table": [extents.table_start + 3], "blocks": ends, "first": ends[:1],
          "second": [4096 + extents.block_nbytes], "all": [*range(4096, extents.table_start, 4096)]}[place]  # fmt: skip
    flip(path, *at)


def counts(ckpt: Checkpointer) -> dict[str, int]:
    return dict(ckpt.report()["counts"])


def wait_found(ckpt: Checkpointer, total: int) -> None:
    def is_found() -> bool:
        return COMM.allreduce(counts(ckpt).get("files damaged", 0)) >= total

    until(is_found, "damage to be found")


def whole_files(nodes: Nodes, step: int) -> list[bool]:
    """Of each file of a step, whether all bytes are what header and table say."""
    files = [file for node in range(SIZE) for file in nodes.files(node)]
    return [is_whole(np.fromfile(path, np.uint8), header) for path, header in files if header.step == step]


def is_whole(raw: np.ndarray, header: Header) -> bool:
    extents = header.extents
    table = raw[extents.table_start : extents.table_start + 8 * extents.blocks].view("<u8")
    body = raw[4096 : 4096 + extents.body_nbytes]
    sums = [xxhash.xxh3_64_intdigest(body[extents.block(b)].data) for b in range(extents.blocks)]
    return xxhash.xxh3_64_intdigest(table.tobytes()) == header.table_check and sums == table.tolist()


def restored(options: dict[str, Any]) -> int | None:
    """Restore; the step, the same on all ranks, each of which has the right bits."""
    with Checkpointer(**options) as ckpt:
        step, loaded = ckpt.load()
    assert step is not None and np.array_equal(loaded["w"], state_at(step)["w"])
    assert len(set(COMM.allgather(step))) == 1
    return int(step)


@pytest.mark.parametrize(
    ("kind", "place"), [("own", "blocks"), ("own", "header"), ("redundancy", "table"), ("redundancy", "blocks")]
)
def test_what_is_damaged_in_a_running_job_is_said_once_and_whole_again_before_the_next_save_is_protected(
    options: dict[str, Any], nodes: Nodes, hold_at: Callable[[str], Hold], tmp_path: Path, kind: str, place: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    options |= {"redundancy": SCHEME, "strict": True}
    kind = ("copy" if SCHEME == "copy" else "parity") if kind == "redundancy" else kind
    with caplog.at_level(logging.WARNING, "mlflash"), Checkpointer(**options) as ckpt:
        ckpt.save(1, state_at(1)).wait()
        path, header = slot(nodes.root, kind, 1, 1)
        nodes.on_rank_0(lambda: damage_at(path, header, place))
        wait_found(ckpt, 1)
        hold = hold_at("protect.announced")
        snapshot = ckpt.save(2, state_at(2))
        until(lambda: hold.is_reached, "the save to be announced")
        COMM.Barrier()
        assert kind != "own" or unpack(path.read_bytes()[:HEADER_NBYTES]) == header  # where it was
        assert whole_files(nodes, 1) == [True] * SIZE * 2  # a slot of each rank, and what protects it
        nodes.keep()
        hold.set()
        snapshot.wait()
        damaged = COMM.allreduce(counts(ckpt).get("files damaged", 0))
        warnings = [r.getMessage() for r in caplog.records if "is damaged" in r.getMessage()]
        assert damaged == 1 and COMM.allreduce(len(warnings)) == 1
        for text in warnings:
            assert text.startswith(f"{path.name} on {path.parents[2].name} is damaged: ") and "rank 1 at step 1" in text
    # The node of the rank whose file was damaged, and then that of another one, is lost before the save is committed.
    for lost in (1, 0):
        nodes.bring_back(but=[lost])
        assert restored(options) == 1


def saved(options: dict[str, Any], nodes: Nodes, hold_at: Callable[[str], Hold], damage: list[tuple[str, int, str]]
          ) -> tuple[dict[str, int], list[bool]]:  # fmt: skip
    """Save, damage files, save again; gives what all ranks counted, and which files of the first step were whole
    when the second was about to be protected. Their memory was kept then.

    Args:
        damage: kind of file, rank whose state it has, and where.
    """
    with Checkpointer(**options) as ckpt:
        ckpt.save(1, state_at(1)).wait()
        files = [(*slot(nodes.root, kind, of, 1), place) for kind, of, place in damage]
        nodes.on_rank_0(lambda: [damage_at(*file) for file in files])
        wait_found(ckpt, len({path for path, *_ in files}))
        hold = hold_at("protect.announced")
        snapshot = ckpt.save(2, state_at(2))
        until(lambda: hold.is_reached, "the save to be announced")
        COMM.Barrier()
        whole = whole_files(nodes, 1)
        nodes.keep()
        hold.set()
        snapshot.wait()
        ckpt.save(3, state_at(3)).wait()  # and saves go on
        assert whole_files(nodes, 3) == [True] * SIZE * 2
        own = counts(ckpt)
    return {name: COMM.allreduce(own.get(name, 0)) for name in COUNTED}, whole


@pytest.mark.parametrize(("scheme", "damage", "counted", "losses"), [
    ("copy", [("own", 1, "first"), ("copy", 1, "second"), ("copy", 0, "all")], (3, 1, 2), [[0], [1]]),
    pytest.param("rs:2+2", [("own", 0, "first"), ("parity", 1, "all"), ("own", 2, "blocks"), ("parity", 3, "header")],
                 (4, 3, 1), [[0, 2], [1, 3]], marks=pytest.mark.skipif(SIZE != 4, reason="runs on 4 ranks")),
])  # fmt: skip
def test_slots_and_what_protects_them_are_repaired_where_they_are_damaged_in_different_places(
    options: dict[str, Any], nodes: Nodes, hold_at: Callable[[str], Hold], scheme: str,
    damage: list[tuple[str, int, str]], counted: tuple[int, int, int], losses: list[list[int]],
) -> None:  # fmt: skip
    options |= {"redundancy": scheme, "strict": True}
    count, whole = saved(options, nodes, hold_at, damage)
    assert count == dict(zip(COUNTED, (*counted, 3 * SIZE, 0), strict=True))
    assert whole == [True] * SIZE * 2
    for lost in losses:
        nodes.bring_back(but=lost)
        assert restored(options) == 1


def test_slot_and_copy_that_are_damaged_in_the_same_block_are_left_as_they_are_and_saves_go_on(
    options: dict[str, Any], nodes: Nodes, hold_at: Callable[[str], Hold], caplog: pytest.LogCaptureFixture
) -> None:
    options |= {"redundancy": "copy", "strict": True}
    count, whole = saved(options, nodes, hold_at, [("own", 1, "second"), ("copy", 1, "second")])
    assert count == dict(zip(COUNTED, (2, 0, 0, 3 * SIZE, 0), strict=True))
    assert whole.count(False) == 2 and len(whole) == 2 * SIZE  # sealed as before
    if RANK == 0:
        assert "step 1: the slots of ranks [1] stay damaged" in caplog.text


def test_without_redundancy_or_where_a_share_is_damaged_it_is_said_and_left(
    options: dict[str, Any], nodes: Nodes, root: Path
) -> None:
    for more, kind in (({"redundancy": "none"}, "own"), ({"replicated": True}, "share")):
        with Checkpointer(**options, strict=True, **more) as ckpt:
            alike = {"w": np.arange(200_000.0), "step": 1}
            ckpt.save(1, alike).wait()
            path, header = slot(nodes.root, kind, 1, 1)
            nodes.on_rank_0(lambda path=path, header=header: damage_at(path, header, "first"))
            wait_found(ckpt, 1)
            before = COMM.bcast(path.read_bytes())
            ckpt.save(2, alike | {"step": 2}).wait()
            after = COMM.bcast(path.read_bytes())  # the next save may write it
            assert after[4096 : len(before)] == before[4096:]
            ckpt.save(3, alike | {"step": 3}).wait()
            assert COMM.allreduce(counts(ckpt).get("files made again", 0)) == 0
        nodes.on_rank_0(lambda: [shutil.rmtree(path) for path in root.glob("node*/mlflash-*")])


def test_the_event_log_has_each_finding_and_what_was_repaired(
    options: dict[str, Any], nodes: Nodes, root: Path
) -> None:
    log = root / "events.jsonl"
    options |= {"redundancy": SCHEME, "strict": True, "log": str(log)}
    with Checkpointer(**options) as ckpt:
        ckpt.save(1, state_at(1)).wait()
        path, header = slot(nodes.root, "own", 1, 1)
        nodes.on_rank_0(lambda: damage_at(path, header, "blocks"))
        wait_found(ckpt, 1)
        ckpt.save(2, state_at(2)).wait()
    COMM.Barrier()
    lines = [json.loads(line) for file in root.glob("events*.jsonl") for line in file.read_text().splitlines()]
    (damage,) = (line for line in lines if line["event"] == "damage")
    wanted = {"file": path.name, "kind": "own", "step": 1, "of": 1, "block": 0, "rank": 1}
    assert {name: damage[name] for name in wanted} == wanted
    (repair,) = (line for line in lines if line["event"] == "repair")
    wanted = {"step": 1, "blocks": 2, "made": 0, "left": 0, "rank": 1}
    assert {name: repair[name] for name in wanted} == wanted and repair["seconds"] >= 0
