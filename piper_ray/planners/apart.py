"""Pipelines of one kind of devices each, among which the microbatches of a batch are shared out: the other way to use
devices of several kinds.

Each kind runs a plan of its own for its n_g microbatches, charged as one of as many equal sites as there are kinds
(``model.apart``), and the batch takes the longest of these. So the best sharing out minimises the largest T_g(n_g)
under a flush.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from piper_ray.cost.tolerances import PROOF
from piper_ray.engine.kernels.types import FloatArray
from piper_ray.engine.one_setting import worth_of
from piper_ray.engine.solve import solve
from piper_ray.model.apart import beside_others, of_one_kind, shared_plan
from piper_ray.model.constraints import Restrictions
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import FLUSHED, Schedule, ScheduleName, StepTerms
from piper_ray.model.solution import Solution, Status
from piper_ray.model.stop import Stop, StopSearch


@dataclass(frozen=True)
class OwnPipelines:
    """What the devices of one kind do: the number of microbatches, their plan, and the time of a batch."""

    kind: str
    microbatches: int
    plan: Plan
    batch_s: float


@dataclass(frozen=True)
class KindsApart:
    """parts: of the kinds that do anything. least_s: no sharing out takes less. It is below ``batch_s`` if the search
    for a kind's plan ended with a gap."""

    parts: tuple[OwnPipelines, ...]
    least_s: float

    @property
    def batch_s(self) -> float:
        return max((part.batch_s for part in self.parts), default=math.inf)

    @property
    def plan(self) -> Plan:
        """All parts as one plan."""
        return shared_plan([(part.kind, part.microbatches, part.plan) for part in self.parts])

    def instead_of(self, solution: Solution, microbatches: int) -> Solution:
        """The answer of both searches: the solution of one pipeline, or this if it is faster."""
        value_s = self.batch_s / microbatches
        if solution.time_per_sample_s is not None and solution.time_per_sample_s <= value_s:
            return solution
        lower_s = min(solution.lower_bound_s, self.least_s / microbatches)
        status = Status.OPTIMAL if lower_s >= value_s * (1.0 - PROOF) else Status.FEASIBLE
        found = replace(solution, status=status, time_per_sample_s=value_s, lower_bound_s=lower_s, plan=self.plan)
        return replace(found, infeasibility=None)


def kinds_apart(
    instance: Instance,
    restrictions: Restrictions = Restrictions(),
    schedule: ScheduleName = ScheduleName.ONE_F_ONE_B,
    step: StepTerms = StepTerms(),
    options: SolveOptions = SolveOptions(),
    stop: Stop[Any] | None = None,
    within_s: float = math.inf,
) -> KindsApart | None:
    """The best sharing out, within the gaps of its plans; None where none fits. within_s: of a batch; where none takes
    less, the search ends with that bound, and without parts.

    Raises UsageError for devices of one kind, or another schedule, and StopSearch where it is to end before.
    """
    if not instance.cluster.kinds:
        raise UsageError("devices are of one kind: there are no others to share a batch with")
    if schedule not in FLUSHED:
        raise UsageError(f"pipelines of one kind each are for 1f1b and gpipe, not {schedule.value}")
    wanted, names = instance.microbatches, sorted(instance.cluster.kind_names)
    ways = list[tuple[_OfKind, ...]]()
    for count in range(1, len(names) + 1):
        known: dict[str, _OfKind] = {}  # equal kinds take equally long
        found = [_OfKind.of(instance, kind, count, restrictions, schedule, step, known) for kind in names]
        ways += list(combinations(found, count))
    own = replace(options, resume=None)
    while True:
        value_s, split = min((_least(some, wanted) for some in ways), key=lambda one: one[0])
        if value_s == math.inf:
            return None
        if value_s >= within_s:
            return KindsApart((), value_s)
        unknown = [(one.least_s[n], one, n) for one, n in split if n not in one.plans]
        if not unknown:
            return KindsApart(tuple(one.part(n) for one, n in split), value_s)
        _, one, n = max(unknown, key=lambda part: part[0])
        if not one.bound(n):
            one.solve(n, own, stop)


def _least(some: Sequence[_OfKind], microbatches: int) -> tuple[float, list[tuple[_OfKind, int]]]:
    """The sharing out among these kinds of the least bound, and that; each has one microbatch at least."""
    tables = [some[0].least_s]  # float64[N + 1] each, by the microbatches of the kinds so far
    for one in some[1:-1]:
        table = np.full(microbatches + 1, math.inf)
        for n in range(2, microbatches + 1):
            table[n] = _either(tables[-1], one, n).min()
        tables.append(table)
    split, left, longest_s = list[tuple[_OfKind, int]](), microbatches, 0.0
    for one, before in zip(some[:0:-1], tables[::-1], strict=False):
        if left < 2:
            return math.inf, []
        n = 1 + int(_either(before, one, left).argmin())
        split.append((one, n))
        left, longest_s = left - n, max(longest_s, float(one.least_s[n]))
    return max(longest_s, float(some[0].least_s[left])), [(some[0], left), *split[::-1]]


def _either(before: FloatArray, one: _OfKind, microbatches: int) -> FloatArray:
    """float64[N - 1]: how long kinds take to share ``microbatches``, if the last one has 1, 2, .. of them."""
    found: FloatArray = np.maximum(before[microbatches - 1 : 0 : -1], one.least_s[1:microbatches])
    return found


@dataclass(eq=False)
class _OfKind:
    """What is known of one kind, where ``kinds`` kinds have microbatches. instance: that of as many equal sites; None
    where the kind cannot run some layer. least_s: float64[N + 1], by microbatches, what no plan
    takes less than. is_rough: where a sharper bound is at hand. solved: the numbers for which plans were sought. plans:
    those that were found, with the batch's time.
    """

    kind: str
    kinds: int
    instance: Instance | None
    restrictions: Restrictions
    schedule: ScheduleName
    step: StepTerms
    least_s: FloatArray
    is_rough: list[bool]
    solved: set[int]
    plans: dict[int, tuple[Plan, float]]

    @classmethod
    def of(
        cls,
        whole: Instance,
        kind: str,
        kinds: int,
        restrictions: Restrictions,
        schedule: ScheduleName,
        step: StepTerms,
        known: dict[str, _OfKind],
    ) -> _OfKind:
        """All devices together do the work of each microbatch. known: by digest, of kinds whose equals know as much."""
        own, numbers = beside_others(whole, kind, kinds), np.arange(whole.microbatches + 1.0)
        if own is not None and own.digest in known:
            return replace(known[own.digest], kind=kind)
        device_s = 0.0
        for layer in () if own is None else own.layers:
            device_s += min(t * x.time_per_sample_s for t, row in layer.tmpcs.items() for x in row)
        least_s = np.full(numbers.size, math.inf)
        if own is not None:
            least_s[1:] = numbers[1:] * (kinds * device_s / own.devices * (1.0 - PROOF))
        found = cls(kind, kinds, own, restrictions, schedule, step, least_s, [True] * numbers.size, set(), {})
        if own is not None:
            known[own.digest] = found
        return found

    def part(self, n: int) -> OwnPipelines:
        """What was found for ``n`` microbatches."""
        plan, batch_s = self.plans[n]
        return OwnPipelines(self.kind, n, of_one_kind(plan, self.kind, self.kinds), batch_s)

    def bound(self, n: int) -> bool:
        """Finds a closer bound if there is one.

        With d replicas a plan takes no longer for fewer microbatches: without the last one of a replica, each stage has
        the rest of its list of passes. So no plan for ``n`` is faster than what is proved of fewer, of each d that n
        allows, for the best number of those that d divides.
        """
        assert self.instance is not None
        some, before_s = self.instance.replace(microbatches=n * self.kinds), self.least_s[n]
        if self.is_rough[n]:
            worth = worth_of(some, self.restrictions, Schedule.of(self.schedule), self.step)
            self.least_s[n], self.is_rough[n] = max(before_s, n * self.kinds * worth.least_s), False
        fewer = {other: self.least_s[other] for other in self.solved if other < n}
        of_degrees = [
            max((least_s for other, least_s in fewer.items() if other * self.kinds % d == 0), default=0.0)
            for d in self.restrictions.data_parallel_degrees(some)
        ]
        self.least_s[n] = max(self.least_s[n], min(of_degrees, default=0.0))
        return bool(self.least_s[n] > before_s)

    def solve(self, n: int, options: SolveOptions, stop: Stop[Any] | None) -> None:
        """Finds the best plan for ``n`` microbatches."""
        assert self.instance is not None
        self.solved.add(n)
        found = solve(
            self.instance.replace(microbatches=n * self.kinds),
            restrictions=self.restrictions,
            options=options,
            schedule=self.schedule,
            step=self.step,
            stop=None if stop is None else stop.part(),
        )
        if found.stopped_by is not None and (found.stopped_by.ends_all or found.plan is None):
            raise StopSearch(found.stopped_by)
        if found.plan is None or found.time_per_sample_s is None:
            self.least_s[n] = math.inf
        else:
            self.least_s[n] = max(self.least_s[n], n * self.kinds * found.lower_bound_s)
            self.plans[n] = found.plan, n * self.kinds * found.time_per_sample_s
