"""HTML and SVG with every text escaped, so that text in a log never becomes markup."""

from __future__ import annotations

import html
from collections.abc import Iterable

_ALONE = frozenset(("meta", "link", "br"))  # elements that end with their first tag


class Markup(str):
    """Text that already is markup."""

    __slots__ = ()


def escape(text: str) -> str:
    """Escape text so that it shows as it is. Characters that a page cannot have become replacement characters."""
    if isinstance(text, Markup):
        return text
    clean = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    return html.escape(clean)


def join(parts: Iterable[str]) -> Markup:
    """Put texts and markup one after the other."""
    return Markup("".join(map(escape, parts)))


def tag(name: str, /, *children: str, **attributes: str | float | None) -> Markup:
    """Make an element.

    Args:
        name: name of the element.
        children: texts and markup.
        attributes: ``class_`` stands for class, ``stroke_width`` for stroke-width. None leaves an attribute out.

    Example:
        ``tag("p", "a < b", class_="note") == '<p class="note">a &lt; b</p>'``
    """
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_short(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{words}>" if name in _ALONE else f"<{name}{words}>{join(children)}</{name}>")


def titled(text: str) -> Markup:
    """Make the title of a part of a drawing. Browsers show it on hover, and screen readers read it."""
    return tag("title", text)


def percent(share: float) -> str:
    """Write a share as a length: ``percent(0.123456) == "12.346%"``."""
    return f"{100 * share:.3f}".rstrip("0").rstrip(".") + "%"


def _short(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
