"""A real browser without a screen: Debian's Chromium, led by Playwright, which brings no browser of its own here."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = os.environ.get("MLFLASH_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    # As root Chromium has no sandbox; what is opened here is ours.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as play:
        started = play.chromium.launch(executable_path=CHROMIUM, args=arguments)
        try:
            yield started
        finally:
            started.close()


@contextlib.contextmanager
def tab(started: Any, path: Path | str, width: int = 1280, height: int = 900, scheme: str = "light", **options: Any
        ) -> Iterator[Any]:  # fmt: skip
    """Open a file, or a URL, in a window of its own, without a network unless it is said otherwise.

    The tab notes what it asked for (``asked``) and what went wrong (``complaints``).
    """
    options = {"offline": True, "color_scheme": scheme, "viewport": {"width": width, "height": height}, **options}
    context = started.new_context(**options)
    try:
        page = context.new_page()
        page.asked, page.complaints = [], []
        page.on("request", lambda request: page.asked.append(request.url))
        page.on("console", lambda message: page.complaints.append(message.text))
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on("dialog", lambda dialog: (page.complaints.append(dialog.message), dialog.dismiss()))
        page.goto(path if isinstance(path, str) else path.as_uri())
        yield page
    finally:
        context.close()
