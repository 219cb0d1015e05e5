"""What a save costs a step of training on a GPU, as a picture of the figures in benchmarks/RESULTS.md.

python tools/draw_cost.py    draws docs/pictures/cost-of-a-save.svg
"""

from __future__ import annotations

import re
from pathlib import Path

REPO = Path(__file__).parents[1]
RESULTS = REPO / "benchmarks" / "RESULTS.md"
PICTURE = REPO / "docs" / "pictures" / "cost-of-a-save.svg"
STEPS = {
    "a step without a save": "without a save",
    "a step with a lazy save": "save(step, state, until=optimizer)",
    "a step with an eager save": "save(step, state)",
    "a step while the courier works, eager": "the next steps, while the courier works",
}
"""Rows of RESULTS.md, and what the picture calls them."""

_FULL = 320
_STYLE = """<style>
  text { font: 15px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #1d2433; }
  .head { font-weight: 700; }
  .small { font-size: 13.5px; fill: #4a5468; }
  .code { font: 13.5px ui-monospace, "DejaVu Sans Mono", monospace; }
  .paper { fill: #ffffff; stroke: #c9d0dc; }
  .step { fill: #9db4d3; }
  .more { fill: #c2570c; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6eaf2; }
    .small { fill: #b4bdcd; }
    .paper { fill: #171b24; stroke: #3b4456; }
    .step { fill: #42608c; }
    .more { fill: #ffb27d; }
  }
</style>"""


def figures(results: str) -> dict[str, tuple[float, float]]:
    """Milliseconds of each step, and as a multiple of one without a save: from the part of RESULTS.md on GPUs."""
    part = _on_gpus(results)
    found = {}
    for row in STEPS:
        cells = next(line for line in part.splitlines() if line.startswith(f"| {row} |")).split("|")
        found[row] = 1000 * float(cells[2]), float(cells[4].split()[0])
    return found


def draw(results: str) -> str:
    """Draw them."""
    took = figures(results)
    scale = _FULL / max(ms for ms, _ in took.values())
    bare = took["a step without a save"][0] * scale
    drawn = []
    for at, (row, (ms, ratio)) in enumerate(took.items()):
        y, kind = 84 + 54 * at, "code" if "(" in STEPS[row] else "small"
        drawn.append(f'<text class="{kind}" x="20" y="{y}">{STEPS[row]}</text>')
        drawn.append(f'<rect class="step" x="20" y="{y + 8}" width="{bare:.1f}" height="20"/>')
        if ratio > 1:
            drawn.append(f'<rect class="more" x="{20 + bare:.1f}" y="{y + 8}" '
                         f'width="{ms * scale - bare:.1f}" height="20"/>')  # fmt: skip
        more = f", + {ratio - 1:.0%}" if ratio > 1 else ""
        drawn.append(f'<text x="{28 + max(ms * scale, bare):.1f}" y="{y + 23}">{ms:.0f} ms{more}</text>')
    part = _on_gpus(results)
    device = re.findall(r"device ([^,]+), device GiB", part)[0]
    mib = re.findall(r"MiB saved (\d+)", part)[0]
    size = 'viewBox="0 0 480 316" width="480" height="316"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title">
<title id="title">Time of a training step on one {device}: without a save, with one, and while the courier works</title>
{_STYLE}
<rect class="paper" x="1" y="1" width="478" height="314" rx="12"/>
<text class="head" x="20" y="30">A step of training, and what a save adds</text>
<text class="small" x="20" y="52">one {device}, {mib} MiB of state, medians</text>
{chr(10).join(drawn)}
<text class="small" x="20" y="300">Measured on one rank, without redundancy</text>
</svg>
"""


def _on_gpus(results: str) -> str:
    return re.findall(r"^## gpu\n(.*?)^## ", results, re.M | re.S)[0]


if __name__ == "__main__":
    PICTURE.write_text(draw(RESULTS.read_text()))
