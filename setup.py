"""What pyproject.toml cannot say: README without its links to files of the project, and packages of three folders."""

import re
from pathlib import Path

from setuptools import find_packages, setup

_LINK = re.compile(r"!?\[([^]]*)\]\((?!https?:|mailto:|#)[^)]*\)")


def description() -> str:
    """README as the package index shows it, where the links would lead nowhere: their words stay."""
    return _LINK.sub(r"\1", Path(__file__).with_name("README.md").read_text(encoding="utf-8"))


def packages() -> list[str]:
    """Adapters are found in their own folder, because a source distribution has no link to it in ``mlflash/``."""
    outside = [f"mlflash.{name}" for name in find_packages(include=["adapters", "adapters.*"])]
    return sorted({*find_packages(include=["mlflash", "mlflash.*"]), *outside, "mlflash.slurm"})


setup(
    long_description=description(),
    long_description_content_type="text/markdown",
    packages=packages(),
)
