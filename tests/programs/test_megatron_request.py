"""What a worker of Megatron's does for a save: it waits for its end, whichever way that comes."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import is_in, until

from mlflash.adapters.megatron.request import request, wait_for
from mlflash.errors import DeadlineExceeded
from mlflash.save.snapshot import Snapshot

WAITS = "import pickle, sys; one = pickle.load(sys.stdin.buffer); print('waits', flush=True); one[0](*one[1])"


class Save:
    def __init__(self) -> None:
        self.snapshot = Snapshot(1, lambda: None)

    def request(self, timeout_s: float = 1000) -> Any:
        return request(self.snapshot.add_done_callback, self.snapshot.wait, timeout_s)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def started(program: str) -> subprocess.Popen[bytes]:
    """A Python that runs it, outside of the checkout."""
    return subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/")


@contextlib.contextmanager
def worker(made: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does what a worker does with a request."""
    with started(WAITS) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(pickle.dumps((made.async_fn, made.async_fn_args)))
        process.stdin.close()
        assert process.stdout.readline() == b"waits\n"
        yield process


def has_open(pid: int, path: str) -> bool:
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it is closed just now
            if os.readlink(fd) == path:
                return True
    return False


LATE = DeadlineExceeded("late")


@pytest.mark.parametrize("end", [lambda save: save.snapshot.end(None), lambda save: save.snapshot.late(LATE)])
def test_a_worker_waits_for_the_end_and_no_longer(temporary: Path, end: Callable[[Save], None]) -> None:
    save = Save()
    made = save.request()
    with worker(made) as process:
        until(lambda: has_open(process.pid, made.async_fn_args[0]), "the worker has the FIFO open")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        end(save)
        assert process.wait(60) == 0 and not any(temporary.iterdir())


def test_a_child_of_the_training_that_has_the_fifo_open_does_not_hold_a_worker_up() -> None:
    save = Save()
    made = save.request()
    held = os.open(made.async_fn_args[0], os.O_RDWR)  # as a data loader's worker has it that was forked meanwhile
    with worker(made) as process:
        until(lambda: has_open(process.pid, made.async_fn_args[0]), "the worker has the FIFO open")
        save.snapshot.end(None)
        assert process.wait(60) == 0
    os.close(held)


def test_a_save_that_has_ended_before_is_not_waited_for(temporary: Path) -> None:
    save = Save()
    made = save.request()
    save.snapshot.end(None)
    with worker(made) as process:
        assert process.wait(60) == 0
    made = save.request()  # of a snapshot that is committed already
    wait_for(*made.async_fn_args)
    assert not any(temporary.iterdir())


def test_a_worker_does_not_outlive_the_process_that_saves() -> None:
    made = "import sys\nfrom mlflash.adapters.megatron.request import request\n"
    made += "one = request(lambda call: None, print, 60)\nprint(one.async_fn_args[0], flush=True)\nsys.stdin.read()"
    with started(made) as saver:
        assert saver.stdout is not None
        path = saver.stdout.readline().decode().strip()
        waiter = threading.Thread(target=wait_for, args=(path, 1000))
        waiter.start()
        until(lambda: is_in(waiter, wait_for) and has_open(os.getpid(), path), "it waits")
        saver.kill()
        waiter.join(60)
        assert not waiter.is_alive()


def test_a_worker_gives_up_at_its_deadline() -> None:
    made, start = Save().request(timeout_s=0.2), time.monotonic()
    made.async_fn(*made.async_fn_args)
    assert time.monotonic() - start > 0.1
