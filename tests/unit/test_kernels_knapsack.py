"""One option for each item, least cost within a memory limit: against trying all combinations."""

from __future__ import annotations

from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_ray.engine.kernels.knapsack import INFEASIBLE, _count_bound, cheapest, hull_steps, least_cost
from piper_ray.engine.kernels.types import Items
from tests.lengths import long_after

Option = tuple[float, float]  # cost, memory
Choices = list[list[Option]]


def arrays(items: Choices) -> Items:
    start = np.cumsum([0, *map(len, items)]).astype(np.int64)
    options = [option for item in items for option in item]
    return Items(start, np.array([c for c, _ in options], float), np.array([m for _, m in options], float))


def by_trying_all(items: Choices, limit: float) -> float:
    costs = (
        sum(cost for cost, _ in chosen) for chosen in product(*items) if sum(memory for _, memory in chosen) <= limit
    )
    return min(costs, default=INFEASIBLE)


def assert_least_cost(items: Choices, limit: float, budget: float = INFEASIBLE) -> float:
    start, cost, memory = arrays(items)
    choice = np.full(len(items), -7, np.int64)
    least = float(least_cost(arrays(items), limit, budget, False, choice))
    expected = by_trying_all(items, limit)
    if expected > budget or expected == INFEASIBLE:
        assert least == INFEASIBLE
        return least
    assert least == pytest.approx(expected, rel=1e-12)
    assert all(start[k] <= choice[k] < start[k + 1] for k in range(len(items)))
    assert memory[choice].sum() <= limit * (1 + 1e-12)
    assert cost[choice].sum() == pytest.approx(expected, rel=1e-12)
    return least


options = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=4)
small_items = st.lists(options, min_size=1, max_size=6)


@given(small_items, st.integers(0, 24))
def test_small_items(items: Choices, limit: int) -> None:
    assert_least_cost(items, float(limit))


@given(small_items, st.integers(0, 24), st.integers(0, 20))
def test_a_budget_cuts_off(items: Choices, limit: int, budget: int) -> None:
    assert_least_cost(items, float(limit), float(budget))


@given(options, st.integers(1, 7), st.integers(0, 30))
def test_equal_items(item: list[Option], count: int, limit: int) -> None:
    assert_least_cost([item] * count, float(limit))


@given(small_items)
def test_every_limit_that_some_choice_meets_exactly(items: Choices) -> None:
    for limit in {sum(memory for _, memory in chosen) for chosen in product(*items)}:
        least = assert_least_cost(items, float(limit))
        assert least < INFEASIBLE
        assert assert_least_cost(items, float(limit), least) == least, "a budget that is met exactly"


@pytest.mark.parametrize("seed", long_after(4, range(16)))
def test_arbitrary_figures(seed: int) -> None:
    rng = Random(seed)
    items = [[(rng.random(), rng.random() * 1e9) for _ in range(rng.randint(1, 4))] for _ in range(rng.randint(1, 7))]
    smallest = sum(min(memory for _, memory in item) for item in items)
    fastest = sum(min(item)[1] for item in items)
    for share in (-0.1, 0.0, 0.2, 0.5, 0.8, 1.0):
        assert_least_cost(items, smallest + share * (fastest - smallest) + 1e-3)


def test_by_hand() -> None:
    two: Choices = [[(0.0, 10.0), (3.0, 4.0)], [(0.0, 10.0), (5.0, 1.0)]]
    assert assert_least_cost(two, 20.0) == 0.0
    assert assert_least_cost(two, 14.0) == 3.0
    assert assert_least_cost(two, 13.9) == 5.0
    assert assert_least_cost(two, 5.0) == 8.0
    assert assert_least_cost(two, 4.9) == INFEASIBLE


def test_greedy_along_the_hull_is_not_enough() -> None:
    # By ratio the first item steps first (6 bytes for 1 s), then the second as well: 4 s. The second alone does: 3 s.
    items: Choices = [[(0.0, 6.0), (1.0, 0.0)], [(0.0, 10.0), (3.0, 0.0)]]
    assert assert_least_cost(items, 7.0) == 3.0


def test_options_off_the_hull_can_be_best() -> None:
    assert assert_least_cost([[(0.0, 10.0), (4.0, 6.0), (5.0, 0.0)], [(0.0, 5.0)]], 11.0) == 4.0


def test_steps_that_cost_nothing() -> None:
    items: Choices = [[(2.0, 9.0), (2.0, 3.0), (2.0, 3.0)], [(1.0, 8.0), (1.0, 8.0)], [(0.0, 0.0)]]
    assert assert_least_cost(items, 11.0) == 3.0
    assert assert_least_cost(items, 10.0) == INFEASIBLE


def test_no_items() -> None:
    assert least_cost(arrays([]), 0.0, 0.0, False, np.empty(0, np.int64)) == 0.0


def test_many_equal_items_of_three_options() -> None:
    """60 layers: by counts, 61 * 62 / 2 combinations; far too many to try one by one."""
    item: list[Option] = [(0.0, 9.0), (2.0, 6.0), (5.0, 1.0)]
    limit, count = 300.0, 60
    expected = min(
        2.0 * middle + 5.0 * last
        for middle in range(count + 1)
        for last in range(count + 1 - middle)
        if 9.0 * (count - middle - last) + 6.0 * middle + 1.0 * last <= limit
    )
    assert least_cost(arrays([item] * count), limit, INFEASIBLE, False, np.empty(count, np.int64)) == expected


def by_merging(items: Choices, limit: float) -> float:
    """All partial choices that none beats in both, item after item."""
    front: list[Option] = [(0.0, 0.0)]
    for item in items:
        merged = sorted((c + cost, m + memory) for c, m in front for cost, memory in item)
        front = []
        for cost, memory in merged:
            if memory <= limit and (not front or memory < front[-1][1]):
                front.append((cost, memory))
    return front[0][0] if front else INFEASIBLE


@pytest.mark.parametrize("seed", long_after(4, range(14)))
def test_items_that_are_nearly_equal(seed: int) -> None:
    """What takes most partial choices: all options save memory at nearly the same rate."""
    rng = Random(seed)
    kind = [(0.0, 9.0), (2.0, 5.0), (3.5, 2.5), (3.0, 4.0)][: rng.randint(2, 4)]
    jitter = rng.choice([1e-6, 0.01, 0.05])
    items = [[(c * rng.uniform(1, 1 + jitter), m * rng.uniform(1, 1 + jitter)) for c, m in kind] for _ in range(14)]
    for limit in (rng.uniform(35, 126), 100.0):
        expected = by_merging(items, limit)
        choice = np.empty(len(items), np.int64)
        least = least_cost(arrays(items), limit, INFEASIBLE, False, choice)
        assert least == (expected if expected == INFEASIBLE else pytest.approx(expected, rel=1e-12))
        for factor in (1 - 1e-9, 1 + 1e-9, 0.99, 1.01):
            budget = 1e3 if expected == INFEASIBLE else expected * factor
            found = least_cost(arrays(items), limit, budget, True, choice)
            assert (found <= budget) == (expected <= budget)
            if found < INFEASIBLE:
                assert arrays(items).cost[choice].sum() == pytest.approx(found, rel=1e-12)
                assert arrays(items).memory[choice].sum() <= limit * (1 + 1e-12)


@pytest.mark.parametrize("seed", long_after(1, range(12)))
def test_bounds_from_how_many_items_must_have_another_option(seed: int) -> None:
    """Against all combinations: none is below the lower bound, and what it says of time left is so."""
    rng = Random(seed)
    kind = [(0.0, 9.0), (2.0, 5.0), (3.5, 2.5), (3.0, 4.0)]
    items = [
        [(c * rng.uniform(1, 1.2), m * rng.uniform(1, 1.2)) for c, m in rng.sample(kind, rng.randint(1, 4))]
        if rng.random() < 0.7
        else [(float(rng.randint(0, 6)), float(rng.randint(0, 6))) for _ in range(rng.randint(1, 4))]
        for _ in range(rng.randint(1, 7))
    ]
    whole = arrays(items)
    fastest = np.array([cheapest(whole, k) for k in range(len(items))], np.int64)
    most = sum(max(whole.memory[at] - m for _, m in item) for at, item in zip(fastest, items, strict=True))
    for share in (0.05, 0.4, 0.8, 1.0):
        excess = most * share
        if excess <= 0.0:
            continue
        extras, counts = [], []
        for chosen in product(*(range(int(whole.start[k]), int(whole.start[k + 1])) for k in range(len(items)))):
            saved = sum(whole.memory[at] - whole.memory[o] for at, o in zip(fastest, chosen, strict=True))
            if saved >= excess * (1 - 1e-12):
                extras.append(sum(whole.cost[o] - whole.cost[at] for at, o in zip(fastest, chosen, strict=True)))
                counts.append(sum(whole.memory[o] < whole.memory[at] for at, o in zip(fastest, chosen, strict=True)))
        least = min(extras)
        for left in (-1.0, 0.5 * least, least * (1 - 1e-9), least * (1 + 1e-9), 2 * least + 1e-9, 1e3):
            choice = np.full(len(items), -7, np.int64)
            bound = _count_bound(whole, fastest, excess, 1e-12 * excess, left, choice)
            assert 1 <= bound.needed <= min(counts)
            assert bound.lower <= least * (1 + 1e-9)
            assert bound.upper >= least * (1 - 1e-9)
            assert bound.price >= 0.0
            assert bound.prize >= 0.0
            if bound.upper <= left:
                assert all(whole.start[k] <= choice[k] < whole.start[k + 1] for k in range(len(items)))
                assert (whole.cost[choice] - whole.cost[fastest]).sum() == pytest.approx(bound.upper)
                assert (whole.memory[fastest] - whole.memory[choice]).sum() >= excess * (1 - 1e-12)
            elif 0.0 <= left < bound.lower * (1 - 1e-9):
                assert least > left


@given(small_items)
def test_cheapest(items: Choices) -> None:
    _, cost, memory = arrays(items)
    for k, item in enumerate(items):
        chosen = cheapest(arrays(items), k)
        assert (cost[chosen], memory[chosen]) == min(item)


@given(small_items)
def test_hull_steps(items: Choices) -> None:
    """From the cheapest option to the smallest, each step the best ratio; so ratios fall, item by item and overall."""
    start, cost, memory = arrays(items)
    begin = np.array([cheapest(arrays(items), k) for k in range(len(items))], np.int64)
    reached, extra, saved = hull_steps(arrays(items), begin)
    at = begin.copy()
    for option, seconds, size in zip(reached.tolist(), extra.tolist(), saved.tolist(), strict=True):
        k = int(np.searchsorted(start, option, side="right")) - 1
        assert size == memory[at[k]] - memory[option] > 0
        assert seconds == cost[option] - cost[at[k]] >= 0
        for other in range(start[k], start[k + 1]):
            if memory[other] < memory[at[k]] and cost[other] > cost[at[k]]:
                assert size * (cost[other] - cost[at[k]]) >= (memory[at[k]] - memory[other]) * seconds * (1 - 1e-12)
        at[k] = option
    assert [memory[o] for o in at] == [min(m for _, m in item) for item in items]
    assert ratios(extra, saved) == sorted(ratios(extra, saved), reverse=True)


def ratios(extra: np.ndarray, saved: np.ndarray) -> list[float]:
    return [size / seconds if seconds > 0 else INFEASIBLE for seconds, size in zip(extra, saved, strict=True)]
