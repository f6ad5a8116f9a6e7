"""scripts/bench_ray: its instance, its judgement of answers, and its model. No Ray, no timings."""

from __future__ import annotations

import dataclasses

import pytest

from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.preview import forecast_solve
from piper_ray.engine.solve import solve
from piper_ray.model.solution import EvaluationStats, Solution, SolveStats, Status
from scripts.ray_benchmarks.cases import RAY_CASES, TOWERS, RayCase, towers
from scripts.ray_benchmarks.meter import BatchRecord, Meter
from scripts.ray_benchmarks.model import CALL_HERE_S, LEAST_CALL_S, Constants, crossing, fit, predict
from scripts.ray_benchmarks.results import CHOSEN, EXECUTORS, LOCAL, ONE, TWO, RayResult, Run
from scripts.ray_benchmarks.tables import tables_of

BATCH = BatchRecord(
    first=True, levels=2, downsets=10_000, chunks=14, put_bytes=10_000_000, worked_s=1.0, began_s=5.0, seconds=1.01
)
FREE = Constants(0.0, 0.0, 0.0, 0.0)


def _run(*batches: BatchRecord, search_s: float = 3.0, thresholds: tuple[float, ...] = (1.0, 2.0)) -> Run:
    evaluations = tuple(EvaluationStats(threshold_s, True, 0.5, 3, 4, 0, 0, 0) for threshold_s in thresholds)
    stats = SolveStats(4, 4, 10, 4, 20, 1, 0.0, 0.0, search_s, evaluations)
    return Run(Solution(Status.OPTIMAL, 2.0, 2.0, None, stats), batches, bounded=False)


def test_the_towers_have_fifty_million_pairs() -> None:
    (case,) = (case for case in RAY_CASES if case.id == TOWERS)
    expected = forecast_solve(case.load())
    assert expected.downsets == 131**2 + 2
    assert expected.pairs is not None
    assert expected.pairs >= 50_000_000


@pytest.mark.parametrize("case", RAY_CASES, ids=lambda case: case.id)
def test_every_case_loads(case: RayCase) -> None:
    instance = case.load()
    assert f"K={instance.devices} N={instance.microbatches} M=" in case.title


def test_any_number_of_towers() -> None:
    instance = towers(3, 4, devices=4, microbatches=8, memory="8GiB")
    assert forecast_solve(instance).downsets == 5**3 + 2


def test_a_meter_changes_no_answer() -> None:
    instance = towers(2, 6, devices=4, microbatches=8, memory="4GiB")
    with_meter = solve(instance, backend=Meter(LocalBackend(1)))
    assert with_meter.plan == solve(instance).plan


def test_batches_at_a_time_are_waited_for_once() -> None:
    other = dataclasses.replace(BATCH, began_s=5.5)
    inside = dataclasses.replace(BATCH, began_s=5.6, seconds=0.1)
    assert _run(BATCH, inside, other).waited_s == pytest.approx(1.51)
    assert _run(BATCH, inside, other).driver_share == pytest.approx(1.0 - 1.51 / 3.0)


def test_free_communication_leaves_work_and_driver() -> None:
    run = _run(BATCH)
    for workers in (1, 2, 7):
        found = predict(run, FREE, 1, workers)
        assert found.work_s == pytest.approx(1.0 / workers, rel=0.2)
        assert found.seconds == pytest.approx(found.work_s + run.driver_s)


def test_work_ends_where_downsets_do() -> None:
    single = dataclasses.replace(BATCH, downsets=3)
    assert predict(_run(single), FREE, 256, 8).work_s == pytest.approx(1.0 / 3)


def test_only_other_machines_fetch() -> None:
    constants = Constants(0.0, 0.0, 1e-9, 1e-9)
    assert predict(_run(BATCH), constants, 1, 8).fetched_s == 0.0
    assert predict(_run(BATCH), constants, 4, 8).fetched_s == pytest.approx(10_000_000 * 4e-9)


def test_the_crossing_is_the_first_machine_count_above_half() -> None:
    run, constants = _run(BATCH, search_s=1.02), Constants(0.005, 0.0002, 1e-9, 1e-9)
    found = crossing(run, constants, 4)
    assert found is not None
    assert found.share > 0.5
    assert predict(run, constants, found.nodes - 1, 4).share <= 0.5
    assert crossing(run, FREE, 1, most_nodes=2) is None


def test_the_fit_finds_its_constants() -> None:
    def batch(chunks: int) -> BatchRecord:
        return dataclasses.replace(BATCH, chunks=chunks, worked_s=1.0, seconds=1.004 + 0.0005 * chunks)

    constants = fit([batch(chunks) for chunks in (1, 4, 9, 20)])
    assert constants.round_trip_s == pytest.approx(0.004)
    assert constants.call_s == pytest.approx(0.0005)
    one_size = fit([dataclasses.replace(BATCH, seconds=BATCH.worked_s)])
    assert (one_size.round_trip_s, one_size.call_s) == (CALL_HERE_S, LEAST_CALL_S)


def test_answers_are_compared_by_threshold() -> None:
    result = RayResult(RAY_CASES[0])
    for name in EXECUTORS:
        result.runs[name].append(_run(BATCH))
    ahead = _run(BATCH, thresholds=(1.0, 1.5, 2.0))
    result.runs[TWO] = [ahead]
    assert result.differences == []
    assert result.common_evaluations == 1
    wrong = dataclasses.replace(ahead, solution=dataclasses.replace(ahead.solution, time_per_sample_s=2.5))
    result.runs[TWO] = [wrong]
    assert result.differences == [f"{result.case.title}: {TWO} does not answer as the local search does"]


def test_a_missed_goal_is_marked() -> None:
    result = RayResult(RAY_CASES[0])
    for name, search_s in ((LOCAL, 3.0), (ONE, 4.0), (TWO, 2.0), (CHOSEN, 3.0)):
        result.runs[name].append(_run(BATCH, search_s=search_s))
    times = next(tables_of([result], FREE, 8))
    assert times.rows[0][-4:] == ("0.75 !", "2.00", "1.00", "1.00")


def test_a_search_that_stayed_in_the_driver_has_no_model() -> None:
    result = RayResult(RAY_CASES[0])
    for name in EXECUTORS:
        result.runs[name].append(_run())
    assert [table.title for table in tables_of([result], FREE, 8)][-1] == "The model and what was measured here"
