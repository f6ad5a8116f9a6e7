"""Under Piper's schedule: the least time for every number of devices, from evaluations that all of them share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from copy import copy

import numpy as np

from piper_ray.cost.variants import layer_without_choice
from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.evaluation.threshold import evaluate_threshold
from piper_ray.engine.first_run import compiling_told, of_papers_frontier
from piper_ray.engine.frontier.curve import Curve
from piper_ray.engine.frontier.curve_events import FrontierListener
from piper_ray.engine.frontier.curve_search import CurveSearch
from piper_ray.engine.frontier.curve_tables import CurvePreparation
from piper_ray.engine.frontier.points import FrontierPoint, FrontierStats, points_of
from piper_ray.engine.frontier.result import Frontier, Numbers, rising
from piper_ray.engine.preparation import Outline
from piper_ray.engine.search.inexact import Inexact
from piper_ray.engine.search.limits import Limits
from piper_ray.engine.search.planning import Planning
from piper_ray.evaluate import evaluate
from piper_ray.model.errors import UsageError
from piper_ray.model.events import StepFinished
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.plan import Plan
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import PAPERS_SCHEDULE
from piper_ray.model.solution import Solution, SolveStats, Status
from piper_ray.model.stop import Stop, StoppedBy


class CurveFrontier(Frontier):
    """Under Piper's schedule: one curve of brackets for all numbers of devices."""

    def __init__(
        self,
        instance: Instance,
        devices: Sequence[int],
        restrictions: Restrictions,
        options: SolveOptions,
        listener: FrontierListener,
        stop: Stop[Frontier],
    ) -> None:
        """Searches along ``devices``, which rise to the instance's."""
        super().__init__(instance, restrictions, options, PAPERS_SCHEDULE)
        self._listener, self._started_s, self._stop = listener, time.perf_counter(), stop
        self._preparations: dict[tuple[int, ...], CurvePreparation] = {}
        self._budgets: dict[tuple[int, ...], Curve] = {}
        self._plans: dict[tuple[tuple[int, ...], int], Plan] = {}
        impossible = layer_without_choice(instance, Outline.of(instance, restrictions).variants)
        if impossible is not None:
            self.reason = impossible.reason
            self._devices = Curve.without_plans(False, devices, instance.data_parallel_limit)
            return
        with self._observed():
            self._search_devices(devices)

    def _search_devices(self, devices: Sequence[int]) -> None:
        instance = self.instance
        preparation = self._prepare(instance)
        lattice = preparation.workload.lattice
        self.stats = FrontierStats(
            contracted_layers=lattice.graph.size,
            downsets=lattice.size,
            levels=lattice.levels,
            preparation_s=time.perf_counter() - self._started_s,
        )
        note = f"{lattice.size:,} downsets in {lattice.levels:,} levels, with their stage costs"
        self._listener(StepFinished("lattice", self.stats.preparation_s, note))
        self._devices = Curve.along_devices(preparation.problem(instance), devices, self.options.gap)
        search = self._new_search()
        self._stop.offer(lambda: self._so_far(search))
        self._run(search, self._devices)

    def points(self) -> tuple[FrontierPoint, ...]:
        limit = self.instance.microbatches
        return points_of(self._devices, [(int(k), min(int(k), limit)) for k in self._devices.positions])

    def budget_points(self, budgets: Numbers | None = None) -> tuple[FrontierPoint, ...]:
        limit = self.instance.data_parallel_limit
        wanted = rising(range(1, limit + 1) if budgets is None else budgets, "budgets", "a bound on the sum of d")
        if wanted[-1] > limit:
            raise UsageError(f"no plan's data-parallel degrees may sum to more than min(N, K) = {limit}")
        if wanted not in self._budgets:
            with self._observed():
                self._budgets[wanted] = self._budget_curve(wanted)
        return points_of(self._budgets[wanted], [(self.instance.devices, s) for s in wanted])

    @property
    def _positions(self) -> Sequence[int]:
        found: list[int] = self._devices.positions.tolist()
        return found

    def _plan_at(self, devices: int) -> Plan | None:
        """One evaluation, at the first call for each step."""
        curve = self._devices
        index = int(np.searchsorted(curve.positions, devices))
        value_s = float(curve.upper_s[index])
        if not np.isfinite(value_s):
            return None
        # Where fewer devices are as fast, their plan is preferred on more too, if they allow the same variants.
        first = int(np.searchsorted(-curve.upper_s, -value_s))
        degrees = self._degrees(self.instance.replace(devices=devices))
        if self._degrees(self.instance.replace(devices=int(curve.positions[first]))) != degrees:
            first = index
        key = degrees, first
        if key not in self._plans:
            with self._observed():
                self._plans[key] = self._preferred_plan(int(curve.positions[first]), value_s)
        return self._plans[key]

    def _solution_at(self, devices: int) -> Solution:
        plan = self._plan_at(devices)
        point = next(point for point in self.points() if point.devices == devices)
        value_s = None
        if plan is not None:
            value_s = evaluate(self.instance.replace(devices=devices), plan, schedule=PAPERS_SCHEDULE).time_per_sample_s
        lower_s = point.lower_bound_s if value_s is None else min(point.lower_bound_s, value_s)
        stats = self.stats
        return Solution(
            status=point.status,
            time_per_sample_s=value_s,
            lower_bound_s=lower_s,
            plan=plan,
            stats=SolveStats(
                layers=len(self.instance.layers),
                contracted_layers=stats.contracted_layers,
                downsets=stats.downsets,
                levels=stats.levels,
                pairs=None,
                threads=stats.threads,
                lattice_s=stats.preparation_s,
                stage_costs_s=0.0,
                search_s=stats.search_s,
                evaluations=(),
            ),
            stopped_by=self.stopped_by if point.status in (Status.FEASIBLE, Status.UNKNOWN) else None,
        )

    def _observed(self) -> AbstractContextManager[None]:
        return compiling_told(self._listener, self.options.threads, of_papers_frontier)

    def _so_far(self, search: CurveSearch) -> Frontier:
        """What is known of the points at this moment, for another thread than the one that searches."""
        known = copy(self)
        known._devices = self._devices.part(np.arange(self._devices.positions.size), self._devices.gap)
        known._devices.share_bounds()
        known.stopped_by = StoppedBy.INTERRUPT
        known.stats = search.added_to(self.stats)
        return known

    def _preferred_plan(self, devices: int, value_s: float) -> Plan:
        instance = self.instance.replace(devices=devices)
        preparation = self._prepare(instance)
        problem = preparation.problem(instance)
        with closing(LocalBackend(self.options.threads)) as backend:
            outcome = evaluate_threshold(problem, backend, value_s, fewest_stages=True)
        if not outcome.feasible:
            raise Inexact(f"stages that are to take {value_s:.6g} s do not")
        return Planning(instance, preparation.contraction).plan(problem, outcome.stages)

    def _budget_curve(self, budgets: Sequence[int]) -> Curve:
        if self.reason is not None:
            return Curve.without_plans(True, budgets, self.instance.devices)
        problem = self._prepare(self.instance).problem(self.instance)
        curve = Curve.along_sums(problem, budgets, self.options.gap)
        self._run(self._new_search(), curve)
        return curve

    def _new_search(self) -> CurveSearch:
        return CurveSearch(
            self.instance,
            self._prepare(self.instance),
            self.options.threads,
            Limits.of(self.options, self._started_s, self._stop),
            self._listener,
            self._started_s,
            self.stats.evaluations,
        )

    def _run(self, search: CurveSearch, curve: Curve) -> None:
        self.stopped_by = search.run(curve) or self.stopped_by
        self.stats = search.added_to(self.stats)

    def _prepare(self, instance: Instance) -> CurvePreparation:
        """The tables for the variants that the instance's devices allow, with all replicas that any devices do."""
        degrees = self._degrees(instance)
        if degrees not in self._preparations:
            larger = (degree - 1 for degree in self.instance.degrees if degree > instance.devices)
            most = min((self.instance.devices, *larger))
            limit_bytes = self.options.memory_limit_bytes
            made = CurvePreparation.of(self.instance.replace(devices=most), self.restrictions, limit_bytes)
            self._preparations[degrees] = made
        return self._preparations[degrees]

    def _degrees(self, instance: Instance) -> tuple[int, ...]:
        """What tells the variants of one number of devices from those of another."""
        return tuple(degree for degree in instance.degrees if degree <= instance.devices)
