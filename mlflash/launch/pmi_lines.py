"""The lines of PMI-1, which a server and a client of it read."""

from __future__ import annotations

import re

_WORD = re.compile(r"([A-Za-z0-9_-]+)(?:=((?:[^\s\\]|\\[^\n])*))?")  # after a backslash, a space is part of a word


class PmiError(ValueError):
    """Somebody has sent something that is not PMI-1, or too much of it."""


def parse(line: bytes) -> dict[str, str]:
    """Split a line into its words. Values stay as they were written, with their backslashes.

    Raises:
        PmiError: it does not follow the protocol.
    """
    try:
        text = line.decode("ascii")
    except UnicodeDecodeError:
        raise PmiError(f"bytes that are no text: {line[:80]!r}") from None
    words: dict[str, str] = {}
    at = 0
    while at < len(text):
        if text[at] == " ":
            at += 1
            continue
        word = _WORD.match(text, at)
        if word is None or (word.end() < len(text) and text[word.end()] != " "):
            raise PmiError(f"words that are not key=value: {line[:80]!r}")
        words[word[1]] = word[2] or ""
        at = word.end()
    if not text.startswith("cmd="):
        raise PmiError(f"a line without a command: {line[:80]!r}")
    return words
