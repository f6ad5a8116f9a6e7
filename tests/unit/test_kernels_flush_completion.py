"""What stages in front of a tail cost at least by prices: the shortest way through the lattice, and no plan is lost."""

from __future__ import annotations

from itertools import islice, pairwise
from random import Random

import numpy as np
import pytest

from piper_ray.engine.flush import way_program
from piper_ray.engine.flush.path_prices import path_bounds
from piper_ray.engine.flush.position_program import path_prices
from piper_ray.engine.flush.tables import FlushWorkload, tables_on
from piper_ray.engine.flush.tasks import DegreePair
from piper_ray.engine.flush.way_program import Tightened
from piper_ray.engine.kernels.flush_completion import PlacedStages, cheapest_way, placed_stages
from piper_ray.engine.kernels.flush_stages import in_flight, least_figures, least_memory_bytes, priced_time_s
from piper_ray.engine.kernels.flush_states import least_priced_s
from piper_ray.engine.kernels.flush_types import NO_FREE_STAGES, SUM, FlushTables, PathBounds
from piper_ray.engine.kernels.types import FloatArray, StageKey, frozen
from piper_ray.engine.lattice.downsets import listed_lattice
from tests.flush_schedules import FlushSchedule
from tests.lengths import long_after
from tests.unit.test_flush_limits import searched
from tests.unit.test_flush_path_prices import any_prices

_ANY = 20_000_000


@pytest.mark.parametrize("schedule", long_after(1, FlushSchedule.flushed()))
def test_without_a_cutoff_it_is_the_shortest_way_from_each_tail(schedule: FlushSchedule) -> None:
    compared = closer = 0
    for seed, workload, _, task, batch_s in islice(searched(schedule), 40):
        bounds = _bounds(workload.arrays, task)
        if bounds is None:
            continue
        found, way, stages = cheapest_way(_stages(workload.arrays, task, bounds, 1e3 * batch_s), bounds, 1e3 * batch_s)
        shortest_s = _shortest_s(workload.arrays, task, bounds)
        reached = np.isfinite(found)
        assert reached[0, 0], seed
        assert found[reached] == pytest.approx(shortest_s[reached], rel=1e-7, abs=2e-6 * batch_s), seed
        of_way = [(inner, outer, q) for q, (inner, outer) in enumerate(pairwise(way.tolist()))]
        assert way[0] == 0
        assert way[-1] == len(found) - 1
        assert set(of_way) <= set(_listed(stages))
        compared += 1
        closer += found[0, 0] > bounds.ahead_s[0, 0] * (1.0 + 1e-6)
    assert compared > 30
    assert closer > compared / 8


@pytest.mark.parametrize("schedule", long_after(1, FlushSchedule.flushed()))
def test_a_cutoff_leaves_the_way_of_each_plan_below_it(schedule: FlushSchedule) -> None:
    """What is left is no less than without a cutoff, and of plans within it no more than they take, by any prices."""
    rng, dropped, fewer = Random(8), 0, 0
    for seed, workload, _, task, batch_s in searched(schedule):
        good = path_prices(workload.arrays, task.arrays)
        bounds = _bounds(workload.arrays, task)
        if good is None or bounds is None:
            continue
        stages = _stages(workload.arrays, task, bounds, 1e3 * batch_s)
        whole_s, *_ = cheapest_way(stages, bounds, 1e3 * batch_s)
        for share in (1.0, 1.1):
            stages = _stages(workload.arrays, task, bounds, share * batch_s)
            found_s, _, left = cheapest_way(stages, bounds, share * batch_s)
            assert (found_s >= whole_s - 2e-6 * batch_s).all(), seed
            dropped += int(np.count_nonzero(np.isinf(found_s) & np.isfinite(whole_s)))
            for _ in range(2):
                assert found_s[0, 0] <= batch_s * (1.0 + 1e-9), seed
                prices = any_prices(rng, workload.arrays, task.arrays, good)
                some = path_bounds(workload.arrays, task.arrays, prices)
                found_s, _, left = cheapest_way(frozen(left), some, share * batch_s)
            assert set(_listed(left)) <= set(_listed(stages))
            fewer += len(_listed(left)) < len(_listed(stages))
    assert dropped > 40
    assert fewer > 8


def test_no_room_and_a_wish_to_stop_leave_stages_out() -> None:
    _, workload, _, task, batch_s = next(iter(searched(FlushSchedule.flushed()[0])))
    bounds = _bounds(workload.arrays, task)
    assert bounds is not None
    for most, wish in ((-1, 0.0), (_ANY, 1.0)):
        assert not _placed(workload.arrays, task, bounds, np.array([batch_s, wish]), most)[0]


@pytest.mark.long
@pytest.mark.parametrize("schedule", long_after(1, FlushSchedule.flushed()))
def test_tightened_tables_bound_no_plan_too_high(schedule: FlushSchedule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(way_program, "_FEW_STAGES", 0)
    compared = closer = ruled_out = fewer = 0
    for seed, workload, _, task, batch_s in islice(searched(schedule), 30):
        prices, bounds = path_prices(workload.arrays, task.arrays), _bounds(workload.arrays, task)
        if prices is None or bounds is None or batch_s == 0.0:
            continue
        for share in (0.97, 1.0, 1.1):
            cutoff_s = share * batch_s
            stages = _stages(workload.arrays, task, bounds, cutoff_s)
            found = Tightened(workload.arrays, task.arrays, prices, stages, cutoff_s)
            found.tighten()
            ruled_out += share < 1.0 and found.rows.size == 0
            if share < 1.0:
                continue
            before_s, *_ = cheapest_way(stages, bounds, cutoff_s)
            assert found.ahead_s[0, 0] <= batch_s * (1.0 + 1e-9), seed
            assert found.ahead_s[0, 0] >= before_s[0, 0] - 2e-6 * batch_s, seed
            closer += found.ahead_s[0, 0] > before_s[0, 0] + 1e-3 * batch_s
            fewer += found.rows.size < len(workload.arrays.bits)
            compared += 1
            _check_rows(workload, found)
    assert compared > 30
    assert closer > compared / 8
    assert ruled_out > compared / 8
    assert fewer > compared / 20


def _check_rows(workload: FlushWorkload, found: Tightened) -> None:
    """The tables are those of the lattice of the downsets that are left."""
    bits = workload.arrays.bits[found.rows]
    expected = tables_on(listed_lattice(workload.lattice.graph, bits), workload.arrays, workload.values)
    for name, values in expected._asdict().items():
        mine = getattr(found.tables, name)
        assert mine.shape == values.shape, name
        if name in ("crossing", "cut") and values.size > 0:  # in any order within a downset
            row = np.repeat(np.arange(found.rows.size), np.diff(getattr(expected, f"{name}_start")))
            mine, values = (one[np.lexsort((one, row))] for one in (mine, values))
        assert np.allclose(mine, values, rtol=1e-9, atol=1e-9), name


def _listed(stages: PlacedStages) -> list[tuple[int, int, int]]:
    """The inner and the outer downset of each stage, and its position."""
    outer = np.repeat(np.arange(stages.start.size - 1), np.diff(stages.start))
    return list(zip(stages.inner[stages.stage].tolist(), outer.tolist(), stages.behind.tolist(), strict=True))


def _bounds(tables: FlushTables, task: DegreePair) -> PathBounds | None:
    prices = path_prices(tables, task.arrays)
    return None if prices is None else path_bounds(tables, task.arrays, prices)


def _stages(tables: FlushTables, task: DegreePair, bounds: PathBounds, batch_s: float) -> PlacedStages:
    has_all, stages = _placed(tables, task, bounds, np.array([batch_s, 0.0]), _ANY)
    assert has_all
    return stages


def _placed(
    tables: FlushTables, task: DegreePair, bounds: PathBounds, control: FloatArray, most: int
) -> tuple[bool, PlacedStages]:
    most_tails = np.full(tables.bits.shape[0], task.arrays.most_stages)
    has_all, stages = placed_stages(tables, task.arrays, task.ahead, most_tails, bounds, NO_FREE_STAGES, most, control)
    return has_all, frozen(stages)


def _shortest_s(tables: FlushTables, task: DegreePair, bounds: PathBounds) -> FloatArray:
    """By all stages of the lattice, at all positions."""
    m, arrays = tables.bits.shape[0], task.arrays
    inside = [{v for v in range(64 * row.size) if int(row[v >> 6]) >> (v & 63) & 1} for row in tables.bits]
    found = np.full((m, arrays.most_stages + 1), np.inf)
    found[m - 1] = 0.0
    for j in range(m - 2, -1, -1):
        for i in range(j + 1, m):
            if not inside[j] < inside[i]:
                continue
            for r in arrays.variants:
                key = StageKey(i, j, r)
                if tables.sums[r, i, SUM.missing] != tables.sums[r, j, SUM.missing]:
                    continue
                least = least_figures(key, tables, arrays)
                for behind in range(arrays.most_stages):
                    y = in_flight(arrays.schedule, arrays.microbatches, behind)
                    if least_memory_bytes(key, y, tables, arrays) > arrays.memory_bytes[r]:
                        continue
                    if arrays.stages > 0 and i == m - 1 and behind + 1 != arrays.stages:
                        continue
                    time_s = priced_time_s(key, y, least, tables, arrays)
                    cost_s = least_priced_s(key, behind, time_s, least, bounds)
                    if i == m - 1:
                        cost_s += bounds.sync[behind + 1 :].sum() * least.sync_s
                    found[j, behind] = min(found[j, behind], cost_s + found[i, behind + 1])
    return found
