"""What states reach, made as they reach it, is what looking at all pairs of downsets finds."""

from __future__ import annotations

import math
from contextlib import closing

import numpy as np
import pytest

from piper_ray.cost.variants import layer_without_choice, stage_variants
from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.evaluation.dual_prices import DualPrices, StageCover, edges_s
from piper_ray.engine.evaluation.reach import Beam, Reach, Room
from piper_ray.engine.evaluation.state_tables import StateTables
from piper_ray.engine.evaluation.threshold import evaluate_threshold
from piper_ray.engine.kernels.reach import ReachKinds, ReachLimits
from piper_ray.engine.kernels.types import BitArray
from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.lattice.downsets import listed_lattice
from piper_ray.engine.lattice.layer_graph import members
from piper_ray.engine.tables.problem import LatticeTables, Problem, build_problem
from piper_ray.model.constraints import Restrictions
from piper_ray.model.instance import Instance
from tests.brute_force import brute_force
from tests.instances import parallel_branches, random_instance, two_towers
from tests.lengths import long_after
from tests.solver_support import tables

Reached = dict[frozenset[int], tuple[int, int]]
AMPLE = Room(10**6, 10**9)


def covered(instance: Instance) -> tuple[Problem, StageCover]:
    problem = tables(instance, contraction=without_contraction()).problem
    cover = StageCover.of(problem)
    assert cover is not None
    return problem, cover


def every_layer_has_a_choice(instance: Instance) -> bool:
    variants = [v for v in stage_variants(instance, Restrictions()) if v.degree <= instance.devices]
    return layer_without_choice(instance, variants) is None


def by_definition(problem: Problem, kinds: ReachKinds, limits: ReachLimits, dual_prices: DualPrices) -> Reached:
    """By size, from every set to every larger one."""
    graph, cluster = problem.workload.lattice.graph, problem.cluster
    in_s, out_s = edges_s(problem)
    sets = [frozenset(members(row)) for row in problem.lattice.bits]
    spare = cluster.devices - dual_prices.devices
    found: Reached = {frozenset(): (0, 0)}
    for behind in sets:
        if behind not in found:
            continue
        used, later = found[behind]
        for outer in sets:
            if not behind < outer:
                continue
            stage = outer - behind
            ways = []
            for q in range(kinds.degree.size):
                r, d = int(kinds.variant[q]), int(kinds.degree[q])
                spent_s = sum(float(kinds.weight_s[q, v]) for v in stage)
                spent_s += sum(in_s[e, r] for e, (u, v, _) in enumerate(graph.edges) if v in stage and u not in outer)
                spent_s += sum(out_s[e, r] for e, (u, v, _) in enumerate(graph.edges) if u in stage and v in behind)
                y = 1 + math.ceil(later / d)
                held = sum(kinds.least_a[v, r] * y + kinds.least_b[v, r] + kinds.least_shared[v, r] / d for v in stage)
                ahead = sum(limits.share[v] for v in range(graph.size) if v not in outer)
                for e, (u, v, _) in enumerate(graph.edges):
                    if u not in outer and v in outer:
                        ahead += min(
                            out_s[e, kinds.variant[other]] * kinds.devices[other] / kinds.budget_s[other]
                            for other in range(kinds.degree.size)
                        )
                wasted = used + kinds.devices[q] - sum(dual_prices.of_vertex[v] for v in outer)
                if (
                    spent_s <= kinds.budget_s[q] * (1 + 1e-9)
                    and held <= cluster.memory_bytes * (1 + 1e-9)
                    and later + d <= cluster.data_parallel_limit
                    and wasted <= spare + 1e-9
                    and ahead <= (cluster.devices - used - kinds.devices[q]) * (1 + 1e-9) + 1e-9
                ):
                    ways.append((used + int(kinds.devices[q]), later + d))
            if ways:
                known = [found[outer]] if outer in found else []
                found[outer] = (min(n for n, _ in ways + known), min(s for _, s in ways + known))
    return found


def as_sets(bits: BitArray) -> set[frozenset[int]]:
    rows = [frozenset(members(row)) for row in bits]
    assert len(rows) == len(set(rows)), "each once"
    return set(rows)


@pytest.mark.parametrize("seed", long_after(6, range(24)))
def test_reached_by_definition(seed: int) -> None:
    instance = random_instance(seed, most_layers=6, most_devices=9)
    if not every_layer_has_a_choice(instance):
        return
    best = brute_force(instance) if len(instance.layers) <= 4 else None
    problem, cover = covered(instance)
    reach = Reach(cover)
    first_s = problem.lower_bound_s() if best is None else float(best.time_per_sample_s)
    for factor, rounds in ((1.0, 30), (1.1, 3), (1.6, 1)):
        dual_prices = cover.dual_prices(first_s * factor, rounds=rounds)
        found = reach.downsets(dual_prices, AMPLE)
        assert found is not None
        kinds = reach.kinds(dual_prices)
        limits = reach.limits(dual_prices, kinds)
        assert (limits.first_share == limits.share).all()
        assert as_sets(found) == by_definition(problem, kinds, limits, dual_prices).keys()


def on_all_and_on_reached(instance: Instance, threshold_s: float) -> tuple[list[object], list[object]]:
    """The answer of an evaluation of the whole lattice, and of what is reached."""
    problem, cover = covered(instance)
    found = Reach(cover).downsets(cover.dual_prices(threshold_s), AMPLE)
    assert found is not None
    workload = LatticeTables.build(listed_lattice(problem.workload.lattice.graph, found), problem.workload.options)
    degrees = Restrictions().data_parallel_degrees(instance)
    return _evaluated(problem, threshold_s), _evaluated(build_problem(workload, instance, degrees), threshold_s)


def _evaluated(problem: Problem, threshold_s: float) -> list[object]:
    kept: list[StateTables] = []
    with closing(LocalBackend(1)) as backend:
        outcome = evaluate_threshold(problem, backend, threshold_s, on_finished=kept.append)
    bits = problem.lattice.bits
    stages = [
        (members(bits[stage.outer]), members(bits[stage.inner]), stage.variant, stage.data_parallel_degree)
        for stage in outcome.stages
    ]
    return [outcome.feasible, outcome.devices, stages]


@pytest.mark.parametrize("seed", long_after(6, range(24)))
def test_answers_are_those_of_the_whole_lattice(seed: int) -> None:
    instance = random_instance(seed + 100, most_layers=6, most_devices=9)
    if not every_layer_has_a_choice(instance):
        return
    least_s = covered(instance)[0].lower_bound_s()
    for factor in (1.0, 1.05, 1.2, 1.5, 2.5):
        whole, reached = on_all_and_on_reached(instance, least_s * factor)
        if whole[0]:
            assert reached == whole


@pytest.mark.long
def test_more_vertices_than_a_word_has_bits() -> None:
    instance = two_towers(40, devices=16, memory_bytes=200.0)
    problem, _ = covered(instance)
    whole, reached = on_all_and_on_reached(instance, problem.lower_bound_s() * 1.1)
    assert whole == reached
    assert whole[0]


def test_no_more_than_there_is_room_for() -> None:
    problem, cover = covered(parallel_branches(3, 5))
    reach, dual_prices = Reach(cover), cover.dual_prices(problem.lower_bound_s() * 2.0, rounds=1)
    all_of_them = reach.downsets(dual_prices, AMPLE)
    assert all_of_them is not None
    steps = reach.steps
    assert reach.downsets(dual_prices, Room(len(all_of_them), steps)) is not None
    assert reach.downsets(dual_prices, Room(len(all_of_them) - 1, steps)) is None
    assert reach.downsets(dual_prices, Room(len(all_of_them), steps - 1)) is None


def test_calls_end_within_a_stage_and_go_on_there(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, cover = covered(parallel_branches(3, 4))
    reach, dual_prices = Reach(cover), cover.dual_prices(problem.lower_bound_s() * 2.0, rounds=1)
    at_once = reach.downsets(dual_prices, AMPLE)
    steps, calls = reach.steps, []
    monkeypatch.setattr("piper_ray.engine.evaluation.reach._STEPS_AT_ONCE", 7)
    by_and_by = reach.downsets(dual_prices, AMPLE, check=lambda: calls.append(reach.steps))
    assert at_once is not None
    assert by_and_by is not None
    assert (by_and_by == at_once).all()
    assert reach.steps == steps
    assert max(np.diff(calls)) <= 7
    assert len(calls) >= steps / 7


def test_room_grows_as_it_is_needed() -> None:
    problem, cover = covered(parallel_branches(1, 13, devices=4))
    found = Reach(cover).downsets(cover.dual_prices(problem.lower_bound_s() * 4.0, rounds=1), AMPLE)
    assert found is not None
    assert len(as_sets(found)) > 8192


def test_a_beam_follows_those_that_waste_least() -> None:
    problem, cover = covered(two_towers(10, devices=8))
    reach, dual_prices = Reach(cover), cover.dual_prices(problem.lower_bound_s() * 1.3, rounds=20)
    whole = reach.downsets(dual_prices, AMPLE)
    assert whole is not None
    for width in (1, 4, 10**6):
        beam = reach.downsets(dual_prices, AMPLE, Beam(width, 1e9))
        assert beam is not None
        assert as_sets(beam) <= as_sets(whole)
        sizes = np.bincount([len(members(row)) for row in beam])
        assert sizes.max() <= width
        if width == 10**6:
            assert as_sets(beam) == as_sets(whole)


def test_a_check_ends_it() -> None:
    problem, cover = covered(two_towers(3))

    def end() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Reach(cover).downsets(cover.dual_prices(problem.lower_bound_s() * 2.0), AMPLE, check=end)
