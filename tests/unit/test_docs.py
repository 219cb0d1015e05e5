"""In README.md and docs/ links lead somewhere, and tables say what the code says; test_doc_blocks runs their code."""

from __future__ import annotations

import re
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import settings_table
from rooms import ROOMS

from mlflash import errors
from mlflash.placement.protection_groups import place
from mlflash.placement.redundancy_scheme import parse
from mlflash.planning.scheme_comparison import Job, node_nbytes

REPO = Path(__file__).parents[2]
DOCS = REPO / "docs"
PAGES = [REPO / "README.md", *sorted(DOCS.glob("*.md"))]
LINKED = [
    *PAGES,
    REPO / "ARCHITECTURE.md",
    REPO / "CHANGES.md",
    REPO / "DECISIONS.md",
    REPO / "CONTRIBUTING.md",
    *sorted((REPO / "benchmarks").rglob("*.md")),
]
BYTES_PER_PARAMETER = 14
GPUS_PER_NODE = 8


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
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), target
        assert there.is_relative_to(REPO), target
        assert not anchor or anchor in anchors(there), f"{target}; there are: {', '.join(sorted(anchors(there)))}"


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(REPO)))
def test_addresses_elsewhere_are_well_formed(page: Path) -> None:
    for target in targets(page):
        if "://" in target:
            parts = urllib.parse.urlsplit(target)
            assert parts.scheme == "https" and re.fullmatch(r"[a-z0-9.-]+\.[a-z]+", parts.netloc), target


def test_the_table_of_rooms_is_complete_in_their_order_and_names_files_that_are_there() -> None:
    text = (REPO / "ARCHITECTURE.md").read_text()
    named = re.findall(r"^\| `(\w+)` \|", text, re.M)
    above = re.search(r"^Above them: (.+?)\. `adapters/`", text, re.M | re.S)
    rooms = {path.stem for path in (REPO / "mlflash").iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    assert above is not None
    tools = set(re.findall(r"(?<!`mlflash )`(\w+)`", above[1]))
    assert {*named, *tools} == (rooms | {"config"}) - {"adapters"} and not tools & {*named}
    assert named == [*ROOMS], "the rooms of test_package.py"
    for page in (text, (REPO / "DECISIONS.md").read_text()):
        for path in re.findall(rf"`((?:{'|'.join(sorted(rooms))})/\w+)[.`]", page):
            assert (REPO / "mlflash" / f"{path}.py").exists() or (REPO / path).exists(), path
    assert len(text.splitlines()) < 150


def test_every_test_that_the_guarantees_name_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (DOCS / "guarantees.md").read_text()))
    there = {
        name for path in (REPO / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert named <= there, named - there


def test_the_guarantees_count_their_kinds_of_faults_and_their_tests() -> None:
    text = (DOCS / "guarantees.md").read_text()
    tables = re.findall(r"^\| fault \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.M)
    kinds, tests = sum(table.count("\n") for table in tables), len(set(re.findall(r"`(test_\w+)`", text)))
    assert f"The page has {kinds} kinds of faults and names {tests} tests." in text, (kinds, tests)


def test_each_exception_has_its_place_in_errors_md_and_each_place_is_an_exception() -> None:
    text = (DOCS / "errors.md").read_text()
    assert re.findall(r"^### (.+)$", text, re.M) == sorted(errors.__all__)
    rows = dict(re.findall(r"^\| \[(\w+)\]\(#\w+\) \| `(\w+)` \|", text, re.M))
    # The exception of Python's that it is one of, beside MlflashError.
    assert rows == {name: getattr(errors, name).__bases__[-1].__name__ for name in errors.__all__}
    for name in errors.__all__:
        assert f"[{name}](#{name.lower()})" in text


def test_the_table_of_settings_is_that_of_the_code() -> None:
    table = f"{settings_table.HEAD}{settings_table.table()}\n"
    assert table in (DOCS / "using.md").read_text(), "run tools/settings_table.py"


def table(page: Path, heading: str, column: str) -> list[list[str]]:
    """The cells of a table's rows: the one below a heading whose first column is called so."""
    section = page.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = re.search(rf"^\| {re.escape(column)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", section, re.M)
    assert rows is not None
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[1].splitlines()]


def parameters(model: str) -> float:
    return float(model[:-1]) * {"B": 1e9, "T": 1e12}[model[-1]]


def gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f}"


def test_the_table_of_sizes_is_what_mlflash_plan_would_say() -> None:
    rows = table(DOCS / "tuning.md", "How much memory", "model")
    assert len(rows) > 5
    for model, gpus, nodes, *sizes in rows:
        ranks = int(gpus.replace(",", ""))
        hosts = ranks // GPUS_PER_NODE
        assert int(nodes.replace(",", "")) == hosts
        nbytes = round(parameters(model) * BYTES_PER_PARAMETER / ranks)
        job = Job(tuple(f"n{number}" for number in range(hosts)), GPUS_PER_NODE, nbytes)
        schemes = [place(job.topology, parse(scheme)) for scheme in ("none", "copy", "xor:8", "rs:6+2")]
        counted = [nbytes, job.state_nbytes, *(node_nbytes(job, placed) for placed in schemes)]
        assert sizes == [gib(count) for count in counted], model


def test_the_table_of_sizes_under_ddp_is_what_mlflash_plan_would_say() -> None:
    rows = table(DOCS / "tuning.md", "How much memory", "model, under DDP")
    for model, rank, node in rows:
        nbytes = round(parameters(model) * BYTES_PER_PARAMETER)
        job = Job(tuple(f"n{number}" for number in range(8)), GPUS_PER_NODE, nbytes, alike_nbytes=nbytes)
        taken = {gib(node_nbytes(job, place(job.topology, parse(s)))) for s in ("copy", "copy:2")}
        assert [rank, {node}] == [gib(nbytes), taken], model
