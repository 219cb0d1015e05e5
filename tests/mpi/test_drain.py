"""Checkpoints go to a directory while saving goes on, and come back from there, bit for bit."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emulated import Nodes, on_node
from keys import key_pair
from mpi4py import MPI
from states import differences
from torch.distributed.fsdp import fully_shard
from waiting import until

from mlflash import Checkpointer, errors
from mlflash.drain.checkpoint_directory import list_checkpoints
from mlflash.drain.provenance import public_key
from mlflash.mpi.world import World
from mlflash.placement.topology import this_node
from mlflash.storage.store import open_store
from mlflash.tools import on_disk

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
MIB = 1 << 20

two = pytest.mark.mpi(min_size=2)
general = pytest.mark.skipif(SIZE not in (1, 3), reason="runs on 1 and 3 ranks")
pytestmark = pytest.mark.filterwarnings("ignore:.*(barrier|ComplexHalf).*:UserWarning")


@pytest.fixture
def pfs(root: Path) -> Path:
    """The directory that is drained to."""
    return root / "pfs"


@pytest.fixture
def options(root: Path, pfs: Path) -> dict[str, Any]:
    return {"job": "t", **on_node(root), "transport": "p2p", "timeout_s": 30.0,
            "directory": pfs}  # fmt: skip


TORCH_DTYPES = [
    "bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32",
    "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip
NUMPY_DTYPES = ["|b1", "<i2", ">f8", "<f2", "<c8", "<U3", "|S5", "<M8[ns]", "<m8[s]", "<f16", "|u1"]


def bits(kind: str, step: int, count: int, nbytes: int) -> np.ndarray:
    numbers = np.random.default_rng([step, len(kind), RANK if kind == "own" else 1000])
    return numbers.integers(0, 2 if kind == "bool" else 256, count * nbytes, dtype=np.uint8)


def state_at(step: int) -> dict[str, Any]:
    """State of every kind: alike on all ranks, a rank's own, tied, empty, 0-d, of every dtype; objects; odd names."""
    alike = torch.from_numpy(bits("alike", step, 600 * 500, 4)).view(torch.float32).reshape(600, 500)
    kinds = {}
    for name in TORCH_DTYPES:
        dtype = getattr(torch, name)
        raw = bits("bool" if name == "bool" else name, step, 15, dtype.itemsize)
        kinds[name] = torch.from_numpy(raw).view(dtype).reshape(3, 5)
    arrays = {name: np.frombuffer(bits("bool" if name == "|b1" else name, step, 6, np.dtype(name).itemsize).tobytes(),
                                  dtype=name).reshape(2, 3).copy()
              for name in NUMPY_DTYPES if name != "<U3"}  # fmt: skip
    arrays["<U3"] = np.array([f"é{step % 10}", "", "abc"])
    return {
        "model": {"weight": alike, "tied": alike, "turned": alike[:40, :30].T, "empty": torch.zeros(0, 7),
                  "number": torch.tensor(step * 1.5), "a/b": torch.full((3,), step), "": torch.full((2,), step),
                  "%s~%b": torch.full((2,), -step)},
        "kinds": kinds, "arrays": arrays,
        "own": torch.from_numpy(bits("own", step, 1000 + RANK, 8)).view(torch.float64),
        "rng": np.array([RANK, step]),
        "plain": {"step": step, "of rank": RANK, "inf": float("inf"), "list": [1, (2, "x"), None, b"\0"], 3: 1 + 2j},
    }  # fmt: skip


def blank() -> dict[str, Any]:
    state = state_at(0)
    state["own"] = torch.zeros(1000 + RANK, dtype=torch.float64)
    return state


def raw(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""


def steps_in(directory: Path) -> list[int]:
    return [listed.step for listed in list_checkpoints(open_store(directory))]


@general
def test_state_of_every_kind_comes_back_from_the_directory_bit_for_bit(
    options: dict[str, Any], nodes: Nodes, pfs: Path
) -> None:
    with Checkpointer(**options, drain_every=1) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_at(step)).wait()
            ckpt.drain().wait()
        assert ckpt.report()["counts"]["drained"] == 2
    assert steps_in(pfs) == [2, 1]
    nodes.lose(*range(SIZE))
    with Checkpointer(**options) as ckpt:
        assert ckpt.steps() == [1, 2]
        state = blank()
        assert ckpt.restore(state) == 2 and ckpt.report()["restored_from"] == str(pfs / "step-00000002")
        assert differences(state_at(2), state, "", loaded=False) == []
        assert (
            state["model"]["tied"] is not None
            and state["model"]["weight"].data_ptr() == state["model"]["tied"].data_ptr()
        )
        step, fresh = ckpt.load(step=1)
        assert step == 1
        assert differences(state_at(1), fresh, "", loaded=True) == []
        assert fresh["model"]["weight"].data_ptr() == fresh["model"]["tied"].data_ptr()
        with pytest.raises(errors.StepNotFound, match=r"pfs: \[1, 2\]"):
            ckpt.restore(blank(), step=7)
    # It is in memory now, with its redundancy: the directory is not needed any more.
    COMM.Barrier()
    nodes.lose(*([0] if SIZE > 1 else []))
    nodes.on_rank_0(lambda: pfs.rename(pfs.with_name("away")))
    with Checkpointer(**options) as ckpt:
        state = blank()
        assert ckpt.restore(state) == 2
        assert differences(state_at(2), state, "", loaded=False) == []


READER = """
import sys
sys.modules["mlflash"] = None
import h5py, numpy as np, pathlib
path, out = sys.argv[1:]
with h5py.File(path) as file:
    tensors = file["tensors"]
    np.savez(out, weight=tensors["model.weight"][...], tied=tensors["model.tied"][...],
             part=tensors["model.weight"][37:411, ::7], half=tensors["kinds.bfloat16"][...],
             e5m2=tensors["kinds.float8_e5m2"][...], e4m3=tensors["kinds.float8_e4m3fn"][...],
             slash=tensors["model.a%2Fb"][...], empty=tensors["model.empty"][...],
             number=tensors["model.number"][...], rng=file["ranks/00000/rng"][...])
    assert tensors["kinds.float8_e4m3fn"].attrs["raw"] and "raw" not in tensors["kinds.bfloat16"].attrs
    assert (tensors["model.weight"].is_virtual, file.attrs["step"]) == (True, 3)
    assert ("rng" in tensors) == (len(file["ranks"]) == 1)
    import json
    objects = json.loads(file["objects"][()])
    assert objects["plain"]["step"] == 3 and objects["model"]["weight"] == {"$tensor": "model.weight"}
"""


@general
def test_plain_h5py_shows_every_tensor_whole(options: dict[str, Any], pfs: Path, root: Path) -> None:
    with Checkpointer(**options, format="hdf5") as ckpt:
        ckpt.save(3, state_at(3)).wait()
        ckpt.drain().wait()
    if RANK == 0:
        path = pfs / "step-00000003" / "checkpoint.h5"
        subprocess.run([sys.executable, "-W", "error", "-c", READER, path, root / "read.npz"], check=True, timeout=60)
        found, state = np.load(root / "read.npz"), state_at(3)
        weight = state["model"]["weight"].numpy()
        assert found["weight"].tobytes() == found["tied"].tobytes() == weight.tobytes()
        assert found["part"].tobytes() == weight[37:411, ::7].tobytes()
        for name, key in (("bfloat16", "half"), ("float8_e5m2", "e5m2")):
            np.testing.assert_array_equal(found[key], state["kinds"][name].float().numpy())
        assert found["e4m3"].tobytes() == raw(state["kinds"]["float8_e4m3fn"])
        assert found["slash"].tolist() == [3, 3, 3] and found["empty"].shape == (0, 7) and found["number"] == 4.5
        assert found["rng"].tolist() == [0, 3]


@general
@pytest.mark.parametrize(
    "compression", [pytest.param("gzip", marks=pytest.mark.slow), "zstd", pytest.param("bshuf", marks=pytest.mark.slow)]
)
def test_compressed_files_come_back_bit_for_bit(
    options: dict[str, Any], pfs: Path, nodes: Nodes, compression: str
) -> None:
    state = state_at(5)
    state["half"] = torch.arange(100_000).bfloat16()
    state["wide"] = np.tile(np.arange(4000.0), (1, 100))
    with Checkpointer(**options, format="hdf5", compression=compression) as ckpt:
        ckpt.save(5, state).wait()
        ckpt.drain().wait()
    nodes.lose(*range(SIZE))
    with Checkpointer(**options) as ckpt:
        found = {**blank(), "half": torch.zeros(100_000).bfloat16(), "wide": np.zeros((1, 400_000))}
        assert ckpt.restore(found) == 5
        assert differences(state, found, "", loaded=False) == []
    if RANK == 0:
        import h5py
        import hdf5plugin  # noqa: F401

        with h5py.File(pfs / "step-00000005" / "checkpoint.h5") as file:
            assert file["tensors/wide"][0, 3990:4010].tolist() == [*range(3990, 4000), *range(10)]
        nbytes = sum(path.stat().st_size for path in (pfs / "step-00000005").iterdir())
        assert nbytes < 1_200_000 + 1_000_000 + SIZE * 100_000


@general
@pytest.mark.parametrize(("form", "compression"), [("hdf5", "gzip"), ("dcp", None)])
def test_provenance_names_the_nodes_and_is_signed_by_rank_0_and_each_rank_checks_a_share_of_the_files(
    options: dict[str, Any], pfs: Path, root: Path, form: str, compression: str | None
) -> None:
    nowhere = root / "nothing.pem"
    with pytest.raises(errors.ConfigError, match="a key cannot be read"):
        Checkpointer(**options, sign_key=nowhere)
    if RANK == 0:
        key_pair(root)
    COMM.Barrier()
    key = root / "key.pem" if RANK == 0 else nowhere  # nobody else reads it
    with Checkpointer(**options, format=form, compression=compression, provenance={"seed": RANK}, sign_key=key) as ckpt:
        ckpt.save(3, {**state_at(3), "own": torch.full((100,), RANK), "wide": np.tile(np.arange(4e3), 9)}).wait()
        ckpt.drain().wait()
    store, world = open_store(pfs), World(COMM, this_node(options["memory"], options["node"]), 30.0).connect()
    (listed,) = list_checkpoints(store)
    public = public_key(str(root / "key.pub.pem")) if RANK == 0 else None

    def wrong() -> set[str]:
        """The files that all ranks together find changed."""
        COMM.Barrier()
        _, problems, found = on_disk.verify(world, store, listed, lambda _: None, public)
        assert (found is not None) == (RANK == 0)
        if found is not None and found.document is not None:
            assert [node["ranks"] for node in found.document["nodes"]] == [1] * SIZE
            assert len({node["host"] for node in found.document["nodes"]}) == SIZE
            assert found.document["given"] == {"seed": 0} and found.document["redundancy"]
            assert len(found.document["files"]) == (SIZE + 1 if form == "hdf5" else 2 * SIZE + 2)
            assert (found.signature == "good") == ("provenance.json.sig" not in dict(problems))
        return {file for of_rank in COMM.allgather(problems) for file, _ in of_rank}

    assert wrong() == set()
    for path in sorted(path for path in (pfs / listed.folder).iterdir() if path.name != "verdict"):  # which may change
        good = path.read_bytes()
        COMM.Barrier()
        if RANK == 0:
            path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        assert path.name in wrong()
        if RANK == 0:
            path.write_bytes(good)
    assert wrong() == set()
    world.free()


LOADER = """
import sys
sys.modules["mlflash"] = None
import numpy as np, torch, torch.distributed.checkpoint as dcp
path, out = sys.argv[1:]
zeros = torch.zeros(3, 5)
state = {"model": {"weight": torch.zeros(600, 500), "tied": torch.zeros(600, 500), "number": torch.tensor(0.0)},
         "kinds": {"bfloat16": zeros.bfloat16(), "float8_e4m3fn": zeros.to(torch.float8_e4m3fn)},
         "plain": {"step": 0, "list": None}, "arrays": {"<i2": None}}
dcp.load(state, checkpoint_id=path, no_dist=True)
assert state["plain"] == {"step": 3, "list": [1, (2, "x"), None, b"\\0"]}
assert state["kinds"]["bfloat16"].dtype is torch.bfloat16 and state["model"]["number"] == 4.5
np.savez(out, weight=state["model"]["weight"], tied=state["model"]["tied"], array=state["arrays"]["<i2"],
         half=state["kinds"]["bfloat16"].view(torch.int16), e4m3=state["kinds"]["float8_e4m3fn"].view(torch.uint8))
"""


@pytest.mark.slow
@general
def test_plain_dcp_loads_what_was_drained_as_dcp_and_mlflash_restores_every_ranks_own(
    options: dict[str, Any], pfs: Path, root: Path, nodes: Nodes
) -> None:
    def state_of(step: int) -> dict[str, Any]:
        return {**state_at(step), "own": torch.full((100,), RANK + step)}  # DCP takes one shape for a name only

    with Checkpointer(**options, format="dcp", drain_every=1, keep_last=1) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step)).wait()
            ckpt.drain().wait()
    assert [path.name for path in pfs.iterdir()] == ["step-00000003"]
    if RANK == 0:
        folder = pfs / "step-00000003"
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", LOADER, folder, root / "read.npz"], check=True, timeout=60
        )
        found, state = np.load(root / "read.npz"), state_at(3)
        assert found["weight"].tobytes() == found["tied"].tobytes() == raw(state["model"]["weight"])
        assert found["half"].tobytes() == raw(state["kinds"]["bfloat16"])
        assert found["e4m3"].tobytes() == raw(state["kinds"]["float8_e4m3fn"])
        assert found["array"].tobytes() == state["arrays"]["<i2"].tobytes()
    nodes.lose(*range(SIZE))
    with Checkpointer(**options) as ckpt:
        state = {**state_at(0), "own": torch.zeros(100, dtype=torch.int64)}
        assert ckpt.restore(state) == 3
        assert differences(state_of(3), state, "", loaded=False) == []


@general
@two
def test_what_all_ranks_hold_alike_is_written_once(options: dict[str, Any], pfs: Path) -> None:
    state = {"alike": np.random.default_rng(1).bytes(8 * MIB), "own": np.full(1000, RANK)}
    state["alike"] = np.frombuffer(state["alike"], dtype=np.float32).reshape(64, -1).copy()
    for step, replicated in ((1, None), (2, True)):
        with Checkpointer(**options | {"job": f"t{step}"}, replicated=replicated) as ckpt:
            ckpt.save(step, state).wait()
            ckpt.drain().wait()
        COMM.Barrier()
        sizes = [path.stat().st_size for path in sorted((pfs / f"step-{step:08d}").glob("rank-*"))]
        assert len(sizes) == SIZE and sum(sizes) < 8 * MIB + SIZE * 60_000
        assert max(sizes) < 8 * MIB / SIZE + 300_000
        with Checkpointer(**options | {"job": "fresh"}) as ckpt:
            found = {"alike": np.zeros_like(state["alike"]), "own": np.full(1000, -1)}
            assert ckpt.restore(found, step=step) == step
            assert found["alike"].tobytes() == state["alike"].tobytes() and (found["own"] == RANK).all()


@general
@two
def test_only_so_many_ranks_write_at_a_time(options: dict[str, Any], pfs: Path) -> None:
    with Checkpointer(**options, drain_writers=1, drain_rate=20 * MIB) as ckpt:
        ckpt.save(1, {"w": np.full(MIB, RANK)}).wait()
        drain, at_once = ckpt.drain(), [0]

        def ended() -> bool:
            at_once.append(len(list(pfs.glob("step-*/.rank*.tmp"))))
            return drain.done

        until(ended, "the drain")
        drain.wait()
    assert max(at_once) <= 1
    assert drain.seconds > SIZE * 8 * MIB / (20 * MIB) * 0.8


@general
def test_the_newest_and_every_mth_stay_and_what_is_foreign_is_never_touched(
    options: dict[str, Any], pfs: Path, nodes: Nodes
) -> None:
    def make_foreign() -> None:
        (pfs / "step-00000003").mkdir(parents=True)
        (pfs / "step-00000003" / "__0_0.distcp").write_bytes(b"somebody else's")
        (pfs / "notes.txt").write_text("mine")

    nodes.on_rank_0(make_foreign)
    with Checkpointer(**options, drain_every=1, keep_last=2, keep_every=4) as ckpt:
        for step in range(1, 8):
            ckpt.save(step, {"w": np.full(1000, step)}).wait()
            ckpt.drain().wait()
            if step == 2:
                nodes.on_rank_0(lambda: (pfs / "step-00000002" / "README").write_text("mine"))
    assert steps_in(pfs) == [7, 6, 4]
    assert sorted(path.name for path in pfs.iterdir()) == [
        "notes.txt", "step-00000002", "step-00000003", "step-00000004", "step-00000006", "step-00000007",
    ]  # fmt: skip
    assert [path.name for path in (pfs / "step-00000002").iterdir()] == ["README"]
    assert (pfs / "step-00000003" / "__0_0.distcp").read_bytes() == b"somebody else's"
    assert not (pfs / "step-00000001").exists() and not (pfs / "step-00000003.1").exists()


@general
def test_what_was_saved_last_is_restored_whether_it_is_in_memory_or_in_the_directory(
    options: dict[str, Any], pfs: Path, nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"w": np.zeros(1000)}

    def run(*steps: int) -> int | None:
        caplog.clear()
        with caplog.at_level(logging.INFO, "mlflash"), Checkpointer(**options) as ckpt:
            restored_step = ckpt.restore(state)
            assert restored_step is None or (state["w"] == restored_step).all()
            for step in steps:
                state["w"][:] = step
                ckpt.save(step, state).wait()
            if steps:
                ckpt.drain().wait()
            return restored_step

    assert run(1, 2) is None
    nodes.keep()
    assert run(3) == 2 and (RANK or "from memory" in caplog.text)
    nodes.bring_back()  # memory has 2, the directory 3
    assert run() == 3 and (RANK or f"from {pfs}/step-00000003: memory has only older steps: [1, 2]" in caplog.text)
    assert run() == 3 and (RANK or "from memory" in caplog.text)  # put back into memory by the run before
    # Training goes back to 1, and comes by 2 and 3 once more: the older 3 is not the newest any more.
    with Checkpointer(**options) as ckpt:
        assert ckpt.restore(state, step=2) == 2
        state["w"][:] = 30
        ckpt.save(3, state).wait()
        ckpt.drain().wait()
    assert sorted(p.name for p in pfs.iterdir()) == ["step-00000002", "step-00000003", "step-00000003.1"]
    nodes.lose(*range(SIZE))
    with Checkpointer(**options) as ckpt:
        assert ckpt.restore(state) == 3 and (state["w"] == 30).all()


@general
def test_another_directory_is_read_and_never_written(
    options: dict[str, Any], pfs: Path, root: Path, nodes: Nodes
) -> None:
    other = root / "other"
    with Checkpointer(**options | {"directory": other, "job": "before"}, drain_every=1) as ckpt:
        for step in (10, 20):
            ckpt.save(step, {"w": np.full(1000, step)}).wait()
            ckpt.drain().wait()
    COMM.Barrier()
    before = {path: path.stat().st_mtime_ns for path in other.rglob("*")}
    with Checkpointer(**options, drain_every=1, keep_last=1) as ckpt:
        state = {"w": np.zeros(1000, dtype=int)}
        ckpt.save(1, state).wait()
        assert ckpt.restore(state, source=other) == 20 and (state["w"] == 20).all()
        assert ckpt.restore(state, step=10, source=other) == 10 and (state["w"] == 10).all()
        assert ckpt.load(source=other)[0] == 20
        with pytest.raises(errors.StepNotFound):
            ckpt.restore(state, step=5, source=other)
        assert ckpt.restore(state, source=root / "nowhere") is None
        with pytest.raises(errors.MlflashError, match="Protocol not known"):  # on all ranks
            ckpt.restore(state, source="unknown://store" if RANK == SIZE - 1 else other)
        assert ckpt.save(21, state).wait().committed
    COMM.Barrier()
    assert {path: path.stat().st_mtime_ns for path in other.rglob("*")} == before
    assert steps_in(pfs) == [21]


@general
def test_a_second_drain_of_the_same_checkpoint_writes_nothing(options: dict[str, Any], pfs: Path) -> None:
    with Checkpointer(**options) as ckpt:
        with pytest.raises(errors.DrainFailed, match="nothing was committed"):
            ckpt.drain()
        ckpt.save(1, {"w": np.ones(10)}).wait()
        first = ckpt.drain().wait()
        assert ckpt.drain() is first
    assert steps_in(pfs) == [1]
    nowhere = Checkpointer(**{key: value for key, value in options.items() if key != "directory"})
    with nowhere as ckpt, pytest.raises(errors.DrainFailed, match="no directory"):
        ckpt.drain()


@two
@pytest.mark.parametrize("call", ["drain", "restore", "close"])
def test_a_rank_that_waits_for_a_drain_in_vain_leaves_out_no_call_that_the_others_make(
    call: str, options: dict[str, Any], pfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = errors.DeadlineExceeded("waited for a drain", rank=SIZE - 1)
    with Checkpointer(comm=COMM, **options) as ckpt:
        ckpt.save(1, {"w": np.full(9, RANK)}).wait()
        ckpt.drain().wait()
        if RANK == SIZE - 1:
            monkeypatch.setattr(ckpt._drains, "wait", lambda: (_ for _ in ()).throw(late))
        calls = {"drain": ckpt.drain, "restore": lambda: ckpt.restore({"w": np.zeros(9, int)}), "close": ckpt.close}
        with pytest.raises(errors.DeadlineExceeded, match="waited for a drain"):
            calls[call]()
        monkeypatch.undo()
        if call != "close":
            ckpt.save(2, {"w": np.full(9, RANK + 7)}).wait()
            ckpt.drain().wait()
    COMM.Barrier()
    assert steps_in(pfs) == ([1] if call == "close" else [2, 1])


@general
def test_an_exception_in_training_ends_a_drain_without_waiting_for_it(options: dict[str, Any], pfs: Path) -> None:
    with pytest.raises(ZeroDivisionError), Checkpointer(**options, drain_every=1, drain_rate=MIB / 1000) as ckpt:
        ckpt.save(1, {"w": np.zeros(4 * MIB)}).wait()
        until(lambda: [*pfs.glob(f"step-*/.rank-{RANK:05d}*.tmp")], "the drain to write")
        COMM.Barrier()
        raise ZeroDivisionError
    COMM.Barrier()  # it is here within the hours that the drain would take
    until(lambda: not list(pfs.glob("step-*/.*.tmp")), "the thread that wrote to tidy up")
    assert not list(pfs.glob("step-*/checkpoint.mlflash"))


def whole_tensors(folder: Path) -> dict[str, np.ndarray]:
    """What the file of safetensors in a folder has, of float32; its format is documented at Hugging Face."""
    raw = (folder / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    found = {}
    for name, entry in json.loads(raw[8:begin]).items():
        if name != "__metadata__":
            first, end = entry["data_offsets"]
            found[name] = np.frombuffer(raw[begin + first : begin + end], np.float32).reshape(entry["shape"])
    return found


@pytest.mark.skipif(SIZE != 3, reason="runs on 3 ranks")
def test_a_part_is_also_written_whole_for_hugging_face(
    options: dict[str, Any], pfs: Path, process_group: None, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 2))
    expected = {name: tensor.detach().numpy().copy() for name, tensor in net.named_parameters()}
    state = {"model": fully_shard(net), "step": 0}
    with Checkpointer(**options, drain_every=1, keep_last=1, safetensors="model") as ckpt:
        for step in (1, 2):
            ckpt.save(step, state).wait()
            ckpt.wait_drained()
    COMM.barrier()
    assert [path.name for path in (pfs / "safetensors").iterdir()] == ["step-00000002"]
    found = whole_tensors(pfs / "safetensors" / "step-00000002")
    assert found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in found)
    with Checkpointer(**{**options, "job": "other"}, drain_every=1, safetensors="nothing") as ckpt:
        ckpt.save(3, state)
    text = COMM.bcast(caplog.text)
    assert text.count("step 3 has no files in safetensors") == 1 and (pfs / "step-00000003").exists()
