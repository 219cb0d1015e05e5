"""Each extra of pyproject.toml installs, and what it is for works: as a user's first minutes would go."""

from __future__ import annotations

import os
import subprocess
import zipfile
from collections.abc import Callable
from email import message_from_bytes
from pathlib import Path

import pytest
from building import REPO, call

SAVE_AND_RESTORE = """
import sys, numpy as np, mlflash
with mlflash.Checkpointer(sys.argv[1] + "/drained", strict=True) as ckpt:
    state = {"w": np.zeros(1000), "rng": mlflash.rng()}
    found = ckpt.restore(state)
    assert found == (int(sys.argv[2]) or None) and state["w"][7] == int(sys.argv[2]), (found, state["w"][7])
    state["w"] += 1
    ckpt.save((found or 0) + 1, state).wait()
"""
ON_RANKS = (
    """
from mpi4py import MPI
assert MPI.COMM_WORLD.size == 2
import os; assert os.environ["WANTED"] in MPI.Get_library_version(), MPI.Get_library_version()
"""
    + SAVE_AND_RESTORE
)
COMPRESSED = """
import sys, numpy as np, mlflash
settings = {"format": "hdf5", "compression": "zstd", "drain_every": 1}
with mlflash.Checkpointer(sys.argv[1], redundancy="none", strict=True, **settings) as ckpt:
    ckpt.save(1, {"w": np.zeros(1 << 20)}).wait()
    ckpt.drain().wait()
from pathlib import Path
files = [path for path in Path(sys.argv[1]).rglob("*.h5")]
assert 0 < sum(path.stat().st_size for path in files) < 1 << 20, files
"""
TENSORS = """
import sys, torch, mlflash
state = {"w": torch.zeros(10), "rng": mlflash.rng()}
for found in (None, 1):
    with mlflash.Checkpointer(sys.argv[1], redundancy="none", strict=True) as ckpt:
        assert ckpt.restore(state) == found and state["w"][3] == (found or 0)
        state["w"] += 1
        ckpt.save((found or 0) + 1, state).wait()
"""
S3 = "from mlflash.storage.store import open_store; import s3fs; assert open_store('s3://bucket/run').path == 's3://bucket/run'"
METRICS = """
import os, sys, numpy as np, mlflash
os.mkdir(sys.argv[1])
with mlflash.Checkpointer(sys.argv[1], redundancy="none", metrics=sys.argv[1] + "/m.prom") as ckpt:
    ckpt.save(1, {"w": np.zeros(10)}).wait()
assert "mlflash_committed_step" in open(sys.argv[1] + "/m.prom").read()
"""
SPANS = """
import http.server, os, sys, threading, time, numpy as np, mlflash
got = []
class Collector(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        got.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
with mlflash.Checkpointer(sys.argv[1], redundancy="none", metrics="otlp") as ckpt:
    ckpt.save(1, {"w": np.zeros(10)}).wait()
    has = lambda name: any(name in body for path, body in list(got))
    end = time.monotonic() + 60
    while not (has(b"mlflash.commit") and has(b"mlflash_committed_step")):
        assert time.monotonic() < end, got
        time.sleep(0.05)
assert {path for path, body in got} == {"/v1/traces", "/v1/metrics"}
"""
DRAINED = """
import sys, numpy as np, mlflash
with mlflash.Checkpointer(sys.argv[1], job="drained", drain_every=1, redundancy="none", strict=True) as ckpt:
    ckpt.save(9, {"w": np.arange(1000)}).wait()
    ckpt.drain().wait()
with mlflash.Checkpointer(sys.argv[1], job="another", redundancy="none", strict=True) as ckpt:
    state = {"w": np.zeros(1000, int)}
    assert ckpt.restore(state) == 9 and state["w"][7] == 7
"""
SIGNED = """
import subprocess, sys, numpy as np, mlflash
from pathlib import Path
key = sys.argv[1] + ".pem"
subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True)
with mlflash.Checkpointer(sys.argv[1], drain_every=1, sign_key=key, redundancy="none", strict=True) as ckpt:
    ckpt.save(1, {"w": np.zeros(10)}).wait()
    ckpt.drain().wait()
assert (Path(sys.argv[1]) / "step-00000001" / "provenance.json.sig").stat().st_size == 64
"""
# What each extra is for.
EXTRAS = {
    "torch": TENSORS,
    "s3": S3,
    "compression": COMPRESSED,
    "sign": SIGNED,
    "lightning": "from mlflash.adapters.lightning import MLFlashCallback as it; it(every_n_steps=10, directory='/x')",
    "transformers": "from mlflash.adapters.transformers import MLFlashCallback, TrainerWrapper",
    "deepspeed": "from mlflash.adapters.deepspeed import attach",
    "torchtitan": "from mlflash.adapters.torchtitan import MemoryCheckpointManager as it; assert it.Config.beside",
    "prometheus": METRICS,
    "opentelemetry": SPANS,
}
WITH_TORCH = {"torch", "lightning", "transformers", "deepspeed", "torchtitan"}
ALONE = {"mpich", "nemo"}  # with tests of their own

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def install(new_environment: Callable[[], Path], wheel: Path) -> Callable[[str], Path]:
    """Install mlflash with an extra into an environment of its own; gives its folder."""

    def make(extra: str) -> Path:
        path = new_environment()
        pip = [path / "bin/python", "-m", "pip"]
        call(*pip, "install", "-q", "--no-compile", "-c", REPO / "constraints.txt", f"{wheel}[{extra}]", timeout=380)
        assert "No broken requirements" in call(*pip, "check")
        torch = "torch 2.13.0" if extra in WITH_TORCH else "no torch"
        assert torch in call(path / "bin/mlflash", "--version")
        return path

    return make


def first_minutes(environment: Path, shm: Path, tmp_path: Path) -> None:
    """The command answers; what one process saves the next one restores."""
    assert "scavenge" in call(environment / "bin/mlflash", "--help")
    for found in (0, 1, 2):
        call(environment / "bin/python", "-W", "error", "-c", SAVE_AND_RESTORE, tmp_path, found,
             env={"MLFLASH_MEMORY": str(shm)}, cwd=tmp_path)  # fmt: skip
    assert "step 3" in call(environment / "bin/mlflash", "status", env={"MLFLASH_MEMORY": str(shm)}, cwd=tmp_path)


def test_each_extra_is_installed_here(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        (metadata,) = [name for name in opened.namelist() if name.endswith("/METADATA")]
        provided = message_from_bytes(opened.read(metadata)).get_all("Provides-Extra", [])
    assert sorted([*EXTRAS, *ALONE]) == sorted(provided), "a new extra needs a line that says what it is for"


@pytest.mark.gate
def test_without_any_extra_one_process_saves_and_restores(plain_environment: Path, shm: Path, tmp_path: Path) -> None:
    assert "no torch" in call(plain_environment / "bin/mlflash", "--version")
    first_minutes(plain_environment, shm, tmp_path)
    call(plain_environment / "bin/python", "-W", "error", "-c", DRAINED, tmp_path / "drained",
         env={"MLFLASH_MEMORY": str(shm)}, cwd=tmp_path)  # fmt: skip
    for words in ("verify", "inspect 9", "export 9 out --to safetensors"):
        call(plain_environment / "bin/mlflash", *words.split(), "-d", "drained", cwd=tmp_path)
    doctor = call(plain_environment / "bin/mlflash", "doctor", cwd=tmp_path)
    assert "0 errors" in doctor and "pip install 'mlflash[mpich]'" in doctor


def test_what_needs_an_extra_names_it(plain_environment: Path, tmp_path: Path) -> None:
    def say(*arguments: object) -> str:
        done = subprocess.run([plain_environment / "bin/mlflash", *map(str, arguments)], capture_output=True, text=True,
                              timeout=60, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"})  # fmt: skip
        assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr, done
        return done.stderr

    assert "pip install 'mlflash[s3]'" in say("status", "--job", "j", "--directory", "s3://bucket/run")
    assert "pip install 'mlflash[mpich]'" in say("demo")
    assert "pip install 'mlflash[torch]'" in say("demo", "--keep-alive")


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_brings_what_it_is_for(extra: str, install: Callable[[str], Path], shm: Path, tmp_path: Path) -> None:
    environment = install(extra)
    first_minutes(environment, shm, tmp_path)
    call(environment / "bin/python", "-c", EXTRAS[extra], tmp_path / "x", cwd=tmp_path,
         env={"MLFLASH_MEMORY": str(shm), "MLFLASH_JOB": "extra"})  # fmt: skip


def test_an_mpi_of_the_index_runs_ranks(install: Callable[[str], Path], shm: Path, tmp_path: Path) -> None:
    environment = install("mpich")
    first_minutes(environment, shm, tmp_path)
    memory = shm / "ranks"
    memory.mkdir()
    (tmp_path / "train.py").write_text(ON_RANKS)
    for found in (0, 1):
        python, on_node = environment / "bin/python", REPO / "tests" / "support" / "on_node.py"
        call(environment / "bin/mpiexec", "-n", 2, python, on_node, python, "-m", "mpi4py", "train.py",
             tmp_path, found, cwd=tmp_path,
             env={"MLFLASH_MEMORY": str(memory), "RANKS_PER_NODE": "1", "WANTED": "MPICH",
                  "TMPDIR": str(shm), "PATH": f"{environment / 'bin'}:{os.environ['PATH']}"})  # fmt: skip
    status = call(environment / "bin/mlflash", "status", env={"MLFLASH_MEMORY": str(memory / "node0")}, cwd=tmp_path)
    assert "step 2 of 2 ranks, committed" in status
