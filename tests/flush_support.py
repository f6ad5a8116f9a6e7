"""The search of one lattice under a schedule with a flush, without what ``piper_ray.solve`` does before and after."""

from __future__ import annotations

from typing import Any

from piper_ray.engine.flush.solve import FlushSeries
from piper_ray.engine.request import SolveRequest
from piper_ray.model.constraints import Restrictions
from piper_ray.model.events import Listener, silent
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.model.solution import Solution
from piper_ray.model.stop import Stop
from tests.flush_schedules import FlushSchedule


def solve_flush(
    instance: Instance,
    schedule: FlushSchedule,
    restrictions: Restrictions = Restrictions(),
    options: SolveOptions = SolveOptions(),
    listener: Listener = silent,
    **others: Any,
) -> Solution:
    """others: of the ``SolveRequest``."""
    stop = others.pop("stop", None) or Stop[Solution]()
    request = SolveRequest(instance, restrictions, options, None, listener, stop, **others)
    return FlushSeries(request, Schedule(ScheduleName(schedule.value))).solve(request)
