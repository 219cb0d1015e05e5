"""What the site has besides the pages in docs/ (hooks of mkdocs).

The pages are written to be read on GitHub, and link to README.md, to benchmarks and to sources as they lie in the
repository. Here each file that a page links to becomes a page of the site: Markdown as it is, a source as a block of
code. Links are rewritten, on whichever side of docs/ they are.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[1]
HOME = "README.md"
NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
PICTURES = {".svg", ".png"}
LANGUAGES = {".py": "python", ".sbatch": "bash", ".sh": "bash", ".yml": "yaml", ".toml": "toml", ".cmake": "cmake"}

_FENCE = re.compile(r"^ *(```|~~~)")
_LINK = re.compile(r"(\[(?:[^\[\]`]|`[^`]*`|\[[^\]]*\])*\])\(([^)\s]+)\)")
_FOREIGN = re.compile(r"[a-z]+:|#|/")
_CELL = re.compile(r"<t[dh]\b.*?</t[dh]>", re.S)
_LONG_WORD = re.compile(r"[^\s<>&\"]{26,}(?=[^<>]*<)")
_SEAM = re.compile(r"(?<=\w[_/.=,])(?=\w)")
# Pages that need the place of their table of contents.
_WIDE = {"index.md", "comparison.md"}
# What is read to work on mlflash: less than what is read to use it, where both have the words of a search.
_IN_THE_BACK = {
    "ARCHITECTURE.md",
    "CHANGES.md",
    "CONTRIBUTING.md",
    "DECISIONS.md",
    "SECURITY.md",
    "format.md",
}
_LOADED = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=["']?(https?:)?//|@import|url\(["']?https?:""")


def to_site(path: str) -> str | None:
    """Where a file of the repository is in the site's sources; None for a folder, or what is not there.

    Example:
        ``to_site("README.md") == "index.md"``, ``to_site("docs/dcp.md") == "dcp.md"``,
        ``to_site("slurm/train.sbatch") == "source/slurm/train.sbatch.md"``
    """
    if path == HOME:
        return "index.md"
    if not (REPO / path).is_file():
        return None
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path if Path(path).suffix in {".md", *PICTURES} else f"source/{path}.md"


def from_site(uri: str) -> str:
    """Where a source of the site is in the repository: undoes `to_site`."""
    if uri == "index.md":
        return HOME
    if uri.startswith("source/"):
        return uri.removeprefix("source/").removesuffix(".md")
    return f"docs/{uri}" if (REPO / "docs" / uri).is_file() else uri


def replace_links(text: str, replace: Callable[[str, str], str]) -> str:
    """Give each link that is not in a block of code to a function: ``replace("[label]", "target")``.

    A label may go on in the next line.
    """
    parts: list[list[str]] = [[]]  # prose and blocks of code, in turn
    for line in text.split("\n"):
        if not _FENCE.match(line):
            parts[-1].append(line)
        elif len(parts) % 2:
            parts.append([line])
        else:
            parts[-1].append(line)
            parts.append([])
    made = ["\n".join(lines) for lines in parts]
    made[::2] = [_LINK.sub(lambda found: replace(found[1], found[2]), prose) for prose in made[::2]]
    return "\n".join(part for part, lines in zip(made, parts, strict=True) if lines)


def links(path: str) -> Iterator[str]:
    """Each file or folder of the repository that a Markdown file of it links to."""
    found: list[str] = []

    def note(label: str, target: str) -> str:
        if not _FOREIGN.match(target):
            found.append(_repository_path(path, target.partition("#")[0]))
        return ""

    replace_links((REPO / path).read_text(), note)
    return iter(found)


def rewrite(text: str, path: str) -> str:
    """Let the links in a Markdown file of the repository lead to pages of the site.

    A link to a folder becomes plain text. One that leads nowhere stays, so that mkdocs complains of it.

    Args:
        text: what is in the file.
        path: where it is in the repository.
    """
    here = posixpath.dirname(to_site(path) or "")

    def replaced(label: str, target: str) -> str:
        if _FOREIGN.match(target):
            return f"{label}({target})"
        file, hash_, anchor = target.partition("#")
        wanted = _repository_path(path, file)
        site = to_site(wanted)
        if site is None:
            return label[1:-1] if (REPO / wanted).is_dir() else f"{label}({target})"
        return f"{label}({posixpath.relpath(site, here or '.')}{hash_}{anchor})"

    return replace_links(text, replaced)


def with_seams(html: str) -> str:
    """Let long names and paths in the cells of tables go on in the next line.

    Example:
        ``<td><code>test_the_relaunch_restores_it</code></td>`` may break behind each ``_``
    """
    return _CELL.sub(lambda cell: _LONG_WORD.sub(lambda word: _SEAM.sub("<wbr>", word[0]), cell[0]), html)


def _repository_path(path: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), target))


def outside(pages: list[str]) -> list[str]:
    """Each file outside of docs/ that these pages link to, or pages that they bring in do."""
    seen, found = set(pages), []
    queue = list(pages)
    while queue:
        for path in links(queue.pop()):
            if path not in seen and to_site(path) is not None:
                seen.add(path)
                found += [] if path.startswith("docs/") else [path]
                queue += [path] if path.endswith(".md") else []
    return found


def on_files(files: Any, config: Any) -> Any:
    """Bring in README.md and what the pages link to."""
    from mkdocs.structure.files import File

    pages = [HOME, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    for path in [HOME, *outside(pages)]:
        uri = to_site(path)
        if Path(path).suffix in {".md", *PICTURES}:
            files.append(File.generated(config, uri, abs_src_path=str(REPO / path)))
        else:
            language = LANGUAGES.get(Path(path).suffix, "text")
            text = f"{NOT_SEARCHED}# {path}\n\n````{language}\n{(REPO / path).read_text()}````\n"
            files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite the links of a page, and say how it is shown and found: GitHub would print that at its top."""
    uri = page.file.src_uri
    if uri in _WIDE:
        page.meta["hide"] = ["toc"]
    if uri in _IN_THE_BACK or uri.startswith(("benchmarks/", "tests/")):
        page.meta["search"] = {"boost": 0.3}
    return markdown if uri.startswith("source/") else rewrite(markdown, from_site(uri))


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Let code in tables break: the search has read the page before."""
    return with_seams(output)


def on_post_build(config: Any) -> None:
    """Fail where a page would load something from elsewhere."""
    from mkdocs.exceptions import PluginError

    for file in Path(config.site_dir).rglob("*"):
        if file.suffix in (".html", ".css") and (found := _LOADED.search(file.read_text())):
            raise PluginError(f"{file} loads from elsewhere: {found[0]}")
