"""What lies in a directory of drained checkpoints: who writes what, retention. Bytes: test_codecs."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from mlflash import errors
from mlflash.config import Config
from mlflash.drain import checkpoint_directory, index, rank_content
from mlflash.drain.checkpoint_directory import Listed
from mlflash.drain.index import CARD_NBYTES, Card
from mlflash.memory.slot import Attempt, Verdict
from mlflash.state.leaves import Entry
from mlflash.storage.store import Directory

RUN = bytes(range(16))
MIB = 1 << 20

# Cards

CARD = Card(
    Attempt(RUN, 5), 12, 3, 8, 70_000, 60_000, 10_000, 0x0123456789ABCDEF, 1_700_000_000_000_000_000, "0:ab:job"
)
CHECKED_NBYTES = 272  # of the card; zeros follow


def test_the_bytes_of_a_card_are_the_golden_ones() -> None:
    expected = (
        b"MLFDRAIN" + b"\1\0" b"\0\0" b"\0\0\0\0"  # version, master
        + RUN + (5).to_bytes(8, "little") + (12).to_bytes(8, "little")
        + (3).to_bytes(4, "little") + (8).to_bytes(4, "little")
        + b"".join(n.to_bytes(8, "little") for n in (70_000, 60_000, 10_000, CARD.index_check, CARD.unix_ns))
        + b"0:ab:job".ljust(96, b"\0")
    )  # fmt: skip
    expected += xxhash.xxh3_64_intdigest(expected).to_bytes(8, "little")
    assert len(expected) < CHECKED_NBYTES
    assert CARD.pack() == expected.ljust(CARD_NBYTES, b"\0"), "the card changed: raise index.VERSION"
    assert dataclasses.replace(CARD, rank=-1).pack()[10:12] == b"\1\0"


@pytest.mark.parametrize(
    "wrong",
    [{"rank": 8}, {"world_size": 0, "rank": 0}, {"index_start": 60_001}, {"index_nbytes": 2**64 - 1}],
)
def test_a_card_that_contradicts_itself_is_refused_though_its_checksum_is_right(wrong: dict[str, int]) -> None:
    with pytest.raises(errors.CorruptSlot, match="contradict"):
        index.read_card(dataclasses.replace(CARD, **wrong).pack())


def test_the_longest_name_of_a_job_fits_into_a_card_whole() -> None:
    owners = {Config(job="j" * 63 + last, directory="/d").owner for last in "ab"}
    packed = {index.read_card(dataclasses.replace(CARD, owner=owner).pack()).owner for owner in owners}
    assert packed == owners
    longest = f"{2**32 - 1}:{'0' * 8}:{'j' * 64}"
    assert index.read_card(dataclasses.replace(CARD, owner=longest).pack()).owner == longest


# The file that commits


def write_master(store: Directory, folder: str, text: bytes, *, step: int = 1, generation: int = 1, owner: str = "me",
                 run_id: bytes = RUN, world_size: int = 1, name: str = "checkpoint.h5") -> Listed:  # fmt: skip
    card = Card(Attempt(run_id, generation), step, -1, world_size, CARD_NBYTES + len(text), CARD_NBYTES, len(text),
                xxhash.xxh3_64_intdigest(text), 0, owner)  # fmt: skip
    inside = store.at(folder)
    inside.make()
    inside.write(name, [card.pack(), text])
    return Listed(folder, name, card)


# Who writes what

shapes = st.lists(st.one_of(st.integers(1, 5), st.integers(1, 5000)), max_size=3).map(tuple)


@settings(max_examples=150, deadline=None)
@given(shapes=st.lists(shapes, max_size=12), ranks=st.integers(1, 9))
def test_parts_are_disjoint_cover_everything_and_are_balanced(shapes: list[tuple[int, ...]], ranks: int) -> None:
    entries = [
        Entry(str(n), "tensor", "float32", shape, (0,) * len(shape), shape, 0, 4 * math.prod(shape))
        for n, shape in enumerate(shapes)
    ]
    dealt = [list(rank_content.divide(entries, ranks, nth)) for nth in range(ranks)]
    assert dealt == [list(rank_content.divide(entries, ranks, nth)) for nth in range(ranks)]
    for number, entry in enumerate(entries):
        rows = entry.shape[0] if entry.shape else 1
        taken = [row for parts in dealt for n, begin, end in parts if n == number for row in range(begin, end)]
        assert taken == list(range(rows)), "each row once, in the order of the ranks"
    loads = [sum(rank_content.part_of(entries[n], *rows).nbytes for n, *rows in parts) for parts in dealt]
    total = sum(entry.nbytes for entry in entries)
    assert sum(loads) == total
    units = [e.nbytes // e.shape[0] if e.nbytes >= MIB and e.shape[0] > 1 else e.nbytes for e in entries if e.nbytes]
    assert all(abs(load - total / ranks) <= max(units, default=0) + 1 for load in loads)


# Which checkpoints there are, and which may be deleted


def put_rank(store: Directory, folder: str, name: str = "rank-00000.h5", *, owner: str = "me", run_id: bytes = RUN,
             generation: int = 1) -> None:  # fmt: skip
    inside = store.at(folder)
    inside.make()
    inside.write(name, [dataclasses.replace(CARD, owner=owner, attempt=Attempt(run_id, generation)).pack()])


def commit(store: Directory, folder: str, step: int, generation: int, owner: str = "me", run_id: bytes = RUN,
           name: str = "checkpoint.h5") -> Listed:  # fmt: skip
    put_rank(store, folder, owner=owner, run_id=run_id, generation=generation)
    return write_master(store, folder, b"{}", step=step, generation=generation, owner=owner, run_id=run_id, name=name)


def tree(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir())


def test_the_newest_is_the_one_of_the_largest_generation_whatever_its_step(tmp_path: Path) -> None:
    store = Directory(str(tmp_path))
    for folder, step, generation in (("step-00000005", 5, 1), ("step-00000003", 3, 9), ("step-00000003.1", 3, 12),
                                     ("step-123456789", 123_456_789, 10)):  # fmt: skip
        commit(store, folder, step, generation)
    assert [(checkpoint.folder, checkpoint.step) for checkpoint in checkpoint_directory.list_checkpoints(store)] == [
        ("step-00000003.1", 3), ("step-123456789", 123_456_789), ("step-00000003", 3), ("step-00000005", 5)
    ]  # fmt: skip


def test_what_is_no_committed_checkpoint_is_passed_over(tmp_path: Path) -> None:
    store = Directory(str(tmp_path))
    wanted = commit(store, "step-00000001", 1, 1)
    put_rank(store, "step-00000002")  # not committed
    commit(store, "step-3", 3, 3)
    commit(store, "step-00000004.old", 4, 4)
    (tmp_path / "step-00000005").write_text("a file")
    (tmp_path / "step-00000006").mkdir()
    (tmp_path / "step-00000006" / "checkpoint.h5").write_bytes(b"")
    (tmp_path / "step-00000007" / "checkpoint.h5").mkdir(parents=True)
    (tmp_path / "step-00000008").mkdir()
    os.mkfifo(tmp_path / "step-00000008" / "checkpoint.h5")  # must not be waited for
    (tmp_path / "step-00000009").mkdir()
    shutil.copy(tmp_path / "step-00000001" / "rank-00000.h5", tmp_path / "step-00000009" / "checkpoint.h5")
    assert checkpoint_directory.list_checkpoints(store) == [wanted]
    assert checkpoint_directory.list_checkpoints(Directory(str(tmp_path / "nowhere"))) == []


def test_links_are_not_followed_when_reading_or_deleting(tmp_path: Path) -> None:
    store, outside = Directory(str(tmp_path / "d")), Directory(str(tmp_path / "outside"))
    listed = commit(outside, "step-00000001", 1, 7)
    wanted = commit(store, "step-00000002", 2, 2)
    (tmp_path / "d" / "step-00000001").symlink_to(tmp_path / "outside" / "step-00000001")
    (tmp_path / "d" / "step-00000003").mkdir()
    for name in ("checkpoint.h5", "rank-00000.h5"):
        (tmp_path / "d" / "step-00000003" / name).symlink_to(tmp_path / "outside" / "step-00000001" / name)
    put_rank(outside, "step-00000004", run_id=bytes(16))
    (tmp_path / "d" / "step-00000004").symlink_to(tmp_path / "outside" / "step-00000004")
    before = tree(tmp_path)
    assert checkpoint_directory.list_checkpoints(store) == [wanted]
    checkpoint_directory.delete_leftovers(store, "me", b"x" * 16)
    with pytest.raises(errors.UnsafePath, match="not followed"):
        checkpoint_directory.delete(store, listed)
    assert tree(tmp_path) == before
    assert [checkpoint_directory.new_folder(store, step) for step in (1, 4)] == ["step-00000001.1", "step-00000004.1"]
    for name in ("checkpoint.h5", "rank-00000.h5"):
        with pytest.raises(OSError, match="not followed"):
            store.at("step-00000003").read(name)
        with pytest.raises(errors.UnsafePath):
            store.at("step-00000001").read(name)


@contextlib.contextmanager
def somebody_else(folder: Path) -> Iterator[None]:
    """Be a user who may not look into a folder."""
    if os.geteuid() == 0:
        os.seteuid(12_345)
        try:
            yield
        finally:
            os.seteuid(0)
    else:
        folder.chmod(0)
        try:
            yield
        finally:
            folder.chmod(0o700)


def test_a_folder_of_another_user_is_passed_over_and_is_in_nobodys_way(shm: Path) -> None:
    store = Directory(str(shm))
    commit(store, "step-00000003", 3, 3)  # 0700, as mlflash makes them
    shm.chmod(0o777)
    with somebody_else(shm / "step-00000003"):
        own = commit(store, "step-00000001", 1, 1)
        assert checkpoint_directory.list_checkpoints(store) == [own]
        checkpoint_directory.delete_leftovers(store, "me", b"x" * 16)
        assert checkpoint_directory.new_folder(store, 3) == "step-00000003.1"
        checkpoint_directory.delete(store, own)
    assert tree(shm) == ["step-00000003/checkpoint.h5", "step-00000003/rank-00000.h5"]


def model(listed: Sequence[Listed], owner: str, keep_last: int, keep_every: int) -> set[str]:
    """Which folders stay, said once more and simply."""
    if not keep_last:
        return {checkpoint.folder for checkpoint in listed}
    stays = {checkpoint.folder for checkpoint in listed if checkpoint.card.owner != owner}
    own = sorted(
        (checkpoint for checkpoint in listed if checkpoint.card.owner == owner), key=lambda checkpoint: checkpoint.age
    )
    newest = {checkpoint.step: checkpoint for checkpoint in own if checkpoint.verdict is not Verdict.BAD}
    ranked = sorted(newest.values(), key=lambda checkpoint: checkpoint.age)
    stays |= {checkpoint.folder for checkpoint in ranked[-keep_last:]}
    for checkpoint in own:
        newer = [another for another in ranked if another.age > checkpoint.age]
        if checkpoint.verdict is Verdict.BAD and len(newer) < keep_last:
            stays.add(checkpoint.folder)
    return stays | {checkpoint.folder for checkpoint in ranked if keep_every and checkpoint.step % keep_every == 0}


drained = st.tuples(
    st.integers(0, 12), st.sampled_from(["me", "other"]), st.sampled_from([Verdict.PASSED, Verdict.BAD])
)


@settings(max_examples=150, deadline=None)
@given(
    history=st.lists(drained, max_size=14),
    order=st.randoms(),
    keep_last=st.integers(0, 4),
    keep_every=st.integers(0, 4),
)
def test_what_is_surplus_is_what_a_simple_model_says(
    history: list[tuple[int, str, Verdict]], order: Any, keep_last: int, keep_every: int
) -> None:
    listed = [
        Listed(
            str(n),
            "checkpoint.h5",
            dataclasses.replace(CARD, rank=-1, step=step, owner=owner, attempt=Attempt(RUN, n)),
            verdict,
        )
        for n, (step, owner, verdict) in enumerate(history)
    ]
    order.shuffle(listed)
    surplus = {checkpoint.folder for checkpoint in checkpoint_directory.surplus(listed, "me", keep_last, keep_every)}
    stay = model(listed, "me", keep_last, keep_every)
    assert surplus == {checkpoint.folder for checkpoint in listed} - stay
    own_steps = {
        checkpoint.step
        for checkpoint in listed
        if checkpoint.card.owner == "me" and checkpoint.verdict is not Verdict.BAD
    }
    good = [checkpoint for checkpoint in listed if checkpoint.folder in stay and checkpoint.verdict is not Verdict.BAD]
    assert len(good) >= min(keep_last, len(own_steps)), "so many steps are there to go back to"


class Watched(Directory):
    """Notes what is deleted."""

    def __init__(self, path: str, removed: list[str]):
        super().__init__(path)
        self.removed = removed

    def at(self, name: str) -> Directory:
        return Watched(os.path.join(self.path, name), self.removed)

    def remove(self, name: str) -> None:
        super().remove(name)
        self.removed.append(name)


@pytest.mark.parametrize("committed", [True, False])
def test_of_many_ranks_that_of_pytorch_goes_first_then_all_data_and_the_cards_last(
    tmp_path: Path, committed: bool
) -> None:
    removed: list[str] = []
    store = Watched(str(tmp_path), removed)
    listed = write_master(store, "step-00000001", b"{}", name="checkpoint.mlflash")
    inside = store.at("step-00000001")
    for rank in range(100):
        put_rank(store, "step-00000001", f"rank-{rank:05d}.mlflash")
        inside.write(f"__{rank}_0.distcp", [b"data"])
    inside.write(".metadata", [checkpoint_directory.tag(listed.card.attempt, "me").encode()])
    if committed:
        checkpoint_directory.delete(store, listed)
        assert removed.pop(0) == "checkpoint.mlflash"
    else:
        (tmp_path / "step-00000001" / "checkpoint.mlflash").unlink()
        checkpoint_directory.delete_leftovers(store, "me", b"y" * 16)
    assert removed[0] == ".metadata"
    assert sorted(removed[1:101]) == sorted(f"__{rank}_0.distcp" for rank in range(100))
    assert sorted(removed[101:]) == [f"rank-{rank:05d}.mlflash" for rank in range(100)]
    assert list(tmp_path.iterdir()) == []


def test_only_what_interrupted_drains_of_earlier_runs_of_this_job_left_is_deleted(tmp_path: Path) -> None:
    store = Directory(str(tmp_path))
    earlier, now = bytes(16), RUN

    def temporary(name: str, run_id: bytes, owner: str) -> str:
        return f".{name}.{checkpoint_directory.tag(Attempt(run_id, 1), owner)}.tmp"

    leftovers = {
        "step-00000001": ["rank-00000.h5", "rank-00001.h5", temporary("rank-00002.h5", earlier, "me")],
        "step-00000002": [temporary("rank-00000.h5", earlier, "me")],
    }
    for folder, names in leftovers.items():
        for name in names:
            put_rank(store, folder, name, run_id=earlier)
    (tmp_path / "step-00000002" / leftovers["step-00000002"][0]).write_bytes(b"")  # no card yet
    put_rank(store, "step-00000003", "rank-00000.mlflash", run_id=earlier)
    store.at("step-00000003").write("__0_0.distcp", [b"data"])
    store.at("step-00000003").write(temporary("__1_0.distcp", earlier, "me"), [b"data"])
    store.at("step-00000003").write(".metadata", [checkpoint_directory.tag(Attempt(earlier, 1), "me").encode()])
    gone = tree(tmp_path)
    # These stay.
    commit(store, "step-00000004", 4, 1, run_id=earlier)
    store.at("step-00000004").write(temporary("rank-00005.h5", earlier, "me"), [b""])
    commit(store, "step-00000005", 5, 1, run_id=earlier, name="checkpoint.mlflash")
    put_rank(store, "step-00000006", run_id=now)
    store.at("step-00000006").write(temporary("rank-00001.h5", now, "me"), [b""])
    put_rank(store, "step-00000007", run_id=earlier, owner="other")
    store.at("step-00000007").write(temporary("rank-00001.h5", earlier, "other"), [b""])
    (tmp_path / "step-00000007" / "__0_0.distcp").write_bytes(b"data without a card")
    put_rank(store, "not a step", run_id=earlier)
    (tmp_path / "step-00000008").write_text("a file")
    (tmp_path / "step-00000001" / "notes.txt").write_text("mine")
    (tmp_path / "step-00000009").mkdir()
    stay = sorted(set(tree(tmp_path)) - set(gone))
    checkpoint_directory.delete_leftovers(store, "me", now)
    assert tree(tmp_path) == stay
    assert not (tmp_path / "step-00000002").exists() and not (tmp_path / "step-00000003").exists()
    assert (tmp_path / "step-00000009").exists() and (tmp_path / "step-00000001").exists()
