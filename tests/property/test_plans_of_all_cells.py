"""The one search of ``plan`` against all plans of all combinations, each simulated, on small models."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product
from pathlib import Path

import pytest

from piper_ray.cost.schedules import chunk_schedules
from piper_ray.model.headroom import Headroom
from piper_ray.model.instance import Instance
from piper_ray.model.mode import ALL_REPLICAS
from piper_ray.model.one_mode import OneMode
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.plan_rules import in_order
from piper_ray.model.schedule import CHUNKED, Schedule, ScheduleName
from piper_ray.proposal.demand import PlanDemand
from piper_ray.proposal.propose import propose
from piper_ray.simulate.run import SimulationOptions, simulate
from piper_ray.workloads.estimate.modes import Offer
from tests.unit.test_propose import demand

MANY_SHARDS = 4


def least_step_s(asked: PlanDemand) -> float:
    """Of all plans that keep all rules and fit; inf: there is none."""
    least_s, options = math.inf, SimulationOptions.of(asked.step)
    sizes, both = asked.estimates()[0].values(), asked.tries_host
    for instance in (one.instance for of_size in sizes for one in ([of_size, of_size.on_host] if both else [of_size])):
        for name in asked.schedules:
            rules = asked.restrictions(instance, name)
            (rule,) = (one for one in rules.constraints if isinstance(one, OneMode))
            for plan, schedule in all_plans(instance, name, rule):
                if any(rules.violations(instance, plan, schedule)):
                    continue
                run = simulate(instance, plan, schedule, options=options)
                if run.peak_memory_bytes <= run.memory_limit_bytes:
                    least_s = min(least_s, run.step_s)
    return least_s


def all_plans(instance: Instance, name: ScheduleName, rule: OneMode) -> Iterator[tuple[Plan, Schedule]]:
    """With one degree of each kind, and modes that all layers have."""
    chain = in_order(instance)
    order = [layer.id for layer in chain.layers]
    narrowed = list(rule.under_each(instance, rule.modes(instance)))
    for d, t in product(range(1, instance.devices + 1), range(1, MANY_SHARDS + 1)):
        if instance.microbatches % d or d * t > instance.devices:
            continue
        for schedule, count in schedules_of(name, instance.devices // (d * t), len(order)):
            for cuts in combinations(range(1, len(order)), count - 1):
                pieces = [order[a:b] for a, b in pairwise((0, *cuts, len(order)))]
                for one in narrowed:
                    rows = [one.layer_by_id[layer].tmpcs.get(t, ()) for layer in order]
                    for chosen in product(*rows):
                        ids = dict(zip(order, (tmpc.id for tmpc in chosen), strict=True))
                        stages = [Stage(tuple(x), d, t, {layer: ids[layer] for layer in x}) for x in pieces]
                        yield Plan(tuple(stages), keeps_order=True), schedule


def schedules_of(name: ScheduleName, most: int, layers: int) -> Iterator[tuple[Schedule, int]]:
    """On at most a number of ranks, with their numbers of stages."""
    if name not in CHUNKED:
        yield from ((Schedule(name), p) for p in range(1, min(most, layers) + 1))
        return
    for p in range(2, most + 1):
        counts = ((one, p * (one.chunks or 1)) for one in chunk_schedules(name))
        yield from ((one, count) for one, count in counts if count <= layers)


@pytest.mark.long
@pytest.mark.parametrize(("schedule", "headroom"), [("1f1b", 0.0), ("gpipe", 0.985), ("interleaved", 0.985)])
def test_none_is_faster_and_none_is_below_the_bound(tmp_path: Path, schedule: str, headroom: float) -> None:
    asked = replace(demand(tmp_path, samples=2), schedules=(ScheduleName(schedule),))
    asked = replace(asked, headroom=Headroom(share=headroom))
    on_host = None if schedule == "1f1b" else False  # one schedule is enough of twice as many plans
    request = replace(asked.request, offer=Offer(zero=ALL_REPLICAS), optimizer_on_host=on_host)
    asked = replace(asked, request=request)
    least_s = least_step_s(asked)
    found = propose(asked)
    assert found.lower_s <= least_s
    assert found.best.step_s == pytest.approx(least_s, rel=2e-4 if schedule != "interleaved" else 0.02)
