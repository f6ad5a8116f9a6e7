"""Independent check of a plan: everything is derived from the instance again, without the solver's code.

Under Piper's own schedule, 2bw, the formulas are those of the paper (NeurIPS 2021), section 3, with the additions of
``model``: bytes that replicas share out, least data-parallel degrees, and tensors with several ends. Under PipeDream's
(SOSP 2019) gradients are summed after each round of a stage's replicas, and each microbatch in flight has a version of
the weights. Under any other schedule the plan is simulated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import fsum
from typing import TYPE_CHECKING, Literal

from piper_ray.model import plan_rules
from piper_ray.model.apart import parts_of
from piper_ray.model.cluster import Cluster, Link
from piper_ray.model.constraints import Restrictions, SustainedRate
from piper_ray.model.errors import InvalidPlan, UsageError
from piper_ray.model.figures import bytes_text, plural, time_text
from piper_ray.model.instance import Instance, Tmpc
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule, ScheduleName, StepTerms
from piper_ray.simulate.borders import best_ring

if TYPE_CHECKING:
    from piper_ray.simulate.result import Simulation
    from piper_ray.workloads.formats.load import Source

MEMORY_TOLERANCE = 1e-9
"""Relative excess over the memory limit that still counts as fitting.

A stage that fits exactly may exceed it by a few ulps if its bytes are added in another order than the planner's.
"""

Binding = Literal["time", "memory"]

TIME_BINDS = 1e-3
"""Relative. A stage limits the speed if its time is within this share of the slowest one's."""

MEMORY_BINDS = 0.95
"""A stage is short of memory from this share of the limit on."""


@dataclass(frozen=True)
class StageEvaluation:
    """The cost of one stage. time_s = compute_s + communication_s + resync_s, each per sample; under a flush the stage
    is idle for the rest of the plan's time.

    in_flight_microbatches: y, the microbatches whose activations a device of this stage holds at once.
    memory_bytes: on each device of the stage; under a flush the most at any time, all chunks on the device together.
    activation_bytes: the part of it for activations of the microbatches in flight; the rest is constant.
    memory_limit_bytes: the memory of each device.
    binding: what limits the stage: "time" if it is as slow as the slowest, within TIME_BINDS; "memory" if it uses
    MEMORY_BINDS of the memory or more; either, both or neither.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> solution = piper_ray.solve(bert, threads=1)
    >>> evaluation = piper_ray.evaluate(bert, solution.plan)
    >>> evaluation.stages[0].memory_bytes < bert.memory_bytes
    True
    """

    time_s: float
    compute_s: float
    communication_s: float
    resync_s: float
    memory_bytes: float
    activation_bytes: float
    memory_limit_bytes: float
    in_flight_microbatches: int
    devices: int
    data_parallel_degree: int
    tensor_parallel_degree: int
    binding: tuple[Binding, ...]


@dataclass(frozen=True)
class Evaluation:
    """A valid plan's cost: time_per_sample_s in s, devices used, and ``stages`` front to back.

    bottleneck: index of the first of the slowest stages. schedule: under which the plan runs. If it flushes each batch,
    time_per_sample_s is the time of the simulated step divided by N.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> solution = piper_ray.solve(bert, threads=1)
    >>> evaluation = piper_ray.evaluate(bert, solution.plan)
    >>> evaluation.devices
    8
    """

    time_per_sample_s: float
    devices: int
    data_parallel_sum: int
    stages: tuple[StageEvaluation, ...]
    bottleneck: int
    schedule: Schedule = PAPERS_SCHEDULE

    def __repr__(self) -> str:
        where = f"{plural(len(self.stages), 'stage')} on {plural(self.devices, 'device')}"
        slowest = f", stage {self.bottleneck + 1} the slowest" if len(self.stages) > 1 else ""
        return f"Evaluation({self.schedule.text}: {time_text(self.time_per_sample_s)}/microbatch, {where}{slowest})"


def in_flight_microbatches(suffix_sum: int, data_parallel_degree: int) -> int:
    """Returns y = ceil(s / d), the memory rule of asynchronous 1F1B. suffix_sum: s, the sum of d over this and all
    later stages."""
    return -(-suffix_sum // data_parallel_degree)


def objective_s(stage_times_s: Iterable[float]) -> float:
    """Returns the time of the slowest stage: a pipeline that never drains is as fast as that."""
    return max(stage_times_s)


def evaluate(
    instance: Instance | Source,
    plan: Plan,
    *,
    restrictions: Restrictions = Restrictions(),
    schedule: Schedule | ScheduleName | str | None = None,
    step: StepTerms = StepTerms(),
) -> Evaluation:
    """Returns the cost of ``plan`` on ``instance``. Raises InvalidPlan with every rule that the plan violates; stages
    count from 1.

    instance: an ``Instance``, or what ``load`` takes, such as a path. restrictions: further rules. schedule: the
    schedule under which the plan runs, or its name; None: the instance's own, or else Piper's, "2bw". Under a flush the
    plan is simulated. step: the terms of such a step.
    Raises InputError for an invalid instance or plan, and UsageError for arguments of a wrong type and for a schedule
    that cannot run the batch.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> plan = piper_ray.solve(bert, threads=1).plan
    >>> piper_ray.evaluate(bert, plan).devices
    8
    """
    instance = _checked(instance, plan, restrictions)
    under = Schedule.first_of(schedule, instance.schedule)
    if plan.shares:
        return _of_shares(instance, plan, restrictions, under, step)
    if not under.asynchronous:
        from piper_ray.simulate.run import SimulationOptions, simulate

        simulation = simulate(instance, plan, under, options=SimulationOptions.of(step))
        return evaluation_of(instance, plan, simulation, restrictions)
    instance.require_one_site(f"schedule {under.name.value}")
    if step != StepTerms():
        raise UsageError(f"{under.name.value} has its own terms of a step; others are for schedules with a flush")
    given, instance = instance, plan_rules.as_planned(instance, plan)
    violations = [*plan_rules.partition_violations(instance, plan), *plan_rules.edge_violations(instance, plan)]
    violations += [*_degree_violations(instance, plan), *_in_flight_violations(plan)]
    choices = []
    for number, stage in enumerate(plan.stages, start=1):
        chosen, faults = plan_rules.chosen_tmpcs(instance, stage, number)
        choices.append(chosen)
        violations += faults
    in_flight = _in_flight(plan)
    stashes = under.name is ScheduleName.PIPEDREAM
    memory_bytes = _memory_bytes(plan, choices, in_flight, given.versions_in_fixed if stashes else None)
    violations += _memory_violations(instance, plan, memory_bytes, in_flight)
    violations += (x for x in restrictions.violations(given, plan) if x not in violations)
    if not violations and restrictions.has(SustainedRate):
        violations += _unsustained(given, plan)
    if violations:
        raise InvalidPlan(violations)
    evaluation = _cost(instance, plan, choices, in_flight, memory_bytes, syncs_each_round=stashes)
    return replace(evaluation, schedule=under)


def _of_shares(
    instance: Instance, plan: Plan, restrictions: Restrictions, schedule: Schedule, step: StepTerms
) -> Evaluation:
    """The cost of pipelines of one kind each: the batch takes as long as the slowest kind. Stages' times are shares of
    it."""
    found, violations = list[tuple[float, tuple[StageEvaluation, ...]]](), list[str]()
    for part in parts_of(instance, plan):
        if isinstance(part, str):
            violations.append(part)
            continue
        try:
            own = evaluate(part.instance, part.plan, restrictions=restrictions, schedule=schedule, step=step)
        except InvalidPlan as error:
            violations += (f"{part.kind}: {text}" for text in error.violations)
            continue
        count, share = len(plan.shares), part.instance.microbatches / instance.microbatches
        stages = tuple(
            replace(
                stage,
                time_s=share * stage.time_s,
                compute_s=share * stage.compute_s,
                communication_s=share * stage.communication_s,
                resync_s=share * stage.resync_s,
                devices=stage.devices // count,
                data_parallel_degree=stage.data_parallel_degree // count,
            )
            for stage in own.stages
        )
        found.append((share * own.time_per_sample_s, stages))
    if violations:
        raise InvalidPlan(violations)
    every = tuple(stage for _, stages in found for stage in stages)
    slowest = max(range(len(every)), key=lambda place: every[place].time_s)
    return Evaluation(
        max(time_s for time_s, _ in found), plan.devices, plan.data_parallel_sum, every, slowest, schedule
    )


def evaluation_of(
    instance: Instance, plan: Plan, simulation: Simulation, restrictions: Restrictions = Restrictions()
) -> Evaluation:
    """Returns the cost of a simulated plan. Raises InvalidPlan if it violates the memory limit or the restrictions."""
    violations = [*simulation.memory_violations, *restrictions.violations(instance, plan, simulation.schedule)]
    if violations:
        raise InvalidPlan(violations)
    timeline, microbatches = simulation.timeline, simulation.microbatches
    devices = plan.devices // simulation.schedule.v
    factor = simulation.options.all_reduce.factor * (1.0 - simulation.options.all_reduce_overlap)
    in_groups = plan_rules.lies_in_groups(instance.cluster, plan, simulation.schedule)
    kinds = [stage.kind for stage in plan.stages]
    parts: list[tuple[float, float, float]] = []
    for number, figures in enumerate(simulation.stages):
        mine = timeline.stage == number
        d = figures.data_parallel_degree
        passes = timeline.microbatches * d
        communication = float(timeline.communication_s[mine].sum()) / passes
        busy = float((timeline.end_s[mine] - timeline.start_s[mine]).sum()) / passes
        own, t = instance.cluster.of_kind(kinds[number]), figures.tensor_parallel_degree
        bandwidth = replicas_bytes_per_s(own, devices, d, t, kinds.count(kinds[number]) if in_groups else None)
        resync = factor * (d - 1) / d * figures.weights_bytes / (microbatches * bandwidth)
        if simulation.schedule.asynchronous:  # its passes include the synchronisation
            resync = 0.0
        parts.append((busy - communication, communication, resync))
    of_rank = {stage: rank for rank in reversed(simulation.ranks) for stage in rank.stages}
    ranks = [of_rank[number] for number in range(len(parts))]
    rank_s = [fsum(x for stage in rank.stages for x in parts[stage]) for rank in ranks]
    slowest = max(rank_s)
    stages = tuple(
        StageEvaluation(
            time_s=fsum(part),
            compute_s=part[0],
            communication_s=part[1],
            resync_s=part[2],
            memory_bytes=rank.peak_memory_bytes,
            activation_bytes=rank.peak_memory_bytes - rank.fixed_memory_bytes,
            memory_limit_bytes=rank.memory_limit_bytes,
            in_flight_microbatches=rank.in_flight[rank.stages.index(number)],
            devices=stage.devices,
            data_parallel_degree=stage.data_parallel_degree,
            tensor_parallel_degree=stage.tensor_parallel_degree,
            binding=binding(rank.memory_limit_bytes, slowest, rank_s[number], rank.peak_memory_bytes),
        )
        for number, (stage, part, rank) in enumerate(zip(plan.stages, parts, ranks, strict=True))
    )
    return Evaluation(
        simulation.time_per_sample_s,
        devices,
        plan.data_parallel_sum // simulation.schedule.v,
        stages,
        rank_s.index(slowest),
        simulation.schedule,
    )


def _checked(instance: Instance | Source, plan: Plan, restrictions: Restrictions) -> Instance:
    from piper_ray.model import arguments
    from piper_ray.workloads.formats.load import instance_of
    from piper_ray.workloads.formats.objects import check_plan

    arguments.of_kind("plan", plan, Plan, "a Plan (load_plan reads one)")
    arguments.of_kind("restrictions", restrictions, Restrictions, "Restrictions")
    check_plan(plan)
    return instance_of(instance)


def _in_flight(plan: Plan) -> list[int]:
    """Returns y of each stage: given by the plan, or else by the paper's rule; 0 if d is less than 1."""
    degrees = [stage.data_parallel_degree for stage in plan.stages]
    if plan.in_flight is not None and len(plan.in_flight) == len(degrees):
        return list(plan.in_flight)
    return [in_flight_microbatches(sum(degrees[i:]), d) if d >= 1 else 0 for i, d in enumerate(degrees)]


def _in_flight_violations(plan: Plan) -> list[str]:
    kept = plan.in_flight
    if kept is None:
        return []
    if len(kept) != len(plan.stages):
        return [f"the plan says of {len(kept)} stages what they keep in flight, but has {len(plan.stages)}"]
    return [f"stage {number}: keeps {y} microbatches in flight" for number, y in enumerate(kept, start=1) if y < 1]


def _unsustained(instance: Instance, plan: Plan) -> list[str]:
    """Simulates an asynchronous plan. Reports a violation if replicas that take turns do not keep the slowest stage
    busy."""
    from piper_ray.simulate.run import simulate

    found = simulate(instance, plan, PAPERS_SCHEDULE)
    if found.keeps_promise:
        return []
    promised_s = (found.promised_s or 0.0) / found.microbatches
    return [
        f"its rate is not sustained: {promised_s:.6g} s per microbatch, but {found.time_per_sample_s:.6g} s simulated"
    ]


def _degree_violations(instance: Instance, plan: Plan) -> list[str]:
    violations = []
    for number, stage in enumerate(plan.stages, start=1):
        d, t = stage.data_parallel_degree, stage.tensor_parallel_degree
        if d < 1:
            violations.append(f"stage {number}: data-parallel degree {d} is less than 1")
        elif instance.microbatches % d != 0:
            violations.append(
                f"stage {number}: data-parallel degree {d} does not divide the {instance.microbatches} microbatches"
            )
        if t < 1:
            violations.append(f"stage {number}: tensor-parallel degree {t} is less than 1")
    violations += plan_rules.device_violations(instance, plan)
    if plan.data_parallel_sum > instance.data_parallel_limit:
        violations.append(
            f"the data-parallel degrees sum to {plan.data_parallel_sum}, more than {instance.data_parallel_limit}, "
            f"the lesser of {instance.microbatches} microbatches and {instance.devices} devices"
        )
    return violations


def _memory_bytes(
    plan: Plan, choices: Sequence[dict[int, Tmpc]], in_flight: Sequence[int], stashed: int | None
) -> list[float]:
    """Returns for each stage the bytes on each of its devices: a y + b, and the d-th part of what the replicas share
    out; 0 if d is less than 1. Layers with an invalid TMPC are left out. stashed: the number of versions of the weights
    in b, if each microbatch in flight has one; None: b does not depend on what is in flight."""
    needed = []
    for stage, chosen, y in zip(plan.stages, choices, in_flight, strict=True):
        d = stage.data_parallel_degree
        parts: list[float] = []
        for tmpc in chosen.values() if d >= 1 else ():
            fixed_bytes = tmpc.fixed_bytes
            if stashed is not None:
                fixed_bytes = max(0.0, fixed_bytes - stashed * tmpc.weights_bytes) + y * tmpc.weights_bytes
            parts += (tmpc.activation_bytes * y, fixed_bytes, tmpc.shared_bytes / d)
        needed.append(fsum(parts))
    return needed


def _memory_violations(
    instance: Instance, plan: Plan, memory_bytes: Sequence[float], in_flight: Sequence[int]
) -> list[str]:
    """Reports the stages over the limit."""
    violations = []
    for number, (stage, needed, y) in enumerate(zip(plan.stages, memory_bytes, in_flight, strict=True), start=1):
        limit = instance.cluster.of_kind(stage.kind).memory_bytes
        if not _fits(needed, limit):
            held, more, there = f"{needed:.0f} bytes", f"{needed - limit:.6g}", f"{limit:.0f}"
            if limit >= 2**20:
                held, more, there = bytes_text(needed), bytes_text(needed - limit), bytes_text(limit)
            violations.append(
                f"stage {number}: needs {held} on each device with {y} microbatches in flight, "
                f"{more} more than the {there} there are"
            )
    return violations


def _fits(needed_bytes: float, limit_bytes: float) -> bool:
    return needed_bytes <= limit_bytes * (1.0 + MEMORY_TOLERANCE)


def binding(limit_bytes: float, slowest_s: float, time_s: float, memory_bytes: float) -> tuple[Binding, ...]:
    """Returns what limits a stage. slowest_s: of the plan's stages. limit_bytes: of the stage's devices."""
    reasons: dict[Binding, bool] = {
        "time": time_s >= slowest_s * (1.0 - TIME_BINDS),
        "memory": memory_bytes >= limit_bytes * MEMORY_BINDS,
    }
    return tuple(name for name, binds in reasons.items() if binds)


def _cost(
    instance: Instance,
    plan: Plan,
    choices: Sequence[dict[int, Tmpc]],
    in_flight: Sequence[int],
    memory_bytes: Sequence[float],
    *,
    syncs_each_round: bool,
) -> Evaluation:
    """Returns the cost. syncs_each_round: replicas of a stage sum their gradients after one microbatch each, and not
    after all."""
    crossing = _crossing_bytes(instance, plan, choices)
    parts = []
    for stage, chosen, cut_bytes in zip(plan.stages, choices, crossing, strict=True):
        links = links_holding(instance.cluster.of_kind(stage.kind), plan.span)
        summed = stage.data_parallel_degree if syncs_each_round else instance.microbatches
        parts.append(_time_parts_s(links, stage, chosen, cut_bytes, summed))
    times = [fsum(part) for part in parts]
    slowest = objective_s(times)
    stages = []
    for stage, chosen, y, (compute, communication, resync), time, held_bytes in zip(
        plan.stages, choices, in_flight, parts, times, memory_bytes, strict=True
    ):
        limit_bytes = instance.cluster.of_kind(stage.kind).memory_bytes
        stages.append(
            StageEvaluation(
                time_s=time,
                compute_s=compute,
                communication_s=communication,
                resync_s=resync,
                memory_bytes=held_bytes,
                activation_bytes=y * fsum([tmpc.activation_bytes for tmpc in chosen.values()]),
                memory_limit_bytes=limit_bytes,
                in_flight_microbatches=y,
                devices=stage.devices,
                data_parallel_degree=stage.data_parallel_degree,
                tensor_parallel_degree=stage.tensor_parallel_degree,
                binding=binding(limit_bytes, slowest, time, held_bytes),
            )
        )
    return Evaluation(slowest, plan.devices, plan.data_parallel_sum, tuple(stages), times.index(slowest))


def _crossing_bytes(instance: Instance, plan: Plan, choices: Sequence[dict[int, Tmpc]]) -> list[dict[float, float]]:
    """Returns the communicated bytes of each stage, by rate. An edge with one end in the stage is charged twice
    (forwards and backwards), with its layer's extras. A tensor with some ends in the stage and others outside is
    charged once, whatever the number of its ends.
    """
    stage_of = {layer: number for number, chosen in enumerate(choices) for layer in chosen}
    terms: list[dict[float, list[float]]] = [defaultdict(list) for _ in choices]
    unpassed = frozenset[tuple[int, int]]() if plan.places is None else plan_rules.unpassed_edges(instance)
    for edge in instance.edges:
        source, target = stage_of[edge.source], stage_of[edge.target]
        if source != target:
            size, rate = edge.communication_bytes, _between_bytes_per_s(instance, plan, source, target)
            if plan.places is not None and (edge.source, edge.target) in unpassed:
                rate = _placed_bytes_per_s(instance.cluster, plan, plan.places, target)
            sent = choices[source][edge.source].backward_sync_bytes.get(edge.target, 0.0)
            received = choices[target][edge.target].forward_sync_bytes.get(edge.source, 0.0)
            terms[source][rate] += (size, sent)
            terms[target][rate] += (size, received)
    tensors: list[dict[float, list[float]]] = [defaultdict(list) for _ in choices]
    for tensor in instance.tensors:
        ends = sorted({stage_of[layer] for layer in tensor.layers})
        rate = min(_between_bytes_per_s(instance, plan, one, other) for one in ends for other in ends)
        for number in ends if len(ends) > 1 else ():
            tensors[number][rate] += (tensor.forward_bytes, tensor.backward_bytes)
    return [
        {rate: 2.0 * fsum(edges.get(rate, ())) + fsum(cut.get(rate, ())) for rate in edges | cut}
        for edges, cut in zip(terms, tensors, strict=True)
    ]


def _between_bytes_per_s(instance: Instance, plan: Plan, source: int, target: int) -> float:
    """Returns the rate between two stages: that between their kinds, or that of the outermost link of the plan."""
    one, other = plan.stages[source].kind, plan.stages[target].kind
    if one != other and instance.cluster.between_bytes_per_s is not None:
        return instance.cluster.between_bytes_per_s
    return links_holding(instance.cluster.of_kind(one), plan.span)[-1][1]


def _placed_bytes_per_s(cluster: Cluster, plan: Plan, places: Sequence[int], stage: int) -> float:
    """Returns the rate between a stage and the one before it: that of the least group with all devices of both."""
    first, last = places[stage], places[stage - 1] + plan.stages[stage - 1].devices - 1
    links = links_holding(cluster, plan.span)
    return next((rate for size, rate in links[:-1] if first // size == last // size), links[-1][1])


def _time_parts_s(
    links: Sequence[tuple[int, float]],
    stage: Stage,
    chosen: dict[int, Tmpc],
    crossing_bytes: dict[float, float],
    microbatches: int,
) -> tuple[float, float, float]:
    """Returns compute, communication over the cut, and weight resynchronisation of a stage, in s per sample. links:
    from ``links_holding``. crossing_bytes: by rate. microbatches: the number after which gradients are summed.

    4(d-1)/d is PipeDream's parameter-server model of all-reduce: under 2bw for the N microbatches of a batch.
    """
    d, t = stage.data_parallel_degree, stage.tensor_parallel_degree
    compute = fsum([tmpc.time_per_sample_s for tmpc in chosen.values()]) / d
    weights = fsum([tmpc.weights_bytes for tmpc in chosen.values()])
    resync = 4.0 * (d - 1) / d * weights / (microbatches * _ring_bytes_per_s(links, d, t))
    return compute, fsum(size / (d * rate) for rate, size in crossing_bytes.items()), resync


def links_holding(cluster: Cluster, devices: int) -> list[tuple[int, float]]:
    """Returns group sizes and bandwidths, the smallest groups first, up to the group that holds a plan on ``devices``
    devices.

    A plan that fits in one node is placed in one. A search considers plans of all sizes, so it passes all devices.
    """
    found: list[tuple[int, float]] = []
    through = [_through_bytes_per_s(cluster.links[: index + 1]) for index in range(len(cluster.links))]
    for index, link in enumerate(cluster.links):
        size = cluster.devices if link.devices is None else link.devices
        found.append((size, max(through[index:])))
        if cluster.packed and devices <= size:
            break
    return found


def _through_bytes_per_s(links: Sequence[Link]) -> float:
    """Returns what each device sends by the last of these links while all others send: a share of each uplink on the
    way."""
    ways = [(x.uplink_bytes_per_s, x.devices) for x in links[:-1]]
    shares = [uplink / devices for uplink, devices in ways if uplink is not None and devices is not None]
    return min([links[-1].bandwidth_bytes_per_s, *shares])


def replicas_bytes_per_s(cluster: Cluster, devices: int, d: int, t: int, stages: int | None = None) -> float:
    """The rate of a ring through d replicas, in a plan of this many devices; inf for one replica. stages: those of a
    plan whose links follow from the places of its stages. With several sites the replicas at each have that many links
    to the next."""
    if cluster.between_bytes_per_s is not None and (count := len(cluster.sites)) > 0:
        inside = replicas_bytes_per_s(cluster.at_site, devices // count, d // count, t, stages)
        return min(inside, d // count * cluster.between_bytes_per_s)
    if stages is not None:
        return best_ring(cluster, d, t, stages, replicas_bytes_per_s)
    return _ring_bytes_per_s(links_holding(cluster, devices), d, t)


def _ring_bytes_per_s(links: Sequence[tuple[int, float]], d: int, t: int) -> float:
    """Returns the bandwidth of a ring through d replicas. links: from ``links_holding``.

    It proceeds from the innermost groups outwards. Where a ring leaves groups that hold several replicas each, it has
    that many links out of each group. Replicas count as sharing a group only if they do so wherever other stages are: a
    group is divided by its prime factors, the least first, and the number of devices of the replicas that share it must
    be one of these divisors.
    """
    carried, near, sizes = float("inf"), 1, [1]
    *inner, (_, between) = links
    for size, bandwidth in inner:
        while sizes[-1] < size:
            left = size // sizes[-1]
            sizes.append(sizes[-1] * next(factor for factor in range(2, left + 1) if left % factor == 0))
        more = max((x // t for x in sizes if x % t == 0 and d % (x // t) == 0), default=1)
        if more > near:
            carried, near = min(carried, near * bandwidth), more
    return min(carried, near * between) if d > near else carried
