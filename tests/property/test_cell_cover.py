"""Stages between cells never ask for more devices than a plan has, and limits by them keep all that leads to one."""

from __future__ import annotations

from contextlib import closing
from fractions import Fraction

import numpy as np
import pytest

import piper_ray
from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.evaluation import cell_cover
from piper_ray.engine.evaluation.cell_cover import CellCover
from piper_ray.engine.evaluation.dual_prices import StageCover, kept_s
from piper_ray.engine.evaluation.threshold import evaluate_threshold
from piper_ray.engine.kernels.cell_stages import KindFigures, KindLimits, cheapest_in_front, cheapest_with_each_kind
from piper_ray.engine.lattice.cells import cells_along
from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.search import cells, search
from piper_ray.engine.tables.problem import Problem
from piper_ray.model.instance import Instance
from tests.brute_force import brute_force
from tests.instances import equal_chain, parallel_branches, random_instance, two_towers
from tests.kernel_support import random_case
from tests.lengths import long_after
from tests.property.test_dual_prices import FACTORS, evaluated
from tests.solver_support import ONE_THREAD, tables


def cells_of(problem: Problem, most_s: float, grids: tuple[int, ...]) -> CellCover:
    cover, found = StageCover.of(problem), None
    assert cover is not None
    for grid in grids:
        found = CellCover.of(cover, grid, 0.25, most_s, found, lambda: None)
    assert found is not None
    return found


@pytest.mark.parametrize("bucket", long_after(1, range(4)))
def test_no_smaller_plan_is_denied(bucket: int) -> None:
    """The whole lattice has the plan of fewest devices, then of fewest stages."""
    shown = seen = 0
    for seed in range(40 * bucket, 40 * (bucket + 1)):
        instance = random_instance(seed, most_layers=6, most_devices=10, most_tmpcs=3)
        best = piper_ray.solve(instance, options=ONE_THREAD)
        if best.plan is None or not best.time_per_sample_s:
            continue
        problem = tables(instance, contraction=without_contraction()).problem
        for factor in (1.0, 1.3, 2.0):
            threshold_s = best.time_per_sample_s * factor
            with closing(LocalBackend(1)) as backend:
                smallest = evaluate_threshold(problem, backend, threshold_s, fewest_stages=True)
            devices, stages = smallest.devices, len(smallest.stages)
            for grids in ((3,), (5, 40)):
                found = cells_of(problem, threshold_s, grids)
                assert not found.shows_smallest(devices, stages + 1), (seed, factor)
                assert not found.shows_smallest(devices + 1, 1), (seed, factor)
                shown += found.shows_smallest(devices, stages)
                seen += stages > 1 and found.shows_smallest(devices, stages)
    assert shown >= 40
    assert seen >= 8


@pytest.mark.parametrize("by_lines", [False, True])
@pytest.mark.parametrize("bucket", long_after(1, range(2)))
def test_no_plan_takes_fewer_devices(bucket: int, by_lines: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the optimum K devices suffice; below it states say the rest."""
    if by_lines:
        monkeypatch.setattr(cell_cover, "_MOST_FIGURES", 0)
    seen = above_work = fewer = 0
    for seed in range(25 * bucket, 25 * (bucket + 1)):
        instance = random_instance(seed, most_layers=4, most_devices=10, most_tmpcs=3)
        best = brute_force(instance)
        if best is None or best.time_per_sample_s == 0:
            continue
        seen += 1
        problem = tables(instance, contraction=without_contraction()).problem
        optimum = best.time_per_sample_s
        for grids in ((3,), (5, 40)):
            found = cells_of(problem, float(optimum * FACTORS[-1]), grids)
            for price in found.prices(instance.devices):
                assert found.fewest(float(optimum), price)[-1] <= best.plan.devices + 1e-9
            above_work += found.fewest(float(optimum))[-1] > np.ceil(
                problem.workload.sums.device_work_s[-1] / float(optimum) - 1e-6
            )
            for factor in FACTORS:
                threshold_s = float(optimum * factor)
                plain = evaluated(problem, threshold_s, None)
                narrowed = evaluated(problem, threshold_s, found.completion(problem, threshold_s))
                assert (narrowed.feasible, narrowed.devices) == (plain.feasible, plain.devices)
                assert narrowed.stages == plain.stages
                assert narrowed.live_downsets <= plain.live_downsets
                fewer += narrowed.live_downsets < plain.live_downsets
                assert not (plain.feasible and found.needs_more_than(plain.devices, threshold_s))
    assert seen >= 15
    assert above_work >= 3
    assert fewer >= 3


def test_prices_of_work_count_whole_devices_on_a_coarse_grid() -> None:
    """Without them, of eight cells, stages have less work than their cells."""
    instance = two_towers(6, devices=8)
    problem = tables(instance, contraction=without_contraction()).problem
    threshold_s = 1.05 * problem.lower_bound_s()
    found = cells_of(problem, threshold_s, (8,))
    plain_devices, *priced = [found.fewest(threshold_s, price)[-1] for price in found.prices(instance.devices)]
    assert max(priced) > plain_devices + 1.0
    assert found.needs_more_than(5, threshold_s)


def test_stages_without_cells_that_gain_leave_no_bound() -> None:
    """A stage of one device, with up to one cell of 1 s, may have work of 2 s. A plan may have several of these."""
    kinds = KindFigures(np.zeros(4), np.array([0.0, 1.0, 0.0, 1.0]), np.ones(1), np.array([2]), np.zeros(1, np.int64))
    for price, expected in ((0.0, [0.0, 1.0]), (0.4, [0.0, 0.6]), (0.6, [-np.inf, -np.inf])):
        limits = KindLimits(np.full(1, 2.0), np.full(1, 2.0), price)
        assert cheapest_in_front(kinds, limits, 2) == pytest.approx(expected)
        assert cheapest_with_each_kind(kinds, limits, 2) == pytest.approx(expected[1])


@pytest.mark.parametrize("by_lines", [False, True])
def test_no_stage_takes_less_than_its_cells(by_lines: bool, monkeypatch: pytest.MonkeyPatch, few: bool) -> None:
    """By trying every choice of each stage, for one microbatch in flight."""
    if by_lines:
        monkeypatch.setattr(cell_cover, "_MOST_FIGURES", 0)
    compared = near = 0
    for seed in range(15 if few else 40):
        made = random_case(seed)
        cover = StageCover.of(made.problem)
        assert cover is not None
        most_s = 3.0 * made.problem.lower_bound_s()
        found = CellCover.of(cover, 12, 0.25, most_s, None, lambda: None)
        kinds = dict(zip(zip(found.devices.tolist(), found.degree.tolist(), strict=True), found.spent_s, strict=True))
        budget_s = dict(zip(kinds, found.budget_s.tolist(), strict=True))
        for i, j in made.pairs():
            stage, layers = sorted(made.sets[i] - made.sets[j]), made.layers(i, j)
            inside = int(found.cells_of[stage].sum())
            ahead = int(found.cells_of.sum() - found.cells_of[sorted(made.sets[i])].sum())
            for r in made.variants(layers):
                t = int(made.problem.options.degree[r])
                for _, d in made.degrees(r):
                    time_s = made.time_s(layers, r, d, 1)
                    if time_s is None or time_s > Fraction(most_s) or (t * d, d) not in kinds:
                        continue
                    spent_s = kinds[t * d, d]
                    room_s = budget_s[t * d, d] - (kept_s(most_s) - float(time_s)) * d
                    assert inside < spent_s.shape[1], (seed, i, j)
                    assert spent_s[ahead, inside] <= room_s * (1 + 1e-9) + 1e-12, (seed, i, j)
                    compared += 1
                    near += spent_s[ahead, inside] > 0.9 * room_s
    assert compared > 300
    assert near > compared / 10


@pytest.mark.parametrize(
    "instance",
    [
        two_towers(6, devices=8),
        parallel_branches(2, 4, devices=8),
        equal_chain(8, devices=8),
        *(random_instance(seed, most_layers=8, most_devices=12, most_tmpcs=3) for seed in range(12)),
    ],
)
def test_a_search_has_the_same_plan(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    """With bounds over cells before each search, and without."""
    plain = piper_ray.solve(instance, options=ONE_THREAD)
    monkeypatch.setattr(search, "_DEAR_S", -1.0)
    monkeypatch.setattr(search, "_STEPS_A_S", 1e300)
    monkeypatch.setattr(cells, "_GRIDS", (4, 32))
    found = piper_ray.solve(instance, options=ONE_THREAD)
    assert (found.plan, found.status, found.time_per_sample_s) == (plain.plan, plain.status, plain.time_per_sample_s)


def test_what_is_left_of_a_cell_goes_to_the_next_reader() -> None:
    """Along a chain cells and work differ by half a cell at most; of small layers side by side one at most has one."""
    chain = tables(equal_chain(30)).graph
    work_s = np.random.default_rng(3).uniform(0.1, 1.0, chain.size)
    found = cells_along(chain, work_s, 20)
    differ = np.cumsum(found[::-1]) - np.cumsum(work_s[::-1]) * (20 / work_s.sum())
    assert np.abs(differ).max() <= 0.5 + 1e-9
    branches = tables(parallel_branches(1, 6), contraction=without_contraction()).graph
    even = cells_along(branches, np.ones(branches.size), 3)
    sides = [v for v in range(branches.size) if branches.successors[v] and branches.predecessors[v]]
    assert len(sides) == 6
    assert even[sides].sum() <= 1  # of the layer in front
    assert even.sum() == 3
