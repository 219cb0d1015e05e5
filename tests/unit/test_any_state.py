"""Any state is refused by its path, or comes back equal, type for type and bit for bit; fixed cases were found so.

tests/programs/test_any_state.py does the same on ranks and in a new process.
"""

from __future__ import annotations

import tempfile

import states
from hypothesis import HealthCheck, given, settings
from states import Built, Spec, differences, untied
from stored import Store

from mlflash.errors import StateError
from mlflash.node_memory import NodeMemory


def check(spec: Spec) -> None:
    built = Built(spec)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        memory = NodeMemory(directory, "j", None)
        store = Store(memory)
        try:
            try:
                store.write(built.state)
            except StateError as refused:
                assert refused.tensor in built.doubtful, refused
                return
            loaded = store.load()
            assert differences(built.state, loaded, "", loaded=True) + untied(built.state, loaded) == []
            blank = Built(spec, blank=True).state
            store.fill(blank)
            assert differences(built.state, blank, "", loaded=False) == []
            store.write(built.state)  # a state that is known
            assert differences(built.state, store.load(), "", loaded=True) == []
        finally:
            memory.close()


@settings(max_examples=states.EXAMPLES or 60, suppress_health_check=list(HealthCheck))
@given(spec=states.specs())
def test_any_state_is_refused_by_its_path_or_comes_back_equal(spec: Spec) -> None:
    check(spec)
