"""The directory that checkpoints are drained to: files that are there whole or not at all, on a disk and in S3."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import fsspec
import numpy as np
import pytest
import s3
import torch
from click.testing import CliRunner
from keys import key_pair

from mlflash import Checkpointer, errors
from mlflash.cli import main
from mlflash.drain.checkpoint_directory import list_checkpoints
from mlflash.drain.provenance import public_key
from mlflash.storage import store
from mlflash.storage.store import Directory, Remote, open_store
from mlflash.tools import on_disk
from mlflash.tools.on_disk import verify_files

MIB = 1 << 20


class Interrupted(Exception):
    """Something that a content may raise."""


def cut_after(*pieces: bytes) -> Iterator[bytes]:
    yield from pieces
    raise Interrupted


def everything(top: Path) -> list[str]:
    return sorted(str(path.relative_to(top)) for path in top.rglob("*"))


# A directory of a file system


@pytest.fixture(params=["directory", "memory", "file", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> store.Store:
    """A store of each kind, empty."""
    urls = {"directory": str(tmp_path / "d"), "memory": f"memory://{tmp_path.name}", "file": f"file://{tmp_path}/f"}
    return open_store(urls.get(request.param) or f"{request.getfixturevalue('bucket')}/run")


def test_a_file_is_written_whole_read_in_any_part_listed_and_deleted_by_its_name(place: store.Store) -> None:
    assert place.names() == []
    place.make()
    inside = place.at("step-00000001")
    assert inside.path == f"{place.path}/step-00000001"
    inside.make(parents=False)
    assert inside.write("file", [b"abc", memoryview(b"defg"), np.arange(3, dtype="<u2"), bytearray(b"h"), b""]) == 14
    content = b"abcdefg\0\0\1\0\2\0h"
    assert inside.read("file") == content and inside.nbytes("file") == 14
    for start, nbytes in ((0, 3), (2, 5), (10, 100), (14, 5), (100, 5), (5, 0), (0, 0)):
        assert inside.read("file", start, nbytes) == content[start : start + nbytes]
    assert inside.write("file", [b"new"]) == 3 and inside.read("file") == b"new"
    assert inside.write("empty", []) == 0 and inside.read("empty") == inside.read("empty", 0, 512) == b""
    assert (inside.names(), place.names()) == (["empty", "file"], ["step-00000001"])
    for attempt in (
        lambda: inside.read("no"),
        lambda: inside.read("no", 0, 5),
        lambda: inside.read("no", 5, 0),
        lambda: inside.nbytes("no"),
    ):
        with pytest.raises(FileNotFoundError, match="step-00000001/no"):
            attempt()
    assert not inside.remove_directory() and inside.names() == ["empty", "file"]
    for name in ("file", "file", "empty"):
        inside.remove(name)
    assert inside.remove_directory() and inside.remove_directory() and place.names() == []


def test_content_that_breaks_off_leaves_nothing_behind_and_the_older_file_as_it_was(tmp_path: Path) -> None:
    place = Directory(str(tmp_path))
    place.write("old", [b"as it was"])
    for name in ("old", "new"):
        with pytest.raises(Interrupted):
            place.write(name, cut_after(b"x" * 100_000), "tag")
    assert everything(tmp_path) == ["old"] and place.read("old") == b"as it was"


def test_directories_are_0700_and_files_0600_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        place = Directory(str(tmp_path / "a" / "b")).at("c")
        place.make()
        place.write("file", [b"x"])
    finally:
        os.umask(before)
    assert [(tmp_path / path).stat().st_mode & 0o777 for path in ("a", "a/b", "a/b/c")] == [0o700] * 3
    assert (tmp_path / "a/b/c/file").stat().st_mode & 0o777 == 0o600


def test_a_directory_is_made_with_those_above_it_only_where_that_is_asked_for(tmp_path: Path) -> None:
    place = Directory(str(tmp_path / "a" / "b"))
    assert place.names() == []
    with pytest.raises(FileNotFoundError):
        place.make(parents=False)
    with pytest.raises(FileNotFoundError):
        place.write("file", [b"x"])
    assert everything(tmp_path) == []
    place.make()
    place.make()
    place.at("c").make(parents=False)
    assert everything(tmp_path) == ["a", "a/b", "a/b/c"]


@pytest.mark.parametrize("there", ["file", "link"])
def test_a_temporary_name_that_is_taken_is_neither_overwritten_nor_followed(tmp_path: Path, there: str) -> None:
    (tmp_path / "victim").write_text("precious")
    temporary = tmp_path / ".file.tag.tmp"
    if there == "file":
        temporary.write_text("somebody writes here")
    else:
        temporary.symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        Directory(str(tmp_path)).write("file", [b"x"], "tag")
    assert (tmp_path / "victim").read_text() == "precious" and os.path.lexists(temporary)
    assert not (tmp_path / "file").exists()


def test_a_link_with_the_name_of_a_file_is_replaced_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "file").symlink_to(tmp_path / "victim")
    place = Directory(str(tmp_path))
    with pytest.raises(errors.UnsafePath, match="not followed"):
        place.read("file")
    assert place.nbytes("file") != 8, "the size of the link itself"
    place.write("file", [b"new"])
    assert (tmp_path / "victim").read_text() == "precious" and not (tmp_path / "file").is_symlink()
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    place.remove("link")
    assert everything(tmp_path) == ["file", "victim"]


def test_a_folder_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("precious")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "inside").symlink_to(tmp_path / "outside")
    inside = Directory(str(tmp_path / "d")).at("inside")
    for attempt in (inside.names, lambda: inside.read("file"), lambda: inside.remove("file"),
                    lambda: inside.write("file", [b"x"])):  # fmt: skip
        with pytest.raises(errors.UnsafePath, match="not followed"):
            attempt()
    assert not inside.remove_directory()
    assert (tmp_path / "outside" / "file").read_text() == "precious"


def test_what_is_no_file_is_not_read_nor_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(errors.UnsafePath, match="no file"):
            Directory(str(tmp_path)).read(name)


def test_a_url_is_a_url_and_anything_else_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("a", "./a", "a:b", "://a", "/x//y", "1s3://x", tmp_path / "s3:"):
        assert isinstance(open_store(path), Directory) and os.path.isabs(open_store(path).path)
    for url in ("memory://x", "s3://x/y/", "MEMORY://x"):
        assert isinstance(open_store(url.lower()), Remote) and store.is_url(url)
    for url in ("file:///x/y%20z", "FILE:///x/y%20z", "local:///x/y z"):
        assert isinstance(open_store(url), Directory) and open_store(url).path == "/x/y z" and not store.is_url(url)
    assert everything(tmp_path) == []


# Any URL that fsspec knows


def state_at(step: int) -> dict[str, Any]:
    numbers = np.random.default_rng(step)
    w = torch.from_numpy(numbers.standard_normal((300, 100)))
    return {"w": w, "tied": w, "half": torch.from_numpy(numbers.standard_normal(9)).bfloat16(), "step": step,
            "array": numbers.integers(0, 9, (4, 5)), "empty": torch.zeros(0, 3), "lr": 0.1 * step}  # fmt: skip


def bits(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.tobytes() if isinstance(value, np.ndarray) else
            value.contiguous().flatten().view(torch.uint8).numpy().tobytes() if isinstance(value, torch.Tensor)
            else value for key, value in state.items()}  # fmt: skip


def checkpointer(directory: str, shm: Path, **options: Any) -> Checkpointer:
    return Checkpointer(directory, **{"job": "j", "memory": str(shm), "redundancy": "none", "strict": True, **options})


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The connections that were tried to be made."""
    tried: list[Any] = []
    connect = aiohttp.TCPConnector._create_connection

    async def noted(self: Any, request: Any, *more: Any) -> Any:
        tried.append(request)
        return await connect(self, request, *more)

    monkeypatch.setattr(aiohttp.TCPConnector, "_create_connection", noted)
    return tried


def lose_memory(shm: Path) -> None:
    for path in shm.iterdir():
        shutil.rmtree(path)


# S3


@pytest.fixture(scope="module")
def server() -> Iterator[s3.Server]:
    with s3.served() as running, s3.used(running.address):
        yield running


@pytest.fixture
def bucket(server: s3.Server, request: pytest.FixtureRequest) -> str:
    """A fresh bucket."""
    name = f"bucket-{abs(hash(request.node.name)):x}"
    fsspec.filesystem("s3").mkdir(name)
    return f"s3://{name}"


def uploads(bucket: str) -> list[Any]:
    """The multipart uploads that are neither completed nor aborted: they cost money and cannot be seen."""
    return (
        fsspec.filesystem("s3")
        .call_s3("list_multipart_uploads", Bucket=bucket.removeprefix("s3://"))
        .get("Uploads", [])
    )


def objects(bucket: str) -> list[str]:
    files = fsspec.filesystem("s3")
    files.invalidate_cache()
    return sorted(path.split("/", 1)[1] for path in files.find(bucket))


def test_an_upload_of_several_parts_is_one_object_or_none(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_REMOTE_CHUNK_NBYTES", 5 * MIB)  # the least that S3 takes
    place = open_store(f"{bucket}/run")
    piece = np.random.default_rng(0).bytes(3 * MIB)

    def watched() -> Iterator[bytes]:
        for _ in range(4):
            yield piece
        assert len(uploads(bucket)) == 1 and objects(bucket) == [], "it is on its way, and not there yet"
        yield piece

    assert place.write("whole", watched()) == 15 * MIB
    assert place.read("whole") == piece * 5 and uploads(bucket) == []
    for name in ("cut", "whole"):
        with pytest.raises(Interrupted):
            place.write(name, cut_after(piece, piece, piece, piece))
    with pytest.raises(Interrupted):
        place.write("cut small", cut_after(b"abc"))
    assert objects(bucket) == ["run/whole"] and uploads(bucket) == []
    assert place.read("whole", 0, 10) == piece[:10], "what was there before stays"


def test_a_bucket_that_is_not_there_is_said_so(server: s3.Server) -> None:
    place = open_store("s3://no-such-bucket/run")
    assert place.names() == []
    with pytest.raises(FileNotFoundError, match=r"bucket does not exist.*s3://no-such-bucket/run/file"):
        place.write("file", [b"x"])


@contextlib.contextmanager
def unreachable(kind: str) -> Iterator[str]:
    """An address where nobody answers: connections are refused, never made, or made and not served."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        if kind != "refused":
            listener.listen(0 if kind == "lost" else 50)
        if kind == "lost":  # a full queue: the kernel drops what comes
            for _ in range(3):
                client = stack.enter_context(socket.socket())
                client.setblocking(False)
                client.connect_ex(("127.0.0.1", port))
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("kind", ["refused", "lost", "silent"])
def test_s3_that_is_not_there_costs_a_bounded_time_and_ends_in_an_os_error(
    kind: str, tries: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_S3_CONNECT_S", 0.3)
    monkeypatch.setattr(store, "_S3_READ_S", 0.31)  # so that s3fs makes a new client
    with unreachable(kind) as address, s3.used(address):
        monkeypatch.setattr(fsspec.config, "conf", {"s3": {"endpoint_url": address}})
        place = open_store("s3://bucket/run")
        with pytest.raises(OSError, match=rf"(?i)(connect|timeout).*{address}.*s3://bucket/run/file"):
            place.read("file", 0, 5)
        assert 0 < len(tries) <= store._S3_TRIES**3, "each of them has a deadline, see below"


@pytest.mark.parametrize("form", ["hdf5", "dcp"])
def test_training_goes_the_full_circle_with_s3(bucket: str, shm: Path, form: str, tmp_path: Path) -> None:
    url, files = f"{bucket}/run", fsspec.filesystem("s3")
    private, public = key_pair(tmp_path)
    files.pipe(f"{bucket}/run/notes.txt", b"mine")
    files.pipe(f"{bucket}/run/step-00000001/README", b"mine")
    files.pipe(f"{bucket}/run/step-00000009/checkpoint.h5", b"")  # foreign, and empty
    with checkpointer(url, shm, format=form, drain_every=1, keep_last=2, sign_key=private) as ckpt:
        for step in (1, 2, 3, 4):
            ckpt.save(step, state_at(step)).wait()
            assert ckpt.drain().wait(30).path == f"{url}/step-{step:08d}" + (".1" if step == 1 else "")
    for listed in list_checkpoints(there := open_store(url)):
        provenance = on_disk.provenance_of(there, listed, public_key(str(public)))
        assert provenance.signature == "good" and provenance.document is not None and provenance.wrong == []
        assert verify_files(there.at(listed.folder), listed, provenance.document, 0, 1) == []
    names = ["provenance.json", "provenance.json.sig", "verdict"] + {
        "hdf5": ["checkpoint.h5", "rank-00000.h5"],
        "dcp": [".metadata", "__0_0.distcp", "checkpoint.mlflash", "rank-00000.mlflash"],
    }[form]
    assert objects(bucket) == sorted(
        ["run/notes.txt", "run/step-00000001/README", "run/step-00000009/checkpoint.h5"]
        + [f"run/step-0000000{step}/{name}" for step in (3, 4) for name in names]
    )
    assert uploads(bucket) == []
    lose_memory(shm)
    with checkpointer(url, shm) as ckpt:
        assert ckpt.steps() == [3, 4]
        state = state_at(0)
        assert ckpt.restore(state) == 4 and bits(state) == bits(state_at(4))
        assert ckpt.report()["restored_from"] == f"{url}/step-00000004"
        step, loaded = ckpt.load(step=3)
        assert step == 3 and bits(loaded) == bits(state_at(3)) and loaded["w"] is loaded["tied"]


def test_what_is_in_s3_can_be_exported_to_s3(bucket: str, shm: Path) -> None:
    from safetensors.torch import load

    with checkpointer(f"{bucket}/run", shm) as ckpt:
        ckpt.save(1, state_at(1)).wait()
        ckpt.drain().wait(30)
    lose_memory(shm)
    arguments = ["export", "newest", f"{bucket}/out", "--to", "safetensors", "-d", f"{bucket}/run", "--json"]
    done = CliRunner().invoke(main, arguments, env={"MLFLASH_MEMORY": str(shm), "MLFLASH_JOB": "j"})
    assert done.exit_code == 0, (done.output, done.exception)
    report = json.loads(done.stdout)
    assert (report["step"], report["path"]) == (1, f"{bucket}/out")
    exported = load(open_store(f"{bucket}/out").read("model.safetensors"))
    assert bits(exported)["w"] == bits(state_at(1))["w"] and bits(exported)["half"] == bits(state_at(1))["half"]
    second = CliRunner().invoke(main, arguments, env={"MLFLASH_MEMORY": str(shm), "MLFLASH_JOB": "j"})
    assert second.exit_code != 0 and "is not empty" in second.output


def test_while_s3_is_down_saves_go_on_and_the_drain_after_it_is_back_works(
    server: s3.Server, bucket: str, shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{bucket}/run"
    with checkpointer(url, shm, drain_every=1) as ckpt:
        ckpt.save(1, state_at(1)).wait()
        ckpt.drain().wait(30)
        server.stop()
        try:
            where = ("127.0.0.1", int(server.address.rpartition(":")[2]))
            with socket.create_server(where):  # the drain gets no answer before the saves are through
                for step in (2, 3, 4):
                    ckpt.save(step, state_at(step)).wait(60)
                drain = ckpt._drains.last
                assert not drain.done
            with pytest.raises(errors.DrainFailed, match=rf"connect.*{url}"):
                drain.wait(60)
            assert drain.step == 2 and ckpt.steps()[-1] == 4
        finally:
            server.start()
        ckpt.wait_drained()
        ckpt.save(5, state_at(5)).wait()
        assert ckpt.drain().wait(30).step == 5
    assert list_checkpoints(open_store(url))[0].step == 5
    assert "was not drained" in caplog.text and uploads(bucket) == []
    lose_memory(shm)
    with checkpointer(url, shm) as ckpt:
        state = state_at(0)
        assert ckpt.restore(state) == 5 and bits(state) == bits(state_at(5))


def test_s3_that_goes_down_in_the_middle_of_an_upload_leaves_no_object(
    server: s3.Server, bucket: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store, "_REMOTE_CHUNK_NBYTES", 5 * MIB)
    place = open_store(f"{bucket}/run")

    def content() -> Iterator[bytes]:
        yield bytes(6 * MIB)
        server.stop()
        yield bytes(6 * MIB)

    try:
        with pytest.raises(OSError, match=f"connect.*{bucket}/run/file"):
            place.write("file", content())
    finally:
        server.start()
    assert "could not be discarded" in caplog.text
    assert objects(bucket) == [] and len(uploads(bucket)) == 1, "nothing can abort it while S3 is down"
    place.write("file", [b"x"])
    assert objects(bucket) == ["run/file"]


def test_a_checkpointer_starts_while_s3_is_down_and_says_so(
    server: s3.Server, bucket: str, shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{bucket}/run"
    with checkpointer(url, shm) as ckpt:
        ckpt.save(1, state_at(1)).wait()
    server.stop()
    try:
        with checkpointer(url, shm, strict=False) as ckpt:
            state = state_at(0)
            assert ckpt.restore(state) == 1 and bits(state) == bits(state_at(1)), "from memory"
        assert caplog.text.count(f"{url} cannot be read") == 1
    finally:
        server.start()


PROGRAM = """
import gc, sys
import numpy as np
from mlflash import Checkpointer
url, memory = sys.argv[1:]
for drains in (True, False):
    with Checkpointer(url, job="j", memory=memory, redundancy="none", drain_every=int(drains)) as ckpt:
        state = {"w": np.zeros(9)}
        ckpt.restore(state, source=url)
        ckpt.save(2 - drains, state).wait()
gc.collect()
"""


def test_nothing_is_left_open_at_the_end_of_a_process(bucket: str, shm: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", PROGRAM, f"{bucket}/run", str(shm)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "run/step-00000001/checkpoint.mlflash" in objects(bucket)
