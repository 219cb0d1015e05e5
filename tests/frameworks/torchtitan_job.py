"""A small Llama that TorchTitan's Trainer trains, sharded by its FSDP2."""

from __future__ import annotations

from titan_on_cpu import Training, config  # isort: skip  # before anything of TorchTitan

from job import Run

from mlflash.adapters.torchtitan import MemoryCheckpointManager


def train(run: Run) -> None:
    """Train to a step, from the newest checkpoint there is."""
    checkpoint = MemoryCheckpointManager.Config(
        enable=True, interval=run.disk or 1000, keep_latest_k=run.kept, last_save_model_only=False,
        memory_enable=run.enabled, memory_interval=run.every, memory_skip=run.skip,
        memory_directory=run.checkpointing.get("directory"),
        memory_settings={name: value for name, value in run.checkpointing.items() if name != "directory"},
    )  # fmt: skip
    training = Training(config(str(run.directory), checkpoint), run.last, run.loss)
    training.train()
    training.close()
    run.end(training.model_parts[0], training.optimizers)
