"""What setup.cfg cannot say: the package index shows README, and none of the files that it links to."""

import re
from pathlib import Path

from setuptools import setup

_LINK = re.compile(r"!?\[([^]]*)\]\((?!https?:|mailto:|#)[^)]*\)")


def description() -> str:
    """README, with the words of its links to files of the project in place of these links."""
    return _LINK.sub(r"\1", Path(__file__).with_name("README.md").read_text(encoding="utf-8"))


setup(long_description=description())
