"""What a courier logs that is a process."""

from __future__ import annotations

import logging
import os
import socket

import pytest

from mlflash.courier.process_main import _Forward
from mlflash.courier.remote_trainer import Link


def test_a_courier_whose_trainer_and_launcher_have_ended_logs_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    mine, its = socket.socketpair()
    link = Link(its)
    link.lose()
    # A buffer of one line, as of a pipe that print() flushes; it is closed by hand, as closing it fails, too.
    out = os.fdopen(writing, "w", buffering=1, closefd=False)
    with mine, its, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", out)
        _Forward(link).emit(logging.LogRecord("mlflash", logging.WARNING, "", 0, "a word", (), None))
    with pytest.raises(BrokenPipeError):  # so it would have been
        out.write("a word\n")
    os.close(writing)
    with pytest.raises(OSError):
        out.close()
