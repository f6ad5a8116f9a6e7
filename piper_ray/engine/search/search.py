"""Searches for the least threshold that has a plan. It has a proved lower bound at every moment."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from piper_ray.cost.bounds import ceiling_s
from piper_ray.engine.evaluation.cell_cover import CellCover
from piper_ray.engine.evaluation.completion import Completion
from piper_ray.engine.evaluation.dual_prices import DualPrices
from piper_ray.engine.evaluation.evaluations import Evaluations
from piper_ray.engine.evaluation.outcome import Outcome, TracedStage
from piper_ray.engine.evaluation.state_tables import StateTables, has_one_degree
from piper_ray.engine.evaluation.threshold import OnFinished, evaluate_threshold, keep_nothing
from piper_ray.engine.kernels.scan import BUCKETS_TESTED, CANDIDATES_TESTED, STAGES_COSTED
from piper_ray.engine.kernels.types import BitArray, BoolArray
from piper_ray.engine.ledger import Ledger, keeping_known
from piper_ray.engine.search import neighbourhood
from piper_ray.engine.search.bracket import Bracket, Phase
from piper_ray.engine.search.cells import MOST_STEPS, bound_by_cells
from piper_ray.engine.search.planning import Planning, ValuedPlan
from piper_ray.engine.search.pricing import Pricing
from piper_ray.engine.tables.problem import Problem, chain_problem
from piper_ray.model.events import EvaluationAdvanced, EvaluationFinished
from piper_ray.model.solution import EvaluationStats
from piper_ray.model.stop import StoppedBy

_COARSE_GAP = 1e-4

_FEW_BORDERS, _MORE_BORDERS = (0.05, 0.05), (0.1, 0.0)
"""For plans whose stages end at few downsets: the share of all downsets that lie near the best plan's borders, and the
share drawn at random.
"""

_WORTHWHILE, _NEARLY = 2e-3, 1e-3
"""Relative. If a search near the best plan's borders finds a plan faster by the first, another one follows near the new
borders. The second is the gap at which such a search ends.
"""

_STRIDE = 8e-3
"""Relative step below a plan. Once two-sided bounds are known, an evaluation takes less time the further below the
plan's value its threshold is."""

_MANY_LIVE = 30
"""From this number of downsets with states on, an evaluation takes longer than finding out which can be completed."""

_FEW = 1000
"""With at most this many downsets no evaluation is expensive, not even one that distinguishes numbers of stages."""

_DEAR_S, _STEPS_A_S = 2.0, 1e8
"""Bounds over cells come first if an evaluation of all downsets may take so many seconds. They may take so many steps
for each of these, a fifth of that time."""

_SPENT = 0.1
"""If infeasible evaluations had states in this share of all downsets, in sum, they took about as long as one evaluation
in which most downsets have states."""

_LOWER = 0.99
"""Two-sided bounds are computed again if the plan's value has fallen to this share: they then leave much less."""

_LEFT = 0.99
"""If two-sided bounds leave this share of all downsets with states, bounds for a slightly lower threshold leave about
as many."""


@dataclass
class Search:
    """The rule of a search on one problem. It keeps ``ledger``, and begins with the ledger's plan.

    lower_s: a bound proved by another search. is_likely: whether the ledger's plan is likely to be the best.
    """

    planning: Planning
    problem: Problem
    evaluations: Evaluations
    ledger: Ledger[ValuedPlan]
    lower_s: float = 0.0
    is_likely: bool = False

    def __post_init__(self) -> None:
        self.bracket = Bracket(
            lower=self.problem.lower_bound_s(), ceiling=ceiling_s(self.planning.instance), work=self.problem.work_s()
        )
        self.stats: list[EvaluationStats] = []
        self.found: list[ValuedPlan] = []  # in order, each better than those before
        self._completion: Completion | None = None
        self._preferred: tuple[float, Outcome] | None = None  # among equally fast plans: fewest devices, then stages
        self._borders: BitArray | None = None  # downsets where the best plan's stages end
        self._live_in_vain = 0  # sum of downsets with states in infeasible evaluations since the last two-sided bounds
        self._cells: CellCover | None = None
        self._pricing = Pricing(self.problem, self.ledger.check)
        known = self.ledger.best
        if self.is_likely:
            self.bracket.lower = max(self.bracket.lower, self.lower_s)
        else:
            self.bracket.record_bound(self.lower_s)
        if known is not None:
            self.bracket.record_plan(known.value_s)
            if self.is_likely:
                self.bracket.phase = Phase.CHALLENGING
        self.ledger.cases, self.ledger.may_prefer = {0: self.bracket}, True

    def efforts(self) -> Generator[None, None, None]:
        """Closes the bracket, or stops at the gap; then picks the preferred plan.

        If a TMPC choice is too hard to make exactly, or figures are too far apart to be summed, the search ends with
        the best plan known. Raises ChoiceTooHard or Inexact if none is known.
        """
        with keeping_known(self.ledger, self.bracket.forget):
            if self._has_chains:
                self._improve_on_chain(range(self.problem.workload.lattice.graph.size))
            self._begin_coarsely()
            self._bound_by_cells()
            while not self.bracket.is_done(self._gap):
                yield
                self._try(self.bracket.propose())
            if self.bracket.closed:
                self._prefer_small()

    @property
    def left_open(self) -> StoppedBy:
        """Why the search ended with a bound below the best plan."""
        return StoppedBy.GAP

    @property
    def _gap(self) -> float:
        return self.ledger.limits.gap

    def _bound_by_cells(self) -> None:
        """Raises the bound by whole stages over cells, if an evaluation may take long."""
        most_steps, cover = min(MOST_STEPS, _STEPS_A_S * self._pricing.whole_s), None
        if self._pricing.whole_s > _DEAR_S and self.bracket.upper is not None and not self.bracket.is_done(self._gap):
            cover = self._pricing.cover()
        if cover is not None:
            devices, check = self.problem.cluster.devices, self.ledger.check
            for known in bound_by_cells(cover, devices, self.bracket, self._gap, most_steps, check):
                self._cells = known

    def _try(self, threshold_s: float) -> None:
        bound_s = self._pricing.lower_bound_s(threshold_s)
        if bound_s is not None:
            self.bracket.record_bound(bound_s)
            return
        dual_prices = self._pricing.dual_prices(threshold_s)
        if self._pricing.rules_out(dual_prices):
            self.bracket.record_infeasible(threshold_s)
            return
        if self._is_dear():
            self._live_in_vain = 0
            self._settle_incumbent()
            return
        # On few downsets it costs little to distinguish numbers of stages: then the best plan is also the preferred
        # one.
        fewest_stages = self._is_small and self.bracket.upper is not None
        outcome = self._evaluate(threshold_s, fewest_stages=fewest_stages, dual_prices=dual_prices)
        if not outcome.feasible:
            self.bracket.record_infeasible(threshold_s, outcome.reach)
            self._report()
            if outcome.live_downsets >= _MANY_LIVE:
                self._live_in_vain += outcome.live_downsets
            return
        self._report()
        value_s = self._take(self.problem, outcome.stages, "evaluation")
        if fewest_stages and self.planning.chose_best(self.problem, outcome.stages):
            # The first among the plans at a threshold is also the first among the plans as fast as it.
            self._preferred = value_s, outcome
        self.bracket.record_feasible(threshold_s, value_s, outcome.devices / self.planning.instance.devices)
        if self._has_chains:
            self._improve_on_chain(neighbourhood.order_through(self.problem, outcome.stages))

    def _settle_incumbent(self) -> None:
        """Evaluates the best plan's own value: its states show which downsets can be completed, and cheap evaluations
        below it may then end the search.

        If there is one degree, each downset has one state, and distinguishing numbers of stages costs nothing. Better
        plans are sought before, because this is the last evaluation at its value.
        """
        one_degree = has_one_degree(self.problem.tables)
        self._improve_near_borders(_FEW_BORDERS, _MORE_BORDERS)
        threshold_s = self.bracket.upper
        if threshold_s is None or self.bracket.is_done(self._gap):
            return
        outcome = self._evaluate(threshold_s, fewest_stages=one_degree)
        if one_degree:
            self._preferred = threshold_s, outcome
        self._report()
        self._take(self.problem, outcome.stages, "evaluation")
        self.bracket.descend(0.0 if one_degree else _STRIDE)

    @property
    def _is_small(self) -> bool:
        return self.problem.workload.lattice.size <= _FEW

    def _is_dear(self) -> bool:
        """Whether infeasible evaluations have been expensive and none near the best plan's value gave two-sided bounds.

        An evaluation at that value then shows which downsets can be completed, which makes all later evaluations cheap.
        With dual prices it is not needed.
        """
        upper, known = self.bracket.upper, self._completion
        return (
            upper is not None
            and not self._is_small
            and self._live_in_vain >= _SPENT * self.problem.workload.lattice.size
            and (known is None or upper < _LOWER * known.threshold_s)
            and not self._pricing.wanted
        )

    def _improve_near_borders(self, *shares: tuple[float, float]) -> None:
        """Looks for better plans whose stages end at few downsets: near the best plan's borders, and at random ones.
        Repeats it from each better plan. shares: of all downsets, see ``_FEW_BORDERS``.
        """
        lattice, draws = self.problem.workload.lattice, np.random.default_rng(0)
        for near_share, drawn_share in shares:
            before_s = np.inf
            while self._borders is not None and self._upper_s < before_s * (1.0 - _WORTHWHILE):
                before_s = self._upper_s
                drawn = draws.random(lattice.size) < drawn_share
                self._search_within(neighbourhood.around(lattice, self._borders, near_share) | drawn)

    def _search_within(self, allowed: BoolArray) -> None:
        """Finds the best plan whose stages end at ``allowed`` downsets, which include the best plan's borders.

        The best plan's value is evaluated first: its states give two-sided bounds, and later evaluations take little
        time.
        """
        borders, upper_s = neighbourhood.within(allowed, self.problem.cluster.devices), self._upper_s
        bracket = Bracket(self.bracket.lower, upper_s, phase=Phase.DOUBTING)
        while not bracket.is_done(max(self._gap, _NEARLY)):
            threshold_s, reached = bracket.propose(), list[StateTables]()
            outcome = self._evaluate_within(borders, threshold_s, reached.append)
            if not outcome.feasible:
                bracket.record_infeasible(threshold_s)
                continue
            bracket.record_feasible(threshold_s, self._take(self.problem, outcome.stages, "near"))
            if threshold_s == upper_s:
                bracket.descend(_STRIDE)
            found = Completion.of(threshold_s, reached[-1], self.problem.scratch, self.ledger.check)
            borders = Completion(np.inf, found.device_limit)

    @property
    def _upper_s(self) -> float:
        return np.inf if self.bracket.upper is None else self.bracket.upper

    def _learn(self, threshold_s: float) -> OnFinished:
        """Returns a function that computes two-sided bounds from a feasible evaluation's states."""

        def learn(states: StateTables) -> None:
            live = states.fronts.states
            if live[-1] > 0 and self._tells_more(threshold_s, int(np.count_nonzero(live))):
                found = Completion.of(threshold_s, states, self.problem.scratch, self.ledger.check)
                self._completion = found.within(self._completion)
                self._live_in_vain = 0

        return learn

    def _tells_more(self, threshold_s: float, live_downsets: int) -> bool:
        """Whether a feasible evaluation's states are worth a pass for two-sided bounds."""
        known = self._completion
        if known is not None and threshold_s > _LOWER * known.threshold_s:
            return live_downsets < _LEFT * self.problem.workload.lattice.size
        return live_downsets >= _MANY_LIVE

    def _prefer_small(self) -> None:
        """Picks, among the plans of least time, the one with fewest devices, then stages, then the first in the tables'
        order.

        Its time may differ from the best one's by the tolerance of a threshold.
        """
        upper_s = self.bracket.upper
        assert upper_s is not None
        if self._preferred is not None and self._preferred[0] == upper_s:
            self._settle(self._preferred[1])
            return
        dual_prices = self._pricing.dual_prices(upper_s)
        self._settle(self._evaluate(upper_s, fewest_stages=True, dual_prices=dual_prices, is_last=True))
        self._report()

    def _settle(self, outcome: Outcome) -> None:
        found = self.planning.valued(self.problem, outcome.stages, self.ledger.best)
        self.bracket.settle(found.value_s)
        self.ledger.settle(found)

    @property
    def _has_chains(self) -> bool:
        return neighbourhood.is_worth_a_chain(self.problem.workload.lattice)

    def _improve_on_chain(self, order: Sequence[int]) -> None:
        """Finds the best plan whose stages are runs of ``order``."""
        workload, degrees = self.problem.workload, self.problem.cluster.divisors.tolist()
        graph, options = workload.lattice.graph, workload.options
        chain = chain_problem(self.planning.instance, graph, options, order, degrees)
        chain = chain.with_cluster(self.problem.cluster)  # it may have another limit on the sum of d
        bracket = Bracket(self.bracket.lower, self.bracket.ceiling, self.bracket.upper)
        take = partial(self._take, origin="chain")
        neighbourhood.search_chain(chain, self.evaluations.backend, bracket, take, self._gap, self.ledger.check)
        if bracket.upper is None:
            self.bracket.doubt()

    def _begin_coarsely(self) -> None:
        """On a long chain: finds a plan with few possible borders, which is cheap, then plans with borders near its
        own."""
        lattice = self.problem.workload.lattice
        if self.ledger.best is not None or not neighbourhood.is_long_chain(lattice):
            return
        spacing, devices, stages = neighbourhood.first_spacing(lattice), self.problem.cluster.devices, None
        while spacing > 1 or (spacing and stages is not None):
            if stages is None:
                allowed = neighbourhood.cheapest_cuts(self.problem, spacing)
            else:
                allowed = neighbourhood.near(self.problem, stages, spacing)
            stages = self._on_borders(neighbourhood.within(allowed, devices)) or stages
            spacing = neighbourhood.finer(spacing)
        if stages is not None:
            self.bracket.descend()

    def _on_borders(self, borders: Completion) -> Sequence[TracedStage] | None:
        """Returns the best plan whose stages end at ``borders``, or None if no better one is found."""
        bracket = Bracket(self.bracket.lower, self.bracket.ceiling, self.bracket.upper)
        stages = None
        while not bracket.is_done(max(self._gap, _COARSE_GAP)):
            threshold_s = bracket.propose()
            outcome = self._evaluate_within(borders, threshold_s)
            if outcome.feasible:
                stages = outcome.stages
                bracket.record_feasible(threshold_s, self._take(self.problem, stages, "chain"))
            else:
                bracket.record_infeasible(threshold_s)
        return stages

    def _evaluate_within(
        self, borders: Completion, threshold_s: float, on_finished: OnFinished = keep_nothing
    ) -> Outcome:
        """Evaluates only plans whose stages end at ``borders``."""
        completion = borders
        if self._completion is not None and self._completion.serves(threshold_s):
            completion = borders.within(self._completion)
        return evaluate_threshold(
            self.problem,
            self.evaluations.backend,
            threshold_s,
            on_progress=self.ledger.check,
            on_finished=on_finished,
            completion=completion,
        )

    def _take(self, problem: Problem, stages: Sequence[TracedStage], origin: str) -> float:
        """Returns the plan's value, in s, and keeps the plan if it is the best so far."""
        found = self.planning.valued(problem, stages)
        if found.value_s < self._upper_s:
            self._borders = problem.lattice.bits[[stage.inner for stage in stages]]
            self.bracket.record_plan(found.value_s)
            self.found.append(found)
            self.ledger.offer(found, origin)
        return found.value_s

    def _evaluate(
        self,
        threshold_s: float,
        *,
        fewest_stages: bool = False,
        is_last: bool = False,
        dual_prices: DualPrices | None = None,
    ) -> Outcome:
        """Evaluates a threshold and appends the figures to ``stats``.

        dual_prices: those for this threshold. is_last: no later evaluation could use the states of this one.
        """
        completion = known = self._completion
        if dual_prices is not None:
            completion = Completion.by_dual_prices(dual_prices, self.problem).within(completion)
        if self._cells is not None and threshold_s <= self._cells.most_s:
            completion = self._cells.completion(self.problem, threshold_s).within(completion)
        began_s = time.perf_counter()
        outcome = self.evaluations.evaluate(
            self.problem,
            threshold_s,
            fewest_stages=fewest_stages,
            on_progress=partial(self._tell_of_progress, threshold_s, began_s),
            on_finished=keep_nothing if is_last else self._learn(threshold_s),
            completion=completion,
        )
        self.stats.append(
            EvaluationStats(
                threshold_s=threshold_s,
                feasible=outcome.feasible,
                seconds=time.perf_counter() - began_s,
                live_downsets=outcome.live_downsets,
                cells=outcome.cells,
                buckets_tested=int(outcome.tested[BUCKETS_TESTED]),
                candidates_tested=int(outcome.tested[CANDIDATES_TESTED]),
                stages_costed=int(outcome.tested[STAGES_COSTED]),
            )
        )
        self._pricing.record(outcome)
        if self._completion is not known:
            self._pricing.start_anew()
        return outcome

    def _tell_of_progress(self, threshold_s: float, began_s: float, done: int) -> None:
        """Reports how many downsets are evaluated. Raises StopSearch as ``Ledger.check`` does."""
        self.ledger.check()
        level_start, activity = self.problem.lattice.level_start, self.evaluations.backend.activity()
        self.ledger.listener(
            EvaluationAdvanced(
                index=len(self.stats) + 1,
                threshold_s=threshold_s,
                done=done,
                total=int(level_start[-1]),
                bounds=self.ledger.bounds(),
                seconds=time.perf_counter() - began_s,
                level=int(np.searchsorted(level_start, done, side="right")) - 1,
                levels=level_start.size - 1,
                workers=activity.workers,
                chunks_in_flight=activity.chunks_in_flight,
            )
        )

    def _report(self) -> None:
        """Reports the last evaluation, once its answer is recorded."""
        last = self.stats[-1]
        bounds = self.ledger.bounds()
        self.ledger.listener(
            EvaluationFinished(
                len(self.stats), last.threshold_s, last.feasible, last.seconds, last.live_downsets, bounds
            )
        )
