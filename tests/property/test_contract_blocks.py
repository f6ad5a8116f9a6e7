"""Planning by blocks against planning layer by layer: never better, always valid, within the bound that is reported."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

import piper_ray.engine.blocks.block_instance as by_blocks
from piper_ray.cost.variants import Variant, stage_variants
from piper_ray.engine.blocks.block_instance import build_instance
from piper_ray.engine.lattice.blocks import Blocks, find_blocks
from piper_ray.engine.lattice.contraction import contract
from piper_ray.engine.lattice.layer_graph import count_downsets, number_graph
from piper_ray.engine.solve import solve
from piper_ray.evaluate import evaluate
from piper_ray.model.constraints import Recompute, Restrictions
from piper_ray.model.errors import LimitError
from piper_ray.model.instance import Instance
from piper_ray.model.options import Contract, SolveOptions
from piper_ray.model.solution import Solution, Status
from tests.brute_force import brute_force
from tests.instances import random_instance
from tests.lengths import long_after
from tests.solver_support import ONE_THREAD

BY_BLOCKS = SolveOptions(threads=1, contract=Contract.OPERATORS)


def some_restrictions(rng: Random) -> Restrictions:
    return Restrictions(
        rng.random() < 0.8,
        rng.random() < 0.8,
        rng.choice([Recompute.AUTO, Recompute.ALWAYS, Recompute.NEVER, Recompute.ALL_OR_NONE]),
    )


def usable_variants(instance: Instance, restrictions: Restrictions) -> list[Variant]:
    return [v for v in stage_variants(instance, restrictions) if v.degree <= instance.devices]


def solve_with(most_downsets: int, instance: Instance, restrictions: Restrictions) -> Solution:
    """As ``solve``, with room for so few downsets that blocks are needed on a handful of layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_blocks, "MOST_DOWNSETS", most_downsets)
        return solve(instance, restrictions=restrictions, options=BY_BLOCKS)


@pytest.mark.parametrize("seed", long_after(1, range(2)))
def test_between_the_bound_and_the_best_of_all(seed: int) -> None:
    merged = found = 0
    for number in range(40):
        rng = Random(1000 * seed + number)
        instance = random_instance(rng.randrange(10**6), most_layers=8, most_tmpcs=2)
        restrictions = some_restrictions(rng)
        exact = solve(instance, restrictions=restrictions, options=ONE_THREAD)
        try:
            solution = solve_with(rng.randint(2, 12), instance, restrictions)
        except LimitError:
            continue
        if solution.blocks is None:
            assert (solution.status, solution.time_per_sample_s) == (exact.status, exact.time_per_sample_s)
            continue
        merged += 1
        if exact.time_per_sample_s is None:
            assert solution.status is Status.UNKNOWN
            assert solution.plan is None
            continue
        assert solution.lower_bound_s <= exact.time_per_sample_s * (1 + 1e-9)
        if solution.plan is None:
            assert solution.status is Status.UNKNOWN
            continue
        found += 1
        assert solution.time_per_sample_s is not None
        assert solution.time_per_sample_s == evaluate(instance, solution.plan).time_per_sample_s
        assert solution.time_per_sample_s >= exact.time_per_sample_s * (1 - 1e-9)
        assert solution.gap is not None
        assert exact.time_per_sample_s >= solution.time_per_sample_s * (1 - solution.gap) * (1 - 1e-9)
        assert_restrictions_kept(instance, restrictions, solution)
    assert merged > 10
    assert found > 5


def assert_restrictions_kept(instance: Instance, restrictions: Restrictions, solution: Solution) -> None:
    assert solution.plan is not None
    variants = usable_variants(instance, restrictions)
    for stage in solution.plan.stages:
        assert restrictions.data_parallelism or stage.data_parallel_degree == 1
        assert any(
            variant.degree == stage.tensor_parallel_degree
            and all(tmpc_id in {x.id for x in variant.tmpcs[layer]} for layer, tmpc_id in stage.tmpc_ids.items())
            for variant in variants
        )


@pytest.mark.parametrize("seed", long_after(4, range(16)))
def test_blocks_partition_the_layers_without_cycles_and_are_few(seed: int) -> None:
    rng = Random(seed)
    instance = random_instance(seed, most_layers=12, most_tmpcs=2)
    variants = usable_variants(instance, Restrictions())
    most = rng.randint(2, 40)
    blocks = blocks_or_none(instance, variants, most)
    if blocks is None:
        return
    assert sorted(layer for block in blocks.members for layer in block) == sorted(x.id for x in instance.layers)
    block_of = {layer: index for index, block in enumerate(blocks.members) for layer in block}
    between = {(block_of[edge.source], block_of[edge.target], 0) for edge in instance.edges}
    edges = [(tail, head, index) for tail, head, index in between if tail != head]
    assert all(tail < head for tail, head, _ in edges)
    assert count_downsets(number_graph(range(len(blocks.members)), edges)) == blocks.downsets <= most
    assert 0.0 <= blocks.largest_share <= 1.0 + 1e-9


def blocks_or_none(instance: Instance, variants: Sequence[Variant], most: int) -> Blocks | None:
    """None where no two layers have a degree in common and so nothing can be done."""
    if not all(any(variant.tmpcs[layer.id] for variant in variants) for layer in instance.layers):
        return None
    try:
        return find_blocks(instance, variants, contract(instance, variants), most)
    except LimitError:
        return None


@pytest.mark.parametrize("seed", long_after(5, range(20)))
def test_a_plan_of_blocks_costs_the_same_in_layers(seed: int) -> None:
    rng = Random(seed)
    instance = random_instance(seed, most_layers=5, most_tmpcs=2).replace(memory_bytes=1e9)
    restrictions = some_restrictions(rng)
    variants = usable_variants(instance, restrictions)
    blocks = blocks_or_none(instance, variants, 4)
    if blocks is None:
        return
    merged = build_instance(instance, variants, blocks.members)
    best = brute_force(merged.instance, restrictions)
    if best is None:
        return
    expanded = merged.expand(best.plan, instance)
    assert evaluate(instance, expanded).time_per_sample_s == pytest.approx(float(best.time_per_sample_s), rel=1e-9)
    assert solve(merged.instance, restrictions=restrictions, options=ONE_THREAD).time_per_sample_s == pytest.approx(
        float(best.time_per_sample_s), rel=1e-9
    )
