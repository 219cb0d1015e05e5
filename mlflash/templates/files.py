"""Read templates and trainings from the package, fill them in, and write them."""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Mapping
from pathlib import Path

from ..errors import ConfigError
from .choices import TEMPLATES, Asked, Choice

_WORD = re.compile(r"@([a-z-]+)@")
_OPTION = re.compile(r"\s*(?:#SBATCH )?(--[\w-]+)")


def packaged(name: str) -> str:
    """Return the text of a file in the folder slurm/."""
    return importlib.resources.files("mlflash").joinpath("slurm").joinpath(name).read_text(encoding="utf-8")


def fill(text: str, chosen: Mapping[str, Choice]) -> str:
    """Put values into a template. A line without a value becomes a comment with the reason."""
    lines = []
    for line in text.splitlines():
        missing = [name for name in _WORD.findall(line) if chosen[name].value is None]
        if missing:
            option, why = _OPTION.match(line), " ".join(chosen[missing[0]].why.split())
            indent = line[: len(line) - len(line.lstrip())]
            lines.append(f"{indent}# {option[1] if option else '--' + missing[0]} is left out: {why}.")
        else:
            lines.append(_WORD.sub(lambda word: chosen[word[1]].value or "", line))
    return "\n".join(lines) + "\n"


def texts(asked: Asked, chosen: Mapping[str, Choice]) -> dict[str, str]:
    """Return the files to write, by name. If the user names a training, do not write one."""
    template = TEMPLATES[asked.template]
    found = {f"{asked.template}.sbatch": fill(packaged(f"{asked.template}.sbatch"), chosen)}
    if asked.script is None or template.arguments is None:
        found["train.py"] = packaged(template.training)
    return found


def write(output: Path, files: Mapping[str, str], force: bool) -> None:
    """Write all files, or none if one of them exists.

    Args:
        output: the folder, which is made if needed.
        files: texts by name.
        force: overwrite existing files.

    Raises:
        ConfigError: a file exists.
    """
    there = [name for name in files if (output / name).exists() or (output / name).is_symlink()]
    if there and not force:
        raise ConfigError(f"{output} already has {' and '.join(there)}: give another --output, or --force to "
                          "overwrite")  # fmt: skip
    output.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        with (output / name).open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
