"""Plans of slots that the courier already knows, so that saves refer to them by number (`wire_format.PlanWire`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ..redundancy.deduplication import Plan
from .wire_format import PlanWire


class ToldPlans:
    """The last plan that was sent to the courier."""

    def __init__(self, number: Callable[[], int]):
        self._number = number
        self._last: tuple[int, Plan] | None = None

    def forget(self) -> None:
        """Note that there is a new courier, which knows no plan."""
        self._last = None

    def number_of(self, plan: Plan | None) -> tuple[int, PlanWire | None]:
        """The number of a plan (-1 for None), and the plan itself if the courier must be told of it first."""
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
        """The message that tells the courier of a plan, with a new number."""
        self._last = self._number(), plan
        return PlanWire(self._last[0], dataclasses.replace(plan, manifest=b""))
