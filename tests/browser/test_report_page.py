"""The page of mlflash report in a real browser: offline, at three widths, in the dark, and whatever a log contains."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import made_logs
import pytest
from browsing import CHROMIUM, browser, tab
from click.testing import CliRunner

from mlflash.cli import main

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium")

# What is wider than the window, and texts whose contrast with what lies behind them is below that of WCAG 2.2.
TOO_WIDE = """[...document.querySelectorAll("body *")].filter((one) => !one.closest(".timeline")
  && one.getBoundingClientRect().right > innerWidth + 1).map((one) => one.outerHTML)"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


def make(folder: Path) -> tuple[Path, Any]:
    """The page and the numbers of a log that lies in a folder."""
    output = folder / "run.html"
    said = CliRunner().invoke(main, ["report", str(folder / "run.jsonl"), "-o", str(output), "--json"])
    assert said.exit_code == 0, said.output
    return output, json.loads(said.stdout)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("report")
    made_logs.eventful(folder / "run.jsonl")
    return make(folder)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 768, 1400])
def test_it_opens_without_a_network_fits_and_can_be_read(
    chromium: Any, report: tuple[Path, Any], width: int, scheme: str
) -> None:
    path, _ = report
    with tab(chromium, path, width, scheme=scheme) as page:
        assert page.asked == [path.as_uri()] and page.complaints == []
        assert page.title() == "run42-1c0d5a3e: checkpoints"
        assert page.evaluate("document.documentElement.scrollWidth") <= width and page.evaluate(TOO_WIDE) == []
        color = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert color == ("rgb(245, 246, 248)" if scheme == "light" else "rgb(13, 17, 23)")


def test_the_figures_and_failures_are_those_of_json(chromium: Any, report: tuple[Path, Any]) -> None:
    path, told = report
    with tab(chromium, path) as page:
        shown = page.locator(".figures li").evaluate_all(
            "(all) => Object.fromEntries(all.map((one) => [one.dataset.name, Number(one.dataset.value)]))"
        )
        rows = page.locator("#failures tbody tr").all_inner_texts()
        lines = page.locator(".plot > .failure").evaluate_all("(all) => all.map((one) => one.title)")
    assert shown == {
        "goodput": told["goodput"], "failures": len(told["failures"]), "steps_lost": told["steps_lost"],
        "stall_mean": told["stall_s"]["mean"], "commits": told["commits"],
        "bandwidth": told["protect_nbytes_per_s_and_rank"], "newest": told["newest"]["step"],
        "memory": max(node["peak_nbytes"] for node in told["memory"]),
    }  # fmt: skip
    assert lines == ["failure 1", "failure 2"] and len(rows) == len(told["failures"])
    for word in ("n3", "n5", "950", "memory of n4: 2"):
        assert word in rows[0]


def test_what_stands_in_a_log_does_not_run(chromium: Any, tmp_path: Path) -> None:
    bad = "</script><script>alert(1)</script><img src=x onerror=alert(2)>'\"" + 500 * "x"
    job = made_logs.Job(survives=f"{bad}; {bad}")
    at = job.launch("a", made_logs.BEGAN, [bad, "n2"], None, 30)
    job.say("warning", at, "a", 0, bad, level="WARNING", text=bad)
    job.write(tmp_path / "run.jsonl")
    path, _ = make(tmp_path)
    with tab(chromium, path, 400) as page:
        assert bad in page.locator("body").inner_text() and page.evaluate(TOO_WIDE) == []
        assert page.complaints == [] and page.asked == [path.as_uri()] and page.locator("script, img").count() == 0
    # Were it to get through nevertheless, the page's policy would not let it run.
    path.write_text(path.read_text().replace("</body>", "<script>window.ran = 1</script></body>"))
    with tab(chromium, path) as page:
        assert page.evaluate("window.ran") is None
        assert any("Content Security Policy" in text for text in page.complaints)
