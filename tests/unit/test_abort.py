"""What a process printed reaches the user although it ends all processes right afterwards."""

from __future__ import annotations

import sys
import types

import pytest

from mlflash.mpi import world


def test_what_is_printed_is_flushed_and_has_time_to_be_forwarded_before_all_are_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = []
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, types.SimpleNamespace(flush=lambda name=name: done.append(name)))
    monkeypatch.setattr(world.time, "sleep", lambda seconds: done.append(seconds))
    world.abort_all(types.SimpleNamespace(COMM_WORLD=types.SimpleNamespace(Abort=lambda code: done.append(code))), 3)
    assert done == ["stdout", "stderr", world._FORWARDING_S, 3]
    assert world._FORWARDING_S >= 0.5
