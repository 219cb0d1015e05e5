"""Prints the requirements of mlflash itself ("core") or of its extras from setup.cfg, for pip.

Usage: requirements.py core|EXTRA...
"""

from __future__ import annotations

import configparser
import sys
from pathlib import Path


def main() -> None:
    """Print one requirement a line."""
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[1] / "setup.cfg")
    for name in sys.argv[1:]:
        print(setup["options"]["install_requires"] if name == "core" else setup["options.extras_require"][name])


if __name__ == "__main__":
    main()
