"""Baselines on any small instance: never better than the optimum; equal runs against their slow definition."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from random import Random

import numpy as np
import pytest

from piper_ray.engine.solve import solve
from piper_ray.evaluate import evaluate
from piper_ray.model.constraints import Recompute, Restrictions, StageCount
from piper_ray.model.errors import InvalidPlan, UsageError
from piper_ray.model.instance import Edge, Instance, Layer, Tmpc
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.schedule import ASYNCHRONOUS, PAPERS_SCHEDULE, ScheduleName
from piper_ray.planners import PLANNERS, EqualRuns, PipeDream2BW, plan
from piper_ray.planners.equal_runs import grid_points, peak_bytes
from piper_ray.planners.runs import RunCosts, run_order, uniform_choices
from tests.instances import RECOMPUTE, VANILLA, random_instance
from tests.lengths import long_after
from tests.solver_support import ONE_THREAD


def some_restrictions(rng: Random) -> Restrictions:
    return Restrictions(rng.random() < 0.8, rng.random() < 0.8, rng.choice(list(Recompute)))


def repeated_instance(rng: Random) -> Instance:
    """Layers in front of a chain of blocks, the blocks, layers behind them; ids, layers and edges in random order."""
    before, blocks, after = rng.randint(0, 3), rng.randint(2, 6), rng.randint(0, 2)
    ids = rng.sample(range(100), before + blocks + after)
    chain, behind = ids[before : before + blocks], ids[before + blocks :]
    pairs = list(pairwise(chain))
    pairs += [(v, rng.choice(chain)) for v in ids[:before]] + [(rng.choice(chain), v) for v in behind]
    pairs += [(u, v) for i, u in enumerate(ids) for v in ids[i + 1 :] if rng.random() < 0.1]
    pairs = list(dict.fromkeys(pairs))

    def one(layer: int, time_s: float, name: str) -> Tmpc:
        w, a, b = (float(rng.randint(0, 4)) for _ in range(3))
        forward = {u: float(rng.randint(0, 2)) for u, v in pairs if v == layer}
        backward = {v: float(rng.randint(0, 2)) for u, v in pairs if u == layer}
        return Tmpc(name, time_s, w, a, b, forward, backward, recompute=name == RECOMPUTE)

    def layer(v: int) -> Layer:
        work = rng.uniform(10, 12) if v in chain else rng.uniform(0, 2)
        tmpcs = {
            t: tuple(one(v, work * more / t**0.8, name) for name, more in ((VANILLA, 1.0), (RECOMPUTE, 1.3)))
            for t in (1, 2)
        }
        return Layer(v, "block" if v in chain else f"layer {v}", tmpcs)

    return Instance(
        layers=tuple(map(layer, rng.sample(ids, len(ids)))),
        edges=tuple(Edge(u, v, float(rng.randint(0, 3))) for u, v in rng.sample(pairs, len(pairs))),
        devices=rng.randint(1, 12),
        microbatches=rng.choice([1, 4, 6, 12]),
        memory_bytes=rng.choice([15.0, 25.0, 40.0, 1000.0]),
        bandwidth_bytes_per_s=rng.choice([1.0, 4.0, 16.0]),
    )


def all_equal_runs(
    instance: Instance, restrictions: Restrictions, separate: bool
) -> Iterator[tuple[list[list[int]], int, int, dict[int, str]]]:
    """Every point of the grid: the layers of each stage, d, t, and each layer's TMPC."""
    order = run_order(instance)
    before, after = list(order.layers[: order.before]), list(order.layers[len(order.layers) - order.after :])
    between = list(order.layers[order.before : len(order.layers) - order.after])
    layouts = []
    for runs in range(1, len(between) + 1):
        lengths = [len(between) // runs + (i >= runs - len(between) % runs) for i in range(runs)]
        cut = [between[sum(lengths[:i]) : sum(lengths[: i + 1])] for i in range(runs)]
        joined = [list(run) for run in cut]
        joined[0] = before + joined[0]
        joined[-1] = joined[-1] + after
        layouts.append(joined)
        if separate:
            layouts.append([stage for stage in (before, *cut, after) if stage])
    for choice in uniform_choices(instance, restrictions):
        for layout in layouts:
            for d in range(1, instance.microbatches + 1 if restrictions.data_parallelism else 2):
                yield layout, d, choice.degree, {layer: tmpc.id for layer, tmpc in choice.tmpcs.items()}


def as_plan(layout: Sequence[Sequence[int]], d: int, t: int, tmpc_ids: dict[int, str]) -> Plan:
    return Plan(tuple(Stage(tuple(stage), d, t, {layer: tmpc_ids[layer] for layer in stage}) for stage in layout))


def value_s(instance: Instance, proposed: Plan) -> float | None:
    try:
        return evaluate(instance, proposed).time_per_sample_s
    except (InvalidPlan, UsageError):  # the latter: the schedule cannot run so few microbatches
        return None


def slow_equal_runs_s(instance: Instance, restrictions: Restrictions, separate: bool) -> float | None:
    values = [value_s(instance, as_plan(*point)) for point in all_equal_runs(instance, restrictions, separate)]
    return min((value for value in values if value is not None), default=None)


def assert_as_slow_definition(instance: Instance, restrictions: Restrictions, separate: bool) -> bool:
    """Returns whether there is a plan."""
    result = plan(instance, PipeDream2BW(separate=separate), restrictions=restrictions)
    expected = slow_equal_runs_s(instance, restrictions, separate)
    if expected is None or result.time_per_sample_s is None:
        assert result.time_per_sample_s is expected
        return False
    assert result.time_per_sample_s == pytest.approx(expected, rel=1e-12, abs=0.0)
    return True


@pytest.mark.parametrize("name", long_after(1, [name for name in ScheduleName if name not in ASYNCHRONOUS]))
def test_equal_runs_under_a_flush(name: ScheduleName, few: bool) -> None:
    """The best simulated step of the whole grid, with as many chunks on a rank as the schedule has."""
    feasible = 0
    for seed in range(8 if few else 16):
        rng = Random(seed)
        instance = repeated_instance(rng) if seed % 2 else random_instance(seed, most_layers=6, most_devices=6)
        instance = instance.replace(schedule=name)
        feasible += assert_as_slow_definition(instance, some_restrictions(rng), rng.random() < 0.5)
    assert feasible > 1


def test_constraints_on_the_whole_plan_leave_the_best_of_the_rest(few: bool) -> None:
    """Of the grid's plans under 1F1B those of two stages, which a free choice would often not be."""
    feasible = 0
    for seed in range(20 if few else 30):
        instance = repeated_instance(Random(seed)).replace(schedule="1f1b")
        two = Restrictions(constraints=[StageCount(2)])
        points = [as_plan(*point) for point in all_equal_runs(instance, Restrictions(), separate=False)]
        values = [value_s(instance, point) for point in points if len(point.stages) == 2]
        expected = min((value for value in values if value is not None), default=None)
        result = plan(instance, PipeDream2BW(), restrictions=two)
        if expected is None:
            assert result.plan is None
            continue
        feasible += 1
        assert result.time_per_sample_s == pytest.approx(expected, rel=1e-12)
    assert feasible >= 10


@pytest.mark.long
def test_equal_runs_of_random_graphs() -> None:
    feasible = 0
    for seed in range(60):
        rng = Random(seed)
        instance = random_instance(seed, most_layers=6, most_devices=9)
        feasible += assert_as_slow_definition(instance, some_restrictions(rng), rng.random() < 0.5)
    assert 20 <= feasible <= 57


@pytest.mark.long
def test_equal_runs_of_repeated_layers() -> None:
    feasible = separate_is_better = 0
    for seed in range(60):
        rng = Random(seed)
        instance, restrictions = repeated_instance(rng), some_restrictions(rng)
        assert run_order(instance).repeated
        feasible += assert_as_slow_definition(instance, restrictions, separate=True)
        together = plan(instance, PipeDream2BW(), restrictions=restrictions).time_per_sample_s
        apart = plan(instance, PipeDream2BW(separate=True), restrictions=restrictions).time_per_sample_s
        assert (apart or math.inf) <= (together or math.inf)
        separate_is_better += apart != together
    assert feasible >= 30
    assert separate_is_better >= 3


def test_costs_of_runs_are_those_of_evaluate() -> None:
    """Every grid point: the same time and the same memory."""
    points = 0
    for seed in range(60):
        rng = Random(seed)
        instance = repeated_instance(rng).replace(devices=1000, microbatches=12)
        order, choices = run_order(instance), uniform_choices(instance, Restrictions())
        costs = RunCosts.build(instance, order.layers, choices)
        cuts = sorted(rng.sample(range(1, len(order.layers)), rng.randint(0, min(3, len(order.layers) - 1))))
        layout = [list(stage) for stage in np.split(np.array(order.layers), cuts)]
        loose = instance.replace(memory_bytes=1e9)
        found = list(grid_points(instance, costs, choices, [np.array([0, *cuts])], np.array([1, 2, 3])))
        assert len(found) == 3 * len(choices)
        for point in found:
            ids = {layer: tmpc.id for layer, tmpc in point.choice.tmpcs.items()}
            proposed = as_plan([[int(v) for v in stage] for stage in layout], point.degree, point.choice.degree, ids)
            evaluation = evaluate(loose, proposed)
            value_s = evaluation.time_per_sample_s
            assert point.lower_s == pytest.approx(value_s * instance.microbatches, rel=1e-12, abs=0.0)
            needed = max(stage.memory_bytes for stage in evaluation.stages)
            assert peak_bytes(PAPERS_SCHEDULE, point, instance.microbatches) == needed
            assert point.devices == proposed.devices
            points += 1
    assert points >= 500


@pytest.mark.parametrize("name", long_after(1, PLANNERS))
def test_never_better_than_the_optimum(name: str) -> None:
    feasible = equal = 0
    for seed in range(60):
        rng = Random(seed)
        instance = repeated_instance(rng) if seed % 2 else random_instance(seed, most_devices=8)
        restrictions = some_restrictions(rng)
        result = plan(instance, name, restrictions=restrictions)
        if result.plan is None:
            continue
        feasible += 1
        assert result.time_per_sample_s == evaluate(instance, result.plan).time_per_sample_s
        best = solve(instance, restrictions=restrictions, options=ONE_THREAD)
        assert best.time_per_sample_s is not None
        assert result.time_per_sample_s is not None
        assert result.time_per_sample_s >= best.time_per_sample_s * (1 - 1e-9)
        equal += math.isclose(result.time_per_sample_s, best.time_per_sample_s, rel_tol=1e-9)
    assert feasible >= 10
    assert equal >= 1


def test_every_baseline_of_the_grid_is_one_of_its_points() -> None:
    """So none is better than the whole grid of equal runs."""
    for seed in range(40):
        instance = repeated_instance(Random(seed))
        grid = plan(instance, EqualRuns()).time_per_sample_s or math.inf
        for name in ("data-parallel", "tensor-parallel", "gpipe", "megatron"):
            assert (plan(instance, name).time_per_sample_s or math.inf) >= grid
