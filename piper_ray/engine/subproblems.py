"""Makes one search of several solves: the plans are divided into sub-problems, which are solved one after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import reduce

from piper_ray.cost.plan import cost_of
from piper_ray.cost.tolerances import PROOF
from piper_ray.engine.ledger import TIE, Ledger, Limits, status_of
from piper_ray.engine.request import SolveRequest
from piper_ray.engine.search.planning import ValuedPlan
from piper_ray.model.errors import LimitError
from piper_ray.model.events import PartBegun
from piper_ray.model.figures import plural
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import PAPERS_SCHEDULE
from piper_ray.model.solution import DegreeStats, Solution, SolveStats, Status
from piper_ray.model.stop import Stop, StoppedBy, StopSearch

Solver = Callable[[SolveRequest], Solution]


@dataclass
class SubProblem:
    """One of several solves. least_s: a bound for its plans. name: what its plans are, in words; "": it is not
    reported."""

    least_s: float
    request: SolveRequest
    name: str
    found: Solution | None = None
    stop: Stop[Solution] = field(default_factory=Stop)

    @property
    def answer(self) -> Solution | None:
        """The answer that is known now; None before it begins."""
        return self.stop.answer() if self.found is None else self.found


def numbered(what: str, names: Sequence[str]) -> list[str]:
    """Returns names of sub-problems for events; empty if there is only one. what: the reason for them, in words."""
    count = len(names)
    return [f"{number} of {count}, {what}: {name}" if count > 1 else "" for number, name in enumerate(names, start=1)]


def best_of(request: SolveRequest, parts: Sequence[SubProblem], solve: Solver, *, are_nested: bool = False) -> Solution:
    """Returns the best answer of several solves, the most promising first. Each but the first ends once none of its
    plans can beat the best one, and does not begin if its bound shows this.

    are_nested: all plans are also plans of the first, at other costs: if that has none, there is none. The first may
    use all the time.
    """
    return _SubProblems(request, parts, solve, are_nested).answered()


@dataclass
class _SubProblems:
    """The rule of a search over sub-problems."""

    request: SolveRequest
    parts: Sequence[SubProblem]
    solve: Solver
    are_nested: bool = False
    left_open: StoppedBy | None = None

    def answered(self) -> Solution:
        """Solves all parts. Exceptions of the first part before its search are passed on: nothing is known then."""
        self.request.stop.offer(self._so_far)
        ledger = Ledger[ValuedPlan](limits=Limits(stop=self.request.stop))
        if (ended := self._ended_by(0)) is not None:
            return self._together(ended)
        ledger.run(self)
        return self._together(ledger.stopped_by)

    def efforts(self) -> Generator[None, None, None]:
        for index in range(1, len(self.parts)):
            if self._is_beyond(self.parts[index]):
                continue
            if (ended := self._ended_by(index)) is not None:
                raise StopSearch(ended)
            yield

    def _ended_by(self, index: int) -> StoppedBy | None:
        """Solves a part. Returns why it ended if no other part may begin. A part's time limit ends only that part."""
        reason = self._solve(index).stopped_by
        return reason if reason is not None and reason.ends_all and reason is not StoppedBy.TIME_LIMIT else None

    def _solve(self, index: int) -> Solution:
        part = self.parts[index]
        if part.name:
            self.request.listener(PartBegun(index + 1, part.name))
        others = sum(not self._is_beyond(other) for other in self.parts[index + 1 :])
        share = 1 if self.are_nested else min(2, others + 1)
        part.stop = self.request.stop.part()
        part.found = self.solve(replace(self._restricted(part, index, share), stop=part.stop))
        return part.found

    def _restricted(self, part: SubProblem, index: int, share: int) -> SolveRequest:
        """Returns the request with the part's share of the remaining time and its own checkpoint, ending when no plan
        can be better."""
        options = part.request.options
        known_s = [s for s in (self._known_s, options.within_s) if s is not None]
        resume = options.resume if options.resume is None or index == 0 else f"{options.resume}/{index + 1}"
        return replace(
            part.request,
            options=replace(options, within_s=min(known_s, default=None), resume=resume),
            started_s=self.request.started_s,
        ).in_time(share)

    @property
    def _known_s(self) -> float | None:
        times_s = [part.found.time_per_sample_s for part in self.parts if part.found is not None]
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    def _is_beyond(self, part: SubProblem) -> bool:
        """Whether no plan of the part is as fast as the best one or the limit. A part without plans begins only if no
        part has plans so far, to find the reason."""
        found = [other.found for other in self.parts if other.found is not None]
        none_so_far = all(one.status is Status.INFEASIBLE for one in found)
        if self.are_nested and found and none_so_far:
            return True
        if part.least_s == math.inf:
            return not none_so_far
        known_s, options = self._known_s, self.request.options
        # Without a gap, a plan as fast as the best one is sought too, since it may need fewer devices.
        nearly = 1.0 + TIE if options.gap == 0.0 else 1.0 - max(options.gap, PROOF)
        is_slower = known_s is not None and part.least_s >= known_s * nearly
        return is_slower or (options.within_s is not None and part.least_s > options.within_s)

    def _so_far(self) -> Solution | None:
        """Returns the answer so far, also to other threads."""
        return None if all(part.answer is None for part in self.parts) else self._together(StoppedBy.INTERRUPT)

    def _together(self, stopped_by: StoppedBy | None) -> Solution:
        answers = [part.answer for part in self.parts]
        known = [answer for answer in answers if answer is not None]
        if all(one.status is Status.INFEASIBLE for one in known) and (self.are_nested or len(known) == len(answers)):
            return replace(min(known, key=_least_memory_bytes), stats=_sum([one.stats for one in known]))
        bounds_s = [
            part.least_s if answer is None else answer.lower_bound_s
            for part, answer in zip(self.parts, answers, strict=True)
        ]
        valued = [(one.time_per_sample_s, one) for one in known if one.time_per_sample_s is not None]
        least_s = min((time_s for time_s, _ in valued), default=math.inf)
        alike = [(time_s, one) for time_s, one in valued if time_s <= least_s * (1.0 + TIE)]
        value_s, best = min(alike, key=lambda pair: rank_of(pair[1]), default=(math.inf, known[-1]))
        lower_s = min(value_s, *bounds_s)
        status = Status.UNKNOWN if not valued else status_of(value_s, lower_s)
        early = [one.stopped_by for one in known if one.stopped_by is not None]
        reason = next((one for one in early if one is not StoppedBy.TOO_SLOW), early[0] if early else None)
        of_those_left = StoppedBy.GAP if valued else StoppedBy.TOO_SLOW
        return replace(
            best,
            status=status,
            lower_bound_s=lower_s,
            stats=_sum([one.stats for one in known]),
            infeasibility=None,
            stopped_by=None if status is Status.OPTIMAL else reason or stopped_by or of_those_left,
        )


def rank_of(found: Solution) -> tuple[int, int]:
    """Returns the key by which equally fast plans are preferred: fewest devices, then stages."""
    if found.plan is None:
        return 0, 0
    return found.plan.by_rank(found.schedule).devices, len(found.plan.stages)


def _sum(stats: Sequence[SolveStats]) -> SolveStats:
    """Adds the statistics of successive solves. Sizes are those of the last."""
    return reduce(_after, stats)


def _after(first: SolveStats, second: SolveStats) -> SolveStats:
    degrees = [one.degrees for one in (first, second) if one.degrees is not None]
    return replace(
        second,
        lattice_s=first.lattice_s + second.lattice_s,
        stage_costs_s=first.stage_costs_s + second.stage_costs_s,
        search_s=first.search_s + second.search_s,
        evaluations=(*first.evaluations, *second.evaluations),
        degrees=DegreeStats(*map(sum, zip(*map(astuple, degrees), strict=True))) if degrees else None,
    )


def _least_memory_bytes(solution: Solution) -> float:
    found = None if solution.infeasibility is None else solution.infeasibility.least_memory_bytes
    return math.inf if found is None else found


def unproved(found: Solution) -> Solution:
    """Returns the solution with its plan but without a proved bound."""
    status = Status.UNKNOWN if found.plan is None else Status.FEASIBLE
    return replace(found, status=status, lower_bound_s=0.0, infeasibility=None)


def least_s(instance: Instance) -> float:
    """Returns a bound on the time per sample of any plan on these devices, under any schedule: the work alone."""
    work_s = {
        id(layer): min((t * tmpc.time_per_sample_s for t, row in layer.tmpcs.items() for tmpc in row), default=0.0)
        for layer in instance.priced_layers
    }
    return sum(work_s[id(layer.priced)] for layer in instance.layers) / instance.devices * (1.0 - PROOF)


def solve_on_levels(request: SolveRequest, solve: Solver) -> Solution:
    """Runs ``solve`` for each level of links whose plans may be the best."""
    *smaller, whole = instances(request.instance)
    on_all, restrictions = replace(request, instance=whole), request.restrictions
    if not smaller or restrictions.all_devices:
        return solve(on_all)
    parts = [SubProblem(least_s(whole), on_all, "")]
    for instance in reversed(smaller):
        if restrictions.data_parallel_degrees(instance):
            name = f"plans within {plural(instance.devices, 'device')}, on the faster link"
            parts.append(SubProblem(least_s(instance), replace(request, instance=instance), name))

    def placed(one: SolveRequest) -> Solution:
        return one.answered(solve, one, lambda found: _as_placed(request.instance, found, smaller[-1].devices))

    return best_of(request, parts, placed, are_nested=True)


def _as_placed(instance: Instance, found: Solution, most_devices: int) -> Solution:
    """Returns the solution with the plan's time within one node, if it fits in one although all devices were
    searched. Of equally fast plans the one without places is taken. most_devices: of the largest group of devices."""
    if found.plan is None or found.time_per_sample_s is None:
        return found
    plan, time_s = found.plan, found.time_per_sample_s
    if found.schedule == PAPERS_SCHEDULE:
        plans = replace(plan, places=None), plan
        time_s, number = min((cost_of(instance, one).sample_s, number) for number, one in enumerate(plans))
        plan = plans[number]
    elif plan.by_rank(found.schedule).devices <= most_devices and not plan.shares:
        simulated_s = _simulated_s(instance, plan, found)
        if simulated_s < time_s * (1.0 - PROOF):  # else they differ by rounding
            time_s = simulated_s
    if time_s > found.time_per_sample_s:
        return found
    return replace(found, plan=plan, time_per_sample_s=time_s, lower_bound_s=min(found.lower_bound_s, time_s))


def _simulated_s(instance: Instance, plan: Plan, found: Solution) -> float:
    """The time per sample of a plan under the schedule and the terms of ``found``; inf if it has too many microbatches
    to simulate."""
    from piper_ray.simulate.run import SimulationOptions, simulate

    try:
        return simulate(instance, plan, found.schedule, options=SimulationOptions.of(found.step)).time_per_sample_s
    except LimitError:
        return math.inf


def instances(instance: Instance) -> tuple[Instance, ...]:
    """Returns the instance on each level of the cluster, the whole cluster last."""
    levels = instance.cluster.levels()
    return tuple(instance if level is instance.cluster else instance.replace(cluster=level) for level in levels)
