"""Other planners' plans for the same workload, each simulated under the same schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from piper_ray.model.errors import LimitError
from piper_ray.model.instance import Instance
from piper_ray.model.schedule import Schedule
from piper_ray.model.step import StepTerms
from piper_ray.planners import plan
from piper_ray.simulate.options import SimulationOptions
from piper_ray.simulate.result import Simulation
from piper_ray.simulate.run import simulate

COMPARED = ("megatron", "pipedream-2bw", "gpipe", "data-parallel", "tensor-parallel", "pipedream")
"""Those that answer at once whatever the workload, which leaves out the paper's own table."""


@dataclass(frozen=True)
class Compared:
    """planner: its name. note: its own words on its plan, or why there is none that fits and runs so.

    simulation: of its plan; None where there is none. stages, devices: of that plan.
    """

    planner: str
    note: str
    simulation: Simulation | None = None
    stages: int = 0
    devices: int = 0


OnPlanner = Callable[[int, int, str], None]
"""Hears how many planners have planned, how many there are, and the name of the next one."""


def compare(
    instance: Instance,
    schedule: Schedule,
    step: StepTerms = StepTerms(),
    planners: Sequence[str] = COMPARED,
    on_planner: OnPlanner = lambda done, total, name: None,  # noqa: ARG005
) -> tuple[Compared, ...]:
    """In the order of ``planners``. step: the terms of a step that all are simulated with."""
    found = []
    for done, name in enumerate(planners):
        on_planner(done, len(planners), name)
        found.append(_compared(instance, schedule, step, name))
    return tuple(found)


def _compared(instance: Instance, schedule: Schedule, step: StepTerms, planner: str) -> Compared:
    try:
        result = plan(instance, planner, schedule=schedule)
        if result.plan is None:
            return Compared(planner, f"no plan: {result.note}")
        simulation = simulate(instance, result.plan, schedule, options=SimulationOptions.of(step))
    except LimitError as error:
        return Compared(planner, str(error))
    stages, devices = len(result.plan.stages), result.plan.devices // schedule.v
    return Compared(planner, result.note, simulation, stages, devices)
