"""An early plan on a long chain: stages may end at few borders at first, then at those near the best plan's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from piper_ray.engine.evaluation.backend import Evaluator, OnProgress
from piper_ray.engine.evaluation.completion import Completion
from piper_ray.engine.evaluation.outcome import TracedStage
from piper_ray.engine.evaluation.threshold import evaluate_threshold
from piper_ray.engine.kernels.cover import BoolArray
from piper_ray.engine.kernels.types import BitArray, IndexArray
from piper_ray.engine.lattice.bits import members
from piper_ray.engine.lattice.downsets import Lattice
from piper_ray.engine.search.bracket import Bracket
from piper_ray.engine.tables.problem import Problem

_CHAIN_SHARE = 4
_GAP = 1e-6


def is_worth_a_chain(lattice: Lattice) -> bool:
    """A chain pays when the lattice has several times as many downsets."""
    return lattice.size >= _CHAIN_SHARE * lattice.graph.size


def search_chain(
    chain: Problem,
    backend: Evaluator,
    bracket: Bracket,
    take: Callable[[Problem, Sequence[TracedStage]], float],
    gap: float,
    check: OnProgress,
) -> None:
    """Closes the bracket as far as ``gap`` by plans on a chain. take: values a plan found, in s. check: may raise."""
    while not bracket.is_done(max(gap, _GAP)):
        threshold_s = bracket.propose()
        outcome = evaluate_threshold(chain, backend, threshold_s, on_progress=check)
        if outcome.feasible:
            bracket.record_feasible(threshold_s, take(chain, outcome.stages))
        else:
            bracket.record_infeasible(threshold_s)


def order_through(problem: Problem, stages: Sequence[TracedStage]) -> list[int]:
    """An order that passes every downset between two stages of a plan, from the back."""
    bits = problem.lattice.bits
    return [v for stage in reversed(stages) for v in members(bits[stage.outer] & ~bits[stage.inner])]


_LONG, _LONG_AND_WIDE = 128, 1024
"""Fewer downsets, of a chain and of what is nearly one, are searched as fast without."""

_WIDEST = 2.0
"""Downsets of each size on average, at most, of what is nearly a chain."""

_BORDERS, _LEAST_SPACING = 1024, 4
"""Of the first plan: windows of sizes, of which each has a border, at most; and sizes in a window, at least."""

_HARDLY_MORE = 1.1
"""Times the cheapest border of a window: where all cost about the same, borders spaced evenly are better than the
cheapest ones."""

_FINER = 2
"""Times, from one plan to the next."""

_REACH = 2
"""How far a border may move at once, in windows of the borders before."""


def is_long_chain(lattice: Lattice) -> bool:
    """Whether nearly every downset is the only one of its size, and there are many."""
    return lattice.size > (_LONG if lattice.size == lattice.levels else _LONG_AND_WIDE) and (
        lattice.size <= _WIDEST * lattice.levels
    )


def first_spacing(lattice: Lattice) -> int:
    """How many sizes have one border together, of the first plan."""
    return max(_LEAST_SPACING, -(-lattice.levels // _BORDERS))


def finer(spacing: int) -> int:
    """The next spacing; 0 after the finest."""
    return 0 if spacing == 1 else max(1, spacing // _FINER)


def cheapest_cuts(problem: Problem, spacing: int) -> BoolArray:
    """bool[m]: the first and last downset, and of each ``spacing`` sizes the downset whose border costs least, or the
    first that costs hardly more. Costs of borders go up and down with the period of a model's blocks.
    """
    cut_s, window = (problem.costs.need_s - problem.costs.cap_s).min(axis=1), _sizes(problem) // spacing
    least_s = np.full(window[-1] + 1, np.inf)
    np.minimum.at(least_s, window, cut_s)
    cheap = np.flatnonzero(cut_s <= least_s[window] * _HARDLY_MORE)
    allowed = np.zeros(cut_s.size, np.bool_)
    allowed[cheap[np.diff(window[cheap], prepend=-1) > 0]] = True
    allowed[-1] = True
    return allowed


def near(problem: Problem, stages: Sequence[TracedStage], spacing: int) -> BoolArray:
    """bool[m]: of the cheapest cuts those near the borders of a plan, and these; where the spacing is one, all that are
    near.
    """
    sizes, borders = _sizes(problem), [stage.inner for stage in stages]
    allowed = np.zeros(sizes.size, np.bool_)
    for border in borders:
        allowed |= np.abs(sizes - sizes[border]) <= _REACH * _FINER * spacing
    if spacing > 1:
        allowed &= cheapest_cuts(problem, spacing)
    allowed[[*borders, 0, -1]] = True
    return allowed


def _sizes(problem: Problem) -> IndexArray:
    """int64[m]: of each downset."""
    return np.repeat(np.arange(problem.lattice.level_start.size - 1), np.diff(problem.lattice.level_start))


def within(allowed: BoolArray, devices: int) -> Completion:
    """Of plans whose stages end at these downsets, at any threshold."""
    device_limit = np.where(allowed, devices, 0).astype(np.int64)
    device_limit.setflags(write=False)
    return Completion(np.inf, device_limit)


def around(lattice: Lattice, borders: BitArray, share: float) -> BoolArray:
    """bool[m]: the empty set, V, and the downsets that differ by fewest vertices from one of ``borders``,
    uint64[borders, words], as many as are this share of all at most.
    """
    bits = lattice.arrays.bits
    apart = np.full(lattice.size, lattice.graph.size, np.int64)
    for border in borders:
        np.minimum(apart, np.bitwise_count(bits ^ border).sum(axis=1, dtype=np.int64), out=apart)
    upto = np.cumsum(np.bincount(apart))
    widest = max(1, int(np.searchsorted(upto, share * lattice.size, side="right")) - 1)
    allowed: BoolArray = apart <= widest
    allowed[[0, -1]] = True
    return allowed
