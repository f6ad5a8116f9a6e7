"""What a baseline planner is, and what one answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from piper_ray.evaluate import Evaluation
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan
from piper_ray.model.restrictions import Restrictions


@dataclass(frozen=True)
class Proposal:
    """A planner's own answer. plan: None when no candidate fits.

    tried: candidates looked at (grid points; for the dynamic programs, nested pairs of states).
    note: where in its grid the plan stands, or why there is none.
    """

    plan: Plan | None
    tried: int
    note: str


class Planner(Protocol):
    """A way to plan, its parameters being the fields of a frozen dataclass.

    A plan that it proposes keeps the restrictions, and ``evaluate`` takes it.
    """

    def propose(self, instance: Instance, restrictions: Restrictions) -> Proposal: ...


@dataclass(frozen=True)
class BaselineResult:
    """A proposal and what ``evaluate`` makes of it. planner: the name it goes by, or its parameters.

    evaluation: None without a plan. tried, note: as in ``Proposal``.
    """

    planner: str
    plan: Plan | None
    evaluation: Evaluation | None
    tried: int
    note: str

    @property
    def time_per_sample(self) -> float | None:
        """In s; None without a plan."""
        return None if self.evaluation is None else self.evaluation.time_per_sample_s
