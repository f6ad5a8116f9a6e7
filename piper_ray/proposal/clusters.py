"""Plans for several clusters: types of GPU, numbers of nodes, batches or headrooms. Each has its own search."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from piper_ray.model.constraints import odd_part
from piper_ray.model.errors import InfeasibleError, UsageError
from piper_ray.model.stop import Stop
from piper_ray.proposal.cells import Cells, Watch, unwatched
from piper_ray.proposal.demand import PlanDemand, Tell
from piper_ray.proposal.forks import each_of
from piper_ray.proposal.moved import Moved, moved_between
from piper_ray.proposal.propose import FoundPlans, priced, propose


@dataclass(frozen=True)
class ClusterPlan:
    """The result of a search for one cluster: ``found`` has the best plan and no combinations; None: ``reason`` says
    why there is no plan."""

    demand: PlanDemand
    found: FoundPlans | None
    reason: str = ""

    @property
    def nodes(self) -> dict[str, int]:
        """The nodes of each kind or site."""
        return {name: one.nodes for name, _, one in self.demand.kinds}

    def moved_from(self, before: ClusterPlan) -> Moved:
        """What moving to this plan takes."""
        assert before.found is not None
        assert self.found is not None
        kind, *others = self.nodes if self.demand.further else [""]
        return moved_between(before.found.best, self.found.best, "" if others else kind)


def plans_of(
    demands: Iterable[PlanDemand],
    stop: Stop[Any],
    tell: Tell | None = None,
    watch: Watch = unwatched,
    like: FoundPlans | None = None,
) -> Iterator[ClusterPlan]:
    """The best plan for each demand. Plans that are already known start the next search on the same GPUs; searches on
    other GPUs each have a process. like: as of ``propose``. Raises StopSearch."""
    asked, known, tell = list(demands), list[FoundPlans](), tell or (lambda _: None)
    if len(set(map(_gpus, asked))) == len(asked):
        likes = _priced_once(asked, stop) if like is None else [like] * len(asked)
        calls = [partial(_alone, demand, stop, one) for demand, one in zip(asked, likes, strict=True)]
        for plan, notes in each_of(calls, stop, watch):
            for text in notes:
                tell(text)
            yield plan
        return
    for demand in asked:
        plan = _planned(demand, known, stop, tell, watch)
        if plan.found is not None:
            known.append(plan.found)
        yield plan
        if stop.requested:
            return


def _gpus(demand: PlanDemand) -> tuple[tuple[str, str, int], ...]:
    """The name, the GPU and the nodes of each kind or site."""
    return tuple((name, gpu, one.nodes) for name, gpu, one in demand.kinds)


def _priced_once(asked: Sequence[PlanDemand], stop: Stop[Any]) -> list[FoundPlans | None]:
    """For each demand the combinations of the largest one that it ``prices_like``, if there are several such."""
    demands, likes = [one.with_batch(lambda _: None) for one in asked], list[FoundPlans | None]([None] * len(asked))
    for number in sorted(range(len(demands)), key=lambda number: -demands[number].devices):
        if likes[number] is None:
            with suppress(InfeasibleError, UsageError):  # which the search says
                alike = [other for other, one in enumerate(demands) if one.prices_like(demands[number])]
                made = priced(demands[number], stop) if len(alike) > 1 else None
                for other in alike:
                    likes[other] = likes[other] or made
    return likes


def _alone(demand: PlanDemand, stop: Stop[Any], like: FoundPlans | None, watch: Watch) -> tuple[ClusterPlan, list[str]]:
    """The best plan, and the notes on the way to it."""
    notes: list[str] = []
    return _planned(demand, [], stop, notes.append, watch, like), notes


def _planned(
    demand: PlanDemand,
    known: list[FoundPlans],
    stop: Stop[Any],
    tell: Tell,
    watch: Watch,
    like: FoundPlans | None = None,
) -> ClusterPlan:
    try:
        found = _after(known, demand, stop, tell, watch, like)
    except (InfeasibleError, UsageError) as error:
        return ClusterPlan(demand, None, str(error).partition("\n")[0])
    # Combinations are of no more interest, and large.
    return ClusterPlan(demand, replace(found, found=found.found[:1], cells=Cells((), (), ())))


def _after(
    known: list[FoundPlans],
    demand: PlanDemand,
    stop: Stop[Any],
    tell: Tell,
    watch: Watch,
    like: FoundPlans | None,
) -> FoundPlans:
    """The best plan, found with the help of earlier demands' plans.

    If this demand only has less memory than an earlier one, the earlier bound holds here, and the earlier best plan, if
    it fits, is still the best.
    """
    alike = [one for one in known if _gpus(one.demand) == _gpus(demand)]
    roomier = [one for one in alike if replace(one.demand, headroom=demand.headroom) == demand]
    if roomier:
        before = roomier[-1]
        instance = before.best.instance
        limit_bytes = demand.planned_bytes(before.demand.whole_bytes(instance.memory_bytes))
        if before.best.simulation.peak_memory_bytes <= limit_bytes <= instance.memory_bytes:
            best = before.best.on(instance.replace(memory_bytes=limit_bytes), demand.step)
            return replace(before, demand=demand, found=(best,))
    plans = [one.best for one in alike]
    found = propose(demand, stop.part(), tell, watch, listed=1, known=plans, like=like)
    bounds_s = [one.lower_s for one in roomier if one.best.instance.memory_bytes >= found.best.instance.memory_bytes]
    return replace(found, lower_s=max([found.lower_s, *bounds_s]))


def with_nodes_before(plans: Iterable[ClusterPlan]) -> Iterator[tuple[ClusterPlan, ClusterPlan | None]]:
    """Each cluster with the last one before it that has a plan, and as many nodes of each kind or more."""
    known: list[ClusterPlan] = []
    for one in plans:
        more = (x for x in reversed(known) if all(x.nodes.get(name, 0) >= n for name, n in one.nodes.items()))
        yield one, next(more, None)
        if one.found is not None:
            known.append(one)


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
