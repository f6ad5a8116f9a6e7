"""Reading the document of ``solve --json`` back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from piper_ray.model.instance import Instance
from piper_ray.model.schedule import Schedule, ScheduleName, StepTerms
from piper_ray.model.solution import BlockStats, Infeasibility, Solution, SolveStats, Status
from piper_ray.model.stop import StoppedBy
from piper_ray.workloads.formats.faults import Faults
from piper_ray.workloads.formats.plan_schema import SolutionDocument
from piper_ray.workloads.formats.plans import check_schema, read_plan

_STATS: TypeAdapter[SolveStats] = TypeAdapter(SolveStats)


def read_solution(document: Mapping[str, object], instance: Instance, faults: Faults) -> Solution | None:
    """The solution that ``document`` describes; None, with the faults noted, if it is not one for this instance."""
    check_schema(document, "piper-ray/solution", faults)
    if faults:
        return None
    read = faults.model(SolutionDocument, document, "")
    if read is None:
        return None
    if read.instance.digest != instance.digest:
        faults.at("instance.digest", f"{read.instance.digest[:12]}..., of another instance; expected this one's")
    plan = None if read.plan is None else read_plan(document, instance, faults)
    if faults:
        return None
    blocks: dict[str, Any] | None = None
    if read.blocks is not None:
        blocks = read.blocks.model_dump()
        old = blocks.pop("time_per_sample")
        blocks["time_per_sample_s"] = old if blocks["time_per_sample_s"] is None else blocks["time_per_sample_s"]
    return Solution(
        status=Status(read.status),
        time_per_sample_s=read.time_per_sample_s,
        lower_bound_s=math.inf if read.lower_bound_s is None else read.lower_bound_s,
        plan=plan,
        stats=_STATS.validate_python(read.stats.model_dump()),
        infeasibility=None if read.infeasibility is None else Infeasibility(**read.infeasibility.model_dump()),
        stopped_by=None if read.stopped_by is None else StoppedBy(read.stopped_by),
        blocks=None if blocks is None else BlockStats(**blocks),
        schedule=Schedule(ScheduleName(read.schedule), read.chunks, read.group),
        step=StepTerms() if read.step is None else StepTerms(**read.step.model_dump()),
    )
