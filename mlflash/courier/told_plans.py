"""Plans of slots that a courier was told of, so that saves name them by a number (`wire_format.PlanWire`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ..redundancy.slot_plan import Plan
from .wire_format import PlanWire


class ToldPlans:
    """The plan that the courier was told of last. Not collective.

    Args:
        number: gives a number that was not given before.
    """

    def __init__(self, number: Callable[[], int]):
        self._number = number
        self._last: tuple[int, Plan] | None = None

    def forget(self) -> None:
        """Note that the courier is another one, which knows of none."""
        self._last = None

    def number_of(self, plan: Plan | None) -> tuple[int, PlanWire | None]:
        """The number of a plan, -1 for none; and what the courier is to be told first, where it does not know it."""
        if plan is None:
            return -1, None
        if self._last is not None:
            number, known = self._last
            same = known.layout is plan.layout and known.pieces is plan.pieces
            if same and (known.sharing, known.private) == (plan.sharing, plan.private):
                return number, None
        told = self.tell(plan)
        return told.number, told

    def tell(self, plan: Plan) -> PlanWire:
        """What the courier is to be told of a plan, under a new number."""
        self._last = self._number(), plan
        return PlanWire(self._last[0], dataclasses.replace(plan, manifest=b""))
