"""The page of mlflash report in a real browser: offline, on a phone, in the dark, for who cannot see or use a mouse."""

from __future__ import annotations

import functools
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import made_logs
import pytest
from browsing import CHROMIUM, browser, tab
from click.testing import CliRunner

from mlflash.cli import main

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium")

MARKS = ("stall", "protect", "commit", "drain", "restore")
SIZES = [(320, 640), (390, 844), (768, 1024), (1280, 900), (2560, 1440)]

TWO_FRAMES = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
# Contrast by WCAG 2.2 of every text that is seen, against what lies behind it: [ratio, pixels, text].
CONTRASTS = """() => {
  const parse = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
  const light = (c) => { c /= 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
  const luminance = (c) => 0.2126 * light(c[0]) + 0.7152 * light(c[1]) + 0.0722 * light(c[2]);
  const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3]));
  const behind = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) layers.push(parse(getComputedStyle(e).backgroundColor));
    let color = [255, 255, 255];
    for (const layer of layers.reverse()) color = over(layer, color);
    return color;
  };
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement, style = getComputedStyle(element), box = element.getBoundingClientRect();
    if (!node.data.trim() || !element.checkVisibility() || !box.width) continue;
    if (/^(title|script|style)$/i.test(element.tagName)) continue;
    const color = over(parse(element.namespaceURI.endsWith("svg") ? style.fill : style.color), behind(element));
    const [a, b] = [luminance(color), luminance(behind(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    found.push([ratio, parseFloat(style.fontSize), node.data.trim().slice(0, 60)]);
  }
  return found;
}"""
# Contrast of the fill of something with that of something else.
FILLS = """([one, other]) => {
  const light = (c) => { c /= 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
  const of = (name) => {
    const style = getComputedStyle(document.querySelector(name));
    const [r, g, b] = (name === "section" ? style.backgroundColor : style.fill).match(/[\\d.]+/g).map(Number);
    return 0.2126 * light(r) + 0.7152 * light(g) + 0.0722 * light(b);
  };
  const [a, b] = [of(one), of(other)];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


def make(folder: Path, name: str) -> tuple[Path, Any]:
    """The page and the numbers of a log that lies in a folder."""
    output = folder / f"{name}.html"
    said = CliRunner().invoke(main, ["report", str(folder / f"{name}.jsonl"), "-o", str(output), "--json"])
    assert said.exit_code == 0, said.output
    return output, json.loads(said.stdout)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("report")
    made_logs.eventful(folder / "run.jsonl")
    return make(folder, "run")


def open_all(page: Any) -> None:
    page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")


def test_it_opens_without_a_network_and_asks_for_nothing(chromium: Any, report: tuple[Path, Any]) -> None:
    path, _ = report
    with tab(chromium, path) as page:
        assert page.asked == [path.as_uri()]
        assert page.complaints == []
        assert page.title() == "run42-1c0d5a3e: checkpoints"


def test_a_server_of_it_is_asked_for_the_page_and_nothing_else(chromium: Any, report: tuple[Path, Any]) -> None:
    path, _ = report
    asked = []

    class Server(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            asked.append(self.path)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Server, directory=path.parent)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}/{path.name}"
            with tab(chromium, url, offline=False) as page:
                page.wait_for_load_state("networkidle")
                assert page.complaints == []
        finally:
            server.shutdown()
            thread.join()
    assert asked == [f"/{path.name}"]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_no_page_scrolls_sideways_and_no_text_is_tiny(
    chromium: Any, report: tuple[Path, Any], size: tuple[int, int]
) -> None:
    with tab(chromium, report[0], *size) as page:
        open_all(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        sizes = [pixels for _, pixels, _ in page.evaluate(CONTRASTS)]
        assert len(sizes) > 100 and min(sizes) >= 11
        timeline = page.locator(".timeline").first
        inside, seen = timeline.evaluate("(box) => [box.scrollWidth, box.clientWidth]")
        assert (inside > seen) == (size[0] <= 768)  # it scrolls in its own box
        outside = page.evaluate(f"""[...document.querySelectorAll("section *")]
            .filter((one) => !one.closest(".timeline, svg, .unseen, thead"))
            .filter((one) => one.getBoundingClientRect().right > {size[0]}).map((one) => one.outerHTML)""")
        assert outside == []


def test_names_of_rows_stay_in_sight_when_the_timeline_is_scrolled(chromium: Any, report: tuple[Path, Any]) -> None:
    with tab(chromium, report[0], 390, 844) as page:
        label = page.locator(".timeline .label").first
        before = label.bounding_box()
        page.locator(".timeline").first.evaluate("(box) => (box.scrollLeft = 250)")
        assert label.bounding_box() == before


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read(chromium: Any, report: tuple[Path, Any], scheme: str) -> None:
    with tab(chromium, report[0], scheme=scheme) as page:
        open_all(page)
        found = page.evaluate(CONTRASTS)
        assert len(found) > 250
        assert [one for one in found if one[0] < 4.5] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_marks_stand_out_from_their_row(chromium: Any, report: tuple[Path, Any], scheme: str) -> None:
    with tab(chromium, report[0], scheme=scheme) as page:
        ratios = {mark: page.evaluate(FILLS, [f"rect.{mark}", "rect.alive"]) for mark in MARKS}
        ratios["failure"] = page.evaluate(FILLS, [".badge", "section"])
        assert {mark: ratio for mark, ratio in ratios.items() if ratio < 3} == {}


def test_dark_is_dark_and_light_is_light(chromium: Any, report: tuple[Path, Any]) -> None:
    def colors(scheme: str) -> list[int]:
        with tab(chromium, report[0], scheme=scheme) as page:
            rows = page.evaluate("""["body", "section", ".figure", "h1", "rect.alive", "rect.stall"].map((name) => {
                const style = getComputedStyle(document.querySelector(name));
                const color = name.startsWith("rect") ? style.fill : name == "h1" ? style.color : style.backgroundColor;
                return color.match(/[\\d.]+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0); })""")
            return [int(row) for row in rows]

    light, dark = colors("light"), colors("dark")
    assert min(light[:3]) > 3 * 235 and max(dark[:3]) < 3 * 50  # page and cards
    assert light[3] < 3 * 60 and dark[3] > 3 * 200  # text
    assert light[4] > dark[4] and light[5] != dark[5]


def test_each_rank_has_a_row_beside_its_name(chromium: Any, report: tuple[Path, Any]) -> None:
    with tab(chromium, report[0]) as page:
        timeline = page.locator(".timeline").first
        rows, labels = timeline.locator("g.row"), timeline.locator(".label")
        told = rows.evaluate_all("(rows) => rows.map((row) => row.dataset.row)")
        places = ((1, (0, 1)), (2, (2, 3)), (3, (4, 5)), (4, (6, 7)), (5, (4, 5)))
        assert told == [f"rank {rank} on n{node}" for node, ranks in places for rank in ranks]
        assert [label.split("rank")[1].strip() for label in labels.all_inner_texts()] == [
            row.split()[1] for row in told
        ]
        for at in range(len(told)):
            row, label = rows.nth(at).locator(".alive").first.bounding_box(), labels.nth(at).bounding_box()
            assert row["width"] > 50
            assert abs(row["y"] + row["height"] / 2 - label["y"] - label["height"] / 2) < 3


def test_failures_are_lines_where_the_table_has_them(chromium: Any, report: tuple[Path, Any]) -> None:
    path, numbers = report
    with tab(chromium, path) as page:
        badges = page.locator(".timeline").first.locator(".badge").all_text_contents()
        rows = page.locator("#failures tbody tr").all_inner_texts()
        assert badges == [str(number) for number in range(1, len(numbers["failures"]) + 1)] == ["1", "2"]
        assert "n3 → n5" in rows[0] and "step 950" in rows[0] and "memory of n4: 2 ranks" in rows[0]
        assert "n1" in rows[1] and "step 2,650" in rows[1]


def test_the_figures_are_those_of_json(chromium: Any, report: tuple[Path, Any]) -> None:
    path, told = report
    with tab(chromium, path) as page:
        shown = page.locator(".figure").evaluate_all(
            "(all) => Object.fromEntries(all.map((one) => [one.dataset.name, Number(one.dataset.value)]))"
        )
        text = page.locator(".figures").inner_text()
    assert shown == {
        "goodput": told["goodput"], "failures": len(told["failures"]), "steps_lost": told["steps_lost"],
        "stall_mean": told["stall_s"]["mean"], "commits": told["commits"],
        "bandwidth": told["protect_nbytes_per_s_and_rank"], "newest": told["newest"]["step"],
        "memory": max(node["peak_nbytes"] for node in told["memory"]),
    }  # fmt: skip
    for words in (
        f"{100 * told['goodput']:.1f} %", f"{1000 * told['stall_s']['mean']:.0f} ms",
        f"step {told['newest']['step']:,}",
        f"{1000 * told['stall_s']['p95']:.0f} ms or less", f"in {len(told['launches'])} launches",
    ):  # fmt: skip
        assert words in text


@pytest.mark.parametrize("mark", MARKS)
def test_pointing_at_a_mark_says_what_it_is(chromium: Any, report: tuple[Path, Any], mark: str) -> None:
    with tab(chromium, report[0]) as page:
        open_all(page)
        marks = page.locator(f".timeline rect.{mark}")
        widths = marks.evaluate_all("(all) => all.map((one) => one.getBoundingClientRect().width)")
        tip, rect = page.locator("#tip"), marks.nth(widths.index(max(widths)))
        title = rect.locator("title").text_content()
        assert title.startswith("step ") and not tip.is_visible()
        rect.scroll_into_view_if_needed()
        page.evaluate(TWO_FRAMES)  # scrolling hides what is shown, and is told a frame later
        rect.hover(force=True)
        assert tip.is_visible() and tip.inner_text() == title
        box = tip.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 1280
        page.mouse.move(5, 5)
        assert not tip.is_visible() and rect.locator("title").text_content() == title


def test_a_finger_does_as_well(chromium: Any, report: tuple[Path, Any]) -> None:
    with tab(chromium, report[0], 390, 844, has_touch=True, is_mobile=True) as page:
        bar = page.locator(".bar rect").first
        bar.tap()
        assert "Training, kept" in page.locator("#tip").inner_text()


def test_without_scripts_all_is_there(chromium: Any, report: tuple[Path, Any]) -> None:
    with tab(chromium, report[0], java_script_enabled=False) as page:
        assert page.locator(".timeline").first.locator("rect.stall title").first.text_content().startswith("step 25:")
        assert page.locator(".figure").count() == 8
        assert not page.locator("#tip").is_visible()


def test_drawings_and_tables_can_be_read_aloud_and_reached_by_keys(chromium: Any, report: tuple[Path, Any]) -> None:
    with tab(chromium, report[0]) as page:
        names = page.locator("svg[role=img]").evaluate_all("(all) => all.map((one) => one.getAttribute('aria-label'))")
        assert len(names) > 5 and all(names)
        assert page.locator("svg:not([role=img])").evaluate_all(
            "(all) => all.every((one) => one.closest('[role=img]'))"
        )
        assert page.locator("table").evaluate_all("(all) => all.every((one) => one.querySelector('thead th'))")
        assert page.locator("section").evaluate_all(
            "(all) => all.every((one) => document.getElementById(one.getAttribute('aria-labelledby')).textContent)"
        )
        heads = page.locator("h1, h2, h3").evaluate_all("(all) => all.map((one) => one.tagName)")
        assert heads[0] == "H1" and heads.count("H1") == 1
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "timeline"
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        assert page.locator("details").first.get_attribute("open") is not None


def test_what_stands_in_a_log_does_not_run(chromium: Any, tmp_path: Path) -> None:
    bad = "</script><script>alert(1)</script><img src=x onerror=alert(2)>'\""
    job = made_logs.Job(survives=f"{bad}; {bad}")
    at = job.launch("a", made_logs.BEGAN, [bad, "n2"], None, 30)
    job.say("warning", at, "a", 0, bad, level="WARNING", text=bad)
    job.write(tmp_path / "run.jsonl")
    path, _ = make(tmp_path, "run")
    with tab(chromium, path) as page:
        page.locator(".timeline rect.stall").first.hover(force=True)
        assert bad in page.locator("body").inner_text()
        assert page.complaints == [] and page.asked == [path.as_uri()]
        assert page.locator("script").count() == 1 and page.locator("img").count() == 0
    # Were it to get through nevertheless, the page's policy would not let it run.
    path.write_text(path.read_text().replace("</body>", "<script>window.ran = 1</script></body>"))
    with tab(chromium, path) as page:
        assert page.evaluate("window.ran") is None
        assert any("Content Security Policy" in text for text in page.complaints)


def test_the_page_of_a_large_job_stays_small_and_is_shown_whole(chromium: Any, tmp_path: Path) -> None:
    made_logs.large(tmp_path / "run.jsonl")
    path, numbers = make(tmp_path, "run")
    with tab(chromium, path, 390, 844) as page:
        assert page.evaluate("document.querySelectorAll('*').length") < 20_000 and path.stat().st_size < 2 << 20
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert "node032 → spare0" in page.locator("#failures").inner_text()
        assert numbers["launches"][0]["ranks"] == 512
        assert page.complaints == []
