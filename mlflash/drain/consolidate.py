"""A part of a drained checkpoint, once more, as whole tensors in safetensors, which Hugging Face reads.

`mlflash export` makes them in a process of its own, from the files of the directory. So no slot is held meanwhile, and
at most a gigabyte of tensors is in memory at a time, whatever the size of the model is.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import tempfile
from collections.abc import Callable

from ..launch.launcher_variables import without_rank
from ..launch.own_process import running
from ..storage.store import Store

log = logging.getLogger("mlflash")

FOLDER = "safetensors"
"""Below the directory, with a folder for each checkpoint that is there."""
_POLL_S = 0.2
_NICE = 10  # training is more urgent
_MOST_TEXT = 2000


def consolidate(store: Store, step: int, folder: str, part: str, moved: Callable[[], object], patience_s: float
                ) -> None:  # fmt: skip
    """Write a part of a drained checkpoint, and delete that of checkpoints that are gone. What fails is a warning.

    Args:
        folder: of the checkpoint.
        part: its path in the state, such as "model". Names of tensors are those below it.
        moved: called when it has made progress.
        patience_s: it is ended if it makes none for so long.
    """
    out = store.at(FOLDER).at(folder)
    command = [*running("mlflash"), "export", str(step), out.path, "--to", "safetensors",
               "--directory", store.path, "--from", "directory",
               "--keep", f"{part}.*", "--rename", rf"^{re.escape(part)}\.", ""]  # fmt: skip
    try:
        _empty(out)
        with tempfile.TemporaryFile() as said:
            code = _run(command, said.fileno(), out, moved, patience_s)
            said.seek(0)
            why = said.read().decode(errors="replace").strip()[-_MOST_TEXT:]
        if code:
            log.warning("step %d has no files in safetensors: %s", step, why or f"exit code {code}")
        for name in set(store.at(FOLDER).names()) - set(store.names()):
            _empty(store.at(FOLDER).at(name))
    except Exception as error:  # fsspec may raise anything
        log.warning("step %d has no files in safetensors: %s", step, error)


def _run(command: list[str], said: int, out: Store, moved: Callable[[], object], patience_s: float) -> int:
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=without_rank(os.environ)
    )
    try:
        os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
        seen, waited_s = -1, 0.0
        while waited_s < patience_s:
            try:
                return process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                waited_s += _POLL_S
            if (nbytes := _nbytes(out)) != seen:
                seen, waited_s = nbytes, 0.0
                moved()
        return -1
    finally:
        process.kill()
        process.wait()


def _nbytes(store: Store) -> int:
    return sum(store.nbytes(name) for name in store.names())


def _empty(store: Store) -> None:
    """Delete what an earlier try has left."""
    for name in store.names():
        store.remove(name)
    store.remove_directory()
