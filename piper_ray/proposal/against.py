"""The user's own plan, valued in the same way as the plan that was found."""

from __future__ import annotations

from dataclasses import dataclass, replace

from piper_ray.model.plan import Plan
from piper_ray.model.schedule import Schedule
from piper_ray.proposal.demand import PlanDemand, Proposed
from piper_ray.proposal.propose import FoundPlans
from piper_ray.simulate.run import SimulationOptions, Transfers, simulate
from piper_ray.workloads.estimate.build import Estimate, EstimateRequest


@dataclass(frozen=True)
class Theirs:
    """The user's own plan, priced.

    name: the file's name. plan: carries the best plan's solution, since nothing is proved of this one. notes: parts of
    the layout that the plan does not hold. hosts_hold: whether the nodes' own memory suffices for the state that the
    plan keeps there.
    """

    name: str
    plan: Proposed
    notes: tuple[str, ...]
    hosts_hold: bool = True

    @property
    def fits(self) -> bool:
        """Whether devices and nodes have enough memory for it."""
        return self.hosts_hold and not self.plan.simulation.memory_violations


def demand_of(
    demand: PlanDemand,
    samples: int | None,
    contexts: tuple[int, ...],
    experts: tuple[int, ...],
    expert_tensor: int,
    on_host: bool,
) -> PlanDemand:
    """The demand, extended by the ways to run layers that a layout may use.

    samples: samples of a microbatch; None: any number. on_host: the layout keeps the optimizer's state in host memory.
    """

    def extended(request: EstimateRequest) -> EstimateRequest:
        offer = replace(
            request.offer,
            contexts=tuple(sorted({*request.offer.contexts, *contexts})),
            experts=tuple(sorted({*request.offer.experts, *experts})),
            expert_tensor=expert_tensor if expert_tensor > 1 else request.offer.expert_tensor,
        )
        return replace(request, offer=offer, samples=samples, optimizer_on_host=on_host)

    return demand.changed(extended)


def priced(
    proposal: FoundPlans,
    estimate: Estimate,
    samples: int,
    plan: Plan,
    schedule: Schedule,
    transfers: Transfers,
    flushes: int = 1,
) -> Proposed:
    """The user's plan, priced by the estimate on GPUs with all their memory, from one flush of the pipelines to the
    next.

    transfers: how the launch transfers tensors. Transfers that overlap with passes are charged within passes, as in all
    plans that this one is compared with. flushes: how many flushes a batch has.
    """
    instance = estimate.instance.replace(microbatches=estimate.instance.microbatches // flushes)
    estimate = replace(estimate, instance=instance)
    charged = Transfers.IN_PASSES if transfers.overlaps else transfers
    options = replace(SimulationOptions.of(proposal.demand.step), transfers=charged)
    simulation = simulate(instance, plan, schedule, options=options)
    return replace(proposal.best, samples=samples, estimate=estimate, plan=plan, simulation=simulation)
