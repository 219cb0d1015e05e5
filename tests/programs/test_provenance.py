"""The provenance of real drained checkpoints, by the command `mlflash verify`: it holds, or each change is named."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import own_memory
from keys import key_pair
from processes import ran

import mlflash
from mlflash.drain import provenance
from mlflash.drain.checkpoint_directory import list_checkpoints
from mlflash.errors import ConfigError
from mlflash.mpi.world import World
from mlflash.placement.topology import this_node
from mlflash.storage import canonical_json
from mlflash.storage.store import Directory
from mlflash.tools import on_disk
from mlflash.version import loaded_versions

MLFLASH = Path(sys.executable).with_name("mlflash")
FILES = {"hdf5": ["checkpoint.h5", "rank-00000.h5"],
         "dcp": [".metadata", "__0_0.distcp", "checkpoint.mlflash", "rank-00000.mlflash"]}  # fmt: skip
CARD_FILE = {"hdf5": "rank-00000.h5", "dcp": "rank-00000.mlflash"}
MASTER = {"hdf5": "checkpoint.h5", "dcp": "checkpoint.mlflash"}
GIVEN = {"seed": 1, "git": "0a1b", "who": "ä"}
VERDICT = "verdict"  # which may change, and is no part of it
SAID = {"provenance.json", "provenance.json.sig", VERDICT}


def state_at(step: int) -> dict[str, Any]:
    shared = torch.full((1000,), float(step))
    return {"w": shared, "tied": shared, "b": torch.arange(9, dtype=torch.bfloat16), "a": np.arange(5.0) + step,
            "in": (torch.ones(3),), "scalar": torch.tensor(2.5), "empty": torch.empty(0, 2), "lr": 0.1}  # fmt: skip


def train(directory: Path, shm: Path, *steps: int, **options: Any) -> None:
    given = {"job": "j", "memory": str(shm), "redundancy": "none", "strict": True, **options}
    with mlflash.Checkpointer(directory, **given) as ckpt:
        for step in steps:
            ckpt.save(step, state_at(step)).wait()
            ckpt.drain().wait(30)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A private key, its public key, and another public key."""
    folder = tmp_path_factory.mktemp("keys")
    return *key_pair(folder), key_pair(folder, "other")[1]


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    with own_memory() as path:
        yield path


@pytest.fixture(scope="module", params=["hdf5", "dcp"])
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def drained(form: str, memory: Path, keys: tuple[Path, Path, Path], tmp_path_factory: pytest.TempPathFactory
            ) -> dict[bool, Path]:  # fmt: skip
    """Two drained checkpoints in a directory, unsigned and signed."""
    made = {False: tmp_path_factory.mktemp("unsigned"), True: tmp_path_factory.mktemp("signed")}
    for signed, path in made.items():
        key = {"sign_key": keys[0]} if signed else {}
        train(path, memory, 1, 2, format=form, job=f"j{signed}", provenance=GIVEN, **key)
    return made


@pytest.fixture(params=[False, True], ids=["unsigned", "signed"])
def directory(request: pytest.FixtureRequest, drained: dict[bool, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(drained[request.param], tmp_path / "d"))


@pytest.fixture
def signed(drained: dict[bool, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(drained[True], tmp_path / "d"))


def verify(directory: Path, shm: Path, *arguments: object, code: int) -> subprocess.CompletedProcess[str]:
    done = ran(MLFLASH, "verify", "--job", "none", "-d", directory, "--memory", shm, *arguments, code=code)
    assert "Traceback" not in done.stderr, (done.stdout, done.stderr)
    return done


def damage(directory: Path, shm: Path, *arguments: object) -> dict[str, str]:
    """What the command finds in the older checkpoint: files, and what is wrong with each, the last sentence of each."""
    done = json.loads(verify(directory, shm, "--json", *arguments, code=1).stdout)
    (found,) = (checkpoint for checkpoint in done["directory"] if checkpoint["where"].endswith("step-00000001"))
    assert not found["provenance"]["holds"]
    sentences: dict[str, str] = {}
    for file in found["damaged"]:
        sentences[file["file"]] = sentences.get(file["file"], "") + file["damage"] + "|"
    return sentences


def test_the_command_says_what_was_recorded_and_that_it_holds(directory: Path, form: str, shm: Path) -> None:
    text = verify(directory, shm, code=0).stdout
    is_signed = (directory / "step-00000001/provenance.json.sig").exists()
    count = len(FILES[form]) + 2 + is_signed  # provenance and verdict, too
    assert text.count(f"{count} of {count} files good") == 2 and "damaged" not in text
    (line,) = (line for line in text.splitlines() if "provenance: step 2" in line)
    assert f"1 rank on {os.uname().nodename}, none; saved 20" in line and f"mlflash {mlflash.__version__}" in line
    assert f"python {sys.version.split()[0]}" in line and f"torch {torch.__version__}" in line
    assert line.endswith(("signed, not checked without --key" if is_signed else "not signed") + "; it holds")
    told = json.loads(verify(directory, shm, "--json", code=0).stdout)["directory"]
    provenances = [checkpoint["provenance"] for checkpoint in told]
    assert [found["said"]["given"] for found in provenances] == [GIVEN, GIVEN]
    assert [(found["holds"], found["said"]["step"]) for found in provenances] == [(True, 2), (True, 1)]


def test_a_key_finds_what_it_has_signed_and_nothing_else(
    drained: dict[bool, Path], keys: tuple[Path, Path, Path], shm: Path, tmp_path: Path
) -> None:
    _, public, other = keys
    assert verify(drained[True], shm, "--key", public, code=0).stdout.count("; signed by this key; it holds") == 2
    assert set(damage(drained[True], shm, "--key", other)) == {"provenance.json.sig"}
    text = verify(drained[True], shm, "--key", other, code=1).stdout
    assert text.count("another key has signed this") == 2 and "not signed by this key; it does not hold" in text
    assert damage(drained[False], shm, "--key", public) == {"provenance.json": "it is not signed|"}
    assert "is not a key that can be used" in verify(drained[True], shm, "--key", keys[0], code=2).stderr
    assert "a key cannot be read" in verify(drained[True], shm, "--key", tmp_path / "nothing", code=2).stderr


def test_openssl_finds_the_signature_good(signed: Path, keys: tuple[Path, Path, Path], tmp_path: Path) -> None:
    folder = signed / "step-00000002"
    (tmp_path / "digest").write_text(json.loads((folder / "provenance.json").read_text())["digest"])
    ran("openssl", "pkeyutl", "-verify", "-pubin", "-inkey", keys[1], "-rawin", "-in", tmp_path / "digest", "-sigfile",
        folder / "provenance.json.sig")  # fmt: skip


def rewrite(path: Path, change: Callable[[dict[str, Any]], None], with_digest: bool) -> None:
    document = json.loads(path.read_text())
    change(document)
    if with_digest:
        document["digest"] = provenance.digest_of(document)
    path.write_bytes(canonical_json.encode(document))


def test_an_edit_of_what_is_said_is_found(signed: Path, keys: tuple[Path, Path, Path], shm: Path) -> None:
    path = signed / "step-00000001/provenance.json"
    good = path.read_bytes()
    rewrite(path, lambda document: document["given"].update(seed=2), with_digest=False)
    found = damage(signed, shm)
    assert found == {"provenance.json": "it was changed: its digest does not match its content|"}
    path.write_text(json.dumps(json.loads(good), indent=1))
    assert "it is not as mlflash writes it" in damage(signed, shm)["provenance.json"]
    path.write_bytes(b"")
    assert "it was changed, or it is not a provenance" in damage(signed, shm)["provenance.json"]
    # Whoever makes the digest anew cannot sign it.
    rewrite_good = functools.partial(rewrite, with_digest=True)
    path.write_bytes(good)
    rewrite_good(path, lambda document: document["given"].update(seed=2))
    verify(signed, shm, code=0)
    assert "no signature of this provenance" in damage(signed, shm, "--key", keys[1])["provenance.json.sig"]
    rewrite_good(path, lambda document: document.update(signer=""))
    assert "another key has signed this: unknown" in damage(signed, shm, "--key", keys[1])["provenance.json.sig"]
    path.with_name("provenance.json.sig").unlink()
    verify(signed, shm, code=0)
    assert damage(signed, shm, "--key", keys[1]) == {"provenance.json": "it is not signed|"}


def test_a_file_of_another_checkpoint_is_named(directory: Path, form: str, shm: Path) -> None:
    older, newer = directory / "step-00000001", directory / "step-00000002"
    name = CARD_FILE[form]
    good = (older / name).read_bytes()
    shutil.copy(newer / name, older / name)
    assert "it is of another checkpoint: of step 2 of 1 rank, save " in damage(directory, shm)[name]
    (older / name).write_bytes((older / MASTER[form]).read_bytes())
    assert "it is the file that commits a checkpoint" in damage(directory, shm)[name]
    (older / name).write_bytes(good)
    for other in SAID:
        if (newer / other).exists():
            shutil.copy(newer / other, older / other)
    assert f"it is of another checkpoint than {MASTER[form]}: of step 2" in damage(directory, shm)["provenance.json"]


def test_what_is_missing_or_too_much_is_named(directory: Path, form: str, shm: Path) -> None:
    folder = directory / "step-00000001"
    for name in {path.name for path in folder.iterdir()} - {MASTER[form], VERDICT}:
        (folder / name).rename(directory / "aside")
        assert "it is missing|" in damage(directory, shm)[name]
        (directory / "aside").rename(folder / name)
    extra = CARD_FILE[form].replace("0.", "1.")
    shutil.copy(folder / CARD_FILE[form], folder / extra)
    assert damage(directory, shm) == {extra: "it is not among the files of this checkpoint|"}
    (folder / extra).rename(folder / "notes.txt")  # what mlflash does not write is the user's affair
    verify(directory, shm, code=0)


def test_any_byte_of_any_file_that_changes_is_found(drained: dict[bool, Path], form: str, tmp_path: Path) -> None:
    store = Directory(str(shutil.copytree(drained[True], tmp_path / "d")))
    (listed,) = (checkpoint for checkpoint in list_checkpoints(store) if checkpoint.step == 1)
    folder, alone = tmp_path / "d" / listed.folder, World(None, this_node(), 60.0)
    _, wrong, found = on_disk.verify(alone, store, listed, lambda _: None)
    assert wrong == [] and found is not None and found.document is not None
    chosen = random.Random(7)
    for name in [*FILES[form], "provenance.json"]:
        good = (folder / name).read_bytes()
        ends = [512, len(good) - 1] if len(good) > 512 and name != MASTER[form] else [len(good) - 1]
        for at in [*ends, *(chosen.randrange(512 if name == MASTER[form] else 0, len(good)) for _ in range(40))]:
            (folder / name).write_bytes(good[:at] + bytes([good[at] ^ 1 << chosen.randrange(8)]) + good[at + 1 :])
            assert on_disk.verify(alone, store, listed, lambda _: None)[1], f"byte {at} of {name}"
        (folder / name).write_bytes(good)
    assert on_disk.verify(alone, store, listed, lambda _: None)[1] == []


def test_a_restore_goes_on_whatever_becomes_of_it(directory: Path, shm: Path, form: str) -> None:
    for number, content in enumerate((None, b"", b"garbage")):
        for path in directory.glob("*/provenance.json*"):
            path.write_bytes(content) if content is not None else path.unlink()
        state = state_at(0)
        with mlflash.Checkpointer(job=f"r{number}", memory=str(shm), redundancy="none", format=form) as ckpt:
            assert ckpt.restore(state, source=directory) == 2
        assert state["w"].tolist() == [2.0] * 1000 and state["a"].tolist() == state_at(2)["a"].tolist()


def test_a_key_that_cannot_be_used_ends_the_start(shm: Path, tmp_path: Path, keys: tuple[Path, Path, Path]) -> None:
    options = {"job": "j", "memory": str(shm), "redundancy": "none"}
    with pytest.raises(ConfigError, match="a key cannot be read"):
        mlflash.Checkpointer(tmp_path / "d", sign_key=tmp_path / "nothing.pem", **options)
    with pytest.raises(ConfigError, match="is not a key that can be used"):
        mlflash.Checkpointer(tmp_path / "d", sign_key=keys[1], **options)
    train(tmp_path / "d", shm, 1, sign_key=keys[0])  # the name and the memory are free again
    assert (tmp_path / "d/step-00000001/provenance.json.sig").stat().st_size == 64


def test_what_is_scavenged_says_so_and_is_signed(shm: Path, tmp_path: Path, keys: tuple[Path, Path, Path]) -> None:
    """And it says what the trainer said: its versions, and what was given there."""
    options: dict[str, Any] = {"job": "j", "memory": str(shm), "redundancy": "none", "provenance": GIVEN}
    with mlflash.Checkpointer(tmp_path / "d", **options) as ckpt:
        ckpt.save(5, state_at(5)).wait()
    call = [MLFLASH, "inspect", "5", "--job", "j", "--memory", shm]
    text = ran(*call).stdout
    assert f"\nprovenance: mlflash {mlflash.__version__}, python 3." in text and '; {"git": "0a1b", "seed": 1' in text
    told = json.loads(ran(*call, "--json").stdout)
    versions = loaded_versions()
    assert versions["torch"] == torch.__version__ and told["provenance"] == {"versions": versions, "given": GIVEN}
    ran(MLFLASH, "scavenge", tmp_path / "d", "--job", "j", "--memory", shm, MLFLASH_SIGN_KEY=keys[0])
    text = verify(tmp_path / "d", shm, "--key", keys[1], code=0).stdout
    assert "drained by `mlflash scavenge`" in text and "signed by this key; it holds" in text
    document = json.loads((tmp_path / "d/step-00000005/provenance.json").read_text())
    assert (document["versions"], document["given"]) == (versions, GIVEN)
