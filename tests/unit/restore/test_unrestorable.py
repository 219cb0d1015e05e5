"""Nothing and unusable are two answers; and what a fresh start passes over, keeps and frees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash

from mlflash import Checkpointer, errors
from mlflash.drain.checkpoint_directory import Listed
from mlflash.memory import inventory, memory_limits
from mlflash.memory.inventory import Trace
from mlflash.memory.node_directory import clean
from mlflash.memory.slot import (
    COMMIT_START,
    HEADER_NBYTES,
    MAGIC,
    RECORD_NBYTES,
    Attempt,
    Header,
    any_record,
    unpack,
)
from mlflash.restore import load
from mlflash.restore.open_in_directory import OpenInDirectory
from mlflash.state.layout import Extents

Make = Callable[..., Checkpointer]


@pytest.fixture
def make(shm: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes Checkpointers of one job, of this process alone."""
    monkeypatch.delenv("MLFLASH_FRESH", raising=False)
    made: list[Checkpointer] = []

    def start(directory: Path | None = None, **settings: Any) -> Checkpointer:
        for checkpointer in made:
            checkpointer.close()
        made.append(Checkpointer(directory, **{"job": "j", "memory": str(shm), "redundancy": "none", **settings}))
        return made[-1]

    yield start
    for checkpointer in made:
        checkpointer.close()


def state_at(step: int) -> dict[str, Any]:
    return {"w": np.full(10_000, step), "step": step}


def save(ckpt: Checkpointer, *steps: int) -> None:
    for step in steps:
        assert ckpt.save(step, state_at(step)).wait().committed
    ckpt.close()


def restored(ckpt: Checkpointer) -> int | None:
    state = state_at(0)
    step = ckpt.restore(state)
    assert state["step"] == (step or 0) and (state["w"] == (step or 0)).all()
    return step


def slots(shm: Path) -> dict[Path, bytes]:
    """The slots that hold something."""
    content = {path: path.read_bytes() for path in sorted(shm.glob("mlflash-*/j/slot-*"))}
    return {path: raw for path, raw in content.items() if raw[:8] == MAGIC}


def change(path: Path, at: int, new: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(new)


def save_newer_than_drained(make: Make, pfs: Path) -> None:
    """Drain step 1, and have only the steps 2 and 3 in memory."""
    ckpt = make(pfs)
    ckpt.save(1, state_at(1)).wait()
    ckpt.drain().wait()
    save(ckpt, 2, 3)


def spoil(shm: Path, receipts: bool = True, payload: bool = True) -> None:
    """Damage all slots, and erase what says that they were committed."""
    for path, raw in slots(shm).items():
        if payload:
            change(path, unpack(raw[:HEADER_NBYTES]).extents.payload_start + 100, b"\xff\xfe")
        if not receipts:
            change(path, COMMIT_START, bytes(RECORD_NBYTES))


def test_what_was_committed_and_cannot_be_restored_is_told_step_by_step_and_left_as_it_is(
    make: Make, shm: Path
) -> None:
    save(make(), 1, 2)
    spoil(shm)
    before = slots(shm)
    ckpt, state = make(reserve=1 << 20), state_at(0)
    for use in (lambda: ckpt.restore(state), ckpt.load, ckpt.adapting.open, ckpt.adapting.newest_step):
        with pytest.raises(errors.Unrestorable, match="none of them can be restored: nothing was deleted") as caught:
            use()
        assert list(caught.value.reasons) == [2, 1] and all(
            "are damaged" in why for why in caught.value.reasons.values()
        )
        assert "slot-000" in caught.value.reasons[1] and caught.value.reasons[1] in str(caught.value)
    with pytest.raises(errors.StepNotFound, match=r"step exists but cannot be restored: slot-\d+ on .*are damaged"):
        ckpt.restore(state, step=1)
    with pytest.raises(errors.StepNotFound, match="this step cannot be restored"):
        ckpt.restore(state, step=7)
    assert (state["w"] == 0).all()
    ckpt.close()
    assert slots(shm) == before


def test_the_time_to_find_a_checkpoint_counts_each_damaged_one_once(
    make: Make, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0

    class Opened(OpenInDirectory):
        def __init__(self, world: Any, store: Any, listed: Listed, broadcast: Any):
            nonlocal now_s
            now_s += 2.0**listed.step
            if listed.step > 1:
                raise errors.CorruptSlot("a file is damaged")
            super().__init__(world, store, listed, broadcast)

    ckpt = make(tmp_path)
    for step in (1, 2, 3):
        ckpt.save(step, state_at(step)).wait()
        ckpt.drain().wait()
    ckpt.close()
    clean(str(shm), "j")
    monkeypatch.setattr(load, "OpenInDirectory", Opened)
    monkeypatch.setattr(load, "time", SimpleNamespace(perf_counter=lambda: now_s))
    ckpt = make(tmp_path)
    assert restored(ckpt) == 1 and ckpt.report()["seconds"]["find and fetch"] == 2.0 + 4.0 + 8.0


def test_who_goes_on_all_the_same_frees_it_with_the_first_commit_only(make: Make, shm: Path) -> None:
    save(make(), 1, 2)
    spoil(shm)
    before = slots(shm)
    ckpt = make()
    with pytest.raises(errors.Unrestorable):
        ckpt.restore(state_at(0))
    ckpt.prepare(state_at(0))
    assert {path: raw for path, raw in slots(shm).items() if path in before} == before
    save(ckpt, 3)
    assert not {*before} & {*slots(shm)} and restored(make()) == 3


def test_a_first_save_that_died_before_any_receipt_is_nothing_and_is_said(
    make: Make, shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(make(), 1)
    spoil(shm, receipts=False)
    assert restored(make()) is None and "parts of step 1, whose first save did not end" in caplog.text


def test_what_was_agreed_on_is_restored_without_a_receipt_and_then_counts_as_committed(make: Make, shm: Path) -> None:
    save(make(), 1)
    spoil(shm, receipts=False, payload=False)
    assert restored(make()) == 1
    make().close()
    assert all(any_record(raw, COMMIT_START) for raw in slots(shm).values()), "the reprotection has written none"
    spoil(shm, receipts=False)  # that of the restore is there still
    with pytest.raises(errors.Unrestorable):
        make().load()


def test_a_directory_that_cannot_be_read_is_no_empty_one(make: Make, tmp_path: Path) -> None:
    assert restored(make(tmp_path / "not there yet")) is None
    (tmp_path / "file").touch()
    with pytest.raises(errors.Unrestorable, match=r"file cannot be read: .*, and memory has nothing") as caught:
        make(tmp_path / "file").restore(state_at(0))
    assert caught.value.reasons == {}


@pytest.mark.parametrize("what", ["card", "data"])
def test_damaged_checkpoints_of_the_directory_are_told_one_by_one(make: Make, tmp_path: Path, what: str) -> None:
    ckpt = make(tmp_path / "pfs", drain_every=1)
    for step in (1, 2):
        ckpt.save(step, state_at(step)).wait()
        ckpt.wait_drained()
    save(ckpt)
    for folder in (tmp_path / "pfs").glob("step-*"):
        damaged = folder / ("checkpoint.mlflash" if what == "card" else "__0_0.distcp")
        change(damaged, 100 if what == "card" else damaged.stat().st_size - 100, b"\xff" * 9)
    ckpt = make(job="other")
    for _ in range(2):
        with pytest.raises(errors.Unrestorable) as caught:
            ckpt.restore(state_at(0), source=tmp_path / "pfs")
        assert {step: why.split(":")[0] for step, why in caught.value.reasons.items()} == {
            1: "step-00000001", 2: "step-00000002"
        }  # fmt: skip
        assert all("damaged" in why for why in caught.value.reasons.values())


def test_a_fresh_start_passes_over_memory_and_directory_and_its_relaunches_go_on(
    make: Make, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pfs = tmp_path / "pfs"
    ckpt = make(pfs, drain_every=1)
    save(ckpt, 10, 20)
    before, drained = slots(shm), sorted(pfs.rglob("*"))
    monkeypatch.setenv("MLFLASH_FRESH", "1")
    ckpt = make(pfs)
    assert restored(ckpt) is None and ckpt.steps() == [] and slots(shm).items() >= before.items()
    with pytest.raises(errors.StepNotFound):
        ckpt.restore(state_at(0), step=20)
    ckpt.close()  # and dies before its first commit
    ckpt = make(pfs)
    assert restored(ckpt) is None and slots(shm).items() >= before.items()
    save(ckpt, 1)
    assert not {*before} & {*slots(shm)} and sorted(pfs.rglob("*")) == drained
    assert restored(make(pfs)) == 1
    save(make(pfs, drain_every=1), 2)
    for path in slots(shm):
        path.unlink()
    assert restored(make(pfs)) == 2, "from the directory, which has newer steps of before"
    assert restored(make(pfs, fresh="another")) is None
    for path in slots(shm):
        path.unlink()
    assert restored(make(pfs, fresh="a third")) is None, "nothing but the directory says what was before"
    monkeypatch.delenv("MLFLASH_FRESH")
    assert restored(make(pfs)) == 2  # generations go on: it is newer than step 20


def test_a_fresh_start_is_no_answer_to_what_came_of_it_and_is_lost(make: Make, shm: Path) -> None:
    save(make(), 10)
    ckpt = make(fresh=True)
    save(ckpt, 1)
    spoil(shm)
    with pytest.raises(errors.Unrestorable) as caught:
        make(fresh=True).restore(state_at(0))
    assert [*caught.value.reasons] == [1]
    assert restored(make(fresh="2")) is None


@pytest.fixture
def small(shm: Path, in_couriers: Callable[[str], None]) -> Callable[[], None]:
    """Lets memory be so small that it has room for nothing besides the slots that are there."""

    def shrink() -> None:
        held = sum(path.stat().st_size for path in shm.glob("mlflash-*/j/slot-*"))
        expression = (
            f"{held + memory_limits.headroom(held)} - sum(slot.stat().st_size for slot in Path(path).glob('slot-*'))"
        )
        in_couriers("from pathlib import Path; from mlflash.commit import courier_state; "
                    f"courier_state.available = lambda path: {{'tmpfs': {expression}}}")  # fmt: skip

    return shrink


def test_where_there_is_no_room_for_both_the_old_slots_go_at_once_and_it_is_said(
    make: Make, shm: Path, small: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    save(make(), 1, 2)
    small()
    before = slots(shm)
    assert restored(make(fresh=True)) is None and not before.items() & slots(shm).items()
    assert "memory has no room for the slots of this run and for" in caplog.text


@pytest.mark.parametrize("how", ["format", "payload"])
def test_newer_steps_in_memory_that_a_restore_from_the_directory_loses_are_named_and_kept_until_a_commit(
    make: Make, shm: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """As where a newer version cannot read the slots of an older one: its user can still go back to that."""
    pfs = tmp_path / "pfs"
    save_newer_than_drained(make, pfs)
    if how == "payload":
        spoil(shm)
    if how == "format":
        in_another_format(slots(shm))
    before = slots(shm)
    ckpt = make(pfs)
    assert restored(ckpt) == 1
    (message,) = [text for text in caplog.messages if "memory has newer steps that cannot be restored" in text]
    why = "written in another format" if how == "format" else "are damaged"
    assert "step 3: " in message and "step 2: " in message and why in message and "step 1 of " in message
    assert message.endswith("it would continue from step 1 and overwrite them")
    assert before.items() <= slots(shm).items(), "until this run has committed"
    save(ckpt, 4)
    assert not before.items() & slots(shm).items() and restored(make(pfs)) == 4


def in_another_format(changed: dict[Path, bytes]) -> None:
    """Change the format version of these slots."""
    for path, raw in changed.items():
        body = raw[:8] + (99).to_bytes(2, "little") + raw[10 : HEADER_NBYTES - 8]
        change(path, 0, body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little"))


def test_each_start_before_the_next_commit_keeps_newer_steps_of_another_format(
    make: Make, shm: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first start puts step 1 of the directory into memory, and the second one finds it there."""
    pfs = tmp_path / "pfs"
    save_newer_than_drained(make, pfs)
    in_another_format(slots(shm))
    before = slots(shm)
    assert restored(make(pfs)) == 1
    for _ in range(2):
        caplog.clear()
        ckpt = make(pfs)
        assert restored(ckpt) == 1 and before.items() <= slots(shm).items()
        assert caplog.text.count("steps that cannot be read (2, 3). They are newer than step 1, the newest that") == 1
    save(ckpt, 4)
    assert not before.items() & slots(shm).items()
    caplog.clear()
    assert restored(make(pfs)) == 4 and "cannot be read" not in caplog.text


@pytest.mark.parametrize(("is_whole", "part"), [(True, "payload"), (False, "payload"), (False, "header")])
def test_what_is_unusable_in_memory_gives_way_to_a_whole_checkpoint_of_the_directory_only(
    make: Make, shm: Path, tmp_path: Path, small: Callable[[], None], is_whole: bool, part: str
) -> None:
    pfs = tmp_path / "pfs"
    save_newer_than_drained(make, pfs)
    for path in slots(shm) if part == "header" else ():
        change(path, 40, b"\xff")
    spoil(shm, payload=part == "payload")
    small()
    before = slots(shm)
    if is_whole:
        assert restored(make(pfs)) == 1 and not before.items() & slots(shm).items()
        return
    data = pfs / "step-00000001" / "__0_0.distcp"
    change(data, data.stat().st_size - 100, b"\xff" * 9)
    with pytest.raises(errors.Unrestorable) as caught:
        make(pfs).restore(state_at(0))
    assert [*caught.value.reasons] == [3, 2, 1] and slots(shm) == before


# What is told of lost nodes


def trace(rank: int, parities: int) -> Trace:
    """A committed slot of one of four ranks that protect each other; with parities: its parity file."""
    attempt = Attempt(b"r" * 16, 1)
    header = Header(attempt, 1, rank, 4, rank, 0, 0, Extents(0, 0, 4096), 0, 0, f"host{rank}", "copy", "j",
                    (0, 1, 2, 3), parities)  # fmt: skip
    return Trace((rank, parities), attempt, 1, True, header, "")


def test_a_parity_group_that_lost_too_many_is_named() -> None:
    traces = [trace(rank, parities) for parities in (0, 1) for rank in (0, 1)]
    why = inventory.why_unrestorable(traces, {}, ["a", "b"])[1]
    assert "ranks 2-3 of 4" in why and "2 of the 4 ranks 0-3 that protect each other have no slot" in why
    assert "at most 1 may be without" in why
