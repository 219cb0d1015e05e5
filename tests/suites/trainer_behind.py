"""The same tests where the Trainer's own checkpoints are written to memory, and moved to disk behind training."""

from __future__ import annotations

import dataclasses
import functools

from . import trainer

SUITE = dataclasses.replace(trainer.SUITE, name="trainer_behind", title="Transformers, Trainer, in_background=True")
around = trainer.around
put_in_place = functools.partial(trainer.put_in_place, in_background=True)
