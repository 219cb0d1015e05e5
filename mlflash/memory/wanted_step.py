"""Which checkpoint somebody wants, of those that are there. Pure."""

from __future__ import annotations

import dataclasses

from .slot_header import Verdict


@dataclasses.dataclass(frozen=True)
class WantedStep:
    """What a restore asks for: the newest checkpoint for which all of this is so.

    What was marked bad is only given to who asks for its step.

    Attributes:
        step: it is of this step; None: of any.
        before: it is of a smaller step; None: of any.
        certified: its values have passed their checks, and training went on from it without anything suspect.
    """

    step: int | None = None
    before: int | None = None
    certified: bool = False

    @property
    def is_newest(self) -> bool:
        """Whether simply the newest one is wanted."""
        return self == NEWEST

    def fits_step(self, step: int) -> bool:
        """Whether it may be one of a step."""
        return self.step in (None, step) and (self.before is None or step < self.before)

    def fits(self, step: int, verdict: Verdict) -> bool:
        """Whether it may be one of a step of whose values so much is known."""
        if not self.fits_step(step) or (self.step is None and verdict is Verdict.BAD):
            return False
        return not self.certified or verdict.is_certified

    def __str__(self) -> str:
        """In words, such as "certified, before step 100"."""
        said = ["certified"] * self.certified + ([] if self.before is None else [f"before step {self.before}"])
        return ", ".join(said) if self.step is None else f"step {self.step}"


NEWEST = WantedStep()
"""Whatever was saved last."""
