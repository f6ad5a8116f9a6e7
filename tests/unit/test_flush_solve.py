"""Constraints, limits and figures of solves under schedules with a flush."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle, pairwise
from typing import Any

import numpy as np
import pytest

import piper_ray
from piper_ray.engine.flush import solve as flush_solve
from piper_ray.engine.flush import task_search
from piper_ray.engine.flush.search import FIRST_SHARE, FlushSearch, _Outcome
from piper_ray.engine.flush.space import SearchSpace
from piper_ray.engine.flush.task_search import TaskEffort, TaskResult
from piper_ray.engine.flush.tasks import DegreePair
from piper_ray.engine.kernels.flush_closing import TOO_LONG, StageList, best_stages, best_state
from piper_ray.engine.kernels.flush_types import FlushTables, FlushTask, TailArrays
from piper_ray.engine.kernels.types import FloatArray
from piper_ray.engine.ledger import Limits
from piper_ray.model.constraints import (
    AllDevices,
    Constraint,
    Restrictions,
    SameDegrees,
    StageCount,
    TensorParallelDegrees,
)
from piper_ray.model.errors import UsageError
from piper_ray.model.events import DegreesAdvanced, DegreesSearched, Event, IncumbentFound, StepFinished
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import StepTerms
from piper_ray.model.solution import Infeasibility, Solution, Status
from piper_ray.model.stop import Stop, StoppedBy
from piper_ray.workloads.formats.load import instance_of
from tests.data import INPUTS
from tests.flush_brute_force import plan_batch_s
from tests.flush_instances import uneven_layers
from tests.flush_schedules import FlushSchedule
from tests.flush_support import solve_flush
from tests.instances import build, equal_chain, random_instance, tmpc, two_towers
from tests.lengths import long_after

ONE_F_ONE_B, GPIPE = FlushSchedule.ONE_F_ONE_B, FlushSchedule.GPIPE


def degrees(solution: Solution) -> tuple[int, int, int]:
    """d, t and p of the plan."""
    assert solution.plan is not None
    first = solution.plan.stages[0]
    return first.data_parallel_degree, first.tensor_parallel_degree, len(solution.plan.stages)


@dataclass(frozen=True)
class Told:
    """A listener that keeps what it hears."""

    events: list[Event]

    def __call__(self, event: Event) -> None:
        self.events.append(event)


@dataclass(frozen=True)
class TwoReplicas(Constraint):
    """One of a user's own."""

    def admits_data_parallel_degree(self, degree: int) -> bool:
        return degree == 2

    def violations(self, instance: Instance, plan: Plan) -> Iterator[str]:  # noqa: ARG002
        yield from (f"d = {x.data_parallel_degree}" for x in plan.stages if x.data_parallel_degree != 2)


def without_weights(instance: Instance) -> Instance:
    """There is nothing to synchronise."""
    layers = (
        replace(x, tmpcs={t: tuple(replace(tmpc, weights_bytes=0.0) for tmpc in row) for t, row in x.tmpcs.items()})
        for x in instance.layers
    )
    return replace(instance, layers=tuple(layers))


def some_instances() -> list[Instance]:
    return [random_instance(seed, most_layers=5, most_devices=8) for seed in range(12)]


def test_equal_layers_under_1f1b_take_m_and_p_minus_1_times_a_stage() -> None:
    instance = equal_chain(4, devices=4, microbatches=8, memory_bytes=1e6, bandwidth_bytes_per_s=1e9)
    restrictions = Restrictions(tensor_parallelism=False, constraints=[StageCount(4)])
    solution = solve_flush(instance, ONE_F_ONE_B, restrictions=restrictions)
    assert degrees(solution) == (1, 1, 4)
    assert solution.plan is not None
    assert solution.time_per_sample_s == pytest.approx((8 + 4 - 1) * 6.0 / 8, rel=1e-8)


@pytest.mark.long
@pytest.mark.parametrize("schedule", long_after(1, FlushSchedule.flushed()))
def test_constraints_are_kept_and_the_best_of_all_is_the_best_of_each(schedule: FlushSchedule) -> None:
    for instance in some_instances():
        free = solve_flush(instance, schedule)
        by_stages = [
            solve_flush(instance, schedule, restrictions=Restrictions(constraints=[StageCount(p)]))
            for p in range(1, len(instance.layers) + 1)
        ]
        values = [x.time_per_sample_s for x in by_stages if x.time_per_sample_s is not None]
        assert all(degrees(x)[2] == p for p, x in enumerate(by_stages, start=1) if x.plan is not None)
        assert (min(values) if values else None) == pytest.approx(free.time_per_sample_s)
        full = solve_flush(instance, schedule, restrictions=Restrictions(constraints=[AllDevices()]))
        if full.plan is not None and full.time_per_sample_s is not None:
            assert full.plan.devices == instance.devices
            assert free.time_per_sample_s is not None
            assert full.time_per_sample_s >= free.time_per_sample_s * (1 - 1e-12)
        for t in instance.degrees:
            restrictions = Restrictions(constraints=[TensorParallelDegrees((t,))])
            only = solve_flush(instance, schedule, restrictions=restrictions)
            assert only.plan is None or degrees(only)[1] == t
        single = solve_flush(instance, schedule, restrictions=Restrictions(data_parallelism=False))
        assert single.plan is None or degrees(single)[0] == 1
        halves = solve_flush(instance, schedule, restrictions=Restrictions(constraints=[TwoReplicas()]))
        assert halves.plan is None or degrees(halves)[0] == 2


@pytest.mark.long
@pytest.mark.parametrize("schedule", long_after(1, FlushSchedule.flushed()))
def test_more_memory_or_devices_never_hurt(schedule: FlushSchedule) -> None:
    for instance in some_instances():
        best_s = np.inf
        for memory_bytes, devices in ((0.5, 0), (1.0, 0), (2.0, 0), (2.0, 1), (2.0, 4), (1e6, 4)):
            larger = instance.replace(
                memory_bytes=instance.memory_bytes * memory_bytes, devices=instance.devices + devices
            )
            found = solve_flush(larger, schedule)
            batch_s = np.inf if found.time_per_sample_s is None else found.time_per_sample_s
            assert batch_s <= best_s * (1 + 1e-9)
            best_s = batch_s


@pytest.mark.long
@pytest.mark.parametrize("schedule", long_after(1, FlushSchedule.flushed()))
def test_threads_do_not_change_the_plan(schedule: FlushSchedule) -> None:
    for instance in [*some_instances(), *(uneven_layers(seed) for seed in range(20))]:
        one, many = (solve_flush(instance, schedule, options=SolveOptions(threads=threads)) for threads in (1, 4))
        assert one.plan == many.plan
        assert one.status is many.status


@pytest.mark.long
def test_overlapped_synchronisation_takes_less() -> None:
    shown = 0
    for instance in some_instances():
        plain = solve_flush(instance, ONE_F_ONE_B)
        hidden = solve_flush(instance, ONE_F_ONE_B, step=StepTerms(all_reduce_overlap=1.0))
        without = solve_flush(without_weights(instance), ONE_F_ONE_B)
        if plain.time_per_sample_s is None or hidden.time_per_sample_s is None or without.time_per_sample_s is None:
            assert plain.plan is hidden.plan is without.plan is None
            continue
        assert hidden.time_per_sample_s == pytest.approx(without.time_per_sample_s)
        assert hidden.time_per_sample_s <= plain.time_per_sample_s * (1 + 1e-12)
        shown += hidden.time_per_sample_s < plain.time_per_sample_s
    assert shown


def test_a_stop_asked_for_beforehand_leaves_a_bound() -> None:
    stop: Stop[Solution] = Stop()
    stop.request()
    instance = two_towers(6, devices=4, memory_bytes=1e6)
    stopped = solve_flush(instance, ONE_F_ONE_B, stop=stop)
    optimum = solve_flush(instance, ONE_F_ONE_B)
    assert stopped.stopped_by == "interrupt"
    assert stopped.status in (Status.UNKNOWN, Status.FEASIBLE)
    assert optimum.time_per_sample_s is not None
    assert 0.0 < stopped.lower_bound_s <= optimum.time_per_sample_s
    offered = stop.answer()
    assert offered is not None
    assert offered.lower_bound_s == stopped.lower_bound_s


@pytest.mark.parametrize("schedule", FlushSchedule.flushed())
def test_the_time_limit_leaves_a_bound(schedule: FlushSchedule) -> None:
    for seed in range(20):
        instance = uneven_layers(seed)
        stopped = solve_flush(instance, schedule, options=SolveOptions(time_limit_s=1e-9))
        optimum = solve_flush(instance, schedule)
        if optimum.time_per_sample_s is None:
            assert stopped.plan is None
            continue
        assert stopped.stopped_by == "time limit"
        assert stopped.lower_bound_s <= optimum.time_per_sample_s * (1 + 1e-12)
        if stopped.plan is not None:
            assert stopped.plan is not None
            per_sample_s = plan_batch_s(instance, stopped.plan, schedule.value) / instance.microbatches
            assert per_sample_s == pytest.approx(stopped.time_per_sample_s)


def test_a_stop_from_another_thread_ends_a_long_search() -> None:
    stop: Stop[Solution] = Stop()
    instance = two_towers(60, devices=64, microbatches=64, memory_bytes=60.0)
    found: list[Solution] = []
    worker = threading.Thread(target=lambda: found.append(solve_flush(instance, ONE_F_ONE_B, stop=stop)))
    worker.start()
    while worker.is_alive() and not stop.has_answer:
        worker.join(0.01)
    stop.request()
    worker.join()
    assert found[0].status is Status.OPTIMAL or found[0].stopped_by == "interrupt"
    if found[0].time_per_sample_s is not None:
        assert found[0].lower_bound_s <= found[0].time_per_sample_s


def test_a_gap_ends_the_search(few: bool) -> None:
    ended = 0
    for seed in range(12 if few else 30):
        instance = uneven_layers(seed)
        solution = solve_flush(instance, ONE_F_ONE_B, options=SolveOptions(gap=0.2, threads=1))
        optimum = solve_flush(instance, ONE_F_ONE_B)
        if solution.plan is None or optimum.time_per_sample_s is None:
            assert solution.plan is optimum.plan is None
            continue
        assert solution.gap is not None
        assert solution.gap <= 0.2
        assert solution.lower_bound_s <= optimum.time_per_sample_s * (1 + 1e-12)
        ended += solution.stopped_by == "gap"
    assert ended


def test_no_plan_fits() -> None:
    instance = equal_chain(4, memory_bytes=1.0)
    for schedule in FlushSchedule.flushed():
        solution = solve_flush(instance, schedule)
        assert solution.status is Status.INFEASIBLE
        assert solution.plan is None
        assert solution.gap is None
        assert solution.time_per_sample_s is None
        assert solution.lower_bound_s == np.inf
        assert solution.infeasibility == Infeasibility("no plan fits", None)


def test_a_layer_without_any_choice_is_named() -> None:
    instance = equal_chain(3)
    first = instance.layers[0]
    broken = replace(instance, layers=(replace(first, tmpcs={}), *instance.layers[1:]))
    solution = solve_flush(broken, GPIPE)
    assert solution.status is Status.INFEASIBLE
    assert solution.infeasibility is not None
    assert first.name in solution.infeasibility.reason


@pytest.mark.long
@pytest.mark.parametrize(("many_layers", "schedule"), [(0, ONE_F_ONE_B), (1000, GPIPE)])
def test_too_many_downsets_are_listed_as_tasks_want_them(
    schedule: FlushSchedule, many_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is that of all of them. Where layers are many, borders bound plans, and cheap ones give the first."""
    compared = 0
    for seed in range(14):
        instance = random_instance(seed, most_layers=7)
        with monkeypatch.context() as patch:
            whole = solve_flush(instance, schedule)
            patch.setattr("piper_ray.engine.flush.solve._MOST_DOWNSETS", 0)
            patch.setattr("piper_ray.engine.flush.solve._MANY_DOWNSETS", many_layers)
            patch.setattr("piper_ray.engine.flush.solve.MANY_LAYERS", many_layers)
            listed = solve_flush(instance, schedule)
        assert listed.status is whole.status, seed
        if whole.time_per_sample_s is not None:
            compared += whole.stats.downsets > len(instance.layers) + 1
            assert listed.time_per_sample_s == pytest.approx(whole.time_per_sample_s, rel=1e-9)
    assert compared > 2


@pytest.mark.parametrize("schedule", FlushSchedule.flushed())
def test_a_memory_limit_is_kept_by_listing_fewer(schedule: FlushSchedule) -> None:
    whole = solve_flush(two_towers(20), schedule)
    found = solve_flush(two_towers(20), schedule, options=SolveOptions(memory_limit_bytes=1000.0))
    assert (found.status, found.time_per_sample_s) == (Status.OPTIMAL, whole.time_per_sample_s)


@pytest.mark.long
def test_what_takes_too_long_to_close_is_left_open_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A (d, t) whose last gap is left open is not searched again at the same time, and the answer has the gap."""
    looked_at: list[tuple[int, float]] = []

    def gives_up(
        tables: FlushTables, task: FlushTask, _levels: FloatArray, states: TailArrays, _most: int, control: FloatArray
    ) -> tuple[int, float, bool, StageList]:
        looked_at.append((task.data_parallel_degree, float(control[0])))
        return TOO_LONG, best_state(task, states, tables.bits.shape[0])[1], False, best_stages(states, 0)

    monkeypatch.setattr(task_search, "close_gap", gives_up)
    left = 0
    for seed in range(150):
        looked_at.clear()
        instance = uneven_layers(seed)
        found = solve_flush(instance, ONE_F_ONE_B)
        # With levels of what is in front and without, and both once more as it finds its own plan.
        assert max(Counter(looked_at).values(), default=0) <= 4
        if found.stopped_by is StoppedBy.TOO_MANY_PLANS:
            left += 1
            assert found.plan is not None
            assert found.gap is not None
            assert found.gap > 0.0
    assert left > 3


def test_a_limit_in_the_second_look_at_a_task_keeps_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A (d, t) that is left open is looked at again once a better plan is known. If time ends then, what the first look
    has proved counts."""
    go_through, looked_at = FlushSearch._go_through, [False]

    def first_look(self: FlushSearch, tasks: Any, *args: Any, in_order: bool, before: Any = ()) -> Any:
        if in_order:
            return (yield from go_through(self, tasks, *args, in_order=in_order, before=before))
        looked_at[0] = True
        return [_Outcome(task, TaskResult(2.0 * task.lower_s, left_open=StoppedBy.TOO_MANY_PLANS)) for task in tasks]

    def second_look(_space: SearchSpace, task: DegreePair, control: FloatArray, *_others: Any) -> TaskResult:
        while control[1] == 0.0:  # until it is asked to stop
            time.sleep(1e-3)
        return TaskResult(task.lower_s)

    monkeypatch.setattr(Limits, "reached", property(lambda _: StoppedBy.TIME_LIMIT if looked_at[0] else None))
    monkeypatch.setattr(task_search, "run_task", second_look)
    instance, looked_at[0] = uneven_layers(1), True
    before = solve_flush(instance, ONE_F_ONE_B)
    looked_at[0] = False
    monkeypatch.setattr(FlushSearch, "_go_through", first_look)
    after = solve_flush(instance, ONE_F_ONE_B)
    assert before.stopped_by is after.stopped_by is StoppedBy.TIME_LIMIT
    assert after.lower_bound_s == pytest.approx((1.0 + FIRST_SHARE) * before.lower_bound_s, rel=1e-9)


@pytest.mark.parametrize("schedule", long_after(1, FlushSchedule.flushed()))
def test_all_tasks_of_many_states_have_bounds_before_any_is_proved(
    schedule: FlushSchedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a few states are many. A gap that the bounds meet ends the search then; else the plan is that of exact
    states."""
    run, efforts = task_search.run_task, list[TaskEffort]()

    def recorded(*given: Any) -> TaskResult:
        efforts.append(given[3])
        return run(*given)

    monkeypatch.setattr(task_search, "run_task", recorded)
    for module, limit in ((task_search, "_FEW_STATES"), (task_search, "_SOME_STATES"), (flush_solve, "_CHAIN_SHARE")):
        monkeypatch.setattr(module, limit, 0)
    proved = ended = 0
    for seed in range(30):
        instance = two_towers(3, devices=4, microbatches=4 + seed % 3, memory_bytes=60.0 + seed)
        efforts.clear()
        found = solve_flush(instance, schedule)
        if TaskEffort.PROOF not in efforts:
            continue
        proved += 1
        first = efforts.index(TaskEffort.PROOF)
        assert TaskEffort.ROUNDED in efforts[:first]
        monkeypatch.setattr(task_search, "_SOME_STATES", 10**6)
        exact = solve_flush(instance, schedule)
        monkeypatch.setattr(task_search, "_SOME_STATES", 0)
        assert (found.plan, found.time_per_sample_s) == (exact.plan, exact.time_per_sample_s)
        efforts.clear()
        near = solve_flush(instance, schedule, options=SolveOptions(gap=0.1))
        assert near.gap is not None
        assert near.gap <= 0.1
        ended += TaskEffort.PROOF not in efforts
    assert proved > 3
    assert ended > 1


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_fewer_microbatches_than_stages(microbatches: int) -> None:
    instance = equal_chain(5, devices=5, microbatches=microbatches, memory_bytes=1e6)
    for schedule in FlushSchedule.flushed():
        solution = solve_flush(instance, schedule, restrictions=Restrictions(constraints=[StageCount(5)]))
        assert solution.plan is not None
        assert solution.plan is not None
        batch_s = plan_batch_s(instance, solution.plan, schedule.value)
        assert solution.time_per_sample_s == pytest.approx(batch_s / microbatches, rel=1e-12)


_PROVED = [
    (name, schedule) for name, schedule in zip(("gpt3-175b", "t5-11b", "mixtral-8x22b"), cycle(FlushSchedule.flushed()))
]


@pytest.mark.parametrize(("name", "schedule"), long_after(0, _PROVED))
def test_the_large_inputs_are_proved(name: str, schedule: FlushSchedule) -> None:
    instance = instance_of(str(INPUTS / f"{name}.toml"))
    solution = solve_flush(instance, schedule)
    assert solution.stopped_by is None
    if solution.plan is None:
        assert solution.status is Status.INFEASIBLE
        return
    assert solution.status is Status.OPTIMAL
    per_sample_s = plan_batch_s(instance, solution.plan, schedule.value) / instance.microbatches
    assert per_sample_s == pytest.approx(solution.time_per_sample_s)


@pytest.mark.parametrize("instance", [two_towers(6, devices=4, memory_bytes=1e6), uneven_layers(3)])
def test_the_listener_hears_of_steps_rounds_and_plans(instance: Instance) -> None:
    told: list[Event] = []
    solution = solve_flush(instance, ONE_F_ONE_B, listener=Told(told))
    assert [event.step for event in told if isinstance(event, StepFinished)] == ["lattice", "stage costs"]
    plans = [event for event in told if isinstance(event, IncumbentFound)]
    assert [event.time_per_sample_s for event in plans] == sorted((x.time_per_sample_s for x in plans), reverse=True)
    assert plans[-1].time_per_sample_s == solution.time_per_sample_s
    rounds = [event for event in told if isinstance(event, DegreesSearched)]
    assert [event.index for event in rounds] == list(range(1, len(rounds) + 1))
    assert [event.feasible for event in rounds] == [False] * (len(rounds) - 1) + [True]
    assert rounds[-1].bounds.gap == pytest.approx(0.0, abs=1e-9)
    under_way = [event for event in told if isinstance(event, DegreesAdvanced)]
    assert {event.index for event in under_way} == {event.index for event in rounds}
    assert all(event.done + event.running <= event.total for event in under_way)
    bounds = [event.bounds for event in told if isinstance(event, (DegreesAdvanced, DegreesSearched, IncumbentFound))]
    for earlier, later in pairwise(bounds):
        assert earlier.lower_s <= later.lower_s
        assert later.upper_s is not None or earlier.upper_s is None


def test_a_plan_found_on_a_chain_is_told_as_such() -> None:
    told: list[Event] = []
    solve_flush(two_towers(12, devices=4, memory_bytes=1e6), ONE_F_ONE_B, listener=Told(told))
    assert next(event.origin for event in told if isinstance(event, IncumbentFound)) == "chain"


def test_steps_in_proportion_to_a_bound_of_nothing_end() -> None:
    instance = random_instance(73)
    solution = solve_flush(instance, GPIPE)
    assert solution.status is Status.OPTIMAL
    assert solution.plan is not None
    assert plan_batch_s(instance, solution.plan, GPIPE.value) == pytest.approx(47.0)


def test_keyboard_interrupt_ends_a_search_with_what_it_has() -> None:
    def interrupted(event: Event) -> None:
        if isinstance(event, DegreesSearched):
            raise KeyboardInterrupt

    instance = two_towers(12, devices=4, memory_bytes=100.0)
    solution = solve_flush(instance, ONE_F_ONE_B, listener=interrupted)
    optimum = solve_flush(instance, ONE_F_ONE_B)
    assert solution.stopped_by == "interrupt"
    assert solution.plan is not None
    assert optimum.time_per_sample_s is not None
    assert solution.lower_bound_s <= optimum.time_per_sample_s


@pytest.mark.long
@pytest.mark.parametrize("schedule", long_after(1, ["1f1b", "2bw"]))
def test_the_least_memory_with_a_plan(schedule: str) -> None:
    """With so much there is one; with a little less there is none."""
    same = Restrictions(constraints=[SameDegrees()])
    found = 0
    for seed in range(20):
        instance = random_instance(seed, most_layers=5).replace(memory_bytes=5.0)
        solution = piper_ray.solve(instance, schedule=schedule, restrictions=same)
        if solution.status is not Status.INFEASIBLE:
            continue
        assert solution.infeasibility is not None
        least = solution.infeasibility.least_memory_bytes
        if least is None:
            continue
        found += 1
        assert "no plan with one d and one t fits" in solution.infeasibility.reason
        enough, short = instance.replace(memory_bytes=least), instance.replace(memory_bytes=least - 1.1)
        assert piper_ray.solve(enough, schedule=schedule, restrictions=same).plan is not None
        assert piper_ray.solve(short, schedule=schedule, restrictions=same).plan is None
    assert found >= 5


def pairs_that_fit(memory_bytes: float) -> Instance:
    """Two towers whose layers hold 6,000 and 4,000 bytes: with 10,000, four stages must have one of each tower, which
    no chain of one tower after the other does."""
    held = dict.fromkeys(range(1, 5), 6000.0) | dict.fromkeys(range(5, 9), 4000.0)
    layers = {v: {1: [tmpc(1.0, fixed=held.get(v, 0.0))]} for v in range(10)}
    return replace(two_towers(4, microbatches=4, memory_bytes=memory_bytes), layers=build(layers, {}).layers)


def efforts_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[TaskEffort, TaskResult]]:
    """The efforts that solves make from now on, with their results."""
    run, efforts = task_search.run_task, list[tuple[TaskEffort, TaskResult]]()

    def recorded(*given: Any) -> TaskResult:
        efforts.append((given[3], run(*given)))
        return efforts[-1][1]

    monkeypatch.setattr(task_search, "run_task", recorded)
    monkeypatch.setattr(flush_solve, "_CHAIN_SHARE", 0)
    return efforts


def test_where_no_early_plan_fits_one_that_does_comes_before_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    efforts = efforts_of(monkeypatch)
    solution = solve_flush(pairs_that_fit(10_000.0), ONE_F_ONE_B)
    assert solution.status is Status.OPTIMAL
    assert degrees(solution) == (1, 1, 4)
    kinds = [effort for effort, _ in efforts]
    first = next(number for number, (_, result) in enumerate(efforts) if result.found is not None)
    assert kinds[first] is TaskEffort.FIT
    assert {TaskEffort.PLAN} <= set(kinds[:first]) <= {TaskEffort.PLAN, TaskEffort.FIT}
    assert TaskEffort.ROUNDED in kinds[first:]


def test_the_memory_that_suffices_is_found_without_times(monkeypatch: pytest.MonkeyPatch) -> None:
    efforts = efforts_of(monkeypatch)
    solution = piper_ray.solve(pairs_that_fit(9_000.0), schedule="1f1b")
    assert solution.infeasibility is not None
    assert solution.infeasibility.least_memory_bytes == pytest.approx(10_000.0, abs=1.0)
    fitted = [effort for effort, result in efforts if result.found is not None]
    assert len(fitted) > 3
    assert set(fitted) == {TaskEffort.FIT}


def test_a_limit_on_the_search_for_the_memory_leaves_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    instance, tried = pairs_that_fit(9_000.0), list[float]()

    def fits(memory_bytes: float) -> bool | None:
        tried.append(memory_bytes)
        return memory_bytes > 10_000.0 if len(tried) < 4 else None

    assert flush_solve.enough_memory(instance, fits) == (11_250.0, False)
    assert tried == [18_000.0, 13_500.0, 11_250.0, 10_125.0]
    assert flush_solve.enough_memory(instance, lambda _: None) is None
    monkeypatch.setattr(flush_solve, "enough_memory", lambda *_: flush_solve.EnoughMemory(11_250.0, is_exact=False))
    found = piper_ray.solve(instance, schedule="1f1b").infeasibility
    assert found is not None
    assert found.least_memory_bytes is None
    assert found.reason.endswith("with 4 microbatches; 10.99 KiB would do, perhaps less")


def test_what_was_asked_for_is_told_where_no_plan_does_it() -> None:
    """Where no (d, t) is left there is no round, and so none that found anything."""
    instance = equal_chain(3, devices=5, microbatches=4)
    told = Told([])
    rules = Restrictions(constraints=[StageCount(7)])
    solution = piper_ray.solve(instance, schedule="1f1b", restrictions=rules, listener=told)
    assert solution.status is Status.INFEASIBLE
    assert solution.infeasibility is not None
    assert solution.infeasibility.reason.startswith("no plan of 7 stages with one d and one t fits on 5 devices")
    assert not any(isinstance(event, DegreesSearched) for event in told.events)
    tight = Told([])  # in sum there is enough
    halves = {v: {1: [tmpc(1.0, fixed=6.0)]} for v in range(3)}
    uneven = build(halves, {(0, 1): 1, (1, 2): 1}, devices=2, memory_bytes=10.0)
    assert piper_ray.solve(uneven, schedule="1f1b", listener=tight).plan is None
    answers = [event.feasible for event in tight.events if isinstance(event, DegreesSearched)]
    assert answers
    assert not any(answers)
    every = piper_ray.solve(instance, schedule="1f1b", restrictions=Restrictions(constraints=[AllDevices()]))
    assert every.infeasibility is not None
    assert every.infeasibility.reason == (
        "no plan with one d and one t uses all 5 devices: of d t p = 5, d divides the 4 microbatches, t is 1, 2, "
        "and p at most 3, the layers; 5 microbatches may do"
    )
    fifth = instance.replace(microbatches=5, memory_bytes=4.0)
    every = piper_ray.solve(fifth, schedule="1f1b", restrictions=Restrictions(constraints=[AllDevices()]))
    assert every.infeasibility is not None
    assert "fits on all 5 devices" in every.infeasibility.reason


def test_arguments_that_make_no_sense() -> None:
    with pytest.raises(UsageError, match="stages must be"):
        StageCount(0)
    with pytest.raises(UsageError, match="from 0 to 1"):
        StepTerms(all_reduce_overlap=1.5)
    with pytest.raises(UsageError, match="at least 0"):
        StepTerms(optimizer_s=float("nan"))
