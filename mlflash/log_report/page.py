"""The page: one file that contains all it needs and loads nothing."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources

from . import page_sections, page_tables
from .job_history import JobHistory
from .markup import Markup, tag
from .timeline_rows import rows

_TITLES = {
    "time": "Where the time went",
    "timeline": "Timeline",
    "stalls": "Stall of each save",
    "bandwidth": "Protection",
    "waits": "Ranks that delayed commits",
    "failures": "Failures",
    "recoveries": "Recovered in place",
    "memory": "Memory per node",
    "layout": "What the layout survives",
    "interval": "How often to save",
    "launches": "Launches",
    "warnings": "Warnings",
    "reading": "About these numbers",
}


def page(story: JobHistory) -> str:
    """Write the page of a job's history. Not collective."""
    lanes = rows(story.launches)
    below = [
        _section("time", page_sections.time_spent(story)),
        _section("timeline", page_sections.timeline(story, lanes)),
        _section("stalls", page_sections.stalls(story), "half"),
        _section("bandwidth", page_sections.bandwidths(story), "half"),
        *([_section("waits", page_tables.waits(story))] if story.waited_for else []),
        _section("failures", page_tables.failures(story)),
        *([_section("recoveries", page_tables.recoveries(story))] if story.recoveries else []),
        _section("memory", page_tables.memory(story), "half"),
        _section("layout", page_tables.layout(story), "half"),
        _section("interval", page_sections.interval(story)),
        _section("launches", page_tables.launches(story)),
        _section("warnings", page_tables.warnings(story)),
        _section("reading", page_tables.reading(story)),
    ]
    body = tag(
        "body",
        tag("main", page_sections.head(story), page_sections.headline(story), tag("div", *below, class_="sections")),
        tag("div", id="tip", role="presentation", hidden=""),
        tag("script", Markup(_file("page.js"))),
    )
    return f"<!DOCTYPE html>\n{tag('html', _head(story), body, lang='en')}\n"


def _section(name: str, content: Markup, width: str = "") -> Markup:
    heading = tag("h2", _TITLES[name], id=f"{name}-title")
    return tag("section", heading, content, id=name, class_=width or None, aria_labelledby=f"{name}-title")


def _head(story: JobHistory) -> Markup:
    """Make the head. The page may load nothing and run only its own script, whatever the logs contain."""
    script = base64.b64encode(hashlib.sha256(_file("page.js").encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{script}'; img-src data:"
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", f"{page_sections.name_of(story)}: checkpoints"),
        tag("style", Markup(_file("page.css"))),
    )


def _file(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
