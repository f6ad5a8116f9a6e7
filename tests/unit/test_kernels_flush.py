"""Each kernel of the search under a flush against a slow twin."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest

from piper_ray.cost.variants import stage_variants
from piper_ray.engine.flush.mixes import BorderRates
from piper_ray.engine.flush.path_prices import NO_BOUNDS
from piper_ray.engine.flush.tables import FlushWorkload, build_workload
from piper_ray.engine.flush.tasks import DegreePair, list_tasks
from piper_ray.engine.kernels.flush_choices import EXACT, FEW, MERGED, NONE_FITS, choice_front, least_time_choice
from piper_ray.engine.kernels.flush_closing import best_stages, best_state
from piper_ray.engine.kernels.flush_paths import (
    Figures,
    StageSeconds,
    batch_s,
    empty_tail,
    least_batch_s,
    simulate_step,
    step_s,
    times_in_batch,
    with_stage,
)
from piper_ray.engine.kernels.flush_stages import NO_ROW, front_rows, in_flight, least_figures, quickest_row
from piper_ray.engine.kernels.flush_states import FINISHED, figures_of, tails
from piper_ray.engine.kernels.flush_types import (
    FIGURES,
    GPIPE,
    NO_FREE_STAGES,
    ONE_F_ONE_B,
    ORIGIN,
    FlushTask,
    TailArrays,
)
from piper_ray.engine.kernels.types import FloatArray, IndexArray, StageKey
from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.lattice.downsets import build_lattice
from piper_ray.engine.lattice.layer_graph import build_graph
from piper_ray.model.constraints import Restrictions
from piper_ray.model.instance import Instance, Tmpc
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule, ScheduleName, StepTerms
from tests.flush_brute_force import simulated_batch_s
from tests.flush_instances import uneven_layers
from tests.flush_schedules import FlushSchedule
from tests.instances import RECOMPUTE, VANILLA, build, random_instance
from tests.lengths import long_after

NAMES = {GPIPE: "gpipe", ONE_F_ONE_B: "1f1b"}
NO_LEVELS, NO_GRID = np.zeros((1, 2)), np.zeros(0)


def random_pipelines(seed: int, number: int) -> Iterator[tuple[int, FloatArray]]:
    """m, and float64[p, 3] of forward, backward and synchronisation seconds; zeros and ties among them."""
    rng = Random(seed)
    for _ in range(number):
        p, m = rng.randint(1, 7), rng.randint(1, 14)
        integers, power, syncs = rng.random() < 0.4, rng.choice([1, 3]), rng.choice([0.0, 1.0, 10.0])

        def figure(most: float, integers: bool = integers, power: int = power) -> float:
            return float(rng.randint(0, 3)) * most if integers else rng.random() ** power * most

        yield m, np.array([[figure(1.0), figure(2.0), figure(syncs)] for _ in range(p)])


def columns(stages: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    return stages[:, 0].copy(), stages[:, 1].copy(), stages[:, 2].copy()


def grown(schedule: int, m: int, stages: FloatArray, front_is_known: bool) -> Figures:
    """The figures of a pipeline, built from the back. front_is_known: also what longer passes are in front."""
    tail = empty_tail(schedule)
    for behind, (f, b, sync) in enumerate(stages[::-1]):
        j = len(stages) - 1 - behind
        from_stage = 0 if front_is_known else j
        slowest = max(stages[from_stage : j + 1, 0]), max(stages[from_stage : j + 1, 1])
        tail = with_stage(schedule, m, behind, StageSeconds(f + b, f, b, sync, *slowest), tail)
    return tail


@pytest.mark.parametrize("schedule", [GPIPE, ONE_F_ONE_B])
def test_simulation_and_formula_are_those_of_a_plain_simulation(schedule: int) -> None:
    for m, stages in random_pipelines(1, 600):
        wanted_s = simulated_batch_s(NAMES[schedule], [(f, b, sync) for f, b, sync in stages.tolist()], m)
        assert simulate_step(schedule, m, *columns(stages)) == pytest.approx(wanted_s, rel=1e-12)
        assert step_s(schedule, m, *columns(stages)) == pytest.approx(wanted_s, rel=1e-12)


@pytest.mark.parametrize("schedule", [GPIPE, ONE_F_ONE_B])
def test_figures_stage_by_stage_bound_the_batch(schedule: int) -> None:
    exact = 0
    for m, stages in random_pipelines(2, 600):
        wanted_s = step_s(schedule, m, *columns(stages))
        found_s = batch_s(schedule, m, grown(schedule, m, stages, False))
        assert found_s <= wanted_s * (1 + 1e-12)
        exact += found_s >= wanted_s * (1 - 1e-12)
    assert exact == 600 if schedule == GPIPE else exact > 400


def test_less_of_each_pass_with_all_of_both_bounds_the_batch_under_gpipe() -> None:
    """As merged choices have them: then further microbatches still pass the slowest stage."""
    for m, stages in random_pipelines(5, 300):
        tail = empty_tail(GPIPE)
        for behind, (f, b, sync) in enumerate(stages[::-1]):
            seconds = StageSeconds(f + b, 0.5 * f, 0.5 * b, sync, 0.0, 0.0)
            tail = with_stage(GPIPE, m, behind, seconds, tail)
        both = stages[:, 0] + stages[:, 1]
        assert batch_s(GPIPE, m, tail) <= step_s(GPIPE, m, *columns(stages)) * (1 + 1e-12)
        assert batch_s(GPIPE, m, tail) >= (both.sum() + (m - 1) * both.max() + stages[0, 2]) * (1 - 1e-12)


def test_figures_are_exact_where_what_is_in_front_is_known() -> None:
    for m, stages in random_pipelines(3, 600):
        stages[:, 2] = 0.0
        wanted_s = step_s(ONE_F_ONE_B, m, *columns(stages))
        whole_s = grown(ONE_F_ONE_B, m, stages, True)[2]
        assert whole_s == pytest.approx(wanted_s, rel=1e-12)


@pytest.mark.parametrize("schedule", [GPIPE, ONE_F_ONE_B])
def test_no_stages_in_front_take_less_than_the_least_batch(schedule: int) -> None:
    for m, stages in random_pipelines(4, 600):
        wanted_s = step_s(schedule, m, *columns(stages))
        for ahead in range(len(stages) + 1):
            tail = grown(schedule, m, stages[ahead:], False)
            behind = len(stages) - ahead
            whole_s, forward_s = float(stages[:ahead, :2].sum()), float(stages[:ahead, 0].sum())
            for most in (len(stages), len(stages) + 2):
                bound_s = least_batch_s(schedule, m, behind, most, whole_s, forward_s, tail)
                assert bound_s <= wanted_s * (1 + 1e-12)
    assert least_batch_s(schedule, 4, 2, 2, 1.0, 0.5, empty_tail(schedule)) == np.inf


@pytest.mark.parametrize(
    ("stages", "known", "batch"),
    [
        # f = 1, 2 and b = 2, 4: 3 + 2 * 2 forward and 6 + 2 * 4 backward; of 9 s in all, 6 are the last stage's.
        ([(1.0, 2.0, 0.0), (2.0, 4.0, 0.0)], 1, 9.0 + 2 * 6.0),
        # It synchronises for 20 s after its own 3 * 4 backward; 1 + 3 * 2 forward come first.
        ([(1.0, 2.0, 0.0), (2.0, 4.0, 20.0)], 1, 7.0 + 12.0 + 20.0),
        # Nothing is known of two equal stages: 6 s for a microbatch, and 3 s at either for each further one.
        ([(1.0, 2.0, 0.0), (1.0, 2.0, 0.0)], 0, 6.0 + 2 * 3.0),
    ],
)
def test_bound_and_plan_meet_under_gpipe(stages: list[tuple[float, ...]], known: int, batch: float) -> None:
    """Worked out by hand: three microbatches, two stages, of which the last ``known`` are the tail."""
    m, p, table = 3, len(stages), np.array(stages)
    ahead, tail = table[: p - known], table[p - known :]
    ahead_s, ahead_forward_s = float(ahead[:, :2].sum()), float(ahead[:, 0].sum())
    assert step_s(GPIPE, m, *columns(table)) == batch
    assert least_batch_s(GPIPE, m, known, p, ahead_s, ahead_forward_s, grown(GPIPE, m, tail, False)) == batch


def random_items(rng: Random, most_layers: int, most_options: int) -> tuple[IndexArray, FloatArray]:
    widths = [rng.randint(1, most_options) for _ in range(rng.randint(1, most_layers))]
    integers = rng.random() < 0.5
    figures = [[float(rng.randint(0, 4)) if integers else rng.random() for _ in range(4)] for _ in range(sum(widths))]
    return np.concatenate(([0], np.cumsum(widths))).astype(np.int64), np.array(figures)


def all_choices(start: IndexArray, figures: FloatArray, memory_bytes: float, most_s: float) -> list[list[float]]:
    found = []
    for options in product(*(range(start[k], start[k + 1]) for k in range(start.size - 1))):
        totals = figures[list(options)].sum(axis=0)
        if totals[3] <= memory_bytes and totals[0] + totals[1] <= most_s:
            found.append([*totals[:3].tolist(), float(totals[0] + totals[1])])
    return found


def test_choice_front_holds_the_undominated_choices() -> None:
    rng = Random(5)
    for _ in range(300):
        start, figures = random_items(rng, 4, 3)
        memory_bytes = float(figures[:, 3].sum()) * rng.choice([0.2, 0.5, 1.0])
        most_s = rng.choice([np.inf, 0.4 * float(figures[:, :2].sum())])
        wanted = all_choices(start, figures, memory_bytes, most_s)
        status, rows, ids, before, taken = choice_front(start, figures, memory_bytes, most_s, FEW, True)
        if not wanted:
            assert status == NONE_FITS
            continue
        assert status == EXACT
        for choice in wanted:
            assert any(np.all(row <= np.array(choice) + 1e-12) for row in rows)
        for row, last in zip(rows, ids.tolist(), strict=True):
            options, at = [], last
            while before[at] >= 0:
                options.append(int(taken[at]))
                at = int(before[at])
            assert len(options) == start.size - 1
            np.testing.assert_allclose(figures[options].sum(axis=0)[:3], row[:3], rtol=1e-12, atol=1e-12)
            assert row[3] == pytest.approx(row[0] + row[1], rel=1e-12)
            assert figures[options, 3].sum() <= memory_bytes * (1 + 1e-12)


def test_merged_choices_are_as_good_as_any() -> None:
    rng = Random(6)
    merged = 0
    for _ in range(60):
        start, figures = random_items(rng, 6, 3)
        memory_bytes = float(figures[:, 3].sum())
        status, rows, _, _, _ = choice_front(start, figures, memory_bytes, np.inf, 4, True)
        merged += status == MERGED
        assert len(rows) <= 4
        for choice in all_choices(start, figures, memory_bytes, np.inf):
            assert any(np.all(row <= np.array(choice) + 1e-12) for row in rows)
    assert merged > 20


@pytest.mark.parametrize("schedule", long_after(1, FlushSchedule))
def test_one_row_stands_for_choices_that_are_close(schedule: FlushSchedule) -> None:
    """Some layers must recompute, which hardly changes their forward pass: no exact choice is less than the one row."""
    rng = Random(7)
    stood = 0
    for _ in range(10):
        layers = {
            v: {
                1: [Tmpc(VANILLA, time_s, 1.0, 4.0, 1.0), Tmpc(RECOMPUTE, 1.33 * time_s, 1.0, 1.0, 1.0, recompute=True)]
            }
            for v in range(7)
            for time_s in [rng.uniform(5.0, 10.0)]
        }
        edges = {(v, v + 1): 1.0 for v in range(6)}
        instance = build(layers, edges, devices=2, microbatches=2, memory_bytes=rng.uniform(20.0, 60.0))
        workload = workload_of(instance)
        assert workload is not None
        for task in tasks_of(instance, workload, schedule):
            arrays, top = task.arrays, len(workload.arrays.bits) - 1
            stage = StageKey(top, 0, int(arrays.variants[0]))
            y, one = in_flight(arrays.schedule, arrays.microbatches, 0), np.empty(4)
            least = least_figures(stage, workload.arrays, arrays)
            if quickest_row(stage, y, np.inf, True, least, workload.arrays, arrays, one) == NO_ROW:
                continue
            exact, every, _ = front_rows(stage, y, np.inf, 4096, least, one, workload.arrays, arrays)
            status, rows, _ = front_rows(stage, y, np.inf, 1, least, one, workload.arrays, arrays)
            if exact == EXACT and status == MERGED and len(rows) == 1:
                stood += 1
                assert (rows[0] <= every * (1 + 1e-12)).all()
    assert stood > 3


def test_merged_choices_of_layers_alike_keep_the_time_of_both_passes() -> None:
    """Passes and weights trade against memory in nine ways: without a time of its own a merged choice has the forward
    pass of one and the backward pass of another."""
    ways = [
        (6.7 + z / 4, b - z / 20, 4.0 / 2**z, a + 5.4 / 2**z)
        for a, b in ((4.0, 13), (1.3, 18), (0.3, 20))
        for z in range(3)
    ]
    start, figures = np.arange(0, 9 * 20 + 1, 9), np.tile(np.array(ways), (20, 1))
    memory_bytes = 80.0
    least_s = least_time_choice(start, figures, memory_bytes, np.inf, True, np.empty(20, np.int64))
    status, rows, _, _, _ = choice_front(start, figures, memory_bytes, 1.1 * least_s, FEW, True)
    assert status == MERGED
    assert 0.98 * least_s <= rows[:, 3].min() <= least_s * (1 + 1e-12)


def test_least_time_choice() -> None:
    rng = Random(7)
    for _ in range(200):
        start, figures = random_items(rng, 4, 3)
        memory_bytes = float(figures[:, 3].sum()) * rng.choice([0.2, 0.5, 1.0])
        times = [both_s for *_, both_s in all_choices(start, figures, memory_bytes, np.inf)]
        chosen = np.empty(start.size - 1, np.int64)
        found_s = least_time_choice(start, figures, memory_bytes, np.inf, True, chosen)
        assert found_s == (pytest.approx(min(times)) if times else np.inf)
        if times:
            assert figures[chosen, :2].sum() == pytest.approx(found_s)


def test_a_choice_that_need_not_be_exact_takes_at_most_a_step_more() -> None:
    rng = Random(8)
    for layers in (3, 99, 100, 150):
        rows = [(rng.uniform(1, 2), rng.uniform(2, 4), 0.0, rng.uniform(4, 6)) for _ in range(layers)]
        both = [(row, (row[0] * 1.1, row[1] * 1.3, 0.0, row[3] / 5)) for row in rows]
        figures, start = np.array(both).reshape(-1, 4), np.arange(0, 2 * layers + 1, 2)
        steps_s = [sum(less[:2]) - sum(row[:2]) for row, less in both]
        memory_bytes, chosen = 3.0 * layers, np.empty(layers, np.int64)
        least_s = least_time_choice(start, figures, memory_bytes, np.inf, True, chosen)
        found_s = least_time_choice(start, figures, memory_bytes, np.inf, False, chosen)
        assert figures[chosen, 3].sum() <= memory_bytes
        assert figures[chosen, :2].sum() == pytest.approx(found_s)
        is_greedy = layers >= 100
        assert least_s * (1 - 1e-12) <= found_s <= least_s + max(steps_s) * is_greedy
        assert least_time_choice(start, figures, memory_bytes, found_s * (1 - 1e-6), False, chosen) == np.inf


def workload_of(instance: Instance) -> FlushWorkload | None:
    variants = [v for v in stage_variants(instance, Restrictions()) if v.degree <= instance.devices]
    lattice = build_lattice(build_graph(instance, without_contraction()), 10**6)
    return (
        build_workload(instance, lattice, variants, BorderRates.of(instance, lattice.graph, PAPERS_SCHEDULE))
        if variants
        else None
    )


def tasks_of(instance: Instance, workload: FlushWorkload, schedule: FlushSchedule) -> list[DegreePair]:
    return list_tasks(instance, workload, Schedule(ScheduleName(schedule.value)), Restrictions(), StepTerms())


def any_tails(task: FlushTask, workload: FlushWorkload) -> IndexArray:
    """No limits on stages behind."""
    return np.full(workload.lattice.size, task.most_stages)


def every_tail(workload: FlushWorkload, task: DegreePair) -> dict[tuple[int, int], list[Figures]]:
    """Figures of all tails that fit, by downset and number of stages, with nothing in front."""
    tables, arrays = workload.arrays, task.arrays
    bits = tables.bits
    found: dict[tuple[int, int], list[Figures]] = {(0, 0): [empty_tail(arrays.schedule)]}
    for i in range(1, len(bits)):
        for j in range(i):
            if (bits[j] & ~bits[i]).any():
                continue
            for behind in range(arrays.most_stages):
                for r in arrays.variants.tolist():
                    y = in_flight(arrays.schedule, arrays.microbatches, behind)
                    least = least_figures(StageKey(i, j, r), tables, arrays)
                    one = np.empty(4)
                    if quickest_row(StageKey(i, j, r), y, np.inf, True, least, tables, arrays, one) == NO_ROW:
                        continue
                    rows = front_rows(StageKey(i, j, r), y, np.inf, 4096, least, one, tables, arrays)[1]
                    for f, b, sync, both_s in rows.tolist():
                        for tail in found.get((j, behind), []):
                            seconds = StageSeconds(both_s, f, b, sync, f, b)
                            longer = with_stage(arrays.schedule, arrays.microbatches, behind, seconds, tail)
                            found.setdefault((i, behind + 1), []).append(longer)
    return found


@pytest.mark.parametrize("schedule", long_after(1, list(FlushSchedule)))
def test_tails_keep_what_no_other_is_as_good_as(schedule: FlushSchedule) -> None:
    compared = 0
    for seed in range(60):
        instance = random_instance(seed, most_layers=4, most_tmpcs=2)
        workload = workload_of(instance)
        for task in tasks_of(instance, workload, schedule) if workload else []:
            assert workload is not None
            control = np.array([np.inf, 0.0])
            status, states = tails(
                workload.arrays,
                task.arrays,
                task.ahead,
                any_tails(task.arrays, workload),
                NO_LEVELS,
                NO_GRID,
                NO_BOUNDS,
                NO_FREE_STAGES,
                10**6,
                True,
                control,
            )
            assert status == FINISHED
            kept = kept_figures(states)
            for (i, stages), wanted in every_tail(workload, task).items():
                if i == 0:
                    continue
                rest = len(workload.arrays.bits) - 1 - i
                if rest > 0 and stages == task.arrays.most_stages:
                    continue  # no stage is left for what is in front
                for figures in wanted if rest == 0 else []:
                    compared += 1
                    assert any(as_good(mine, figures) for mine in kept[i, stages]), (seed, i, stages)
                for mine in kept.get((i, stages), []):
                    assert any(as_good(figures, mine) for figures in wanted), (seed, i, stages)
    assert compared > 300


def kept_figures(states: TailArrays) -> dict[tuple[int, int], list[Figures]]:
    found: dict[tuple[int, int], list[Figures]] = {}
    for s in range(1, len(states.origin)):
        key = int(states.origin[s, ORIGIN.downset]), int(states.origin[s, ORIGIN.stages])
        found.setdefault(key, []).append(figures_of(states.figures, s))
    return found


def as_good(one: Figures, other: Figures) -> bool:
    return all(one[k] <= other[k] + 1e-12 * (1.0 + abs(other[k])) for k in range(FIGURES))


@pytest.mark.parametrize("schedule", [GPIPE, ONE_F_ONE_B])
def test_a_batch_counts_a_figure_no_more_often_than_told(schedule: int) -> None:
    """Each figure of a tail is lowered by a little, and a stage is put in front."""
    most_often = np.zeros(FIGURES)
    for m, stages in random_pipelines(11, 400):
        tail = empty_tail(schedule)
        for behind, (f, b, sync) in enumerate(stages[::-1].tolist()):
            tail = with_stage(schedule, m, behind, StageSeconds(f + b, f, b, sync, f, b), tail)
        front = StageSeconds(0.3, 0.1, 0.2, 0.0, 0.1, 0.2)
        whole_s = batch_s(schedule, m, with_stage(schedule, m, len(stages), front, tail))
        for figure in range(FIGURES):
            lowered: Any = tuple(value - 1e-3 * (k == figure) for k, value in enumerate(tail))
            lowered_s = batch_s(schedule, m, with_stage(schedule, m, len(stages), front, lowered))
            often = (whole_s - lowered_s) / 1e-3
            assert -1e-6 <= often <= times_in_batch(schedule, m, figure) + 1e-6, (m, figure)
            most_often[figure] = max(most_often[figure], often)
    assert most_often.max() > (6.0 if schedule == GPIPE else 0.9)


@pytest.mark.parametrize("schedule", long_after(1, FlushSchedule.flushed()))
def test_rounded_tails_are_fewer_and_bound_all_by_little(schedule: FlushSchedule) -> None:
    """Each figure loses its part of the grid at most once for each stage, and the slowest stage once in all."""
    fewer = lower = 0
    for seed in range(60):
        instance = random_instance(seed, most_layers=5, most_tmpcs=2)
        workload = workload_of(instance)
        for task in tasks_of(instance, workload, schedule) if workload else []:
            assert workload is not None
            arrays, downsets = task.arrays, workload.arrays.bits.shape[0]
            step_s = Random(seed).choice([0.3, 3.0, 20.0])
            often = [times_in_batch(arrays.schedule, arrays.microbatches, figure) for figure in range(FIGURES)]
            grid_s = step_s / np.array([*often, 1.0])
            every, rounded = (
                tails(
                    workload.arrays,
                    arrays,
                    task.ahead,
                    any_tails(arrays, workload),
                    NO_LEVELS,
                    grid,
                    NO_BOUNDS,
                    NO_FREE_STAGES,
                    10**6,
                    True,
                    np.array([np.inf, 0.0]),
                )[1]
                for grid in (NO_GRID, grid_s)
            )
            kept = kept_figures(rounded)
            for key, group in kept_figures(every).items():
                assert all(any(as_good(one, figures) for one in kept[key]) for figures in group), seed
            for row in rounded.figures[1:, :FIGURES]:
                steps = row[np.isfinite(row)] / grid_s[:FIGURES][np.isfinite(row)]
                assert steps == pytest.approx(np.round(steps), abs=1e-6)
            (state, least_s), (_, known_s) = (best_state(arrays, found, downsets) for found in (rounded, every))
            if state < 0:
                assert known_s == np.inf
                continue
            stages = arrays.most_stages
            assert known_s - (2 * stages + 2) * step_s <= least_s <= known_s * (1.0 + 1e-12), seed
            fewer += len(rounded.origin) < len(every.origin)
            lower += least_s < known_s * (1.0 - 1e-9)
    assert fewer > 5
    assert lower > 20


def test_levels_raise_the_bound_and_never_above_the_best_plan() -> None:
    raised = 0
    for seed in range(80):
        instance = uneven_layers(seed)
        workload = workload_of(instance)
        for task in tasks_of(instance, workload, FlushSchedule.ONE_F_ONE_B) if workload else []:
            assert workload is not None
            arrays = task.arrays
            bounds = []
            for levels in (NO_LEVELS, np.array([[k, 2.0 * k] for k in range(0, 40, 2)])):
                control = np.array([np.inf, 0.0])
                limits = any_tails(arrays, workload)
                _, states = tails(
                    workload.arrays,
                    arrays,
                    task.ahead,
                    limits,
                    levels,
                    NO_GRID,
                    NO_BOUNDS,
                    NO_FREE_STAGES,
                    10**6,
                    True,
                    control,
                )
                m = workload.arrays.bits.shape[0]
                top = range(int(states.start[m - 1]), int(states.start[m - 1] + states.kept[m - 1]))
                listed = [(batch_s(ONE_F_ONE_B, arrays.microbatches, figures_of(states.figures, s)), s) for s in top]
                if not listed:
                    continue
                bounds.append(min(listed)[0])
                for bound_s, s in listed:
                    seconds = best_stages(states, s).seconds
                    assert bound_s <= step_s(ONE_F_ONE_B, arrays.microbatches, *columns(seconds)) * (1 + 1e-12)
            if len(bounds) == 2:
                assert bounds[0] <= bounds[1] * (1 + 1e-12)
                raised += bounds[0] < bounds[1] * (1 - 1e-9)
    assert raised > 0
