"""How long a search will take, from a sample of one evaluation: states and TMPC choices of downsets drawn at random."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np

from piper_ray.cost.bounds import ceiling_s
from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.evaluation.backend import NextBatch
from piper_ray.engine.evaluation.potentials import StageCover
from piper_ray.engine.evaluation.state_tables import StateTables, evaluate_downsets, no_states
from piper_ray.engine.evaluation.threshold import evaluate_threshold
from piper_ray.engine.kernels.scan import COUNTERS
from piper_ray.engine.kernels.selection import make_step_cache
from piper_ray.engine.kernels.types import Earlier, FloatArray, IndexArray, LevelStates
from piper_ray.engine.search.bracket import Bracket
from piper_ray.engine.search.chain import is_worth_a_chain, order_of_graph
from piper_ray.engine.search.pricing import are_worthwhile
from piper_ray.engine.tables.problem import Problem, chain_problem
from piper_ray.model.errors import ChoiceTooHard
from piper_ray.model.instance import Instance

_BEGINNING_S, _SAMPLE_S, _DRAWN = 0.15, 0.15, 200
"""CPU time for real states, and for downsets beyond them; how many of these."""

_RECENT_LEVELS = 10
"""Whose states those of later levels are taken to be like."""

_IN_THE_MIDDLE, _AT_THE_PLAN = 2.5, 0.8
"""A search takes as long as so many evaluations in the middle of its bracket, and so many at its first plan: most are
far from there and quick. The latter do not count where potentials leave little to be looked at."""

_ROUNDS, _LONGEST_ROUND_S = 12, 0.1
"""Of looking for potentials, where that is worthwhile; where one takes longer, it is not looked into."""

_NARROW, _WIDE = 1.02, 1.07
"""Upper over lower bound: up to where the first plan is never evaluated, and from where it always is."""

_CHAIN_GAP = 1e-3
_CHAIN_STEPS, _AT_EACH_STEP = (1.018, 1.038, 1.08), 8.0
"""Times the lower bound of a chain of layers, which has no quicker chain to ask; evaluations for each."""


def expected_search_s(instance: Instance, problem: Problem) -> float | None:
    """CPU seconds of one thread for a search, roughly; None if that cannot be told. Takes half a second at the most,
    whatever the lattice.
    """
    lower_s = problem.lower_bound_s()
    upper_s = _chain_value_s(instance, problem, lower_s)
    return expected_between_s(problem, lower_s, upper_s)


def expected_between_s(problem: Problem, lower_s: float, upper_s: float | None) -> float | None:
    """The same, of what is left of a search with these bounds."""
    try:
        if upper_s is None:
            return sum(_AT_EACH_STEP * expected_evaluation_s(problem, step * lower_s) for step in _CHAIN_STEPS)
        middle_s = (lower_s * upper_s) ** 0.5
        seconds = _IN_THE_MIDDLE * expected_evaluation_s(problem, middle_s)
        if middle_s <= 0.0:
            return seconds
        cover = StageCover.of(problem) if StageCover.least_round_s(problem) <= _LONGEST_ROUND_S else None
        if cover is not None and cover.round_s <= _LONGEST_ROUND_S and are_worthwhile(problem, cover, middle_s):
            return seconds + _ROUNDS * cover.round_s
        often = min(1.0, (upper_s / lower_s - _NARROW) / (_WIDE - _NARROW))
        if often > 0.0:
            seconds += _AT_THE_PLAN * often * expected_evaluation_s(problem, upper_s)
    except ChoiceTooHard:
        return None
    return seconds


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
        return time.thread_time() - began_s + _rest_s(problem, beginning.states, threshold_s)
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
        return NextBatch(states.level + 1, here=True)

    def has_room(self) -> bool:
        return False

    def evaluate_downsets(self, *_: object) -> LevelStates:
        raise AssertionError("all is evaluated here")


def _rest_s(problem: Problem, states: StateTables, threshold_s: float) -> float:
    """CPU seconds for the unfinished levels, which this fills."""
    level_start = problem.lattice.level_start
    first, downsets = int(level_start[states.level]), int(level_start[-1])
    if first <= 1:
        return 0.0
    generator = np.random.default_rng(0)
    states.take(_likely(problem, states, threshold_s, first, generator))
    level_of = np.searchsorted(level_start, np.arange(first, downsets), side="right") - 1
    # Every downset looks at the buckets of all levels below its own.
    weights = np.minimum(states.buckets.level_first[level_of], states.buckets_used).astype(np.float64)
    weights[states.target.device_limit[first:] < 1] = 0.0
    total = float(weights.sum())
    if total <= 0.0:
        return 0.0
    drawn = generator.choice(downsets - first, _DRAWN, p=weights / total)
    steps, began_s, s_per_bound = make_step_cache(problem.tables), time.thread_time(), []
    for place in drawn.tolist():
        at_s, i = time.thread_time(), first + place
        arrays = states.arrays_over(int(weights[place]))
        evaluate_downsets(i, i + 1, arrays, Earlier(0, no_states(1)), steps)
        s_per_bound.append((time.thread_time() - at_s) / weights[place])
        if time.thread_time() - began_s > _SAMPLE_S:
            break
    return float(np.mean(s_per_bound)) * total


def _likely(
    problem: Problem, states: StateTables, threshold_s: float, first: int, generator: np.random.Generator
) -> LevelStates:
    """A state or none of each downset from ``first`` on, as those of the levels just before have."""
    level_start, fronts, target = problem.lattice.level_start, states.fronts, states.target
    work_s = problem.workload.sums.device_work_s.reshape(-1)
    recent = np.arange(int(level_start[max(1, states.level - _RECENT_LEVELS)]), first)
    live = recent[fronts.states[recent] > 0]
    share = live.size / recent.size
    limits = target.device_limit[first:]
    has = (generator.random(limits.size) < share) & (limits >= 1)
    if not live.size:
        return no_states(limits.size)
    devices = fronts.tally[fronts.start[live]]
    more = float(np.mean(devices * threshold_s / work_s[live]))  # than work over threshold
    replicas = float(np.mean(fronts.data_parallel_sum[fronts.start[live]] / devices))
    tallies = np.minimum(_at_least_one(more * work_s[first:] / threshold_s), limits)[has]
    sums = np.minimum(_at_least_one(replicas * tallies), target.data_parallel_limit[first:][has])
    return LevelStates(has.astype(np.int64), tallies, sums, np.zeros(COUNTERS, np.int64))


def _at_least_one(values: FloatArray) -> IndexArray:
    whole: IndexArray = np.maximum(1, np.ceil(np.minimum(values, 2.0**40) - 1e-9)).astype(np.int64)
    return whole


def _chain_value_s(instance: Instance, problem: Problem, lower_s: float) -> float | None:
    """About the time of the best plan along one order of the layers; None if that is no quicker way, or has none."""
    workload = problem.workload
    if not is_worth_a_chain(workload.lattice):
        return None
    degrees = problem.cluster.divisors.tolist()
    chain = chain_problem(instance, workload.lattice.graph, workload.options, order_of_graph(problem), degrees)
    bracket = Bracket(lower_s, ceiling_s(instance))
    with closing(LocalBackend(1)) as backend:
        while not bracket.is_done(_CHAIN_GAP):
            threshold_s = bracket.propose()
            outcome = evaluate_threshold(chain, backend, threshold_s)
            if outcome.feasible:
                bracket.record_feasible(threshold_s, threshold_s)
            else:
                bracket.record_infeasible(threshold_s)
    return bracket.upper
