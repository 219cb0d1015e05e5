"""Draws a picture of the packages of mlflash and their actual imports from each other, read from the source.

python tools/draw_packages.py         draws docs/pictures/packages.svg
python tools/draw_packages.py PATH    draws the source tree below PATH, and prints the picture
"""

from __future__ import annotations

import ast
import functools
import html
import sys
from collections.abc import Mapping
from pathlib import Path

REPO = Path(__file__).parents[1]
PICTURE = REPO / "docs" / "pictures" / "packages.svg"
FOR_ALL = {"errors", "crash_points", "events", "text", "version"}
"""Modules that every package may import from."""
STARTS = {"__init__", "__main__", "cli", "rng"}
"""Modules of no package: what a user or a shell imports first."""

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 132, 34, 22, 62, 20


def files_of(root: Path) -> list[Path]:
    """List the modules below ``mlflash``, without the adapters and the trainings of templates."""
    return [path for path in sorted(root.rglob("*.py")) if not {"adapters", "slurm"} & {*path.relative_to(root).parts}]


def package_of(root: Path, path: Path) -> str:
    """Name the package of a module: its folder, or itself where it lies in none."""
    return path.relative_to(root).with_suffix("").parts[0]


@functools.cache
def imports(root: Path, path: Path) -> tuple[set[str], set[str]]:
    """Names of mlflash, and other top-level packages, that a module imports anywhere."""
    package = ["mlflash", *path.relative_to(root).parts[:-1]]
    ours, others = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".")
            base = [part for part in [*package[: len(package) - node.level + 1 if node.level else 0], *module] if part]
            if base[0] == "mlflash":
                ours |= {base[1]} if len(base) > 1 else {alias.name for alias in node.names}
            else:
                others.add(base[0])
        elif isinstance(node, ast.Import):
            others |= {alias.name.split(".")[0] for alias in node.names}
    return ours, others


def packages(root: Path) -> dict[str, set[str]]:
    """Give for each package those that it imports from, but for what all may import."""
    files = files_of(root)
    found: dict[str, set[str]] = {package_of(root, path): set() for path in files}
    for path in files:
        found[package_of(root, path)] |= imports(root, path)[0]
    names = found.keys() - FOR_ALL - STARTS
    return {name: (found[name] & names) - {name} for name in sorted(names)}


def floors(found: Mapping[str, set[str]]) -> dict[str, int]:
    """Give each package its floor: 1 where it imports from none, else one above the highest that it imports from.

    Raises:
        ValueError: packages import each other in a circle.
    """
    known: dict[str, int] = {}
    while len(known) < len(found):
        ready = [name for name in found if name not in known and found[name] <= known.keys()]
        if not ready:
            raise ValueError(f"these import each other: {sorted(found.keys() - known.keys())}")
        known |= {name: 1 + max((known[other] for other in found[name]), default=0) for name in ready}
    return known


def direct(found: Mapping[str, set[str]]) -> set[tuple[str, str]]:
    """Give the imports that a picture needs: those that do not follow from others."""

    def below(name: str) -> set[str]:
        return found[name].union(*(below(other) for other in found[name]))

    return {(name, other) for name in found for other in found[name]
            if not any(other in below(one) for one in found[name] - {other})}  # fmt: skip


def draw(found: Mapping[str, set[str]]) -> str:
    """Draw packages in their floors, and an arrow from each to those that it imports from; as SVG."""
    floor = floors(found)
    rows = [[name for name in sorted(found) if floor[name] == number] for number in range(1, max(floor.values()) + 1)]
    order: dict[str, float] = {}
    for row in rows:  # each where those below it are, so that few arrows cross
        row.sort(key=lambda name: (sum(order[o] for o in found[name]) / len(found[name]) if found[name] else 0, name))
        order |= {name: nth - (len(row) - 1) / 2 for nth, name in enumerate(row)}
    width = 2 * _MARGIN + max(map(len, rows)) * (_WIDTH + _GAP_X) - _GAP_X
    height = 2 * _MARGIN + len(rows) * (_HEIGHT + _GAP_Y) - _GAP_Y
    x = {name: width / 2 + at * (_WIDTH + _GAP_X) for name, at in order.items()}
    y = {name: height - _MARGIN - (floor[name] - 1) * (_HEIGHT + _GAP_Y) - _HEIGHT / 2 for name in found}
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="14" role="img"><title>The packages of mlflash: each imports from those that its arrows point at'
        "</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>',
        "<style>text { fill: #1d2433; text-anchor: middle; } path { fill: none; stroke: #6b7689; }",
        ".tip { fill: #6b7689; } rect { fill: #e3eefb; stroke: #7da7d9; } .paper { fill: #fff; stroke: none; }",
        "@media (prefers-color-scheme: dark) { text { fill: #e6eaf2; } .paper { fill: #171b24; }",
        "rect { fill: #1c2f49; stroke: #4a78b0; } }</style>",
        f'<rect class="paper" width="{width}" height="{height}"/>',
    ]
    for name, other in sorted(direct(found)):
        top, bottom = y[name] + _HEIGHT / 2, y[other] - _HEIGHT / 2
        bend = (top + bottom) / 2
        lines.append(f'<path d="M{x[name]:g} {top:g}C{x[name]:g} {bend:g} {x[other]:g} {bend:g} {x[other]:g} '
                     f'{bottom:g}" marker-end="url(#tip)"/>')  # fmt: skip
    for name in sorted(found):
        lines += [
            f'<rect x="{x[name] - _WIDTH / 2:g}" y="{y[name] - _HEIGHT / 2:g}" width="{_WIDTH}" height="{_HEIGHT}" '
            'rx="6"/>',
            f'<text x="{x[name]:g}" y="{y[name] + 5:g}">{html.escape(name)}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.stdout.write(draw(packages(Path(sys.argv[1]))))
    else:
        PICTURE.write_text(draw(packages(REPO / "mlflash")))
