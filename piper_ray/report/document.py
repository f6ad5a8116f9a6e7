"""The JSON documents: of a solve, of a check, and the plan file in upstream's form with our figures."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

from piper_ray.evaluate import Evaluation
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.plan import Plan
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule
from piper_ray.model.solution import BlockStats, Solution
from piper_ray.model.step import StepTerms
from piper_ray.report.speed import speed_document
from piper_ray.storage.files import write_atomically as write_atomically
from piper_ray.workloads.formats.plan_writer import Document, header, stage_documents

if TYPE_CHECKING:
    from piper_ray.engine.frontier.frontier import Frontier
    from piper_ray.engine.frontier.points import FrontierPoint
    from piper_ray.planners.planner import BaselineResult
    from piper_ray.simulate.result import Simulation


def solution_document(
    instance: Instance,
    restrictions: Restrictions,
    options: SolveOptions,
    solution: Solution,
    evaluation: Evaluation | None,
    simulation: Simulation | None = None,
) -> Document:
    """Everything about a solve, with or without a plan. Times in s, sizes in bytes; null: not known or without end."""
    plan = solution.plan
    return {
        **header("solution", instance),
        "restrictions": restrictions.to_dict(),
        "options": _plain(options),
        **solution.schedule.to_dict(),
        "step": _step_document(solution.step),
        "status": solution.status.value,
        "stopped_by": _plain(solution.stopped_by),
        "time_per_sample_s": solution.time_per_sample_s,
        "lower_bound_s": _plain(solution.lower_bound_s),
        "gap": solution.gap,
        "plan": None if plan is None else _plan_with_figures(instance, plan, evaluation, solution.schedule),
        "evaluation": None if evaluation is None else _evaluation_document(instance, evaluation),
        "simulated": None if simulation is None else _simulated_document(instance, simulation),
        "infeasibility": _plain(solution.infeasibility),
        "blocks": _blocks_document(solution.blocks),
        "stats": _plain(solution.stats),
    }


def plan_document(
    instance: Instance,
    plan: Plan,
    evaluation: Evaluation | None,
    origin: Document,
    schedule: Schedule = PAPERS_SCHEDULE,
) -> Document:
    """The plan file: upstream's ``stages`` first, with our figures in each, then what they hold for.

    evaluation: None for a plan of another schedule than Piper's. origin: what is known of the plan: ``proof_document``
    of a solve, or ``baseline_facts`` of another planner.
    """
    time_s = {} if evaluation is None else {"time_per_sample_s": evaluation.time_per_sample_s}
    return {
        **_plan_with_figures(instance, plan, evaluation, schedule),
        **header("plan", instance),
        **time_s,
        **origin,
    }


def proof_document(solution: Solution) -> Document:
    """What a solve proved about its plan."""
    return {
        **solution.schedule.to_dict(),
        "step": _step_document(solution.step),
        "time_per_sample_s": solution.time_per_sample_s,
        "status": solution.status.value,
        "lower_bound_s": _plain(solution.lower_bound_s),
        "gap": solution.gap,
    }


def _step_document(step: StepTerms) -> object:
    return None if step == StepTerms() else _plain(step)


def baseline_facts(result: BaselineResult) -> Document:
    """Which planner made the plan, out of how many, and in its own words."""
    facts = {"planner": result.planner, "tried": result.tried, "note": result.note}
    return {**result.schedule.to_dict(), **facts}


def baseline_document(instance: Instance, restrictions: Restrictions, result: BaselineResult) -> Document:
    """Everything about another planner's answer, with or without a plan."""
    plan, evaluation, schedule = result.plan, result.evaluation, result.schedule
    found = None if plan is None or evaluation is None else _plan_with_figures(instance, plan, evaluation, schedule)
    return {
        **header("baseline", instance),
        "restrictions": restrictions.to_dict(),
        **baseline_facts(result),
        "time_per_sample_s": result.time_per_sample_s,
        "plan": found,
        "evaluation": None if evaluation is None else _evaluation_document(instance, evaluation),
    }


def frontier_document(
    instance: Instance,
    restrictions: Restrictions,
    options: SolveOptions,
    frontier: Frontier,
    budgets: Sequence[FrontierPoint],
) -> Document:
    """All points of both curves; ``budgets``: those along the bound on the sum of data-parallel degrees, if any."""
    return {
        **header("frontier", instance),
        "restrictions": restrictions.to_dict(),
        "options": _plain(options),
        **frontier.schedule.to_dict(),
        **({"chunks": None} if frontier.chunks_differ else {}),
        "stopped_by": _plain(frontier.stopped_by),
        "reason": frontier.reason,
        "by_devices": [_point_document(point) for point in frontier.points()],
        "by_budget": [_point_document(point) for point in budgets],
        "stats": _plain(frontier.stats),
    }


def _point_document(point: FrontierPoint) -> Document:
    return {
        "devices": point.devices,
        "data_parallel_budget": point.data_parallel_budget,
        "status": point.status.value,
        "time_per_sample_s": point.time_per_sample_s,
        "lower_bound_s": _plain(point.lower_bound_s),
        "gap": point.gap,
    }


def verification_document(
    instance: Instance,
    plan: Plan,
    schedule: Schedule,
    evaluation: Evaluation | None,
    simulation: Simulation | None,
    violations: tuple[str, ...],
) -> Document:
    """What ``verify`` found: the plan's cost under a schedule, or every rule it breaks."""
    found = evaluation or simulation
    return {
        **header("verification", instance),
        **schedule.to_dict(),
        "valid": found is not None,
        "violations": list(violations),
        "time_per_sample_s": None if found is None else found.time_per_sample_s,
        "simulated": None if simulation is None else _simulated_document(instance, simulation),
        "plan": _plan_with_figures(instance, plan, evaluation, schedule),
        "evaluation": None if evaluation is None else _evaluation_document(instance, evaluation),
    }


def info_document(instance: Instance, figures: Document) -> Document:
    """What ``info`` found."""
    return {**header("info", instance), **figures}


def to_text(document: Document) -> str:
    """The document as strict JSON: no NaN and no infinity."""
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _plan_with_figures(
    instance: Instance, plan: Plan, evaluation: Evaluation | None, schedule: Schedule = PAPERS_SCHEDULE
) -> Document:
    stages = stage_documents(instance, plan, schedule)
    if evaluation is None:
        return {"stages": stages, **plan.rule_dict()}
    for written, stage in zip(stages, evaluation.stages, strict=True):
        written["figures"] = {
            "devices": stage.devices,
            "time_s": stage.time_s,
            "compute_s": stage.compute_s,
            "communication_s": stage.communication_s,
            "resync_s": stage.resync_s,
            "memory_bytes": stage.memory_bytes,
            "in_flight_microbatches": stage.in_flight_microbatches,
            "binds": list(stage.binding),
        }
    return {"stages": stages, **plan.rule_dict()}


def _evaluation_document(instance: Instance, evaluation: Evaluation) -> Document:
    return {
        "time_per_sample_s": evaluation.time_per_sample_s,
        **speed_document(instance.batch, evaluation.time_per_sample_s),
        "devices": evaluation.devices,
        "data_parallel_sum": evaluation.data_parallel_sum,
        "stages": len(evaluation.stages),
        "bottleneck": evaluation.bottleneck,
    }


def _simulated_document(instance: Instance, simulation: Simulation) -> Document:
    return {
        "time_per_sample_s": simulation.time_per_sample_s,
        **speed_document(instance.batch, simulation.time_per_sample_s),
        "bubble_share": simulation.bubble_share,
        "peak_memory_bytes": [rank.peak_memory_bytes for rank in simulation.ranks],
    }


def _blocks_document(blocks: BlockStats | None) -> Document | None:
    """With the old name of its time for one more version."""
    if blocks is None:
        return None
    fields = {field.name: _plain(getattr(blocks, field.name)) for field in dataclasses.fields(blocks)}
    return fields | {"time_per_sample": blocks.time_per_sample_s}


def _plain(value: object) -> object:
    """Dataclasses as objects, enums as their values; JSON has no infinity, which becomes null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
