"""Drains into a directory while processes die and the file system fails, and restores of what is left there.

The ranks do what a list of verbs says (see `follow` in worker.py). mlflash's own readers are used here only to find the
byte that is to be damaged: which checkpoints are committed is told by the files that are there, and their bits are
compared by ranks that know what they must be.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from damage import flip
from harness import Cluster, Launch, Result, own_memory

from mlflash.crash_points import POINTS
from mlflash.drain import index

# Several blocks and chunks per rank.
SMALL = {"MLFLASH_TEST_BLOCK_NBYTES": "16384"}
MASTER, PROVENANCE = "checkpoint.h5", "provenance.json"
MIB = 1 << 20


class Faulty:
    """A directory on a file system that fails as it is told."""

    def __init__(self, library: Path, directory: Path, rules: Path):
        self.directory = directory
        self.env = {**SMALL, "LD_PRELOAD": str(library), "FAULTY_ROOT": str(directory), "FAULTY_RULES": str(rules)}


@pytest.fixture
def faulty(faulty_files: Path, shm: Path) -> Faulty:
    return Faulty(faulty_files, shm / "pfs", shm / "rules")


def begin(cluster: Cluster, place: Path | Faulty, *verbs: Any, ranks: int = 2, nbytes: int = 100_000,
          traps: list[dict[str, Any]] | None = None, **options: object) -> Launch:  # fmt: skip
    """Start ranks that do what verbs say; nothing is drained by itself but at the end."""
    directory, env = (place.directory, place.env) if isinstance(place, Faulty) else (place, SMALL)
    options = {"drain_every": 1000, "format": "hdf5", "directory": str(directory), **options}
    return cluster.begin(ranks, env, program="follow", verbs=verbs, nbytes=nbytes, traps=traps or [], options=options)


def follow(cluster: Cluster, place: Path | Faulty, *verbs: Any, **more: Any) -> Result:
    return begin(cluster, place, *verbs, **more).wait()


def files_of(step: int, ranks: int) -> set[str]:
    """The files of a whole checkpoint."""
    names = [MASTER, PROVENANCE, "verdict", *(f"rank-{rank:05d}.h5" for rank in range(ranks))]
    return {f"step-{step:08d}/{name}" for name in names}


def files_in(directory: Path) -> set[str]:
    """The files of a directory, temporary ones too."""
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def committed_in(directory: Path) -> set[int]:
    """The steps whose checkpoints are committed in a directory."""
    return {int(path.parent.name[5:13]) for path in directory.glob(f"step-*/{MASTER}")}


def restored(result: Result) -> set[tuple[int | None, str]]:
    """What the ranks restored, and which bits were wrong."""
    return {(r["step"], str(r["wrong"])) for r in result.of("restored")}


def checked(result: Result) -> set[tuple[int, str]]:
    """The steps that ranks loaded from the directory, and which bits were wrong."""
    return {(r["step"], str(r["wrong"])) for r in result.of("checked")}


def lose_memory(cluster: Cluster) -> None:
    """Lose the memory of all nodes."""
    shutil.rmtree(cluster.node(0).parent)


# Crashes


@dataclasses.dataclass(frozen=True)
class Case:
    point: str
    of_master: bool  # while the file that commits the checkpoint is written, not that of a rank
    dies: str  # rank | node | wipe
    who: int  # rank that dies, or whose node does; -1: whoever comes first
    layout: tuple[int, int]  # ranks, ranks per node
    busy: bool  # saves go on meanwhile

    def __str__(self) -> str:
        who = "first to come" if self.who < 0 else f"rank {self.who}"
        what = f"{self.point} of the master" if self.of_master else self.point
        return f"{what}-{self.dies} of {who}-{self.layout[0]}x{self.layout[1]}" + ("-busy" if self.busy else "")

    @property
    def path(self) -> list[str]:
        """The points that lead to the crash, in the second drain."""
        return ["drain.ended", *(["drain.committing"] if self.of_master else []), self.point]

    @property
    def is_committed(self) -> bool:
        """Whether the checkpoint in flight is whole in the directory: where its master is."""
        late = list(POINTS).index(self.point) >= list(POINTS).index("drain.committed")
        return late or (self.of_master and self.point == "drain.file_renamed")


# test_each_point.py kills a rank at each point. Here each way to die, each layout and each rank is there at least once,
# with saves that go on and without, and a kill while the master is written.
CASES = [
    Case("drain.file_written", False, "node", -1, (2, 1), True),
    Case("drain.file_renamed", True, "rank", 0, (3, 1), False),
    Case("drain.verified", False, "wipe", 1, (2, 2), True),
]


@pytest.fixture(scope="module")
def of_another(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory that another job drained its step 1 to."""
    directory = tmp_path_factory.mktemp("another")
    with own_memory() as root:
        result = follow(Cluster(root, job="another"), directory, ["save"])
    assert files_in(directory) == files_of(1, 2), result.log
    return directory


def put_foreign_files(directory: Path, of_another: Path) -> None:
    """Fill a directory with what the job that is tested did not write, some of it much like its own."""
    shutil.copytree(of_another, directory)
    shutil.copytree(directory / "step-00000001", directory / "step-00000077")  # interrupted, by another job
    (directory / "step-00000077" / MASTER).unlink()
    alike = directory / "step-00000077" / f".rank-00001.h5.{'0' * 32}-3.tmp"
    for path in (directory / "notes", directory / "step-00000077" / "rank-00007.h5", alike):
        path.write_text("not written by mlflash")
    (directory / "step-00000078").mkdir()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_crash_while_it_drains_costs_no_checkpoint(shm: Path, of_another: Path, case: Case) -> None:
    ranks, per_node = case.layout
    cluster, directory = Cluster(shm, per_node), shm / "pfs"
    put_foreign_files(shm / "foreign", of_another)
    before = {name: (shm / "foreign" / name).read_bytes() for name in files_in(shm / "foreign")}
    trap = {"path": case.path, "action": case.dies, "rank": case.who}
    drain_again = [["begin_drain"], ["save_while_it_drains"]] if case.busy else [["drain"]]
    put = ["run", f"cp -r {shm}/foreign/. {directory} && touch {directory}/step-00000002/foreign"]
    verbs = [["save", 2], ["drain"], put, ["save", 2], *drain_again, ["save", 200, 0.05]]
    job = begin(cluster, directory, *verbs, traps=[trap], keep_last=1, ranks=ranks)
    crashed = job.wait()
    assert any(job.out.glob("sprung*")) and not crashed.of("end"), crashed.log
    foreign = [directory / f"step-{step:08d}" / "foreign" for step in (2, 4)]
    if foreign[1].parent.exists() and not case.is_committed:
        foreign[1].touch()
    foreign = [path for path in foreign if path.exists()]

    newest = max(r["step"] for r in crashed.of("committed"))
    in_directory = max(committed_in(directory))
    assert in_directory == (4 if case.is_committed else 2)
    kept = shutil.copytree(directory, shm / "kept")
    wiped = case.dies == "wipe" and per_node == ranks  # there was one node only
    for is_lost in (False, True):
        if is_lost:
            shutil.rmtree(directory)
            kept.rename(directory)
            cluster.wipe(*range(ranks // per_node))
        expected = {in_directory} if is_lost or wiped else {newest, newest + case.busy}
        again = [["save"], ["drain"], ["save", 2]]
        result = follow(cluster, directory, *again, ranks=ranks, keep_last=1)
        newest_here = restored(result)
        assert len(newest_here) == 1 and newest_here <= {(step, "[]") for step in expected}, crashed.log + result.log
        assert len(result.of("end")) == ranks and [r["error"] for r in result.of("drain")] == [""] * ranks, result.log
        # The next drain worked, and the one at the end; nothing else of this job is left, and all that others wrote.
        step = newest_here.pop()[0] + 3
        left = {name for name in files_in(directory) if not name.endswith("/foreign")}
        assert left == files_of(step, ranks) | before.keys(), result.log
        assert {name: (directory / name).read_bytes() for name in before} == before
        assert foreign and all(path.exists() for path in [*foreign, directory / "step-00000078"])
        assert not (directory / f"step-{step - 2:08d}").exists()


@pytest.mark.parametrize(
    ("point", "dies", "who"),
    [("drain.dealt", "trainer", 1), ("drain.committing", "courier", 0), ("drain.uncommitted", "trainer", 0)],
)
def test_one_death_while_it_drains_costs_no_checkpoint(shm: Path, point: str, dies: str, who: int) -> None:
    cluster, directory = Cluster(shm), shm / "pfs"
    keep = 1 if point == "drain.uncommitted" else 2
    trap = {"path": ["drain.ended", point], "action": dies, "rank": who}
    verbs = [["save", 2], ["drain"], ["save", 2], ["drain"], ["save", 4], ["drain"]]
    job = begin(cluster, directory, *verbs, traps=[trap], keep_last=keep)
    first = job.wait()
    assert any(job.out.glob("sprung*")), first.log
    newest = max(record["step"] for record in first.of("committed"))
    if dies == "courier":  # training goes on, and so do drains
        assert len(first.of("end")) == 2, first.log
        assert [(record["step"], record["error"]) for record in first.of("drain")[-1:]] == [(newest, "")], first.log
        assert max(committed_in(directory)) == newest == 8
    else:
        is_late = list(POINTS).index(point) >= list(POINTS).index("drain.committed")
        assert newest == 4 and max(committed_in(directory)) in ((4,) if is_late else (2, 4)), first.log
    result = follow(cluster, directory, ["save"], ["drain"], keep_last=keep)
    assert restored(result) == {(newest, "[]")}, first.log + result.log
    assert [record["error"] for record in result.of("drain")] == ["", ""], result.log
    kept = sorted(committed_in(directory))
    assert len(kept) == keep and files_in(directory) == set[str]().union(*(files_of(step, 2) for step in kept))
    lose_memory(cluster)
    again = follow(cluster, directory, ["check", *kept])
    assert restored(again) == {(newest + 1, "[]")}, again.log
    assert {str(record["wrong"]) for record in again.of("checked")} == {"[]"}, again.log


@pytest.mark.parametrize("call", ["create", "write"])
def test_a_job_killed_before_its_drain_leaves_no_file(shm: Path, faulty: Faulty, call: str) -> None:
    cluster, directory = Cluster(shm), faulty.directory
    verbs = [["save"], ["drain"], ["save"], ["rules", f"* {call} hold 0 rank"], ["begin_drain"], ["save", 1000, 0.01]]
    job = begin(cluster, faulty, *verbs)
    job.wait_for("committed", 30)
    job.kill()
    assert (directory / "step-00000002").exists() and committed_in(directory) == {1}
    assert len(files_in(directory) - files_of(1, 2)) == (0 if call == "create" else 2), "it got further"
    result = follow(cluster, directory, ["save"], ["drain"])
    step = result.of("drain")[0]["step"]
    assert files_in(directory) == files_of(1, 2) | files_of(step, 2), result.log
    # Nothing in an empty folder says whose it is: it stays, until this step is drained.
    assert (directory / "step-00000002").exists() == (call == "create")


# File systems that fail


IO, DENIED, FULL, READ_ONLY = (
    "[Errno 5] Input/output error", "[Errno 13] Permission denied", "[Errno 28] No space left on device",
    "[Errno 30] Read-only file system",
)  # fmt: skip
FAULTS: dict[str, tuple[str, int, str]] = {  # rules, the rank that fails, and how
    "full on rank 0": ("0 write 28 50000 rank", 0, FULL),
    "full on rank 1": ("1 write 28 50000 rank", 1, FULL),
    "full for the master": ("* write 28 700 checkpoint", 0, FULL),
    "eio on write": ("* write 5 0 *", 0, IO),
    "eio on fsync of rank 1": ("1 fsync 5 0 *", 1, IO),
    "eio on fsync of the master": ("* fsync 5 0 checkpoint", 0, IO),
    "eio on rename of rank 1": ("1 rename 5 0 *", 1, IO),
    "eio on rename of the master": ("* rename 5 0 checkpoint", 0, IO),
    "eio on fsync of the directory": ("1 fsyncdir 5 0 step", 1, IO),
    "full for the provenance": ("* write 28 100 provenance", 0, FULL),
    "eio on rename of the provenance": ("* rename 5 0 provenance", 0, IO),
    "eio on fsync of the directory with the provenance": ("* fsyncdir 5 3 step", 0, IO),
    "eio on fsync of the directory with the master": ("* fsyncdir 5 4 step", 0, IO),
    "no permission to make a folder": ("* mkdir 13 0 *", 0, DENIED),
    "no permission to make a file on rank 1": ("1 create 13 0 *", 1, DENIED),
    "read only on rank 1": (r"1 create 30 0 *\n1 mkdir 30 0 *\n1 unlink 30 0 *", 1, READ_ONLY),
    "eio on everything on rank 0": ("0 all 5 0 *", 0, IO),
}


def check_failed_drains(result: Result, errors: list[list[str]]) -> None:
    """Check how each drain of a job of two ranks ended: the same on both, and what the error says."""
    drains = [[r for r in result.of("drain") if r["rank"] == rank] for rank in range(2)]
    assert [r["error"] for r in drains[0]] == [r["error"] for r in drains[1]]
    assert len(drains[0]) == len(errors), result.log
    for drain, wanted in zip(drains[0], errors, strict=True):
        check_error(result, drain, wanted)
    assert not result.of("failed") and not any(r["error"] for r in result.of("end")), result.log


def check_error(result: Result, drain: dict[str, Any], wanted: list[str]) -> None:
    """Check that a drain failed with such texts in the error, and was warned of; or that it did not, without any."""
    step = drain["step"]
    if not wanted:
        assert not drain["error"], drain
        return
    for text in ["DrainFailed: ", *wanted, f"step {step}]"]:
        assert text in drain["error"], drain
    assert f"step {step} was not drained: " in result.log


@pytest.fixture(scope="module")
def failed(faulty_files: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """A job whose file system failed in one way after the other, twice each; and the directory."""
    folder = tmp_path_factory.mktemp("failed")
    faulty = Faulty(faulty_files, folder / "pfs", folder / "rules")
    verbs: list[Any] = [["save", 2], ["drain"]]
    for fault, (rules, _, _) in FAULTS.items():
        verbs += [["save"], ["rules", rules], ["drain"], ["save", 2], ["drain"], ["rules", ""], ["look", fault]]
        verbs += [["save"], ["drain"]]
    verbs.append(["check", *range(2, 3 + 4 * len(FAULTS), 4)])
    with own_memory() as root:
        return follow(Cluster(root), faulty, *verbs), faulty.directory


@pytest.mark.parametrize("number", range(len(FAULTS)), ids=list(FAULTS))
def test_a_file_system_that_fails_costs_that_drain_only(failed: tuple[Result, Path], number: int) -> None:
    fault, (_, rank, error) = list(FAULTS.items())[number]
    result, directory = failed
    first = 2 + 4 * number
    for step, wanted in ((1, [error, f"rank {rank} ", str(directory)]), (3, [error, f"rank {rank} "]), (4, [])):
        drains = [r for r in result.of("drain") if r["step"] == first + step]
        assert len(drains) == 2 and drains[0]["error"] == drains[1]["error"], result.log
        check_error(result, drains[0], wanted)
    committed = [r["step"] for r in result.of("committed") if first < r["step"] <= first + 4]
    assert sorted(committed) == sorted([*range(first + 1, first + 5)] * 2), "saves stopped"
    before = set().union(*(files_of(step, 2) for step in range(2, first + 1, 4)))
    assert set(result.of(fault)[0]["files"]) == before, "something was left behind"
    checked = {r["step"]: r["wrong"] for r in result.of("checked") if r["rank"] == rank}
    assert checked[first] == checked[first + 4] == []
    whole = files_of(first, 2) | files_of(first + 4, 2)
    assert whole <= files_in(directory) and {path.name for path in directory.iterdir()} >= {"step-00000002"}
    folders = {path.name for path in directory.iterdir()}
    assert not folders & {f"step-{step:08d}" for step in range(first + 1, first + 4)}, "a folder was left behind"


def test_a_full_file_system_costs_that_drain_only(
    shm: Path, small_memory: Callable[[int], Path], tmp_path: Path
) -> None:
    directory = small_memory(8 * MIB)
    filler = directory / "filler"
    verbs = [
        ["save", 2], ["drain"], ["save"],
        # Room for the file of one rank and a part of the other.
        ["run", f"fallocate -l $(( $(stat -f -c '%a * %S' {directory}) - 600000 )) {filler}"],
        ["drain"], ["save"], ["look", "during"], ["run", f"rm {filler}"], ["drain"], ["check", 2, 4],
    ]  # fmt: skip
    result = follow(Cluster(shm), directory, *verbs, nbytes=400_000)
    check_failed_drains(result, [[], [FULL, "rank ", str(directory), "step 3"], []])
    assert set(result.of("during")[0]["files"]) == files_of(2, 2) | {"filler"}
    assert checked(result) == {(2, "[]"), (4, "[]")}, result.log
    assert files_in(directory) == files_of(2, 2) | files_of(4, 2)


@pytest.mark.parametrize(("point", "rank"), [("drain.file_made", 1), ("drain.committing", 0)])
def test_a_directory_that_disappears_never_gets_half_a_checkpoint(
    shm: Path, faulty: Faulty, point: str, rank: int
) -> None:
    directory, away = faulty.directory, f"{faulty.directory}.away"
    verbs = [
        ["save", 2], ["drain"], ["save"], ["drain"], ["save"], ["look", "during"],
        ["run", f"rm -rf {directory} && mv {away} {directory}"], ["save"], ["drain"], ["check", 2, 5],
    ]  # fmt: skip
    trap = {"path": ["drain.ended", point], "action": "vanish", "rank": rank}
    cluster = Cluster(shm)
    result = follow(cluster, faulty, *verbs, traps=[trap])
    assert result.of("during")[0]["files"] == [], "half a checkpoint is where the directory was"
    check_failed_drains(result, [[], [str(directory)], []])
    assert checked(result) == {(2, "[]"), (5, "[]")}, result.log
    lose_memory(cluster)
    again = follow(cluster, directory, ["save"], ["drain"])
    assert restored(again) == {(5, "[]")}, again.log
    assert files_in(directory) == files_of(2, 2) | files_of(5, 2) | files_of(6, 2), "the next run cleans up"


def test_what_could_not_be_deleted_is_deleted_by_the_next_run(shm: Path, faulty: Faulty) -> None:
    cluster, directory = Cluster(shm), faulty.directory
    # Of the drain that fails both ranks' files are there, one of them under its temporary name.
    verbs = [
        ["save", 2], ["drain"], ["save"], ["rules", r"1 rename 30 0 *\n* unlink 30 0 *"], ["drain"], ["look", "during"],
        ["save"], ["rules", ""], ["drain"],
    ]  # fmt: skip
    result = follow(cluster, faulty, *verbs)
    check_failed_drains(result, [[], [READ_ONLY, "rank 1", "step 3"], []])
    left = set(result.of("during")[0]["files"]) - files_of(2, 2)
    assert sorted(name.split("/")[1][:11] for name in left) == [".rank-00001", "rank-00000."]
    assert "what was drained of step 3 could not be deleted" in result.log
    lose_memory(cluster)
    result = follow(cluster, directory, ["save"], ["drain"])
    assert restored(result) == {(4, "[]")}, result.log
    assert files_in(directory) == files_of(2, 2) | files_of(4, 2) | files_of(5, 2), result.log


def test_an_undeletable_checkpoint_stays_whole_and_goes_later(shm: Path, faulty: Faulty) -> None:
    cluster, directory = Cluster(shm), faulty.directory
    verbs = [
        ["save"], ["drain"], ["save"], ["rules", "* unlink 5 0 step"], ["drain"], ["look", "kept"],
        ["rules", "* unlink 5 0 rank"], ["save"], ["drain"], ["look", "half"], ["rules", ""], ["check", 3],
    ]  # fmt: skip
    result = follow(cluster, faulty, *verbs, keep_last=1)
    assert [r["error"] for r in result.of("drain")] == [""] * 6, "the new checkpoint is there"
    assert result.log.count("older checkpoints could not be deleted: [Errno 5]") == 2, result.log
    assert set(result.of("kept")[0]["files"]) == files_of(1, 2) | files_of(2, 2)
    assert files_of(3, 2) <= set(result.of("half")[0]["files"])
    assert checked(result) == {(3, "[]")}
    lose_memory(cluster)
    result = follow(cluster, directory, ["save"], ["drain"], keep_last=1)
    assert restored(result) == {(3, "[]")}, result.log
    assert files_in(directory) == files_of(4, 2), result.log


# File systems that are slow, or hang


def test_a_slow_file_system_holds_up_no_save_and_gets_the_bits_of_its_step(shm: Path, faulty: Faulty) -> None:
    verbs = [
        ["save", 2], ["drain"], ["save", 100], ["rules", "* write hold 0 *"], ["begin_drain"],
        ["save", 30], ["look", "during"], ["rules", ""], ["end_drain"], ["check", 2, 102],
    ]  # fmt: skip
    result = follow(Cluster(shm), faulty, *verbs)
    assert [(r["step"], r["error"]) for r in result.of("drain")] == [(2, ""), (102, "")] * 2, result.log
    assert checked(result) == {(2, "[]"), (102, "[]")}, result.log
    # Until they were committed no write came to its end: whatever waits for one would have waited for ever.
    assert len(result.of("committed")) == 2 * (2 + 100 + 30), "saves waited for the drain"
    assert "step-00000102/checkpoint.h5" not in result.of("during")[0]["files"], "nothing was held up"


@pytest.mark.parametrize("verbs", [[["save"]], [["save"], ["wait_drained"], ["look", "then"]]], ids=["close", "wait"])
def test_a_drain_that_begins_a_little_after_its_commit_is_waited_for(shm: Path, verbs: list[Any]) -> None:
    directory = shm / "pfs"
    traps = [{"path": ["commit.seen"], "action": "pause", "rank": rank} for rank in range(2)]
    result = follow(Cluster(shm), directory, *verbs, traps=traps, drain_every=1)
    assert result.returncode == 0 and {r["error"] for r in result.of("end")} == {""}, result.log
    assert files_in(directory) == files_of(1, 2), result.log
    for r in result.of("then"):
        assert set(r["files"]) == files_of(1, 2), "it was not waited for"


def test_drains_that_come_due_while_one_is_slow_are_put_off_and_counted(shm: Path, faulty: Faulty) -> None:
    verbs = [
        ["save"], ["drain"], ["rules", "* write hold 0 *"], ["save", 20], ["look", "during"], ["rules", ""],
        ["wait_drained"], ["look", "then"],
    ]  # fmt: skip
    result = follow(Cluster(shm), faulty, *verbs, drain_every=1)
    assert set(result.of("then")[0]["files"]) == files_of(1, 2) | files_of(2, 2)
    assert "step-00000002/checkpoint.h5" not in result.of("during")[0]["files"], "nothing was held up"
    # The one at the end came as well: what was committed last.
    assert files_in(faulty.directory) == files_of(1, 2) | files_of(2, 2) | files_of(21, 2), result.log
    for ended in result.of("end"):
        counts = ended["report"]["counts"]
        assert (counts["committed"], counts["drained"], counts["drains put off"]) == (21, 3, 19)
        assert "drains failed" not in counts


@pytest.mark.parametrize("drain_every", [0, 1000])
def test_state_that_grows_leaves_the_drained_slot_alone(shm: Path, faulty: Faulty, drain_every: int) -> None:
    verbs = [
        ["save", 2], ["rules", "* write hold 0 *"], ["begin_drain"], ["save"], ["grow"], ["save", 5], ["end_drain"],
        ["drain"], ["check", 2, 8],
    ]  # fmt: skip
    job = begin(Cluster(shm), faulty, *verbs, drain_every=drain_every)
    # Without a slot more the save of step 4 waits for the drain; with one, none does.
    job.wait_for("committed", 2 * (8 if drain_every else 3))
    Path(faulty.env["FAULTY_RULES"]).write_text("\n")
    result = job.wait()
    assert [(r["step"], r["error"]) for r in result.of("drain")] == [(2, ""), (8, "")] * 2, result.log
    assert checked(result) == {(2, "[]"), (8, "[]")}, result.log
    assert not result.of("failed") and len(result.of("committed")) == 16, result.log


@pytest.mark.parametrize("call", ["fsync", "list"])
def test_a_file_system_that_hangs_costs_the_drain_and_ends_every_wait(shm: Path, faulty: Faulty, call: str) -> None:
    cluster, directory = Cluster(shm), faulty.directory
    rank = 0 if call == "list" else 1
    verbs = [
        ["save", 2], ["drain"], ["save"], ["rules", f"{rank} {call} hold 0 *"], ["hurry", 3],
        ["begin_drain"], ["save", 3], ["wait_drained", 0.5], ["wait_drained"], ["save", 2],
    ]  # fmt: skip
    result = follow(cluster, faulty, *verbs)
    assert len(result.of("committed")) == 2 * 8 and not result.of("failed"), result.log
    waited = result.of("waited")
    for r in waited:
        assert r["error"].startswith("DeadlineExceeded: the drain of this step has not ended"), r
        assert "step 3" in r["error"], r
    assert len(waited) == 4
    assert len(result.of("end")) == 2, "what waits for the file system would wait for ever"
    assert all("DeadlineExceeded" in r["error"] and "step 3" in r["error"] for r in result.of("end")), result.log
    assert committed_in(directory) == {2}
    result = follow(cluster, directory, ["save"], ["drain"], ["check", 2, 9])
    assert restored(result) == {(8, "[]")}, result.log
    assert files_in(directory) == files_of(2, 2) | files_of(9, 2), result.log


# Files that are damaged


@pytest.fixture(scope="module")
def drained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with steps 2 and 4 of two ranks."""
    directory = tmp_path_factory.mktemp("drained")
    with own_memory() as root:
        result = follow(Cluster(root), directory, ["save", 2], ["drain"], ["save", 2], ["drain"])
    assert files_in(directory) == files_of(2, 2) | files_of(4, 2), result.log
    return directory


def card_of(path: Path) -> index.Card:
    return index.read_card(path.read_bytes()[: index.CARD_NBYTES])


def flip_in(folder: Path, name: str, at: int, only: str = "") -> None:
    """Change a bit of a tensor, in the file of the first rank that has a part of it."""
    for path in sorted(folder.glob(f"rank-*{only}.h5")):
        card = card_of(path)
        raw = path.read_bytes()[card.index_start :][: card.index_nbytes]
        for entry, place in index.decode_index(raw, path.name, card.file_nbytes).pieces:
            if entry.name == name and place.nbytes > at:
                flip(path, place.start + at)
                return
    raise AssertionError(f"{name} is nowhere")


def exchange(path: Path, other: Path) -> None:
    path.rename(aside := path.with_name("aside"))
    other.rename(path)
    aside.rename(other)


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {  # the file that is named, and what is done to a folder
    "rank file cut in half": ("rank-00001.h5", lambda f: os.truncate(f / "rank-00001.h5", 60_000)),
    "bit in the data": ("rank-00001.h5", lambda f: flip_in(f, "weights", 70_000, only="1")),
    "bit in what all ranks have": ("rank-0000", lambda f: flip_in(f, "common", 10)),
    "bit in the index of the master": (MASTER, lambda f: flip(f / MASTER, card_of(f / MASTER).index_start + 20)),
    "empty master": (MASTER, lambda f: os.truncate(f / MASTER, 0)),
    "garbage for a master": (MASTER, lambda f: (f / MASTER).write_bytes(os.urandom(3000))),
    "a folder for a master": (MASTER, lambda f: ((f / MASTER).unlink(), (f / MASTER).mkdir())),
    "a link for a master": (MASTER, lambda f: (f / MASTER).rename(f / "m") and (f / MASTER).symlink_to("m")),
    "rank file missing": ("rank-00000.h5", lambda f: (f / "rank-00000.h5").unlink()),
    "rank file of another step": (
        "rank-00001.h5",
        lambda f: shutil.copy(f.with_name("step-00000002") / "rank-00001.h5", f / "rank-00001.h5"),
    ),
    "files of two ranks exchanged": (
        "rank-0000",
        lambda f: exchange(f / "rank-00000.h5", f / "rank-00001.h5"),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def of_damaged(drained: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A job that restored from directories whose newest checkpoint was damaged, each in its way."""
    top = tmp_path_factory.mktemp("damaged")
    directories = [str(top / name.replace(" ", "-")) for name in DAMAGES]
    for directory, (_, do) in zip(directories, DAMAGES.values(), strict=True):
        shutil.copytree(drained, directory)
        do(Path(directory, "step-00000004"))
    with own_memory() as root:
        return follow(Cluster(root), root / "pfs", ["restore_from", *directories])


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_older_one_restored(of_damaged: Result, damage: str) -> None:
    place = "/" + damage.replace(" ", "-")
    records = [r for r in of_damaged.of("restored from") if r["source"].endswith(place)]
    assert {(r["step"], str(r["wrong"])) for r in records} == {(2, "[]")}, of_damaged.log
    assert f"{place}/step-00000004/{DAMAGES[damage][0]}" in of_damaged.log


@pytest.mark.parametrize(("rules", "name"), [
    ("0 open 13 0 step-00000004/checkpoint", MASTER), ("1 read 5 1000 step-00000004/rank-00001", "rank-00001.h5"),
])  # fmt: skip
def test_an_unreadable_checkpoint_gives_the_older_one(
    shm: Path, drained: Path, faulty: Faulty, rules: str, name: str
) -> None:
    shutil.copytree(drained, faulty.directory)
    Path(faulty.env["FAULTY_RULES"]).write_text(rules + "\n")
    result = follow(Cluster(shm), faulty)
    assert restored(result) == {(2, "[]")} and len(result.of("end")) == 2, result.log
    assert f"step-00000004/{name}" in result.log
