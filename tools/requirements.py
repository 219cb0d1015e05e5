"""Prints what pyproject.toml requires for mlflash itself ("core"), for its extras and for its dependency groups.

Usage: requirements.py core|EXTRA|GROUP...
"""

from __future__ import annotations

import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib


def main() -> None:
    """Print one requirement a line."""
    with (Path(__file__).parents[1] / "pyproject.toml").open("rb") as file:
        written = tomllib.load(file)
    project = written["project"]
    lists = {"core": project["dependencies"], **project["optional-dependencies"], **written["dependency-groups"]}
    for name in sys.argv[1:]:
        print(*lists[name], sep="\n")


if __name__ == "__main__":
    main()
