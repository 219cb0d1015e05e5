"""The slot's bytes: pinned by a golden file, checked in every place; a hostile manifest is refused. See test_codecs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlflash import errors
from mlflash.memory.copy_threads import ALONE
from mlflash.memory.shared_memory_segment import create
from mlflash.memory.slot import COMMIT_START, RESTORES_START, Attempt, Header, Slot, read_header, read_record
from mlflash.protect.transfer import Source
from mlflash.save.stage import Staging
from mlflash.state import layout, manifest
from mlflash.state.flatten import flatten

GOLDEN = Path(__file__).with_name("golden-slot-v1.bin")


def golden_state() -> dict[str, Any]:
    return {
        "weights": np.arange(300, dtype="<f4").reshape(3, 100),
        "mask": np.array([True, False, True]),
        "step": 12,
        "nested": {"lr": 0.1, "names": ["a", "ß"], 3: (None, True, b"\x00\xff")},
    }


def write_slot(memory: Any, state: Any) -> Slot:
    stage = Staging(ALONE, 10.0)
    flat = flatten(state)
    plan = stage.plan(flat)
    slot = Slot(create(memory, plan.layout.extents.nbytes))
    slot.segment.prefault()
    stage.copy(flat, plan, slot)

    def seal(check: int) -> Header:
        return Header(Attempt(bytes(range(16)), 5), 12, 1, 4, 0, 1, len(plan.manifest), plan.layout.extents, check,
                      1_700_000_000_000_000_000, "node-a", "copy", "run42", (1, 3))  # fmt: skip

    Source(slot, plan.layout.extents, seal).seal()
    slot.record_commit(slot.header.attempt, 12)
    slot.view[COMMIT_START + 40 : COMMIT_START + 64] = 0  # the time of the commit differs each time
    return slot


def test_the_format_is_the_golden_one(node_memory: Any) -> None:
    slot = write_slot(node_memory, golden_state())
    raw = slot.view[: slot.header.extents.nbytes].tobytes()
    if not GOLDEN.exists():
        GOLDEN.write_bytes(raw)
    assert raw == GOLDEN.read_bytes(), "the slot format changed: raise header.VERSION and write a new golden file"


def test_the_golden_file_reads_as_documented() -> None:
    raw = np.frombuffer(GOLDEN.read_bytes(), dtype=np.uint8)
    header = read_header(raw)
    assert header is not None
    assert (header.step, header.rank, header.world_size, header.node, header.scheme) == (12, 1, 4, "node-a", "copy")
    assert (header.job, header.group, header.attempt.generation) == ("run42", (1, 3), 5)
    document = json.loads(raw[4096 : 4096 + header.manifest_nbytes].tobytes())
    assert document["entries"][0] == ["weights", "array", "<f4", [3, 100], [0, 0], [3, 100], 0, 1200]
    start = header.extents.payload_start
    assert raw[start : start + 1200].view("<f4").tolist() == list(range(300))


@pytest.mark.parametrize("block_nbytes", [4096, 1 << 20])
def test_a_flipped_bit_anywhere_in_body_or_table_is_found(
    node_memory: Any, block_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "BLOCK_NBYTES", block_nbytes)
    slot = write_slot(node_memory, {"a": np.random.default_rng(0).bytes(20_000), "b": np.ones(30_000)})
    slot.verify()
    extents = slot.header.extents
    places = [4096, 4096 + slot.header.manifest_nbytes - 1, extents.payload_start, 4096 + extents.body_nbytes - 1,
              extents.table_start, extents.table_start + extents.blocks * 8 - 1]  # fmt: skip
    for place in places:
        slot.view[place] ^= 16
        with pytest.raises(errors.CorruptSlot, match="damaged") as caught:
            slot.verify()
        assert (caught.value.rank, caught.value.step) == (1, 12)
        slot.view[place] ^= 16
    slot.verify()


def test_the_commit_record_belongs_to_one_attempt(node_memory: Any) -> None:
    slot = write_slot(node_memory, {"a": 1})
    attempt = slot.header.attempt
    slot.record_commit(attempt, 12)
    assert slot.committed
    page = slot.view[:4096].tobytes()
    for other in (Attempt(attempt.run_id, attempt.generation + 1), Attempt(bytes(16), attempt.generation)):
        assert read_record(page, COMMIT_START, other) is None
    slot.record_restores(attempt, 3)
    page = slot.view[:4096].tobytes()
    assert read_record(page, RESTORES_START, attempt) == 3
    assert read_record(page, COMMIT_START, attempt) == 12
    slot.view[COMMIT_START + 20] ^= 1
    assert not slot.committed
    slot.unseal()
    assert not slot.committed and read_header(slot.view) is None


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "Expecting value"),
        (b'{"entries":[["a","tensor","float32",[4],[2],[4],0,16]],"tree":["e",0],"plain":[]}', "not inside its tensor"),
        (b'{"entries":[["a","array","|O",[4],[0],[4],0,32]],"tree":["e",0],"plain":[]}', "not allowed"),
        # NumPy evaluates parts of a dtype.
        (b'{"entries":[["a","array","(01)i4",[1],[0],[1],0,4]],"tree":["e",0],"plain":[]}', "not allowed"),
        (b'{"entries":[],"tree":["p",0],"plain":[["n","1 1","AAE="]]}', "not allowed"),
        (b'{"entries":[],"tree":["p",0],"plain":[["n","<f4",""]]}', "IndexError"),
        (b'{"entries":[],"tree":["p",0],"plain":[NaN]}', "not JSON"),
        (b'{"entries":[],"tree":' + b'["o",' * 5000 + b'["p",0]' + b"]" * 5000 + b',"plain":[1]}', ""),
    ],
)
def test_a_hostile_manifest_is_refused_with_its_reason(raw: bytes, reason: str) -> None:
    with pytest.raises(errors.CorruptSlot, match="the manifest is damaged") as caught:
        manifest.decode(raw, 512)
    assert reason in str(caught.value)
