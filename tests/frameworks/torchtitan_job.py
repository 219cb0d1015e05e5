"""A small Llama that TorchTitan's Trainer trains, sharded by its FSDP2."""

from __future__ import annotations

from titan_on_cpu import Training, config  # isort: skip  # before anything of TorchTitan

from job import Run

from mlflash.adapters.torchtitan import MemoryCheckpointManager


def train(run: Run) -> None:
    """Train to a step, from the newest checkpoint there is."""
    checkpoint = MemoryCheckpointManager.Config(
        enable=run.trigger != "off", interval=2 if run.trigger == "interval" else run.disk or 1000,
        keep_latest_k=run.kept, last_save_model_only=False, enable_first_step_checkpoint=run.trigger == "first step",
        load_only=run.trigger == "load only",
        memory_enable=run.enabled, memory_interval=run.interval, memory_skip=run.skip,
        memory_directory=run.checkpointing.get("directory"),
        memory_settings={name: value for name, value in run.checkpointing.items() if name != "directory"},
    )  # fmt: skip
    steps = run.last if run.trigger == "last step" else 100
    training = Training(config(str(run.directory), checkpoint, steps), run.last, run.loss)
    run.checkpointer = lambda: training.checkpointer._flash
    training.train()
    training.close()
    run.end(training.model_parts[0], training.optimizers)
