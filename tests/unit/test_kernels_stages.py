"""Stages listed by nested sets, and what is remembered of their TMPC choices against trying them all."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from random import Random
from typing import Any

import numpy as np
import pytest

from piper_ray.engine.kernels import stages
from piper_ray.engine.kernels.knapsack import TOO_HARD
from piper_ray.engine.kernels.selection import StepCache, make_step_cache
from piper_ray.engine.kernels.stages import (
    Candidate,
    ChoiceCache,
    choice_slot,
    count_stages,
    list_stages,
    make_choice_cache,
    settle_choice,
)
from piper_ray.engine.kernels.types import StageKey
from piper_ray.engine.lattice.bits import bit_rows
from tests.instances import build, parallel_branches, random_instance, tmpc, two_towers
from tests.kernel_support import Case, case, least_work_s, random_case


@pytest.mark.parametrize("seed", range(10))
def test_stages_are_all_nested_pairs_with_their_least_work(seed: int) -> None:
    made = random_case(seed, most_layers=5)
    pairs = list(made.pairs())
    assert count_stages(made.problem.lattice.bits) == len(pairs)
    listed = list_stages(made.problem.tables, len(pairs))
    assert listed.start[0] == 0
    found = [(i, int(j)) for i in range(len(made.sets)) for j in listed.inner[listed.start[i] : listed.start[i + 1]]]
    assert found == sorted(pairs), "by I, then in id order of J"
    for stage, (i, j) in enumerate(found):
        possible = set(made.variants(made.layers(i, j)))
        for r in range(made.problem.options.degree.size):
            expected = least_work_s(made, i, j, r) if r in possible else math.inf
            assert listed.work_s[stage, r] == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_nested_sets_in_several_words() -> None:
    rng = Random(1)
    sets = [set(rng.sample(range(130), rng.randint(0, 130))) for _ in range(5)]
    sets += [s & t for s in sets for t in sets]
    sets.sort(key=len)
    rows = bit_rows(sets, 130)
    assert count_stages(rows) == sum(sets[j] <= sets[i] for i in range(len(sets)) for j in range(i))


class Choices:
    """What the kernels know of a case's TMPC choices."""

    def __init__(self, made: Case, slots: int = 2**14) -> None:
        self.made, self.tables = made, made.problem.tables
        self.cache: ChoiceCache = make_choice_cache(slots)
        self.steps: StepCache = make_step_cache(made.problem.tables)
        self.stage_of = {pair: stage for stage, pair in enumerate(sorted(made.pairs()))}

    def candidate(self, i: int, j: int, r: int, index: int, y: int) -> Candidate:
        return Candidate(self.stage_of[i, j], StageKey(i, j, r), index, y)

    def slot(self, i: int, j: int, r: int, index: int, y: int) -> int:
        return int(choice_slot(self.candidate(i, j, r, index, y), self.tables, self.steps, self.cache))

    def settle(self, candidate: Candidate, used_s: float, budget_s: float, slot: int) -> bool:
        return bool(settle_choice(candidate, used_s, budget_s, slot, self.tables, self.cache))

    def bounds(self, slot: int) -> tuple[float, float]:
        return float(self.cache.low_s[slot]), float(self.cache.high_s[slot])


def questions(made: Case, rng: Random) -> Iterator[tuple[int, int, int, int, int, int, Fraction | None]]:
    """(I, J, variant, index of d, d, y, least time) of each stage, with one d and y."""
    for i, j in made.pairs():
        layers = made.layers(i, j)
        for r in made.variants(layers):
            degrees = list(made.degrees(r))
            if degrees:
                index, d = rng.choice(degrees)
                y = rng.randint(1, 5)
                yield i, j, r, index, d, y, made.time_s(layers, r, d, y)


def used_s(made: Case, i: int, j: int, r: int, d: int) -> float:
    """Of the stage on one device, without what a choice takes beyond the least."""
    costs = made.problem.costs
    return least_work_s(made, i, j, r) + (d - 1) * max(0.0, float(costs.resync_s[i, r] - costs.resync_s[j, r]))


def test_bounds_hold_the_best_choice() -> None:
    """From the relaxation first, then settled within a budget that does, and one that does not."""
    seen: Counter[str] = Counter()
    for seed in range(60):
        made, rng = random_case(seed), Random(seed)
        known = Choices(made)
        for i, j, r, index, d, y, least in questions(made, rng):
            spent_s = used_s(made, i, j, r, d)
            extra_s = math.inf if least is None else float(least * d) - spent_s
            hair = 1e-7 * (1 + spent_s + (0.0 if least is None else abs(extra_s)))
            slot = known.slot(i, j, r, index, y)
            low_s, high_s = known.bounds(slot)
            assert low_s - hair <= extra_s <= high_s + hair
            seen["exact at once"] += low_s == high_s
            if least is None:
                seen["none fits"] += 1
                assert known.settle(known.candidate(i, j, r, index, y), spent_s, spent_s + 1e3, slot)
                assert known.cache.low_s[slot] >= 1e3 * (1 - 1e-9)
                assert known.cache.high_s[slot] == math.inf
                continue
            if extra_s > 0.1:
                budget_s = spent_s + 0.9 * extra_s
                assert known.settle(known.candidate(i, j, r, index, y), spent_s, budget_s, slot)
                low_s, high_s = known.bounds(slot)
                assert 0.9 * extra_s - hair <= low_s <= extra_s + hair
                assert extra_s - hair <= high_s
                seen["budget too small"] += 1
            budget_s = spent_s + extra_s + rng.choice([hair, 1.0])
            assert known.settle(known.candidate(i, j, r, index, y), spent_s, budget_s, slot)
            assert known.bounds(slot) == pytest.approx((extra_s, extra_s), rel=1e-7, abs=hair)
            assert known.slot(i, j, r, index, y) == slot
            assert known.bounds(slot) == pytest.approx((extra_s, extra_s), rel=1e-7, abs=hair), "kept"
    assert min(seen[what] for what in ("exact at once", "none fits", "budget too small")) > 100


def test_a_slot_is_refilled_for_another_stage() -> None:
    """Two slots for all questions: whoever asks gets bounds of its own."""
    made = random_case(3)
    few, many = Choices(made, slots=2), Choices(made)
    asked = list(questions(made, Random(3))) * 2
    assert len(asked) > 4
    for i, j, r, index, _, y, _ in asked:
        assert few.bounds(few.slot(i, j, r, index, y)) == many.bounds(many.slot(i, j, r, index, y))


def test_several_equal_layers_are_rounded_up() -> None:
    """Three layers of a class save 2 bytes each for 3 s: 5 bytes take 7.5 s at least, and 9 s suffice."""
    row = [tmpc(1, 0, 3, 0, "fast"), tmpc(4, 0, 1, 0, "small")]
    edges = {(0, 1): 0.0, (1, 2): 0.0}
    made = case(build({v: {1: row} for v in range(3)}, edges, memory_bytes=4.0))
    known = Choices(made)
    slot = known.slot(len(made.sets) - 1, 0, 0, 0, 1)
    assert known.bounds(slot) == pytest.approx((7.5, 9.0))
    # Of d it is the same here, so the slot is; where replicas share memory out it is not.
    assert known.slot(len(made.sets) - 1, 0, 0, 1, 1) == slot
    sharing = [replace(row[0], shared_bytes=1.0), row[1]]
    known = Choices(case(build({v: {1: sharing} for v in range(3)}, edges, memory_bytes=4.0)))
    assert known.slot(len(made.sets) - 1, 0, 0, 1, 1) != known.slot(len(made.sets) - 1, 0, 0, 0, 1)


def in_plain_python(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel as it is written: what it calls can be replaced."""
    return getattr(function, "py_func", function)


@pytest.mark.parametrize("any_is_found", [True, False])
def test_a_choice_that_is_too_hard(monkeypatch: pytest.MonkeyPatch, any_is_found: bool) -> None:
    """Any choice within the budget does then; without one the answer is that it is too hard, and nothing is learnt."""

    def too_hard(*arguments: object) -> float:
        any_within = arguments[3]
        return 11.0 if any_within and any_is_found else TOO_HARD

    monkeypatch.setattr(stages, "least_cost", too_hard)
    made = random_case(3)
    cache = make_choice_cache(2)
    cache.low_s[1], cache.high_s[1] = 1.5, np.inf
    last = len(made.sets) - 1
    candidate = Candidate(0, StageKey(last, 0, 0), 0, 1)
    settled = in_plain_python(settle_choice)(candidate, 10.0, 12.0, 1, made.problem.tables, cache)
    assert settled is any_is_found
    assert cache.low_s[1] == 1.5
    # It takes 11 s - 10 s more, which cannot be below what is proved.
    assert cache.high_s[1] == (1.5 if any_is_found else np.inf)


@pytest.mark.parametrize("name", ["towers", "branches"])
def test_counts_of_shapes(name: str) -> None:
    """Two chains of h side by side between two ends, or b branches: nested pairs are counted by hand."""
    if name == "towers":
        made = case(two_towers(3))
        # Pairs within the (h + 1)^2 downsets of the towers: ((h + 1)(h + 2) / 2)^2 - (h + 1)^2 = 100 - 16 = 84.
        # The empty set and all lie below and above each of the 16, and each other.
        assert count_stages(made.problem.lattice.bits) == 84 + 2 * 16 + 1
    else:
        made = case(parallel_branches(1, 4))
        # 3^4 pairs J <= I of subsets, 2^4 of them equal; then as above.
        assert count_stages(made.problem.lattice.bits) == 81 - 16 + 2 * 16 + 1


def test_nothing_is_nested_in_one_downset() -> None:
    made = case(random_instance(0, most_layers=1))
    assert count_stages(made.problem.lattice.bits[:1]) == 0
