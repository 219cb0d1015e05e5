"""The commands that look and delete: what they say, exit codes, and what they change. Real files, real processes."""

from __future__ import annotations

import itertools
import json
import math
import os
import pty
import random
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import needs
import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from damage import damage
from hypothesis import given
from hypothesis import strategies as st
from processes import ran
from waiting import PATIENCE_S, until

import mlflash
from mlflash.cli import main
from mlflash.config import job_name
from mlflash.memory.node_directory import NodeDirectory
from mlflash.memory.slot import HEADER_NBYTES, Attempt, Header
from mlflash.placement.redundancy import parse, place
from mlflash.placement.survival import of
from mlflash.placement.topology import Topology
from mlflash.run.processes import mpiexec
from mlflash.state.layout import Extents
from mlflash.state.leaves import Entry
from mlflash.tools.inspect_step import statistics
from mlflash.tools.jobs import decide
from mlflash.tools.node_memory import File, Node, Sealed, look, survival, what_is_restorable

UID = os.getuid()
STATE = {
    "model": {"w": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "b": np.array([1.0, math.nan, -math.inf, 0.0])},
    "lr": 0.1,
    "name": "run",
}


def run(shm: Path, *arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [*map(str, arguments)], env={"MLFLASH_MEMORY": str(shm), "MLFLASH_JOB": None})
    assert result.exit_code == code, (result.output, result.exception)
    return result


def document(shm: Path, *arguments: object, code: int = 0) -> Any:
    return json.loads(run(shm, *arguments, "--json", code=code).stdout)


def save(shm: Path, *steps: int, job: str | None = "j", directory: Path | None = None, drains: bool = False) -> None:
    with mlflash.Checkpointer(directory, job=job, memory=str(shm), redundancy="none", strict=True) as ckpt:
        ckpt.load()
        for step in steps:
            ckpt.save(step, STATE).wait()
        if drains:
            ckpt.drain().wait(30)


def slots(shm: Path) -> list[Path]:
    return sorted(shm.glob(f"mlflash-{UID}/*/slot-*"))


def everything(top: Path) -> dict[str, tuple[int, int, bytes]]:
    """All there is below a directory, down to inode, time of change and content."""
    return {
        str(path): (status.st_ino, status.st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in [top, *sorted(top.rglob("*"))]
        for status in [path.stat()]
    }


# What is there


@pytest.mark.gate
def test_status_says_what_is_in_memory_and_what_was_drained(shm: Path, tmp_path: Path) -> None:
    save(shm, 1, 2, directory=tmp_path / "d", drains=True)
    found = document(shm, "status", "-d", tmp_path / "d", "--job", "j")
    assert (found["job"], found["newest"], found["alive"], found["well"]) == ("j", 2, False, True)
    assert [(attempt["step"], attempt["committed"], attempt["restorable"]) for attempt in found["attempts"]] == [
        (2, True, True),
        (1, True, True),
    ]
    assert [checkpoint["step"] for checkpoint in found["directory"]["checkpoints"]] == [2]
    assert found["survives"]["words"].startswith("no node: there is only")
    text = run(shm, "status", "-d", tmp_path / "d", "--job", "j").output
    assert "step 2 of 1 rank, committed" in text and "\nredundancy: none\n" in text
    assert "drained: step 2" in text and "headers" not in text
    assert all(len(line) <= 80 for line in text.splitlines() if "/" not in line and "damaged" not in line), text


def test_light_saves_are_shown_verified_and_freed_with_their_job(shm: Path) -> None:
    weights = torch.nn.Parameter(torch.zeros(500))
    optimizer = torch.optim.SGD([weights], lr=1.0)
    with mlflash.Checkpointer(job="j", memory=str(shm), redundancy="none", light=3) as ckpt:
        for step in range(1, 8):
            weights.grad = torch.full((500,), float(step))
            optimizer.step()
            ckpt.save(step, {"weights": weights, "optimizer": optimizer})
    shown = document(shm, "status")
    assert (shown["newest"], shown["light"]) == (5, [6, 7])
    assert "which a restore makes again: 6-7" in run(shm, "status").stdout
    (job,) = document(shm, "jobs")["jobs"]
    assert (job["job"], job["step"], job["files"]) == ("j", 7, 8)
    assert [place["files"] for place in document(shm, "verify")["memory"]] == [2, 6]
    assert damage(shm, 7) == 1
    assert "light saves: 5 of 6 files good" in run(shm, "verify", code=1).stdout
    assert document(shm, "clean", "j")["jobs"][0]["nbytes"] == job["nbytes"]
    assert not [*shm.glob("*/j*")]


def test_list_has_memory_and_directory_newest_first(shm: Path, tmp_path: Path) -> None:
    save(shm, 1, directory=tmp_path / "d", drains=True)
    save(shm, 2, directory=tmp_path / "d", drains=True)
    lines = run(shm, "list", "-d", tmp_path / "d", "--job", "j").output.splitlines()[3:]
    assert [line.split()[:2] for line in lines if line] == [["2", "memory"], ["2", "directory"], ["1", "memory"],
                                                            ["1", "directory"]]  # fmt: skip
    assert [line.endswith("; a restore takes this") for line in lines if line] == [True, False, False, False]


def test_what_only_looks_changes_nothing_and_makes_nothing(shm: Path, tmp_path: Path) -> None:
    save(shm, 1, 2, directory=tmp_path / "d", drains=True)
    before = everything(shm), everything(tmp_path)
    directory = ("-d", str(tmp_path / "d"), "--job", "j")
    for arguments in (["status"], ["list"], ["verify"], ["inspect", "2"], ["inspect", "2", "model.*"]):
        run(shm, *arguments, *directory)
        run(shm, *arguments, "-d", tmp_path / "no such directory", "--job", "other", code=1)
    run(shm, "clean", "--all", "--dry-run")
    assert (everything(shm), everything(tmp_path)) == before


def test_where_there_is_nothing_the_exit_code_says_so(shm: Path) -> None:
    for arguments in (["status"], ["list"], ["verify"], ["inspect", "1"], ["drain"], ["reprotect"]):
        assert "nothing of this user is in" in run(shm, *arguments, code=1).output
        assert "nothing of this user" in document(shm, *arguments, code=1)["error"] if arguments != ["drain"] else True
    run(shm, "scavenge", shm / "directory", code=1)
    assert list(shm.iterdir()) == []


def test_a_job_of_which_only_the_directory_is_left_is_listed(shm: Path, tmp_path: Path) -> None:
    save(shm, 1, job=None, directory=tmp_path / "d", drains=True)
    run(shm, "clean", "--all", "--yes")
    assert document(shm, "status", "-d", tmp_path / "d")["newest"] is None
    assert document(shm, "inspect", 1, "lr", "-d", tmp_path / "d")["plain"] == {"lr": 0.1}
    assert document(shm, "verify", "-d", tmp_path / "d")["directory"][0]["files"] == 6


# Which job


def test_the_only_job_is_meant_and_of_several_one_must_be_named(shm: Path) -> None:
    save(shm, 1, job="a")
    assert document(shm, "status")["job"] == "a"
    save(shm, 1, job="b")
    result = run(shm, "status", code=2)
    assert "Name one with --job: b, a" in result.output, "the newest first"
    assert document(shm, "status", "--job", "b")["job"] == "b"
    run(shm, "status", "--job", "../b", code=2)


def test_the_directory_names_the_job_in_and_out_of_slurm() -> None:
    inside, outside = {"SLURM_JOB_ID": "71"}, {}
    name, slurm = job_name(outside, "/fs/run42"), job_name(inside, "/fs/run42")
    other = job_name(inside, "/fs/run43")

    def job_of(*there: str, env: Any = outside, job: str | None = None) -> str:
        return decide(there, env, job, "/fs/run42", "/dev/shm")

    assert job_of(slurm, other) == slurm
    assert job_of(slurm, other, env={"SLURM_JOB_ID": "72"}) == slurm
    assert job_of(name, slurm) == name
    assert job_of(name, slurm, env=inside) == slurm
    assert job_of(other) == name  # which is not there
    assert job_of(other, job="named") == "named"
    with pytest.raises(click.UsageError, match="several jobs drain to /fs/run42"):
        job_of(slurm, slurm.replace("71", "72"))


# Damage


def test_every_kind_of_damage_is_found_in_memory(shm: Path) -> None:
    save(shm, 1, 2)
    assert document(shm, "verify")["memory"][0]["files"] == 2
    path = slots(shm)[0]
    good = path.read_bytes()
    (node,) = [look(str(shm), "j", "here")]
    header = next(header for file, header in node.sealed if file.name == path.name)
    start = header.extents.payload_start
    for at, word in (
        (3, "it has no valid header"),
        (30, "header"),
        (4096, "1 of 1 blocks are damaged"),
        (start, "1 of 1 blocks are damaged"),
        (header.extents.table_start, "block table"),
    ):
        path.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        (damaged,) = document(shm, "verify", code=1)["memory"][0]["damaged"]
        assert damaged["file"] == path.name and word in damaged["damage"]
    path.write_bytes(good[: header.extents.table_start])
    assert "it has only" in document(shm, "verify", code=1)["memory"][0]["damaged"][0]["damage"]
    assert not document(shm, "status", code=1)["well"]
    path.write_bytes(good)
    document(shm, "verify")


def test_damage_in_the_directory_is_found(shm: Path, tmp_path: Path) -> None:
    directory = tmp_path / "d"
    save(shm, 1, directory=directory, drains=True)
    (folder,) = directory.iterdir()
    tensors, master = folder / "__0_0.distcp", folder / "checkpoint.mlflash"

    def damaged(path: Path, at: int) -> Any:
        good = path.read_bytes()
        path.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        found = document(shm, "verify", "-d", directory, "--job", "j", code=1)["directory"][0]["damaged"]
        path.write_bytes(good)
        return found

    assert document(shm, "verify", "-d", directory, "--job", "j")["directory"][0]["nbytes"] == 12 + 32
    (place,) = document(shm, "inspect", 1, "model.b", "-d", directory, "--job", "j", "--from", "directory")["tensors"]
    where = place["shards"][0]["bytes"][0]
    assert directory / where["file"] == tensors
    assert "damaged, first model.b" in damaged(tensors, where["start"])[0]["damage"]
    assert damaged(tensors, 10) and damaged(master, 60)
    tensors.unlink()
    document(shm, "verify", "-d", directory, "--job", "j", code=1)
    master.unlink()
    assert document(shm, "status", "-d", directory, "--job", "j")["directory"]["unfinished"] == [folder.name]


def unseal(slot: Path) -> None:
    """Begin to write a slot as a save does: unsealed first, then another content."""
    good = slot.read_bytes()
    slot.write_bytes(bytes(HEADER_NBYTES) + good[HEADER_NBYTES:-8192] + b"other" + good[-8187:])


@pytest.mark.parametrize("rewrite", [unseal, Path.unlink])
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_slots_rewritten_while_read_are_not_called_damaged(
    shm: Path, rewrite: Any, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(shm, 1, 2)
    begin, verify = Sealed.__init__, Sealed.verify

    def before(sealed: Sealed, memory: NodeDirectory, name: str, header: Header) -> None:
        rewrite(Path(memory.path, name))
        begin(sealed, memory, name, header)

    def meanwhile(sealed: Sealed, advance: Any) -> None:
        verify(sealed, lambda nbytes: rewrite(Path(sealed._memory.path, sealed.name)))

    monkeypatch.setattr(*((Sealed, "__init__", before) if when == "before" else (Sealed, "verify", meanwhile)))
    (found,) = document(shm, "verify")["memory"]
    assert (found["files"], len(found["being_written"]), found["damaged"]) == (0, 2, [])


# Contents


def test_what_was_compressed_is_shown_and_verified(shm: Path, tmp_path: Path) -> None:
    directory = ("-d", tmp_path / "d", "--job", "j", "--from", "directory")
    big = {"w": np.arange(100_000, dtype=np.float32)}
    with mlflash.Checkpointer(
        tmp_path / "d", job="j", memory=str(shm), redundancy="none", compression="gzip", format="hdf5"
    ) as ckpt:
        ckpt.save(1, big).wait()
        ckpt.drain().wait(30)
    (tensor,) = document(shm, "inspect", 1, "w", *directory)["tensors"]
    assert (tensor["statistics"]["max"], tensor["shards"][0]["bytes"][0]["start"]) == (99_999, -1)
    assert "compressed" in run(shm, "inspect", 1, "w", *directory).output
    assert document(shm, "verify", *directory[:4])["directory"][0]["nbytes"] == 400_000


def test_inspect_shows_each_tensor_and_where_its_bytes_are(shm: Path) -> None:
    save(shm, 7)
    found = document(shm, "inspect", 7)
    assert found["plain"] == {"lr": 0.1, "name": "run"}
    assert [(t["name"], t["dtype"], t["shape"], t["nbytes"], t["statistics"]) for t in found["tensors"]] == [
        ("model.w", "bfloat16", [2, 3], 12, None),
        ("model.b", "<f8", [4], 32, None),
    ]
    w, b = document(shm, "inspect", 7, "model.*")["tensors"]
    assert (w["statistics"]["min"], w["statistics"]["max"], w["statistics"]["mean"]) == (0, 5, 2.5)
    assert (b["statistics"]["nan"], b["statistics"]["inf"], b["statistics"]["zeros"]) == (1, 1, 1)
    (run_of,) = b["shards"][0]["bytes"]
    raw = (shm / f"mlflash-{UID}" / "j" / run_of["file"]).read_bytes()[run_of["start"] :][: run_of["nbytes"]]
    assert raw == STATE["model"]["b"].tobytes()
    assert "lr = 0.1" in run(shm, "inspect", 7, "lr").output
    assert "no tensor or value 'nothing'" in run(shm, "inspect", 7, "nothing", code=1).output
    assert "no step 8" in run(shm, "inspect", 8, code=1).output
    run(shm, "inspect", 7, "--from", "directory", code=2)
    run(shm, "inspect", "x", code=2)


@given(
    values=st.lists(st.floats(width=32), max_size=40),
    cuts=st.lists(st.integers(0, 160), max_size=5),
    dtype=st.sampled_from(["<f4", "<f8", "float32"]),
)
def test_statistics_of_pieces_are_those_of_the_whole(values: list[float], cuts: list[int], dtype: str) -> None:
    kind = "tensor" if dtype == "float32" else "array"
    whole = np.array(values, dtype="<f4" if kind == "tensor" else dtype)
    raw = np.frombuffer(whole.tobytes(), dtype=np.uint8)
    entry = Entry("x", kind, dtype, whole.shape, (0,), whole.shape, 0, whole.nbytes)
    bounds = [0, *sorted(min(cut, raw.size) for cut in cuts), raw.size]
    found = statistics(entry, (raw[a:b] for a, b in itertools.pairwise(bounds)))
    good = whole[np.isfinite(whole)].astype(np.float64)
    assert (found.count, found.nan, found.inf) == (good.size, np.isnan(whole).sum(), np.isinf(whole).sum())
    assert found.zeros == (good == 0).sum()
    if good.size:
        assert (found.low, found.high) == (good.min(), good.max())
        assert found.mean == pytest.approx(good.mean(), rel=1e-9, abs=1e-9 * np.abs(good).max())
        assert found.std == pytest.approx(good.std(), rel=1e-6, abs=1e-7 * np.abs(good).max())


# What would be lost


def nodes_of(topology: Topology, scheme: str) -> list[Node]:
    """The memory of nodes after a save: slots, copies and parity as a placement says."""
    placement = place(topology, parse(scheme))
    files: list[list[Header]] = [[] for _ in topology.node_names]
    world_size = len(topology.node_of)
    for rank, node in enumerate(topology.node_of):
        group = placement.parity_group_of[rank]
        common = (Attempt(bytes(16), 5), 9, rank, world_size, node, 0, 10, Extents(4096, 100, 4096), 0, 0,
                  topology.node_names[node], scheme, "j")  # fmt: skip
        files[node].append(Header(*common, (rank,)))
        if group:
            files[node].append(Header(*common, tuple(group), parities=placement.scheme.losses))
        else:
            for partner in placement.partners[rank]:
                files[topology.node_of[partner]].append(Header(*common, (rank,)))
    return [
        Node(name, "", None, False, tuple(File(f"slot-{n:04d}", 1, h) for n, h in enumerate(files[number])))
        for number, name in enumerate(topology.node_names)
    ]


@pytest.mark.parametrize("scheme", ["copy", "copy:2", "xor:3", "rs:2+2", "none"])
@pytest.mark.parametrize(("count", "per_node"), [(2, 2), (5, 1), (7, 2)])
def test_what_is_survived_is_what_the_placement_promises(scheme: str, count: int, per_node: int) -> None:
    names = tuple(f"n{number}" for number in range(count))
    topology = Topology(tuple(rank // per_node for rank in range(count * per_node)), names)
    nodes = nodes_of(topology, scheme)
    promised = of(topology, place(topology, parse(scheme)))
    randomly = random.Random(1)
    for gone in ([], [randomly.randrange(count)]):
        left = [node for number, node in enumerate(nodes) if number not in gone]
        newest = what_is_restorable(left, True).newest
        assert (newest is not None) == promised.survives(gone)
        if newest is None:
            continue
        found = survival(left, newest)
        there = [number for number in range(count) if number not in gone]
        assert set(found.fatal) == {names[n] for n in there if not promised.survives([*gone, n])}
        pairs = itertools.combinations(there, 2)
        fatal = {(names[a], names[b]) for a, b in pairs if not promised.survives([*gone, a, b])}
        either = {pair for pair in fatal if not set(pair) & set(found.fatal)}
        assert set(found.fatal_pairs) == either
        assert found.surviving_pairs == math.comb(len(there), 2) - len(fatal)


def test_survival_in_words() -> None:
    nodes = nodes_of(Topology((0, 1, 2, 3), ("a", "b", "c", "d")), "copy")
    ahead = what_is_restorable(nodes, True)
    assert str(survival(nodes, ahead.newest)) == "any 1 of 4 nodes; 4 of 6 pairs of nodes; not: a and c together, " \
        "b and d together"  # fmt: skip
    assert str(survival(nodes[:3], what_is_restorable(nodes[:3], True).newest)) == "any 1 of 3 nodes except b"


# Asking and deleting

HOLD = """
import sys, mlflash
ckpt = mlflash.Checkpointer(job="j", memory=sys.argv[1], redundancy="none")
ckpt.save(1, {"a": 1}).wait()
print("saved", flush=True)
sys.stdin.read()
"""


def test_a_live_job_is_seen_asked_and_spared(shm: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(shm)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as holder:  # fmt: skip
        assert holder.stdout.readline() == "saved\n"
        save(shm, 1, job="dead")
        NodeDirectory(str(shm), "empty").close()
        assert [job["job"] for job in document(shm, "jobs")["jobs"]] == ["dead", "j"]
        assert document(shm, "status")["nodes"][0]["pid"] == holder.pid, "the live one is meant"
        run(shm, "clean", "dead", "empty")
        for words in (["--all", "--dry-run"], ["j"]):
            (found,) = document(shm, "clean", *words, code=1)["jobs"]
            assert found["pid"] == holder.pid
            assert found["error"] == f"it is alive (pid {holder.pid}): end it first. Nothing of it was deleted"
        assert document(shm, "drain")["pid"] == holder.pid
        assert document(shm, "status")["nodes"][0]["drain_asked"]
        holder.kill()
        holder.wait(60)
    until(lambda: not document(shm, "status")["alive"], "its courier to end")
    assert "no process of job j is alive" in run(shm, "drain", code=1).output
    (found,) = document(shm, "clean", "--all", "--dry-run")["jobs"]
    assert (found["files"], found["error"]) == (2, None) and found["nbytes"] > 0
    assert len(slots(shm)) == 2
    assert "would be freed" in run(shm, "clean", "j", "--dry-run").output
    assert document(shm, "clean", "j")["jobs"][0]["nbytes"] == found["nbytes"]
    assert slots(shm) == []


@pytest.mark.gate
def test_scavenge_and_reprotect_of_one_process(shm: Path, tmp_path: Path) -> None:
    save(shm, 4, job=None, directory=tmp_path / "d")
    name = document(shm, "status")["job"]
    script = Path(sys.executable).with_name("mlflash")
    environment = {**os.environ, "MLFLASH_MEMORY": str(shm)}

    def call(*arguments: object) -> Any:
        done = subprocess.run([script, *map(str, arguments), "--json"], env=environment, capture_output=True, text=True,
                              timeout=60, check=True)  # fmt: skip
        return json.loads(done.stdout)

    (pulse,) = shm.glob("mlflash-*/*/pulse-0000")
    said = pulse.read_bytes()
    assert call("export", "newest", tmp_path / "out", "--to", "safetensors")["step"] == 4
    assert call("scavenge", tmp_path / "d")["drained"] == 4
    assert call("reprotect", "-d", tmp_path / "d")["step"] == 4
    assert pulse.read_bytes() == said, "`mlflash top` shows what the job said last"
    run(shm, "clean", name)
    with mlflash.Checkpointer(tmp_path / "d", memory=str(shm), redundancy="none") as ckpt:
        step, state = ckpt.load()
    assert step == 4 and torch.equal(state["model"]["w"], STATE["model"]["w"])
    assert np.array_equal(state["model"]["b"], STATE["model"]["b"], equal_nan=True)


@pytest.mark.gate
def test_help_version_and_completion_load_nothing_heavy() -> None:
    program = (
        "import sys\nfrom mlflash.cli import main\n"
        "try: main(sys.argv[1:], prog_name='mlflash')\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'h5py', 'rich', 'mpi4py.MPI', 'matplotlib', 'fsspec'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    tab = {"COMP_WORDS": "mlflash inspect ", "COMP_CWORD": "2", "_MLFLASH_COMPLETE": "bash_complete"}
    for arguments, more in ((["--version"], {}), (["scavenge", "--help"], {}), (["inspect", "--help"], {}), ([], tab)):
        subprocess.run([sys.executable, "-c", program, *arguments], check=True, timeout=60, capture_output=True,
                       env={**os.environ, **more})  # fmt: skip


# What a terminal shows


MLFLASH = Path(sys.executable).with_name("mlflash")


def read_until(terminal: int, mark: bytes) -> bytes:
    said = b""
    while mark not in said:
        assert select.select([terminal], [], [], PATIENCE_S)[0], said
        said += os.read(terminal, 1 << 16)
    return said


@pytest.mark.parametrize("command", ["status", "inspect 1", "list", "verify", "jobs", "plan --nodes 64 --bytes 12GiB"])
def test_a_reader_that_goes_away_changes_no_exit_code(shm: Path, command: str) -> None:
    save(shm, 1)
    where = [] if command.startswith("plan") else ["--memory", str(shm)]
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run([MLFLASH, *command.split(), *where], stdout=write, stderr=subprocess.PIPE, check=False,
                              timeout=PATIENCE_S)  # fmt: skip
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_clean_of_all_jobs_asks_before_it_deletes_them(shm: Path) -> None:
    for job in ("mine", "theirs"):
        save(shm, 1, job=job)
    assert "add --yes to confirm" in run(shm, "clean", "--all", code=2).output
    for answer, left in (("n\n", 2), ("y\n", 0)):
        outside, inside = pty.openpty()
        command = [MLFLASH, "clean", "--all", "--memory", str(shm)]
        with subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside) as asking:
            os.close(inside)
            said = read_until(outside, b"[y/N]")
            os.write(outside, answer.encode())
            assert asking.wait(PATIENCE_S) == (1 if left else 0)
        os.close(outside)
        assert b"mine" in said and b"theirs" in said and b"These 2 jobs hold" in said
        assert left == 0 or len(document(shm, "jobs")["jobs"]) == left
    assert "no job of this user holds memory" in run(shm, "jobs").output


MISTAKEN = """
import sys, numpy as np, mlflash
with mlflash.Checkpointer(job="j", memory=sys.argv[1], log=sys.argv[2]) as ckpt:
    ckpt.save(1, {"w": np.zeros(3)}).wait()
    ckpt.restore({"w": np.zeros(4)})
"""


@needs.MPI
@pytest.mark.parametrize("full", [False, True])
def test_an_error_on_all_ranks_is_shown_once_and_the_log_has_its_lines(shm: Path, tmp_path: Path, full: bool) -> None:
    program = tmp_path / "train.py"
    program.write_text(MISTAKEN)
    words = [sys.executable, str(program), str(shm), str(tmp_path / "events.jsonl")]
    command, environment = mpiexec(2, words, {"OMP_NUM_THREADS": "1", "MLFLASH_TRACEBACK": "full" if full else ""})
    done = ran(*command, code=None, env=environment)
    said = done.stdout + done.stderr
    assert "differs from the checkpoint in 1 place:" in said
    assert ("load.py" in said) == full
    if not full:  # the other rank, which may be ended before, has a line at most
        assert said.count("Traceback") <= 1 and len(said.splitlines()) < 15, said
    logs = [json.loads(line) for path in tmp_path.glob("events*.jsonl") for line in path.read_text().splitlines()]
    uncaught = [event for event in logs if event["event"] == "uncaught"]
    assert uncaught and all("load.py" in event["text"] and "StructureMismatch" in event["text"] for event in uncaught)
