"""What `make release` builds: the same bytes each time, with a list of what is in it; and it works with each Python."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from building import REPO, call

import mlflash

pytestmark = pytest.mark.timeout(500)

SAVE_AND_RESTORE = """
import sys, numpy as np, mlflash
state = {"w": np.arange(5000.0), "step": 0, "names": ["a", None]}
with mlflash.Checkpointer(sys.argv[1], job="job", memory=sys.argv[2], redundancy="none", drain_every=1) as ckpt:
    ckpt.save(1, state).wait()
for memory in sys.argv[2], sys.argv[2] + "-other":
    given = {"w": np.zeros(5000), "step": 1, "names": ["", 0]}
    with mlflash.Checkpointer(sys.argv[1], job="job", memory=memory, redundancy="none") as ckpt:
        assert ckpt.restore(given) == 1
    assert np.array_equal(given.pop("w"), state["w"]) and given == {"step": 0, "names": ["a", None]}, given
print("the same", sys.version_info[:2])
"""


def python_of(version: str) -> str | None:
    """A Python of a version, on the path or of pyenv, whose links on the path work for one version only."""
    found = [shutil.which(f"python{version}"), *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    show = "import sys; print('%d.%d' % sys.version_info[:2])"
    for python in filter(None, found):
        said = subprocess.run([python, "-c", show], capture_output=True, text=True, check=False, timeout=30).stdout
        if said.strip() == version:
            return python
    return None


@pytest.fixture(scope="module")
def releasing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("releasing")
    call(sys.executable, "-m", "venv", path)
    needed = call(sys.executable, REPO / "tools/requirements.py", "release").split()
    call(path / "bin/pip", "install", "-q", *needed)
    return path / "bin/python"


def test_a_commit_gives_the_same_bytes_whoever_builds_it(
    releasing: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if not (REPO / ".git").exists():
        pytest.skip("needs git: this is no checkout")
    sums = []
    for zone, umask in (("Asia/Tokyo", "077"), ("America/Lima", "002")):
        out, temporary = tmp_path_factory.mktemp("out") / "dist", tmp_path_factory.mktemp("temporary")
        build = f'umask {umask}; exec "$@"'
        call("bash", "-c", build, "build", releasing, REPO / "tools/release.py", out,
             env={"TZ": zone, "TMPDIR": str(temporary)})  # fmt: skip
        sums.append((out / "SHA256SUMS").read_text())
        call("sha256sum", "--strict", "--check", "SHA256SUMS", cwd=out)
    assert sums[0] == sums[1]
    assert {path.suffix for path in out.iterdir()} == {".whl", ".gz", ".json", ""}
    assert next(out.glob("*.whl")).name.startswith(f"mlflash-{mlflash.__version__}-py3-none-manylinux")
    (bill,) = (json.loads(path.read_text()) for path in out.glob("*.cdx.json"))
    assert bill["bomFormat"] == "CycloneDX" and bill["metadata"]["component"]["name"] == "mlflash"
    listed = {part["name"].lower(): part["version"] for part in bill["components"]}
    assert {"mpi4py", "numpy", "h5py", "xxhash"} <= listed.keys() and "pip" not in listed


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_the_wheel_works_with_each_python(version: str, wheel: Path, tmp_path: Path) -> None:
    python = python_of(version)
    if python is None:
        pytest.skip(f"this machine has no Python {version}")
    call(python, "-m", "venv", tmp_path / "venv")
    installed = tmp_path / "venv/bin/python"
    call(installed, "-m", "pip", "install", "-q", "--no-compile", wheel, timeout=400)
    assert mlflash.__version__ in call(installed, "-m", "mlflash", "--version")
    for name in ("memory", "memory-other"):
        (tmp_path / name).mkdir()
    out = call(installed, "-c", SAVE_AND_RESTORE, tmp_path / "directory", tmp_path / "memory")
    assert out.splitlines()[-1] == f"the same ({version.replace('.', ', ')})"
