"""Writes the table of settings into docs/using.md, from the fields of `mlflash.config.Config`."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from mlflash.config import Config, variable_of

PAGE = Path(__file__).parents[1] / "docs/using.md"
HEAD = "| argument | environment | default | what it does |\n|---|---|---|---|\n"


def table() -> str:
    """The rows: argument, environment, default and what it does."""
    return "".join(_row(field) for field in dataclasses.fields(Config))


def _row(field: dataclasses.Field[object]) -> str:
    variable, default = variable_of(field.name), field.default
    value = int(default) if isinstance(default, bool) else default
    shown = field.metadata["shown"] or ("none" if value in (None, "") else f"`{value}`")
    return f"| `{field.name}` | {f'`{variable}` ' if variable else ''}| {shown} | {field.metadata['doc']} |\n"


if __name__ == "__main__":
    page = PAGE.read_text()
    PAGE.write_text(re.sub(rf"(?<={re.escape(HEAD)})(\|.*\n)+", lambda _: table(), page))
