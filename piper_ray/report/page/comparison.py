"""Other planners' plans for the same workload, each simulated under the same schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from piper_ray.model.errors import InvalidPlan, LimitError, UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.schedule import Schedule
from piper_ray.planners import plan
from piper_ray.simulate.result import Simulation
from piper_ray.simulate.run import simulate

COMPARED = ("megatron", "pipedream-2bw", "gpipe", "data-parallel", "tensor-parallel", "pipedream")
"""Those that answer at once whatever the workload, which leaves out the paper's own table."""


@dataclass(frozen=True)
class Compared:
    """planner: its name. note: its own words on its plan, or why there is none, or why that cannot be run.

    simulation: of its plan; None where there is none to run. fits: in the memory of the devices under this schedule.
    """

    planner: str
    note: str
    stages: int
    devices: int
    simulation: Simulation | None
    fits: bool


def compare(instance: Instance, schedule: Schedule, planners: Sequence[str] = COMPARED) -> tuple[Compared, ...]:
    """In the order of ``planners``."""
    return tuple(_compared(instance, schedule, name) for name in planners)


def _compared(instance: Instance, schedule: Schedule, planner: str) -> Compared:
    try:
        result = plan(instance, planner)
    except LimitError as error:
        return Compared(planner, str(error), 0, 0, None, fits=False)
    if result.plan is None:
        return Compared(planner, f"no plan: {result.note}", 0, 0, None, fits=False)
    stages, devices = len(result.plan.stages), result.plan.devices
    try:
        simulation = simulate(instance, result.plan, schedule)
    except (InvalidPlan, UsageError, LimitError) as error:
        reason = "; ".join(error.violations) if isinstance(error, InvalidPlan) else str(error)
        return Compared(planner, f"{result.note}; cannot run so: {reason}", stages, devices, None, fits=False)
    return Compared(planner, result.note, stages, devices // schedule.v, simulation, not simulation.memory_violations)
