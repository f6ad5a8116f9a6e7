"""The best plan of a model on a cluster under a runtime's rules: one search over all that ``plan`` chooses. The
user's own plan is valued in the same way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from piper_ray.model.cluster import Cluster
from piper_ray.model.constraints import divisible_batch, odd_part
from piper_ray.model.errors import InfeasibleError, PiperRayError
from piper_ray.model.figures import share_text
from piper_ray.model.headroom import NO_HEADROOM
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import Schedule
from piper_ray.model.stop import Stop
from piper_ray.proposal.cells import (
    LISTED,
    RUNNERS_UP,
    Cell,
    Cells,
    CellSearch,
    Extent,
    Watch,
    cells_of,
    unwatched,
    why_none,
)
from piper_ray.proposal.demand import PlanDemand, Proposed, Tell
from piper_ray.proposal.forks import each_of
from piper_ray.proposal.scheme_prices import SimulatedPlan, asked_at_prices
from piper_ray.simulate.run import SimulationOptions, Transfers, simulate
from piper_ray.workloads.estimate.build import Estimate, EstimateRequest

_HELP_EXTENT = Extent(1, 300_000_000, bounded=False, near=5e-4)
"""The extent of a search on another cluster: changes are shown to a tenth of a per cent."""

_BATCH_GAIN = 1.01
"""Relative gain in samples per second from which another batch is shown."""

_SCHEME_ROUNDS = 5
"""The most searches in which schemes are added that earlier plans ask for. Usually the third finds no better plan."""


@dataclass(frozen=True)
class FoundPlans:
    """The answer of ``propose``.

    found: the best plan of each cell, the fastest first; empty if the search was stopped early. cells: all
    combinations. lower_s: no plan of any cell has a shorter step. refused: what was not tried, and why. schemes_save:
    the largest share of the time of the best plan's slowest stage that other schemes of the rule table could save
    (``asked_at_prices``); None: not known.
    """

    demand: PlanDemand
    found: tuple[Proposed, ...]
    cells: Cells
    lower_s: float
    refused: tuple[str, ...]
    schemes_save: float | None = None

    @property
    def best(self) -> Proposed:
        return self.found[0]

    @property
    def listed(self) -> tuple[Proposed, ...]:
        """The best plan, then the best plans of other cells, if they are nearly as fast."""
        near = (one for one in self.found if one.step_s <= RUNNERS_UP * self.best.step_s)
        return tuple(islice(near, LISTED))

    @property
    def gap(self) -> float:
        """The relative distance from the bound of all cells to the best plan's step."""
        return 1.0 - self.lower_s / self.best.step_s


@dataclass(frozen=True)
class Help:
    """The best plan after a change; None if none was found.

    what: the change, in words. precision: the precision that the change introduces; None for other changes.
    """

    what: str
    found: Proposed | None
    precision: str | None = None

    @property
    def samples_per_s(self) -> float:
        """The gap; 0 without a plan."""
        return 0.0 if self.found is None else self.found.batch / self.found.step_s


def propose(
    demand: PlanDemand,
    stop: Stop[Any] | None = None,
    tell: Tell | None = None,
    watch: Watch = unwatched,
    listed: int = LISTED,
    known: Sequence[Proposed] = (),
    threads: int | None = None,
    like: FoundPlans | None = None,
) -> FoundPlans:
    """Searches all cells.

    tell: receives a line for each thing that is not tried. listed: how many of the best cells have their own best plan
    proved. known: plans found for other demands. threads: threads of each search without chunks; None: one for each
    core. like: combinations for another demand, which need not be priced again if only the number of nodes differs.

    Raises UsageError if nothing can be estimated, and InfeasibleError, with the reason, if no plan fits.
    """
    stop, tell = Stop[Any]() if stop is None else stop, tell or (lambda _: None)
    try:
        found = _proposed(demand, stop, tell, watch, listed, known, threads, like)
    except InfeasibleError:
        if not demand.headroom.is_usual:
            raise
        share = share_text(demand.headroom.share)
        tell(f"no plan leaves {share} of each GPU free, as published peaks ask for: sought as with --headroom 0")
        found = _proposed(replace(demand, headroom=NO_HEADROOM), stop, tell, watch, listed, known, threads)
    offered = demand.schemes
    for turn in range(_SCHEME_ROUNDS if offered is not None else 0):
        assert offered is not None
        best = SimulatedPlan(found.best.estimate, found.best.plan, found.best.simulation, demand.step)
        more, save = asked_at_prices(best, offered, stop.check)
        if more is offered or turn == _SCHEME_ROUNDS - 1:
            return replace(found, schemes_save=save)
        demand, offered = replace(found.demand, schemes=more), more
        found = _proposed(demand, stop, tell, watch, listed, (*known, *found.found), threads)
    return found


def _proposed(
    demand: PlanDemand,
    stop: Stop[Any],
    tell: Tell,
    watch: Watch,
    listed: int,
    known: Sequence[Proposed],
    threads: int | None,
    like: FoundPlans | None = None,
) -> FoundPlans:
    demand = demand.with_batch(tell)
    stop.offer(lambda: FoundPlans(demand, (), Cells((), (), ()), 0.0, ()))
    ways, cells = _ways_of(demand, stop, like)
    refused = list(dict.fromkeys(text for way in ways for text in way.refused))
    refused += cells.refused
    for one in cells.refused:
        tell(one)
    kept = [found for plan in known for way in ways if (found := _still(plan, way)) is not None]
    search = CellSearch(demand, cells.cells, stop, watch, kept, Extent(listed, threads=threads))

    def so_far() -> FoundPlans:
        search.close_cells()
        return FoundPlans(demand, search.found, cells, search.ledger.lower_s, tuple(refused))

    stop.offer(so_far)
    search.run()
    if not search.found:
        stop.check()
        why = [] if demand.headroom.is_usual else why_none(demand, ways[0].estimates, stop)
        raise InfeasibleError("\n".join([demand.nothing_fits, *refused, *why]))
    return so_far()


@dataclass(frozen=True)
class _Way:
    """A way to place pipelines, with the estimates for it, and a text about sizes that are too large."""

    demand: PlanDemand
    estimates: Mapping[int, Estimate]
    refused: Sequence[str]


def _ways_of(demand: PlanDemand, stop: Stop[Any], like: FoundPlans | None = None) -> tuple[list[_Way], Cells]:
    if like is None or not demand.prices_like(like.demand):
        ways = [_Way(way, *way.estimates(stop.check)) for way in demand.ways]
        return ways, Cells.of_ways([cells_of(way.demand, way.estimates) for way in ways])
    before = {cell.samples: cell.estimate for cell in like.cells.cells}
    estimates, refused = demand.estimates(stop.check, before)
    known = {
        samples: settings
        for samples, schedules, settings in like.cells.settings
        if samples in before
        and samples in estimates
        # With fewer GPUs than a node had, there are other rules.
        and all(
            demand.restrictions(estimates[samples].instance, name)
            == like.demand.restrictions(before[samples].instance, name)
            for name in schedules
        )
    }
    return [_Way(demand, estimates, refused)], cells_of(demand, estimates, known)


def priced(demand: PlanDemand, stop: Stop[Any]) -> FoundPlans:
    """All combinations, before any search. Raises as ``propose``."""
    _, cells = _ways_of(demand, stop)
    return FoundPlans(demand, (), cells, 0.0, ())


def _still(one: Proposed, way: _Way) -> Proposed | None:
    """A plan that was found for another demand, valued for this one; None if it does not fit."""
    demand, estimates = way.demand, way.estimates
    if one.samples not in estimates or one.instance.cluster.sites != estimates[one.samples].instance.cluster.sites:
        return None
    of_size, schedule = estimates[one.samples], one.solution.schedule
    if one.on_host and demand.tries_host:
        of_size = of_size.on_host
    elif one.on_host != bool(demand.request.optimizer_on_host):
        return None
    try:
        rules = demand.restrictions(of_size.instance, schedule.name)
        if schedule.name not in demand.schedules or any(rules.violations(of_size.instance, one.plan, schedule)):
            return None
        moved = replace(one, estimate=of_size).on(of_size.instance, demand.step)
    except PiperRayError:
        return None
    return None if moved.simulation.memory_violations or not demand.hosts_hold(moved) else moved


def what_would_help(
    proposal: FoundPlans,
    stop: Stop[Any] | None = None,
    watch: Watch = unwatched,
    precisions: Sequence[str] = (),
) -> Iterator[Help]:
    """The best plans with less or more memory, with faster links between GPUs, with a batch that more numbers of GPUs
    divide, and in these precisions. If the user stops the search, what is still unknown is left out."""
    best, demand, stop = proposal.best, proposal.demand, Stop[Any]() if stop is None else stop
    changes: tuple[tuple[str, Callable[[Cluster], Cluster], bool], ...] = (
        ("8 % less memory", lambda own: own.with_memory(lambda own_bytes: 0.92 * own_bytes), False),
        ("25 % more memory", lambda own: own.with_memory(lambda own_bytes: 1.25 * own_bytes), True),
        ("links of twice the rate", _with_faster_links, True),
    )

    def changed(what: str, change: Callable[[Cluster], Cluster], roomier: bool, watch: Watch) -> Help:
        known = [*_on(change, proposal)]
        within_s = min((one.step_s for one in known), default=math.inf)
        cells = proposal.cells.on(change, roomier=roomier, within_s=within_s)
        return Help(what, _best_of(demand, cells, known, stop, watch))

    def larger(batch: int, watch: Watch) -> Help | None:
        found = _best_at(proposal, replace(demand.request, batch=batch), stop, watch)
        row = Help(f"a batch of {batch:,}", found)
        return row if row.samples_per_s > _BATCH_GAIN * best.batch / best.step_s else None

    def precise(name: str, watch: Watch) -> Help:
        found = _best_at(proposal, replace(demand.request, precision=name), stop, watch)
        return Help(f"{name} in place of {demand.request.precision}", found, name)

    rows: list[Callable[[Watch], Help | None]] = [
        partial(changed, *one) for one in (changes if best.instance.devices > 1 else changes[:-1])
    ]
    batch, samples = divisible_batch(best.batch, best.instance.devices), demand.request.samples or 1
    few_ways = best.idle_devices or best.batch % odd_part(best.instance.devices)
    if few_ways and batch != best.batch and batch % samples == 0:
        rows.append(partial(larger, batch))
    rows += [partial(precise, name) for name in precisions]
    yield from filter(None, each_of(rows, stop, watch))


def _with_faster_links(cluster: Cluster) -> Cluster:
    def faster(own: Cluster) -> Cluster:
        return replace(own, links=tuple(link.times(2.0) for link in own.links))

    found, between = cluster.each_kind(faster), cluster.between_bytes_per_s
    return found if between is None else replace(found, between_bytes_per_s=2.0 * between)


def _best_at(proposal: FoundPlans, request: EstimateRequest, stop: Stop[Any], watch: Watch) -> Proposed | None:
    """The best plan in another precision or with another batch."""
    other = replace(proposal.demand, request=request)
    try:
        ways, cells = _ways_of(other, stop)
    except InfeasibleError:
        return None
    known = [found for plan in proposal.listed for way in ways if (found := _still(plan, way)) is not None]
    return _best_of(proposal.demand, cells.cells, known, stop, watch)


def _on(change: Callable[[Cluster], Cluster], proposal: FoundPlans) -> Iterator[Proposed]:
    """The listed plans on a cluster with other memory or links, if they fit there."""
    for one in proposal.listed:
        same = one.on(one.instance.replace(cluster=change(one.instance.cluster)), proposal.demand.step)
        if all(rank.peak_memory_bytes <= rank.memory_limit_bytes for rank in same.simulation.ranks):
            yield same


def _best_of(
    demand: PlanDemand, cells: Sequence[Cell], known: Iterable[Proposed], stop: Stop[Any], watch: Watch
) -> Proposed | None:
    """The best plan of these cells. known: plans of these cells that were found before."""
    search = CellSearch(demand, cells, stop.part(), watch, known, _HELP_EXTENT)
    search.run()
    return search.ledger.best


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


def priced_theirs(
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
