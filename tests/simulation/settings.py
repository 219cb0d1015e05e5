"""Seeds and fields of a setting as a person writes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from faults import Setting


def parse(words: Iterable[str]) -> dict[str, object]:
    """Fields of `Setting` from words such as ``ranks=3`` or ``special=drain+lazy`` (``special=``: nothing special).

    Raises:
        ValueError: there is no such field.
    """
    kinds = {field.name: field.type for field in dataclasses.fields(Setting)}
    fixed: dict[str, object] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in kinds:
            raise ValueError(f"a setting has no {name!r}: expected one of {', '.join(kinds)}")
        if name == "special":
            fixed[name] = frozenset(filter(None, value.split("+")))
        else:
            fixed[name] = {"int": int, "float": float, "bool": lambda text: text == "True"}.get(kinds[name], str)(value)
    return fixed


def parse_seeds(word: str) -> tuple[range, dict[str, object]]:
    """Seeds and their settings, from a word such as ``17``, ``0:100`` or ``6,special=drain,ranks=3``."""
    numbers, *fields = word.split(",")
    first, _, last = numbers.partition(":")
    return range(int(first), int(last or int(first) + 1)), parse(fields)
