"""The report of `mlflash bench`: its figures, its table, and what is taken out of it."""

from __future__ import annotations

import getpass
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mlflash.tools.bench_report import figure, machine, private_words, redacted, show, slowest

pytestmark = pytest.mark.slow  # a tool beside the engine

PRIVATE = (socket.gethostname(), getpass.getuser(), str(Path.home()), os.getcwd(), sys.prefix)


def test_no_name_path_or_address_of_this_machine_is_left() -> None:
    words = private_words("/dev/shm")
    errors = [f"rank 1 on {host}: {user} cannot write {home}/x, {cwd} or {prefix}/lib/libmpi.so from 10.0.3.17:29500, "
              "fe80::1:2ff:fe03:4 or /scratch/project_7/me" for host, user, home, cwd, prefix in [PRIVATE]]  # fmt: skip
    left = json.dumps(redacted({"node": machine("/dev/shm"), "not_run": [{"why": error} for error in errors]}, words))
    assert not [word for word in (*PRIVATE, "10.0.3.17", "fe80", "project_7") if word in left]
    assert "rank 1 on HOST: USER cannot write PATH, PATH or PATH from ADDRESS:29500, ADDRESS or PATH" in left
    assert json.loads(left)["node"]["cores"] == os.cpu_count()


def test_what_is_no_name_stays() -> None:
    text = "MPICH 5.0.2 (ch4:ucx ofi), 12 GB/s by p2p/rma at 12:30, kernel 6.1.0-18-amd64"
    assert redacted(text, {"n1": "HOST", "ofi2": "HOST"}) == text
    assert redacted("n1: an1x", {"n1": "HOST"}) == "HOST: an1x"  # a short name is a word of its own


def test_a_figure_is_that_of_the_slowest_rank_beside_its_yardstick_in_the_same_repetition() -> None:
    first = {"stall": [2.0, 4.0, 9.0], "memcpy": [1.0, 1.0, 3.0]}
    samples = slowest([first, {"stall": [3.0, 2.0, 1.0], "memcpy": [1.0, 2.0, 1.0]}])
    assert samples == {"stall": [3.0, 4.0, 9.0], "memcpy": [1.0, 2.0, 3.0]}
    made = figure("stall", samples["stall"], "memcpy", samples["memcpy"], 1 << 20, "copy", "p2p")
    assert (made["median_s"], made["quartiles_s"], made["ratio"]) == (4.0, [3.5, 6.5], 3.0)
    alone = figure("latency", [0.5], "", [], 8)
    assert (alone["median_s"], alone["quartiles_s"], alone["ratio"]) == (0.5, [0.5, 0.5], None)


def test_the_table_shows_all_that_the_report_has() -> None:
    report: dict[str, Any] = {
        "mlflash": "0.1.0", "version": 1, "complete": False, "settings": {"ranks": 2, "size_nbytes": 1 << 20},
        "nodes": [{"count": 2, "cpu": "EPYC", "gpus": ["H100", "H100"], "versions": {"torch": "", "numpy": "2.4"}}],
        "fabric": {"between": "RDMA", "variables": {"FI_PROVIDER": "cxi"}},
        "figures": [figure("commit", [0.25] * 3, "memcpy", [0.125] * 3, 1 << 30, "copy", "rma"),
                    figure("ping", [2e-6] * 2, "", [], 8)],
        "not_run": [{"what": "GPU", "why": "torch sees no GPU"}],
    }  # fmt: skip
    console = Console(width=150)
    with console.capture() as shown:
        show(report, console)
    text = shown.get()
    assert "report version 1, not complete" in text and "2 x node: cpu EPYC; gpus H100, H100; numpy 2.4\n" in text
    assert "settings: ranks 2; size 1 MiB\nfabric: between RDMA; FI_PROVIDER cxi\n" in text
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    commit, ping = rows["commit"], rows["ping"]
    assert commit == ["commit", "copy", "rma", "250", "ms", "250", "ms", "to", "250", "ms", "4.29", "2.00", "memcpy"]
    assert ping == ["ping", "2.0", "us", "2.0", "us", "to", "2.0", "us"]
    assert "not run: GPU: torch sees no GPU" in text
