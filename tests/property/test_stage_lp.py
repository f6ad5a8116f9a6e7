"""The bound of the stage LP holds for every plan, in exact rationals: dual prices keep each stage that a plan can have.

That is what the bound's proof rests on: no stage has more price than it takes devices, so no plan takes fewer
devices than all layers have. Neither depends on the rounds, nor on the grid of times.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from random import Random

import pytest

from piper_ray.engine.evaluation.dual_prices import DualPrices, StageCover
from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.lattice.layer_graph import LayerGraph, build_graph
from piper_ray.engine.preparation import Outline
from piper_ray.engine.search import wide
from piper_ray.engine.search.pricing import bound_by_cover
from piper_ray.engine.subproblems import instances
from piper_ray.engine.tables.problem import chain_problem
from piper_ray.engine.tables.tmpc_options import build_options
from piper_ray.model.constraints import Restrictions
from piper_ray.model.instance import Instance, divisors
from tests.brute_force import brute_force_on_all, least_stage_time
from tests.instances import parallel_branches, random_instance, two_towers
from tests.lengths import long_after
from tests.link_rates import with_levels
from tests.solver_support import downsets_by_definition

COARSE, FINE = 256, wide.CELLS
FACTORS = (Fraction(9, 10), Fraction(1), Fraction(101, 100), Fraction(2))


def cover_of(instance: Instance, cells: int) -> tuple[LayerGraph, StageCover] | None:
    """Of all its layers, each by itself, as searches on wide graphs have it; None where one of them has no TMPC."""
    instance = instances(instance)[-1]
    degrees = Restrictions().data_parallel_degrees(instance)
    outline = Outline.of(instance, Restrictions())
    graph = build_graph(instance, without_contraction())
    options = build_options(instance, graph, outline.variants)
    if not all(any(of_variant[v] for of_variant in options.tmpcs) for v in range(graph.size)):
        return None
    found = StageCover.of(chain_problem(instance, graph, options, range(graph.size), degrees), cells)
    assert found is not None
    return graph, found


def assert_kept(instance: Instance, threshold: Fraction, by_layer: dict[int, Fraction]) -> int:
    """By each stage in front of any plan of what is behind it, within the threshold. Returns how many there are."""
    devices, limit = instance.devices, instance.data_parallel_limit
    downsets = downsets_by_definition(instance)
    kinds = [(d, t) for d in divisors(instance.microbatches) if d <= limit for t in instance.degrees]

    @cache
    def keeps(stage: frozenset[int], d: int, t: int, y: int) -> bool:
        time = least_stage_time(instance, tuple(stage), d, t, y)
        return time is not None and time <= threshold

    least_sum = {downsets[0]: 0}
    stages = 0
    for inner in downsets:  # smaller ones come first
        if inner not in least_sum:
            continue
        for outer in downsets:
            for d, t in kinds if inner < outer else ():
                s = least_sum[inner] + d
                if d * t > devices or s > limit or not keeps(outer - inner, d, t, -(-s // d)):
                    continue
                least_sum[outer] = min(s, least_sum.get(outer, s))
                stages += 1
                assert sum(by_layer[layer] for layer in outer - inner) <= d * t
    return stages


def exactly(graph: LayerGraph, found: DualPrices) -> dict[int, Fraction]:
    """By layer."""
    return dict(zip(graph.layer_ids, map(Fraction, found.of_vertex.tolist()), strict=True))


def of_some_kind(seed: int) -> Instance:
    """Few layers with several TMPCs, or more with one; half of them on nodes with links of their own."""
    rng = Random(f"stage LP {seed}")
    most_layers, most_tmpcs = (4, 3) if seed % 2 else (7, 1)
    instance = random_instance(seed, most_layers=most_layers, most_devices=12, most_tmpcs=most_tmpcs)
    return with_levels(rng, instance) if rng.random() < 0.5 else instance


@pytest.mark.parametrize("bucket", long_after(1, range(3)))
def test_every_stage_keeps_its_dual_prices(bucket: int) -> None:
    stages, priced = 0, 0
    for seed in range(300 + 12 * bucket, 300 + 12 * (bucket + 1)):
        instance = of_some_kind(seed)
        rng = Random(seed)
        made = cover_of(instance, rng.choice([COARSE, FINE]))
        if made is None:
            continue
        graph, cover = made
        # From too little for any plan to enough for all layers in one stage.
        work_s = sum(max(x.time_per_sample_s for row in y.tmpcs.values() for x in row) for y in instance.layers)
        for threshold_s in (work_s / 16, work_s / 6, work_s / 2):
            found = cover.dual_prices(threshold_s, rounds=rng.choice([1, 3, 60]))
            stages += assert_kept(instance, Fraction(threshold_s), exactly(graph, found))
            priced += found.devices > 0.0
    assert stages >= 300
    assert priced >= 20


@pytest.mark.parametrize("bucket", long_after(1, range(4)))
def test_no_bound_is_above_the_optimum(bucket: int) -> None:
    seen, told = 0, 0
    for seed in range(500 + 15 * bucket, 500 + 15 * (bucket + 1)):
        rng = Random(f"stage LP {seed}")
        instance = random_instance(seed, most_layers=4, most_devices=12, most_tmpcs=3)
        instance = with_levels(rng, instance) if rng.random() < 0.4 else instance
        best = brute_force_on_all(instance)
        made = cover_of(instance, FINE)
        if best is None or best.time_per_sample_s == 0 or made is None:
            continue
        seen += 1
        optimum = best.time_per_sample_s
        bound_s, _ = bound_by_cover(made[1], instance.devices, float(optimum) * 0.6, None, lambda: None, 60)
        assert Fraction(bound_s) <= optimum
        told += bound_s > 0.0
        for factor in FACTORS:
            found = made[1].dual_prices(float(optimum * factor), rounds=60)
            if factor >= 1:
                assert Fraction(found.devices) <= best.plan.devices
    assert seen >= 8
    assert told >= 5


@pytest.mark.parametrize(
    "instance",
    long_after(
        1,
        [
            two_towers(2, devices=6, microbatches=12, memory_bytes=60.0),
            two_towers(2, devices=9, microbatches=12, memory_bytes=30.0),
            parallel_branches(2, 2, devices=5, microbatches=4, memory_bytes=50.0),
            parallel_branches(1, 4, devices=12, microbatches=8, memory_bytes=1e6),
        ],
    ),
    ids=["towers", "tight towers", "branches", "wide branches"],
)
def test_families(instance: Instance) -> None:
    made = cover_of(instance, FINE)
    assert made is not None
    graph, cover = made
    for threshold_s in (8.0, 17.0):
        by_layer = exactly(graph, cover.dual_prices(threshold_s, rounds=60))
        assert sum(by_layer.values()) > 0
        assert assert_kept(instance, Fraction(threshold_s), by_layer) > 0
