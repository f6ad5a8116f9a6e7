"""Solves under 2bw on devices of several kinds: each stage has its own d, t and kind.

A threshold is evaluated as on one kind (ARCHITECTURE.md), but a tail has a number of devices of each kind and not just
one number. Variants are placed between neighbours as under a flush (``flush/mixes.py``). Bytes are counted in common
units: those that a device holds as shares of the largest memory, those that cross a border at the fastest rate. So the
code for one kind computes the costs of stages and chooses their TMPCs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

import numpy as np

from piper_ray.cost.bounds import ceiling_s
from piper_ray.cost.products import dot
from piper_ray.cost.variants import by_links, layer_without_choice, usable_variants
from piper_ray.engine.evaluation.dual_prices import kept_s
from piper_ray.engine.evaluation.front_tails import list_tails, trace_tail
from piper_ray.engine.evaluation.outcome import TracedStage
from piper_ray.engine.evaluation.threshold import limits_by_work
from piper_ray.engine.flush.kinds import KindSearch
from piper_ray.engine.flush.mixes import (
    BorderRates,
    EdgeRates,
    Placed,
    edge_rates,
    placed_variants,
    possible_kinds,
    tensor_rates,
)
from piper_ray.engine.kernels.knapsack import TOO_HARD as CHOICE_TOO_HARD
from piper_ray.engine.kernels.knapsack import least_cost
from piper_ray.engine.kernels.mixed import MixArrays, MixedLimits, find_tails
from piper_ray.engine.kernels.tails import FrontTails, OpenTails
from piper_ray.engine.kernels.types import FloatArray
from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.lattice.downsets import Lattice
from piper_ray.engine.lattice.layer_graph import build_graph, count_downsets
from piper_ray.engine.ledger import Ledger, keeping_known, no_plan, stats_of_nothing
from piper_ray.engine.preparation import lattice_within
from piper_ray.engine.request import SolveRequest
from piper_ray.engine.search.bracket import Bracket
from piper_ray.engine.search.planning import Planning, ValuedPlan, items_of
from piper_ray.engine.tables.problem import LatticeTables, Problem, build_problem
from piper_ray.engine.tables.tmpc_options import build_options
from piper_ray.model.cluster import Cluster, Link
from piper_ray.model.constraints import Restrictions
from piper_ray.model.errors import LimitError
from piper_ray.model.events import EvaluationFinished
from piper_ray.model.instance import Instance, Tmpc, with_rows
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import PAPERS_SCHEDULE
from piper_ray.model.solution import EvaluationStats, Infeasibility, Solution
from piper_ray.model.stop import StoppedBy

_MOST_CELLS = 20_000_000
"""Largest number of fronts times mixes of devices: some 650 MB."""

_ROUNDING = 1e-9
_TINY = 1e-30


@dataclass(frozen=True)
class MixedWorkload:
    """A workload on several kinds. problem: has the variants ``placed``, at ``rates``, of which none is slower than in
    a plan."""

    instance: Instance
    lattice: Lattice
    placed: tuple[Placed, ...]
    rates: EdgeRates
    problem: Problem

    @classmethod
    def of(cls, instance: Instance, restrictions: Restrictions, lattice: Lattice) -> MixedWorkload:
        common, graph, cluster = _with_bytes_as_shares(instance), lattice.graph, instance.cluster
        variants = by_links(common, restrictions, usable_variants(common, restrictions))
        borders = BorderRates.outermost(cluster)
        placed = tuple(placed_variants(variants, cluster, borders))
        rates = edge_rates(graph, placed, cluster, borders)
        slower = cluster.bandwidth_bytes_per_s / np.concatenate((rates.come_in, rates.go_out), axis=1)
        options = build_options(common, graph, [x.variant for x in placed], slower)
        of_tensors = cluster.bandwidth_bytes_per_s / tensor_rates(graph, placed, cluster)
        options = replace(options, tensor_bytes=options.tensor_bytes * of_tensors)
        tables = LatticeTables.build(lattice, options)
        degrees = restrictions.data_parallel_degrees(instance)
        return cls(instance, lattice, placed, rates, build_problem(tables, common, degrees))

    @cached_property
    def mixes(self) -> MixArrays:
        """The mixes of devices. Raises LimitError if there are too many."""
        devices = np.array([kind.cluster.devices for kind in self.instance.cluster.kinds], np.int64)
        cells = float(np.prod(devices + 1.0))
        if cells * devices.size**2 > _MOST_CELLS:
            raise LimitError(
                f"under 2bw {cells:,.0f} mixes of {devices.size} kinds of devices are too many to keep apart: plan for "
                "fewer devices, or under 1f1b"
            )
        counts = np.stack(np.meshgrid(*(np.arange(k + 1) for k in devices), indexing="ij"), axis=-1)
        counts = counts.reshape(-1, devices.size)
        stride = np.append(np.cumprod(devices[:0:-1] + 1)[::-1], 1).astype(np.int64)
        kind, behind, ahead = (
            np.array([getattr(x, name) for x in self.placed], np.int64) for name in ("kind", "behind", "ahead")
        )
        return MixArrays(counts, stride, devices, dot(counts, self._prices), kind, behind, ahead)

    @cached_property
    def _kind_work_s(self) -> FloatArray:
        """float64[n, g]: the least seconds times devices of each vertex on each kind; inf: it cannot run there."""
        least, degree = self.problem.workload.options.least, self.problem.options.degree
        of_variant = np.where(least.missing > 0, np.inf, least.work_s * degree)
        kinds = range(len(self.instance.cluster.kinds))
        of_kinds = [[r for r, x in enumerate(self.placed) if x.kind == kind] for kind in kinds]
        return np.stack([of_variant[:, rs].min(axis=1, initial=np.inf) for rs in of_kinds], axis=1)

    @cached_property
    def _prices(self) -> FloatArray:
        """float64[g]: the price of a device; all together cost 1. The longer all layers take on a kind, the less it
        costs; next to nothing if they take no time, or none can run there."""
        finite = np.where(np.isfinite(self._kind_work_s), self._kind_work_s, 0.0).sum(axis=0)
        most_s = max(float(finite.max()), _TINY)
        prices = 1.0 / np.where(finite > 0.0, np.maximum(finite, most_s * _TINY), most_s / _TINY)
        devices = [kind.cluster.devices for kind in self.instance.cluster.kinds]
        worth: FloatArray = prices / float(dot(prices, np.array(devices)))
        return worth

    @cached_property
    def share_s(self) -> FloatArray:
        """float64[m]: a bound on the seconds of a downset's work, at the prices; that of the whole graph bounds
        plans."""
        each = (self._kind_work_s * self._prices).min(axis=1, keepdims=True)
        share_s: FloatArray = self.lattice.sums(each)[:, 0]
        return share_s

    def tails(self, threshold_s: float, check: Callable[[], None]) -> tuple[FrontTails, int, int]:
        """Returns the undominated tails of stages that keep the threshold, their number, and that of downsets which
        have some. check: called again and again; what it raises is passed on. Raises ChoiceTooHard."""
        problem, mixes, share_s = self.problem, self.mixes, self.share_s
        keep_s, replica_work_s = kept_s(threshold_s), problem.workload.sums.replica_work_s
        room = 1.0 - (share_s[-1] - share_s) / keep_s + _ROUNDING
        sums = limits_by_work(problem.cluster.data_parallel_limit, replica_work_s, float(replica_work_s[-1]), keep_s)
        limits = MixedLimits(keep_s, room, sums)
        kinds = mixes.stride.size
        start = np.zeros((share_s.size, kinds * kinds + 1), np.int64)
        start[0] = [sum(g * kinds + g < front for g in range(kinds)) for front in range(kinds * kinds + 1)]

        def find(i: int, tails: FrontTails, found: OpenTails) -> int:
            return find_tails(i, problem.tables, mixes, limits, tails, found, problem.scratch)

        return list_tails(start, (kinds * kinds, len(mixes.counts)), find, check)

    def stages(self, tails: FrontTails, used: int, threshold_s: float) -> list[TracedStage] | None:
        """Returns the stages of a plan of fewest devices that such tails have; None if there is none."""
        first = int(tails.start[-1, 0])
        if first == used:
            return None
        devices = self.mixes.counts[tails.cell[first:used]].sum(axis=1)
        traced = trace_tail(tails, first + int(np.argmin(devices)), kept_s(threshold_s))
        return [stage for stage, _ in traced]

    def missed_s(self, plan: Plan) -> FloatArray:
        """Returns float64[n]: for each vertex the seconds that the search may have left out per byte of its edges and
        tensors, if all are equally large."""
        instance, graph = self.instance, self.lattice.graph
        kinds, names = possible_kinds(graph, self.placed), instance.cluster.kind_names
        kind_of = {layer: stage.kind for stage in plan.stages for layer in stage.layers}
        missed_s, cluster = np.zeros(graph.size), instance.cluster
        joined = [((tail, head), lambda x: cluster.rate_between(*x)) for tail, head, _ in graph.edges]
        for ends, rate_of in joined + [(ends, cluster.slowest_rate) for ends, _ in graph.tensors]:
            possible = product(*([names[kind] for kind in kinds[v]] for v in ends))
            fastest = max(rate_of(chosen) for chosen in possible)
            missed_s[list(ends)] += 1.0 / rate_of([kind_of[graph.layer_ids[v]] for v in ends]) - 1.0 / fastest
        return missed_s


def _with_bytes_as_shares(instance: Instance) -> Instance:
    """Returns the instance with the memory of TMPCs scaled to the kind with the most, so that each share of a device is
    the same."""
    cluster = instance.cluster
    times = {kind.name: cluster.memory_bytes / kind.cluster.memory_bytes for kind in cluster.kinds}

    def scaled(tmpc: Tmpc) -> Tmpc:
        factor, sizes = times[tmpc.kind], ("activation_bytes", "fixed_bytes", "shared_bytes")
        return tmpc.changed(**{name: getattr(tmpc, name) * factor for name in sizes}) if factor != 1.0 else tmpc

    layers = with_rows(instance.layers, lambda layer: {t: tuple(map(scaled, row)) for t, row in layer.tmpcs.items()})
    return replace(instance, layers=layers).checked_as(instance)


def solve_mixed(request: SolveRequest) -> Solution:
    """Returns the plan of least time, or the best one found. Raises what ``engine.solve.solve`` raises, and LimitError
    if there are too many mixes of devices."""
    instance, restrictions, began_s = request.instance, request.restrictions, time.perf_counter()
    graph = build_graph(instance, without_contraction())
    impossible = layer_without_choice(instance, usable_variants(instance, restrictions))
    if impossible is not None:
        return no_plan(impossible, stats_of_nothing(instance, graph.size))
    if request.options.resume is not None:
        request.note("nothing is kept for later of a search under 2bw on several kinds of devices")
    variants = len(usable_variants(instance, restrictions)) * len(instance.cluster.kinds) ** 2
    lattice, lattice_s = lattice_within(
        graph, variants, count_downsets(graph), request.options.memory_limit_bytes, request.listener, began_s
    )
    began_s = time.perf_counter()
    workload = MixedWorkload.of(instance, restrictions, lattice)
    workload.mixes  # noqa: B018 - raises LimitError if they are too many
    made_s, ledger, stats = time.perf_counter() - began_s, request.ledger(), list[EvaluationStats]()
    began_s = time.perf_counter()

    def answer() -> Solution:
        return ledger.answer(
            lambda found: found.plan,
            lambda _: PAPERS_SCHEDULE,
            replace(
                stats_of_nothing(instance, graph.size),
                downsets=lattice.size,
                levels=lattice.levels,
                threads=1,
                lattice_s=lattice_s,
                stage_costs_s=made_s,
                search_s=time.perf_counter() - began_s,
                evaluations=tuple(stats),
            ),
            infeasibility=Infeasibility(
                f"no plan fits on {instance.devices:,} devices of {len(instance.cluster.kinds)} kinds with "
                f"{instance.microbatches:,} microbatches",
                None,
            ),
        )

    def searched(part: Instance, own: Ledger[ValuedPlan]) -> MixedWorkload:
        made = workload if part is instance else MixedWorkload.of(part, restrictions, lattice)
        own.run(MixedSearch(made, own, stats))
        return made

    def charged(part: Instance, made: MixedWorkload, found: ValuedPlan) -> tuple[ValuedPlan, FloatArray]:
        return ValuedPlan.of(part, found.plan), made.missed_s(found.plan)

    request.stop.offer(answer)
    if workload.rates.are_exact:
        searched(instance, ledger)
    else:
        ledger.run(KindSearch(instance, ledger, searched, charged))
    return answer()


@dataclass
class MixedSearch:
    """The rule of a search that keeps ``ledger`` and begins with its plan. stats: its evaluations are added."""

    workload: MixedWorkload
    ledger: Ledger[ValuedPlan]
    stats: list[EvaluationStats]
    left_open: StoppedBy | None = StoppedBy.GAP
    bracket: Bracket = field(init=False)

    def __post_init__(self) -> None:
        workload, instance = self.workload, self.workload.instance
        bound_s = float(workload.share_s[-1]) * (1.0 - _ROUNDING)
        slowest = Link(instance.cluster.slowest_rate(instance.cluster.kind_names))
        alike = Cluster(instance.devices, instance.memory_bytes, (slowest,))
        ceiling = ceiling_s(replace(instance, cluster=alike))
        self.bracket = Bracket(max(bound_s, workload.problem.lower_bound_s(), self.ledger.lower_s), ceiling)
        self.planning = Planning(instance, without_contraction())
        if self.ledger.best is not None:
            self.bracket.record_plan(self.ledger.best.value_s)
            self.bracket.challenge()
        self.ledger.cases, self.ledger.may_prefer = {0: self.bracket}, workload.rates.are_exact

    def efforts(self) -> Generator[None, None, None]:
        """Closes the bracket, or stops at the gap; then picks a plan of fewest devices among equally fast ones."""
        with keeping_known(self.ledger, self.bracket.forget):
            while not self.bracket.is_done(self.ledger.limits.gap):
                yield
                threshold_s = self.bracket.propose()
                stages = self._evaluate(threshold_s)
                if stages is None:
                    self.bracket.record_infeasible(threshold_s)
                else:
                    found = self._valued(stages)
                    self.ledger.offer(found, "evaluation")
                    self.bracket.record_feasible(threshold_s, found.value_s)
            if self.bracket.closed and self.workload.rates.are_exact and self.bracket.upper is not None:
                stages = self._evaluate(self.bracket.upper)
                if stages is not None:  # the best plan may come from another search
                    found = self._valued(stages)
                    self.bracket.settle(found.value_s)
                    self.ledger.settle(found)

    def _valued(self, stages: Iterable[TracedStage]) -> ValuedPlan:
        """Values a plan at its own rates or, if these do not follow from single stages, at those of the search."""
        listed, problem = list(stages), self.workload.problem
        if self.workload.rates.are_exact:
            return self.planning.valued(problem, listed)
        plan, slowest_s = self.planning.plan(problem, listed), 0.0
        for stage in listed:
            vertices, items = items_of(problem, stage)
            choice = np.empty(vertices.size, np.int64)
            least_s = least_cost(items, problem.cluster.memory_bytes, np.inf, False, choice)
            slowest_s = max(
                slowest_s, (stage.budget_s if least_s == CHOICE_TOO_HARD else least_s) / stage.data_parallel_degree
            )
        own = ValuedPlan.of(self.workload.instance, plan)
        return own if own.value_s <= slowest_s * (1.0 + _ROUNDING) else ValuedPlan(plan, slowest_s)

    def _evaluate(self, threshold_s: float) -> list[TracedStage] | None:
        """Returns the stages of a plan of fewest devices that keeps the threshold; None if there is none."""
        began_s = time.perf_counter()
        tails, used, live = self.workload.tails(threshold_s, self.ledger.check)
        stages, seconds = self.workload.stages(tails, used, threshold_s), time.perf_counter() - began_s
        feasible = stages is not None
        self.stats.append(EvaluationStats(threshold_s, feasible, seconds, live, used, 0, 0, 0))
        bounds = self.ledger.bounds()
        self.ledger.listener(EvaluationFinished(len(self.stats), threshold_s, feasible, seconds, live, bounds))
        return stages
