"""The question about a published run: the best plan of its model, batch and cluster under the rules of its runtime, and
its own layout as one plan among these."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

from piper_ray.calibrate.layouts import Laid, NotExpressible
from piper_ray.calibrate.runs import PublishedRun
from piper_ray.model.instance import Instance
from piper_ray.model.mode import ALL_REPLICAS, Sharding
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.schedule import Schedule
from piper_ray.proposal.demand import PlanDemand
from piper_ray.runtimes.runtime import RUNTIMES, Runtime, RuntimeName
from piper_ray.simulate.result import Simulation
from piper_ray.simulate.run import SimulationOptions, simulate
from piper_ray.workloads.estimate.build import EstimateRequest
from piper_ray.workloads.estimate.hardware import Hardware
from piper_ray.workloads.estimate.layout import PricedLayout, priced
from piper_ray.workloads.estimate.modes import Offer

_MEGATRON = RUNTIMES[RuntimeName.MEGATRON]

RULES: dict[str, Runtime] = {
    "deepspeed-2021": RUNTIMES[RuntimeName.DEEPSPEED],
    # Sequence parallelism came with Korthikanti et al., 2022.
    "megatron-2021": replace(_MEGATRON, setting=replace(_MEGATRON.setting, sequence_parallel=False)),
    # It had recomputation of its own.
    "hai-llm": replace(_MEGATRON, setting=replace(_MEGATRON.setting, recomputed=None), fills_interleaved=False),
    "torchtitan": RUNTIMES[RuntimeName.TORCHTITAN],
    # Table 4 of the report has batches of fewer microbatches than ranks.
    "meta-2024": replace(_MEGATRON, fills_interleaved=False),
}
"""Runtimes by generation of software; all other generations have Megatron's rules."""


@dataclass(frozen=True)
class Question:
    """The question about a run.

    demand: the demand whose best plan is sought. plan, simulation: the run's own layout under the same rules.
    excess_bytes: memory of each GPU that plans may hold beyond the estimate of what there is; negative: less.
    """

    run: PublishedRun
    laid: Laid
    layout: PricedLayout
    demand: PlanDemand
    instance: Instance
    plan: Plan
    simulation: Simulation
    excess_bytes: float

    @property
    def schedule(self) -> Schedule:
        return self.layout.schedule

    @property
    def step_s(self) -> float:
        return self.simulation.step_s

    @property
    def violations(self) -> tuple[str, ...]:
        """The rules of the runtime, as they are written here, that the run itself breaks."""
        rules = self.demand.restrictions(self.instance, self.schedule.name)
        return tuple(rules.violations(self.instance, self.plan, self.schedule))


def question_of(run: PublishedRun, laid: Laid, hardware: Hardware) -> Question:
    """The question about a run. If its layout takes more memory than there is by the planner's estimate, plans may take
    as much. Raises NotExpressible or PiperRayError if there is no question."""
    own = priced(laid.model, laid.stack, hardware.training, laid.layout)
    demand = demand_of(run, laid, own, hardware)
    instance = demand.estimated(laid.layout.samples).instance
    plan = plan_of(instance, own)
    simulation = simulate(instance, plan, own.schedule, options=SimulationOptions.of(own.terms))
    found = Question(run, laid, own, demand, instance, plan, simulation, 0.0)
    return granted(found, max(0.0, simulation.peak_memory_bytes - instance.memory_bytes))


def granted(question: Question, excess_bytes: float) -> Question:
    """The question with this much more memory than the estimate says there is."""
    demand = replace(question.demand, set_aside_bytes=-excess_bytes)
    instance = demand.estimated(question.laid.layout.samples).instance
    rules = SimulationOptions.of(demand.step)
    simulation = simulate(instance, question.plan, question.schedule, options=rules)
    return replace(question, demand=demand, instance=instance, simulation=simulation, excess_bytes=excess_bytes)


def demand_of(run: PublishedRun, laid: Laid, own: PricedLayout, hardware: Hardware) -> PlanDemand:
    """The demand with the run's model, batch, GPUs and schedule, and with what its software shares and spreads."""
    layout, stack = laid.layout, laid.stack
    assert run.gpu is not None
    node = gcd(run.gpus_per_node or stack.gpu.gpus_per_node, layout.devices)
    request = EstimateRequest(
        nodes=layout.devices // node,
        gpus_per_node=node,
        domain=stack.domain if stack.domain % node == 0 else node,
        tokens=layout.tokens,
        batch=layout.batch,
        fused=layout.fused,
        offer=Offer(
            zero=1 if layout.sharding is Sharding.NONE else ALL_REPLICAS,
            contexts=tuple(sorted({1, layout.context})),
            experts=() if layout.expert is None else (layout.expert,),
            expert_tensor=layout.expert_tensor,
        ),
        software=laid.software,
        precision=stack.precision.value,
        recomputations=(layout.recomputation,),
    )
    runtime = RULES.get(laid.software, _MEGATRON)
    return PlanDemand(laid.model, hardware, run.gpu, request, runtime, (own.schedule.name,), own.terms, stack=stack)


def plan_of(instance: Instance, own: PricedLayout) -> Plan:
    """The run's layout as a plan of the instance. Raises NotExpressible if the instance cannot run a layer so."""
    stages = []
    for stage in own.plan.stages:
        t, chosen = stage.tensor_parallel_degree, {}
        for number in stage.layers:
            mode = own.layers[number][1].without_degree
            if mode.optimizer_shards > 1:
                mode = replace(mode, optimizer_shards=ALL_REPLICAS)
            row = instance.layers[number].tmpcs.get(t, ())
            found = next((tmpc.id for tmpc in row if tmpc.mode == mode), None)
            if found is None:
                ways = ", ".join(tmpc.id for tmpc in row)
                raise NotExpressible(f"{instance.layers[number].name} runs as {mode.text} on {t}; there is {ways}")
            chosen[number] = found
        stages.append(Stage(stage.layers, stage.data_parallel_degree, t, chosen))
    return Plan(tuple(stages), keeps_order=True)
