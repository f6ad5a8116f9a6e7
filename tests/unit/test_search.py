"""What the search proves, in which order it reports it, and which of several best plans it returns."""

from __future__ import annotations

from itertools import combinations
from random import Random

import pytest
from hypothesis import given

from piper_ray.cost.bounds import ceiling_s
from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.search.search import Search
from piper_ray.engine.solve import solve
from piper_ray.model.events import EvaluationAdvanced, EvaluationFinished, Event, IncumbentFound, StepFinished
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.solution import Status
from tests.brute_force import brute_force, least_evaluated_time_s
from tests.instances import build, instances, parallel_branches, random_instance, tmpc, two_towers
from tests.lengths import long_after
from tests.solver_support import ONE_THREAD, assert_optimal, tables

TOWERS = two_towers(8, devices=9, microbatches=12, memory_bytes=80.0)


class Log:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)


@given(instances(most_layers=4))
def test_every_plan_lies_between_the_bound_and_the_ceiling(instance: Instance) -> None:
    best = brute_force(instance)
    if best is not None:
        whole = tables(instance, contraction=without_contraction())
        assert whole.problem.lower_bound_s() <= best.time_per_sample_s
        assert tables(instance).problem.lower_bound_s() <= best.time_per_sample_s
        assert best.time_per_sample_s <= ceiling_s(instance)


def test_ceiling_by_hand() -> None:
    """All work, all weights synchronised at 4 / (N B), the edge paid in both of its stages at 2 / B each."""
    layers = {0: {1: [tmpc(3, 50), tmpc(2, 10)]}, 1: {1: [tmpc(5, 70)]}}
    instance = build(layers, {(0, 1): 11}, microbatches=4, bandwidth_bytes_per_s=2.0)
    assert ceiling_s(instance) == pytest.approx(3 + 5 + 4 * (50 + 70) / (4 * 2) + 2 * 2 * 11 / 2)


def test_bounds_by_hand() -> None:
    """8 s of work, 2 s of it in a layer that only t = 1 can run."""
    row = {1: [tmpc(6)], 2: [tmpc(2)]}  # on two devices 2 * 2 s: less work, and fewer seconds for each replica
    instance = build({0: {1: [tmpc(2)]}, 1: row}, {(0, 1): 0})

    def bound(devices: int, microbatches: int) -> float:
        return tables(instance.replace(devices=devices, microbatches=microbatches)).problem.lower_bound_s()

    assert bound(2, 2) == pytest.approx((2 + 4) / 2)  # work over devices
    assert bound(8, 1) == pytest.approx((2 + 2) / 1)  # replicas over data-parallel sum
    assert bound(3, 9) == pytest.approx((2 + 4) / 3)
    heavy = build({0: {1: [tmpc(2, weights=6)]}}, {}, devices=8, microbatches=4, bandwidth_bytes_per_s=1.0)
    # d = 1: 2 s; d = 2: (2 + 6) / 2 s; d = 4: (2 + 18) / 4 s.
    assert tables(heavy).problem.lower_bound_s() == pytest.approx(2.0)


@pytest.mark.parametrize("seed", long_after(4, range(16)))
def test_evaluations_agree_with_the_optimum(seed: int) -> None:
    instance = random_instance(seed, most_layers=7, most_devices=10)
    solution = solve(instance, options=ONE_THREAD)
    for evaluation in solution.stats.evaluations:
        optimum = float("inf") if solution.time_per_sample_s is None else solution.time_per_sample_s
        if evaluation.feasible:
            assert evaluation.threshold_s >= optimum * (1 - 1e-9)
        else:
            assert evaluation.threshold_s <= optimum
        assert 1 <= evaluation.live_downsets <= solution.stats.downsets
        assert evaluation.cells >= evaluation.live_downsets
        assert evaluation.seconds >= 0.0


def test_statistics() -> None:
    solution = solve(TOWERS, options=SolveOptions(threads=3))
    stats = solution.stats
    assert (stats.layers, stats.contracted_layers, stats.downsets, stats.levels) == (18, 18, 83, 19)
    assert stats.threads == 3
    assert min(stats.lattice_s, stats.stage_costs_s, stats.search_s) >= 0.0
    assert any(evaluation.stages_costed > 0 for evaluation in stats.evaluations)
    assert all(e.buckets_tested >= 0 and e.candidates_tested >= 0 for e in stats.evaluations)


def test_events_come_in_order() -> None:
    log = Log()
    solution = solve(TOWERS, options=ONE_THREAD, listener=log)
    steps = [event.step for event in log.events if isinstance(event, StepFinished)]
    assert steps == ["lattice", "stage costs"]
    finished = [event for event in log.events if isinstance(event, EvaluationFinished)]
    assert [event.index for event in finished] == list(range(1, len(finished) + 1))
    assert [event.threshold_s for event in finished] == [e.threshold_s for e in solution.stats.evaluations]
    assert [event.feasible for event in finished] == [e.feasible for e in solution.stats.evaluations]
    running = 1
    for event in log.events:
        if isinstance(event, EvaluationAdvanced):
            assert event.index == running
            assert 0 < event.done <= event.total == solution.stats.downsets
        elif isinstance(event, EvaluationFinished):
            assert event.index == running
            running += 1
    incumbents = [event for event in log.events if isinstance(event, IncumbentFound)]
    values = [event.time_per_sample_s for event in incumbents]
    assert values == sorted(values, reverse=True)
    assert values[-1] == pytest.approx(solution.time_per_sample_s, rel=1e-9)
    assert {event.origin for event in incumbents} <= {"chain", "evaluation"}


@pytest.mark.parametrize("degrees", [(1,), (1, 2)])
@pytest.mark.parametrize("seed", [2, 8, 15, 18])
def test_a_dear_search_finds_the_same(seed: int, degrees: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its best plan's own value comes before the thresholds below, and is evaluated once if no plan is faster; every
    evaluation is told once."""
    rng = Random(seed)
    rows = {v: {t: [tmpc(rng.randint(30, 90) / t, 2, rng.randint(1, 3))] for t in degrees} for v in range(12)}
    edges = {(u, v): 0.5 for v in range(4, 12) for u in rng.sample(range(v - v % 4), 2)}
    instance = build(rows, edges, devices=9, microbatches=12, memory_bytes=60.0)
    plain = solve(instance, options=ONE_THREAD)
    monkeypatch.setattr("piper_ray.engine.search.search._FEW", 0)
    monkeypatch.setattr("piper_ray.engine.search.search._SPENT", 1e-9)
    monkeypatch.setattr("piper_ray.engine.search.search._MANY_LIVE", 1)
    settle, settled, log = Search._settle_incumbent, list[Search](), Log()

    def watched(search: Search) -> None:
        settled.append(search)
        settle(search)

    monkeypatch.setattr(Search, "_settle_incumbent", watched)
    found = solve(instance, options=ONE_THREAD, listener=log)
    assert settled
    assert found.status is Status.OPTIMAL
    assert found.plan == plain.plan
    told = [event.index for event in log.events if isinstance(event, EvaluationFinished)]
    assert told == list(range(1, len(found.stats.evaluations) + 1))
    if len(degrees) == 1:
        at_optimum = [x for x in found.stats.evaluations if x.feasible and x.threshold_s == found.time_per_sample_s]
        assert len(at_optimum) == 1


@pytest.mark.long
def test_the_preferred_plan_may_come_from_above_the_best_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the one that an evaluation at the best value itself gives; of equal layers there are many as fast."""
    saved = 0
    for seed in range(40):
        rng = Random(seed)
        rows = {v: {t: [tmpc(6.0 / t, 2, rng.choice([1, 2]))] for t in (1, 2)} for v in range(7)}
        edges = {(v, v + 1): 0.5 for v in range(6)} | {(0, 3): 0.5}
        equal = build(rows, edges, devices=rng.randint(5, 12), microbatches=12, memory_bytes=60.0)
        for instance in (equal, random_instance(seed, most_layers=7, most_devices=10)):
            at_once = solve(instance, options=ONE_THREAD)
            with monkeypatch.context() as patched:
                patched.setattr("piper_ray.engine.search.search._FEW", 0)
                at_last = solve(instance, options=ONE_THREAD)
            assert at_once.plan == at_last.plan
            saved += len(at_once.stats.evaluations) < len(at_last.stats.evaluations)
    assert saved > 20


def test_a_chain_gives_a_plan_before_the_first_evaluation() -> None:
    log = Log()
    solve(TOWERS, options=ONE_THREAD, listener=log)
    search = [event for event in log.events if not isinstance(event, StepFinished)]
    kinds = [type(event) for event in search if not isinstance(event, EvaluationAdvanced)]
    assert IncumbentFound in kinds[: kinds.index(EvaluationFinished)]


def test_fewest_devices_and_stages_among_equally_fast_plans() -> None:
    """A stage of 8 s that nothing splits decides: the rest, 12 s, needs two devices of the 13 left, and two stages."""
    layers = {0: {1: [tmpc(8)]}, 1: {1: [tmpc(4)]}, 2: {1: [tmpc(4)]}, 3: {1: [tmpc(4)]}}
    edges = {(0, 1): 0.0, (1, 2): 0.0, (2, 3): 0.0}
    instance = build(layers, edges, devices=14, microbatches=101)
    solution = solve(instance, options=ONE_THREAD)
    assert_optimal(instance, solution)
    assert solution.time_per_sample_s == 8.0
    assert solution.plan is not None
    assert solution.plan.devices == 3
    assert len(solution.plan.stages) == 3


def test_one_stage_rather_than_two_on_as_many_devices() -> None:
    """Two layers of 4 s: one stage with d = 2, or two stages, both 4 s on two devices."""
    instance = build({0: {1: [tmpc(4)]}, 1: {1: [tmpc(4)]}}, {(0, 1): 0}, devices=2, microbatches=2)
    solution = solve(instance, options=ONE_THREAD)
    assert solution.time_per_sample_s == 4.0
    assert solution.plan is not None
    assert [stage.data_parallel_degree for stage in solution.plan.stages] == [2]


def test_a_stage_runs_as_fast_as_its_memory_allows() -> None:
    """The stage that does not decide takes its fastest TMPCs too, not just any that keep the threshold."""
    row = {1: [tmpc(2, fixed=9, name="fast"), tmpc(4, fixed=1, name="small")]}
    instance = build({0: row, 1: {1: [tmpc(10)]}}, {(0, 1): 0}, devices=2, microbatches=3, memory_bytes=10.0)
    solution = solve(instance, options=ONE_THREAD)
    assert solution.time_per_sample_s == 10.0
    assert solution.plan is not None
    assert [stage.tmpc_ids for stage in solution.plan.stages] == [{0: "fast"}, {1: "vanilla"}]


@given(instances(most_layers=2, most_devices=3, most_tmpcs=2))
def test_no_plan_at_all_is_better_by_the_independent_check(instance: Instance) -> None:
    """Against every plan there is, valued by ``evaluate`` alone."""
    least = least_evaluated_time_s(instance)
    solution = solve(instance, options=ONE_THREAD)
    assert (solution.status is Status.INFEASIBLE) == (least is None)
    if least is not None:
        assert solution.time_per_sample_s == pytest.approx(least, rel=1e-9, abs=0.0)


def test_lower_bound_of_an_unlimited_solve_is_the_proof() -> None:
    instance = parallel_branches(1, 4, devices=5, microbatches=8, memory_bytes=70.0)
    solution = solve(instance, options=ONE_THREAD)
    assert solution.time_per_sample_s is not None
    assert solution.lower_bound_s >= solution.time_per_sample_s * (1 - 1e-9)
    assert solution.lower_bound_s <= solution.time_per_sample_s


@pytest.mark.long
def test_plans_that_are_almost_as_fast() -> None:
    """Times a few 1e-11 apart count as equal: then the smaller plan is returned, and it is as good as proved."""
    for seed in range(100):
        rng = Random(seed)
        layers = {
            v: {1: [tmpc(rng.randint(1, 4) + rng.choice([0, 1, 2, 5]) * 1e-11)]} for v in range(rng.randint(5, 8))
        }
        pairs = [pair for pair in combinations(layers, 2) if rng.random() < 0.15]
        edges = {pair: rng.choice([0.0, 0.5, 0.5 + 1e-11]) for pair in pairs}
        instance = build(layers, edges, devices=rng.randint(2, 5), microbatches=1013)
        solution = solve(instance, options=ONE_THREAD)
        assert solution.status is Status.OPTIMAL, seed
        assert solution.stopped_by is None
        assert solution.gap is not None
        assert solution.gap <= 1.2e-9
