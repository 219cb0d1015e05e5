"""The site in a real browser: pages and tables fit, and the search finds what people look for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import CHROMIUM, browser, tab

SITE = Path(__file__).parents[2] / "site"

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium"),
    pytest.mark.skipif(not (SITE / "index.html").exists(), reason="there is no site: make docs"),
]

WIDTHS = (390, 768, 1300)  # a phone, half a screen, a laptop
# Pages are looked at without scripts, which takes a third of the time. What these do to tables is done here, and the
# header is left out, in which they cut long titles.
AS_BY_SCRIPTS = """() => {
  document.querySelector(".md-header").remove();
  document.querySelectorAll("article table:not([class])").forEach((table) => {
    const [scrolls, box] = ["scrollwrap", "table"].map((name) => Object.assign(
      document.createElement("div"), {className: `md-typeset__${name}`}));
    table.replaceWith(scrolls);
    scrolls.append(box);
    box.append(table);
  });
}"""
# What is wider than it may be: the page, or a table than its column.
TOO_WIDE = """() => {
  const page = document.scrollingElement, found = [];
  if (page.scrollWidth > innerWidth) found.push(`the page has ${page.scrollWidth} pixels`);
  if (innerWidth >= 1300) for (const table of document.querySelectorAll("article table:not(.highlighttable)")) {
    const has = Math.max(table.scrollWidth, Math.round(table.getBoundingClientRect().width));
    const may = table.closest("article").clientWidth;
    if (has > may) found.push(`the table "${table.rows[0].innerText.trim().replace(/\\s+/g, " ")}": ${has} of ${may}`);
  }
  return found;
}"""
FOUND = """() => [...document.querySelectorAll(".md-search-result__item")].map(
  (item) => item.querySelector("a").pathname.split("/site/")[1])"""
# What a reader types, and the pages that have the answer: one of them is among the first three results.
SEARCHES = {
    "fully_shard": {"pytorch", "dcp", "fsdp"},
    "torchrun": {"launchers", "fsdp"},
    "FSDP2": {"fsdp"},
    "limitations": {"limitations"},
    "uninstall": {"install"},
    "Kubernetes": {"containers"},
    "NaN": {"rolling_back", "errors", "faq"},
    "unsupported PMI version": {"slurm"},
    "NCCL": {"launchers", "keep_alive"},
    "preemption": {"recipes"},
    "spot": {"recipes"},
    "out of memory": {"errors", "tuning", "admins"},
    "/dev/shm": {"slurm", "admins", "containers"},
    "MemoryTooSmall": {"errors"},
    "MLFLASH_INTERFACE": {"launchers"},
}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


def test_no_page_is_wider_than_its_window_and_on_a_laptop_no_table_than_its_column(chromium: Any) -> None:
    # Sources are blocks of code, each in a page of the same make: one stands for all.
    files = [file for file in SITE.rglob("*.html") if "source" not in file.parts]
    files += sorted(SITE.glob("source/**/*.html"))[:1]
    context = chromium.new_context(offline=True, java_script_enabled=False)
    page = context.new_page()
    found = []
    for file in files:
        page.goto(file.as_uri())
        page.evaluate(AS_BY_SCRIPTS)
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            found += [f"{file.relative_to(SITE)}, {width}: {what}" for what in page.evaluate(TOO_WIDE)]
    context.close()
    assert len(files) > 40 and found == []


def test_the_search_works_from_a_folder_and_finds_what_people_look_for(chromium: Any) -> None:
    found = {}
    with tab(chromium, SITE / "index.html") as page:
        page.locator(".md-search__input").click()
        for words in SEARCHES:
            page.evaluate("document.querySelector('.md-search-result__list').replaceChildren()")
            # One key is typed, and the search hears of the whole at once: it has one answer, and none of less words.
            page.locator(".md-search__input").evaluate("(box, text) => { box.value = text }", words[:-1])
            page.locator(".md-search__input").press_sequentially(words[-1])
            page.wait_for_function(f"() => ({FOUND})().length")
            found[words] = [name.removesuffix(".html") for name in page.evaluate(FOUND)[:3]]
        assert page.complaints == []
    assert {words: pages for words, pages in found.items() if not SEARCHES[words] & set(pages)} == {}
