"""The shortest way over the cheapest borders at each amount of work: no stage pays less, and no plan takes less."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest

from piper_ray.engine.flush import border_bound
from piper_ray.engine.flush import space as flush_space
from piper_ray.engine.flush.border_bound import BorderBound, border_labelling, downsets_with_cheap_borders
from piper_ray.engine.flush.path_prices import LayerChoices, in_flight_at
from piper_ray.engine.flush.position_program import path_prices
from piper_ray.engine.flush.space import SearchSpace
from piper_ray.engine.flush.tables import FlushWorkload
from piper_ray.engine.flush.task_search import TaskEffort, run_task
from piper_ray.engine.kernels.cell_stages import CellLimits
from piper_ray.engine.kernels.flush_borders import cheapest_downsets
from piper_ray.engine.kernels.types import FloatArray, IndexArray
from piper_ray.engine.lattice.cells import cell_ranges, every_stage, least_cost
from piper_ray.engine.lattice.labelling import Labelling
from piper_ray.engine.lattice.layer_graph import members
from tests.flush_schedules import FlushSchedule
from tests.instances import random_instance
from tests.lengths import long_after
from tests.unit.test_flush_limits import searched, tables
from tests.unit.test_flush_path_prices import any_prices

_FEW, _MANY = 10, 256
"""Cells: several downsets in each, or mostly one."""


@pytest.mark.parametrize("cells", long_after(1, [_FEW, _MANY]))
def test_each_downset_is_in_a_cell_whose_borders_cost_no_more(cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(border_bound, "_CELLS", cells)
    rng, met = Random(3), 0
    for seed in range(20):
        workload, _ = tables(random_instance(seed, most_layers=7))
        bound = None if workload is None else _bound(workload, np.arange(1))
        if workload is None or bound is None:
            continue
        value = np.array([rng.uniform(-1.0, 1.0) for _ in bound.work.own_s])
        least = bound.least_in_front(value)
        inside = _inside(workload)
        for i in range(len(inside)):
            front = [v for v in range(value.size) if v not in inside[i]]
            front_s, paid = bound.work.own_s[front].sum(), _short_paid(workload, bound, inside[i])
            of_it = [
                cell
                for cell in _cells_with(bound, front_s)
                if (np.stack([bound.cells.in_s[cell], bound.cells.out_s[cell]]) <= paid * (1.0 + 1e-9) + 1e-12).all()
            ]
            assert of_it, (seed, i)
            assert min(least[cell] for cell in of_it) <= value[front].sum() + 1e-9
            assert all(least[cell] <= value[front].sum() + 1e-9 for cell in of_it if cells == _MANY), seed
            met += any(np.allclose(bound.cells.in_s[cell], paid[0]) for cell in of_it)
    assert met > 75


@pytest.mark.long
def test_each_stage_pays_what_it_surely_pays_for_long_edges() -> None:
    surely = 0
    for seed in range(20):
        workload, _ = tables(random_instance(seed, most_layers=7))
        bound = None if workload is None else _bound(workload, np.arange(1))
        if workload is None or bound is None:
            continue
        inside, cells = _inside(workload), bound.cells
        none = cells.long_s.shape[1] - 1
        for i, j in product(range(len(inside)), repeat=2):
            if not inside[j] < inside[i]:
                continue
            stage, groups = inside[i] - inside[j], []
            for downset in (inside[i], inside[j]):
                front = [v for v in range(bound.work.own_s.size) if v not in downset]
                groups.append({int(cells.group[cell]) for cell in _cells_with(bound, bound.work.own_s[front].sum())})
            if i == len(inside) - 1:
                groups[0] = {none}
            if j == 0:
                groups[1] = {none}
            work_s = bound.work.own_s[list(stage)].sum()
            for length in range(cells.short_s.size + 1):
                paid_s = _paid_for_long(workload, bound, inside[i], inside[j], length)
                for group_i, group_j in product(*groups):
                    assert cells.long_s[length, group_i, group_j] <= paid_s * (1.0 + 1e-9) + 1e-12, seed
                    surely += cells.long_s[length, group_i, group_j] > 0.0
                if length > 0 and work_s > cells.short_s[length - 1]:
                    short = _short_paid(workload, bound, inside[i])[0, length - 1]
                    assert _paid_for_short(workload, bound, inside[i], inside[j], length)[0] == pytest.approx(short)
                    short = _short_paid(workload, bound, inside[j])[1, length - 1]
                    assert _paid_for_short(workload, bound, inside[i], inside[j], length)[1] == pytest.approx(short)
    assert surely > 250


def test_no_stage_pays_less_than_its_cells() -> None:
    compared = 0
    for seed in range(20):
        workload, _ = tables(random_instance(seed, most_layers=7))
        bound = None if workload is None else _bound(workload, np.arange(1))
        if workload is None or bound is None:
            continue
        graph, inside = workload.lattice.graph, _inside(workload)
        stages = Labelling.of(graph)
        assert stages is not None
        rng = Random(seed)
        cells_of = np.array([rng.randrange(3) for _ in range(graph.size)])
        charge_s = stages.charges.seconds(workload.arrays.edge_in_s[0], workload.arrays.edge_out_s[0])
        cells = int(cells_of.sum())
        most = rng.randint(0, cells)  # stages of more cells are not distinguished
        fronts, backs = (sorted(rng.randint(0, cells) for _ in range(2)) for _ in range(2))
        within = CellLimits(fronts[0], fronts[1], backs[0], backs[1], most - 1)
        whole, part = (
            least_cost(stages, cells_of, charge_s, cell_ranges(stages, cells_of, limits))
            for limits in (every_stage(cells_of, most - 1), within)
        )
        least, least_within = (
            np.full((cells + 1, most + 1), np.inf),
            np.full((fronts[1] - fronts[0] + 1, most + 1), np.inf),
        )
        none = bound.cells.stage_s.shape[0] - 1
        for outer in inside:
            for inner in inside:
                if not inner < outer:
                    continue
                paid_s = sum(sum(_paid_by(workload, outer, inner, e)) for e in range(len(graph.edges)))
                front, behind = (
                    sum(cells_of[v] for v in range(graph.size) if v not in some) for some in (outer, inner)
                )
                at = front, min(most, behind - front)
                least[at] = min(least[at], paid_s)
                if fronts[0] <= front <= fronts[1] and backs[0] <= behind <= backs[1]:
                    of_limits = front - fronts[0], at[1]
                    least_within[of_limits] = min(least_within[of_limits], paid_s)
                ends = [sum(bound.work.own_s[v] for v in range(graph.size) if v not in some) for some in (outer, inner)]
                groups = [{bound.cells.group[cell] for cell in _cells_with(bound, end_s)} for end_s in ends]
                of_ends = groups[0] if len(outer) < graph.size else {none}, groups[1] if inner else {none}
                for group, back in product(*of_ends):
                    assert bound.cells.stage_s[group, back] <= paid_s * (1.0 + 1e-12), seed
                    compared += 1
        assert whole == pytest.approx(least), seed
        assert part[:, :most] == pytest.approx(least_within[:, :most]), seed
    assert compared > 500


@pytest.mark.parametrize(("cells", "schedule"), long_after(0, zip((_MANY, _FEW), FlushSchedule.flushed(), strict=True)))
def test_no_plan_of_a_task_takes_less(schedule: FlushSchedule, cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(border_bound, "_CELLS", cells)
    monkeypatch.setattr(border_bound, "_MOST_WAYS", 8)  # bounds hold for any number of prices
    rng, compared, closer, ruled_out = Random(9), 0, 0, 0
    for seed, workload, _, task, batch_s in searched(schedule)[::2]:
        good, bound = path_prices(workload.arrays, task.arrays), _bound(workload, task.arrays.variants)
        if good is None or bound is None:
            continue
        bound = replace(bound, by_stages=None)
        for prices in (good, any_prices(rng, workload.arrays, task.arrays, good)):
            for upper_s in (batch_s, 1.1 * batch_s, np.inf):
                found_s = bound.least_s(workload.arrays, task.arrays, prices, 0.5 * task.lower_s, upper_s, never)
                assert found_s <= batch_s * (1.0 + 1e-9), (seed, task.degrees, upper_s)
            compared += 1
            bounds = (
                bound.least_s(workload.arrays, task.arrays, prices, 0.0, upper_s, never)
                for upper_s in (batch_s, 0.99 * batch_s)
            )
            closer += next(bounds) > max(prices.bound_s, 0.0)
            ruled_out += next(bounds) == np.inf
    assert compared > 25
    assert closer > compared / 3
    assert ruled_out > compared / 8


@pytest.mark.long
@pytest.mark.parametrize("schedule", long_after(1, FlushSchedule.flushed()))
def test_pieces_of_a_chain_give_prices_that_bound(schedule: FlushSchedule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piper_ray.engine.flush.position_program._MANY_LAYERS", 0)
    compared = 0
    for seed, workload, _, task, batch_s in searched(schedule):
        choices = LayerChoices.of(workload.arrays, task.arrays)
        prices = path_prices(workload.arrays, task.arrays)
        if prices is None:
            continue
        assert prices.bound_s <= batch_s * (1.0 + 1e-9), seed
        for count in (1, 3):
            pieces = choices.in_pieces(in_flight_at(task.arrays), count)
            assert pieces.copies.size <= count
            for figures, of_pieces in zip(choices[3:], pieces[3:], strict=True):
                assert _least(pieces, of_pieces) >= _least(choices, figures) * (1.0 - 1e-9)
            quickest = _least(choices, choices.forward_s + choices.backward_s)
            assert _least(pieces, pieces.forward_s + pieces.backward_s) == pytest.approx(quickest)
        compared += 1
    assert compared > 25


def test_the_cheapest_border_of_each_cell_is_found() -> None:
    """Cells: by how many layers are in front."""
    rng, compared = Random(4), 0
    for seed in range(12):
        workload, _ = tables(random_instance(seed, most_layers=7))
        if workload is None:
            continue
        graph = workload.lattice.graph
        labelling = border_labelling(graph)
        assert labelling is not None
        paid_s = np.array([rng.uniform(0.0, 1.0) for _ in graph.edges])
        charge_s, in_front = labelling.front_charges.seconds(np.zeros_like(paid_s), paid_s), labelling.label // 2
        least_s, bits = cheapest_downsets(labelling.moves, in_front, np.ones(graph.size, np.int64), charge_s)
        crossing_s = {}
        for inside in _inside(workload):
            crossing = [e for e, (tail, head, _) in enumerate(graph.edges) if tail not in inside and head in inside]
            crossing_s[frozenset(inside)] = paid_s[crossing].sum()
        for cell, row in enumerate(bits):
            sizes = [paid for inside, paid in crossing_s.items() if graph.size - len(inside) == cell]
            assert least_s[cell] == pytest.approx(min(sizes)), seed
            assert crossing_s[frozenset(members(row))] == pytest.approx(least_s[cell]), seed
            compared += len(sizes) > 1
        for known in (labelling, None):
            every = downsets_with_cheap_borders(graph, known, workload.arrays, 5)
            if every is not None:
                assert {frozenset(members(row)) for row in every} <= crossing_s.keys()
                assert {0, graph.size} <= {len(members(row)) for row in every}
    assert compared > 10


def test_borders_of_a_chain_cost_what_crosses_them() -> None:
    rng = Random(6)
    for seed in range(8):
        workload, _ = tables(random_instance(seed, most_layers=7))
        if workload is None:
            continue
        graph = workload.lattice.graph
        paid_s = np.array([rng.uniform(0.0, 1.0) for _ in graph.edges])
        found_s, bits = border_bound._borders_of_chain(graph, paid_s)
        assert [members(row) for row in bits] == [list(range(size)) for size in range(1, graph.size + 1)]
        assert found_s[-1] == np.inf
        for size, crossing_s in enumerate(found_s[:-1].tolist(), 1):
            crossing = [e for e, (tail, head, _) in enumerate(graph.edges) if head < size <= tail]
            assert crossing_s == pytest.approx(paid_s[crossing].sum())


@pytest.mark.long
def test_prices_sought_for_ways_bound_more(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, closer = Random(2), 0
    for schedule in FlushSchedule.flushed():
        for seed, workload, _, task, batch_s in searched(schedule)[::2]:
            good, bound = path_prices(workload.arrays, task.arrays), _bound(workload, task.arrays.variants)
            if good is None or bound is None:
                continue
            prices, found_s = any_prices(rng, workload.arrays, task.arrays, good), []
            for ways in (1, 60):
                monkeypatch.setattr(border_bound, "_MOST_WAYS", ways)
                by_borders, upper_s = replace(bound, by_stages=None), batch_s * (1.0 + 1e-9)
                found_s.append(by_borders.least_s(workload.arrays, task.arrays, prices, 0.0, upper_s, never))
                assert found_s[-1] <= batch_s * (1.0 + 1e-9), (seed, task.degrees)
            closer += found_s[1] > found_s[0] * (1.0 + 1e-3)
    assert closer > 10


def test_of_many_layers_bounds_near_the_plan_are_made_by_ways_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of others the search takes no longer than these would."""
    asked, compared = list[float](), 0

    def recorded(bound: BorderBound, *given: Any) -> float:  # noqa: ARG001
        asked.append(given[3])
        return float(given[3])

    monkeypatch.setattr(BorderBound, "least_s", recorded)
    for _, workload, paths, task, batch_s in searched(FlushSchedule.ONE_F_ONE_B)[:12]:
        bound = _bound(workload, task.arrays.variants)
        if bound is None or batch_s == 0.0:
            continue
        space, near_s = SearchSpace(workload.arrays, True, paths), 0.95 * batch_s
        near = replace(task, borders=bound, lower_s=near_s)
        for layers, often in ((10**6, 0), (0, 1)):
            monkeypatch.setattr(flush_space, "MANY_LAYERS", layers)
            asked.clear()
            found = run_task(space, near, np.array([1.001 * batch_s, 0.0]), TaskEffort.BOUND)
            assert near_s <= found.lower_s <= batch_s * (1.0 + 1e-9)
            assert len(asked) == often
        compared += 1
    assert compared > 3


def never() -> bool:
    return False


def _least(choices: LayerChoices, figures: IndexArray | FloatArray) -> float:
    """The least sum of all layers."""
    least = [figures[choices.layer == layer].min() for layer in range(choices.copies.size)]
    return float(choices.copies @ np.array(least))


def _bound(workload: FlushWorkload, variants: IndexArray) -> BorderBound | None:
    labelling = border_labelling(workload.lattice.graph)
    assert labelling is not None
    graph = workload.lattice.graph
    return BorderBound.of(graph, labelling, Labelling.of(graph), workload.arrays, variants)


def _inside(workload: FlushWorkload) -> list[set[int]]:
    return [
        {v for v in range(64 * row.size) if int(row[v >> 6]) >> (v & 63) & 1} for row in workload.lattice.arrays.bits
    ]


def _cells_with(bound: BorderBound, front_s: float) -> list[int]:
    cells = bound.cells
    found = (cells.from_s <= front_s * (1.0 + 1e-12)) & (front_s <= cells.to_s * (1.0 + 1e-12) + 1e-300)
    return np.flatnonzero(found).tolist()


def _spans_s(workload: FlushWorkload, bound: BorderBound) -> list[float]:
    """By looking at all vertices."""
    graph, spans_s = workload.lattice.graph, []
    for tail, head, _ in graph.edges:
        ends = [_reached(tail, graph.predecessors), _reached(head, graph.successors)]
        spans_s.append(sum(bound.work.own_s[v] for v in range(graph.size) if not any(v in end for end in ends)))
    return spans_s


def _reached(v: int, neighbours: tuple[tuple[int, ...], ...]) -> set[int]:
    found, pending = {v}, [v]
    while pending:
        for w in neighbours[pending.pop()]:
            if w not in found:
                found.add(w)
                pending.append(w)
    return found


def _short_paid(workload: FlushWorkload, bound: BorderBound, inside: set[int]) -> np.ndarray:
    """float64[2, l]: of the short edges that cross a border, what comes in behind it and goes out in front of it."""
    arrays, found = workload.arrays, np.zeros((2, bound.cells.short_s.size))
    for e, span_s in enumerate(_spans_s(workload, bound)):
        if arrays.edge_head[e] in inside and arrays.edge_tail[e] not in inside:
            is_short = span_s <= bound.cells.short_s
            found += np.array([[arrays.edge_in_s[0, e]], [arrays.edge_out_s[0, e]]]) * is_short
    return found


def _paid_by(workload: FlushWorkload, outer: set[int], inner: set[int], e: int) -> tuple[float, float]:
    arrays = workload.arrays
    tail, head = int(arrays.edge_tail[e]), int(arrays.edge_head[e])
    comes_in = arrays.edge_in_s[0, e] if tail not in outer and head in outer - inner else 0.0
    goes_out = arrays.edge_out_s[0, e] if tail in outer - inner and head in inner else 0.0
    return float(comes_in), float(goes_out)


def _paid_for_long(workload: FlushWorkload, bound: BorderBound, outer: set[int], inner: set[int], length: int) -> float:
    spans_s = _spans_s(workload, bound)
    limit_s = -1.0 if length == 0 else bound.cells.short_s[length - 1]
    return sum(sum(_paid_by(workload, outer, inner, e)) for e, span_s in enumerate(spans_s) if span_s > limit_s)


def _paid_for_short(
    workload: FlushWorkload, bound: BorderBound, outer: set[int], inner: set[int], length: int
) -> tuple[float, float]:
    spans_s = _spans_s(workload, bound)
    short = [e for e, span_s in enumerate(spans_s) if span_s <= bound.cells.short_s[length - 1]]
    paid = [_paid_by(workload, outer, inner, e) for e in short]
    return sum(comes_in for comes_in, _ in paid), sum(goes_out for _, goes_out in paid)
