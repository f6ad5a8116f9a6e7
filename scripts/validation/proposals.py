"""What ``solve`` proposes for the cluster of a published run, against the layout that ran there: both plans of the same
workload, simulated under the same rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from piper_ray.calibrate.layouts import Laid, NotExpressible, laid_out
from piper_ray.calibrate.runs import PublishedRun
from piper_ray.engine.solve import solve
from piper_ray.model.errors import PiperRayError
from piper_ray.model.figures import plural
from piper_ray.model.instance import Instance
from piper_ray.model.mode import Sharding
from piper_ray.model.options import SolveOptions
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.schedule import Schedule
from piper_ray.model.solution import Solution
from piper_ray.report.comparison import ids_text, reasons, shape_text
from piper_ray.simulate.result import Simulation
from piper_ray.simulate.run import SimulationOptions, simulate
from piper_ray.workloads.estimate.build import EstimateRequest, estimate_on
from piper_ray.workloads.estimate.hardware import Hardware
from piper_ray.workloads.estimate.layout import PricedLayout, priced
from piper_ray.workloads.estimate.modes import Offer


@dataclass(frozen=True)
class RunPlan:
    """A plan with its simulated step."""

    plan: Plan
    simulation: Simulation

    @property
    def step_s(self) -> float:
        return self.simulation.step_s


@dataclass(frozen=True)
class Proposal:
    """For one run. published: its own layout; proposed: what was found; solution: with what is proved of all plans.

    memory_is_its_own: the layout that ran takes more than the estimate says there is; then plans may take as much.
    """

    instance: Instance
    published: RunPlan
    proposed: RunPlan
    solution: Solution
    memory_is_its_own: bool

    @property
    def gain(self) -> float:
        """Of the published layout's step: below 0, what is proposed is slower."""
        return 1.0 - self.proposed.step_s / self.published.step_s


def one_of_each_cluster(runs: Iterable[PublishedRun]) -> list[PublishedRun]:
    """Of the runs of one model and batch on one cluster the fastest, in the order of the file."""
    fastest: dict[tuple[object, ...], PublishedRun] = {}
    listed = list(runs)
    for run in listed:
        known = fastest.setdefault(_cluster_of(run), run)
        if (run.measured_step_s or inf) < (known.measured_step_s or inf):
            fastest[_cluster_of(run)] = run
    return [run for run in listed if fastest[_cluster_of(run)] is run]


def _cluster_of(run: PublishedRun) -> tuple[object, ...]:
    model = run.model.name, repr(run.model.config)
    return (run.source, *model, run.gpu, run.gpus, run.global_batch, run.seq, run.precision)


def proposal_for(run: PublishedRun, hardware: Hardware, options: SolveOptions) -> Proposal | str:
    """Or the reason why there is none; never raises for what the run says."""
    try:
        laid = laid_out(run, hardware)
        layout = priced(laid.model, laid.stack, hardware.training, laid.layout)
        return _proposal(laid, layout, hardware, options)
    except NotExpressible as error:
        return str(error)
    except PiperRayError as error:
        return " ".join(str(error).split())


def _proposal(laid: Laid, layout: PricedLayout, hardware: Hardware, options: SolveOptions) -> Proposal | str:
    instance = _workload(laid, hardware)
    rules = SimulationOptions.of(layout.terms)
    plan = _plan_of(instance, layout)
    published = RunPlan(plan, simulate(instance, plan, layout.schedule, options=rules))
    held_bytes = published.simulation.peak_memory_bytes
    more = held_bytes > instance.memory_bytes
    if more:
        instance = instance.replace(memory_bytes=held_bytes)
        published = replace(published, simulation=simulate(instance, plan, layout.schedule, options=rules))
    asked = layout.schedule if layout.schedule.v == 1 else Schedule.of(layout.schedule.name)
    found = solve(instance, schedule=asked, step=layout.terms, options=options)
    if found.plan is None:
        return "no plan was found"
    proposed = RunPlan(found.plan, simulate(instance, found.plan, found.schedule, options=rules))
    return Proposal(instance, published, proposed, found, more)


def _workload(laid: Laid, hardware: Hardware) -> Instance:
    """That of the model on as many devices, with all ways to run it that the estimator offers."""
    layout, stack = laid.layout, laid.stack
    mode = layout.mode

    def shards_of(what: Sharding) -> int:
        return mode.optimizer_shards if mode.sharding is what else 1

    request = EstimateRequest(
        nodes=-(-layout.devices // stack.gpus_per_node),
        gpus_per_node=stack.gpus_per_node,
        tokens=layout.tokens,
        samples=layout.samples,
        batch=layout.batch,
        fused=layout.fused,
        offer=Offer(
            zero=shards_of(Sharding.OPTIMIZER),
            zero2=shards_of(Sharding.GRADIENTS),
            fsdp=shards_of(Sharding.WEIGHTS),
            contexts=tuple(sorted({1, layout.context})),
            experts=() if layout.expert is None else (layout.expert,),
            expert_tensor=layout.expert_tensor,
        ),
        recomputations=(layout.recomputation,),
    )
    return estimate_on(stack, laid.model, hardware, request).instance.replace(devices=layout.devices)


def _plan_of(instance: Instance, layout: PricedLayout) -> Plan:
    """The run's layout as a plan of the workload. Raises NotExpressible where that has no such way to run a layer."""
    for stage in layout.plan.stages:
        for number in stage.layers:
            row = instance.layers[number].tmpcs.get(stage.tensor_parallel_degree, ())
            if stage.tmpc_ids[number] not in {tmpc.id for tmpc in row}:
                layer, t = instance.layers[number].name, stage.tensor_parallel_degree
                raise NotExpressible(f"{layer} cannot be planned as {stage.tmpc_ids[number]} on {t} devices")
    return Plan(
        tuple(
            Stage(
                tuple(instance.layers[number].id for number in stage.layers),
                stage.data_parallel_degree,
                stage.tensor_parallel_degree,
                {instance.layers[number].id: stage.tmpc_ids[number] for number in stage.layers},
            )
            for stage in layout.plan.stages
        )
    )


_EQUAL = 5e-5
"""Shares that are shown as 0.00 %."""


def proposal_lines(found: Sequence[tuple[str, Proposal | str]]) -> list[str]:
    """In Markdown: a row for each cluster, then what could not be compared, with the reason. found: ids of runs, and
    what came of them."""
    lines = [
        "| run | its layout | as | step | proposed | as | step | less | chiefly because of |",
        "|---|---|---|---:|---|---|---:|---:|---|",
    ]
    rows = [(run, one) for run, one in found if isinstance(one, Proposal)]
    lines += [_row(run, one) for run, one in rows]
    slower = sum(one.gain < -_EQUAL for _, one in rows)
    equal = sum(abs(one.gain) <= _EQUAL for _, one in rows)
    faster = len(rows) - slower - equal
    lines += ["", f"{plural(len(rows), 'cluster')}: faster in {faster}, equal in {equal}, slower in {slower}."]
    others = [(run, one) for run, one in found if isinstance(one, str)]
    return [*lines, *(["", "Not compared:", "", *(f"- {run}: {why}" for run, why in others)] if others else [])]


def proposal_dict(run: str, found: Proposal | str) -> dict[str, object]:
    """The same for programs."""
    if isinstance(found, str):
        return {"id": run, "reason": found}
    return {
        "id": run,
        "published": _plan_dict(found, found.published),
        "proposed": _plan_dict(found, found.proposed),
        "gain": found.gain,
        "lower_bound_step_s": found.solution.lower_bound_s * found.instance.microbatches,
        "because": reasons(found.published.simulation, found.proposed.simulation),
        "memory_is_its_own": found.memory_is_its_own,
    }


def _row(run: str, found: Proposal) -> str:
    cells = [run]
    for one in (found.published, found.proposed):
        cells += [*_texts(found, one), f"{one.step_s:.4g} s"]
    because = reasons(found.published.simulation, found.proposed.simulation) if found.gain > _EQUAL else []
    cells += [f"{100.0 * found.gain:.2f} %", because[0] if because else "-"]
    return f"| {' | '.join(cells)} |"


def _plan_dict(found: Proposal, one: RunPlan) -> dict[str, object]:
    layout, runs_as = _texts(found, one)
    return {"layout": layout, "runs_as": runs_as, "step_s": one.step_s}


def _texts(found: Proposal, one: RunPlan) -> tuple[str, str]:
    return shape_text(one.plan, one.simulation.schedule), ids_text(found.instance, one.plan)
