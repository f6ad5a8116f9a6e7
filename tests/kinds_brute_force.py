"""Every plan on devices of several kinds, for a handful of layers: under a schedule with a flush simulated, under 2bw
valued by the referee; and small instances of that kind. Shares nothing with the planner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement, pairwise, product
from random import Random

from piper_ray.evaluate import evaluate
from piper_ray.model.cluster import Cluster, DeviceKind, Link
from piper_ray.model.constraints import Restrictions
from piper_ray.model.errors import InvalidPlan
from piper_ray.model.instance import Batch, Edge, Instance, Layer, Tensor, Tmpc
from piper_ray.model.plan import Plan, Stage
from tests.flush_brute_force import MEMORY_TOLERANCE, Seconds, partitions, simulated_batch_s
from tests.link_rates import borders, ring_where_stages_lie, unpassed, with_uplink


def least_batch_s(instance: Instance, schedule: str) -> float | None:
    """Of the best plan; None: no plan fits."""
    names = instance.cluster.kind_names
    best: float | None = None
    for d in (d for d in range(1, instance.microbatches + 1) if instance.microbatches % d == 0):
        for degrees in product(instance.degrees, repeat=len(names)):
            t_of = dict(zip(names, degrees, strict=True))
            for stages in partitions(instance, len(instance.layers)):
                for kinds in product(names, repeat=len(stages)):
                    if any(kinds.count(x) * d * t_of[x] > instance.cluster.of_kind(x).devices for x in names):
                        continue
                    for seconds in _choices(instance, schedule, stages, kinds, d, t_of):
                        found_s = simulated_batch_s(schedule, seconds, instance.microbatches // d)
                        best = found_s if best is None else min(best, found_s)
    return best


def least_sample_s(instance: Instance, asked: Restrictions = Restrictions()) -> float | None:
    """Of the best plan under 2bw, whose stages have d, t and a kind of their own; as the referee values it."""
    names, limit = instance.cluster.kind_names, instance.data_parallel_limit
    degrees = [d for d in range(1, limit + 1) if instance.microbatches % d == 0]
    best: float | None = None
    for stages in partitions(instance, len(instance.layers)):
        for how in product(product(names, degrees, instance.degrees), repeat=len(stages)):
            used = {x: sum(d * t for kind, d, t in how if kind == x) for x in names}
            if any(used[x] > instance.cluster.of_kind(x).devices for x in names) or sum(d for _, d, _ in how) > limit:
                continue
            for rows in product(*(_rows(instance, *pair) for pair in zip(stages, how, strict=True))):
                plan = Plan(tuple(Stage(tuple(x), d, t, x, kind) for x, (kind, d, t) in zip(rows, how, strict=True)))
                try:
                    found_s = evaluate(instance, plan, schedule="2bw", restrictions=asked).time_per_sample_s
                except InvalidPlan:
                    continue
                best = found_s if best is None else min(best, found_s)
    return best


def _rows(instance: Instance, layers: Sequence[int], how: tuple[str, int, int]) -> Iterator[dict[int, str]]:
    """All choices of TMPCs of a stage on a kind, with d and t."""
    kind, _, t = how
    rows = [[x.id for x in instance.layer_by_id[v].tmpcs.get(t, ()) if x.kind == kind] for v in layers]
    return (dict(zip(layers, row, strict=True)) for row in product(*rows))


def _choices(
    instance: Instance,
    schedule: str,
    stages: Sequence[tuple[int, ...]],
    kinds: Sequence[str],
    d: int,
    t_of: dict[str, int],
) -> Iterator[tuple[Seconds, ...]]:
    """What the stages take, for all choices of their TMPCs that fit."""
    m, p = instance.microbatches // d, len(stages)
    kind_of = {v: kind for layers, kind in zip(stages, kinds, strict=True) for v in layers}
    stage_of = {v: j for j, layers in enumerate(stages) for v in layers}
    of_stages = []
    rates = _rates(instance, kinds, d, t_of)
    for j, (layers, kind) in enumerate(zip(stages, kinds, strict=True)):
        y = m if schedule == "gpipe" else min(m, p - j)
        rows = [[x for x in instance.layer_by_id[v].tmpcs.get(t_of[kind], ()) if x.kind == kind] for v in layers]
        found = []
        for choice in product(*rows):
            held = sum(x.activation_bytes * y + x.fixed_bytes for x in choice)
            if held <= instance.cluster.of_kind(kind).memory_bytes * (1 + MEMORY_TOLERANCE):
                found.append(_seconds(instance, dict(zip(layers, choice, strict=True)), d, kind_of, stage_of, rates[j]))
        of_stages.append(found)
    return product(*of_stages)


def _rates(instance: Instance, kinds: Sequence[str], d: int, t_of: dict[str, int]) -> list[tuple[float, float, float]]:
    """Of each stage: at the borders in front of it and behind it, and through its replicas. Those of one kind lie on
    its devices as a pipeline of their own."""
    own = {x.name: replace(instance, cluster=x.cluster) for x in instance.cluster.kinds}
    left = {x: iter(borders(own[x], d * t_of[x], kinds.count(x))[::-1]) for x in own if x in kinds}
    at = [
        float(next(left[one])) if one == other else instance.cluster.rate_between(one, other)
        for one, other in pairwise(kinds)
    ]
    rings = [float(ring_where_stages_lie(own[x], d, t_of[x], kinds.count(x))) for x in kinds]
    return [*zip([1.0, *at], [*at, 1.0], rings, strict=True)]


def _seconds(
    instance: Instance,
    chosen: dict[int, Tmpc],
    d: int,
    kind_of: dict[int, str],
    stage_of: dict[int, int],
    rates: tuple[float, float, float],
) -> Seconds:
    cluster = instance.cluster
    one = next(iter(chosen))
    own, here = kind_of[one], stage_of[one]
    forward = sum(x.forward_s or 0.0 for x in chosen.values())
    backward = sum(x.backward_s or 0.0 for x in chosen.values())
    for edge in instance.edges:
        ends = {edge.source, edge.target}
        inside = [v for v in ends if v in chosen]
        if len(inside) == 1:
            (outside,) = ends - set(inside)
            tmpc = chosen[inside[0]]
            extra = {**tmpc.forward_sync_bytes, **tmpc.backward_sync_bytes}.get(outside, 0.0)
            rate = cluster.rate_between(own, kind_of[outside])
            if unpassed(instance, edge.source, edge.target):
                rate = rates[outside == edge.target]
            crossing_s = (edge.communication_bytes + extra) / rate
            forward += crossing_s
            backward += crossing_s
    for tensor in instance.tensors:
        ends_of = {stage_of[v]: kind_of[v] for v in tensor.layers}
        if here in ends_of and len(ends_of) > 1:
            rate = min(cluster.rate_between(*pair) for pair in combinations_with_replacement(ends_of.values(), 2))
            forward += tensor.forward_bytes / rate
            backward += tensor.backward_bytes / rate
    weights = sum(x.weights_bytes for x in chosen.values())
    return forward, backward, 4.0 * (d - 1) / d * weights / rates[2]


def levelled_kinds(seed: int, kinds: int = 2) -> Instance:
    """The same on up to six devices of each kind, in groups of their own with faster links."""
    rng, made, found = Random(f"levelled kinds {seed}"), random_kinds(seed, kinds), []
    for own in made.cluster.kinds:
        slow, sizes = own.cluster.bandwidth_bytes_per_s, rng.choice([(), (2,), (3,), (4,), (2, 4), (1, 2)])
        inner = (Link(slow * rng.choice([0.5, 2, 8, 50]), size) for size in sizes)
        links = (*(with_uplink(rng, link, slow) for link in inner), Link(slow))
        found.append(replace(own, cluster=replace(own.cluster, devices=rng.randint(2, 6), links=links)))
    return replace(made, cluster=Cluster.of_kinds(found, made.cluster.between_bytes_per_s or 0.0)).checked_as(made)


def random_kinds(seed: int, kinds: int = 2) -> Instance:
    """Two to four layers, in a chain or not, on few devices of each kind."""
    rng = Random(f"kinds {seed}")
    count = rng.randint(2, 4 if kinds == 2 else 3)
    often = rng.choice([0.3, 1.0])
    pairs = [(u, v) for u in range(count) for v in range(u + 1, count) if rng.random() < (often if v == u + 1 else 0.3)]
    names = "abc"[:kinds]
    degrees = rng.choice([(1,), (1, 2)])
    clusters = [
        DeviceKind(name, Cluster(rng.randint(1, 4), rng.uniform(8, 60), (Link(float(rng.choice([2, 8, 40]))),)))
        for name in names
    ]

    def tmpc(name: str, kind: str, v: int) -> Tmpc:
        return Tmpc(
            name,
            forward_s=rng.uniform(0.1, 4),
            backward_s=rng.uniform(0.1, 8),
            weights_bytes=rng.uniform(0, 6),
            activation_bytes=rng.uniform(0, 4),
            fixed_bytes=rng.uniform(0, 4),
            forward_sync_bytes={u: rng.uniform(0, 2) for u, w in pairs if w == v},
            backward_sync_bytes={w: rng.uniform(0, 2) for u, w in pairs if u == v},
            kind=kind,
        )

    layers = [
        Layer(
            v,
            f"layer{v}",
            {
                t: tuple(tmpc(name, kind, v) for kind in names for name in ("plain", "lean")[: rng.randint(1, 2)])
                for t in degrees
            },
        )
        for v in range(count)
    ]
    tensors = [Tensor(tuple(range(count)), rng.uniform(0, 3), rng.uniform(0, 3))] if rng.random() < 0.2 else []
    cluster = Cluster.of_kinds(clusters, float(rng.choice([1, 6])))
    edges = [Edge(*pair, rng.uniform(0, 6)) for pair in pairs]
    return Instance(layers, edges, cluster=cluster, batch=Batch(rng.choice([2, 3, 4, 6])), tensors=tensors)
