"""Ed25519 signatures by the package ``cryptography``, which is loaded only if something is signed or checked."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from ..errors import ConfigError, pip_install

Sign = Callable[[bytes], bytes]
"""Gives the 64 bytes of a signature."""

_PRIVATE = "an Ed25519 private key in PEM, without a password (openssl genpkey -algorithm ed25519)"
_PUBLIC = "an Ed25519 public key in PEM (openssl pkey -pubout)"


def private_key(path: str) -> tuple[Sign, str]:
    """Read a private key: what signs with it, and its public key in hexadecimal. Raises ConfigError if it cannot."""
    kind, load = _of("Ed25519PrivateKey", "load_pem_private_key")
    key = _read(path, lambda raw: load(raw, password=None), kind, _PRIVATE)
    return key.sign, key.public_key().public_bytes_raw().hex()


def public_key(path: str) -> tuple[Callable[[bytes, bytes], bool], str]:
    """Read a public key: what checks a signature of some bytes, and the key. Raises ConfigError if it cannot."""
    kind, load = _of("Ed25519PublicKey", "load_pem_public_key")
    key = _read(path, load, kind, _PUBLIC)
    invalid = importlib.import_module("cryptography.exceptions").InvalidSignature

    def is_good(signature: bytes, content: bytes) -> bool:
        try:
            key.verify(signature, content)
        except invalid:
            return False
        return True

    return is_good, key.public_bytes_raw().hex()


def _of(kind: str, load: str) -> tuple[type, Callable[..., Any]]:
    try:
        ed25519 = importlib.import_module("cryptography.hazmat.primitives.asymmetric.ed25519")
        serialization = importlib.import_module("cryptography.hazmat.primitives.serialization")
    except ImportError as error:
        raise ConfigError(f"signatures need the package cryptography: {pip_install('sign')}",
                          found=str(error)) from None  # fmt: skip
    return getattr(ed25519, kind), getattr(serialization, load)


def _read(path: str, load: Callable[[bytes], Any], kind: type, expected: str) -> Any:
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
