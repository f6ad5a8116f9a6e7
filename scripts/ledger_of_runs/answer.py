"""The best plan for a run, its proof, and experiments that show why it is faster than the run's own layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from piper_ray.calibrate.layouts import Laid
from piper_ray.certificate.certificate import Certificate
from piper_ray.engine.certify import certify
from piper_ray.engine.one_setting import settings_of
from piper_ray.engine.solve import solve
from piper_ray.model.constraints import (
    DataParallelDegrees,
    KeepOrder,
    Restrictions,
    TensorParallelDegrees,
    choices_made,
)
from piper_ray.model.errors import InfeasibleError, LimitError, PiperRayError, UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.mode import Sharding
from piper_ray.model.options import SolveOptions
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import Schedule
from piper_ray.model.solution import Solution, Status
from piper_ray.proposal.cells import Cell, CellSearch, Extent, cells_of
from piper_ray.proposal.demand import PlanDemand
from piper_ray.proposal.offers import usual_headroom
from scripts.ledger_of_runs.question import Question

_PASSES = 2_000_000_000
"""How many passes searches under schedules with chunks may simulate for a run."""

_EXPERIMENT_PASSES = 300_000_000
"""How many passes they may simulate for an experiment."""


@dataclass(frozen=True)
class Answer:
    """The best plan for a run.

    workload: the one with the plan's microbatch size, and only the TMPCs of its mode. solution: the plan, and the proof
    for all plans of that workload. step_s: seconds of a batch. lower_s: no plan takes less, with any microbatches and
    mode. cells: the cells of the search.
    """

    workload: Instance
    plan: Plan
    solution: Solution
    samples: int
    step_s: float
    lower_s: float
    cells: tuple[Cell, ...]

    @property
    def schedule(self) -> Schedule:
        return self.solution.schedule


def answer_to(question: Question) -> Answer:
    """Answers a question. Raises InfeasibleError or UsageError if no plan can be estimated, or none fits."""
    cells = cells_of(question.demand, question.demand.estimates()[0]).cells
    search = _searched(question.demand, cells, _PASSES)
    best = search.ledger.best
    if best is None:
        raise InfeasibleError(question.demand.nothing_fits)
    cell = next(x for x in cells if x.samples == best.samples and _has(x.setting.instance, best.plan))
    step_s, lower_s = best.step_s, search.ledger.lower_s
    return Answer(cell.setting.instance, best.plan, best.solution, best.samples, step_s, lower_s, cells)


def with_own(question: Question, answer: Answer) -> Answer:
    """The answer with the run's own layout as its plan, and with the proof for all plans."""
    samples, microbatches = question.laid.layout.samples, question.instance.microbatches
    cell = next(x for x in answer.cells if x.samples == samples and _has(x.setting.instance, question.plan))
    solution = replace(
        answer.solution,
        status=Status.FEASIBLE,
        plan=question.plan,
        time_per_sample_s=question.step_s / microbatches,
        lower_bound_s=min(cell.lower_s, question.step_s) / microbatches,
        schedule=question.schedule,
    )
    lower_s = min(answer.lower_s, question.step_s)
    return Answer(cell.setting.instance, question.plan, solution, samples, question.step_s, lower_s, answer.cells)


def workload_of(question: Question, samples: int, plan: Plan) -> Instance:
    """The workload of a plan: its microbatch size, with only the TMPCs of its mode. Raises UsageError for a plan that
    the runtime cannot run."""
    instance = question.demand.estimated(samples).instance
    rules = question.demand.restrictions(instance, question.schedule.name)
    for setting in settings_of(instance, rules).worth_a_solve:
        if _has(setting.instance, plan):
            return setting.instance
    raise UsageError(f"{question.run.id}: no mode of the runtime has the plan's configurations")


def _has(instance: Instance, plan: Plan) -> bool:
    return all(
        chosen in {tmpc.id for tmpc in instance.layer_by_id[layer].tmpcs.get(stage.tensor_parallel_degree, ())}
        for stage in plan.stages
        for layer, chosen in stage.tmpc_ids.items()
    )


def laid_as(question: Question, answer: Answer) -> Laid:
    """The answer's plan as a layout, as the run's own is described."""
    stages, v = answer.plan.stages, answer.schedule.v
    modes = {layer: tmpc.mode for stage in stages for layer, row, tmpc in choices_made(answer.workload, stage)}
    blocks = {layer for layer, (kind, _) in enumerate(question.layout.layers) if kind.recomputable}
    mode = max((modes[layer] for layer in blocks), key=lambda one: (one.experts or 0, len(one.recomputation.parts)))
    layout = replace(
        question.laid.layout,
        tensor=stages[0].tensor_parallel_degree // mode.context,
        context=mode.context,
        pipeline=len(stages) // v,
        data=stages[0].data_parallel_degree,
        expert=mode.experts,
        expert_tensor=mode.expert_tensor,
        samples=answer.samples,
        schedule=answer.schedule,
        sequence_parallel=mode.sequence_parallel,
        recomputation=mode.recomputation,
        sharding=Sharding.NONE if mode.optimizer_shards == 1 else question.laid.layout.sharding,
        stages=tuple(len(blocks.intersection(stage.layers)) for stage in stages),
    )
    return replace(question.laid, layout=layout)


def _searched(demand: PlanDemand, cells: Sequence[Cell], passes: int) -> CellSearch:
    search = CellSearch(demand, cells, extent=Extent(listed=1, passes=passes))
    search.run()
    return search


def certificate_of(question: Question, answer: Answer) -> Certificate:
    """The certificate for the bound of all plans of the answer's workload under its schedule. Raises UsageError or
    LimitError if there is none."""
    rules = question.demand.restrictions(answer.workload, answer.schedule.name)
    # More plans keep these than the runtime runs; its other rules have no certificate.
    kept = Restrictions(constraints=[x for x in rules.constraints if isinstance(x, KeepOrder | TensorParallelDegrees)])
    try:
        return certify(answer.workload, answer.solution, restrictions=kept, threads=1)
    except LimitError:
        raise
    except UsageError:  # one of these more plans is faster than all that the runtime runs
        options = SolveOptions(gap=0.01, threads=1, passes_limit=_EXPERIMENT_PASSES)
        step, schedule = question.demand.step, answer.schedule
        wider = solve(answer.workload, restrictions=kept, schedule=schedule, step=step, options=options)
        return certify(answer.workload, wider, restrictions=kept, threads=1)


def same_recomputation_s(question: Question, answer: Answer) -> float | None:
    """The best step of plans that recompute as the run does; None: there is none."""
    own = {
        layer: tmpc.mode.recomputation
        for stage in question.plan.stages
        for layer, _, tmpc in choices_made(question.instance, stage)
    }

    def recomputes_so(cell: Cell) -> bool:
        rows = [(layer.id, row) for layer in cell.setting.instance.layers for row in layer.tmpcs.values()]
        return all(tmpc.mode.recomputation == own[layer] for layer, row in rows for tmpc in row)

    return _best_step_s(question, [cell for cell in answer.cells if recomputes_so(cell)])


def same_microbatch_s(question: Question, answer: Answer) -> float | None:
    """The best step of plans with the run's microbatches."""
    samples = question.laid.layout.samples
    return _best_step_s(question, [cell for cell in answer.cells if cell.samples == samples])


def same_degrees_s(question: Question, answer: Answer) -> float | None:
    """The best step of plans with the run's t and d."""
    stage = question.plan.stages[0]
    kept = TensorParallelDegrees((stage.tensor_parallel_degree,)), DataParallelDegrees((stage.data_parallel_degree,))
    cells = [
        replace(cell, restrictions=cell.restrictions.without(TensorParallelDegrees).adding(*kept))
        for cell in answer.cells
    ]
    return _best_step_s(question, cells)


def usual_room_s(question: Question) -> float | None:
    """The best step of plans that leave as much memory free as ``plan`` does."""
    demand = replace(question.demand, headroom=usual_headroom(question.demand.request))
    try:
        cells = cells_of(demand, demand.estimates()[0]).cells
    except PiperRayError:
        return None
    return _best_step_s(replace(question, demand=demand), cells)


def _best_step_s(question: Question, cells: Sequence[Cell]) -> float | None:
    best = _searched(question.demand, cells, _EXPERIMENT_PASSES).ledger.best
    return None if best is None else best.step_s
