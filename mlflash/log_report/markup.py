"""HTML and SVG, with every text escaped: what stands in a log can be no markup."""

from __future__ import annotations

import html
from collections.abc import Iterable

_ALONE = frozenset(("meta", "link", "br"))  # elements that end with their first tag


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def escape(text: str) -> str:
    """Make text that shows as it stands; characters that no page can have become question marks."""
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
        name: of it.
        children: texts and markup.
        attributes: ``class_`` stands for class, ``stroke_width`` for stroke-width; None: it has none such.

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
    """The title of a piece of a drawing: shown where one points at it, and read aloud."""
    return tag("title", text)


def percent(share: float) -> str:
    """A share as a length: ``percent(0.123456) == "12.346%"``."""
    return f"{100 * share:.3f}".rstrip("0").rstrip(".") + "%"


def _short(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
