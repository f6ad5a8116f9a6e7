"""Solves with one d and one t for all stages: from a request to a proved plan. This module only joins the parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from piper_ray.cost.bounds import ceiling_bytes
from piper_ray.cost.variants import Variant, layer_without_choice, usable_variants
from piper_ray.engine.backends.calls import Workers
from piper_ray.engine.flush.border_bound import border_labelling, downsets_with_cheap_borders
from piper_ray.engine.flush.kinds import ChosenInNode, KindSearch, charged_truly
from piper_ray.engine.flush.mixes import BorderRates
from piper_ray.engine.flush.search import FIRST_SHARE, Degrees, FlushSearch
from piper_ray.engine.flush.space import MANY_LAYERS, SearchSpace
from piper_ray.engine.flush.stage_limits import build_paths
from piper_ray.engine.flush.tables import FlushWorkload, build_workload, tables_on
from piper_ray.engine.flush.task_search import ChosenStages, TaskMemo, build_flush_plan
from piper_ray.engine.flush.tasks import DegreePair, list_tasks
from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.lattice.downsets import GrownLattice, Lattice, build_lattice, chain_lattice, listed_lattice
from piper_ray.engine.lattice.labelling import Labelling
from piper_ray.engine.lattice.layer_graph import LayerGraph, build_graph, count_downsets
from piper_ray.engine.ledger import Ledger, Limits, no_plan, preference, stats_of_nothing
from piper_ray.engine.preparation import downsets_within, note_of_many, tell_of_lattice, tell_of_options
from piper_ray.engine.request import SolveRequest
from piper_ray.model.cluster import Cluster
from piper_ray.model.constraints import Restrictions, can_use_all, reason_against_all
from piper_ray.model.figures import memory_text, plural, size_text
from piper_ray.model.instance import Instance
from piper_ray.model.passes import with_passes
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule, StepTerms
from piper_ray.model.solution import DegreeStats, Infeasibility, Solution, SolveStats, Status

_ANY_PLAN = 0.999
"""A search with this gap ends at its first plan."""

_CLOSE = 1e-9
"""The relative error of the least memory with a plan."""

_EXPLAINED_PASSES = 500_000_000
"""The work for which that is sought: a million states, some tens of seconds."""

_MOST_DOWNSETS = 200_000
"""If there are more downsets than this, only the useful ones are listed."""

_MOST_LISTED = 1_000_000
"""The most downsets ever listed, also if it is unknown which are useful: tables of 2.4 million took 8 GB."""

_MANY_DOWNSETS = 300
_FEW_DOWNSETS = (40, 200)
"""If there are more downsets than the first, early plans are sought on these numbers of cheap borders: a plan of the
first is there soon, and limits what the second has to look at."""

_BORDERS_FROM = 2_000
"""From this number of downsets on, bounds by the cheapest borders take less time than they save."""

_CHAIN_SHARE = 4
"""A chain is searched first if the lattice has at least this many times as many downsets."""


def solve_under_flush(request: SolveRequest, schedule: Schedule) -> Solution:
    """Returns the plan with the fastest batch among those with one d and one t for all stages. Its value and bound are
    of a microbatch.

    Under a flush a batch is simulated; without one it takes N times as long as the slowest stage. The caller handles
    the restrictions on the plan as a whole that one d and one t for all stages do not satisfy.

    Raises LimitError if the lattice does not fit in memory, UsageError for a custom backend that such a search cannot
    use.
    """
    return FlushSeries(request, schedule).solve(request, explained=True)


class FlushSeries:
    """Solves one workload on several numbers of devices. The solves share the lattice, the bounds of each (d, t), and
    all plans found.

    first: the request with the most devices. preparation_s: the time to make the shared tables. Raises LimitError if
    the lattice does not fit in memory.
    """

    def __init__(self, first: SolveRequest, schedule: Schedule) -> None:
        self._schedule, self._proved_s = schedule, dict[Degrees, float]()
        self._found: dict[int, ChosenStages] = {}  # the best known plan by the number of devices it needs
        self._problem = _Problem.of(first, schedule)
        self.preparation_s = 0.0
        if not isinstance(self._problem, Infeasibility):
            self.preparation_s = self._problem.lattice_s + self._problem.stage_costs_s

    def solve(self, request: SolveRequest, *, explained: bool = False) -> Solution:
        """Solves on the devices of ``request``. explained: if there is no plan, find the reason and the memory that
        would suffice.
        """
        problem, devices, every = self._problem, request.instance.devices, request.restrictions.all_devices
        if isinstance(problem, Infeasibility):
            return no_plan(problem, _stats_of(request.instance), self._schedule, request.step)
        # A plan for fewer devices does not count if all devices must be used.
        proved_s = {} if every else self._proved_s
        ledger: Ledger[ChosenStages] = request.ledger(problem.instance.microbatches)
        instance = problem.on(devices)

        def answer() -> Solution:
            found = ledger.answer(problem.plan, lambda _: self._schedule, problem.stats(search), request.step)
            return request.with_cluster(found)

        with (
            request.open_checkpoint(self._schedule, kept="searches of degrees") as checkpoint,
            request.open_workers() as workers,
        ):
            memo = None if checkpoint is None else TaskMemo(checkpoint)
            search = problem.search(instance, workers, ledger, proved_s, memo)
            usable = (x for k, x in self._found.items() if k == devices or (k < devices and not every))
            best = min(usable, key=preference, default=None)
            if best is not None:
                ledger.begin_with(best)
            request.stop.offer(answer)
            if problem.workload.rates.are_exact:
                problem.run(search, instance)
            else:
                ledger.run(KindSearch(instance, ledger, partial(problem.searched_part, workers, search), charged_truly))
            found = answer()
            if explained and found.status is Status.INFEASIBLE:
                found = replace(found, infeasibility=problem.explanation(request, workers))
        for plan in search.found:
            needed = problem.needed_devices(plan, instance.cluster)
            self._found[needed] = min(self._found.get(needed, plan), plan, key=preference)
        self._proved_s = search.proved_of_tasks()
        return found


@dataclass(frozen=True)
class _Problem:
    """The problem, on all devices of ``instance`` or fewer.

    workload: on all downsets or, if these are too many (``is_wide``), on a chain. downsets: their number; None: too
    many to count. labelling: of the graph, if it was sought. lattice_s, stage_costs_s: the time to make them.
    """

    instance: Instance
    restrictions: Restrictions
    schedule: Schedule
    step: StepTerms
    variants: tuple[Variant, ...]
    workload: FlushWorkload
    downsets: int | None
    is_wide: bool
    is_bounded: bool
    lattice_s: float
    stage_costs_s: float

    @classmethod
    def of(cls, request: SolveRequest, schedule: Schedule) -> _Problem | Infeasibility:
        """Builds the tables. Returns the reason why there is no plan if some layer has no TMPC that is allowed.

        The lattice is that of all layers: a layer that costs nothing may be a stage of its own, which under 1F1B lets
        the stages before it start with one more forward pass. So none may be merged with a neighbour.
        """
        instance, restrictions = instance_under(schedule, request.instance, request.note), request.restrictions
        began_s = time.perf_counter()
        variants, graph = usable_variants(instance, restrictions), build_graph(instance, without_contraction())
        impossible = layer_without_choice(instance, variants)
        if impossible is not None:
            return impossible
        borders = BorderRates.of(instance, graph, schedule)
        expected, limit_bytes = count_downsets(graph), request.options.memory_limit_bytes
        neighbours = len(borders.kinds) ** 2
        most = min(downsets_within(graph, len(variants) * neighbours, limit_bytes), _MOST_LISTED)
        is_first = expected is None or expected > _MOST_DOWNSETS
        is_bounded = is_first or expected is None or expected >= _BORDERS_FROM or graph.size > MANY_LAYERS
        labelling = Labelling.of(graph) if is_bounded else None
        is_wide = expected is None or expected > most or (is_first and labelling is not None)
        if is_wide:
            request.note(note_of_many(expected))
            lattice, lattice_s = _chain_of(graph), time.perf_counter() - began_s
        else:
            lattice = build_lattice(graph, most, expected)
            lattice_s = tell_of_lattice(lattice, began_s, request.listener)
        began_s = time.perf_counter()
        workload = build_workload(instance, lattice, variants, borders)
        if is_bounded:
            workload = replace(workload, border_labelling=border_labelling(graph), stage_labelling=labelling)
        costs_s = tell_of_options(workload.tmpcs_alone, began_s, request.listener)
        return cls(
            instance=instance,
            restrictions=restrictions,
            schedule=schedule,
            step=request.step,
            variants=variants,
            workload=workload,
            downsets=expected,
            is_wide=is_wide,
            is_bounded=is_bounded,
            lattice_s=lattice_s,
            stage_costs_s=costs_s,
        )

    @cached_property
    def chain(self) -> FlushWorkload | None:
        """The workload on a chain of n + 1 downsets, for an early plan; None if it is not worthwhile."""
        graph = self.workload.lattice.graph
        if self.is_wide:
            return self.workload
        if self.workload.lattice.size < _CHAIN_SHARE * (graph.size + 1):
            return None
        return self._on(_chain_of(graph))

    def with_cheap_borders(self, most: int) -> FlushWorkload | None:
        """Returns the workload on a few downsets, with ``most`` cheap borders, for an early plan. None if all downsets
        or those of the chain are few enough. If there are too many borders to find the cheap ones, they are those of a
        chain.
        """
        few, graph = self.workload if self.chain is None else self.chain, self.workload.lattice.graph
        labelling = self.workload.border_labelling
        if few.lattice.size <= _MANY_DOWNSETS or (labelling is None and not self.is_chain_long):
            return None
        found = downsets_with_cheap_borders(graph, labelling, self.workload.arrays, most)
        return None if found is None else self._on(listed_lattice(graph, found))

    @property
    def is_chain_long(self) -> bool:
        """Whether a search of the chain takes so long that bounds come before it."""
        return self.workload.lattice.graph.size > MANY_LAYERS or (
            self.is_wide and self.workload.stage_labelling is None
        )

    def _on(self, lattice: Lattice) -> FlushWorkload:
        """Returns the workload with the same layers on other downsets."""
        known = self.workload
        return replace(known, lattice=lattice, arrays=tables_on(lattice, known.arrays, known.values), ahead_of={})

    @cached_property
    def space(self) -> SearchSpace:
        workload, graph = self.workload, self.workload.lattice.graph
        if self.chain is None:
            return SearchSpace(workload.arrays, is_large=graph.size > MANY_LAYERS)
        labelling = workload.stage_labelling if self.is_bounded else Labelling.of(graph)
        paths = None if labelling is None else build_paths(workload, labelling)
        if not self.is_wide:
            return SearchSpace(workload.arrays, is_large=True, paths=paths)
        return SearchSpace(workload.arrays, True, paths, graph, workload.values)

    def search(
        self,
        instance: Instance,
        workers: Workers,
        ledger: Ledger[ChosenStages],
        proved_s: Mapping[Degrees, float] = MappingProxyType({}),
        memo: TaskMemo | None = None,
    ) -> FlushSearch:
        """Makes a search of all tasks. instance: this instance, or the same on other devices."""
        return FlushSearch(self.space, self.tasks(self.workload, instance), workers, ledger, proved_s, memo)

    def searched_part(
        self, workers: Workers, whole: FlushSearch, instance: Instance, ledger: Ledger[ChosenStages]
    ) -> FlushWorkload:
        """Searches the plans of ``instance``, which has some of the TMPCs, and adds the work to ``whole``."""
        variants = usable_variants(instance, self.restrictions)
        workload = build_workload(instance, self.workload.lattice, variants, self.workload.border_rates)
        part = replace(self, instance=instance, variants=variants, workload=workload)
        search = part.search(instance, workers, ledger)
        part.run(search, instance)
        whole.add(search)
        return workload

    def on(self, devices: int) -> Instance:
        """Returns the instance on ``devices`` devices, which may be fewer than its own."""
        return self.instance if devices == self.instance.devices else self.instance.replace(devices=devices)

    def needed_devices(self, chosen: ChosenStages, cluster: Cluster) -> int:
        """The number of devices below which the plan takes longer, or is not valid."""
        if not self.workload.border_rates.by_stages or cluster.kinds:
            return chosen.devices
        d = chosen.task.data_parallel_degree
        return cluster.needed_devices(d, chosen.devices // (chosen.stages * d), chosen.stages)

    def tasks(self, workload: FlushWorkload, instance: Instance) -> list[DegreePair]:
        """Lists the tasks on the lattice or the chain. instance: this instance, or the same on other devices."""
        return list_tasks(instance, workload, self.schedule, self.restrictions, self.step)

    def run(self, search: FlushSearch, instance: Instance) -> None:
        """Runs a search to its end. On a large lattice, early plans are sought first."""
        are_bounded = self.workload.border_labelling is not None
        for most in _FEW_DOWNSETS:
            if search.ledger.stopped_by is None:
                self._improve(search, instance, "borders", self.with_cheap_borders(most))
        if are_bounded and self.is_chain_long and search.ledger.stopped_by is None:
            search.bound(self.workload)
        self._improve(search, instance, "chain", self.chain)
        if self.space.is_large and search.ledger.upper_s == np.inf and search.ledger.stopped_by is None:
            search.fit()
        if are_bounded and np.isfinite(search.ledger.upper_s) and search.ledger.stopped_by is None:
            search.bound(self.workload)
        if self.is_wide and self.space.paths is not None and search.ledger.stopped_by is None:
            search.improve(self.space.along_beams(), search.tasks, "beam", np.inf)
        search.ledger.run(search)

    def _improve(self, search: FlushSearch, instance: Instance, origin: str, few: FlushWorkload | None) -> None:
        """Looks for an early plan on a few downsets, if there are any."""
        if few is not None and search.ledger.stopped_by is None:
            space = SearchSpace(few.arrays, is_large=True)
            search.improve(space, self.tasks(few, instance), origin, FIRST_SHARE)

    def plan(self, chosen: ChosenStages) -> Plan:
        workload = chosen.workload if isinstance(chosen, ChosenInNode) else self.workload
        return build_flush_plan(self.instance, workload, chosen)

    def explanation(self, request: SolveRequest, workers: Workers) -> Infeasibility:
        """Explains why there is no plan."""
        instance, restrictions = request.instance, request.restrictions
        if restrictions.all_devices and not can_use_all(instance, restrictions):
            return Infeasibility(reason_against_all(instance, restrictions), None)
        least = None if instance.cluster.kinds else self._least_memory(workers, request.limits)
        every = "all " if restrictions.all_devices else ""
        stages = "" if restrictions.stage_count is None else f" of {plural(restrictions.stage_count, 'stage')}"
        reason = (
            f"no plan{stages} with one d and one t fits on {every}{instance.devices:,} "
            f"devices{_memory_of_each(instance.cluster)} with {instance.microbatches:,} microbatches"
        )
        if least is not None and not least.is_exact:
            return Infeasibility(f"{reason}; {size_text(least.memory_bytes)} would do, perhaps less", None)
        return Infeasibility(reason, None if least is None else least.memory_bytes)

    def _least_memory(self, workers: Workers, limits: Limits) -> EnoughMemory | None:
        """Seeks the least memory with a plan, by at most ``_EXPLAINED_PASSES`` of work in all."""
        any_plan, left = replace(limits, gap=_ANY_PLAN), _EXPLAINED_PASSES

        def fits(memory_bytes: float) -> bool | None:
            nonlocal left
            roomy = self.instance.replace(memory_bytes=memory_bytes)
            ledger = Ledger[ChosenStages](roomy.microbatches, replace(any_plan, passes=min(limits.passes, left)))
            search = FlushSearch(self.space, self.tasks(self.workload, roomy), workers, ledger)
            search.fit()
            if ledger.best is None and ledger.lower_s < np.inf:
                self.run(search, roomy)
            left -= ledger.passes
            if ledger.best is not None:
                return True
            return None if ledger.stopped_by is not None or ledger.lower_s < np.inf else False

        return enough_memory(self.instance, fits)

    def stats(self, search: FlushSearch) -> SolveStats:
        lattice = self.workload.lattice
        return replace(
            _stats_of(self.instance),
            downsets=self.downsets or 0,
            levels=lattice.levels,
            lattice_s=self.lattice_s,
            stage_costs_s=self.stage_costs_s,
            threads=search.workers.width,
            search_s=search.seconds,
            degrees=DegreeStats(len(search.tasks), search.searched, search.looked_through, search.states),
        )


def _memory_of_each(cluster: Cluster) -> str:
    return "" if cluster.kinds else f" of {memory_text(cluster.memory_bytes)}"


def instance_under(schedule: Schedule, instance: Instance, tell: Callable[[str], None]) -> Instance:
    """Returns the instance with separate forward and backward passes, unless the schedule is Piper's, which uses their
    sum."""
    return instance if schedule == PAPERS_SCHEDULE else with_passes(instance, tell)


def _chain_of(graph: LayerGraph) -> GrownLattice:
    return chain_lattice(graph, range(graph.size))


def _stats_of(instance: Instance) -> SolveStats:
    """Returns the stats of a solve that has done nothing yet."""
    return replace(stats_of_nothing(instance, len(instance.layers)), degrees=DegreeStats(0, 0, 0, 0))


class EnoughMemory(NamedTuple):
    """A memory of a device, in bytes, with which an infeasible instance has a plan. is_exact: whether there is none
    with less, by more than 1 byte and ``_CLOSE``."""

    memory_bytes: float
    is_exact: bool


def enough_memory(instance: Instance, fits: Callable[[float], bool | None]) -> EnoughMemory | None:
    """Returns the least memory with a plan, or the least that is known when a limit is reached; None if none is known.

    fits: whether there is a plan with that memory; None: a limit was reached first.
    """
    most_bytes = ceiling_bytes(instance, instance.microbatches)
    low, high = instance.memory_bytes, max(1.0, 2.0 * instance.memory_bytes)
    while not (found := fits(high)):
        if found is None or high > most_bytes:
            return None
        low, high = high, 2.0 * high
    while high - low > max(1.0, _CLOSE * high):
        middle = (low + high) / 2.0
        found = fits(middle)
        if found is None:
            return EnoughMemory(high, False)
        low, high = (low, middle) if found else (middle, high)
    return EnoughMemory(high, True)
