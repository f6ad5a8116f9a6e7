"""Small models under schedules with chunks: what is returned is the best plan, proved, or that there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest

import piper_ray
from piper_ray.engine.chunks import nodes
from piper_ray.engine.solve import solve
from piper_ray.model.constraints import Restrictions
from piper_ray.model.instance import Instance
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.model.solution import Solution, Status
from piper_ray.model.stop import StoppedBy
from tests.chunks_brute_force import least_step_s
from tests.instances import encoder_decoder, equal_chain, random_instance
from tests.lengths import long_after
from tests.solver_support import ONE_THREAD

SCHEDULES = [
    Schedule(ScheduleName.INTERLEAVED, 1),
    Schedule(ScheduleName.INTERLEAVED, 2),
    Schedule(ScheduleName.INTERLEAVED, 2, group=3),
    Schedule(ScheduleName.LOOPED_BFS, 2),
    Schedule(ScheduleName.ZB_H1),
    Schedule(ScheduleName.ZB_H1, 2),
    Schedule(ScheduleName.ZB_V),
    Schedule(ScheduleName.DUALPIPE_V),
]


def small(seed: int) -> Instance:
    """Of few plans; in every third, memory is what some plan needs and no more."""
    instance = random_instance(seed, most_layers=4 + seed % 2, most_tmpcs=2, most_devices=4)
    return replace(instance, name=f"seed {seed}")


def assert_best(instance: Instance, schedule: Schedule, restrictions: Restrictions = Restrictions()) -> Solution:
    least_s = least_step_s(instance, schedule, restrictions)
    found = piper_ray.solve(instance, schedule=schedule, restrictions=restrictions, options=ONE_THREAD)
    what = f"{instance.name} {schedule}"
    if least_s is None:
        assert found.status is Status.INFEASIBLE, what
        return found
    assert found.status is Status.OPTIMAL, what
    assert found.plan is not None
    assert found.time_per_sample_s == pytest.approx(least_s / instance.microbatches, rel=1e-9), what
    assert found.lower_bound_s == pytest.approx(found.time_per_sample_s, rel=2e-9), what
    simulation = piper_ray.simulate(instance, found.plan, found.schedule)
    assert simulation.time_per_sample_s == pytest.approx(found.time_per_sample_s, rel=1e-9), what
    assert not simulation.memory_violations, what
    assert [*restrictions.violations(instance, found.plan, found.schedule)] == [], what
    return found


@pytest.mark.parametrize("schedule", long_after(2, SCHEDULES), ids=str)
def test_random_graphs(schedule: Schedule) -> None:
    found = [assert_best(small(seed), schedule).status for seed in range(10)]
    assert found.count(Status.OPTIMAL) >= 2


@pytest.mark.parametrize("rule", long_after(1, ["all-or-none", "first-k", "one-for-all"]))
def test_chunks_decide_on_recomputation_each_for_itself(rule: str) -> None:
    rules = Restrictions(recompute=rule)
    kept = 0
    for schedule in (Schedule(ScheduleName.INTERLEAVED, 2), Schedule(ScheduleName.ZB_H1)):
        for seed in range(8):
            instance = small(seed)
            tight = instance.replace(memory_bytes=0.7 * instance.memory_bytes)
            kept += assert_best(tight, schedule, rules).status is Status.OPTIMAL
    assert kept >= 4


def test_on_one_rank_several_chunks_may_pay_where_each_decides() -> None:
    """Two layers on a single device, of which one may keep its activations: two chunks can, one chunk cannot."""
    instance = equal_chain(2, devices=1, microbatches=1, memory_bytes=6 + 5 + 8 + 1)
    rules = Restrictions(recompute="all-or-none")
    found = piper_ray.solve(instance, schedule="interleaved", restrictions=rules, options=ONE_THREAD)
    assert found.status is Status.OPTIMAL
    assert (found.schedule.v, found.time_per_sample_s) == (2, 14.0)


@pytest.mark.parametrize("schedule", long_after(1, SCHEDULES[1::3]), ids=str)
def test_where_none_fits_the_least_memory_that_would_do_is_said(schedule: Schedule) -> None:
    told = 0
    for seed in range(12):
        instance = small(seed).replace(memory_bytes=1.0)
        found = assert_best(instance, schedule)
        why = found.infeasibility
        if why is None or why.least_memory_bytes is None:
            continue
        told += 1
        assert_best(instance.replace(memory_bytes=why.least_memory_bytes), schedule)
        less = instance.replace(memory_bytes=why.least_memory_bytes * (1 - 1e-6))
        assert least_step_s(less, schedule) is None
    assert told >= 4


@pytest.mark.parametrize("schedule", long_after(1, SCHEDULES[1::2]), ids=str)
def test_no_bound_of_a_search_within_a_time_is_above_the_best_plan(
    schedule: Schedule, monkeypatch: pytest.MonkeyPatch, few: bool
) -> None:
    """Without the walk over all plans: what programs and cases prove. At seed 5085 transfers alone say that no plan is
    within the time."""
    monkeypatch.setattr(nodes, "_FEW_LAYERS", 0)
    proved = 0
    for seed in (*range(4 if few else 8), 5085):
        instance = small(seed)
        least_s = least_step_s(instance, schedule)
        for share in () if least_s is None else (0.7, 1.0, 1.3):
            assert least_s is not None
            best_s = least_s / instance.microbatches
            options = replace(ONE_THREAD, within_s=share * best_s, passes_limit=20_000_000)
            found = solve(instance, schedule=schedule, options=options)
            assert found.lower_bound_s <= best_s * (1.0 + 1e-9), (seed, share)
            assert found.time_per_sample_s is None or found.time_per_sample_s >= best_s * (1.0 - 1e-9)
            assert found.plan is not None or share < 1.0, (seed, share)
            proved += found.lower_bound_s >= min(1.0, share) * best_s * (1.0 - 1e-6)
    assert proved >= 4


@pytest.mark.parametrize("schedule", long_after(1, SCHEDULES[1::2]), ids=str)
def test_a_search_for_a_gap_ends_within_it_by_a_right_bound_whoever_takes_its_turns(
    schedule: Schedule, monkeypatch: pytest.MonkeyPatch, few: bool
) -> None:
    """Random graphs, and encoders with decoders; without the walk over all plans."""
    monkeypatch.setattr(nodes, "_FEW_LAYERS", 0)
    ended = 0
    for seed in range(5 if few else 10):
        for instance in (small(seed), encoder_decoder(seed, 2, 3, embedding=seed % 2 > 0)):
            least_s = least_step_s(instance, schedule)
            for gap in () if least_s is None else (0.1,) if few else (0.02, 0.1, 0.3):
                assert least_s is not None
                best_s = least_s / instance.microbatches
                options = replace(ONE_THREAD, gap=gap, passes_limit=3_000_000)
                found = solve(instance, schedule=schedule, options=options)
                assert found.lower_bound_s <= best_s * (1.0 + 1e-9), (instance.name, gap)
                assert found.time_per_sample_s is None or found.time_per_sample_s >= best_s * (1.0 - 1e-9)
                if found.stopped_by is StoppedBy.GAP:
                    assert found.time_per_sample_s is not None
                    assert found.lower_bound_s >= found.time_per_sample_s * (1.0 - gap) * (1.0 - 1e-12)
                    ended += 1
                several = solve(instance, schedule=schedule, options=replace(options, threads=3))
                assert (several.plan, several.lower_bound_s) == (found.plan, found.lower_bound_s)
    assert ended >= 2
