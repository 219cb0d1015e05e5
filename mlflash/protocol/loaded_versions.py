"""The versions of the packages that a trainer has loaded; this imports none of them."""

from __future__ import annotations

import sys

from ..version import __version__

_NAMES = ("numpy", "torch", "transformers", "megatron.core", "nemo", "lightning", "deepspeed", "torchtitan")


def loaded_versions() -> dict[str, str]:
    """The versions by name; "cuda" is the version that torch was built for. Not collective."""
    found = {"mlflash": __version__, "python": ".".join(map(str, sys.version_info[:3]))}
    for name in _NAMES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            found[name] = str(version)
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    return found | ({"cuda": cuda} if isinstance(cuda, str) else {})
