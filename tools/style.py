"""Checks the words and sentences of pages: ``style.py PAGE...``. style.txt has the rules; code is left out.

A sentence of prose has at most 200 characters. Tables and headings have no such limit.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

LIMIT = 200
RULES = Path(__file__).with_name("style.txt")

_FENCE = re.compile(r"^( *)(```+|~~~+).*?^ *\2 *$|(?<=\n\n)(?: {4}.*\n)+", re.M | re.S)
_COMMENT = re.compile(r"<!--.*?-->|</?\w[^>]*>", re.S)
_CODE = re.compile(r"(`+)(?!`)(?:(?!\n\n|\n\|).)*?(?<!`)\1(?!`)", re.S)
_LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)\s]*\)")
_NO_PROSE = re.compile(r"^\s*(\||#|:::|$| {4}\S+:)")
_BULLET = re.compile(r"^\s*(?:[-*>]|\d+\.)\s+")
_END = re.compile(r"(?<=[.!?])[\"')*_]*\s+|:$")


def rules(text: str) -> list[tuple[re.Pattern[str], str]]:
    """Read the rules, and let each of them find what it has to find.

    Raises:
        ValueError: if a rule finds too much or nothing.
    """
    found: list[tuple[re.Pattern[str], str]] = []
    for line in text.splitlines():
        if line.startswith("!! "):
            if found[-1][0].search(line[3:]):
                raise ValueError(f"{found[-1][0].pattern} must not find {line[3:]!r}")
        elif line and not line.startswith("#"):
            pattern, _, rest = line.partition(" => ")
            hint, _, bad = rest.partition(" :: ")
            found.append((re.compile(pattern), hint))
            if not found[-1][0].search(bad):
                raise ValueError(f"{pattern} does not find {bad!r}")
    return found


def blank(found: re.Match[str]) -> str:
    """As many lines, and nothing in them."""
    return "\n" * found[0].count("\n")


def prose(page: str) -> str:
    """The words of a page, each in its line: no code, no targets of links."""
    text = _COMMENT.sub(blank, _FENCE.sub(blank, page))
    text = _CODE.sub(lambda code: "\x00" * 4 + blank(code), text)
    return _LINK.sub(lambda link: link[1] + blank(link).removeprefix(blank(re.match(r"(?s).*", link[1]) or link)), text)


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Each paragraph and list item, with the number of its first line."""
    lines: list[str] = []
    for number, line in enumerate([*text.split("\n"), ""], 1):
        if lines and (_NO_PROSE.match(line) or _BULLET.match(line)):
            yield number - len(lines), " ".join(lines)
            lines = []
        if not _NO_PROSE.match(line):
            lines.append(_BULLET.sub("", line).strip())


def faults(page: str, wanted: list[tuple[re.Pattern[str], str]]) -> Iterator[tuple[int, str]]:
    """Each line with a fault, and what it is."""
    text = prose(page)
    for pattern, hint in wanted:
        for found in pattern.finditer(text):
            if found[0] != found.expand(hint):
                yield text.count("\n", 0, found.start()) + 1, f"{found[0]!r} → {found.expand(hint)!r}"
    for number, paragraph in paragraphs(text):
        for sentence in _END.split(paragraph):
            if len(sentence) > LIMIT:
                yield number, f"a sentence has {len(sentence)} characters, more than {LIMIT}: {sentence[:60]}..."


def main(pages: list[str]) -> int:
    """Print all faults."""
    wanted, count = rules(RULES.read_text()), 0
    for page in pages:
        for number, fault in sorted(faults(Path(page).read_text(), wanted)):
            print(f"{page}:{number}: {fault}".replace("\x00", "."))
            count += 1
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
