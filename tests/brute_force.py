"""The plainest solver there is, for a handful of layers: tries everything, in exact rational arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import chain, combinations, product

from piper_ray.evaluate import MEMORY_TOLERANCE, evaluate
from piper_ray.model.constraints import Recompute, Restrictions
from piper_ray.model.errors import InvalidPlan
from piper_ray.model.instance import Instance, Tmpc
from piper_ray.model.plan import Plan, Stage
from tests.link_rates import between, groups, ring

Choice = tuple[tuple[int, Tmpc], ...]
"""The TMPC of each layer of a stage."""


@dataclass(frozen=True)
class BruteForce:
    """The best plan: of the least time_per_sample_s, then the fewest devices, then the fewest stages."""

    time_per_sample_s: Fraction
    plan: Plan


def brute_force(instance: Instance, restrictions: Restrictions | None = None) -> BruteForce | None:
    """Every chain of stages with every d and t, each stage with the best of all its TMPC choices; None: infeasible."""
    restrictions = restrictions or Restrictions()
    if restrictions.recompute is Recompute.ONE_FOR_ALL:
        settings = [restrictions.with_recompute(rule) for rule in (Recompute.NEVER, Recompute.ALWAYS)]
        found = [x for x in (brute_force(instance, setting) for setting in settings) if x is not None]
        return min(found, key=lambda x: (x.time_per_sample_s, x.plan.devices, len(x.plan.stages)), default=None)
    sizes = [size for size, _ in groups(instance, instance.devices)]
    within = (_brute_force(instance, restrictions, min(size, instance.devices)) for size in sizes)
    found = [x for x in within if x is not None]
    return min(found, key=lambda x: (x.time_per_sample_s, x.plan.devices, len(x.plan.stages)), default=None)


def brute_force_on_all(instance: Instance) -> BruteForce | None:
    """Of plans at the links that one on all devices has, whatever nodes they may lie in."""
    return _brute_force(instance, Restrictions(), instance.devices)


def _brute_force(instance: Instance, restrictions: Restrictions, most: int) -> BruteForce | None:
    """On at most a number of devices, at the links that a plan on all of them has."""
    order = [layer.id for layer in instance.layers]

    @cache
    def best_choice(layers: tuple[int, ...], d: int, t: int, y: int) -> tuple[Fraction, Choice] | None:
        fitting = (
            (_time(instance, choice, d, t, most), number, choice)
            for number, choice in enumerate(fitting_choices(instance, layers, d, t, y, restrictions.recompute))
        )
        least = min(fitting, default=None)  # ``number`` is unique: TMPCs are never compared
        return None if least is None else (least[0], least[2])

    best: tuple[tuple[Fraction, int, int], list[Stage]] | None = None

    def extend(placed: frozenset[int], k: int, s: int, slowest: Fraction, stages: list[Stage]) -> None:
        """Puts one more stage before those placed, which run on k devices with degrees summing to s."""
        nonlocal best
        if len(placed) == len(order):
            key = (slowest, k, len(stages))
            if best is None or key < best[0]:
                best = key, stages
            return
        for layers in next_stages(instance, placed):
            for d, t in degrees_of(instance, restrictions):
                if k + d * t > most or s + d > instance.data_parallel_limit:
                    continue
                found = best_choice(layers, d, t, -(-(s + d) // d))
                if found is not None:
                    time, choice = found
                    stage = Stage(layers, d, t, {layer: tmpc.id for layer, tmpc in choice})
                    extend(placed | set(layers), k + d * t, s + d, max(slowest, time), [stage, *stages])

    extend(frozenset(), 0, 0, Fraction(0), [])
    return None if best is None else BruteForce(best[0][0], Plan(tuple(best[1])))


def least_evaluated_time_s(
    instance: Instance, schedule: str = "2bw", restrictions: Restrictions = Restrictions()
) -> float | None:
    """The least time that ``evaluate`` gives to any plan at all; for two or three layers."""
    times = (_evaluated_time_s(instance, plan, schedule, restrictions) for plan in _all_plans(instance))
    return min((time for time in times if time is not None), default=None)


def least_stage_time(
    instance: Instance, layers: tuple[int, ...], d: int, t: int, y: int, recompute: Recompute = Recompute.AUTO
) -> Fraction | None:
    """The least time of one stage over all TMPC choices that fit with y microbatches in flight; None: none fits."""
    fitting = fitting_choices(instance, layers, d, t, y, recompute)
    return min((_time(instance, choice, d, t, instance.devices) for choice in fitting), default=None)


def _evaluated_time_s(instance: Instance, plan: Plan, schedule: str, restrictions: Restrictions) -> float | None:
    try:
        return evaluate(instance, plan, schedule=schedule, restrictions=restrictions).time_per_sample_s
    except InvalidPlan:
        return None


def _all_plans(instance: Instance) -> Iterator[Plan]:
    """Every way to number the layers' stages, with every d and t up to K and every TMPC, whether valid or not."""
    order = [layer.id for layer in instance.layers]
    for count in range(1, len(order) + 1):
        for stage_of in product(range(count), repeat=len(order)):
            groups = [tuple(v for v, i in zip(order, stage_of, strict=True) if i == stage) for stage in range(count)]
            degrees = list(product(range(1, instance.devices + 1), instance.degrees))
            for combination in product(degrees, repeat=count):
                if sum(d * t for d, t in combination) > instance.devices:
                    continue
                choices = [
                    _choices(instance, layers, t, Recompute.AUTO)
                    for layers, (_, t) in zip(groups, combination, strict=True)
                ]
                for chosen in product(*choices):
                    yield Plan(
                        tuple(
                            Stage(layers, d, t, {layer: tmpc.id for layer, tmpc in choice})
                            for layers, (d, t), choice in zip(groups, combination, chosen, strict=True)
                        )
                    )


def next_stages(instance: Instance, placed: frozenset[int]) -> Iterator[tuple[int, ...]]:
    """Sets of layers all of whose successors are placed or among themselves."""
    rest = [layer.id for layer in instance.layers if layer.id not in placed]
    for layers in chain.from_iterable(combinations(rest, size) for size in range(1, len(rest) + 1)):
        done = placed | set(layers)
        if all(edge.target in done for edge in instance.edges if edge.source in layers):
            yield layers


def degrees_of(instance: Instance, restrictions: Restrictions) -> list[tuple[int, int]]:
    return [
        (d, t)
        for d in range(1, instance.data_parallel_limit + 1)
        if instance.microbatches % d == 0 and restrictions.admits_data_parallel_degree(d)
        for t in instance.degrees
        if restrictions.admits_tensor_parallel_degree(t)
    ]


def fitting_choices(
    instance: Instance, layers: tuple[int, ...], d: int, t: int, y: int, recompute: Recompute
) -> Iterator[Choice]:
    """Those of a stage that fit with y microbatches in flight."""
    limit = Fraction(instance.memory_bytes) * (1 + Fraction(MEMORY_TOLERANCE))
    choices = _choices(instance, layers, t, recompute)
    return (choice for choice in choices if _runs_on(choice, d) and _memory(choice, y, d) <= limit)


def _choices(instance: Instance, layers: tuple[int, ...], t: int, recompute: Recompute) -> list[Choice]:
    offered = [instance.layer_by_id[layer].tmpcs.get(t, ()) for layer in layers]
    if recompute is Recompute.FIRST_K:
        return [
            choice
            for chosen in product(*offered)
            if first_k(instance, choice := tuple(zip(layers, chosen, strict=True)), t)
        ]
    role_of_stage: dict[Recompute, list[bool | None]] = {
        Recompute.AUTO: [None],
        Recompute.ALWAYS: [True],
        Recompute.NEVER: [False],
        Recompute.ALL_OR_NONE: [False, True],
    }
    return [
        tuple(zip(layers, choice, strict=True))
        for role in role_of_stage[recompute]
        for choice in product(*(_allowed(tmpcs, role) for tmpcs in offered))
    ]


def file_order(instance: Instance) -> list[int]:
    """The layers as in the file, but for those that have to wait for others."""
    left, order = [layer.id for layer in instance.layers], []
    while left:
        ready = (v for v in left if all(edge.source in order for edge in instance.edges if edge.target == v))
        order.append(next(ready))
        left.remove(order[-1])
    return order


def first_k(instance: Instance, choice: Choice, t: int) -> bool:
    """Of the layers that have the choice, none recomputes behind one that does not."""
    inside = dict(choice)
    free = [v for v in file_order(instance) if v in inside and _has_choice(instance, v, t)]
    roles = [inside[v].recompute for v in free]
    return roles == sorted(roles, reverse=True)


def _has_choice(instance: Instance, layer: int, t: int) -> bool:
    return {tmpc.recompute for tmpc in instance.layer_by_id[layer].tmpcs.get(t, ())} == {False, True}


def _allowed(tmpcs: tuple[Tmpc, ...], role: bool | None) -> tuple[Tmpc, ...]:
    """A layer that has only one kind keeps it."""
    if role is None or all(tmpc.recompute != role for tmpc in tmpcs):
        return tmpcs
    return tuple(tmpc for tmpc in tmpcs if tmpc.recompute == role)


def _runs_on(choice: Choice, d: int) -> bool:
    return all(tmpc.least_data_parallel_degree <= d for _, tmpc in choice)


def _memory(choice: Choice, y: int, d: int) -> Fraction:
    parts = (
        Fraction(tmpc.activation_bytes) * y + Fraction(tmpc.fixed_bytes) + Fraction(tmpc.shared_bytes) / d
        for _, tmpc in choice
    )
    return sum(parts, Fraction(0))


def _time(instance: Instance, choice: Choice, d: int, t: int, devices: int) -> Fraction:
    """devices: of the plan."""
    inside = dict(choice)
    compute, crossing, weights = Fraction(0), Fraction(0), Fraction(0)
    for tmpc in inside.values():
        compute += Fraction(tmpc.time_per_sample_s)
        weights += Fraction(tmpc.weights_bytes)
    for edge in instance.edges:
        if edge.target in inside and edge.source not in inside:
            extra = inside[edge.target].forward_sync_bytes[edge.source]
            crossing += 2 * (Fraction(edge.communication_bytes) + Fraction(extra))
        if edge.source in inside and edge.target not in inside:
            extra = inside[edge.source].backward_sync_bytes[edge.target]
            crossing += 2 * (Fraction(edge.communication_bytes) + Fraction(extra))
    for tensor in instance.tensors:
        held = [layer in inside for layer in tensor.layers]
        if any(held) and not all(held):
            crossing += Fraction(tensor.forward_bytes) + Fraction(tensor.backward_bytes)
    resync = Fraction(4 * (d - 1), d) * weights / (instance.microbatches * ring(instance, devices, d, t))
    return compute / d + crossing / (d * between(instance, devices)) + resync
