"""Early plans, on graphs with long chains: stages end at few borders at first, then at borders near the best plan's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import numpy as np

from piper_ray.engine.evaluation.backend import Evaluator, OnProgress
from piper_ray.engine.evaluation.completion import Completion
from piper_ray.engine.evaluation.outcome import TracedStage
from piper_ray.engine.evaluation.threshold import evaluate_threshold
from piper_ray.engine.kernels.types import BitArray, BoolArray, IndexArray
from piper_ray.engine.lattice.downsets import Lattice
from piper_ray.engine.lattice.layer_graph import LayerGraph, members
from piper_ray.engine.search.bracket import Bracket
from piper_ray.engine.tables.problem import Problem

_CHAIN_SHARE = 4
_GAP = 1e-6


def is_worth_a_chain(lattice: Lattice) -> bool:
    """Whether the lattice has several times as many downsets as a chain, so that searching a chain first pays."""
    return lattice.size >= _CHAIN_SHARE * lattice.graph.size


def search_chain(
    chain: Problem,
    backend: Evaluator,
    bracket: Bracket,
    take: Callable[[Problem, Sequence[TracedStage]], float],
    gap: float,
    check: OnProgress,
) -> None:
    """Closes the bracket up to ``gap`` with plans on a chain. take: returns a plan's value, in s. check: may raise."""
    while not bracket.is_done(max(gap, _GAP)):
        threshold_s = bracket.propose()
        outcome = evaluate_threshold(chain, backend, threshold_s, on_progress=check)
        if outcome.feasible:
            bracket.record_feasible(threshold_s, take(chain, outcome.stages))
        else:
            bracket.record_infeasible(threshold_s)


def order_through(problem: Problem, stages: Sequence[TracedStage]) -> list[int]:
    """Returns an order of the vertices that passes every downset between two stages of a plan, from the last stage."""
    bits = problem.lattice.bits
    return [v for stage in reversed(stages) for v in members(bits[stage.outer] & ~bits[stage.inner])]


def prompt_order(graph: LayerGraph) -> list[int]:
    """Returns an order of the vertices, each after its successors and soon after them. Of those that may follow, one
    after which no other may follow is next, such as a projection of what a hub gives to a block; else the latest one.
    """
    left = [len(heads) for heads in graph.successors]
    ready, order = [v for v in range(graph.size - 1, -1, -1) if left[v] == 0], list[int]()
    while ready:
        latest = range(len(ready) - 1, -1, -1)
        ends = (at for at in latest if all(left[u] > 1 for u in graph.predecessors[ready[at]]))
        v = ready.pop(next(ends, len(ready) - 1))
        order.append(v)
        for u in reversed(graph.predecessors[v]):
            left[u] -= 1
            if left[u] == 0:
                ready.append(u)
    return order


def moved_run(graph: LayerGraph, order: Sequence[int], draws: Random) -> Sequence[int]:
    """Returns an order in which a run of vertices stands elsewhere, each still after its successors; the same order if
    there is no room for the run that was drawn. It begins with a vertex that may stand further back, or ends with one
    that may stand further in front: all such vertices are equally likely or, in half of all draws, those with more
    places are likelier, such as the ends of towers. Lengths of 1, 2 to 3, 4 to 7, .. are equally likely.
    """
    size, at = len(order), {v: number for number, v in enumerate(order)}
    back = [k - 1 - max((at[w] for w in graph.successors[v]), default=-1) for k, v in enumerate(order)]
    front = [min((at[u] for u in graph.predecessors[v]), default=size) - 1 - k for k, v in enumerate(order)]
    if not any(back):
        return order
    places = back + front if draws.random() < 0.5 else np.sign(back + front).tolist()
    drawn, length = draws.choices(range(2 * size), places)[0], int(2.0 ** draws.uniform(0.0, np.log2(size)))
    if drawn < size:
        run = order[drawn : drawn + length]
        least = max((at[w] + 1 for v in run for w in graph.successors[v] if at[w] < drawn), default=0)
        to = draws.randint(least, drawn)
        return [*order[:to], *run, *order[to:drawn], *order[drawn + length :]]
    end = drawn - size + 1
    begin = max(0, end - length)
    run = order[begin:end]
    most = min((at[u] for v in run for u in graph.predecessors[v] if at[u] >= end), default=size)
    to = draws.randint(end, most)
    return [*order[:begin], *order[end:to], *run, *order[to:]]


_LONG, _LONG_AND_WIDE = 128, 1024
"""Least numbers of downsets, of a chain and of a lattice that is nearly one, for which few borders make it faster."""

_WIDEST = 2.0
"""Largest number of downsets of each size, on average, of a lattice that is nearly a chain."""

_BORDERS, _LEAST_SPACING = 1024, 4
"""For the first plan: the largest number of windows of sizes, each with one border; and the least sizes in a window."""

_HARDLY_MORE = 1.1
"""Factor over the cheapest border of a window: if all cost about the same, evenly spaced borders are better than the
cheapest ones."""

_FINER = 2
"""Factor by which the spacing shrinks from one plan to the next."""

_REACH = 2
"""How far a border may move at once, in windows of the previous spacing."""


def is_long_chain(lattice: Lattice) -> bool:
    """Whether there are many downsets, and nearly every one is the only one of its size."""
    return lattice.size > (_LONG if lattice.size == lattice.levels else _LONG_AND_WIDE) and (
        lattice.size <= _WIDEST * lattice.levels
    )


def first_spacing(lattice: Lattice) -> int:
    """Returns how many sizes share one border for the first plan."""
    return max(_LEAST_SPACING, -(-lattice.levels // _BORDERS))


def finer(spacing: int) -> int:
    """Returns the next spacing; 0 after the finest."""
    return 0 if spacing == 1 else max(1, spacing // _FINER)


def cheapest_cuts(problem: Problem, spacing: int) -> BoolArray:
    """Returns bool[m]: the first and last downset, and one for each window of ``spacing`` sizes: the first whose border
    costs hardly more than the window's cheapest. The costs of borders rise and fall with the period of a model's
    blocks.
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
    """Returns bool[m]: the borders of a plan, and the cheapest cuts near them; if ``spacing`` is 1, all downsets near
    them.
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
    """Returns int64[m]: the number of vertices of each downset."""
    return np.repeat(np.arange(problem.lattice.level_start.size - 1), np.diff(problem.lattice.level_start))


def within(allowed: BoolArray, devices: int) -> Completion:
    """Returns limits, valid at any threshold, that admit only plans whose stages end at the ``allowed`` downsets."""
    device_limit = np.where(allowed, devices, 0).astype(np.int64)
    device_limit.setflags(write=False)
    return Completion(np.inf, device_limit)


def around(lattice: Lattice, borders: BitArray, share: float) -> BoolArray:
    """Returns bool[m]: the empty set, V, and the downsets that differ by fewest vertices from one of ``borders``,
    uint64[borders, words]: about ``share`` of all, or somewhat fewer.
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
