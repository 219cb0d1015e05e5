"""The site: all pages are in the navigation, the search finds names, and the pictures show what was measured."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import draw_cost
import pytest

REPO = Path(__file__).parents[2]
DOCS = REPO / "docs"


def test_each_page_is_in_the_navigation_once() -> None:
    named = re.findall(r": ([\w/-]+\.md)$", (REPO / "mkdocs.yml").read_text(), re.M)
    assert len(named) == len(set(named))
    assert {page.name for page in DOCS.glob("*.md")} <= set(named)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("/dev/shm/mlflash", "shm"),
        ("mlflash.restore(state)", "restore"),
        ("redundancy=xor:8", "xor"),
        ("torchrun --nproc-per-node=8", "torchrun"),
        ("torch 2.13.0", "2.13.0"),
    ],
)
def test_the_search_finds_a_name_in_a_path_or_in_a_call_and_a_version_as_a_whole(text: str, word: str) -> None:
    separator = re.search(r"separator: '(.*)'", (REPO / "mkdocs.yml").read_text())
    assert separator is not None and word in re.split(separator[1], text)


def test_the_picture_of_the_figures_has_those_of_the_results() -> None:
    drawn = draw_cost.draw(draw_cost.RESULTS.read_text())
    assert draw_cost.PICTURE.read_text() == drawn, "`python tools/draw_cost.py` draws it again"


def test_the_pictures_are_small_well_formed_and_have_colours_for_the_dark() -> None:
    for picture in [*DOCS.glob("pictures/*.svg"), DOCS / "assets" / "logo.svg"]:
        text = picture.read_text()
        ElementTree.fromstring(text)
        assert "prefers-color-scheme: dark" in text and "http" not in text.replace("http://www.w3.org/2000/svg", "")
        assert len(text) < 100_000
