"""ML Flashpoint's low-level recipe on real ranks, `flashpoint_job.py`, killed between a save and the recovery."""

from __future__ import annotations

from pathlib import Path

from harness import Cluster


def assert_it_recovers(root: Path, form: str, first: int) -> None:
    """Run the recipe in a form ("dcp", "megatron") from step `first`, lose a node besides, and run it again."""
    cluster, env = Cluster(root), {"PYTHONWARNINGS": "ignore"}  # of PyTorch's and Megatron's own
    arguments = ["support/flashpoint_job.py", form, str(root / "long-term"), "5"]
    killed = cluster.run(2, *arguments, "4", env=env, launcher="torchrun", timeout=150)
    assert [(one["step"], one["memory"]) for one in killed.of("recovered")] == [(first, False)] * 2, killed.log
    assert len(killed.of("saved")) == 2 and not killed.of("ended"), killed.log
    cluster.wipe(1)
    again = cluster.run(2, *arguments, env=env, launcher="torchrun", timeout=150)
    assert [(one["step"], one["memory"]) for one in again.of("recovered")] == [(4, True)] * 2, again.log
    assert [one["digest"] for one in again.of("recovered")] == [one["digest"] for one in killed.of("saved")]
    ended = again.of("ended")
    assert len(ended) == 2 and all(one["digest"] == one["whole"] for one in ended), again.log
