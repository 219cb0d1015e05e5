"""Call what builds, installs and uses packages."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

REPO = Path(__file__).parents[2]


def call(*command: object, timeout: float = 240, **more: object) -> str:
    """Run a command as a user would, away from the checkout; what it printed. A failure says all of it."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI_COMM", "SLURM", "PYTHONPATH"))}
    more["env"] = {**environment, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **more.pop("env", {})}  # type: ignore[dict-item]
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=timeout, **{"cwd": "/", **more})  # type: ignore[call-overload]  # fmt: skip
    assert done.returncode == 0, f"{' '.join(map(str, command))}: {done.returncode}\n{done.stdout}"
    return str(done.stdout)
