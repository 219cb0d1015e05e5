"""Makes the pictures of docs/ from a real job that loses a node: its report, and mlflash top while it runs.

Usage: python tools/pictures.py [NAME...]; pictures: report, phone, top. Default: all.

It runs 8 ranks on 4 emulated nodes for about a minute, and needs the environment of `make browser` with Pillow,
Chromium, and for the looks of it the font Inter (Debian: chromium, fonts-inter). An empty log, or a launch that fails,
ends it.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path.append(str(REPO / "tests" / "support"))

from browsing import browser, tab  # noqa: E402
from PIL import Image  # noqa: E402

from mlflash.run.processes import mpiexec  # noqa: E402

PICTURES = REPO / "docs" / "pictures"
MOST_NBYTES = 100_000
RANKS, RANKS_PER_NODE, LOST = 8, 2, 2
JOB = "run42"


class Job:
    """The job that is pictured; leave the context manager, and nothing of it is left.

    Attributes:
        folder: where it runs; events.jsonl and those of the other nodes are there.
    """

    def __enter__(self) -> Job:
        self.folder = Path(tempfile.mkdtemp(prefix="mlflash-pictures-"))
        self.memory = Path(tempfile.mkdtemp(prefix="mlflash-pictures-", dir="/dev/shm"))
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder)
        shutil.rmtree(self.memory)

    def start(self, steps: int) -> subprocess.Popen[bytes]:
        """Start a launch that trains to a step."""
        for path in self.folder.glob("pid-*"):
            path.unlink()
        program = [
            sys.executable,
            str(REPO / "tests" / "support" / "on_node.py"),
            sys.executable,
            "-m",
            "mpi4py",
            str(REPO / "tools" / "pictured_job.py"),
            str(steps),
            str(self.folder),
        ]
        settings = {"MLFLASH_JOB": JOB, "MLFLASH_MEMORY": str(self.memory), "TMPDIR": str(self.folder),
                    "RANKS_PER_NODE": str(RANKS_PER_NODE)}  # fmt: skip
        command, environment = mpiexec(RANKS, program, settings)
        return subprocess.Popen(command, env=environment, cwd=self.folder, start_new_session=True)

    def lose_a_node(self) -> None:
        """Kill the ranks of a node and delete its memory, as its crash does."""
        for rank in range(LOST * RANKS_PER_NODE, (LOST + 1) * RANKS_PER_NODE):
            os.kill(int((self.folder / f"pid-{rank}").read_text()), signal.SIGKILL)
        shutil.rmtree(self.memory / f"node{LOST}")

    def run(self, watch: Callable[[Path], None]) -> None:
        """Run it: for some time, until a node is lost; then to its end, while somebody watches."""
        launch = self.start(100_000)
        try:
            time.sleep(30)
            self.lose_a_node()
            launch.wait(60)
            time.sleep(2)
            launch = self.start(1100)
            time.sleep(15)
            watch(self.memory)
            if launch.wait(120) != 0:
                raise SystemExit("the second launch failed")
        finally:
            if launch.poll() is None:
                os.killpg(launch.pid, signal.SIGKILL)
                launch.wait()


def watch_top(memory: Path) -> str:
    """What `mlflash top` shows, as SVG."""
    from rich.console import Console

    from mlflash.tools.top import Page, look_here

    with open(os.devnull, "w") as nowhere:
        console = Console(
            record=True, file=nowhere, width=92, highlight=False, force_terminal=True, color_system="truecolor"
        )
        console.print(Page(JOB, look_here(str(memory), JOB)))
    return terminal(console, "mlflash top")


def terminal(console: Any, title: str) -> str:
    """What a console has recorded, as a picture of a terminal, without the fonts that it would fetch."""
    text: str = console.export_svg(title=title)
    begin, end = text.index("@font-face"), text.index(".terminal-") if ".terminal-" in text else text.index("}")
    return text[:begin] + text[end:]


def show_report(started: Any, folder: Path, names: set[str]) -> None:
    """The page on a wide screen by day, and on a phone by night."""
    command = [sys.executable, "-m", "mlflash", "report", "events.jsonl", "-o", "report.html"]
    subprocess.run(command, cwd=folder, check=True)
    path = folder / "report.html"
    if "report" in names:
        with tab(started, path, 1180, 1330) as page:
            keep(page.screenshot(), "report")
    if "phone" in names:
        with tab(started, path, 390, 844, scheme="dark", device_scale_factor=2) as page:
            keep(page.screenshot(), "report-phone")


def show_svg(started: Any, folder: Path, svg: str, name: str) -> None:
    """A drawing, as large as it is."""
    path = folder / f"{name}.html"
    path.write_text(f"<!DOCTYPE html><style>body{{margin:0}}svg{{display:block;width:940px}}</style>{svg}")
    with tab(started, path, 940, 200, device_scale_factor=1.5) as page:
        keep(page.locator("svg").first.screenshot(omit_background=True), name)


def keep(png: bytes, name: str) -> None:
    """Write a picture in few colors, which must not be large: it stays in the history of the project."""
    picture, small = Image.open(io.BytesIO(png)).convert("RGBA"), io.BytesIO()
    if picture.getextrema()[3] == (255, 255):  # nothing is transparent
        picture = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    else:
        picture = picture.quantize(128, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    picture.save(small, "PNG", optimize=True)
    png = small.getvalue()
    if len(png) > MOST_NBYTES:
        raise SystemExit(f"{name}.png would have {len(png):,} bytes; at most {MOST_NBYTES:,}")
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / f"{name}.png").write_bytes(png)
    print(f"{name}.png: {len(png):,} bytes")


def main() -> None:
    """Make the pictures that are asked for."""
    names = set(sys.argv[1:]) or {"report", "phone", "top"}
    watched: list[str] = []
    with Job() as job, browser() as started:
        job.run(lambda memory: watched.append(watch_top(memory)) if "top" in names else None)
        show_report(started, job.folder, names)
        for svg in watched:
            show_svg(started, job.folder, svg, "top")


if __name__ == "__main__":
    main()
