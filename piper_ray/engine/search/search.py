"""The search for the least threshold with a plan, with a lower bound that is proved at every moment."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from piper_ray.cost.bounds import ceiling_s
from piper_ray.engine.evaluation.completion import Completion
from piper_ray.engine.evaluation.dual_prices import DualPrices
from piper_ray.engine.evaluation.evaluations import Evaluations
from piper_ray.engine.evaluation.outcome import Outcome, TracedStage
from piper_ray.engine.evaluation.state_tables import StateTables, has_one_degree
from piper_ray.engine.evaluation.threshold import OnFinished, evaluate_threshold, keep_nothing
from piper_ray.engine.kernels.cover import BoolArray
from piper_ray.engine.kernels.scan import BUCKETS_TESTED, CANDIDATES_TESTED, STAGES_COSTED
from piper_ray.engine.kernels.types import BitArray
from piper_ray.engine.ledger import Ledger, keeping_known
from piper_ray.engine.search import neighbourhood
from piper_ray.engine.search.bracket import Bracket, Phase
from piper_ray.engine.search.planning import Planning, ValuedPlan
from piper_ray.engine.search.pricing import Pricing
from piper_ray.engine.tables.problem import Problem, chain_problem
from piper_ray.model.events import EvaluationAdvanced, EvaluationFinished
from piper_ray.model.solution import EvaluationStats
from piper_ray.model.stop import StoppedBy

_COARSE_GAP = 1e-4

_FEW_BORDERS, _MORE_BORDERS = (0.05, 0.05), (0.1, 0.0)
"""For plans whose stages end at few downsets: the share of all that are near the best plan's borders, and of all that
are drawn at random.
"""

_WORTHWHILE, _NEARLY = 2e-3, 1e-3
"""A plan so much faster, relative, is followed by another search near its own borders; and the gap that such a search
leaves.
"""

_STRIDE = 8e-3
"""From a plan that many downsets have states for: once limits from both sides are known, evaluations take the less the
further below it they are."""

_MANY_LIVE = 30
"""Downsets with states from which on an evaluation takes longer than to find out which of them can be completed."""

_FEW = 1000
"""Downsets of which no evaluation is dear, whatever share of them has states, nor by telling stages apart."""

_SPENT = 0.1
"""Infeasible evaluations with states in so large a share of all downsets, in sum, took about as long as one more in
which most have states."""

_LOWER = 0.99
"""A plan so much faster than the last one that was bounded from both sides leaves much less."""

_LEFT = 0.99
"""Where limits from both sides leave so large a share of all downsets states, those of a threshold hardly below leave
as many."""


@dataclass
class Search:
    """The rule of a search on one problem that keeps ``ledger``, and begins with its plan.

    lower_s: what no plan is faster than, by another search. is_likely: whether the ledger's plan is likely to be the
    best.
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
        self.found: list[ValuedPlan] = []  # in turn, each better than those before
        self._completion: Completion | None = None
        self._preferred: tuple[float, Outcome] | None = None  # of all plans as fast: fewest devices, then stages
        self._borders: BitArray | None = None  # of the incumbent: downsets where its stages end
        self._live_in_vain = 0  # downsets with states in infeasible evaluations since then
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

        A TMPC choice that is too hard to make exactly ends the search too, and so do figures too far apart for sums.
        Raises ChoiceTooHard and Inexact where no plan is known.
        """
        with keeping_known(self.ledger, self.bracket.forget):
            if self._has_chains:
                self._improve_on_chain(range(self.problem.workload.lattice.graph.size))
            self._begin_coarsely()
            while not self.bracket.is_done(self._gap):
                yield
                self._try(self.bracket.propose())
            if self.bracket.closed:
                self._prefer_small()

    @property
    def left_open(self) -> StoppedBy:
        """Why no effort is left, where the bound is not met."""
        return StoppedBy.GAP

    @property
    def _gap(self) -> float:
        return self.ledger.limits.gap

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
        # Where to tell stages apart costs little, the plan that turns out to be the best is at once the preferred one.
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
            # What is first among the plans at a threshold is first among those that are as fast as it.
            self._preferred = value_s, outcome
        self.bracket.record_feasible(threshold_s, value_s, outcome.devices / self.planning.instance.devices)
        if self._has_chains:
            self._improve_on_chain(neighbourhood.order_through(self.problem, outcome.stages))

    def _settle_incumbent(self) -> None:
        """Evaluates the best plan's own value: its states tell which downsets can be completed, and evaluations below
        it may end the search.

        With one degree a downset has one state, and to tell stages apart costs nothing: so better plans come first, as
        this is the last evaluation at its value.
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
        """Whether infeasible evaluations have been dear, and no plan near the best one was evaluated yet: then the
        states at that one's own value tell which downsets can be completed, which makes all that follows cheap.
        Dual prices make that dear evaluation needless.
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
        """Better plans whose stages end at few downsets: near where the best one's do, from one to the next, and
        elsewhere. shares: of all downsets, see ``_FEW_BORDERS``.
        """
        lattice, draws = self.problem.workload.lattice, np.random.default_rng(0)
        for near_share, drawn_share in shares:
            before_s = np.inf
            while self._borders is not None and self._upper_s < before_s * (1.0 - _WORTHWHILE):
                before_s = self._upper_s
                drawn = draws.random(lattice.size) < drawn_share
                self._search_within(neighbourhood.around(lattice, self._borders, near_share) | drawn)

    def _search_within(self, allowed: BoolArray) -> None:
        """For the best plan whose stages end at these, where the best one's own do. Its value comes first: the states
        there give limits from both sides for these, and what follows takes little.
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
        """Keeps what a feasible evaluation's states tell of later ones."""

        def learn(states: StateTables) -> None:
            live = states.fronts.states
            if live[-1] > 0 and self._tells_more(threshold_s, int(np.count_nonzero(live))):
                found = Completion.of(threshold_s, states, self.problem.scratch, self.ledger.check)
                self._completion = found.within(self._completion)
                self._live_in_vain = 0

        return learn

    def _tells_more(self, threshold_s: float, live_downsets: int) -> bool:
        """Whether a feasible evaluation's states are worth a pass for limits from both sides."""
        known = self._completion
        if known is not None and threshold_s > _LOWER * known.threshold_s:
            return live_downsets < _LEFT * self.problem.workload.lattice.size
        return live_downsets >= _MANY_LIVE

    def _prefer_small(self) -> None:
        """Of the plans of least time the one of fewest devices, then stages, then first in the tables' order.

        Its time may differ from the best one found by as much as a threshold's tolerance.
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
        """The best plan whose stages are runs of ``order``."""
        workload, degrees = self.problem.workload, self.problem.cluster.divisors.tolist()
        graph, options = workload.lattice.graph, workload.options
        chain = chain_problem(self.planning.instance, graph, options, order, degrees)
        chain = chain.with_cluster(self.problem.cluster)  # whose limit on the sum of d may be another
        bracket = Bracket(self.bracket.lower, self.bracket.ceiling, self.bracket.upper)
        take = partial(self._take, origin="chain")
        neighbourhood.search_chain(chain, self.evaluations.backend, bracket, take, self._gap, self.ledger.check)
        if bracket.upper is None:
            self.bracket.doubt()

    def _begin_coarsely(self) -> None:
        """On a long chain: a plan with few borders to choose from, which cost little, then with those near its own."""
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
        """The best plan whose stages end at these, if it is better than all before."""
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
        """Of plans whose stages end at these."""
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
        """Values the plan, in s, and keeps it if it is the best so far."""
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
        """Its figures become the last of ``stats``. dual prices: at this threshold. is_last: none comes after it that
        its states could help.
        """
        completion = known = self._completion
        if dual_prices is not None:
            completion = Completion.by_dual_prices(dual_prices, self.problem).within(completion)
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
        """Of the downsets of an evaluation. Raises StopSearch as ``Ledger.check``."""
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
        """Tells of the last evaluation, once its answer is on record."""
        last = self.stats[-1]
        bounds = self.ledger.bounds()
        self.ledger.listener(
            EvaluationFinished(
                len(self.stats), last.threshold_s, last.feasible, last.seconds, last.live_downsets, bounds
            )
        )
