"""The best plan of a model on a cluster under a runtime's rules, over microbatch sizes and schedules.

A runtime may reduce gradients in every pass where there is one pipeline rank, else once a batch. A TMPC says what
happens in a pass and what once a batch, whatever the number of ranks. So one rank is planned by itself, of TMPCs that
share out weights and price every pass, and several ranks number by number, where the best of all plans counts on what
the runtime does not do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from piper_ray.engine.solve import solve
from piper_ray.engine.subproblems import rank_of
from piper_ray.model.constraints import StageCount, choices_made
from piper_ray.model.errors import InfeasibleError, UsageError
from piper_ray.model.events import Event
from piper_ray.model.figures import size_text, time_text
from piper_ray.model.instance import Instance, divisors
from piper_ray.model.mode import Sharding
from piper_ray.model.options import SolveOptions
from piper_ray.model.plan import Plan
from piper_ray.model.restrictions import Restrictions, divisible_batch, odd_part
from piper_ray.model.schedule import CHUNKED, Schedule, ScheduleName, StepTerms
from piper_ray.model.solution import Solution, Status
from piper_ray.model.stop import Stop, StoppedBy
from piper_ray.runtimes.runtime import Runtime
from piper_ray.simulate.result import Simulation
from piper_ray.simulate.run import SimulationOptions, simulate
from piper_ray.workloads.estimate.build import Estimate, EstimateRequest, estimate
from piper_ray.workloads.estimate.config import ModelConfig
from piper_ray.workloads.estimate.hardware import Hardware

MOST_SAMPLES = 16
"""Of a microbatch that is tried by itself: matrix products gain little beyond, and memory is gone before."""

CHUNKED_PASSES = 2_000_000_000
"""That the search under a schedule with chunks, which ends with a gap, may simulate for one microbatch size: some 4 s
of one core."""

CHUNKED_HELP_PASSES = 700_000_000
"""And the search for a plan on another cluster, which is compared with the one at hand."""

RUNNERS_UP = 1.25
"""A search ends once no plan is within so many times the best step."""

_NOTHING_FITS = (
    "no plan fits: it takes more nodes, optimizer state shared among more replicas (zero), or GPUs with more memory"
)

_GAP = 1e-4
_CHUNKED_GAP = 0.5
"""What is left open under a schedule with chunks: bounds take longer than good plans."""

Tell = Callable[[str], None]


@dataclass(frozen=True)
class SolveBegun:
    """Solve number ``number``, from 1, of ``total`` at most, for a batch of ``microbatches``. what: in words
    ("microbatches of 4, 1f1b"). best_s: the best step so far; None without a plan."""

    number: int
    total: int
    what: str
    microbatches: int
    best_s: float | None


class Watch(Protocol):
    """Hears of each solve as it begins, and of what that one reports."""

    def __call__(self, event: SolveBegun | Event) -> None: ...


def _unwatched(event: SolveBegun | Event) -> None:
    """For those who do not want to know."""


@dataclass(frozen=True)
class PlanDemand:
    """What is to be trained where, and by what. request: its microbatch size, if any, is the only one tried.

    schedules: those tried, of the runtime's own. set_aside_bytes: of each GPU, left free by all plans, for what the
    runtime holds beside a plan's figures.
    """

    model: ModelConfig
    hardware: Hardware
    gpu: str
    request: EstimateRequest
    runtime: Runtime
    schedules: tuple[ScheduleName, ...]
    step: StepTerms = StepTerms()
    set_aside_bytes: float = 0.0


@dataclass(frozen=True)
class Proposed:
    """A plan for one microbatch size and schedule, simulated. samples: of a microbatch."""

    samples: int
    estimate: Estimate
    solution: Solution
    plan: Plan
    simulation: Simulation

    @property
    def instance(self) -> Instance:
        return self.estimate.instance

    @property
    def batch(self) -> int:
        """In samples."""
        return self.samples * self.instance.microbatches

    @property
    def step_s(self) -> float:
        """Of the whole batch, simulated."""
        return self.simulation.step_s


@dataclass(frozen=True)
class FoundPlans:
    """found: the fastest first; one for each microbatch size and schedule with a plan that may be a runner-up. refused:
    sizes that could not be planned, and why; and those that are far slower."""

    demand: PlanDemand
    found: tuple[Proposed, ...]
    refused: tuple[str, ...]
    seconds: float

    @property
    def best(self) -> Proposed:
        return self.found[0]


@dataclass(frozen=True)
class Help:
    """What a change of the cluster or the batch would bring: the step with it, or None where no plan was found.

    samples: of its batch."""

    what: str
    step_s: float | None
    samples: int


def microbatch_sizes(model: ModelConfig, request: EstimateRequest) -> tuple[int, ...]:
    """Powers of two up to ``MOST_SAMPLES`` that divide the batch, and the model's own."""
    if request.samples is not None:
        return (request.samples,)
    batch = request.batch or model.batch
    sizes = {size for size in divisors(batch) if size <= MOST_SAMPLES and size & (size - 1) == 0}
    if batch % model.samples == 0:
        sizes.add(model.samples)
    return tuple(sorted(sizes))


def propose(
    demand: PlanDemand, stop: Stop[Any] | None = None, tell: Tell | None = None, watch: Watch = _unwatched
) -> FoundPlans:
    """Tries all; ``tell`` gets a line for each. Raises UsageError where nothing can be estimated, InfeasibleError where
    no plan fits, with why for each try that nobody was told of."""
    began_s = time.perf_counter()
    told = tell is not None
    tell = tell or (lambda _: None)
    demand = _with_batch(demand, tell)
    estimates, refused = _estimates(demand)
    found: list[Proposed] = []

    def so_far() -> FoundPlans | None:
        ranked = tuple(sorted(found, key=lambda one: (one.step_s, *rank_of(one.solution), one.samples)))
        return FoundPlans(demand, ranked, tuple(refused), time.perf_counter() - began_s) if ranked else None

    if stop is not None:
        stop.offer(so_far)
    exact = [name for name in demand.schedules if name not in CHUNKED]
    chunked = [name for name in demand.schedules if name in CHUNKED]
    alone = next(filter(None, (demand.runtime.on_one_rank(one.instance) for one in estimates.values())), None)
    if alone is not None:
        refused.append(f"{alone}; a config that does not tie them (tie_word_embeddings) has weights apart")
        tell(refused[-1])
        refused += [f"{name.value}: not tried, as it is for several pipeline ranks" for name in chunked]
        chunked = []
    tries = [(name, samples) for name in (*exact, *chunked) for samples in estimates]
    for number, (name, samples) in enumerate(tries, start=1):
        if stop is not None and stop.requested:
            break
        what, of_size = f"microbatches of {samples}, {name.value}", estimates[samples]
        best_s = min((one.step_s for one in found), default=None)
        watch(SolveBegun(number, len(tries), what, of_size.instance.microbatches, best_s))
        outcome = _solved(demand, samples, of_size, name, found, stop, watch)
        if isinstance(outcome, Proposed):
            found.append(outcome)
            tell(f"{what}: {time_text(outcome.step_s, 4)} a step")
        else:
            refused.append(f"{what}: {outcome}")
            tell(refused[-1])
    proposal = so_far()
    if proposal is None:
        if stop is not None:
            stop.check()
        raise InfeasibleError("\n".join([_NOTHING_FITS, *(() if told else refused)]))
    return proposal


def _with_batch(demand: PlanDemand, tell: Tell) -> PlanDemand:
    """With a batch that the devices divide, where nobody says which one it is to be."""
    request, usual = demand.request, demand.model.batch
    devices = request.nodes * (request.gpus_per_node or demand.hardware.gpu(demand.gpu).gpus_per_node)
    odd = odd_part(devices)
    if request.batch is not None or usual % odd == 0:
        return demand
    batch = divisible_batch(usual, devices)
    tell(
        f"a batch of {batch:,} samples, as {odd} divides the {devices:,} GPUs and not the usual {usual:,} "
        "(--global-batch says another)"
    )
    return replace(demand, request=replace(request, batch=batch))


def what_would_help(proposal: FoundPlans, stop: Stop[Any] | None = None, watch: Watch = _unwatched) -> Iterator[Help]:
    """The best plan's step with more memory, and with faster links: of the plan itself, or a faster one. None of what
    is not known yet when the end is wished for."""
    best, demand = proposal.best, proposal.demand
    instance = best.instance
    faster = tuple(replace(x, bandwidth_bytes_per_s=2.0 * x.bandwidth_bytes_per_s) for x in instance.cluster.links)
    changes: tuple[tuple[str, dict[str, Any]], ...] = (
        ("25 % more memory", {"memory_bytes": 1.25 * instance.memory_bytes}),
        ("links of twice the rate", {"cluster": replace(instance.cluster, links=faster)}),
    )
    for number, (what, changed) in enumerate(changes, start=1):
        changed_instance = replace(instance, **changed)
        watch(SolveBegun(number, len(changes), f"with {what}", instance.microbatches, best.step_s))
        found = _plan(demand, changed_instance, best.solution.schedule, best.step_s, stop, watch, CHUNKED_HELP_PASSES)
        if stop is not None and stop.requested:
            return
        plans = [best.plan] if found.plan is None else [best.plan, found.plan]
        step_s = min(_simulated(demand, changed_instance, plan, best.solution).step_s for plan in plans)
        yield Help(what, step_s, best.batch)
    batch = divisible_batch(best.batch, instance.devices)
    if idle_devices(best) and batch % best.samples == 0 and batch != best.batch:
        watch(SolveBegun(len(changes) + 1, len(changes) + 1, f"with a batch of {batch:,}", batch // best.samples, None))
        of_batch = _estimated(demand, replace(demand.request, samples=best.samples, batch=batch))
        within_s = best.step_s * batch / best.batch
        found = _plan(demand, of_batch.instance, best.solution.schedule, within_s, stop, watch, CHUNKED_HELP_PASSES)
        if found.plan is not None:
            step_s = _simulated(demand, of_batch.instance, found.plan, found).step_s
            yield Help(f"a batch of {batch:,} samples", step_s, batch)


def idle_devices(one: Proposed) -> int:
    """Of the cluster, those that the plan leaves over."""
    return one.instance.devices - one.simulation.devices


def _estimates(demand: PlanDemand) -> tuple[dict[int, Estimate], list[str]]:
    """By samples of a microbatch. Raises UsageError where none can be made, InfeasibleError where the smallest one's
    layers need more memory than there is, as then all do."""
    found: dict[int, Estimate] = {}
    refused: list[str] = []
    sizes = microbatch_sizes(demand.model, demand.request)
    for samples in sizes:
        request = replace(demand.request, samples=samples)
        try:
            made = _estimated(demand, request)
        except UsageError as error:  # as for microbatches that are too large; the smallest one tells of all else
            if not found:
                raise
            refused.append(f"microbatches of {samples}: {error}")
            continue
        if made.least_devices <= made.devices:
            found[samples] = made
        elif not found:
            raise InfeasibleError(f"{_too_large(made, samples)}\n{_NOTHING_FITS}")
        else:
            refused.append(_too_large(made, samples))
    return found, refused


def _estimated(demand: PlanDemand, request: EstimateRequest) -> Estimate:
    made = estimate(demand.model, demand.hardware, demand.gpu, request)
    memory_bytes = made.instance.memory_bytes - demand.set_aside_bytes
    if memory_bytes <= 0.0:
        raise UsageError(f"{size_text(demand.set_aside_bytes)} are set aside, and a GPU has no more to give")
    return replace(made, instance=made.instance.replace(memory_bytes=memory_bytes))


def _too_large(made: Estimate, samples: int) -> str:
    return (
        f"with microbatches of {samples}, one of them in flight, the layers need at least "
        f"{size_text(made.least_memory_bytes)}, {made.least_devices:,} GPUs or more: they do not fit on "
        f"{made.devices:,}"
    )


def _solved(
    demand: PlanDemand,
    samples: int,
    of_size: Estimate,
    name: ScheduleName,
    found: Sequence[Proposed],
    stop: Stop[Any] | None,
    watch: Watch,
) -> Proposed | str:
    """Or why there is none: nothing fits, nothing was found, or it would be far slower than the best plan."""
    best_s = min((one.step_s for one in found), default=math.inf)
    slow = f"no plan is within {RUNNERS_UP:g} times the best one's step"
    if _least_s(of_size.instance) > RUNNERS_UP * best_s:
        return slow
    without_s = min((one.step_s for one in found if one.samples == samples), default=math.inf)
    if name in CHUNKED and (busy_s := _busy_s(samples, found)) > best_s:
        if busy_s == math.inf:
            return "not tried, as no plan without chunks comes near the best one"
        return (
            f"not tried: with no rank ever idle the best plan without chunks would take {time_text(busy_s, 4)} a step"
        )
    within_s = min(RUNNERS_UP * best_s, without_s) if found else None
    solution = _plan(demand, of_size.instance, demand.runtime.schedule(name, None), within_s, stop, watch)
    if solution.stopped_by is StoppedBy.TOO_SLOW:
        return slow if without_s == math.inf else "no plan is faster than without chunks"
    if solution.plan is not None:
        simulation = _simulated(demand, of_size.instance, solution.plan, solution)
        if name in CHUNKED and simulation.step_s >= without_s:
            return "no plan was found that is faster than without chunks"
        return Proposed(samples, of_size, solution, solution.plan, simulation)
    if solution.infeasibility is not None:
        least_bytes = solution.infeasibility.least_memory_bytes
        return solution.infeasibility.reason + ("" if least_bytes is None else f"; {size_text(least_bytes)} would do")
    return f"no plan was found ({solution.stopped_by})"


def _busy_s(samples: int, found: Sequence[Proposed]) -> float:
    """What the best plan of that size would take if nothing were idle, which is all that chunks shrink; inf if there is
    none beside those of other sizes."""
    alike = [one for one in found if one.samples == samples]
    if not alike:
        return math.inf if found else 0.0
    best = min(alike, key=lambda one: one.step_s)
    return best.step_s * (1.0 - best.simulation.bubble_share)


def _least_s(instance: Instance) -> float:
    """No step takes less: each layer's fastest choice, on all devices."""
    device_s = sum(
        min(t * tmpc.time_per_sample_s for t, row in layer.tmpcs.items() for tmpc in row) for layer in instance.layers
    )
    return instance.microbatches * device_s / instance.devices


def _plan(
    demand: PlanDemand,
    instance: Instance,
    schedule: Schedule | ScheduleName,
    within_s: float | None,
    stop: Stop[Any] | None,
    watch: Watch,
    chunked_passes: int = CHUNKED_PASSES,
) -> Solution:
    name = schedule.name if isinstance(schedule, Schedule) else schedule
    node = demand.request.gpus_per_node or demand.hardware.gpu(demand.gpu).gpus_per_node

    def solved(narrowed: Instance, further: tuple[StageCount, ...], within_s: float | None) -> Solution:
        asked = Restrictions(constraints=further)
        return solve(
            narrowed,
            restrictions=demand.runtime.restricted(asked, narrowed, name, min(node, narrowed.devices)),
            options=SolveOptions(
                gap=_CHUNKED_GAP if name in CHUNKED else _GAP,
                passes_limit=chunked_passes if name in CHUNKED else None,
                within_s=within_s,
            ),
            schedule=schedule,
            listener=watch,
            step=demand.step,
            stop=None if stop is None else stop.part(),
        )

    sample_s = None if within_s is None else within_s / instance.microbatches
    if demand.runtime.sums_each_pass:
        several = demand.runtime.on_one_rank(instance) is None
        return solve_each_pass(instance, solved, sample_s, several=several)
    return solved(instance, (), sample_s)


def _simulated(demand: PlanDemand, instance: Instance, plan: Plan, solution: Solution) -> Simulation:
    return simulate(instance, plan, solution.schedule, options=SimulationOptions.of(demand.step))


Solve = Callable[[Instance, tuple[StageCount, ...], float | None], Solution]
"""Of an instance under further constraints, within so many seconds a sample."""


def counts_on_one_sum(instance: Instance, plan: Plan) -> bool:
    """Whether a plan of one rank and several microbatches has TMPCs that reduce gradients once a batch."""
    if len(plan.stages) > 1:
        return False
    (stage,) = plan.stages
    d = stage.data_parallel_degree
    if instance.microbatches == d:
        return False
    for layer, _, tmpc in choices_made(instance, stage):
        unshared = d * tmpc.mode.context > 1 and tmpc.mode.sharding < Sharding.WEIGHTS
        if unshared and _has_weights(instance, layer):
            return True
    return False


def _has_weights(instance: Instance, layer: int) -> bool:
    rows = instance.layer_by_id[layer].tmpcs.values()
    return any(tmpc.weights_bytes > 0.0 for row in rows for tmpc in row)


def solve_each_pass(instance: Instance, solve: Solve, within_s: float | None, *, several: bool) -> Solution:
    """The best plan of those that the runtime runs as they are priced; where there is none, of all. several: whether
    plans may have several pipeline ranks."""
    free = solve(instance, (), within_s)
    if free.plan is None or free.time_per_sample_s is None or not counts_on_one_sum(instance, free.plan):
        return free
    found: list[Solution] = []
    for narrowed, ranks in _parts(instance, several):
        known_s = [one.time_per_sample_s for one in found if one.time_per_sample_s is not None]
        limits_s = [*known_s, *([] if within_s is None else [within_s])]
        one = solve(narrowed, (StageCount(ranks),), min(limits_s, default=None))
        if one.plan is not None and not counts_on_one_sum(instance, one.plan):
            found.append(one)
    best = min(found, key=lambda one: (one.time_per_sample_s or 0.0, rank_of(one)), default=None)
    if best is None:
        return free
    return replace(best, status=Status.FEASIBLE, lower_bound_s=free.lower_bound_s)


def _parts(instance: Instance, several: bool) -> Iterator[tuple[Instance, int]]:
    yield _sharing_weights(instance), 1
    for ranks in divisors(instance.devices) if several else ():
        if 1 < ranks <= len(instance.layers):
            yield instance, ranks


def _sharing_weights(instance: Instance) -> Instance:
    """With those TMPCs alone that share out weights, where there are such."""
    layers = []
    for layer in instance.layers:
        rows = {}
        for t, row in layer.tmpcs.items():
            sharing = tuple(tmpc for tmpc in row if tmpc.mode.sharding is Sharding.WEIGHTS)
            rows[t] = sharing or row
        layers.append(replace(layer, tmpcs=rows))
    found = replace(instance, layers=tuple(layers))
    if instance.checked:
        found.mark_checked()
    return found
