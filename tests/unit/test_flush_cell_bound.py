"""Whole ways over the least figures of stages between two cells: no stage takes less, and no plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from piper_ray.engine.flush import cell_bound, cell_figures
from piper_ray.engine.flush.border_bound import BorderBound, border_labelling
from piper_ray.engine.flush.cell_bound import CellBound, _CellWays
from piper_ray.engine.flush.cell_figures import GridFigures, PassShares, StageWindow
from piper_ray.engine.flush.path_prices import LayerChoices, in_flight_at
from piper_ray.engine.flush.space import SearchSpace
from piper_ray.engine.flush.tables import FlushWorkload
from piper_ray.engine.flush.task_search import of_batch_s
from piper_ray.engine.flush.tasks import DegreePair
from piper_ray.engine.kernels.cell_stages import (
    NO_BORDER,
    CellFigures,
    CellLimits,
    CellStages,
    cheapest_cell_ways,
    stages_within,
)
from piper_ray.engine.lattice.cells import every_stage, work_with_edges
from piper_ray.engine.lattice.labelling import Labelling
from piper_ray.engine.lattice.layer_graph import members
from piper_ray.model.instance import Instance
from piper_ray.model.solution import Status
from tests.flush_schedules import FlushSchedule
from tests.flush_support import solve_flush
from tests.lengths import long_after
from tests.operator_graphs import traced_encoder_decoder, traced_mixture, traced_towers, traced_u_net
from tests.unit.test_flush_border_bound import never
from tests.unit.test_flush_limits import searched


def _bound(workload: FlushWorkload, task: DegreePair) -> CellBound | None:
    graph = workload.lattice.graph
    labelling = border_labelling(graph)
    assert labelling is not None
    found = BorderBound.of(graph, labelling, Labelling.of(graph), workload.arrays, task.arrays.bounding)
    return None if found is None else found.by_stages


def test_no_choice_of_a_layer_has_a_smaller_share_in_a_pass() -> None:
    """Of the least time of any choice. Some layer has the share itself."""
    uneven = 0
    for _, workload, _, task, _ in searched(FlushSchedule.ONE_F_ONE_B):
        choices = LayerChoices.of(workload.arrays, task.arrays)
        time_s = choices.forward_s + choices.backward_s
        least_s = np.array([time_s[choices.layer == layer].min() for layer in range(choices.copies.size)])
        counted = least_s[choices.layer] > 0.0
        shares = PassShares.of(choices)
        for share, passes_s in zip(shares, (choices.forward_s, choices.backward_s), strict=True):
            of_choices = passes_s[counted] / least_s[choices.layer][counted]
            assert share == pytest.approx(min(0.5, of_choices.min(initial=0.5)), rel=1e-12)
            uneven += of_choices.size > 0 and share < np.minimum(0.5, of_choices).mean() - 1e-3
    assert uneven >= 5


@pytest.mark.parametrize("schedule", long_after(1, FlushSchedule.flushed()))
def test_no_plan_takes_less(schedule: FlushSchedule, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = ruled_out = near = 0
    for seed, workload, _, task, batch_s in searched(schedule)[::2]:
        bound = _bound(workload, task)
        if bound is None:
            continue
        for grids in ((7,), (16, 64)):
            monkeypatch.setattr(cell_bound, "_GRIDS", grids)
            for upper_s in (batch_s, 1.1 * batch_s, 3.0 * batch_s):
                found_s = bound.least_s(workload.arrays, task.arrays, 0.5 * task.lower_s, upper_s, never)
                assert found_s <= batch_s * (1.0 + 1e-9), (seed, task.degrees, grids, upper_s)
            compared += 1
            near += found_s > 0.97 * batch_s
            ruled_out += bound.least_s(workload.arrays, task.arrays, 0.0, 0.99 * batch_s, never) == np.inf
    assert compared > 25
    assert near > compared / 3
    assert ruled_out > compared / 5


def test_what_is_proved_when_asked_to_stop_holds(monkeypatch: pytest.MonkeyPatch, few: bool) -> None:
    """At each of the first questions whether to stop; there is one before each round of prices."""
    monkeypatch.setattr(cell_bound, "_GRIDS", (7, 30))
    compared = later = 0
    for seed, workload, _, task, batch_s in searched(FlushSchedule.ONE_F_ONE_B)[: 20 if few else 40 : 2]:
        bound = _bound(workload, task)
        if bound is None:
            continue
        for last in (*range(0, 30, 3), 60, 120):
            asked = 0

            def stops(last: int = last) -> bool:
                nonlocal asked
                asked += 1
                return asked > last

            lower_s = 0.5 * task.lower_s
            found_s = bound.least_s(workload.arrays, task.arrays, lower_s, 1.1 * batch_s, stops)
            assert lower_s <= found_s <= batch_s * (1.0 + 1e-9), (seed, task.degrees, last)
            compared += found_s < 0.97 * batch_s
            later += asked > 30
    assert compared > 50
    assert later > 10


def test_rounds_of_prices_end_when_asked_to_stop() -> None:
    task = searched(FlushSchedule.ONE_F_ONE_B)[0].task.arrays._replace(most_stages=2, stages=0, microbatches=4)
    seconds = np.array([2.0, 2.0, 2.0, 2.0])
    borders = np.array([0, 0, 1, 1]), np.array([4, 4, 1, 3]), np.array([1, 3, NO_BORDER, NO_BORDER])
    ways = _CellWays(task, PassShares(0.5, 0.5), CellStages(*borders, seconds, seconds, seconds, 0.0 * seconds), 5)
    assert ways._within(30.0, 10, never)[1] == 10.0
    left, way_s = ways._within(30.0, 10, lambda: True)
    assert left is not None
    assert way_s == np.inf


@pytest.mark.parametrize("most", [0, 100, 10_000])
def test_too_many_stages_are_not_listed(most: int, monkeypatch: pytest.MonkeyPatch, few: bool) -> None:
    """With few microbatches hardly any stage takes too long."""
    listed = list[int]()

    def counted(figures: CellFigures, most_s: float, only: int) -> CellStages:
        found: CellStages = stages_within(figures, most_s, only)
        listed.append(np.unique(np.stack([found.behind, found.back, found.front.clip(0)]), axis=1).shape[1])
        return found

    monkeypatch.setattr(cell_bound, "stages_within", counted)
    monkeypatch.setattr(cell_bound, "_MOST_STAGES", most)
    monkeypatch.setattr(cell_bound, "_GRIDS", (100, 200))
    for _, workload, _, task, batch_s in searched(FlushSchedule.ONE_F_ONE_B)[: 8 if few else 20]:
        bound = _bound(workload, task)
        if bound is not None:
            found_s = bound.least_s(workload.arrays, task.arrays, 0.0, 3.0 * batch_s, never)
            assert found_s <= batch_s * (1.0 + 1e-9)
            assert most > 0 or found_s == 0.0
    assert max(listed, default=0) <= most
    assert bool(listed) == (most > 0)


def test_no_stage_takes_less_than_its_cells() -> None:
    """Each stage of the lattice, with the choices that are best for it by any one figure, and that fit."""
    compared = fitting = 0
    for seed, workload, _, task, batch_s in searched(FlushSchedule.flushed()[0])[:12]:
        bound = _bound(workload, task)
        if bound is None:
            continue
        graph, costs, most_s = workload.lattice.graph, bound.costs, batch_s / task.arrays.microbatches
        choices, cells_of = LayerChoices.of(workload.arrays, task.arrays), costs.grid(20)
        figures = _figures(workload, task, bound, 20, most_s)
        unit_s = costs.weight_s.sum() / cells_of.sum()
        inside = [set(members(row)) for row in workload.lattice.arrays.bits]
        time_s, passes = choices.forward_s + choices.backward_s, PassShares.of(choices)
        for outer in inside:
            for inner in inside:
                if not inner < outer:
                    continue
                stage = sorted(outer - inner)
                paid_s = sum(
                    costs.edge_in_s[e] * (tail not in outer and head in stage)
                    + costs.edge_out_s[e] * (tail in stage and head in inner)
                    for e, (tail, head, _) in enumerate(graph.edges)
                )
                front = int(sum(cells_of[v] for v in range(graph.size) if v not in outer))
                size = int(cells_of[stage].sum())
                if size >= figures.time_s.shape[2]:
                    continue
                for q, in_flight in enumerate(in_flight_at(task.arrays)):
                    held = choices.a_bytes * in_flight + choices.b_bytes
                    for figure in (time_s, held, time_s + held * (time_s.sum() / held.sum())):
                        chosen = [
                            int(np.flatnonzero(choices.layer == layer)[np.argmin(figure[choices.layer == layer])])
                            for layer in choices.of_vertex[stage]
                        ]
                        if held[chosen].sum() <= task.arrays.most_memory_bytes:
                            taken_s = time_s[chosen].sum() + 2.0 * paid_s
                            group = figures.group[q]
                            assert figures.time_s[group, front, size] <= taken_s * (1.0 + 1e-12), seed
                            level_s = taken_s - costs.weight_s[stage].sum() + size * unit_s
                            assert figures.level_s[group, front, size] <= level_s + 1e-12 * taken_s, seed
                            fitting += 1
                        sync_s = choices.sync_s[chosen].sum()
                        assert figures.sync_s[figures.group[q], front, size] <= sync_s * (1.0 + 1e-12), seed
                        for share, of_pass in zip(passes, (choices.forward_s, choices.backward_s), strict=True):
                            least_s = share * figures.quick_s[figures.group[q], front, size]
                            assert least_s <= (of_pass[chosen].sum() + paid_s) * (1.0 + 1e-12), seed
                    compared += 1
    assert compared > 500
    assert fitting > 200


def _figures(
    workload: FlushWorkload, task: DegreePair, bound: CellBound, cells: int, most_s: float, most_steps: int = 10**12
) -> CellFigures:
    grid = _grid(workload, task, bound, cells, most_steps)
    window = grid.window_within(most_s)
    assert window is not None
    found = grid.of([window] * task.arrays.most_stages)
    assert found is not None
    return found


def _grid(
    workload: FlushWorkload, task: DegreePair, bound: CellBound, cells: int, most_steps: int = 10**12
) -> GridFigures:
    choices = LayerChoices.of(workload.arrays, task.arrays)
    return GridFigures(bound.costs, choices, task.arrays, bound.costs.grid(cells), most_steps, never)


def test_a_finer_grid_has_the_stages_that_a_coarse_one_leaves() -> None:
    """With figures that are no lower than those of a whole finer grid, for some stages of each position."""
    rng, compared, fewer = Random(3), 0, 0
    for seed, workload, _, task, batch_s in searched(FlushSchedule.flushed()[0])[:20]:
        bound = _bound(workload, task)
        if bound is None:
            continue
        positions, most_s = task.arrays.most_stages, batch_s / task.arrays.microbatches
        listed = stages_within(_figures(workload, task, bound, 9, most_s), most_s, 0)
        some = np.array([k for k in range(listed.behind.size) if rng.random() < 0.2], np.int64)
        left = cell_bound._of_stages(listed, some)
        coarse, grid = bound.costs.grid(9), _grid(workload, task, bound, 40)
        windows = bound.costs.windows_on(grid.cells_of, coarse, left, positions)
        widest = grid.window_within(most_s)
        assert widest is not None
        figures, whole = grid.of(windows), grid.of([widest._replace(shares=one.shares) for one in windows])
        assert figures is not None
        assert whole is not None
        pairs = set(zip(left.behind.tolist(), left.back.tolist(), left.front.clip(0).tolist(), strict=True))
        inside = [set(members(row)) for row in workload.lattice.arrays.bits]
        every = set(range(workload.lattice.graph.size))
        for outer in inside:
            for inner in inside:
                if not inner < outer:
                    continue
                front, back = sorted(every - outer), sorted(every - inner)
                at = grid.cells_of[front].sum(), grid.cells_of[back].sum()
                for q in range(positions):
                    if (q, int(coarse[back].sum()), int(coarse[front].sum())) in pairs:
                        group, row = figures.group[q], at[0] - figures.least_front[figures.group[q]]
                        found_s = figures.time_s[group, row, at[1] - at[0]]
                        if at[1] - at[0] < whole.time_s.shape[2]:
                            whole_s = whole.time_s[whole.group[q], at[0], at[1] - at[0]]
                            assert found_s == pytest.approx(whole_s, rel=1e-8), (seed, q)
                        compared += np.isfinite(found_s)
        fewer += figures.time_s.shape[1] < whole.time_s.shape[1]
    assert compared > 200
    assert fewer > 5


def test_fewer_prices_of_a_byte_are_tried_where_steps_are_too_many(monkeypatch: pytest.MonkeyPatch, few: bool) -> None:
    compared = lower = 0
    for _, workload, _, task, batch_s in searched(FlushSchedule.flushed()[0])[: 8 if few else 20]:
        bound = _bound(workload, task)
        if bound is None:
            continue
        most_s = batch_s / task.arrays.microbatches
        with monkeypatch.context() as patched:
            patched.setattr(cell_figures, "_FEW_STEPS", 0)
            fewer = _figures(workload, task, bound, 30, most_s)
        every = _figures(workload, task, bound, 30, most_s)
        assert (fewer.time_s <= every.time_s).all()
        compared, lower = compared + 1, lower + bool((fewer.time_s < every.time_s).any())
        grid = _grid(workload, task, bound, 30, 0)
        assert grid.of([StageWindow(every_stage(grid.cells_of, 30), (1.0,))] * task.arrays.most_stages) is None
    assert lower > compared / 4


def test_the_dearest_price_of_a_byte_is_the_best_of_all(few: bool) -> None:
    """A stage with half of all work, that fits or lacks some of the memory that it likes best."""
    rng, too_large, fitting = Random(4), 0, 0
    for number in range(30 if few else 80):
        n = rng.randint(2, 6)
        layer = np.repeat(np.arange(n), 2)
        figure = [np.array([rng.uniform(0.1, 1.0) for _ in layer]) for _ in range(3)]
        choices = LayerChoices(np.arange(n), np.ones(n), layer, *figure, *figure[:2])
        time_s, held = choices.forward_s + choices.backward_s, np.array([rng.uniform(1.0, 9.0) for _ in layer])
        quick = [2 * v + int(np.argmin(time_s[2 * v : 2 * v + 2])) for v in range(n)]
        memory = 0.5 * held[quick].sum() / (1.4 if number % 2 else 0.99)
        window = StageWindow(CellLimits(0, 6, 0, 6, 3), (0.5,))
        found = cell_figures._LeastTimes.of(choices, time_s, held).dearest(window, 6, memory, 0)

        def taken_s(
            price_s: float, n: int = n, time_s: Any = time_s, held: Any = held, memory: float = memory
        ) -> float:
            priced = time_s + price_s * held
            return float(0.5 * sum(priced[2 * v : 2 * v + 2].min() for v in range(n)) - price_s * memory)

        best_s = max(taken_s(price_s) for price_s in np.linspace(0.0, 2.0, 801))
        if number % 2 == 0:
            assert found == []  # at no price does it take longer than with the quickest choices
        elif 0.5 * sum(held[2 * v : 2 * v + 2].min() for v in range(n)) > memory:
            assert taken_s(found[-1]) > 10.0 * best_s  # no such stage fits
            too_large += 1
        else:
            assert taken_s(found[0]) >= 0.97 * best_s
            fitting += 1
    assert too_large > 2
    assert fitting > 2


@pytest.mark.parametrize("schedule", long_after(1, FlushSchedule.flushed()))
def test_stages_of_a_way_are_left_for_the_time_that_it_takes(schedule: FlushSchedule) -> None:
    """A way of random seconds: nothing below its simulated time, all of it there. Its stages may be known to take less,
    each for itself, and their levels are the seconds of all, however they are shared out."""
    rng, ruled_out, before, closer = Random(5), 0, 0, 0
    task = searched(schedule)[0].task.arrays
    for number in range(50):
        p, m = rng.randint(1, 5), rng.randint(1, 7)
        seconds = np.array([[rng.uniform(0.1, 1.0) * rng.choice((1.0, 3.0)) for _ in range(p)] for _ in range(3)])
        one = task._replace(microbatches=m, most_stages=p + rng.randint(0, 2), stages=0)
        cuts = sorted(rng.sample(range(1, 20), p - 1), reverse=True)
        known = np.array([rng.uniform(0.8, 1.0) for _ in range(p)]) if number % 2 else np.ones(p)
        share = np.array([rng.uniform(-0.5, 2.0) for _ in range(p)]) if number % 2 else seconds[:2].sum(axis=0)
        stages = CellStages(
            np.arange(p),
            np.array([20, *cuts]),
            np.array([*cuts, NO_BORDER]),
            known * (seconds[0] + seconds[1]),
            known * (seconds[0] + seconds[1]) * rng.choice((1.0, 0.9)),
            seconds[:2].sum() * share / share.sum() if share.sum() > 0.3 else seconds[:2].sum(axis=0),
            seconds[2],
        )
        shares = (seconds[:2] / seconds[:2].sum(axis=0)).min(axis=1, initial=0.5) * rng.choice((1.0, 0.5))
        batch_s = of_batch_s(one, np.ascontiguousarray(seconds[:, ::-1].T))
        ways = _CellWays(one, PassShares(*shares), stages, 21)
        left = ways._without_slow(batch_s)
        assert left is not None
        assert left.stages.behind.size == p
        upper_s = batch_s * (1.0 + 1e-9)
        assert ways.least_s(0.0, upper_s, upper_s, never) <= upper_s
        assert ways.least_s(0.0, 2.0 * upper_s, upper_s, never) <= upper_s
        ruled_out += ways.least_s(0.0, 0.9 * batch_s, 0.9 * batch_s, never) == np.inf
        if number % 2:
            less = ways._replace(stages=stages._replace(level_s=stages.time_s))
            closer += less.least_s(0.0, 0.9 * batch_s, 0.9 * batch_s, never) < np.inf and ruled_out > before
        before = ruled_out
    assert closer > 2
    assert ruled_out > 25


def test_cheapest_ways_are_those_of_all() -> None:
    rng, compared = Random(8), 0
    for _ in range(60):
        cells, positions = rng.randint(2, 5), rng.randint(1, 4)
        found = [
            (q, back, front)
            for q in range(positions)
            for back in range(cells)
            for front in (*range(back + 1), NO_BORDER)
            if rng.random() < 0.5
        ]
        if not found:
            continue
        behind, back, front = np.array(found).T
        cost = np.array([rng.uniform(0.0, 1.0) for _ in found])
        stages = CellStages(behind, back, front, cost, cost, cost, cost)
        behind_s, ahead_s, way = cheapest_cell_ways(stages, cost, positions, cells)
        every = _all_ways(found, cells)
        through = [min((sum(cost[list(one)]) for one in every if k in one), default=np.inf) for k in range(len(found))]
        assert behind_s + cost + ahead_s == pytest.approx(through)
        assert (way.size == 0) == (not every)
        if every:
            assert tuple(way) in every
            assert cost[way].sum() == pytest.approx(min(through))
            compared += 1
    assert compared > 30


def _all_ways(stages: Sequence[tuple[int, int, int]], cells: int) -> list[tuple[int, ...]]:
    found = list[tuple[int, ...]]()
    begun: list[tuple[int, ...]] = [(k,) for k, (q, back, _) in enumerate(stages) if q == 0 and back == cells - 1]
    while begun:
        way = begun.pop()
        q, _, front = stages[way[-1]]
        if front == NO_BORDER:
            found.append(way)
        begun += [(*way, k) for k, (behind, back, _) in enumerate(stages) if behind == q + 1 and 0 <= front == back]
    return found


def test_halves_have_each_way_once() -> None:
    rng, divided = Random(11), 0
    task = searched(FlushSchedule.flushed()[0])[0].task.arrays._replace(most_stages=3, stages=0)
    for _ in range(40):
        found = [
            (q, back, front)
            for q in range(3)
            for back in range(4)
            for front in (*range(back + 1), NO_BORDER)
            if rng.random() < 0.5 and (q < 2 or front == NO_BORDER)
        ]
        if not found:
            continue
        columns, none = np.array(found).T, np.ones(len(found))
        stages = CellStages(columns[0], columns[1], columns[2], none, none, none, none)
        halves = _CellWays(task, PassShares(0.0, 0.0), stages, 4)._halves()
        if len(halves) < 2:
            continue
        of_halves = []
        for half in halves:
            left = list(zip(*(column.tolist() for column in half.stages[:3]), strict=True))
            of_halves += [tuple(left[k] for k in way) for way in _all_ways(left, 4)]
        every = [tuple(found[k] for k in way) for way in _all_ways(found, 4)]
        assert sorted(of_halves) == sorted(every)
        divided += len(every) > 1
    assert divided > 10


def test_a_vertex_that_many_read_counts_its_edges() -> None:
    tail, own_s = np.array([0] * 6 + [1] * 4), np.array([1.0, 2.0, 3.0])  # six edges, four and none
    assert work_with_edges(own_s, tail, np.ones(10)) == pytest.approx([3.0, 2.0, 3.0])
    assert work_with_edges(own_s, tail, np.ones(10), 0.5) == pytest.approx([2.0, 2.0, 3.0])
    dear = np.where(np.arange(10) == 1, 2.5, 1.0)  # one of the six costs so much that few of it cost as much
    assert work_with_edges(own_s, tail, dear) == pytest.approx([1.0, 2.0, 3.0])


def test_stages_in_time_are_listed_in_the_order_of_ways() -> None:
    for _, workload, _, task, batch_s in searched(FlushSchedule.flushed()[0])[:6]:
        bound = _bound(workload, task)
        if bound is None:
            continue
        most_s = batch_s / task.arrays.microbatches
        figures = _figures(workload, task, bound, 12, most_s)
        for only in (0, 1):
            stages = stages_within(figures, most_s, only)
            assert list(zip(stages.behind, stages.back, strict=True)) == sorted(
                zip(stages.behind.tolist(), stages.back.tolist(), strict=True)
            )
            assert (stages.time_s <= most_s).all()
            first = stages.front == NO_BORDER
            assert first.any()
            assert not only or (stages.behind[first] == 0).all()
            assert (stages.front[~first] <= stages.back[~first]).all()


@pytest.mark.parametrize(
    ("name", "make"),
    long_after(
        1,
        [
            ("encoder-decoder", lambda seed: traced_encoder_decoder(1, 1, seed, devices=8, memory_gib=0.5)),
            ("mixture", lambda seed: traced_mixture(2, 2, seed, devices=8, memory_gib=0.4)),
            ("towers", lambda seed: traced_towers(2, 1, seed, devices=8, memory_gib=0.4)),
        ],
    ),
)
@pytest.mark.parametrize("schedule", long_after(1, FlushSchedule.flushed()))
def test_a_solve_of_traced_operators_has_the_plan_of_all_downsets(
    name: str, make: Callable[[int], Instance], schedule: FlushSchedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = solve_flush(make(1), schedule)
    bounded = 0

    def counted(self: CellBound, *given: Any) -> float:
        nonlocal bounded
        bounded += 1
        return least_s(self, *given)

    least_s = CellBound.least_s
    monkeypatch.setattr(CellBound, "least_s", counted)
    monkeypatch.setattr("piper_ray.engine.flush.solve._MOST_DOWNSETS", 0)
    monkeypatch.setattr("piper_ray.engine.flush.search._FEW_TASKS", 0)
    listed = solve_flush(make(1), schedule)
    assert bounded > 0, name
    assert whole.time_per_sample_s is not None
    assert listed.time_per_sample_s == pytest.approx(whole.time_per_sample_s, rel=1e-9)
    assert listed.lower_bound_s <= whole.time_per_sample_s * (1.0 + 1e-9)


def test_nothing_is_listed_where_bounds_prove_that_no_plan_is_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for a faster plan nor for an equally fast one on fewer devices."""
    monkeypatch.setattr(SearchSpace, "_listed", lambda *_: pytest.fail("the bounds prove the plan"))
    found = solve_flush(traced_u_net(2, 2, 1), FlushSchedule.ONE_F_ONE_B)
    assert found.status is Status.OPTIMAL
    assert found.stats.downsets > 10**6
