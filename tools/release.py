"""Builds what a release consists of: wheel, source distribution, bill of materials (CycloneDX) and checksums.

    python tools/release.py OUT     (make release)

It builds the newest commit, whatever else lies in the checkout. The same commit, compiler and versions of `build` and
setuptools give the same bytes: https://reproducible-builds.org/docs/source-date-epoch/
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

REPO = Path(__file__).parents[1]
MANYLINUX = f"manylinux_2_17_{platform.machine()}"


def main() -> int:
    """Build into the folder that is named."""
    out = Path(sys.argv[1]).absolute()
    out.mkdir(parents=True)
    os.umask(0o022)
    epoch = int(_call("git", "log", "-1", "--format=%ct"))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "mlflash")
        with tarfile.open(fileobj=io.BytesIO(subprocess.check_output(["git", "archive", "HEAD"], cwd=REPO))) as commit:
            commit.extractall(source, filter="tar")
        built = Path(folder, "built")
        _call(sys.executable, "-m", "build", "-q", "--no-isolation", "-o", built, source, SOURCE_DATE_EPOCH=epoch,
              CFLAGS="-g0")  # without debug information, which has the folder  # fmt: skip
        (sdist,), made = built.glob("*.tar.gz"), built.glob("*.whl")
        _normalize(sdist, out / sdist.name, epoch)
        # The index takes a wheel with compiled parts only if it says for which systems; this checks that it is so.
        _call(sys.executable, "-m", "auditwheel", "repair", "--only-plat", "--plat", MANYLINUX, "-w", out, *made,
              SOURCE_DATE_EPOCH=epoch, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # fmt: skip
        (wheel,) = out.glob("*.whl")
        _list_materials(wheel, Path(folder, "installed"), out / f"{wheel.name.partition('-py3')[0]}.cdx.json")
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in sorted(out.iterdir())]
    (out / "SHA256SUMS").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 0


def _normalize(sdist: Path, target: Path, epoch: int) -> None:
    """Write a source distribution to a file, with files in order and nothing of who built it, and when."""
    packed = io.BytesIO()
    with tarfile.open(sdist) as built, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as made:
        for member in sorted(built.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            made.addfile(member, built.extractfile(member) if member.isfile() else None)
    target.write_bytes(gzip.compress(packed.getvalue(), mtime=epoch))


def _list_materials(wheel: Path, environment: Path, target: Path) -> None:
    """List what `pip install mlflash` installs, with versions and licenses."""
    _call(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin/python"
    _call(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-compile", wheel)
    _call(sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", "--pyproject",
          REPO / "pyproject.toml", "-o", target, python)  # fmt: skip


def _call(*command: object, **environment: object) -> str:
    words = [str(word) for word in command]
    env = os.environ | {name: str(value) for name, value in environment.items()}
    return subprocess.run(words, cwd=REPO, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())
