"""The paper's table against brute force, and brute force against the plainest search there is."""

from __future__ import annotations

import math

import pytest
from hypothesis import given

from piper_ray.evaluate import evaluate
from piper_ray.model.constraints import Recompute, Restrictions
from piper_ray.model.errors import LimitError
from piper_ray.model.instance import Instance
from piper_ray.planners.published.paper_table import PaperTableResult, TmpcChoice, paper_table
from tests.brute_force import brute_force, least_evaluated_time_s
from tests.instances import (
    RECOMPUTE,
    VANILLA,
    build,
    equal_chain,
    instances,
    named_instances,
    parallel_branches,
    random_instance,
    tmpc,
    two_towers,
)
from tests.lengths import long_after

RESTRICTIONS = [
    Restrictions(tensor_parallelism=False),
    Restrictions(data_parallelism=False),
    Restrictions(recompute=Recompute.ALWAYS),
    Restrictions(recompute=Recompute.NEVER),
    Restrictions(recompute=Recompute.ALL_OR_NONE),
    Restrictions(tensor_parallelism=False, data_parallelism=False, recompute=Recompute.ALL_OR_NONE),
]


def assert_as_brute_force(instance: Instance, restrictions: Restrictions | None = None) -> PaperTableResult:
    best = brute_force(instance, restrictions)
    table = paper_table(instance, restrictions=restrictions)
    assert (table.plan is None) == (table.time_per_sample_s is None) == (best is None)
    if best is not None and table.plan is not None:
        expected = pytest.approx(float(best.time_per_sample_s), rel=1e-12)
        assert table.time_per_sample_s == expected
        assert evaluate(instance, table.plan).time_per_sample_s == expected
        assert evaluate(instance, best.plan).time_per_sample_s == expected
    return table


@pytest.mark.long
def test_brute_force_is_as_good_as_any_plan_that_evaluates() -> None:
    feasible = 0
    for seed in range(60):
        instance = random_instance(seed, most_layers=3, most_devices=4, most_tmpcs=2)
        best, least = brute_force(instance), least_evaluated_time_s(instance)
        assert (best is None) == (least is None)
        if best is not None and least is not None:
            feasible += 1
            assert math.isclose(best.time_per_sample_s, least, rel_tol=1e-12)
    assert feasible >= 30


@pytest.mark.parametrize("name", named_instances())
def test_named_instances(name: str) -> None:
    instance = named_instances()[name]
    table = assert_as_brute_force(instance)
    assert (table.time_per_sample_s is None) == (name == "does not fit")


@pytest.mark.long
@pytest.mark.parametrize("seeds", long_after(1, [range(40), range(40, 70)]), ids=str)
def test_random_instances(seeds: range) -> None:
    results = [assert_as_brute_force(random_instance(seed)) for seed in seeds]
    assert sum(result.plan is not None for result in results) >= len(seeds) / 2
    assert sum(result.plan is None for result in results) >= len(seeds) / 20


@pytest.mark.long
def test_tmpc_choices_of_long_stages() -> None:
    # On one device there is one stage, and all that is left to find is its TMPCs.
    results = [
        assert_as_brute_force(random_instance(seed, most_layers=8, most_devices=1, most_tmpcs=3, density=1.0))
        for seed in range(2000, 2060)
    ]
    assert sum(result.plan is not None for result in results) >= 15


@pytest.mark.parametrize("restrictions", long_after(2, RESTRICTIONS), ids=repr)
def test_restrictions(restrictions: Restrictions) -> None:
    changed = 0
    for seed in range(1000, 1040):
        instance = random_instance(seed, most_layers=4)
        table = assert_as_brute_force(instance, restrictions)
        changed += table.time_per_sample_s != paper_table(instance).time_per_sample_s
    assert changed >= 3


@given(instances(most_layers=4))
def test_any_instance(instance: Instance) -> None:
    assert_as_brute_force(instance)


@given(instances(most_layers=4))
def test_a_greedy_choice_is_never_better_and_as_feasible(instance: Instance) -> None:
    exact, greedy = paper_table(instance), paper_table(instance, choice=TmpcChoice.GREEDY)
    assert (exact.time_per_sample_s is None) == (greedy.time_per_sample_s is None)
    if exact.time_per_sample_s is not None and greedy.time_per_sample_s is not None and greedy.plan is not None:
        assert greedy.time_per_sample_s >= exact.time_per_sample_s * (1 - 1e-12)
        # The table's value may assume a larger y than the plan comes to.
        assert evaluate(instance, greedy.plan).time_per_sample_s <= greedy.time_per_sample_s * (1 + 1e-12)


def test_where_the_greedy_choice_falls_short() -> None:
    # One device, y = 1: all vanilla takes 4 + 4 + 3 = 11 of 8 bytes. By cost per byte saved the greedy choice swaps
    # the third layer first (1 s for 2 bytes), which is not enough, then another (3 s for 3 bytes): 3 + 1 + 3 = 7 s.
    # Swapping that other layer alone would have done: 3 + 3 = 6 s.
    layer = {1: [tmpc(1, activation=4), tmpc(4, activation=1, name=RECOMPUTE)]}
    third = {1: [tmpc(1, activation=3), tmpc(2, activation=1, name=RECOMPUTE)]}
    instance = build({0: layer, 1: layer, 2: third}, {(0, 1): 1, (1, 2): 1}, devices=1, memory_bytes=8)
    assert paper_table(instance, choice=TmpcChoice.GREEDY).time_per_sample_s == 7.0
    exact = paper_table(instance)
    assert exact.time_per_sample_s == 6.0
    assert exact.plan is not None
    assert sorted(exact.plan.stages[0].tmpc_ids.values()) == [RECOMPUTE, VANILLA, VANILLA]


@pytest.mark.parametrize(
    ("instance", "downsets"),
    [
        (equal_chain(6), 7),
        # The empty set, the end with 0 to 3 layers of either tower, and all.
        (two_towers(3), 18),
        # In front of the empty set: the last join, then of each block any of its 3 branches, then its fork.
        (parallel_branches(2, 3), 1 + (1 + 7) + (1 + 7) + 1),
        (named_instances()["no edges"], 8),
    ],
)
def test_downsets_and_pairs_are_counted(instance: Instance, downsets: int) -> None:
    result = paper_table(instance)
    assert result.downsets == downsets
    assert result.table_bytes == downsets * 5 * 5 * 8  # K = N = 4
    if instance.name == "equal chain":
        assert result.pairs == 7 * 6 // 2
    if instance.name == "no edges":
        assert result.pairs == 3**3 - 2**3  # each layer in I', in I only, or in neither; less the equal ones


def test_a_table_over_the_limit_is_refused() -> None:
    instance = two_towers(10)
    with pytest.raises(LimitError, match=r"200 bytes for each downset.*more than 50:.*raise table_limit_bytes"):
        paper_table(instance, table_limit_bytes=50 * 5 * 5 * 8)
