"""``simulate``: a plan under a schedule, from the action lists to the figures of each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from piper_ray.model import arguments
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.simulate.options import SimulationOptions

if TYPE_CHECKING:
    from piper_ray.simulate.result import Simulation
    from piper_ray.workloads.formats.load import Source

_DEFAULTS = SimulationOptions()


def simulate(
    instance: Instance | Source,
    plan: Plan,
    schedule: Schedule | ScheduleName | str | None = None,
    *,
    options: SimulationOptions = _DEFAULTS,
) -> Simulation:
    """Runs ``plan`` event by event under ``schedule``: a ``Schedule``, or the name of one with its usual chunks; None:
    the instance's own, else Piper's, "2bw".

    instance: may be what ``load`` takes, such as a path. The plan's stages are spread over the ranks in the schedule's
    way: one each, or chunk by chunk (stage j on rank j mod p; in a V, forth and back). They may take more memory than
    there is: the simulation says how much.

    Raises InvalidPlan with every other rule that the plan breaks, InputError for an instance or plan that is not sound
    in itself, UsageError for a schedule that cannot run the batch, and LimitError for one of too many microbatches.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> plan = piper_ray.solve(bert, threads=1).plan
    >>> piper_ray.simulate(bert, plan, "gpipe").schedule.name
    <ScheduleName.GPIPE: 'gpipe'>
    """
    from piper_ray.simulate.assemble import simulated
    from piper_ray.workloads import formats
    from piper_ray.workloads.formats.objects import check_plan

    arguments.of_kind("plan", plan, Plan, "a Plan (load_plan reads one)")
    check_plan(plan)
    arguments.of_kind("options", options, SimulationOptions, "a SimulationOptions")
    instance = formats.instance_of(instance)
    return simulated(instance, plan, Schedule.first_of(schedule, instance.schedule), options)
