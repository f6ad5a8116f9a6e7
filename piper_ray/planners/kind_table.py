"""Optima for numbers of devices of two kinds, each number of the one with each of the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from piper_ray.cost.tolerances import PROOF
from piper_ray.engine.frontier.ranges import parse_numbers
from piper_ray.engine.solve import solve
from piper_ray.model.cluster import Cluster
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.plan import Plan
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import Schedule, ScheduleName, StepTerms
from piper_ray.model.solution import Solution, Status
from piper_ray.model.stop import Stop

Counts = tuple[int, int]
"""Devices of the first kind, and of the second."""


@dataclass(frozen=True)
class KindPoint:
    """What is known of so many devices of each kind. time_per_sample_s, plan: None where none is known. solved: whether
    this was solved, and does not follow from more devices."""

    devices: Counts
    time_per_sample_s: float | None
    lower_bound_s: float
    plan: Plan | None
    solved: bool

    @property
    def status(self) -> Status:
        """Optimal where the bound is met, by a plan or by none."""
        if self.time_per_sample_s is None:
            return Status.INFEASIBLE if self.lower_bound_s == math.inf else Status.UNKNOWN
        proved = self.time_per_sample_s * (1.0 - PROOF) <= self.lower_bound_s
        return Status.OPTIMAL if proved else Status.FEASIBLE


def numbers_of(instance: Instance, text: str | None) -> dict[str, tuple[int, ...]]:
    """The numbers of each of two kinds, of a text such as ``A100-80=8,16 H100-SXM=8..64:8``; without one, and of kinds
    that it leaves out, whole nodes. Raises UsageError."""
    kinds = {kind.name: kind.cluster for kind in instance.cluster.kinds}
    if len(kinds) != 2:
        raise UsageError(f"a table is of two kinds of devices, and {len(kinds)} are there")
    found = {name: _whole_nodes(own) for name, own in kinds.items()}
    for part in () if text is None else text.split():
        name, equals, numbers = part.rpartition("=")
        if not equals or name not in kinds:
            example = " ".join(f"{kind}={own[-1]}" for kind, own in found.items())
            raise UsageError(f"--devices {text}: {part!r}; expected numbers of each kind, as '{example}'")
        found[name] = parse_numbers(numbers, f"--devices {name}")
        if found[name][-1] > kinds[name].devices:
            raise UsageError(f"--devices {part}: there are {kinds[name].devices:,} {name}; expected no more")
    return found


def _whole_nodes(own: Cluster) -> tuple[int, ...]:
    node = own.node_devices or own.links[0].devices or 1
    return tuple(range(min(node, own.devices), own.devices + 1, node))


def kind_table(
    instance: Instance,
    numbers: Mapping[str, Sequence[int]],
    restrictions: Restrictions = Restrictions(),
    schedule: Schedule | ScheduleName | str | None = None,
    options: SolveOptions = SolveOptions(),
    step: StepTerms = StepTerms(),
    stop: Stop[Any] | None = None,
    tell: Callable[[KindPoint], None] = lambda _: None,
) -> tuple[KindPoint, ...]:
    """Each pair of numbers, rising. ``tell`` hears of each point once it is closed, the most devices first.

    A plan that is the best of more devices, and has room on fewer, is the best of these. Where a solve ended early,
    what no plan of more devices takes less than holds, and a plan of fewer is a plan. Raises UsageError.
    """
    found: dict[Counts, KindPoint] = {}
    first, second = numbers.values()
    for counts in sorted(product(first, second), reverse=True):
        larger = [found[other] for other in found if other[0] >= counts[0] and other[1] >= counts[1]]
        lower_s = max((one.lower_bound_s for one in larger), default=0.0)
        fitting = [one for one in larger if one.status is Status.OPTIMAL and _fits(one.plan, numbers, counts)]
        if lower_s == math.inf:
            point = KindPoint(counts, None, lower_s, None, solved=False)
        elif fitting:
            point = replace(fitting[0], devices=counts, solved=False)
        else:
            some = instance.replace(cluster=_with_devices(instance.cluster, dict(zip(numbers, counts, strict=True))))
            part = None if stop is None else stop.part()
            solution = solve(some, restrictions=restrictions, options=options, schedule=schedule, step=step, stop=part)
            point = _point(counts, solution, lower_s)
        found[counts] = point
        tell(point)
        if stop is not None and stop.requested:
            break
    return tuple(_with_plans_of_fewer(found))


def _point(counts: Counts, solution: Solution, lower_s: float) -> KindPoint:
    bound_s = math.inf if solution.status is Status.INFEASIBLE else max(lower_s, solution.lower_bound_s)
    return KindPoint(counts, solution.time_per_sample_s, bound_s, solution.plan, solved=True)


def _fits(plan: Plan | None, numbers: Mapping[str, Sequence[int]], counts: Counts) -> bool:
    used = dict.fromkeys(numbers, 0)
    for stage in () if plan is None else plan.stages:
        used[stage.kind] += stage.devices
    return all(used[name] <= there for name, there in zip(numbers, counts, strict=True))


def _with_devices(cluster: Cluster, devices: Mapping[str, int]) -> Cluster:
    assert cluster.between_bytes_per_s is not None
    kinds = [replace(one, cluster=replace(one.cluster, devices=devices[one.name])) for one in cluster.kinds]
    return Cluster.of_kinds(kinds, cluster.between_bytes_per_s)


def _with_plans_of_fewer(found: Mapping[Counts, KindPoint]) -> Iterator[KindPoint]:
    """Rising; each with the fastest plan of those for no more devices of either kind."""
    for counts in sorted(found):
        fewer = [one for other, one in found.items() if other[0] <= counts[0] and other[1] <= counts[1]]
        best = min((one for one in fewer if one.time_per_sample_s is not None), key=_time, default=None)
        own = found[counts]
        if best is None or (own.time_per_sample_s is not None and own.time_per_sample_s <= _time(best)):
            yield own
        else:
            yield replace(own, time_per_sample_s=best.time_per_sample_s, plan=best.plan)


def _time(point: KindPoint) -> float:
    return math.inf if point.time_per_sample_s is None else point.time_per_sample_s
