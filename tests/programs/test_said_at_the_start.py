"""What a Checkpointer says at the start of what will not come later."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest
from waiting import until

from mlflash import Checkpointer


def said(caplog: pytest.LogCaptureFixture, text: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if text in record.getMessage()]


def test_what_will_not_get_into_the_directory_is_said_at_the_start(
    shm: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("PMI", "OMPI", "SLURM"))]:
        monkeypatch.delenv(name)
    caplog.set_level(logging.INFO, "mlflash")
    (shm / "file").write_text("in the way")
    options = {"memory": str(shm), "redundancy": "none"}
    with Checkpointer(shm / "fine", **options, job="a"):
        info = until(lambda: said(caplog, "so nothing is written to"), "the line of a directory that gets nothing")
    assert str(shm / "fine") in info[0].getMessage() and info[0].levelno == logging.INFO
    with Checkpointer(shm / "file" / "below", **options, job="b", drain_every=1):
        warned = until(lambda: said(caplog, "can be drained to"), "the line of a directory that cannot be made")
    assert f"{shm / 'file'} is not a directory" in warned[0].getMessage() and warned[0].levelno == logging.WARNING
    assert len(said(caplog, "so nothing is written to")) == len(said(caplog, "can be drained to")) == 1
    assert not (shm / "fine").exists(), "nothing is made before it is needed"


def test_who_deletes_the_directory_is_told_that_memory_still_has_the_job(
    shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place, options = shm / "run", {"memory": str(shm), "redundancy": "none", "job": "d", "drain_every": 1}
    with Checkpointer(place, **options) as ckpt:
        ckpt.save(14, {"w": 1})
    assert not said(caplog, "does not exist")
    shutil.rmtree(place)
    with Checkpointer(place, **options) as ckpt:
        (warned,) = until(lambda: said(caplog, "does not exist"), "the line of a directory that is gone")
        assert ckpt.restore({"w": 1}) == 14
    assert warned.levelno == logging.WARNING
    assert all(word in warned.getMessage() for word in (str(place), "step 14", "MLFLASH_FRESH=1", "mlflash clean d"))
    with Checkpointer(place, **options, fresh=True) as ckpt:
        assert ckpt.restore({"w": 1}) is None
    assert len(said(caplog, "does not exist")) == 1, (
        "nothing is said of what is passed over, nor where the directory is"
    )
