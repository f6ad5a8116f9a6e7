"""Plans along one order of the layers: n + 1 downsets, so they cost next to nothing, and bound the best plan's time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from piper_ray.engine.evaluation.backend import Evaluator, OnProgress
from piper_ray.engine.evaluation.outcome import TracedStage
from piper_ray.engine.evaluation.threshold import evaluate_threshold
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


def order_of_graph(problem: Problem) -> list[int]:
    """The order that the graph's numbers give."""
    return list(range(problem.workload.lattice.graph.size))


def order_through(problem: Problem, stages: Sequence[TracedStage]) -> list[int]:
    """An order that passes every downset between two stages of a plan, from the back."""
    bits = problem.lattice.bits
    return [v for stage in reversed(stages) for v in members(bits[stage.outer] & ~bits[stage.inner])]
