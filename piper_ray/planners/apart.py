"""Pipelines of one kind of devices each, among which the microbatches of a batch are shared out: the other way to use
devices of several kinds.

Each kind runs a plan of its own for its n_g microbatches, and the batch takes the longest of these and the sum of the
gradients of the kinds: as between that many replicas whose devices each hold a share of all weights, of the kind that
has the fewest, at the rate between kinds. So the best sharing out minimises the largest T_g(n_g) under a flush.
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
from piper_ray.model.apart import on_kind
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.plan import Plan
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import FLUSHED, Schedule, ScheduleName, StepTerms
from piper_ray.model.stop import Stop, StopSearch


@dataclass(frozen=True)
class OwnPipelines:
    """What the devices of one kind do alone: the number of microbatches, their plan, and the time of a batch."""

    kind: str
    microbatches: int
    plan: Plan
    batch_s: float


@dataclass(frozen=True)
class KindsApart:
    """parts: of the kinds that do anything. sync_s: what their gradients take. least_s: no sharing out takes less. It
    is below ``batch_s`` if the search for a kind's plan ended with a gap. solves: how many plans were sought."""

    parts: tuple[OwnPipelines, ...]
    sync_s: float
    least_s: float
    solves: int

    @property
    def batch_s(self) -> float:
        return max(part.batch_s for part in self.parts) + self.sync_s


def sync_of(instance: Instance, kinds: Sequence[str], step: StepTerms) -> float:
    """Seconds that summing the gradients of all kinds takes. Weights count as the layers' leanest TMPCs have
    them."""
    if len(kinds) < 2:
        return 0.0
    weights_bytes = sum(
        min(t * tmpc.weights_bytes for t, row in layer.tmpcs.items() for tmpc in row) for layer in instance.layers
    )
    fewest = min(instance.cluster.of_kind(kind).devices for kind in kinds)
    share = (len(kinds) - 1) / len(kinds) * step.all_reduce.factor * (1.0 - step.all_reduce_overlap)
    return share * weights_bytes / fewest / instance.cluster.rate_between(*kinds[:2])


def kinds_apart(
    instance: Instance,
    restrictions: Restrictions = Restrictions(),
    schedule: ScheduleName = ScheduleName.ONE_F_ONE_B,
    step: StepTerms = StepTerms(),
    options: SolveOptions = SolveOptions(),
    stop: Stop[Any] | None = None,
) -> KindsApart | None:
    """The best sharing out, within the gaps of its plans; None where none fits.

    Raises UsageError for devices of one kind, or another schedule, and StopSearch where it is to end before.
    """
    if not instance.cluster.kinds:
        raise UsageError("devices are of one kind: there are no others to share a batch with")
    if schedule not in FLUSHED:
        raise UsageError(f"pipelines of one kind each are for 1f1b and gpipe, not {schedule.value}")
    found = [_OfKind.of(instance, kind, restrictions, schedule, step) for kind in sorted(instance.cluster.kind_names)]
    wanted = instance.microbatches
    ways = [
        (sync_of(instance, [one.kind for one in some], step), some)
        for count in range(1, len(found) + 1)
        for some in combinations(found, count)
    ]
    solves, own = 0, replace(options, resume=None)
    while True:
        value_s, sync_s, split = min(
            (
                (longest_s + sync_s, sync_s, split)
                for sync_s, some in ways
                for longest_s, split in [_least(some, wanted)]
            ),
            key=lambda one: one[0],
        )
        if value_s == math.inf:
            return None
        unknown = [(one.least_s[n], one, n) for one, n in split if n not in one.plans]
        if not unknown:
            return KindsApart(tuple(one.plans[n] for one, n in split), sync_s, value_s, solves)
        _, one, n = max(unknown, key=lambda part: part[0])
        if one.is_rough[n]:
            one.bound(n)
        else:
            solves += 1
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
    """float64[N - 1]: how long kinds take that share so many, where the last has 1, 2, .. of them."""
    found: FloatArray = np.maximum(before[microbatches - 1 : 0 : -1], one.least_s[1:microbatches])
    return found


@dataclass(eq=False)
class _OfKind:
    """What is known of one kind's devices. least_s: float64[N + 1], by microbatches, what no plan takes less than.
    is_rough: where a sharper bound is at hand. plans: those that were sought."""

    kind: str
    instance: Instance | None
    restrictions: Restrictions
    schedule: ScheduleName
    step: StepTerms
    least_s: FloatArray
    is_rough: list[bool]
    plans: dict[int, OwnPipelines]

    @classmethod
    def of(
        cls, whole: Instance, kind: str, restrictions: Restrictions, schedule: ScheduleName, step: StepTerms
    ) -> _OfKind:
        """All devices together do the work of each microbatch."""
        own, numbers = on_kind(whole, kind), np.arange(whole.microbatches + 1.0)
        device_s = 0.0
        for layer in () if own is None else own.layers:
            device_s += min(t * x.time_per_sample_s for t, row in layer.tmpcs.items() for x in row)
        least_s = np.full(numbers.size, math.inf) if own is None else numbers * (device_s / own.devices * (1.0 - PROOF))
        least_s[0] = math.inf
        return cls(kind, own, restrictions, schedule, step, least_s, [True] * numbers.size, {})

    def bound(self, n: int) -> None:
        """A closer one."""
        assert self.instance is not None
        some = self.instance.replace(microbatches=n)
        worth = worth_of(some, self.restrictions, Schedule.of(self.schedule), self.step)
        self.least_s[n], self.is_rough[n] = max(self.least_s[n], n * worth.least_s), False

    def solve(self, n: int, options: SolveOptions, stop: Stop[Any] | None) -> None:
        """Finds the best plan for ``n`` microbatches."""
        assert self.instance is not None
        found = solve(
            self.instance.replace(microbatches=n),
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
            self.least_s[n] = max(self.least_s[n], n * found.lower_bound_s)
            self.plans[n] = OwnPipelines(self.kind, n, found.plan, n * found.time_per_sample_s)
