"""Plans for several clusters: types of GPU, numbers of nodes, batches or headrooms. Each has its own search."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from piper_ray.model.errors import InfeasibleError, UsageError
from piper_ray.model.restrictions import odd_part
from piper_ray.model.stop import Stop
from piper_ray.proposal.cells import Watch, unwatched
from piper_ray.proposal.demand import PlanDemand, Tell
from piper_ray.proposal.propose import FoundPlans, propose


@dataclass(frozen=True)
class ClusterPlan:
    """The result of a search for one cluster: the plans in ``found``, or the reason why there are none."""

    demand: PlanDemand
    found: FoundPlans | None
    reason: str = ""


def plans_of(
    demands: Iterable[PlanDemand], stop: Stop[Any], tell: Tell | None = None, watch: Watch = unwatched
) -> Iterator[ClusterPlan]:
    """The best plan for each demand. Plans that are already known start the next search on the same GPUs. Raises
    StopSearch."""
    known: list[FoundPlans] = []
    for demand in demands:
        try:
            found = _after(known, demand, stop, tell, watch)
        except (InfeasibleError, UsageError) as error:
            yield ClusterPlan(demand, None, str(error).partition("\n")[0])
        else:
            known.append(found)
            yield ClusterPlan(demand, found)
        if stop.requested:
            return


def _after(known: list[FoundPlans], demand: PlanDemand, stop: Stop[Any], tell: Tell | None, watch: Watch) -> FoundPlans:
    """The best plan, found with the help of earlier demands' plans.

    If this demand only has less memory than an earlier one, the earlier bound holds here, and the earlier best plan, if
    it fits, is still the best.
    """
    alike = [one for one in known if (one.demand.gpu, one.demand.devices) == (demand.gpu, demand.devices)]
    roomier = [one for one in alike if replace(one.demand, headroom=demand.headroom) == demand]
    if roomier:
        before = roomier[-1]
        instance = before.best.instance
        limit_bytes = demand.planned_bytes(before.demand.whole_bytes(instance.memory_bytes))
        if before.best.simulation.peak_memory_bytes <= limit_bytes <= instance.memory_bytes:
            best = before.best.on(instance.replace(memory_bytes=limit_bytes), demand.step)
            return replace(before, demand=demand, found=(best,), seconds=0.0)
    plans = [one.best for one in alike]
    found = propose(demand, stop.part(), tell, watch, listed=1, known=plans)
    bounds_s = [one.lower_s for one in roomier if one.best.instance.memory_bytes >= found.best.instance.memory_bytes]
    return replace(found, lower_s=max([found.lower_s, *bounds_s]))


_MOST_BATCHES = 12


def batches_between(low: int, high: int, devices: int) -> tuple[int, ...]:
    """Batches from ``low`` to ``high``: both ends, the roundest number between them, and multiples of the odd part of
    the number of devices times a power of two, which replicas can divide in many ways. The power of two is the least
    that leaves at most a dozen batches."""
    step, roundest = odd_part(devices), 1
    while high // step - (low - 1) // step > _MOST_BATCHES - 3:
        step *= 2
    while high // (2 * roundest) > (low - 1) // (2 * roundest):
        roundest *= 2
    between = range(-(-low // step) * step, high + 1, step)
    return tuple(sorted({low, high, high // roundest * roundest, *between}))
