"""What ``solve`` proposes for the cluster of a published run, against the layout that ran there: both plans of the same
workload, simulated under the same rules.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf

from piper_ray.engine.solve import solve
from piper_ray.model.errors import PiperRayError
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.schedule import Schedule
from piper_ray.model.settings import Sharding
from piper_ray.model.solution import Solution
from piper_ray.simulate.options import SimulationOptions
from piper_ray.simulate.result import Simulation
from piper_ray.simulate.run import simulate
from piper_ray.validate.layouts import Laid, NotExpressible, laid_out
from piper_ray.validate.runs import Run, Unreadable
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


def one_of_each_cluster(runs: Iterable[Run | Unreadable]) -> list[Run | Unreadable]:
    """Of the runs of one model and batch on one cluster the fastest, in the order of the file; what is no run stays."""
    fastest: dict[tuple[object, ...], Run] = {}
    listed = list(runs)
    for run in listed:
        if isinstance(run, Run):
            known = fastest.setdefault(_cluster_of(run), run)
            if (run.measured_step_s or inf) < (known.measured_step_s or inf):
                fastest[_cluster_of(run)] = run
    return [run for run in listed if isinstance(run, Unreadable) or fastest[_cluster_of(run)] is run]


def _cluster_of(run: Run) -> tuple[object, ...]:
    it = run.model
    model = it.name, repr(it.config), it.layers, it.hidden
    return (run.source, *model, run.gpu, run.gpus, run.global_batch, run.seq, run.precision)


def proposal_for(run: Run | Unreadable, hardware: Hardware, options: SolveOptions) -> Proposal | str:
    """Or the reason why there is none; never raises for what the run says."""
    if isinstance(run, Unreadable):
        return run.reason
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
    held_bytes = max(rank.peak_memory_bytes for rank in published.simulation.ranks)
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
        return mode.zero_shards if mode.sharding is what else 1

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
