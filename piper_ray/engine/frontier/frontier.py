"""``frontier`` finds the least time for every number of devices. This module only puts the parts together."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from piper_ray.compiled.observers import compiling_told
from piper_ray.cost.schedules import chunk_schedules
from piper_ray.cost.variants import layer_without_choice, usable_variants
from piper_ray.engine.chunks.solve import ChunkSeries
from piper_ray.engine.flush.solve import FlushSeries
from piper_ray.engine.frontier.result import Frontier, FrontierListener, Numbers, Walk, rising
from piper_ray.engine.layers import LayerSeries
from piper_ray.engine.ledger import no_search, stats_of_nothing
from piper_ray.engine.preparation import PointShape
from piper_ray.engine.request import SolveRequest, is_by_degrees
from piper_ray.engine.restated import solve_restated
from piper_ray.engine.subproblems import least_s, solve_on_levels
from piper_ray.model import arguments
from piper_ray.model.constraints import Restrictions
from piper_ray.model.errors import UsageError
from piper_ray.model.events import DegreesSearched, EvaluationFinished, Event, IncumbentFound, Note, PartBegun, silent
from piper_ray.model.instance import Instance
from piper_ray.model.options import Contract, SolveOptions
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import CHUNKED, FLUSHED, Schedule, ScheduleName
from piper_ray.model.solution import Solution, Status
from piper_ray.model.stop import Stop
from piper_ray.workloads.formats.load import Source, on_cluster

Series = LayerSeries | FlushSeries | ChunkSeries
"""Solves of one workload on as many devices as the first request or fewer. They share what they can."""


def new_series(first: SolveRequest, schedules: Sequence[Schedule]) -> Series:
    """Makes a series. first: the request with the most devices. schedules: all of one name, with the numbers of chunks
    tried.

    Raises UsageError for constraints that plans for the schedule cannot satisfy, LimitError if a lattice does not fit
    in memory.
    """
    if schedules[0].name in CHUNKED:
        return ChunkSeries(first, schedules)
    if is_by_degrees(schedules[0], first.restrictions):
        return FlushSeries(first, schedules[0])
    first.restrictions.require_stages_alone("frontier")
    return LayerSeries()


_OF_ONE_SOLVE = (DegreesSearched, EvaluationFinished, IncumbentFound, PartBegun)
"""Events that are not passed on. Points have rows, so events within their solves are not reported."""


def frontier(
    instance: Instance | Source,
    *,
    devices: Numbers | None = None,
    microbatches: int | None = None,
    memory_bytes: float | str | None = None,
    bandwidth_bytes_per_s: float | str | None = None,
    gap: float | None = None,
    time_limit: float | str | None = None,
    threads: int | None = None,
    memory_limit: float | str | None = None,
    restrictions: Restrictions = Restrictions(),
    options: SolveOptions = SolveOptions(),
    listener: FrontierListener = silent,
    stop: Stop[Frontier] | None = None,
    schedule: Schedule | ScheduleName | str | None = None,
) -> Frontier:
    """Returns the optimum for every number of devices: 1 .. ``instance.devices``, or the rising numbers ``devices``.

    instance: an ``Instance``, or what ``load`` takes, such as a path. devices: may be a text as on the command line,
    "8..64" or "8..64:8". microbatches, memory_bytes, bandwidth_bytes_per_s, gap, time_limit, threads, memory_limit,
    schedule: as for ``solve``. A limit or an interrupt ends the search, and what is known until then is returned. stop:
    ends it as an interrupt does, and gets the frontier so far.

    Raises LimitError if the lattice does not fit in memory, InputError with all faults of an invalid instance, and
    UsageError for invalid arguments and for ``options.resume`` and ``contract=OPERATORS``, which a frontier does not
    support.

    >>> import piper_ray
    >>> found = piper_ray.frontier(piper_ray.estimate("bert-large", "A100-80"), devices="1..8", threads=1)
    >>> sorted(found.by_devices()) == list(range(1, 9))
    True
    """
    arguments.of_kind("restrictions", restrictions, Restrictions, "Restrictions")
    arguments.of_kind("options", options, SolveOptions, "SolveOptions")
    options = options.changed(gap=gap, time_limit=time_limit, threads=threads, memory_limit=memory_limit)
    arguments.function("listener", listener)
    if options.resume is not None:
        raise UsageError("a frontier cannot be resumed: leave out options.resume")
    if options.contract is not Contract.SAFE:
        raise UsageError(
            f"a frontier plans single layers: leave out contract={options.contract.value!r}, or solve with it for each "
            "number of devices"
        )
    given, instance = instance, on_cluster(instance, None, microbatches, memory_bytes, bandwidth_bytes_per_s)
    if not isinstance(given, Instance):
        for note in instance.notes:
            listener(Note(note))
    wanted = rising(range(1, instance.devices + 1) if devices is None else devices, "devices", "a number of devices")
    asked = schedule or instance.schedule
    if (under := Schedule.first_of(asked)).asynchronous:
        instance.require_one_site(f"a frontier under {under.name.value}")
    search = _Frontiers(instance.replace(devices=wanted[-1]), restrictions, options, asked, listener, stop or Stop())
    return search.along_devices(wanted)


@dataclass
class _Frontiers:
    """All solves of one frontier. instance: with the most devices. asked: the schedule under which plans run."""

    instance: Instance
    restrictions: Restrictions
    options: SolveOptions
    asked: Schedule | ScheduleName | str | None
    listener: FrontierListener
    stop: Stop[Frontier]
    started_s: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self._schedules = chunk_schedules(self.asked or Schedule.first_of(self.asked))
        self._planned_for = self._schedules[0]
        if self._planned_for.name is ScheduleName.PIPEDREAM:
            raise UsageError("no frontier under schedule pipedream: solve for each number of devices")
        self._shared = SharedSeries(self._schedules)

    def along_devices(self, devices: tuple[int, ...]) -> Frontier:
        walk = self._walk(devices, by_sum=False)
        found = Frontier(self.instance, self.restrictions, self.options, self._planned_for, walk)
        found.chunks_differ, found.reason = len(self._schedules) > 1, self._reason()
        if self._planned_for.name not in CHUNKED and not is_by_degrees(self._planned_for, self.restrictions):
            found.search_sums = self._along_sums
        self.stop.offer(found.so_far)
        self._run(walk)
        return found

    def _along_sums(self, sums: tuple[int, ...]) -> Walk:
        """Makes the walk over sums of d on all devices."""
        walk = self._walk(sums, by_sum=True)
        self._run(walk)
        return walk

    def _walk(self, positions: tuple[int, ...], *, by_sum: bool) -> Walk:
        def on(position: int) -> Instance:
            return self.instance if by_sum else self.instance.replace(devices=position)

        def solve(position: int, stop: Stop[Solution]) -> Solution:
            return self._solve(on(position), position if by_sum else None, stop)

        def shape(position: int) -> Hashable:
            """Returns what else decides which of equally good plans is preferred."""
            instance = on(position)
            return len(instance.cluster.levels()), PointShape.of(instance, self.restrictions)

        def needed(plan: Plan, position: int) -> int:
            if by_sum:
                return plan.data_parallel_sum
            cluster, first = on(position).cluster, plan.stages[0]
            if self._planned_for.name not in FLUSHED or cluster.kinds:
                return plan.span
            return cluster.needed_devices(first.data_parallel_degree, first.tensor_parallel_degree, len(plan.stages))

        falling = not self.restrictions.all_devices
        return Walk(positions, by_sum, falling, solve, lambda position: self._unknown(on(position)), shape, needed)

    def _run(self, walk: Walk) -> None:
        before_s = self._shared.preparation_s
        with compiling_told(self.listener):
            walk.run(self.listener, self.stop)
        walk.preparation_s = self._shared.preparation_s - before_s

    def _solve(self, instance: Instance, data_parallel_limit: int | None, stop: Stop[Solution]) -> Solution:
        request = SolveRequest(instance, self.restrictions, self.options, None, self._told, stop)
        request = replace(request, started_s=self.started_s, data_parallel_limit=data_parallel_limit)
        return solve_restated(
            request.in_time(), self._planned_for, lambda one: solve_on_levels(one, self._shared.solve)
        )

    def _told(self, event: Event) -> None:
        if not isinstance(event, _OF_ONE_SOLVE):
            self.listener(event)

    def _reason(self) -> str | None:
        """Why there is no plan on any number of devices, if that is known beforehand."""
        impossible = layer_without_choice(self.instance, usable_variants(self.instance, self.restrictions))
        return None if impossible is None else impossible.reason

    def _unknown(self, instance: Instance) -> Solution:
        """Returns the answer for a position before its search."""
        return no_search(least_s(instance), stats_of_nothing(instance), self._planned_for)


_KEPT = 8
"""Number of restated workloads to keep. Each is made anew for each number of devices."""


@dataclass
class SharedSeries:
    """A series of solves for each combination of workload, links and restrictions. schedules: all of one name, with the
    numbers of chunks tried. preparation_s: the time to make the shared tables.
    """

    schedules: Sequence[Schedule]
    preparation_s: float = 0.0
    _series: dict[Hashable, _KeptSeries] = field(default_factory=dict)

    def solve(self, request: SolveRequest) -> Solution:
        """Solves like ``engine.solve``, after restating and on one level of links. A proved answer is reused: the one
        on a single node is needed for each number of nodes.
        """
        instance, cluster = request.instance, request.instance.cluster
        key = id(instance.layers), id(instance.edges), cluster.links, type(cluster), request.restrictions
        if key not in self._series:
            if len(self._series) >= _KEPT:
                del self._series[next(iter(self._series))]
            self._series[key] = _KeptSeries(request, new_series(request, self.schedules))
        kept = self._series[key]
        point = instance.devices, request.data_parallel_limit
        if point in kept.proved:
            return kept.proved[point]
        found = kept.series.solve(request)
        if found.status in (Status.OPTIMAL, Status.INFEASIBLE):
            kept.proved[point] = found
        self.preparation_s += kept.series.preparation_s
        kept.series.preparation_s = 0.0
        return found


@dataclass
class _KeptSeries:
    """A series with its first instance, whose layers and edges are kept alive so that their ids stay unique. proved:
    answers, by point."""

    first: SolveRequest
    series: Series
    proved: dict[Hashable, Solution] = field(default_factory=dict)
