"""Where a drained checkpoint comes from: versions, hosts, times, the user's entries, and a digest of each of its files.

`provenance.json` is written before the file that commits the checkpoint, as canonical JSON. Its ``digest`` is the
SHA-256 of everything else in it, and it is what is signed. Tensors are covered by their checksums in the indexes of the
files (XXH3-64 of each block), and all other bytes by the SHA-256 of each file, so nothing is read twice. A restore does
not need it.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import importlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..config import Config
from ..errors import ConfigError, CorruptSlot, pip_install
from ..storage import canonical_json
from .checkpoint_directory import FILE_NAME, PROVENANCE, SIGNATURE, tag
from .rank_content import DrainInput, FileDigest, Origin, Receipt

FORMAT = 1

Sign = Callable[[bytes], bytes]
"""Gives the 64 bytes of a signature."""

_PRIVATE = "an Ed25519 private key in PEM, without a password (openssl genpkey -algorithm ed25519)"
_PUBLIC = "an Ed25519 public key in PEM (openssl pkey -pubout)"
_HEX = re.compile("[0-9a-f]{64}")
_KINDS = {
    "versions": dict, "job": str, "uid": int, "step": int, "run": str, "generation": int, "world_size": int,
    "nodes": list, "redundancy": str, "saved": str, "drained": str, "by": str, "given": dict, "checks": dict,
    "form": str, "files": dict, "signer": str, "drain": str,
}  # fmt: skip
_LISTS: dict[str, Callable[[Any], Any]] = {
    "versions": lambda versions: all(type(version) is str for version in versions.values()),
    "nodes": lambda nodes: all(type(node) is dict and {*node} == {"host", "ranks"} and type(node["host"]) is str
                               and type(node["ranks"]) is int for node in nodes),
    "files": lambda files: all(FILE_NAME.fullmatch(name) and type(file) is dict and {*file} == {"nbytes", "sha256"}
                               and type(file["nbytes"]) is int and file["nbytes"] >= 0 and type(file["sha256"]) is str
                               and _HEX.fullmatch(file["sha256"]) for name, file in files.items()),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Signer:
    """What signs the provenance of a job's checkpoints."""

    sign: Sign | None = None  # makes the signature; None: nothing is signed
    key: str = ""


def signer_of(config: Config) -> Signer:
    """Read the key that a job signs with. Raises ConfigError if the key cannot be used."""
    if not config.sign_key or config.directory is None:
        return Signer()
    return Signer(*private_key(config.sign_key))


def files(signer: Signer, drain_input: DrainInput, receipts: Sequence[Receipt], last: Iterable[FileDigest], form: str,
          job: str, owner: str, now_ns: int) -> list[tuple[str, bytes]]:  # fmt: skip
    """Return the files that are written before the one that commits a checkpoint, by name."""
    origins = [receipt.origin for receipt in receipts if receipt.origin is not None]
    digests = [digest for receipt in receipts for digest in receipt.digests]
    given = next((origin.provenance for origin in origins if origin.provenance), {})
    document = {
        "format": FORMAT,
        "versions": dict(given.get("versions", {})),
        "job": job,
        "uid": os.getuid(),
        "step": drain_input.step,
        "run": drain_input.attempt.run_id.hex(),
        "generation": drain_input.attempt.generation,
        "world_size": drain_input.world_size,
        "nodes": _nodes(origins),
        "redundancy": ", ".join(sorted({origin.scheme for origin in origins})),
        "saved": _time(max((origin.unix_ns for origin in origins), default=0)),
        "drained": _time(now_ns),
        "by": drain_input.by,
        "given": given.get("given", {}),
        "checks": dict(drain_input.checks),
        "form": form,
        "files": {digest.name: {"nbytes": digest.nbytes, "sha256": digest.sha256} for digest in (*digests, *last)},
        "signer": signer.key,
        "drain": tag(drain_input.attempt, owner),
    }
    document["digest"] = digest_of(document)
    made = [(PROVENANCE, canonical_json.encode(document))]
    if signer.sign is not None:
        made.append((SIGNATURE, signer.sign(document["digest"].encode())))
    return made


def digest_of(document: Mapping[str, Any]) -> str:
    """The digest of a provenance: SHA-256 of everything in it except the digest, as 64 hexadecimal digits."""
    rest = {name: value for name, value in document.items() if name != "digest"}
    return hashlib.sha256(canonical_json.encode(rest)).hexdigest()


def _nodes(origins: Iterable[Origin]) -> list[dict[str, Any]]:
    ranks: dict[tuple[int, str], int] = {}
    for origin in origins:
        where = origin.node_index, origin.node
        ranks[where] = ranks.get(where, 0) + 1
    return [{"host": node, "ranks": ranks[index, node]} for index, node in sorted(ranks)]


def _time(unix_ns: int) -> str:
    seconds, rest = divmod(unix_ns, 1_000_000_000)
    when = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).replace(microsecond=rest // 1000)
    return when.isoformat(timespec="microseconds").replace("+00:00", "Z")


def read(raw: bytes) -> dict[str, Any]:
    """Decode a provenance and check everything that is read from it, including its digest. Raises CorruptSlot."""
    try:
        document = canonical_json.decode(raw)
    except ValueError as error:
        raise CorruptSlot(f"it was changed, or it is not a provenance: {error}") from None
    if not isinstance(document, dict) or type(document.get("format")) is not int:
        raise CorruptSlot("it was changed, or it is not a provenance: it has no format number")
    if document["format"] != FORMAT:
        raise CorruptSlot("another version of mlflash wrote it", expected=f"format {FORMAT}", found=document["format"])
    if document.get("digest") != digest_of(document):
        raise CorruptSlot("it was changed: its digest does not match its content")
    wrong = [name for name, kind in _KINDS.items() if type(document.get(name)) is not kind]
    if not wrong:
        wrong = [name for name, is_good in _LISTS.items() if not is_good(document[name])]
    if wrong:
        raise CorruptSlot(f"entries that mlflash writes are missing or wrong: {', '.join(wrong)}")
    return document


# Ed25519 signatures by the package `cryptography`, which is loaded only if something is signed or checked.


def private_key(path: str) -> tuple[Sign, str]:
    """Read a private key: what signs with it, and its public key in hexadecimal. Raises ConfigError if it cannot."""
    kind, load = _load_library("Ed25519PrivateKey", "load_pem_private_key")
    key = _read_key(path, lambda raw: load(raw, password=None), kind, _PRIVATE)
    return key.sign, key.public_key().public_bytes_raw().hex()


def public_key(path: str) -> tuple[Callable[[bytes, bytes], bool], str]:
    """Read a public key: what checks a signature of some bytes, and the key. Raises ConfigError if it cannot."""
    kind, load = _load_library("Ed25519PublicKey", "load_pem_public_key")
    key = _read_key(path, load, kind, _PUBLIC)
    invalid = importlib.import_module("cryptography.exceptions").InvalidSignature

    def is_good(signature: bytes, content: bytes) -> bool:
        try:
            key.verify(signature, content)
        except invalid:
            return False
        return True

    return is_good, key.public_bytes_raw().hex()


def _load_library(kind: str, load: str) -> tuple[type, Callable[..., Any]]:
    try:
        ed25519 = importlib.import_module("cryptography.hazmat.primitives.asymmetric.ed25519")
        serialization = importlib.import_module("cryptography.hazmat.primitives.serialization")
    except ImportError as error:
        raise ConfigError(f"signatures need the package cryptography: {pip_install('sign')}",
                          found=str(error)) from None  # fmt: skip
    return getattr(ed25519, kind), getattr(serialization, load)


def _read_key(path: str, load: Callable[[bytes], Any], kind: type, expected: str) -> Any:
    try:
        with open(path, "rb") as file:
            key = load(file.read())
    except OSError as error:
        raise ConfigError("a key cannot be read", expected=expected, found=str(error)) from None
    except Exception as error:  # the package may raise anything if this is no key, or needs a password
        raise ConfigError(f"{path} is not a key that can be used", expected=expected, found=str(error)) from None
    if not isinstance(key, kind):
        raise ConfigError(f"{path} is not a key that can be used", expected=expected, found=type(key).__name__)
    return key
