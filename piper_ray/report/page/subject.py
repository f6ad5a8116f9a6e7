"""What a page is about: a plan, what it does under its schedule, what was proved of it, plans to compare it with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from piper_ray.evaluate import Evaluation, evaluate
from piper_ray.model.errors import InvalidPlan
from piper_ray.model.gap import relative_gap
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule
from piper_ray.report.page.comparison import Compared
from piper_ray.simulate.result import Simulation
from piper_ray.simulate.run import simulate
from piper_ray.workloads.formats.claims import PlanClaims

_SAME_TIME = 1e-9
"""Relative. A plan is faster than a bound only beyond what sums round to."""


@dataclass(frozen=True)
class Valued:
    """A plan under a schedule.

    evaluation: by Piper's formulas; None under other schedules, and for a plan that breaks a rule of Piper's. faults:
    the rules that it breaks, memory among them, in words.
    """

    instance: Instance
    plan: Plan
    simulation: Simulation
    evaluation: Evaluation | None
    faults: tuple[str, ...]

    @property
    def value_s(self) -> float:
        """What it is planned for: the promise of an asynchronous schedule, else the simulated step, over N; in s."""
        if self.evaluation is not None:
            return self.evaluation.time_per_sample_s
        promised_s = self.simulation.promised_s
        return (self.simulation.step_s if promised_s is None else promised_s) / self.simulation.microbatches


@dataclass(frozen=True)
class Subject:
    """lower_bound_s: that of the plan's document, where it is of this instance and this schedule. notes: why it is not
    taken, where there is one."""

    valued: Valued
    claims: PlanClaims
    lower_bound_s: float | None
    notes: tuple[str, ...]
    compared: tuple[Compared, ...]

    @property
    def gap(self) -> float | None:
        """(value - bound) / value; None without a bound."""
        return None if self.lower_bound_s is None else relative_gap(self.valued.value_s, self.lower_bound_s)


def valued(instance: Instance, plan: Plan, schedule: Schedule) -> Valued:
    """Raises InvalidPlan for a plan that cannot run at all; memory that does not do is a fault of the answer."""
    simulation = simulate(instance, plan, schedule)
    faults: Sequence[str] = simulation.memory_violations
    evaluation = None
    if schedule == PAPERS_SCHEDULE:
        try:
            evaluation = evaluate(instance, plan)
        except InvalidPlan as error:
            faults = error.violations
    return Valued(instance, plan, simulation, evaluation, tuple(faults))


def subject_of(found: Valued, claims: PlanClaims, compared: tuple[Compared, ...]) -> Subject:
    """With the bound of the plan's document, if that is one on this plan."""
    bound_s, notes = claims.lower_bound_s, []
    if bound_s is not None:
        why = None
        if claims.digest != found.instance.digest:
            why = "it is of another input, or of another cluster"
        elif claims.schedule != found.simulation.schedule:
            name = "no schedule" if claims.schedule is None else f"schedule {claims.schedule.text}"
            why = f"it is of {name}"
        elif bound_s > found.value_s * (1.0 + _SAME_TIME):
            why = "this plan is faster than it"
        if why is not None:
            bound_s = None
            notes.append(f"The lower bound in the plan's file is left out: {why}.")
    return Subject(found, claims, bound_s, tuple(notes), compared)
