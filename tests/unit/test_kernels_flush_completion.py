"""What stages in front of a tail cost at least by prices: the shortest way through the lattice, and no plan is lost."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from piper_ray.engine.flush.path_prices import path_bounds
from piper_ray.engine.flush.position_program import path_prices
from piper_ray.engine.flush.tasks import DegreePair
from piper_ray.engine.kernels.flush_completion import least_ahead_s
from piper_ray.engine.kernels.flush_stages import in_flight, least_figures, least_memory_bytes, priced_time_s
from piper_ray.engine.kernels.flush_states import least_priced_s
from piper_ray.engine.kernels.flush_types import SUM, FlushTables, PathBounds
from piper_ray.engine.kernels.types import FloatArray, StageKey
from tests.flush_schedules import FlushSchedule
from tests.lengths import long_after
from tests.unit.test_flush_limits import searched

_ANY = 20_000_000


@pytest.mark.parametrize("schedule", long_after(1, FlushSchedule.flushed()))
def test_without_a_cutoff_it_is_the_shortest_way_from_each_tail(schedule: FlushSchedule) -> None:
    compared = closer = 0
    for seed, workload, _, task, batch_s in islice(searched(schedule), 40):
        bounds = _bounds(workload.arrays, task)
        if bounds is None:
            continue
        found = _found(workload.arrays, task, bounds, 1e3 * batch_s)
        shortest_s = _shortest_s(workload.arrays, task, bounds)
        reached = np.isfinite(found)
        assert reached[0, 0], seed
        expected_s = np.maximum(shortest_s, bounds.ahead_s)[reached]
        assert found[reached] == pytest.approx(expected_s, rel=1e-7, abs=2e-6 * batch_s), seed
        compared += 1
        closer += found[0, 0] > bounds.ahead_s[0, 0] * (1.0 + 1e-6)
    assert compared > 30
    assert closer > compared / 8


@pytest.mark.parametrize("schedule", long_after(1, FlushSchedule.flushed()))
def test_a_cutoff_leaves_the_way_of_each_plan_below_it(schedule: FlushSchedule) -> None:
    """What is left is no less than without a cutoff, and of plans within it no more than they take."""
    dropped = 0
    for seed, workload, _, task, batch_s in searched(schedule):
        bounds = _bounds(workload.arrays, task)
        if bounds is None:
            continue
        whole_s = _found(workload.arrays, task, bounds, 1e3 * batch_s)
        for share in (1.0, 1.1):
            found_s = _found(workload.arrays, task, bounds, share * batch_s)
            assert found_s[0, 0] <= batch_s * (1.0 + 1e-9), seed
            assert (found_s >= whole_s - 2e-6 * batch_s).all(), seed
            dropped += int(np.count_nonzero(np.isinf(found_s) & np.isfinite(whole_s)))
    assert dropped > 100


def test_no_room_and_a_wish_to_stop_leave_what_there_was() -> None:
    _, workload, _, task, batch_s = next(iter(searched(FlushSchedule.flushed()[0])))
    bounds = _bounds(workload.arrays, task)
    assert bounds is not None
    tables = workload.arrays
    most_tails = np.full(tables.bits.shape[0], task.arrays.most_stages)
    for most, wish in ((-1, 0.0), (_ANY, 1.0)):
        control = np.array([batch_s, wish])
        found = least_ahead_s(tables, task.arrays, task.ahead, most_tails, bounds, most, control)
        assert np.array_equal(found, bounds.ahead_s)


def _bounds(tables: FlushTables, task: DegreePair) -> PathBounds | None:
    prices = path_prices(tables, task.arrays)
    return None if prices is None else path_bounds(tables, task.arrays, prices)


def _found(tables: FlushTables, task: DegreePair, bounds: PathBounds, batch_s: float) -> FloatArray:
    most_tails = np.full(tables.bits.shape[0], task.arrays.most_stages)
    found: FloatArray = least_ahead_s(
        tables, task.arrays, task.ahead, most_tails, bounds, _ANY, np.array([batch_s, 0.0])
    )
    return found


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
