"""Every plan of a small instance under a schedule with chunks, simulated plainly: the least time of those that fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product

from piper_ray.model.constraints import Restrictions
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance, Tmpc, divisors
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.schedule import Schedule
from piper_ray.simulate.actions import ActionKind, Actions, flush_lists, stage_of_chunk
from piper_ray.simulate.stages import pass_times
from tests.link_rates import between, ring
from tests.simulate_brute_force import MEMORY_TOLERANCE, cuts

Choice = dict[int, Tmpc]


@cache
def lists_of(schedule: Schedule, ranks: int, microbatches: int) -> tuple[Actions, ...] | None:
    try:
        return tuple(flush_lists(schedule, ranks, microbatches))
    except UsageError:
        return None


def least_step_s(instance: Instance, schedule: Schedule, restrictions: Restrictions = Restrictions()) -> float | None:
    """Of all plans with one d and one t, over d, t and p; None where none fits."""
    return min((seconds for seconds, _ in simulated_plans(instance, schedule, restrictions)), default=None)


def simulated_plans(
    instance: Instance, schedule: Schedule, restrictions: Restrictions = Restrictions()
) -> Iterator[tuple[float, tuple[int, int, tuple[Choice, ...]]]]:
    """Seconds of the step, d, t and the chunks, of all plans that fit."""
    restricted = restrictions != Restrictions()
    sites = max(1, len(instance.cluster.sites))
    for d in (d for d in divisors(instance.microbatches) if d % sites == 0):
        for t in instance.degrees:
            for p in range(1, min(instance.devices // (d * t), len(instance.layers) // schedule.v) + 1):
                lists = lists_of(schedule, p, instance.microbatches // d)
                if lists is None:
                    continue
                for chunks in cuts(instance, p * schedule.v):
                    for tmpcs in product(*(_options(instance, layer.id, d, t) for layer in instance.layers)):
                        chosen = {layer.id: tmpc for layer, tmpc in zip(instance.layers, tmpcs, strict=True)}
                        plan = tuple({layer: chosen[layer] for layer in chunk} for chunk in chunks)
                        if not _fits(instance, schedule, lists, plan, d):
                            continue
                        if restricted and any(restrictions.violations(instance, _as_plan(plan, d, t), schedule)):
                            continue
                        yield step_s(instance, schedule, lists, plan, d, t), (d, t, plan)


def _as_plan(chunks: tuple[Choice, ...], d: int, t: int) -> Plan:
    return Plan(tuple(Stage(tuple(chunk), d, t, {x: chunk[x].id for x in chunk}) for chunk in chunks))


def step_s(
    instance: Instance, schedule: Schedule, lists: tuple[Actions, ...], plan: tuple[Choice, ...], d: int, t: int
) -> float:
    """Until each rank has synchronised."""
    p = len(lists)
    rank_of = {stage: r for r in range(p) for stage in schedule.stages_of_rank(r, p)}
    ends_s = rank_ends_s(schedule, lists, _seconds(instance, plan, rank_of, float(between(instance, p * d * t))))
    weights_bytes = [0.0] * p
    for stage, choice in enumerate(plan):
        weights_bytes[rank_of[stage]] += sum(tmpc.weights_bytes for tmpc in choice.values())
    sync = 4.0 * (d - 1) / d / float(ring(instance, p * d * t, d, t))
    return max(end_s + sync * weights for end_s, weights in zip(ends_s, weights_bytes, strict=True))


def rank_ends_s(
    schedule: Schedule, lists: Sequence[Actions], seconds: Sequence[tuple[float, float, float]]
) -> list[float]:
    """When each rank has done its list: rank after rank does what it can until all is done.

    seconds: of each stage, forward, gradients of inputs and of weights.
    """
    p, stages = len(lists), len(seconds)
    ended: dict[tuple[str, int, int], float] = {}
    position, clock = [0] * p, [0.0] * p
    while any(position[r] < len(lists[r]) for r in range(p)):
        moved = False
        for r in range(p):
            mine = schedule.stages_of_rank(r, p)
            while position[r] < len(lists[r]):
                kind, chunk, microbatch = lists[r][position[r]].tolist()
                stage = mine[chunk]
                if kind == ActionKind.F:
                    needs = [("F", stage - 1, microbatch)] if stage else []
                elif kind == ActionKind.W:
                    needs = [("B", stage, microbatch)]
                else:
                    needs = [("F", stage, microbatch)]
                    needs += [("B", stage + 1, microbatch)] if stage + 1 < stages else []
                if any(need not in ended for need in needs):
                    break
                forward, inputs, weights = seconds[stage]
                takes = {
                    ActionKind.F: forward,
                    ActionKind.B: inputs + weights,
                    ActionKind.I: inputs,
                    ActionKind.W: weights,
                }[ActionKind(kind)]
                clock[r] = max([clock[r], *(ended[need] for need in needs)]) + takes
                if kind != ActionKind.W:
                    ended["F" if kind == ActionKind.F else "B", stage, microbatch] = clock[r]
                position[r] += 1
                moved = True
        assert moved, "ranks wait for each other"
    return clock


def _seconds(
    instance: Instance, plan: tuple[Choice, ...], rank_of: dict[int, int], bandwidth: float
) -> list[tuple[float, float, float]]:
    stage_of = {layer: stage for stage, choice in enumerate(plan) for layer in choice}
    forward, backward = [0.0] * len(plan), [0.0] * len(plan)
    for edge in instance.edges:
        source, target = stage_of[edge.source], stage_of[edge.target]
        if rank_of[source] != rank_of[target]:
            sent = edge.communication_bytes + plan[source][edge.source].backward_sync_bytes.get(edge.target, 0.0)
            got = edge.communication_bytes + plan[target][edge.target].forward_sync_bytes.get(edge.source, 0.0)
            for stage, size in ((source, sent), (target, got)):
                forward[stage] += size
                backward[stage] += size
    for tensor in instance.tensors:
        stages = {stage_of[layer] for layer in tensor.layers}
        if len({rank_of[stage] for stage in stages}) > 1:
            for stage in stages:
                forward[stage] += tensor.forward_bytes
                backward[stage] += tensor.backward_bytes
    found = []
    for stage, choice in enumerate(plan):
        passes = [pass_times(tmpc) for tmpc in choice.values()]
        found.append(
            (
                sum(x.forward_s for x in passes) + forward[stage] / bandwidth,
                sum(x.input_s for x in passes) + backward[stage] / bandwidth,
                sum(x.weight_s for x in passes),
            )
        )
    return found


def _fits(instance: Instance, schedule: Schedule, lists: tuple[Actions, ...], plan: tuple[Choice, ...], d: int) -> bool:
    limit = instance.memory_bytes * (1.0 + MEMORY_TOLERANCE)
    p = len(lists)
    for r in range(p):
        mine = [list(plan[stage_of_chunk(schedule, p, r, c)].values()) for c in range(schedule.v)]
        held = sum(tmpc.fixed_bytes + tmpc.shared_bytes / d for chunk in mine for tmpc in chunk)
        each = [sum(tmpc.activation_bytes for tmpc in chunk) for chunk in mine]
        if held > limit:
            return False
        for kind, chunk, _ in lists[r].tolist():
            if kind == ActionKind.F:
                held += each[chunk]
                if held > limit:
                    return False
            elif kind != ActionKind.I:
                held -= each[chunk]
    return True


def _options(instance: Instance, layer: int, d: int, t: int) -> list[Tmpc]:
    row = instance.layer_by_id[layer].tmpcs.get(t, ())
    return [tmpc for tmpc in row if tmpc.least_data_parallel_degree <= d]
