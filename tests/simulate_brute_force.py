"""Every plan of a small instance under gpipe or 1f1b, simulated: the optimum, and how many plans were tried.

The model: one d and one t for all stages, d p t devices, memory a y + b with y by the schedule. Of the
TMPC choices of a stage only those are tried that are as fast as others in all three of forward pass, backward pass and
all-reduce: shorter passes never make a pipeline slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import chain, combinations, product
from math import prod

from piper_ray.model.instance import Instance, Tmpc, divisors
from piper_ray.model.plan import Plan, Stage
from piper_ray.simulate.run import simulate
from piper_ray.simulate.stages import pass_times

MEMORY_TOLERANCE = 1e-9

Choice = tuple[tuple[int, Tmpc], ...]


def candidates(instance: Instance, schedule: str) -> Iterator[tuple[int, Iterator[Plan]]]:
    """For each d, t and way to cut the layers: how many choices of TMPCs there are, and the plans."""
    for d in divisors(instance.microbatches):
        m = instance.microbatches // d
        for t in instance.degrees:
            choices = _choices(instance, d, t)
            for p in range(1, min(len(instance.layers), instance.devices // (d * t)) + 1):
                for stages in cuts(instance, p):
                    kept = [m if schedule == "gpipe" else min(m, p - j) for j in range(p)]
                    offered = [choices(layers, y) for layers, y in zip(stages, kept, strict=True)]
                    if count := prod(map(len, offered)):
                        yield count, (_plan(chosen, d, t) for chosen in product(*offered))


def least_simulated_s(instance: Instance, schedule: str) -> float | None:
    """Per sample; None where no plan fits."""
    times = (
        simulate(instance, plan, schedule).time_per_sample_s
        for _, plans in candidates(instance, schedule)
        for plan in plans
    )
    return min(times, default=None)


def _plan(chosen: tuple[Choice, ...], d: int, t: int) -> Plan:
    return Plan(
        tuple(Stage(tuple(v for v, _ in choice), d, t, {v: tmpc.id for v, tmpc in choice}) for choice in chosen)
    )


def _choices(instance: Instance, d: int, t: int):  # type: ignore[no-untyped-def]
    @cache
    def choices(layers: tuple[int, ...], y: int) -> tuple[Choice, ...]:
        found: list[tuple[tuple[float, ...], Choice]] = []
        for tmpcs in product(*(instance.layer_by_id[layer].tmpcs.get(t, ()) for layer in layers)):
            choice = tuple(zip(layers, tmpcs, strict=True))
            needed = sum(tmpc.activation_bytes * y + tmpc.fixed_bytes + tmpc.shared_bytes / d for tmpc in tmpcs)
            if needed <= instance.memory_bytes * (1 + MEMORY_TOLERANCE) and all(
                tmpc.least_data_parallel_degree <= d for tmpc in tmpcs
            ):
                found.append((_loads(instance, choice), choice))
        return tuple(
            choice
            for index, (loads, choice) in enumerate(found)
            if not any(
                all(x <= y for x, y in zip(other, loads, strict=True)) and (other != loads or number < index)
                for number, (other, _) in enumerate(found)
            )
        )

    return choices


def _loads(instance: Instance, choice: Choice) -> tuple[float, ...]:
    """Forward and backward work, weights, and bytes across the border: what a stage's time grows with."""
    inside = dict(choice)
    passes = [pass_times(tmpc) for tmpc in inside.values()]
    extra = sum(
        inside[e.target].forward_sync_bytes.get(e.source, 0.0)
        for e in instance.edges
        if e.target in inside and e.source not in inside
    )
    extra += sum(
        inside[e.source].backward_sync_bytes.get(e.target, 0.0)
        for e in instance.edges
        if e.source in inside and e.target not in inside
    )
    extra_s = extra / instance.bandwidth_bytes_per_s
    return (
        sum(x.forward_s for x in passes) + extra_s,
        sum(x.input_s + x.weight_s for x in passes) + extra_s,
        sum(tmpc.weights_bytes for tmpc in inside.values()),
    )


def cuts(instance: Instance, count: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All ways to cut the layers into a number of stages, front to back, edges running within or forwards."""
    return _back_to_front(instance, frozenset(), count)


def _back_to_front(instance: Instance, placed: frozenset[int], count: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    rest = [layer.id for layer in instance.layers if layer.id not in placed]
    if count == 0:
        if not rest:
            yield ()
        return
    sizes = range(1, len(rest) - count + 2) if count > 1 else range(len(rest), len(rest) + 1)
    for layers in chain.from_iterable(combinations(rest, size) for size in sizes):
        done = placed | set(layers)
        if all(edge.target in done for edge in instance.edges if edge.source in layers):
            for before in _back_to_front(instance, done, count - 1):
                yield (*before, layers)
