"""Solves under 2bw for plans whose stages lie in order on nodes (``Plan.places``), so that borders within a group of
devices have its faster link.

Every such plan is also one without places, at borders charged at the outermost link. The search for these comes first;
this one then looks for faster plans alone. A threshold is evaluated as on one kind (ARCHITECTURE.md), but a tail has a
place and promises the rate at its front border (``kernels/placed.py``). Variants are repeated for each pair of rates at
their borders, as under a flush (``flush/mixes.py``).
"""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from piper_ray.cost.bounds import ceiling_s
from piper_ray.cost.variants import by_links, usable_variants
from piper_ray.engine.evaluation.dual_prices import kept_s
from piper_ray.engine.evaluation.front_tails import list_tails, trace_tail
from piper_ray.engine.evaluation.outcome import TracedStage
from piper_ray.engine.evaluation.threshold import limits_by_work
from piper_ray.engine.flush.mixes import BorderRates, Placed, edge_rates
from piper_ray.engine.kernels.placed import PlaceArrays, PlaceLimits, find_placed_tails
from piper_ray.engine.kernels.tails import FrontTails, OpenTails
from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.lattice.downsets import Lattice, build_lattice
from piper_ray.engine.lattice.layer_graph import build_graph
from piper_ray.engine.ledger import Ledger, keeping_known
from piper_ray.engine.preparation import tell_of_lattice
from piper_ray.engine.request import SolveRequest
from piper_ray.engine.search.bracket import Bracket
from piper_ray.engine.search.planning import Planning, ValuedPlan
from piper_ray.engine.subproblems import Solver, SubProblem, best_of, least_s
from piper_ray.engine.tables.problem import LatticeTables, Problem, build_problem
from piper_ray.engine.tables.tmpc_options import build_options
from piper_ray.model.constraints import Restrictions
from piper_ray.model.errors import LimitError
from piper_ray.model.events import EvaluationFinished
from piper_ray.model.instance import Instance
from piper_ray.model.plan_rules import with_fastest_borders
from piper_ray.model.schedule import PAPERS_SCHEDULE
from piper_ray.model.solution import EvaluationStats, Solution, Status
from piper_ray.model.stop import StoppedBy

_MOST_DOWNSETS = 20_000
"""On more downsets only a bound is found, since an evaluation looks at all pairs of them."""


def with_places(request: SolveRequest, solve: Solver) -> Solution:
    """Returns the best plan, with places or without. solve: finds the best plan without places."""
    parts = [SubProblem(0.0, request, "")]
    if request.instance.cluster.has_faster_groups:
        parts.append(SubProblem(least_s(request.instance), request, "plans with ranks in order on nodes"))

    def solve_part(one: SolveRequest) -> Solution:
        first = parts[0].found
        return solve(one) if first is None else _solve_placed(one, first, solve)

    return best_of(request, parts, solve_part, are_nested=True)


def _solve_placed(request: SolveRequest, first: Solution, solve: Solver) -> Solution:
    """Returns the best plan with places if it is faster than ``first``, else that plan; with a bound for all plans with
    places. If downsets are too many, the bound is that of plans with all borders at the fastest rate."""
    instance, ledger, stats, began_s = request.instance, request.ledger(), list[EvaluationStats](), time.perf_counter()
    try:
        lattice = build_lattice(build_graph(instance, without_contraction()), _MOST_DOWNSETS)
    except LimitError:
        request.note(
            f"borders within nodes: more than {_MOST_DOWNSETS:,} downsets are too many to look at plans with ranks "
            "in order; the bound holds for these too, the plan has all borders at the link between nodes"
        )
        relaxed = solve(replace(request, instance=with_fastest_borders(instance)))
        ended = relaxed.stopped_by if relaxed.status is Status.UNKNOWN else StoppedBy.TOO_MANY_DOWNSETS
        return replace(relaxed, status=Status.UNKNOWN, plan=None, time_per_sample_s=None, stopped_by=ended)
    if first.plan is not None and first.time_per_sample_s is not None:
        ledger.begin_with(ValuedPlan(first.plan, first.time_per_sample_s))
    lattice_s = tell_of_lattice(lattice, began_s, request.listener)
    began_s = time.perf_counter()
    workload = PlacedWorkload.of(instance, request.restrictions, lattice, request.data_parallel_limit)
    made_s, began_s = time.perf_counter() - began_s, time.perf_counter()

    def answer() -> Solution:
        search_s = time.perf_counter() - began_s
        own = replace(
            first.stats, lattice_s=lattice_s, stage_costs_s=made_s, search_s=search_s, evaluations=tuple(stats)
        )
        return ledger.answer(lambda found: found.plan, lambda _: PAPERS_SCHEDULE, own)

    request.stop.offer(answer)
    ledger.run(PlacedSearch(workload, ledger, stats))
    return answer()


@dataclass(frozen=True)
class PlacedWorkload:
    """A workload on the nodes of a cluster. problem: has each variant for each pair of rates at its borders."""

    instance: Instance
    problem: Problem
    places: PlaceArrays

    @classmethod
    def of(
        cls, instance: Instance, restrictions: Restrictions, lattice: Lattice, data_parallel_limit: int | None
    ) -> PlacedWorkload:
        cluster, graph = instance.cluster, lattice.graph
        of_levels = [cluster.level_bytes_per_s(level) for level in range(len(cluster.links))]
        rates = sorted(set(of_levels), reverse=True)
        groups = [link.devices or instance.devices for link in cluster.links[:-1]]
        sizes = [groups[len(of_levels) - 1 - of_levels[::-1].index(rate)] for rate in rates[:-1]]
        placed = [
            Placed(variant, 0, behind, ahead)
            for variant in by_links(instance, restrictions, usable_variants(instance, restrictions))
            for behind, ahead in product(range(len(rates)), repeat=2)
            if variant.degree < [*sizes, variant.degree + 1][min(behind, ahead)]
        ]
        at_rates = edge_rates(graph, placed, cluster, BorderRates((tuple(rates),)))
        slower = cluster.bandwidth_bytes_per_s / np.concatenate((at_rates.come_in, at_rates.go_out), axis=1)
        options = build_options(instance, graph, [x.variant for x in placed], slower)
        degrees = restrictions.data_parallel_degrees(instance)
        problem = build_problem(LatticeTables.build(lattice, options), instance, degrees)
        limit = min(instance.data_parallel_limit, data_parallel_limit or instance.data_parallel_limit)
        problem = problem.with_cluster(problem.cluster._replace(data_parallel_limit=limit))
        of_degree = {t: [cluster.place_blocks(d, t) for d in degrees] for t in {x.variant.degree for x in placed}}
        blocks = [of_degree[x.variant.degree] for x in placed]
        behind, ahead = (np.array([getattr(x, name) for x in placed], np.int64) for name in ("behind", "ahead"))
        places = PlaceArrays(
            np.array(groups, np.int64), np.array(sizes, np.int64), np.array(blocks, np.int64), behind, ahead
        )
        return cls(instance, problem, places)

    def plan(
        self, threshold_s: float, ledger: Ledger[ValuedPlan]
    ) -> tuple[list[tuple[TracedStage, int]] | None, int, int]:
        """Returns the stages of a plan that ends furthest back among those that keep the threshold, front to back, each
        with its place (None: there is no such plan); the numbers of downsets with tails, and of tails. Raises
        ChoiceTooHard, and what ``Ledger.check`` raises."""
        problem, places = self.problem, self.places
        sums, cluster, keep_s = problem.workload.sums, problem.cluster, kept_s(threshold_s)
        limits = PlaceLimits(
            keep_s,
            *(
                limits_by_work(available, work_s, float(work_s[-1]), keep_s)
                for available, work_s in (
                    (cluster.devices, sums.device_work_s),
                    (cluster.data_parallel_limit, sums.replica_work_s),
                )
            ),
        )
        outermost = places.size.size
        start = np.zeros((problem.lattice.bits.shape[0], outermost + 2), np.int64)
        start[0, -1] = 1

        def find(i: int, tails: FrontTails, found: OpenTails) -> int:
            return find_placed_tails(i, problem.tables, places, limits, tails, found, problem.scratch)

        tails, used, live = list_tails(start, (outermost + 1, self.instance.devices + 1), find, ledger.check)
        first = int(start[-1, outermost])
        if first == used:
            return None, live, used
        traced = trace_tail(tails, first + int(np.argmin(tails.cell[first:used])), keep_s)
        degree = problem.tables.options.degree
        return [(x, end - x.data_parallel_degree * int(degree[x.variant])) for x, end in traced], live, used


@dataclass
class PlacedSearch:
    """The rule of a search for plans that are faster than the ledger's. stats: its evaluations are added."""

    workload: PlacedWorkload
    ledger: Ledger[ValuedPlan]
    stats: list[EvaluationStats]
    left_open: StoppedBy | None = StoppedBy.GAP
    bracket: Bracket = field(init=False)

    def __post_init__(self) -> None:
        problem, best = self.workload.problem, self.ledger.best
        self.bracket = Bracket(
            problem.lower_bound_s(), ceiling_s(self.workload.instance), None if best is None else best.value_s
        )
        if best is not None:
            self.bracket.descend()
        self.planning = Planning(self.workload.instance, without_contraction())
        self.ledger.cases = {0: self.bracket}

    def efforts(self) -> Generator[None, None, None]:
        """Closes the bracket, or stops at the gap."""
        with keeping_known(self.ledger, self.bracket.forget):
            while not self.bracket.is_done(self.ledger.limits.gap):
                yield
                self._evaluate(self.bracket.propose())

    def _evaluate(self, threshold_s: float) -> None:
        began_s = time.perf_counter()
        stages, live, used = self.workload.plan(threshold_s, self.ledger)
        seconds = time.perf_counter() - began_s
        self.stats.append(EvaluationStats(threshold_s, stages is not None, seconds, live, used, 0, 0, 0))
        if stages is None:
            self.bracket.record_infeasible(threshold_s)
        else:
            plan = self.planning.plan(self.workload.problem, [stage for stage, _ in stages])
            found = ValuedPlan.of(self.workload.instance, replace(plan, places=tuple(at for _, at in stages)))
            self.ledger.offer(found, "evaluation")
            self.bracket.record_feasible(threshold_s, found.value_s)
        bounds, index = self.ledger.bounds(), len(self.stats)
        self.ledger.listener(EvaluationFinished(index, threshold_s, stages is not None, seconds, live, bounds))
