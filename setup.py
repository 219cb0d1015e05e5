"""What pyproject.toml cannot say: README without its links to files, packages of three folders, and a library in C."""

import re
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

_LINK = re.compile(r"!?\[([^]]*)\]\((?!https?:|mailto:|#)[^)]*\)")


def description() -> str:
    """README as the package index shows it, where the links would lead nowhere: their words stay."""
    return _LINK.sub(r"\1", Path(__file__).with_name("README.md").read_text(encoding="utf-8"))


def packages() -> list[str]:
    """Adapters are found in their own folder, because a source distribution has no link to it in ``mlflash/``."""
    outside = [f"mlflash.{name}" for name in find_packages(include=["adapters", "adapters.*"])]
    return sorted({*find_packages(include=["mlflash", "mlflash.*"]), *outside, "mlflash.slurm"})


class Library(build_ext):
    """A library without Python in it, which all versions load by its name; with that name it is no module."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so.1"


class Wheel(bdist_wheel):
    """For any version of Python on one kind of processor."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


# Optional: without a compiler everything works, and saves stop training for about twice as long.
kernel = Extension("mlflash.state.libcopy_kernel", ["mlflash/state/copy_kernel.c"], extra_compile_args=["-O3"],
                   optional=True)  # fmt: skip

setup(
    long_description=description(),
    long_description_content_type="text/markdown",
    packages=packages(),
    ext_modules=[kernel],
    cmdclass={"build_ext": Library, "bdist_wheel": Wheel},
)
