"""How long a search will take, from a sample of one evaluation: states and TMPC choices of downsets drawn at random."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from piper_ray.cost.bounds import ceiling_s
from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.evaluation.backend import NextBatch
from piper_ray.engine.evaluation.completion import Completion
from piper_ray.engine.evaluation.potentials import StageCover
from piper_ray.engine.evaluation.state_tables import StateTables, evaluate_downsets, no_states
from piper_ray.engine.evaluation.threshold import evaluate_threshold
from piper_ray.engine.kernels.scan import COUNTERS
from piper_ray.engine.kernels.selection import make_step_cache
from piper_ray.engine.kernels.types import Earlier, FloatArray, IndexArray, LevelStates
from piper_ray.engine.lattice.bits import offsets
from piper_ray.engine.search.bracket import Bracket
from piper_ray.engine.search.chain import is_worth_a_chain, order_of_graph
from piper_ray.engine.search.coarse import every, is_long_chain, within
from piper_ray.engine.search.pricing import are_due, are_worthwhile
from piper_ray.engine.search.wide import WideSearch
from piper_ray.engine.tables.problem import Problem, chain_problem
from piper_ray.model.errors import ChoiceTooHard
from piper_ray.model.instance import Instance

_BEGINNING_S, _SAMPLE_S, _DRAWN = 0.15, 0.15, 200
"""CPU time for real states, and for downsets beyond them; how many of these."""

_TOGETHER = 16
"""Downsets drawn side by side, as calls take some time of their own."""

_RECENT_LEVELS = 10
"""Whose states those of later levels are taken to be like."""

_IN_THE_MIDDLE, _AT_THE_PLAN = 3.0, 2.0
"""A search takes as long as so many evaluations in the middle of its bracket, and so many at its first plan: most are
far from there and quick. The latter do not count where potentials leave little to be looked at."""

_ROUNDS, _SPARED, _LONGEST_ROUND_S = 12, 0.3, 0.1
"""Of looking for potentials, where that is worthwhile; where one takes longer, it is not looked into."""

_WIDE_ROUNDS = 750
"""Of looking for potentials: what a search of the downsets that count takes in all, rounds, listing and evaluations."""

_NARROW, _WIDE = 1.02, 1.07
"""Upper over lower bound: up to where the first plan is never evaluated, and from where it always is."""

_UPPER_GAP, _BORDERS = 1e-3, 64
"""Of the plan that stands for the first one, relative; and how many borders it has to choose from on a long chain."""

_ON_A_CHAIN, _NEARLY_ON_A_CHAIN = 10.0, 2.0
"""Evaluations at such a plan: on a chain what is known of one rules out little of the next, elsewhere nearly all."""

_CHAIN_STEPS, _AT_EACH_STEP = (1.018, 1.038, 1.08), 8.0
"""Times the lower bound of a short chain of layers, which has no quicker one to ask; evaluations for each."""


def expected_search_s(instance: Instance, problem: Problem) -> float | None:
    """CPU seconds of one thread for a search, roughly; None if that cannot be told. Takes a second or two, whatever the
    lattice.
    """
    lower_s = problem.lower_bound_s()
    try:
        upper_s = _upper_s(instance, problem, lower_s)
    except ChoiceTooHard:
        return None
    return expected_between_s(problem, lower_s, upper_s)


def expected_wide_s(search: WideSearch) -> float | None:
    """CPU seconds of one thread for a search of the downsets that count alone, and on these, roughly; None where the
    layers are too entangled. How many count is only known once they are told.
    """
    return None if search.cover is None else _WIDE_ROUNDS * search.cover.round_s


def expected_between_s(problem: Problem, lower_s: float, upper_s: float | None) -> float | None:
    """The same, of what is left of a search with these bounds."""
    lattice = problem.workload.lattice
    try:
        if upper_s is None:
            return sum(_AT_EACH_STEP * expected_evaluation_s(problem, step * lower_s) for step in _CHAIN_STEPS)
        if is_long_chain(lattice):
            often = _ON_A_CHAIN if lattice.size == lattice.levels else _NEARLY_ON_A_CHAIN
            return often * expected_evaluation_s(problem, upper_s)
        middle_s = (lower_s * upper_s) ** 0.5
        seconds = _IN_THE_MIDDLE * expected_evaluation_s(problem, middle_s)
        if middle_s <= 0.0:
            return seconds
        at_the_plan_s = _AT_THE_PLAN * expected_evaluation_s(problem, upper_s)
        often = min(1.0, (upper_s / lower_s - _NARROW) / (_WIDE - _NARROW))
        by_evaluations_s = seconds + max(0.0, often) * at_the_plan_s
        if not are_due(problem, StageCover.least_round_s(problem), by_evaluations_s):
            return by_evaluations_s
        cover = StageCover.of(problem) if StageCover.least_round_s(problem) <= _LONGEST_ROUND_S else None
        if cover is None or cover.round_s > _LONGEST_ROUND_S or not are_due(problem, cover.round_s, by_evaluations_s):
            return by_evaluations_s
        if not are_worthwhile(problem, cover, middle_s):
            return by_evaluations_s
        return seconds + _SPARED * at_the_plan_s + _ROUNDS * cover.round_s
    except ChoiceTooHard:
        return None


def expected_evaluation_s(problem: Problem, threshold_s: float) -> float:
    """CPU seconds of one thread for an evaluation at the threshold, over all of the lattice.

    The first levels are evaluated. If that takes too long for all of them, the others are taken to have as many states
    as the last ones had, with as many devices for their work, and the time of some of their downsets is measured over
    these. Raises ChoiceTooHard as an evaluation does.
    """
    beginning = _Beginning()
    began_s = time.thread_time()
    try:
        evaluate_threshold(problem, beginning, threshold_s)
    except _Enough:
        assert beginning.states is not None
        return time.thread_time() - began_s + _rest_s(problem, beginning.states)
    return time.thread_time() - began_s


class _Enough(Exception):
    """Ends an evaluation from inside."""


@dataclass
class _Beginning:
    """Evaluates level by level here, until it has taken long enough."""

    states: StateTables | None = None
    _until_s: float = field(default_factory=lambda: time.thread_time() + _BEGINNING_S)

    def next_batch(self, states: StateTables) -> NextBatch:
        self.states = states
        if time.thread_time() > self._until_s:
            raise _Enough
        # Levels of a single downset take no longer than to ask for them.
        end_level = states.level + 1 + states.level // 8
        return NextBatch(min(end_level, states.tables.lattice.level_start.size - 1), here=True)

    def has_room(self) -> bool:
        return False

    def evaluate_downsets(self, *_: object) -> LevelStates:
        raise AssertionError("all is evaluated here")


def _rest_s(problem: Problem, states: StateTables) -> float:
    """CPU seconds for the unfinished levels, which this fills."""
    level_start = problem.lattice.level_start
    first, downsets = int(level_start[states.level]), int(level_start[-1])
    if first <= 1:
        return 0.0
    generator = np.random.default_rng(0)
    states.take(_likely(problem, states, first))
    level_of = np.searchsorted(level_start, np.arange(first, downsets), side="right") - 1
    # Every downset looks at the buckets of all levels below its own.
    weights = np.minimum(states.buckets.level_first[level_of], states.buckets_used).astype(np.float64)
    weights[states.target.device_limit[first:] < 1] = 0.0
    total = float(weights.sum())
    if total <= 0.0:
        return 0.0
    drawn = generator.choice(downsets - first, _DRAWN, p=weights / total)
    runs = [(first + place, int(weights[place])) for place in drawn.tolist()]
    steps = make_step_cache(problem.tables)

    def s_per_bound(i: int, seen: int) -> float:
        end = min(i + _TOGETHER, int(level_start[level_of[i - first] + 1]))
        arrays, at_s = states.arrays_over(seen), time.thread_time()
        evaluate_downsets(i, end, arrays, Earlier(0, no_states(end - i)), steps)
        return (time.thread_time() - at_s) / float(weights[i - first : end - first].sum())

    # Options in order, by microbatches in flight, are made once for all downsets: not so what is known of stages.
    began_s = time.thread_time()
    warm = list(takewhile(lambda _: time.thread_time() - began_s <= _SAMPLE_S, (s_per_bound(*run) for run in runs)))
    steps.fits.key.fill(0)
    return float(np.mean([s_per_bound(*run) for run in runs[: len(warm) + 1]])) * total


def _likely(problem: Problem, states: StateTables, first: int) -> LevelStates:
    """States of each downset from ``first`` on like those of one at the same place in a level before, with as many
    devices and replicas for their work.

    Downsets side by side in a level are nearly the same, and so are those at the same place in different levels: as
    among real ones, live ones are side by side.
    """
    level_start, fronts, target = problem.lattice.level_start, states.fronts, states.target
    work_s = problem.workload.sums.device_work_s.reshape(-1)
    model = _places(level_start, states.level)
    count = fronts.states[model] * (target.device_limit[first:] >= 1)
    owner = np.repeat(np.arange(count.size), count)
    state = np.repeat(fronts.start[model] - offsets(count)[:-1], count) + np.arange(owner.size)
    scale = np.divide(work_s[first:], work_s[model], out=np.ones(model.size), where=work_s[model] > 0.0)[owner]
    tallies = np.minimum(_at_least_one(scale * fronts.tally[state]), target.device_limit[first:][owner])
    sums = np.minimum(_at_least_one(scale * fronts.data_parallel_sum[state]), target.data_parallel_limit[first:][owner])
    # Of equal sums the last takes the fewest devices; of equal devices the first has the least sum.
    last = np.append(owner, -1)[1:] != owner
    kept = last | (np.append(sums, 0)[1:] != sums)
    owner, tallies, sums = owner[kept], tallies[kept], sums[kept]
    first_one = np.append(-1, owner)[:-1] != owner
    kept = first_one | (np.append(0, tallies)[:-1] != tallies)
    owner, tallies, sums = owner[kept], tallies[kept], sums[kept]
    return LevelStates(np.bincount(owner, minlength=count.size), tallies, sums, np.zeros(COUNTERS, np.int64))


def _places(level_start: IndexArray, level: int) -> IndexArray:
    """For each downset of ``level`` and above, which lies at the same place, relative, in one of the levels below."""
    recent = min(_RECENT_LEVELS, level - 1)
    found = []
    for k, size in enumerate(np.diff(level_start[level:]).tolist()):
        before = level - 1 - k % recent
        found.append(level_start[before] + np.arange(size) * (level_start[before + 1] - level_start[before]) // size)
    return np.concatenate(found)


def _at_least_one(values: FloatArray) -> IndexArray:
    whole: IndexArray = np.maximum(1, np.ceil(np.minimum(values, 2.0**40) - 1e-9)).astype(np.int64)
    return whole


def _upper_s(instance: Instance, problem: Problem, lower_s: float) -> float | None:
    """About the time of the best plan along one order of the layers, or, on a long chain, with few borders; None where
    that is no quicker way, or has none.
    """
    workload = problem.workload
    if is_long_chain(workload.lattice):
        spacing = max(2, -(-workload.lattice.levels // _BORDERS))
        return _value_s(instance, problem, lower_s, within(every(workload.lattice, spacing), problem.cluster.devices))
    if not is_worth_a_chain(workload.lattice):
        return None
    degrees = problem.cluster.divisors.tolist()
    chain = chain_problem(instance, workload.lattice.graph, workload.options, order_of_graph(problem), degrees)
    return _value_s(instance, chain, lower_s, None)


def _value_s(instance: Instance, problem: Problem, lower_s: float, borders: Completion | None) -> float | None:
    bracket = Bracket(lower_s, ceiling_s(instance))
    with closing(LocalBackend(1)) as backend:
        while not bracket.is_done(_UPPER_GAP):
            threshold_s = bracket.propose()
            if evaluate_threshold(problem, backend, threshold_s, completion=borders).feasible:
                bracket.record_feasible(threshold_s, threshold_s)
            else:
                bracket.record_infeasible(threshold_s)
    return bracket.upper
