"""What a drained checkpoint says of where it comes from: its form, the digest, keys, and what is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from keys import key_pair

from mlflash import config
from mlflash.drain import provenance
from mlflash.drain.index import RankFiles
from mlflash.drain.provenance import private_key, public_key
from mlflash.drain.rank_content import DrainInput, FileDigest, Origin, Receipt
from mlflash.errors import ConfigError, CorruptSlot
from mlflash.memory.slot import Attempt
from mlflash.state import manifest
from mlflash.storage import canonical_json

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
        ({1: 2}, "the key 1 of it is no text"),
        ({"a": (1, 2)}, "a is of <class 'tuple'>"),
        ({"a": np.int64(1)}, "a is of <class 'numpy.int64'>"),
        ({"a": "\ud800"}, "a text in a is not UTF-8"),
        ({"\ud800": 1}, "a text in it is not UTF-8"),
        (CYCLE, "it contains itself"),
    ],
)
def test_what_json_does_not_have_is_refused(value: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        canonical_json.encode(value)


# What the user gives


def test_what_is_given_is_kept_as_canonical_json_also_from_the_environment() -> None:
    made = config.from_environment({}, None, job="j", provenance={"seed": 1, "git": "ä"})
    assert made.provenance == '{"git":"ä","seed":1}'
    settings = config.from_environment({"MLFLASH_PROVENANCE": ' {"seed": 1,\n"git": "ä"}'}, None, job="j")
    assert settings.provenance == made.provenance
    assert config.from_environment({}, None, job="j").provenance == ""
    assert config.from_environment({"MLFLASH_PROVENANCE": "{}"}, None, job="j", provenance={"a": 1}).provenance != "{}"


@pytest.mark.parametrize("wrong", [{"a": object()}, {"a": math.nan}, {1: 1}, [1], "[1]", "no JSON", '{"a":NaN}', 7])
def test_what_cannot_be_written_is_refused_when_it_is_given(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"bad setting provenance.*MLFLASH_PROVENANCE"):
        config.from_environment({}, None, job="j", provenance=wrong)


# The document


def receipts(origins: list[Origin]) -> list[Receipt]:
    return [
        Receipt(
            rank,
            RankFiles("", 0, 0, "", 0),
            [],
            {},
            None,
            origin=origin,
            digests=(FILES[rank],) if rank < len(FILES) else (),
        )
        for rank, origin in enumerate(origins)
    ]


def written(signer: provenance.Signer | None = None, **changed: Any) -> dict[str, bytes]:
    said = manifest.provenance_of({"python": "3.11.7"}, '{"seed":1}')
    origins = [Origin(0, "n1", "copy", 1_700_000_000_123_456_789, said),
               Origin(1, "n2", "copy", 1_700_000_000_000_000_000)]  # fmt: skip
    given, signer = dataclasses.replace(INPUT, **changed), signer or provenance.Signer()
    return dict(provenance.files(signer, given, receipts(origins), [LAST], "hdf5", "j", "me", 1_700_000_009 * 10**9))


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
    encoded = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert hashlib.sha256(encoded).hexdigest() == digest


def change(document: dict[str, Any], where: str, value: Any) -> None:
    *path, last = where.split("/")
    for name in path:
        document = document[name]
    document[last] = value


@pytest.mark.parametrize(
    ("where", "value", "text"),
    [
        ("format", 2, "another version of mlflash wrote it"), ("format", True, "it has no format number"),
        ("step", "30", "missing or wrong: step"), ("step", True, "wrong: step"), ("nodes", [{}], "wrong: nodes"),
        ("versions", {"a": 1}, "wrong: versions"), ("signer", None, "wrong: signer"), ("given", [], "wrong: given"),
        ("files/..\0", {"nbytes": 1, "sha256": "0" * 64}, "wrong: files"),
        ("files/notes.txt", {"nbytes": 1, "sha256": "0" * 64}, "wrong: files"),
        ("files/rank-00000.h5", {"nbytes": -1, "sha256": "0" * 64}, "wrong: files"),
        ("files/rank-00000.h5", {"nbytes": 1, "sha256": "0" * 63}, "wrong: files"),
    ],
)  # fmt: skip
def test_what_mlflash_would_not_write_is_refused_though_its_digest_is_right(where: str, value: Any, text: str) -> None:
    document = json.loads(written()["provenance.json"])
    change(document, where, value)
    document["digest"] = provenance.digest_of(document)
    with pytest.raises(CorruptSlot, match=re.escape(text)):
        provenance.read(canonical_json.encode(document))


# Keys


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private, public = key_pair(tmp_path)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.ed25519", None)
    for read, path in ((private_key, private), (public_key, public)):
        with pytest.raises(ConfigError, match=r"pip install 'mlflash\[sign\]'"):
            read(str(path))
