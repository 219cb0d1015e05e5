"""What README.md and docs/ name is there: pages, anchors, tests, settings, commands. test_pages runs code."""

from __future__ import annotations

import re
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import draw_cost
import pytest
import settings_table

from mlflash import config, errors
from mlflash.cli import main

REPO = Path(__file__).parents[2]
DOCS = REPO / "docs"
PAGES = [REPO / "README.md", *sorted(DOCS.glob("*.md"))]
LINKED = [*PAGES, *(REPO / f"{name}.md" for name in ("ARCHITECTURE", "CHANGES", "DECISIONS", "CONTRIBUTING")),
          *sorted((REPO / "benchmarks").rglob("*.md"))]  # fmt: skip


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^ *(```|~~~~|````).*?^ *\1", "", page.read_text(), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: Counter[str] = Counter()
    made = set()
    for title in re.findall(r"^#{1,6} +(.+?) *$", prose(page), re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        made.add(f"{slug}-{found[slug]}" if found[slug] else slug)
        found[slug] += 1
    return made


def targets(page: Path) -> Iterator[str]:
    yield from re.findall(r"\]\(([^)\s]+)\)", prose(page))


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(REPO)))
def test_links_lead_somewhere_anchors_too(page: Path) -> None:
    for target in targets(page):
        if "://" in target:
            parts = urllib.parse.urlsplit(target)
            assert parts.scheme == "https" and re.fullmatch(r"[a-z0-9.-]+\.[a-z]+", parts.netloc), target
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), target
        assert there.is_relative_to(REPO), target
        assert not anchor or anchor in anchors(there), f"{target}; there are: {', '.join(sorted(anchors(there)))}"


def test_each_page_is_in_the_navigation_once() -> None:
    named = re.findall(r": ([\w/-]+\.md)$", (REPO / "mkdocs.yml").read_text(), re.M)
    assert len(named) == len(set(named)) and {page.name for page in DOCS.glob("*.md")} <= set(named)


def test_every_test_that_a_page_names_exists() -> None:
    functions = re.compile(r"^def (test_\w+)", re.M)
    there = {name for path in (REPO / "tests").rglob("test_*.py") for name in functions.findall(path.read_text())}
    for page in PAGES:
        named = set(re.findall(r"`(test_\w+)`", page.read_text())) if page.name != "migrating.md" else set()  # others'
        assert named <= there, f"{page.name}: {named - there}"


def test_each_report_of_others_stands_once_with_a_test_that_exists() -> None:
    report = r"^\| \[(.+?) #(\d+)\]\(https://github\.com/([\w.-]+/[\w.-]+)/(?:issues|pull)/(\d+)\) \| "
    page = (DOCS / "reports.md").read_text()
    tried = re.findall(rf"{report}([^|]+) \| ([^|]+) \| `(tests/[\w/]+\.py)::(test_\w+)` \|$", page, re.M)
    assert len(tried) >= 60
    shown = re.findall(report, page, re.M)
    assert len(shown) == len(re.findall(r"^\| \[", page, re.M)), "each row names a project, a number and its thread"
    assert [*Counter(shown).values()] == [1] * len(shown) == [*Counter(row[2:] for row in shown).values()]
    for project, number, repository, thread, wrong, does, file, name in tried:
        assert number == thread, f"{project} #{number} links to {repository} {thread}"
        assert len(f"{project} {wrong} {does}".split()) <= 36, f"{project} #{number} is long"
        assert re.search(rf"^def {name}\(", (REPO / file).read_text(), re.M), f"{file}::{name}"


def test_every_setting_and_command_that_a_page_names_exists() -> None:
    commands = set(main.list_commands(None))  # type: ignore[arg-type]
    for page in PAGES:
        variables = set(re.findall(r"\bMLFLASH_[A-Z_]*[A-Z]\b", page.read_text()))
        assert not config.unknown_variables(dict.fromkeys(variables, "1")), page.name
        named = set(re.findall(r"`mlflash ([a-z]+)\b", prose(page)))
        assert named <= commands | {"is", "protects", "stops"}, f"{page.name}: {named - commands}"  # messages begin so


def test_each_exception_has_its_place_in_errors_md() -> None:
    assert re.findall(r"^### (.+)$", (DOCS / "errors.md").read_text(), re.M) == sorted(errors.__all__)


def test_the_table_of_settings_is_that_of_the_code() -> None:
    table = f"{settings_table.HEAD}{settings_table.table()}\n"
    assert table in (DOCS / "using.md").read_text(), "run tools/settings_table.py"


def test_the_picture_of_the_figures_has_those_of_the_results() -> None:
    drawn = draw_cost.draw(draw_cost.RESULTS.read_text())
    assert draw_cost.PICTURE.read_text() == drawn, "`python tools/draw_cost.py` draws it again"


def test_the_pictures_are_small_well_formed_and_have_colours_for_the_dark() -> None:
    for picture in [*DOCS.glob("pictures/*.svg"), DOCS / "assets" / "logo.svg"]:
        text = picture.read_text()
        ElementTree.fromstring(text)
        assert "prefers-color-scheme: dark" in text and "http" not in text.replace("http://www.w3.org/2000/svg", "")
        assert len(text) < 100_000
