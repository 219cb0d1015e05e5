"""``python -m mlflash`` is the command ``mlflash``."""

from .cli import main

main()
