"""Versions: of mlflash, in one place that the build can read without importing the package; and of what is loaded."""

from __future__ import annotations

import re
import sys

__version__ = "0.2.0"
_NAMES = ("numpy", "torch", "transformers", "megatron.core", "nemo", "lightning", "deepspeed", "torchtitan")


def loaded_versions() -> dict[str, str]:
    """The versions of the packages that are loaded, by name; "cuda" is the version that torch was built for."""
    versions = {"mlflash": __version__, "python": ".".join(map(str, sys.version_info[:3]))}
    for name in _NAMES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            versions[name] = str(version)
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    return versions | ({"cuda": cuda} if isinstance(cuda, str) else {})


TORCH = (2, 13), (2, 15)
"""The oldest and the newest release of PyTorch with which mlflash was run; see docs/pytorch.md."""


def not_run_with(torch: str) -> str | None:
    """What there is to say of a version of PyTorch with which mlflash was not run; None: it was."""
    numbers = re.match(r"(\d+)\.(\d+)", torch)
    if numbers is not None and TORCH[0] <= (int(numbers[1]), int(numbers[2])) <= TORCH[1]:
        return None
    first, last = (f"{major}.{minor}" for major, minor in TORCH)
    return f"mlflash was run with PyTorch {first} to {last}, and not with {torch}"
