"""A plan's figures for people: speed, shares of the peak rate, days and cost."""

from __future__ import annotations

from dataclasses import dataclass

from piper_ray.model.constraints import choices_made
from piper_ray.model.mode import Recomputation
from piper_ray.proposal.demand import Proposed
from piper_ray.workloads.estimate.roofline import hardware_flop

_HOURS_PER_DAY, _S_PER_HOUR = 24.0, 3600.0


@dataclass(frozen=True)
class Figures:
    """A plan's figures for people.

    mfu, hfu: shares of the peak rate of all devices of the cluster, idle ones included, by the definitions of
    ``estimate.roofline``. devices: the number that the plan uses. tokens_per_s_per_device: for each device of the
    cluster. tokens_per_s: None if a sample has no tokens. days, cost: those of the training that the user asked about;
    None if none.

    >>> import piper_ray
    >>> planned = piper_ray.plan("bert-large", "A100-80", microbatch_size=8, schedule="1f1b", zero=1)  # doctest: +SKIP
    >>> planned.figures.tokens_per_s  # doctest: +SKIP
    """

    step_s: float
    samples_per_s: float | None
    tokens_per_s: float | None
    devices: int
    mfu: float
    hfu: float
    days: float | None
    cost: float | None
    tokens_per_s_per_device: float | None


def figures_of(proposed: Proposed, tokens: float | None = None, price_per_hour: float | None = None) -> Figures:
    """The figures of a plan. tokens: those of the whole training. price_per_hour: the price of one GPU, in any
    currency."""
    simulation, estimate = proposed.simulation, proposed.estimate
    peak_flop = estimate.peak_flop_per_s * simulation.step_s
    tokens_per_s = simulation.tokens_per_s
    days = cost = None
    if tokens is not None and tokens_per_s is not None:
        days = tokens / tokens_per_s / _S_PER_HOUR / _HOURS_PER_DAY
        if price_per_hour is not None:
            cost = days * _HOURS_PER_DAY * estimate.devices * price_per_hour
    return Figures(
        step_s=simulation.step_s,
        samples_per_s=simulation.samples_per_s,
        tokens_per_s=tokens_per_s,
        devices=simulation.devices,
        mfu=estimate.model_flop / peak_flop,
        hfu=_hardware_flop(proposed) / peak_flop,
        days=days,
        cost=cost,
        tokens_per_s_per_device=None if tokens_per_s is None else tokens_per_s / estimate.devices,
    )


def _hardware_flop(proposed: Proposed) -> float:
    """The hardware FLOP of a step, with the layers that this plan recomputes."""
    nodes, again = proposed.estimate.architecture.nodes, 0.0
    for stage in proposed.plan.stages:
        for layer, _, tmpc in choices_made(proposed.instance, stage):
            kind = nodes[layer].kind
            again += hardware_flop(kind, tmpc.mode.recomputation) - hardware_flop(kind, Recomputation.NONE)
    return proposed.estimate.model_flop + proposed.instance.microbatches * again
