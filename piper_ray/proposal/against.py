"""A plan of the user's own, compared with the one that was found: valued under the same model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from piper_ray.model.plan import Plan
from piper_ray.model.schedule import Schedule
from piper_ray.proposal.demand import PlanDemand, Proposed
from piper_ray.proposal.propose import FoundPlans
from piper_ray.simulate.run import SimulationOptions, Transfers, simulate
from piper_ray.workloads.estimate.build import Estimate


@dataclass(frozen=True)
class Theirs:
    """A plan of people's own, priced. name: of its file. plan: with the best plan's solution, as nothing is proved of
    it. notes: what of the layout it does not hold. hosts_hold: whether nodes' own memory holds what it has there."""

    name: str
    plan: Proposed
    notes: tuple[str, ...]
    hosts_hold: bool = True

    @property
    def fits(self) -> bool:
        """Whether it keeps within the memory of devices and nodes."""
        return self.hosts_hold and not self.plan.simulation.memory_violations


def demand_of(
    demand: PlanDemand,
    samples: int | None,
    contexts: tuple[int, ...],
    experts: tuple[int, ...],
    expert_tensor: int,
    on_host: bool,
) -> PlanDemand:
    """The demand with the ways to run layers that a layout may use. samples: of its microbatches; None: any. on_host:
    it has the optimizer's state in host memory."""
    offer = demand.request.offer
    offer = replace(
        offer,
        contexts=tuple(sorted({*offer.contexts, *contexts})),
        experts=tuple(sorted({*offer.experts, *experts})),
        expert_tensor=expert_tensor if expert_tensor > 1 else offer.expert_tensor,
    )
    request = replace(demand.request, offer=offer, samples=samples, optimizer_on_host=on_host)
    return replace(demand, request=request)


def priced(
    proposal: FoundPlans,
    estimate: Estimate,
    samples: int,
    plan: Plan,
    schedule: Schedule,
    transfers: Transfers,
    flushes: int = 1,
) -> Proposed:
    """Their plan under the model of the estimate, on GPUs with all their memory, from one flush of their pipelines to
    the next. transfers: of their launch; those that overlap with passes are charged in them, as in all plans that it is
    held against. flushes: how many there are in a batch."""
    instance = estimate.instance.replace(microbatches=estimate.instance.microbatches // flushes)
    estimate = replace(estimate, instance=instance)
    charged = Transfers.IN_PASSES if transfers.overlaps else transfers
    options = replace(SimulationOptions.of(proposal.demand.step), transfers=charged)
    simulation = simulate(instance, plan, schedule, options=options)
    return replace(proposal.best, samples=samples, estimate=estimate, plan=plan, simulation=simulation)
