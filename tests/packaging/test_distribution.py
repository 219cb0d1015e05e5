"""What is built: a wheel and a source distribution, with all that they should have and nothing else."""

from __future__ import annotations

import email
import re
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from building import REPO, call

import mlflash

pytestmark = pytest.mark.timeout(400)  # the first test waits for what all of them look at


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as opened:
        return {name: opened.read(name) for name in opened.namelist() if not name.endswith("/RECORD")}


@pytest.mark.gate
def test_the_wheel_is_for_all_versions_and_holds_the_package_only(wheel: Path) -> None:
    platform = sysconfig.get_platform().replace("-", "_")
    assert wheel.name == f"mlflash-{mlflash.__version__}-py3-none-{platform}.whl"
    names = set(contents(wheel))
    library = "mlflash/state/libcopy_kernel.so.1"
    assert {"mlflash/__init__.py", "mlflash/py.typed", "mlflash/adapters/__init__.py", library} <= names
    tops = {name.split("/")[0] for name in names}
    assert tops == {"mlflash", f"mlflash-{mlflash.__version__}.dist-info"}
    modules = {str(path.relative_to(REPO)) for path in (REPO / "mlflash").rglob("*.py")}
    for folder in ("adapters", "slurm"):
        modules |= {f"mlflash/{path.relative_to(REPO)}" for path in (REPO / folder).rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    templates = {f"mlflash/slurm/{path.name}" for path in (REPO / "slurm").glob("*.sbatch")}
    assert {f"mlflash-{mlflash.__version__}.dist-info/licenses/LICENSE", *templates} <= names


@pytest.mark.gate
def test_the_source_distribution_is_the_project(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as opened:
        names = {name.partition("/")[2] for name in opened.getnames() if not opened.getmember(name).isdir()}
    assert {"tests/ci/tally.py", "docs/format.md", "constraints.txt", "Makefile", "CONTRIBUTING.md"} <= names
    names = {name for name in names if not name.startswith("mlflash.egg-info/")} - {"PKG-INFO", "setup.cfg"}
    if not (REPO / ".git").exists():
        pytest.skip("needs git: this is no checkout")
    tracked = call("git", "ls-files", "-co", "--exclude-standard", cwd=REPO).splitlines()
    # A link is not in it: mlflash/adapters and mlflash/slurm lead a checkout to what a wheel has there.
    assert names == {name for name in tracked if not name.startswith(".") and not (REPO / name).is_symlink()}


def test_the_index_takes_both(built: tuple[Path, Path], checkers: Path) -> None:
    assert call(checkers / "twine", "check", "--strict", *built).count("PASSED") == 2


@pytest.mark.gate
def test_the_metadata_is_complete(wheel: Path) -> None:
    (raw,) = [text for name, text in contents(wheel).items() if name.endswith("/METADATA")]
    told = email.message_from_bytes(raw)
    assert told["Version"] == mlflash.__version__ and told["License-Expression"] == "Apache-2.0"
    assert told["License-File"] == "LICENSE" and told["Requires-Python"] == ">=3.10" and told["Summary"]
    assert {"Typing :: Typed", "Operating System :: POSIX :: Linux"} <= {*told.get_all("Classifier", [])}
    description, readme = raw.decode().partition("\n\n")[2], (REPO / "README.md").read_text()
    # The index has none of the files that README links to: the words of the links stay.
    assert not [target for target in re.findall(r"\]\(([^)]*)\)", description) if not target.startswith("http")]
    unlinked = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", readme)
    assert re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", description).strip() == unlinked.strip()


def test_the_citation_is_valid_and_of_this_version(checkers: Path) -> None:
    call(checkers / "cffconvert", "--validate", cwd=REPO)
    text = (REPO / "CITATION.cff").read_text()
    assert f"\nversion: {mlflash.__version__}\n" in text and "\nlicense: Apache-2.0\n" in text


def test_an_editable_install_finds_the_adapters_and_templates(
    plain_environment: Path, checkout: Path, new_environment: Callable[[], Path]
) -> None:
    target = new_environment()
    call(target / "bin/python", "-m", "pip", "install", "-q", "--no-deps", "-e", checkout)
    show = "import mlflash, mlflash.adapters as adapters; print(mlflash.__file__, adapters.__file__)"
    found = call(target / "bin/python", "-c", show).split()
    assert len(found) == 2 and all(Path(file).is_relative_to(checkout) for file in found)
    packaged = "from mlflash.tools.template import packaged; print(packaged('train.sbatch'))"
    assert call(target / "bin/python", "-c", packaged).strip() == (REPO / "slurm" / "train.sbatch").read_text().strip()
    found = call(plain_environment / "bin/python", "-c", show).split()
    assert len(found) == 2 and all(Path(file).is_relative_to(plain_environment) for file in found)
