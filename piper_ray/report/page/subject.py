"""What a page is about: a plan, what it does under its schedule, what was proved of it, plans to compare it with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from piper_ray.evaluate import Evaluation, evaluate, evaluation_of
from piper_ray.model.errors import InvalidPlan, LimitError
from piper_ray.model.figures import relative_gap
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import Schedule, StepTerms
from piper_ray.planners import KIND_PLANNERS
from piper_ray.planners import plan as planned
from piper_ray.simulate.result import Simulation
from piper_ray.simulate.run import SimulationOptions, simulate
from piper_ray.workloads.estimate.doubt import Doubt, workload_doubt
from piper_ray.workloads.formats.plans import PlanClaims

_SAME_TIME = 1e-9
"""Relative. A plan is faster than a bound only beyond what sums round to."""


COMPARED = ("megatron", "pipedream-2bw", "gpipe", "data-parallel", "tensor-parallel", "pipedream")
"""The planners that answer at once whatever the workload, which leaves out the paper's own table."""


@dataclass(frozen=True)
class Compared:
    """A planner besides the exact one, and what it found. planner: its name. note: its own words on its plan, or why
    there is none that fits and runs so.

    simulation: that of its plan; None where there is none.
    """

    planner: str
    note: str
    simulation: Simulation | None = None


OnPlanner = Callable[[int, int, str], None]
"""Hears how many planners have planned, how many there are, and the name of the next one."""


@dataclass(frozen=True)
class Valued:
    """A plan under a schedule. evaluation: None for a plan that breaks a rule; faults: which ones, in words."""

    instance: Instance
    plan: Plan
    simulation: Simulation
    evaluation: Evaluation | None
    faults: tuple[str, ...]

    @property
    def doubt(self) -> Doubt | None:
        """How sure the step and the memory are; None where they are no estimates."""
        return workload_doubt(self.instance, self.simulation.schedule)

    @property
    def likely_memory(self) -> str:
        """Where its measured peak may lie, of an estimated workload."""
        peak_bytes = self.simulation.peak_memory_bytes
        return "" if self.doubt is None else f"; {self.doubt.memory.range_text(peak_bytes)}"

    @property
    def value_s(self) -> float:
        """What it is planned for: the promise of an asynchronous schedule, else the simulated step, over N; in s."""
        promised_s = self.simulation.promised_s
        if promised_s is None:
            return self.simulation.time_per_sample_s
        if self.evaluation is not None and self.evaluation.schedule.asynchronous:
            return self.evaluation.time_per_sample_s
        return promised_s / self.simulation.microbatches


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


def valued(instance: Instance, plan: Plan, schedule: Schedule, step: StepTerms = StepTerms()) -> Valued:
    """Raises InvalidPlan for a plan that cannot run at all; memory that does not do is a fault of the answer."""
    simulation = simulate(instance, plan, schedule, options=SimulationOptions.of(step))
    try:
        if schedule.asynchronous:
            return Valued(instance, plan, simulation, evaluate(instance, plan, schedule=schedule), ())
        return Valued(instance, plan, simulation, evaluation_of(instance, plan, simulation), ())
    except InvalidPlan as error:
        return Valued(instance, plan, simulation, None, tuple(error.violations))


def subject_of(found: Valued, claims: PlanClaims, compared: tuple[Compared, ...]) -> Subject:
    """What the page is of, with the bound of the plan's document, if that is one on this plan."""
    bound_s, notes = claims.lower_bound_s or None, []  # a bound of nothing says nothing
    if bound_s is not None:
        options = found.simulation.options
        step = StepTerms(options.all_reduce, options.all_reduce_overlap, options.optimizer_s)
        other = claims.made_otherwise(found.instance, found.simulation.schedule, step)
        why = None if other is None else f"it is of {other}"
        if why is None and bound_s > found.value_s * (1.0 + _SAME_TIME):
            why = "this plan is faster than it"
        if why is not None:
            bound_s = None
            notes.append(f"The lower bound in the plan's file is left out: {why}.")
    return Subject(found, claims, bound_s, tuple(notes), compared)


def report_subject(
    instance: Instance,
    plan: Plan,
    schedule: Schedule,
    claims: PlanClaims,
    on_planner: OnPlanner = lambda done, total, name: None,  # noqa: ARG005
) -> Subject:
    """Simulates the plan and those of other planners. Raises as ``simulate`` does for the plan itself.

    Terms of a step are those that the plan was made with, as ``verify`` and ``simulate`` have them.
    """
    step = claims.step_under(schedule)
    found = valued(instance, plan, schedule, step)
    compared = []
    planners = tuple(KIND_PLANNERS) if instance.cluster.kinds else COMPARED
    for done, name in enumerate(planners):
        on_planner(done, len(planners), name)
        compared.append(_compared(instance, schedule, step, name))
    return subject_of(found, claims, tuple(compared))


def _compared(instance: Instance, schedule: Schedule, step: StepTerms, planner: str) -> Compared:
    try:
        result = planned(instance, planner, schedule=schedule)
        if result.plan is None:
            return Compared(planner, f"no plan: {result.note}")
        simulation = simulate(instance, result.plan, schedule, options=SimulationOptions.of(step))
        return Compared(planner, result.note, simulation)
    except LimitError as error:
        return Compared(planner, str(error))
