"""The choice of TMPCs for a stage: its items, and the quick answer against the exact one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest

from piper_ray.engine.kernels.selection import (
    exact_fit,
    make_step_cache,
    relaxed_extra,
    stage_items,
    steps_slot,
)
from piper_ray.engine.kernels.types import StageKey
from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.lattice.layer_graph import members
from piper_ray.model.instance import Instance, Tmpc
from tests.brute_force import least_stage_time
from tests.instances import build, random_instance, tmpc
from tests.lengths import long_after
from tests.solver_support import Tables, tables


def nested_pairs(whole: Tables) -> Iterator[tuple[int, int, int, tuple[int, ...]]]:
    """(I, J, variant, layer ids of I \\ J) of all stages that have a choice of TMPCs."""
    bits, ids = whole.lattice.arrays.bits, whole.graph.layer_ids
    sets = [frozenset(members(row)) for row in bits]
    for i, outer in enumerate(sets):
        for j, inner in enumerate(sets):
            if inner < outer:
                layers = tuple(ids[v] for v in sorted(outer - inner))
                for r, variant in enumerate(whole.problem.workload.options.variants):
                    if all(variant.tmpcs[layer] for layer in layers):
                        yield i, j, r, layers


@pytest.mark.parametrize("seed", long_after(4, range(16)))
def test_items_of_a_stage(seed: int) -> None:
    instance = random_instance(seed, most_layers=5).replace(devices=4)
    whole = tables(instance, contraction=without_contraction())
    problem, options = whole.problem, whole.problem.workload.options
    rng = Random(seed)
    for i, j, r, layers in nested_pairs(whole):
        d, y = rng.randint(1, 6), rng.randint(1, 9)
        vertices, (start, cost, memory) = stage_items(StageKey(i, j, r), d, y, problem.tables)
        assert [whole.graph.layer_ids[v] for v in vertices] == list(layers)
        assert start[0] == 0
        assert start[-1] == cost.size == memory.size
        for k, v in enumerate(vertices.tolist()):
            row = options.tmpcs[r][v]
            assert start[k + 1] - start[k] == len(row)
            for o, chosen in enumerate(row, start=int(start[k])):
                expected = cost_on_one_device(instance, layers, layers[k], chosen, d)
                # What the stage pays for tensors is charged with its first layer.
                tensors = cut_tensors_on_one_device(instance, layers) if k == 0 else 0.0
                assert cost[o] == pytest.approx(expected + tensors)
                assert memory[o] == pytest.approx(
                    chosen.activation_bytes * y + chosen.fixed_bytes + chosen.shared_bytes / d
                )


def cut_tensors_on_one_device(instance: Instance, stage: tuple[int, ...]) -> float:
    cut = [t for t in instance.tensors if set(t.layers) & set(stage) and set(t.layers) - set(stage)]
    return sum(tensor.forward_bytes + tensor.backward_bytes for tensor in cut) / instance.bandwidth_bytes_per_s


def cost_on_one_device(instance: Instance, stage: tuple[int, ...], layer: int, chosen: Tmpc, d: int) -> float:
    """d times what the layer adds to the stage's time (Piper, section 3)."""
    crossing = sum(
        edge.communication_bytes + chosen.forward_sync_bytes[edge.source]
        for edge in instance.edges
        if edge.target == layer and edge.source not in stage
    ) + sum(
        edge.communication_bytes + chosen.backward_sync_bytes[edge.target]
        for edge in instance.edges
        if edge.source == layer and edge.target not in stage
    )
    bandwidth = instance.bandwidth_bytes_per_s
    resync = 4.0 * (d - 1) * chosen.weights_bytes / (instance.microbatches * bandwidth)
    return chosen.time_per_sample_s + 2.0 * crossing / bandwidth + resync


@pytest.mark.parametrize("seed", long_after(4, range(16)))
def test_exact_fit_against_brute_force(seed: int) -> None:
    instance = random_instance(seed, most_layers=4, most_tmpcs=3).replace(devices=4)
    whole = tables(instance, contraction=without_contraction())
    problem = whole.problem
    rng = Random(seed)
    for i, j, r, layers in nested_pairs(whole):
        d, y, t = rng.randint(1, 6), rng.randint(1, 4), problem.workload.options.variants[r].degree
        variant = problem.workload.options.variants[r]
        if not variant.least_data_parallel_degree <= d <= variant.most_data_parallel_degree:
            continue
        least = least_stage_time(instance, layers, d, t, y)
        for factor in (1 + 1e-10, 1 - 1e-6, 2.0):
            budget_s = factor * d * float(least if least is not None else 5)
            fits, _ = exact_fit(StageKey(i, j, r), d, y, problem.tables, budget_s)
            assert fits == (least is not None and (factor > 1 or least == 0))


def uniform_instance(rng: Random) -> Instance:
    """Layers whose options differ in p, a and b alone, of two or three kinds, so that classes hold several layers.

    Some layers have the same differences between their options and different figures.
    """
    rows = [
        [(rng.randint(0, 4), rng.randint(0, 6), rng.randint(0, 6)) for _ in range(rng.randint(1, 4))]
        for _ in range(rng.randint(1, 3))
    ]

    def layer() -> dict[int, list[Tmpc]]:
        row, more, weights = rng.choice(rows), rng.randint(0, 2), rng.randint(0, 2)
        return {
            1: [tmpc(p + more, weights, a + more, b + more, name=str(k)) for k, (p, a, b) in enumerate(row)],
        }

    count = rng.randint(1, 6)
    edges = {(v, v + 1): float(rng.randint(0, 2)) for v in range(count - 1)}
    return build({v: layer() for v in range(count)}, edges)


def test_the_relaxation_never_contradicts_exact_fit() -> None:
    told: Counter[str] = Counter()
    for seed in range(300):
        rng = Random(seed)
        whole = tables(uniform_instance(rng), contraction=without_contraction())
        problem = whole.problem
        assert problem.options.uniform.tolist() == [1]
        cache = make_step_cache(problem.tables)
        for i, j, r, _ in nested_pairs(whole):
            d, y, memory_bytes = rng.randint(1, 4), rng.randint(1, 4), rng.randint(0, 40) + 0.5
            choices = figures_of_choices(whole, i, j, r, d, y)
            fast_s, fast_bytes, _ = choices[0]
            excess_bytes = fast_bytes - memory_bytes
            if excess_bytes <= 0:
                continue
            more_s = rng.choice([rng.randint(0, 12), rng.random() * 12])
            slot, bits = steps_slot(cache, problem.options, r, d, y), problem.lattice.bits
            least_s, rounded_s = relaxed_extra(bits[j], bits[i], r, slot, excess_bytes, problem.options, cache)
            assert not cache.of_class.any()
            assert not cache.wanted.any()
            budget_s = fast_s + more_s + 1e-9
            limited = problem.tables._replace(cluster=problem.cluster._replace(memory_bytes=memory_bytes))
            exact, _ = exact_fit(StageKey(i, j, r), d, y, limited, budget_s)
            least = min((s for s, size, _ in choices if size <= memory_bytes), default=np.inf)
            assert exact == (least <= budget_s)
            assert least_s <= (least - fast_s) * (1 + 1e-12)
            assert rounded_s >= (least - fast_s) * (1 - 1e-12)
            told[
                "none fits" if least == np.inf else "exactly" if rounded_s <= least_s * (1 + 1e-12) else "between"
            ] += 1
    assert min(told["none fits"], told["between"]) > 100
    assert told["exactly"] > 3


def test_steps_of_layers_that_all_differ() -> None:
    """The relaxation's value against a sum over the stage's own steps, of more classes than a word has bits."""
    rng = Random(5)
    rows = [
        [tmpc(2, 0, 40, 0, "fast"), tmpc(2 + rng.random(), 0, 20 + rng.random(), 0), tmpc(4 + rng.random(), 0, 1, 0)]
        for _ in range(90)
    ]
    whole = tables(build({v: {1: row} for v, row in enumerate(rows)}, {(v, v + 1): 0.0 for v in range(89)}))
    problem = whole.problem
    cache, bits = make_step_cache(problem.tables), problem.lattice.bits
    assert problem.options.class_of.max() == 89
    for _ in range(300):
        (j, i), y = sorted(rng.sample(range(91), 2)), rng.randint(1, 4)
        slot = steps_slot(cache, problem.options, 0, 1, y)
        in_stage = {problem.options.class_of[0, v] for v in range(90) if v in members(bits[i] & ~bits[j])}
        steps = [k for k in range(cache.steps[slot]) if cache.step_class[slot, k] in in_stage]
        excess_bytes = rng.uniform(0.1, 1.1) * sum(cache.saved_bytes[slot, k] for k in steps)
        saved, expected_s = 0.0, 0.0
        for k in steps:
            share = min(1.0, (excess_bytes - saved) / cache.saved_bytes[slot, k])
            saved, expected_s = saved + cache.saved_bytes[slot, k], expected_s + share * cache.extra_s[slot, k]
            if share < 1.0:
                break
        least_s, _ = relaxed_extra(bits[j], bits[i], 0, slot, excess_bytes, problem.options, cache)
        assert least_s == (pytest.approx(expected_s) if saved >= excess_bytes else np.inf)


def figures_of_choices(whole: Tables, i: int, j: int, r: int, d: int, y: int) -> list[tuple[float, float, float]]:
    """(cost, memory, activation) of every choice for the stage; fastest first, of equal ones the one of least a."""
    problem = whole.problem
    vertices, (start, cost, memory) = stage_items(StageKey(i, j, r), d, y, problem.tables)
    a_bytes = [x.activation_bytes for v in vertices.tolist() for x in problem.workload.options.tmpcs[r][v]]
    ranges = [range(int(start[k]), int(start[k + 1])) for k in range(vertices.size)]
    choices = [list(choice) for choice in product(*ranges)]
    figures = [(float(cost[c].sum()), float(memory[c].sum()), sum(a_bytes[o] for o in c)) for c in choices]
    return sorted(figures, key=lambda of_choice: (of_choice[0], of_choice[2]))


def test_a_slot_is_refilled_for_another_y() -> None:
    """Of all y that come to share a slot, what counts is the one it was filled for."""
    row = [tmpc(0, 0, 3, 0, "fast"), tmpc(1, 0, 1, 10, "small")]
    problem = tables(build({0: {1: row}, 1: {1: row}}, {(0, 1): 0})).problem
    cache = make_step_cache(problem.tables)
    first = steps_slot(cache, problem.options, 0, 1, 6)
    other = next(y for y in range(7, 10**6) if steps_slot(cache, problem.options, 0, 1, y) == first)
    for y in (6, other, 6):
        slot = steps_slot(cache, problem.options, 0, 1, y)
        assert slot == first
        assert cache.y[slot] == y
        assert cache.saved_bytes[slot, 0] == 2 * y - 10
        assert cache.extra_s[slot, 0] == 1.0
    assert (
        cache.steps[steps_slot(cache, problem.options, 0, 1, 1)] == 0
    )  # at y = 1 the small one is the larger: no step


def test_a_slot_is_refilled_for_another_d_where_replicas_share() -> None:
    row = [replace(tmpc(0, 0, 0, 2, "fast"), shared_bytes=12.0), tmpc(1, 0, 0, 3, "small")]
    problem = tables(build({0: {1: row}, 1: {1: row}}, {(0, 1): 0})).problem
    cache = make_step_cache(problem.tables)
    for d in (1, 2, 4, 1):
        slot = steps_slot(cache, problem.options, 0, d, 5)
        assert (cache.y[slot], cache.d[slot]) == (5, d)
        assert cache.saved_bytes[slot, 0] == 12.0 / d - 1.0
    assert cache.steps[steps_slot(cache, problem.options, 0, 12, 5)] == 0  # a twelfth of it is no more than the other
