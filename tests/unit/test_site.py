"""What the site has besides docs/: `make docs` builds it; these are the parts that need no mkdocs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

REPO = Path(__file__).parents[2]
DOCS = REPO / "docs"


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hooks", DOCS / "site_hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("path", "uri"),
    [
        ("README.md", "index.md"),
        ("docs/dcp.md", "dcp.md"),
        ("docs/pictures/way-of-the-data.svg", "pictures/way-of-the-data.svg"),
        ("ARCHITECTURE.md", "ARCHITECTURE.md"),
        ("benchmarks/save/README.md", "benchmarks/save/README.md"),
        ("slurm/train.sbatch", "source/slurm/train.sbatch.md"),
    ],
)
def test_each_file_has_a_place_in_the_site_and_back(hooks: ModuleType, path: str, uri: str) -> None:
    assert hooks.to_site(path) == uri and hooks.from_site(uri) == path


def test_a_folder_and_what_is_not_there_have_none(hooks: ModuleType) -> None:
    assert hooks.to_site("benchmarks/save") is None and hooks.to_site("docs/nothing.md") is None


def test_links_lead_to_pages_of_the_site_from_wherever_they_are(hooks: ModuleType) -> None:
    text = "[a](docs/dcp.md#x), [`b`](mlflash/rng.py), [c](benchmarks/save), [d](https://x.org/y), [e](#here)"
    assert hooks.rewrite(text, "README.md") == (
        "[a](dcp.md#x), [`b`](source/mlflash/rng.py.md), c, [d](https://x.org/y), [e](#here)"
    )
    text = "[home](../README.md) and ![plot](../benchmarks/save/plot.svg), [in](plan.md)"
    assert hooks.rewrite(text, "docs/dcp.md") == (
        "[home](index.md) and ![plot](benchmarks/save/plot.svg), [in](plan.md)"
    )
    assert hooks.rewrite("[gone](gone.md)", "docs/dcp.md") == "[gone](gone.md)"  # mkdocs complains of it
    assert hooks.rewrite("[plan](../../docs/plan.md)", "benchmarks/scale/README.md") == "[plan](../../plan.md)"


def test_what_looks_like_a_link_in_a_block_of_code_stays(hooks: ModuleType) -> None:
    text = "```text\n[a](docs/dcp.md)\n```\n[a](docs/dcp.md)"
    assert hooks.rewrite(text, "README.md") == "```text\n[a](docs/dcp.md)\n```\n[a](dcp.md)"


def test_a_label_may_go_on_in_the_next_line_and_nothing_else_of_a_page_changes(hooks: ModuleType) -> None:
    assert hooks.rewrite("see [all\nof it](docs/dcp.md)\n", "README.md") == "see [all\nof it](dcp.md)\n"
    for page in (REPO / "docs").glob("*.md"):
        assert hooks.replace_links(page.read_text(), lambda label, to: f"{label}({to})") == page.read_text()


def test_long_names_in_cells_may_break_and_nothing_else(hooks: ModuleType) -> None:
    name, path = "test_the_relaunch_restores", "mlflash/checkpointer/checkpointer.py"
    broken = "test_<wbr>the_<wbr>relaunch_<wbr>restores"
    assert hooks.with_seams(f"<td><code>{name}</code></td>") == f"<td><code>{broken}</code></td>"
    assert hooks.with_seams(f'<td><a href="{path}">here</a></td>') == f'<td><a href="{path}">here</a></td>'
    for html in (f"<p><code>{name}</code></p>", "<td><code>fully_shard</code></td>"):
        assert hooks.with_seams(html) == html
