"""The files that ``from_pretrained`` needs in addition to the weights."""

from __future__ import annotations

import fnmatch
import os
from pathlib import Path

from ..errors import ConfigError
from ..storage.store import Store

_WANTED = ("*.json", "*.jinja", "*.model", "*.py", "*.tiktoken", "merges.txt", "vocab.txt")
_OF_WEIGHTS = "*.index.json"


def copy_config(source: str | os.PathLike[str], store: Store) -> dict[str, int]:
    """Copy a model's configuration and tokenizer, and no weights.

    Not collective. Follow links, because the cache of Hugging Face has only links.

    Args:
        source: a directory with ``config.json``.
        store: where the files go.

    Returns:
        The written files, and the bytes of each.

    Raises:
        ConfigError: there is no ``config.json``.
    """
    directory = Path(source)
    if not (directory / "config.json").is_file():
        raise ConfigError("this directory has no Hugging Face config.json", found=directory)
    files = sorted(path for path in directory.iterdir() if path.is_file() and _is_wanted(path.name))
    return {path.name: store.write(path.name, [path.read_bytes()]) for path in files}


def _is_wanted(name: str) -> bool:
    return any(fnmatch.fnmatch(name, wanted) for wanted in _WANTED) and not fnmatch.fnmatch(name, _OF_WEIGHTS)
