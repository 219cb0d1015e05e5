"""What every report of `mlflash bench` on two ranks has."""

from __future__ import annotations

import getpass
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

MLFLASH = str(Path(sys.executable).with_name("mlflash"))
SAVED = {"stall", "commit", "restore in place"}


def check(report: dict[str, Any]) -> None:
    """Everything was measured that two nodes without a GPU can measure, and nobody is named."""
    found: dict[tuple[str, str], set[str]] = {}
    for figure in report["figures"]:
        found.setdefault((figure["redundancy"], figure["transport"]), set()).add(figure["what"])
        assert figure["median_s"] > 0 and all(seconds > 0 for seconds in figure["seconds"])
        assert len(figure["beside_s"]) == (len(figure["seconds"]) if figure["beside"] else 0)
    restored = {"restore after 1 lost node", "connect after a kill"}
    assert found["none", ""] == {*SAVED, "killed rank until the next step is saved"}, report["not_run"]
    assert found["copy", "p2p"] == found["copy", "rma"] == SAVED | restored, report["not_run"]
    assert "memcpy" in found["", ""] and len(found["", ""]) == 5
    assert [each["what"] for each in report["not_run"]] == ["saves with xor", "saves with rs", "GPU"]
    assert report["complete"] and (report["format"], report["version"]) == ("mlflash-bench", 1)
    text = json.dumps(report)
    private = socket.gethostname(), getpass.getuser(), str(Path.home()), os.getcwd(), sys.prefix, "127.0.0.1"
    assert not [word for word in private if word in text]
