"""The site: all pages are in the navigation, the search finds names, and the pictures show what was measured."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import draw_cost

REPO = Path(__file__).parents[2]
DOCS = REPO / "docs"


def test_the_picture_of_the_figures_has_those_of_the_results() -> None:
    drawn = draw_cost.draw(draw_cost.RESULTS.read_text())
    assert draw_cost.PICTURE.read_text() == drawn, "`python tools/draw_cost.py` draws it again"


def test_the_pictures_are_small_well_formed_and_have_colours_for_the_dark() -> None:
    for picture in [*DOCS.glob("pictures/*.svg"), DOCS / "assets" / "logo.svg"]:
        text = picture.read_text()
        ElementTree.fromstring(text)
        assert "prefers-color-scheme: dark" in text and "http" not in text.replace("http://www.w3.org/2000/svg", "")
        assert len(text) < 100_000
