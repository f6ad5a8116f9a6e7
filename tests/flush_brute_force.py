"""Every plan under a schedule with a flush, simulated, for a handful of layers. Shares nothing with the planner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, combinations, pairwise, product
from typing import Literal

from piper_ray.model.instance import Instance, Tmpc
from piper_ray.model.plan import Plan
from tests.brute_force import first_k
from tests.link_rates import between, borders, ring_where_stages_lie, unpassed

MEMORY_TOLERANCE = 1e-9

Seconds = tuple[float, float, float]
"""Of a stage: forward, backward, synchronisation."""

Rates = tuple[float, float, float, float]
"""In bytes per second: at the border in front of a stage and at that behind it, of what may skip stages, and through
the replicas of one."""


@dataclass(frozen=True)
class BruteForce:
    """batch_s: of the best plan, with its d, t and number of stages."""

    batch_s: float
    data_parallel_degree: int
    tensor_parallel_degree: int
    stages: int


def simulated_batch_s(schedule: str, stages: Sequence[Seconds], m: int) -> float:
    """Every pass of every stage, in order of time: from its list of actions each stage does the next that is ready."""
    p = len(stages)
    lists = [actions(schedule, m, p - 1 - j) for j in range(p)]
    done: dict[tuple[int, str, int], float] = {}
    clock = [0.0] * p
    position = [0] * p
    while any(position[j] < len(lists[j]) for j in range(p)):
        for j in range(p):
            if position[j] == len(lists[j]):
                continue
            kind, k = lists[j][position[j]]
            if kind == "F":
                needs = [] if j == 0 else [(j - 1, "F", k)]
            else:
                needs = [(j, "F", k)] if j == p - 1 else [(j + 1, "B", k)]
            if any(need not in done for need in needs):
                continue
            begin = max([clock[j], *(done[need] for need in needs)])
            clock[j] = done[j, kind, k] = begin + stages[j][0 if kind == "F" else 1]
            position[j] += 1
    return max(clock[j] + stages[j][2] for j in range(p))


def actions(schedule: str, m: int, behind: int) -> list[tuple[str, int]]:
    """A stage's passes in order: kind and microbatch."""
    if schedule == "gpipe":
        return [("F", k) for k in range(m)] + [("B", k) for k in range(m)]
    warm_up = min(m, behind + 1)
    listed = [("F", k) for k in range(warm_up)]
    for k in range(m):
        listed.append(("B", k))
        if warm_up + k < m:
            listed.append(("F", warm_up + k))
    return listed


Role = bool | None | Literal["first-k"]
"""Of all layers of a stage that have the choice: whether they recompute; None: each as it likes."""


def brute_force(
    instance: Instance, schedule: str, sync: float = 4.0, roles: Sequence[Role] = (None,)
) -> BruteForce | None:
    """The plan whose simulated batch takes the least; None: no plan fits. roles: that a stage may have.

    Of a stage's choices those are simulated that no other of the stage is as good as: no pass gets shorter by a longer
    one.
    """
    best: BruteForce | None = None
    for d, t in _degrees(instance):
        m = instance.microbatches // d
        most = instance.devices // (d * t)

        @cache
        def choices(layers: tuple[int, ...], y: int, rates: Rates, d: int = d, t: int = t) -> tuple[Seconds, ...]:
            found = {x for role in roles for x in _stage_choices(instance, layers, d, t, y, sync, role, rates)}
            return tuple(x for x in found if not any(_beats(other, x) for other in found))

        for cut in partitions(instance, most):
            p = len(cut)
            held = [m if schedule == "gpipe" else min(m, p - j) for j in range(p)]
            rates = _rates(instance, p, d, t)
            for stages in product(*(choices(*stage) for stage in zip(cut, held, rates, strict=True))):
                found_s = simulated_batch_s(schedule, stages, m)
                if best is None or found_s < best.batch_s:
                    best = BruteForce(found_s, d, t, p)
    return best


def plan_batch_s(instance: Instance, plan: Plan, schedule: str, sync: float = 4.0) -> float:
    """What a plan's batch takes, simulated. Asserts that it keeps all rules."""
    d, t = plan.stages[0].data_parallel_degree, plan.stages[0].tensor_parallel_degree
    p = len(plan.stages)
    assert all(x.data_parallel_degree == d and x.tensor_parallel_degree == t for x in plan.stages)
    assert instance.microbatches % d == 0
    assert p * d * t <= instance.devices
    assert sorted(v for x in plan.stages for v in x.layers) == sorted(layer.id for layer in instance.layers)
    stage_of = {v: j for j, x in enumerate(plan.stages) for v in x.layers}
    assert all(stage_of[edge.source] <= stage_of[edge.target] for edge in instance.edges)
    m = instance.microbatches // d
    seconds = []
    for j, stage in enumerate(plan.stages):
        y = m if schedule == "gpipe" else min(m, p - j)
        chosen = {
            v: next(x for x in instance.layer_by_id[v].tmpcs[t] if x.id == stage.tmpc_ids[v]) for v in stage.layers
        }
        assert all(x.least_data_parallel_degree <= d for x in chosen.values())
        assert _memory_bytes(chosen, d, y) <= instance.memory_bytes * (1 + MEMORY_TOLERANCE)
        seconds.append(_seconds(instance, chosen, d, sync, _rates(instance, p, d, t)[j]))
    return simulated_batch_s(schedule, seconds, m)


def _degrees(instance: Instance) -> Iterator[tuple[int, int]]:
    for d in range(1, instance.microbatches + 1):
        for t in instance.degrees:
            shares_out = d % max(1, len(instance.cluster.sites)) == 0
            if shares_out and instance.microbatches % d == 0 and d * t <= instance.devices:
                yield d, t


def partitions(instance: Instance, most: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Stages front to back, up to a number, without backward edges."""
    order = [layer.id for layer in instance.layers]

    def extend(placed: frozenset[int], stages: tuple[tuple[int, ...], ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
        rest = [v for v in order if v not in placed]
        if not rest:
            yield stages
            return
        if len(stages) == most:
            return
        for layers in chain.from_iterable(combinations(rest, size) for size in range(1, len(rest) + 1)):
            done = placed | set(layers)
            if all(edge.target in done for edge in instance.edges if edge.source in layers):
                yield from extend(done, (layers, *stages))

    return extend(frozenset(), ())


def _stage_choices(
    instance: Instance, layers: tuple[int, ...], d: int, t: int, y: int, sync: float, role: Role, rates: Rates
) -> Iterator[Seconds]:
    offered = []
    for v in layers:
        row = instance.layer_by_id[v].tmpcs.get(t, ())
        row = tuple(x for x in row if role in (None, "first-k") or x.recompute == role) or row
        offered.append([x for x in row if x.least_data_parallel_degree <= d])
    for choice in product(*offered):
        chosen = dict(zip(layers, choice, strict=True))
        if role == "first-k" and not first_k(instance, tuple(chosen.items()), t):
            continue
        if _memory_bytes(chosen, d, y) <= instance.memory_bytes * (1 + MEMORY_TOLERANCE):
            yield _seconds(instance, chosen, d, sync, rates)


def _beats(one: Seconds, other: Seconds) -> bool:
    return one != other and all(x <= y for x, y in zip(one, other, strict=True))


def _memory_bytes(chosen: dict[int, Tmpc], d: int, y: int) -> float:
    return sum(x.activation_bytes * y + x.fixed_bytes + x.shared_bytes / d for x in chosen.values())


def _rates(instance: Instance, p: int, d: int, t: int) -> list[Rates]:
    """Of each stage, front to back."""
    at_borders = [1.0, *map(float, borders(instance, d * t, p)[::-1]), 1.0]
    others = float(between(instance, p * d * t)), float(ring_where_stages_lie(instance, d, t, p))
    return [(*pair, *others) for pair in pairwise(at_borders)]


def _seconds(instance: Instance, chosen: dict[int, Tmpc], d: int, sync: float, rates: Rates) -> Seconds:
    forward, backward = 0.0, 0.0
    in_front, behind, past, replicas_bandwidth = rates
    for x in chosen.values():
        share = 0.25 if x.recompute else 1.0 / 3.0
        forward_s = share * x.time_per_sample_s if x.forward_s is None else x.forward_s
        forward += forward_s
        backward += x.time_per_sample_s - forward_s
    crossing_s = 0.0
    for edge in instance.edges:
        skips = not unpassed(instance, edge.source, edge.target)
        if edge.target in chosen and edge.source not in chosen:
            size = edge.communication_bytes + chosen[edge.target].forward_sync_bytes.get(edge.source, 0.0)
            crossing_s += size / (past if skips else in_front)
        if edge.source in chosen and edge.target not in chosen:
            size = edge.communication_bytes + chosen[edge.source].backward_sync_bytes.get(edge.target, 0.0)
            crossing_s += size / (past if skips else behind)
    moved = [x for x in instance.tensors if 0 < sum(v in chosen for v in x.layers) < len(x.layers)]
    forward += crossing_s + sum(x.forward_bytes for x in moved) / past
    backward += crossing_s + sum(x.backward_bytes for x in moved) / past
    weights = sum(x.weights_bytes for x in chosen.values())
    return forward, backward, sync * (d - 1) / d * weights / replicas_bandwidth
