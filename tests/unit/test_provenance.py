"""What a drained checkpoint says of where it comes from: its form, the digest, keys, and what is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, x25519
from hypothesis import given
from hypothesis import strategies as st
from keys import key_pair

from mlflash import config
from mlflash.draining import provenance
from mlflash.draining.drain_input import DrainInput, FileDigest, Origin, Receipt
from mlflash.errors import ConfigError
from mlflash.memory.slot_header import Attempt
from mlflash.state import manifest
from mlflash.storage import canonical_json
from mlflash.storage.file_holes import FileWithHoles
from mlflash.storage.signatures import private_key, public_key

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(), inside, max_size=4),
)
FILES = [FileDigest("rank-00000.h5", 10, "0" * 64), FileDigest("rank-00001.h5", 11, "1" * 64)]
LAST = FileDigest("checkpoint.h5", 12, "2" * 64)
INPUT = DrainInput(Attempt(bytes(range(16)), 9), 30, 2, dict)


# The canonical form


def test_the_form_is_the_one_of_the_docs() -> None:
    value = {"b": [1, 2.5, 1e100, -0.0, True, None], "ä": 'é"\n\x7f', "B": {}, "a": []}
    raw = '{"B":{},"a":[],"b":[1,2.5,1e+100,-0.0,true,null],"ä":"é\\"\\n\x7f"}'
    assert canonical_json.encode(value) == raw.encode()


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [1, {"b": math.nan}]}, r"a\[1\]\.b is nan"),
        ({"a": -math.inf}, "a is -inf"),
        ({1: 2}, "the key 1 of it is no text"),
        ({"a": {None: 2}}, "the key None of a is no text"),
        ({"a": (1, 2)}, "a is of <class 'tuple'>"),
        ({"a": b"x"}, "a is of <class 'bytes'>"),
        ({"a": np.int64(1)}, "a is of <class 'numpy.int64'>"),
        ({"a": {1, 2}}, "a is of <class 'set'>"),
        ({"a": "\ud800"}, "a text in a is not UTF-8"),
        ({"\ud800": 1}, "a text in it is not UTF-8"),
        (CYCLE, "it contains itself"),
    ],
)
def test_what_json_does_not_have_is_refused_with_its_path(value: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        canonical_json.encode(value)


# What the user gives


def test_what_is_given_is_kept_as_canonical_json_also_from_the_environment() -> None:
    made = config.from_environment({}, None, job="j", provenance={"seed": 1, "git": "ä"})
    assert made.provenance == '{"git":"ä","seed":1}'
    told = config.from_environment({"MLFLASH_PROVENANCE": ' {"seed": 1,\n"git": "ä"}'}, None, job="j")
    assert told.provenance == made.provenance
    assert config.from_environment({}, None, job="j").provenance == ""
    assert config.from_environment({"MLFLASH_PROVENANCE": "{}"}, None, job="j", provenance={"a": 1}).provenance != "{}"


@pytest.mark.parametrize("wrong", [{"a": object()}, {"a": math.nan}, {1: 1}, [1], "[1]", "no JSON", '{"a":NaN}', 7])
def test_what_cannot_be_written_is_refused_when_it_is_given(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"bad setting provenance.*MLFLASH_PROVENANCE"):
        config.from_environment({}, None, job="j", provenance=wrong)


def test_the_key_is_named_by_a_whole_path_as_couriers_may_stand_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert config.from_environment({}, None, job="j", sign_key="key.pem").sign_key == str(tmp_path / "key.pem")
    assert config.from_environment({"MLFLASH_SIGN_KEY": "k"}, None, job="j").sign_key == str(tmp_path / "k")


# The document


def receipts(origins: list[Origin]) -> list[Receipt]:
    return [
        Receipt(rank, [], {}, None, origin=origin, digests=(FILES[rank],) if rank < len(FILES) else ())
        for rank, origin in enumerate(origins)
    ]


def written(signer: provenance.Signer | None = None, **changed: Any) -> dict[str, bytes]:
    said = manifest.provenance_of({"python": "3.11.7"}, '{"seed":1}')
    origins = [Origin(0, "n1", "copy", 1_700_000_000_123_456_789, said),
               Origin(1, "n2", "copy", 1_700_000_000_000_000_000)]  # fmt: skip
    given, signer = dataclasses.replace(INPUT, **changed), signer or provenance.Signer()
    return dict(provenance.files(signer, given, receipts(origins), [LAST], "hdf5", "j", "me", 1_700_000_009 * 10**9))


def test_it_says_versions_nodes_times_what_the_user_gives_and_each_file() -> None:
    (raw,) = written().values()
    document = provenance.read(raw)
    assert (
        document.pop("uid") >= 0 and document.pop("digest") and document.pop("drain").startswith(bytes(range(16)).hex())
    )
    assert document == {
        "format": 1, "versions": {"python": "3.11.7"}, "job": "j", "step": 30, "run": bytes(range(16)).hex(),
        "generation": 9, "world_size": 2, "nodes": [{"host": "n1", "ranks": 1}, {"host": "n2", "ranks": 1}],
        "redundancy": "copy", "saved": "2023-11-14T22:13:20.123456Z", "drained": "2023-11-14T22:13:29.000000Z",
        "by": "job", "given": {"seed": 1}, "checks": {}, "form": "hdf5", "signer": "",
        "files": {its.name: {"nbytes": its.nbytes, "sha256": its.sha256} for its in (*FILES, LAST)},
    }  # fmt: skip
    (raw,) = written(by="scavenge", checks={"loss": "finite"}).values()
    assert provenance.read(raw)["by"] == "scavenge" and provenance.read(raw)["checks"] == {"loss": "finite"}


GOLDEN = (
    '{"by":"job","checks":{},"digest":"DIGEST","drain":"000102030405060708090a0b0c0d0e0f-9-OWNER",'
    '"drained":"2023-11-14T22:13:29.000000Z","files":{"checkpoint.h5":{"nbytes":12,"sha256":"' + "2" * 64 + '"},'
    '"rank-00000.h5":{"nbytes":10,"sha256":"' + "0" * 64 + '"},"rank-00001.h5":{"nbytes":11,"sha256":"' + "1" * 64
    + '"}},"form":"hdf5","format":1,"generation":9,"given":{"seed":1},"job":"j","nodes":[{"host":"n1","ranks":1},'
    '{"host":"n2","ranks":1}],"redundancy":"copy","run":"000102030405060708090a0b0c0d0e0f",'
    '"saved":"2023-11-14T22:13:20.123456Z","signer":"","step":30,"uid":1000,"versions":{"python":"3.11.7"},'
    '"world_size":2}'
)  # fmt: skip


def test_format_1_stays_byte_for_byte_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getuid", lambda: 1000)
    owner, digest = "36e2dfec0fa10325", "04377fc4d298a3f3bd65a8c2e43528937de7b256f20fcbba8448322486775ec2"
    golden = GOLDEN.replace("OWNER", owner).replace("DIGEST", digest).encode()
    assert written()["provenance.json"] == golden
    assert provenance.read(golden)["given"] == {"seed": 1}


def test_the_digest_is_sha256_of_all_else_and_can_be_made_without_mlflash() -> None:
    (raw,) = written().values()
    document = json.loads(raw)
    digest = document.pop("digest")
    again = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert hashlib.sha256(again).hexdigest() == digest


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 70), st.booleans()), max_size=12), st.integers(1, 64))
def test_the_digest_of_a_file_is_that_of_its_bytes_which_are_no_tensors(
    gaps: list[tuple[int, int, bool]], chunk_nbytes: int
) -> None:
    file, at, rest = FileWithHoles(), 0, b""
    random = np.random.default_rng(len(gaps))
    try:
        for gap, nbytes, is_tensor in gaps:
            around, inside = random.bytes(gap), random.bytes(nbytes)
            file.patch(at, around)
            file.place(at + gap, nbytes, lambda raw=inside: np.frombuffer(raw, dtype=np.uint8), is_tensor)
            at, rest = at + gap + nbytes, rest + around + (b"" if is_tensor else inside)
        assert file.digest_beside_tensors(chunk_nbytes) == hashlib.sha256(rest).hexdigest()
        assert len(b"".join(file.stream(chunk_nbytes))) == at
    finally:
        file.close()


# Keys


def test_what_is_no_ed25519_key_is_refused(tmp_path: Path) -> None:
    good, public = key_pair(tmp_path)
    locked, _ = key_pair(tmp_path, "locked", password=b"secret")
    curve, curve_public = key_pair(tmp_path, "curve", ec.generate_private_key(ec.SECP256R1()))
    other, other_public = key_pair(tmp_path, "x", x25519.X25519PrivateKey.generate())
    text = tmp_path / "text"
    text.write_text("no key")
    for path in (locked, curve, other, text, public):
        with pytest.raises(ConfigError, match=rf"(?s){path} is not a key that can be used.*Ed25519 private key in PEM"):
            private_key(str(path))
    for path in (curve_public, other_public, text, good):
        with pytest.raises(ConfigError, match=rf"(?s){path} is not a key that can be used.*Ed25519 public key in PEM"):
            public_key(str(path))
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(ConfigError, match="a key cannot be read"):
            private_key(str(path))


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private, public = key_pair(tmp_path)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.ed25519", None)
    for read, path in ((private_key, private), (public_key, public)):
        with pytest.raises(ConfigError, match=r"pip install 'mlflash\[sign\]'"):
            read(str(path))
