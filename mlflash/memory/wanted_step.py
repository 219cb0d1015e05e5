"""Which of the existing checkpoints a caller asks for. Pure."""

from __future__ import annotations

import dataclasses

from .slot import Verdict


@dataclasses.dataclass(frozen=True)
class WantedStep:
    """What a restore asks for: the newest checkpoint that meets all of this.

    A checkpoint that was marked bad is only used if its step is asked for.
    """

    step: int | None = None  # it has this step; None: any step
    before: int | None = None  # its step is smaller than this; None: any step
    # its values have passed their checks, and training continued from it without anything suspect
    certified: bool = False

    @property
    def is_newest(self) -> bool:
        return self == NEWEST

    def fits_step(self, step: int) -> bool:
        return self.step in (None, step) and (self.before is None or step < self.before)

    def fits(self, step: int, verdict: Verdict) -> bool:
        if not self.fits_step(step) or (self.step is None and verdict is Verdict.BAD):
            return False
        return not self.certified or verdict.is_certified

    def __str__(self) -> str:
        conditions = ["certified"] * self.certified + ([] if self.before is None else [f"before step {self.before}"])
        return ", ".join(conditions) if self.step is None else f"step {self.step}"


NEWEST = WantedStep()
"""Whatever was saved last."""
