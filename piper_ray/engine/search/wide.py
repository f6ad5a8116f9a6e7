"""Searches graphs with too many downsets to list: a bound, a plan, and then the downsets that faster plans can use."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from random import Random

import numpy as np

from piper_ray.cost.bounds import ceiling_s
from piper_ray.cost.tolerances import PROOF
from piper_ray.engine.evaluation.backend import Evaluator
from piper_ray.engine.evaluation.dual_prices import DualPrices, StageCover
from piper_ray.engine.evaluation.outcome import Outcome, TracedStage
from piper_ray.engine.evaluation.reach import Beam, Reach, Room
from piper_ray.engine.evaluation.threshold import evaluate_threshold
from piper_ray.engine.kernels.types import BitArray
from piper_ray.engine.lattice.downsets import listed_lattice
from piper_ray.engine.lattice.layer_graph import LayerGraph
from piper_ray.engine.ledger import Ledger, keeping_known
from piper_ray.engine.search.bracket import Bracket
from piper_ray.engine.search.cells import MOST_STEPS, bound_by_cells, is_smallest
from piper_ray.engine.search.neighbourhood import moved_run, order_through, prompt_order, search_chain
from piper_ray.engine.search.planning import Planning, ValuedPlan
from piper_ray.engine.search.pricing import bound_by_cover
from piper_ray.engine.tables.problem import LatticeTables, Problem, build_problem, chain_problem
from piper_ray.engine.tables.tmpc_options import TmpcOptions
from piper_ray.model.stop import StoppedBy

CELLS, _ROUNDS = 1024, 100
"""Cells of the grid of times, and rounds for dual prices: more than elsewhere, because the prices matter most here."""

_PREFERRED_S, _PREFERRED_STEPS, _SMALLER = 5.0, 1_000_000_000, 50
"""Of a proved plan not all equally fast ones are sought if the dual prices for it may take longer than this. Smaller
ones are then sought on chains, if cells do not show that there is none: steps of one grid, and the number of chains."""

_ABOVE_BOUND = (0.002, 0.008, 0.032, 0.128)
"""Thresholds for a beam, as relative distances above the lower bound."""

_BEAMS_BETWEEN, _NEAR = 4, 5e-4
"""The number of further beams, and the relative distance between plan and infeasible threshold that makes them
needless."""

_IN_VAIN, _MOVES, _FASTER = 200, 2, 1e-5
"""How many orders are drawn in a row without a faster plan, by how many moves at most each differs from the best plan's
order, and the relative time by which a plan must be faster. A chain of 850 operators takes some 50 ms."""

_LONG = 1_000_000_000
"""Steps of a grid of cells after which the next one takes some ten seconds, as long as orders in vain do."""

_BEAM = Beam(width=30, early=0.02)
_BEAM_DOWNSETS, _BEAM_STEPS = 1_000_000, 100_000_000
_FIRST_STEP, _LEAST_STEP = 1e-3, 1e-4
"""The first and the least relative step between thresholds."""

_FEW_STEPS, _SOME_STEPS, _MOST_STEPS = 40_000_000, 320_000_000, 3_000_000_000
"""Steps of one listing from the bound up: at first (about a second), for all downsets at once, and at the end."""


@dataclass
class WideSearch:
    """The rule of a search that lists only useful downsets, at most ``most`` at a time. It keeps ``ledger``.

    workload: the tables of all downsets that plans as good as the ledger's can use. It is None if the bracket is as
    narrow as the gap, if these downsets are more than ``most`` (``outgrown`` is then true) or take too long to list, or
    if the layers are too entangled.
    """

    planning: Planning
    graph: LayerGraph
    options: TmpcOptions
    degrees: Sequence[int]
    backend: Evaluator
    ledger: Ledger[ValuedPlan] = field(default_factory=Ledger)
    most: int = 0

    def __post_init__(self) -> None:
        self._chain = self._on_chain(range(self.graph.size))
        self.bracket = Bracket(self._chain.lower_bound_s(), ceiling_s(self.planning.instance))
        self.workload: LatticeTables | None = None
        self.outgrown = False
        self.ledger.cases = {0: self.bracket}
        self._order: Sequence[int] = list(range(self.graph.size))  # of the chain that gave the best plan

    def efforts(self) -> Generator[None, None, None]:
        """Searches two chains, then uses bounds over cells, further chains, dual prices, beams, and all useful
        downsets. Raises ChoiceTooHard or Inexact if no plan is known.
        """
        with keeping_known(self.ledger, self.bracket.forget):
            self._search_order(self._order, self._chain)
            yield
            prompt = prompt_order(self.graph)
            self._search_order(prompt, self._on_chain(prompt))
            yield
            if self.cover is not None:
                yield from self._bound_by_cells(self.cover)
                self.workload = self._live(self.cover)

    def _bound_by_cells(self, cover: StageCover) -> Generator[None, None, None]:
        """Searches chains of further orders before the first grid that takes as long as they do."""
        is_varied, check = False, self.ledger.check
        for known in bound_by_cells(cover, self._devices, self.bracket, self._gap, MOST_STEPS, check):
            yield
            if known.steps > _LONG and not is_varied:
                is_varied = True
                yield from self._vary_order()
        if not is_varied:
            yield from self._vary_order()

    @property
    def left_open(self) -> StoppedBy:
        """Why the search ended with a bound below the best plan."""
        return StoppedBy.GAP if self.bracket.is_done(self._gap) else StoppedBy.TOO_MANY_DOWNSETS

    def _live(self, cover: StageCover) -> LatticeTables | None:
        reach, found, most = Reach(cover), None, self.most
        if self.bracket.closed and _ROUNDS * cover.round_s > _PREFERRED_S:
            self._prefer_smaller(cover)
            return None
        if not self.bracket.is_done(self._gap):
            lower_s, record = self.bracket.lower, self.bracket.record_bound
            bound_by_cover(cover, self._devices, lower_s, None, self.ledger.check, _ROUNDS, record)
            self._look_along_beams(cover, reach, most)
        if not self.bracket.is_done(self._gap):
            found = self._as_good(cover, reach, most, _SOME_STEPS) or self._step_up(cover, reach, most)
        if self.bracket.closed:
            found = found or self._as_good(cover, reach, most, _FEW_STEPS)
        return found

    def _prefer_smaller(self, cover: StageCover) -> None:
        """Of plans as fast as the best, which is proved, takes one of fewer devices, or of as many and fewer stages, if
        chains near its order have one and cells do not show that none is."""
        upper_s, best, draws = self.bracket.upper, self.ledger.best, Random(0)
        assert upper_s is not None
        assert best is not None
        if is_smallest(cover, upper_s, best.devices, best.stages, _PREFERRED_STEPS, self.ledger.check):
            return
        for _ in range(_SMALLER):
            chain = self._on_chain(self._varied(draws))
            outcome = evaluate_threshold(
                chain, self.backend, upper_s, fewest_stages=True, on_progress=self.ledger.check
            )
            if outcome.feasible:
                found = self.planning.valued(chain, outcome.stages)
                best = min(best, found, key=lambda plan: (plan.devices, plan.stages))
        self.bracket.settle(best.value_s)
        self.ledger.settle(best)

    @property
    def _gap(self) -> float:
        return self.ledger.limits.gap

    def _vary_order(self) -> Generator[None, None, None]:
        """Searches chains of orders that differ from the best plan's by some runs of vertices, where there is a faster
        plan. A stage that has parts of two branches fills its time better than one that ends with a layer of one."""
        draws, in_vain = Random(0), 0
        while in_vain < _IN_VAIN and self.bracket.upper is not None and not self.bracket.is_done(self._gap):
            in_vain, order = in_vain + 1, self._varied(draws)
            if order == self._order:
                continue
            threshold_s = self.bracket.upper * (1.0 - _FASTER)
            chain = self._on_chain(order)
            if evaluate_threshold(chain, self.backend, threshold_s, on_progress=self.ledger.check).feasible:
                self._search_order(order, chain)
                in_vain = 0
                yield

    def _varied(self, draws: Random) -> Sequence[int]:
        """Returns an order in which some runs of the best plan's stand elsewhere."""
        order = self._order
        for _ in range(draws.randint(1, _MOVES)):
            order = moved_run(self.graph, order, draws)
        return order

    def _search_order(self, order: Sequence[int], chain: Problem) -> None:
        """chain: of this order."""
        before_s = self.ledger.upper_s
        self._search_chain(chain)
        if self.ledger.upper_s < before_s:
            self._order = order

    def _search_chain(self, chain: Problem) -> None:
        bracket = Bracket(self.bracket.lower, self.bracket.ceiling, self.bracket.upper)
        search_chain(chain, self.backend, bracket, partial(self.take, origin="chain"), self._gap, self.ledger.check)

    @cached_property
    def cover(self) -> StageCover | None:
        """The cover of the layers by stages; None if the layers are too entangled."""
        return StageCover.of(self._chain, CELLS)

    def improve_along(self, problem: Problem, stages: Sequence[TracedStage]) -> None:
        """Finds plans whose stages are runs of an order that passes the borders of a given plan."""
        self._search_chain(self._on_chain(order_through(problem, stages)))

    @property
    def _devices(self) -> int:
        return self._chain.cluster.devices

    def _look_along_beams(self, cover: StageCover, reach: Reach, most: int) -> None:
        """Tries beams at rising distances above the bound, then between the last threshold without a plan and the best
        plan."""
        in_vain_s = self.bracket.lower
        for step in _ABOVE_BOUND:
            threshold_s = self.bracket.lower * (1.0 + step)
            if (self.bracket.upper is not None and threshold_s >= self.bracket.upper) or self._is_near(in_vain_s):
                break
            if self._has_plan_along_beam(cover, reach, most, threshold_s):
                break
            in_vain_s = threshold_s
        for _ in range(_BEAMS_BETWEEN):
            if self.bracket.upper is None or self._is_near(in_vain_s):
                break
            threshold_s = (in_vain_s * self.bracket.upper) ** 0.5
            if not self._has_plan_along_beam(cover, reach, most, threshold_s):
                in_vain_s = threshold_s

    def _is_near(self, threshold_s: float) -> bool:
        """Whether the best plan's value is near the threshold."""
        upper_s = self.bracket.upper
        return upper_s is not None and upper_s <= threshold_s * (1.0 + _NEAR)

    def _has_plan_along_beam(self, cover: StageCover, reach: Reach, most: int, threshold_s: float) -> bool:
        dual_prices = self.dual_prices(cover, threshold_s)
        if dual_prices.devices > self._devices * (1.0 + PROOF):
            self.bracket.record_bound(threshold_s)
            return False
        found = reach.downsets(dual_prices, Room(min(most, _BEAM_DOWNSETS), _BEAM_STEPS), _BEAM, self.ledger.check)
        if found is None or not self._is_whole(found):
            return False
        problem, outcome = self._evaluate(found, threshold_s)
        if outcome.feasible:
            self.take(problem, outcome.stages, origin="beam")
            self.improve_along(problem, outcome.stages)
        return outcome.feasible

    def _step_up(self, cover: StageCover, reach: Reach, most: int) -> LatticeTables | None:
        """Steps up from the lower bound, where few downsets are useful, until there is a plan.

        If listing takes too many steps, a nearer threshold is tried first.
        """
        step, steps = _FIRST_STEP, _FEW_STEPS
        while not self.bracket.is_done(self._gap):
            most_s = self.bracket.ceiling if self.bracket.upper is None else self.bracket.upper
            # If no layer takes any time, there is no bound to step up from.
            threshold_s = min(self.bracket.lower * (1.0 + step), most_s) if self.bracket.lower > 0.0 else most_s
            found = reach.downsets(self.dual_prices(cover, threshold_s), Room(most, steps), check=self.ledger.check)
            if found is None:
                step /= 4.0
                if step < _LEAST_STEP:
                    if reach.outgrown:
                        self.outgrown = True
                        return None
                    step, steps = _FIRST_STEP, 8 * steps
                    if steps > _MOST_STEPS:
                        return None
                continue
            if self._is_whole(found):
                problem, outcome = self._evaluate(found, threshold_s)
                if outcome.feasible:
                    self.take(problem, outcome.stages, origin="evaluation")
                    return problem.workload
            self.bracket.record_bound(threshold_s)
            if reach.steps < _FEW_STEPS // 4:
                step *= 2.0
        return None

    def _as_good(self, cover: StageCover, reach: Reach, most: int, steps: int) -> LatticeTables | None:
        """Returns the tables of all downsets useful for plans as good as the best, or None if they need more than
        ``steps``. If a bound alone proves that plan, they are needed to pick the preferred one.
        """
        upper_s = self.bracket.upper
        if upper_s is None:
            return None
        found = reach.downsets(self.dual_prices(cover, upper_s), Room(most, steps), check=self.ledger.check)
        return None if found is None else self._tables(found)

    def dual_prices(self, cover: StageCover, threshold_s: float) -> DualPrices:
        """Returns dual prices for a threshold. They do not start from earlier ones: these are no better and take
        longer."""
        enough = self._devices * (1.0 + PROOF)
        return cover.dual_prices(threshold_s, until=enough, rounds=_ROUNDS, check=self.ledger.check)

    def _is_whole(self, found: BitArray) -> bool:
        return int(np.bitwise_count(found).sum(axis=1).max()) == self.graph.size

    def _tables(self, found: BitArray) -> LatticeTables:
        return LatticeTables.build(listed_lattice(self.graph, found), self.options)

    def _evaluate(self, found: BitArray, threshold_s: float) -> tuple[Problem, Outcome]:
        problem = self.problem_of(found)
        return problem, evaluate_threshold(problem, self.backend, threshold_s, on_progress=self.ledger.check)

    def problem_of(self, found: BitArray) -> Problem:
        """Returns the problem on these downsets, which include the empty set and V."""
        return build_problem(self._tables(found), self.planning.instance, self.degrees)

    def _on_chain(self, order: Sequence[int]) -> Problem:
        return chain_problem(self.planning.instance, self.graph, self.options, order, self.degrees)

    def take(self, problem: Problem, stages: Sequence[TracedStage], origin: str) -> float:
        """Returns the plan's value, in s, and keeps the plan if it is the best so far."""
        found = self.planning.valued(problem, stages)
        if found.value_s < self.ledger.upper_s:
            self.bracket.record_plan(found.value_s)
            self.ledger.offer(found, origin)
        return found.value_s
