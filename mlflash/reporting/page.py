"""The page: one file with all it needs in it, that asks nobody for anything."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources

from . import sections, tables
from .markup import Markup, tag
from .rows import rows
from .story import Story

_TITLES = {
    "time": "Where the time went",
    "timeline": "Timeline",
    "stalls": "Stall of each save",
    "bandwidth": "Protection",
    "failures": "Failures",
    "memory": "Memory per node",
    "layout": "What the layout survives",
    "interval": "How often to save",
    "launches": "Launches",
    "warnings": "Warnings",
    "reading": "About these numbers",
}


def page(story: Story) -> str:
    """Write the page of a story. Not collective."""
    lanes = rows(story.launches)
    below = [
        _section("time", sections.time_spent(story)),
        _section("timeline", sections.timeline(story, lanes)),
        _section("stalls", sections.stalls(story), "half"),
        _section("bandwidth", sections.bandwidths(story), "half"),
        _section("failures", tables.failures(story)),
        _section("memory", tables.memory(story), "half"),
        _section("layout", tables.layout(story), "half"),
        _section("interval", sections.interval(story)),
        _section("launches", tables.launches(story)),
        _section("warnings", tables.warnings(story)),
        _section("reading", tables.reading(story)),
    ]
    body = tag(
        "body",
        tag("main", sections.head(story), sections.headline(story), tag("div", *below, class_="sections")),
        tag("div", id="tip", role="presentation", hidden=""),
        tag("script", Markup(_file("page.js"))),
    )
    return f"<!DOCTYPE html>\n{tag('html', _head(story), body, lang='en')}\n"


def _section(name: str, content: Markup, width: str = "") -> Markup:
    heading = tag("h2", _TITLES[name], id=f"{name}-title")
    return tag("section", heading, content, id=name, class_=width or None, aria_labelledby=f"{name}-title")


def _head(story: Story) -> Markup:
    """Nothing may be fetched, and only our own script may run, whatever the logs had in them."""
    script = base64.b64encode(hashlib.sha256(_file("page.js").encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{script}'; img-src data:"
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", f"{sections.name_of(story)}: checkpoints"),
        tag("style", Markup(_file("page.css"))),
    )


def _file(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
