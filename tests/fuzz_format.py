"""Coverage-guided fuzzing of what reads a slot: `pip install atheris; python tests/fuzz_format.py -max_total_time=600`.

Not part of `make test`: what it finds becomes a case in tests/unit/test_format.py.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris
import numpy as np

with atheris.instrument_imports(include=["mlflash"]):
    from mlflash import errors
    from mlflash.memory import slot_header
    from mlflash.state import layout, manifest, rebuild
    from mlflash.state.flatten import flatten

PAYLOAD_NBYTES = 512


def one_input(raw: bytes) -> None:
    """Whatever the bytes are: refused as CorruptSlot, or read within the payload and built without any other error."""
    try:
        slot_header.unpack(raw[: slot_header.HEADER_NBYTES])
    except errors.CorruptSlot:
        pass
    try:
        read = manifest.decode(raw, PAYLOAD_NBYTES)
    except errors.CorruptSlot:
        return
    payload = np.zeros(PAYLOAD_NBYTES, dtype=np.uint8)
    for entry in read.entries:
        assert 0 <= entry.start <= entry.start + entry.nbytes <= PAYLOAD_NBYTES
    rebuild.materialize(read.tree, read.entries, read.plain, lambda e: payload[e.start : e.start + e.nbytes])


def seeds(directory: Path) -> None:
    """Write valid manifests as a beginning."""
    states = [
        {"a": np.zeros(3), "b": [np.ones(2, dtype=np.int8), (1, None)], 5: "x"},
        {"n": np.float32(1.5), "k": {(1, "a"): True}, "c": 1 + 2j},
        {"big": 1 << 70, "raw": b"\x00\xff", "inf": float("inf")},
    ]
    for index, state in enumerate(states):
        flat = flatten(state)
        entries = manifest.encode_entries(layout.plan(flat, 100, 4096).entries)
        (directory / str(index)).write_bytes(
            manifest.join(entries, manifest.encode_tree(flat.structure.tree), flat.plain)
        )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as corpus:
        seeds(Path(corpus))
        atheris.Setup([*sys.argv, corpus], one_input)
        atheris.Fuzz()
