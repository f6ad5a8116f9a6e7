"""Nodes with faster links than those between them: what is planned is the best of all plans, each at its own links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

import piper_ray
from piper_ray.engine.ledger import Limits
from piper_ray.evaluate import replicas_bytes_per_s
from piper_ray.model.cluster import Cluster, DeviceKind, Link
from piper_ray.model.constraints import (
    AllDevices,
    DataParallelDegrees,
    KeepOrder,
    Restrictions,
    SameDegrees,
    StageCount,
)
from piper_ray.model.errors import CertificateRefused, InvalidPlan
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.plan_rules import stage_borders
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.model.solution import Solution, Status
from piper_ray.model.stop import StoppedBy, StopSearch
from piper_ray.simulate.assemble import replicas_bytes_per_s as simulated_bytes_per_s
from piper_ray.simulate.borders import border_rates, listed_places, plan_border_rates
from tests.brute_force import brute_force
from tests.chunks_brute_force import least_step_s
from tests.flush_brute_force import brute_force as flush_brute_force
from tests.flush_instances import uneven_layers
from tests.instances import equal_chain, random_instance
from tests.lengths import long_after
from tests.link_rates import borders, groups, ring, ring_where_stages_lie, starts, whole_groups, with_levels
from tests.solver_support import ONE_THREAD

WITH_CHUNKS = [Schedule(ScheduleName.INTERLEAVED, 2), Schedule(ScheduleName.ZB_H1), Schedule(ScheduleName.ZB_V)]


def levelled(seed: int, most_layers: int = 4) -> Instance:
    """Many devices for few layers, weights that take their time."""
    rng = Random(f"levels {seed}")
    instance = random_instance(seed, most_layers=most_layers)
    if seed % 2:
        instance = uneven_layers(seed)
        instance = instance.replace(devices=min(instance.devices, 8))
    else:
        instance = instance.replace(devices=rng.choice([4, 6, 8, 12]), microbatches=rng.choice([4, 6, 8, 12]))
    return with_levels(rng, instance)


def assert_as_fast(one_s: float | None, other_s: float | None) -> None:
    """None: no plan."""
    assert (one_s is None) == (other_s is None)
    if other_s is not None:
        assert one_s == pytest.approx(other_s, rel=2e-9)


def assert_valued_alike(instance: Instance, found: Solution, schedule: str) -> None:
    """By the referee, and by the simulation."""
    if found.plan is None:
        return
    value_s = piper_ray.evaluate(instance, found.plan, schedule=found.schedule).time_per_sample_s
    assert found.time_per_sample_s == pytest.approx(value_s, rel=1e-9)
    simulated = piper_ray.simulate(instance, found.plan, found.schedule)
    if schedule == "2bw":
        assert simulated.promised_s is not None
        assert simulated.promised_s / instance.microbatches == pytest.approx(value_s, rel=1e-9)
    else:
        assert simulated.time_per_sample_s == pytest.approx(value_s, rel=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("seeds", long_after(1, [range(start, start + 20) for start in range(0, 40, 20)]), ids=str)
def test_plans_that_never_flush(seeds: range) -> None:
    for seed in seeds:
        instance = levelled(seed, most_layers=3)
        if len(instance.layers) > 4:
            continue
        found, expected = piper_ray.solve(instance, schedule="2bw", options=ONE_THREAD), brute_force(instance)
        if expected is None:
            assert found.status is Status.INFEASIBLE, seed
            continue
        assert found.status is Status.OPTIMAL, seed
        if found.plan is None or found.plan.places is None:  # else see test_places.py
            assert found.time_per_sample_s == pytest.approx(float(expected.time_per_sample_s), rel=1e-9), seed
        assert_valued_alike(instance, found, "2bw")


@pytest.mark.parametrize("schedule", long_after(1, ["1f1b", "gpipe"]))
@pytest.mark.parametrize("seeds", long_after(1, [range(start, start + 20) for start in range(0, 40, 20)]), ids=str)
def test_plans_with_a_flush(seeds: range, schedule: str, few: bool) -> None:
    for seed in seeds[:10] if few else seeds:
        instance = levelled(seed)
        found, expected = (
            piper_ray.solve(instance, schedule=schedule, options=ONE_THREAD),
            flush_brute_force(instance, schedule),
        )
        if expected is None:
            assert found.status is Status.INFEASIBLE, seed
            continue
        assert found.status is Status.OPTIMAL, seed
        assert found.time_per_sample_s == pytest.approx(expected.batch_s / instance.microbatches, rel=1e-9), seed
        assert_valued_alike(instance, found, schedule)


@pytest.mark.long
@pytest.mark.parametrize(
    "schedule",
    long_after(1, [Schedule(ScheduleName.INTERLEAVED, 2), Schedule(ScheduleName.ZB_H1), Schedule(ScheduleName.ZB_V)]),
    ids=str,
)
def test_plans_with_chunks(schedule: Schedule) -> None:
    for seed in range(0, 16, 2):
        instance = levelled(seed)
        least_s = least_step_s(instance, schedule)
        found = piper_ray.solve(instance, schedule=schedule, options=ONE_THREAD)
        if least_s is None:
            assert found.status is Status.INFEASIBLE, seed
            continue
        assert found.time_per_sample_s == pytest.approx(least_s / instance.microbatches, rel=1e-9), seed
        assert_valued_alike(instance, found, schedule.name.value)


@pytest.mark.parametrize("schedule", long_after(1, ["2bw", "1f1b", "gpipe"]))
def test_equal_links_are_one_link(schedule: str, few: bool) -> None:
    for seed in range(6 if few else 12):
        one = random_instance(seed).replace(devices=8)
        rate = one.bandwidth_bytes_per_s
        several = one.replace(cluster=replace(one.cluster, links=(Link(rate, 2), Link(rate, 4), Link(rate))))
        expected = piper_ray.solve(one, schedule=schedule, options=ONE_THREAD)
        found = piper_ray.solve(several, schedule=schedule, options=ONE_THREAD)
        assert found.status is expected.status
        assert found.time_per_sample_s == expected.time_per_sample_s
        if expected.plan is not None:
            assert piper_ray.evaluate(several, expected.plan, schedule=schedule) == piper_ray.evaluate(
                one, expected.plan, schedule=schedule
            )


@pytest.mark.parametrize("schedule", long_after(1, ["2bw", "1f1b"]))
def test_one_node_is_a_cluster_of_its_own_link(schedule: str) -> None:
    for seed in range(8):
        one = random_instance(seed).replace(devices=4)
        fast = 8.0 * one.bandwidth_bytes_per_s
        several = one.replace(cluster=replace(one.cluster, links=(Link(fast, 4), *one.cluster.links)))
        expected = piper_ray.solve(one.replace(bandwidth_bytes_per_s=fast), schedule=schedule, options=ONE_THREAD)
        found = piper_ray.solve(several, schedule=schedule, options=ONE_THREAD)
        assert (found.status, found.time_per_sample_s) == (expected.status, expected.time_per_sample_s)
        assert found.plan == expected.plan


@pytest.mark.parametrize("schedule", long_after(1, ["2bw", "1f1b", "gpipe"]))
def test_a_frontier_is_one_solve_for_each_point(schedule: str) -> None:
    for seed in range(4):
        instance = levelled(seed, most_layers=3)
        restrictions = Restrictions(constraints=(SameDegrees(), AllDevices())) if seed % 4 == 3 else Restrictions()
        found = piper_ray.frontier(instance, schedule=schedule, options=ONE_THREAD, restrictions=restrictions)
        before_s = float("inf")
        for point in found.points():
            on = instance.replace(devices=point.devices)
            expected = piper_ray.solve(on, schedule=schedule, options=ONE_THREAD, restrictions=restrictions)
            assert point.status is expected.status, (seed, point)
            solution = found.solution(point.devices)
            assert solution.status is point.status
            if expected.time_per_sample_s is None:
                assert point.time_per_sample_s is None
                continue
            assert point.time_per_sample_s == pytest.approx(expected.time_per_sample_s, rel=2e-9), (seed, point)
            assert solution.plan is not None
            value_s = piper_ray.evaluate(on, solution.plan, schedule=schedule).time_per_sample_s
            assert value_s == pytest.approx(point.time_per_sample_s, rel=2e-9), (seed, point)
            assert point.is_step == (point.time_per_sample_s != pytest.approx(before_s, rel=1e-9))
            if not restrictions.all_devices:
                assert expected.time_per_sample_s <= before_s * (1.0 + 1e-9), "more devices never hurt"
            before_s = expected.time_per_sample_s


def test_a_frontier_with_chunks() -> None:
    schedule = Schedule(ScheduleName.INTERLEAVED, 2)
    for seed in (0, 4):
        instance = levelled(seed)
        instance = instance.replace(devices=min(6, instance.devices))
        for point in piper_ray.frontier(instance, schedule=schedule, options=ONE_THREAD).points():
            on = instance.replace(devices=point.devices)
            expected = piper_ray.solve(on, schedule=schedule, options=ONE_THREAD)
            assert point.status is expected.status
            assert_as_fast(point.time_per_sample_s, expected.time_per_sample_s)


OPTIONS = {
    "in order": Restrictions(constraints=(KeepOrder(),)),
    "all or none": Restrictions(recompute="all-or-none"),
    "one for all": Restrictions(recompute="one-for-all"),
    "first k": Restrictions(recompute="first-k"),
    "two stages": Restrictions(constraints=(SameDegrees(), StageCount(2))),
    "some degrees": Restrictions(constraints=(SameDegrees(), DataParallelDegrees((2, 4)))),
}


@pytest.mark.parametrize("schedule", long_after(1, ["2bw", "1f1b"]))
@pytest.mark.parametrize("name", OPTIONS)
def test_constraints_are_kept_on_every_level(name: str, schedule: str, few: bool) -> None:
    """What is found is what one link gives where all links are equal, and valued at its own links elsewhere."""
    for seed in range(2 if few else 4):
        instance = levelled(seed, most_layers=3)
        links = tuple(Link(1.0, link.devices) for link in instance.cluster.links)
        equal = instance.replace(cluster=replace(instance.cluster, links=links))
        one = instance.replace(bandwidth_bytes_per_s=1.0)
        found, expected, levels = (
            piper_ray.solve(x, schedule=schedule, restrictions=OPTIONS[name], options=ONE_THREAD)
            for x in (equal, one, instance)
        )
        assert found.status is expected.status, seed
        assert_as_fast(found.time_per_sample_s, expected.time_per_sample_s)
        if levels.plan is not None:
            valued = piper_ray.evaluate(instance, levels.plan, schedule=schedule, restrictions=OPTIONS[name])
            assert valued.time_per_sample_s == pytest.approx(levels.time_per_sample_s, rel=1e-9), seed


def test_bounds_on_the_sum_of_degrees() -> None:
    for seed in range(0, 12, 2):
        instance = levelled(seed, most_layers=3)
        found = piper_ray.frontier(instance, schedule="2bw", options=ONE_THREAD)
        points = found.budget_points()
        assert [point.data_parallel_budget for point in points] == list(range(1, instance.data_parallel_limit + 1))
        assert points[-1].time_per_sample_s == pytest.approx(found.points()[-1].time_per_sample_s, rel=1e-9)
        values_s = [float("inf") if x.time_per_sample_s is None else x.time_per_sample_s for x in points]
        assert values_s == sorted(values_s, reverse=True)


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
def test_planners_value_plans_as_the_referee(schedule: str) -> None:
    """And none beats the optimum."""
    for seed in range(10):
        instance = levelled(seed, most_layers=3)
        best_s = piper_ray.solve(instance, schedule=schedule, options=ONE_THREAD).time_per_sample_s
        for name in ("megatron", "gpipe", "data-parallel", "pipedream", "piper-published"):
            try:
                found = piper_ray.baselines.plan(instance, name, schedule=schedule)
            except InvalidPlan:
                continue
            if found.time_per_sample_s is not None:
                assert best_s is not None
                assert found.time_per_sample_s >= best_s * (1.0 - 1e-9), (seed, name)


def test_nodes_have_room_for_what_counts_on_them() -> None:
    """Blocks of any plan, the largest first, never cross the border of a node, and take no more devices than it has."""
    rng = Random(7)
    for _ in range(300):
        sizes = rng.choice([(8,), (6,), (12,), (72,), (4, 8), (6, 12), (8, 24)])
        devices = rng.randint(sizes[-1], 5 * sizes[-1])
        cluster = Cluster(devices, 1.0, (*(Link(float(100 - size), size) for size in sizes), Link(1.0)))
        left, placed = devices, []
        while left:
            placed.append(rng.choice([block for block in cluster.blocks if block <= left]))
            left -= placed[-1]
        at = 0
        for block in sorted(placed, reverse=True):
            for size in sizes:
                if block <= size:
                    assert at // size == (at + block - 1) // size
            at += block
        assert at == devices


@pytest.mark.parametrize("seed", long_after(5, range(0, 20, 2)))
@pytest.mark.parametrize("seen", [1, 3, 8])
def test_a_plan_of_a_search_that_ended_early_is_valued_where_it_lies(
    seen: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one node, if it fits into one, although it was sought on all."""
    instance, looks = levelled(seed), 0

    def check(self: Limits) -> None:  # noqa: ARG001 - as the method has it
        nonlocal looks
        looks += 1
        if looks > seen:
            raise StopSearch(StoppedBy.TIME_LIMIT)

    whole = piper_ray.solve(instance, options=ONE_THREAD)
    monkeypatch.setattr(Limits, "check", check)
    found = piper_ray.solve(instance, options=ONE_THREAD)
    assert_valued_alike(instance, found, "2bw")
    if whole.time_per_sample_s is not None:
        assert found.lower_bound_s <= whole.time_per_sample_s


@pytest.mark.long
def test_all_who_charge_a_ring_charge_the_same() -> None:
    """The cluster, the referee and the simulation, each with a way of its own, and the rule in words: for degrees too
    that divide no group."""
    rng = Random("rings")
    for _ in range(3000):
        sizes = [rng.choice([1, 2, 3, 4, 6, 8])]
        sizes += [sizes[-1] * rng.choice([2, 3, 4, 9]) for _ in range(rng.choice([0, 1, 1]))]
        links = [Link(rng.choice([0.5, 1, 2, 3, 8, 50]), size) for size in sizes]
        cluster = Cluster(sizes[-1] * rng.choice([2, 3, 8]), 1.0, (*links, Link(1.0)))
        t, d = rng.choice([1, 2, 3, 4, 5, 6]), rng.choice([2, 3, 4, 5, 6, 8, 12, 16, 24, 48])
        instance = equal_chain(2).replace(cluster=cluster)
        expected = float(ring(instance, cluster.devices, d, t))
        assert cluster.spread().replicas_link(d, t).bandwidth_bytes_per_s == expected
        assert replicas_bytes_per_s(cluster, cluster.devices, d, t) == expected
        assert simulated_bytes_per_s(cluster, cluster.devices, d, t) == expected


def random_pipelines(draws: int) -> Iterator[tuple[Cluster, int, int]]:
    """A cluster of one to three levels, of which the last group may not be full; devices of a stage, and stages."""
    rng = Random("pipelines")
    for _ in range(draws):
        sizes = [rng.choice([1, 2, 3, 4, 5, 8])]
        for _ in range(rng.choice([0, 1, 1, 2])):
            sizes.append(sizes[-1] * rng.choice([2, 3, 4, 9]))
        rates = sorted((float(rng.randint(1, 50)) for _ in range(len(sizes) + 1)), reverse=True)
        links = (*map(Link, rates[:-1], sizes), Link(rates[-1]))
        devices = rng.randint(1, 4 * sizes[-1])
        stage_devices = rng.randint(1, max(1, min(devices, sizes[-1] + 2)))
        yield Cluster(devices, 1.0, links), stage_devices, rng.randint(1, devices // stage_devices)


def test_all_who_charge_a_border_charge_the_same(few: bool) -> None:
    """The cluster by a formula, the simulation by where stages begin, and the rule in words."""
    for number, (drawn, stage_devices, stages) in enumerate(random_pipelines(200 if few else 600)):
        cluster = with_uplinks(number, drawn) if number % 2 else drawn
        periods = cluster.border_periods(stage_devices, stages)
        expected = list(map(float, borders(equal_chain(2).replace(cluster=cluster), stage_devices, stages)))
        levels = [cluster.border_level(q, periods) for q in range(1, stages)]
        assert [cluster.level_bytes_per_s(level, stage_devices) for level in levels] == expected
        assert border_rates(cluster, stage_devices, stages) == expected
        d = max(d for d in range(1, 5) if stage_devices % d == 0)
        degrees = d, stage_devices // d, stages
        needed, ring = cluster.needed_devices(*degrees), cluster.replicas_link(*degrees)
        assert needed <= cluster.devices
        for devices in range(stage_devices * stages, cluster.devices):
            fewer = replace(cluster, devices=devices)
            alike = fewer.border_periods(stage_devices, stages) == periods and fewer.replicas_link(*degrees) == ring
            assert alike == (devices >= needed)


def test_stages_are_listed_in_order_with_the_borders_that_are_charged() -> None:
    gaps = 0
    for cluster, size, stages in random_pipelines(2000):
        first = listed_places(cluster, size, stages)
        assert first == sorted(first)
        assert all(after - before >= size for before, after in pairwise(first))
        assert first[0] >= 0
        assert first[-1] + size <= cluster.devices
        if first == [place * size for place in range(stages)]:
            continue
        gaps += 1
        *inner, _ = groups(equal_chain(2).replace(cluster=cluster), size * stages)
        whole = [n for n, _ in inner if all(at // n == (at + size - 1) // n for at in first)]
        crossed = [[before // n != after // n for n in whole] for before, after in pairwise(first)]
        levels: dict[tuple[bool, ...], set[float]] = {tuple(left): set() for left in crossed}
        for left, rate in zip(crossed, border_rates(cluster, size, stages)[::-1], strict=True):
            levels[tuple(left)].add(rate)
        assert all(len(rates) == 1 for rates in levels.values())
    assert gaps > 100


def enumerated_borders(cluster: Cluster, size: int, stages: int) -> tuple[list[float], bool] | None:
    """What each border has, the last one first, and whether stages lie whole in groups: devices one by one, group after
    group from the back. The slowest pair counts: by the least group that both are in, and by its share of each uplink
    on the way, among all that send through it. Stages that are spread are in order without gaps; None: they may be
    whole in some groups and not in others."""
    groups = [(link.devices or cluster.devices, link.bandwidth_bytes_per_s) for link in cluster.links]
    held, top = next(((n, rate) for n, rate in groups if size * stages <= n), groups[-1])
    there = min(held, cluster.devices)
    inner = [group for group in groups if group[0] < there]
    large = [n for n, _ in inner if size <= n]
    whole = starts(there, size, large)
    is_whole = len(whole) >= stages
    if not is_whole and len(large) > 1:
        return None
    first, found = whole if is_whole else [k * size for k in range(stages)], []
    for behind, ahead in pairwise(first[:stages]):
        ends = [(ahead + k, behind + k) for k in range(size)]  # who sends, and who receives
        left = [[n for n, _ in inner if one // n != other // n] for one, other in ends]
        sending = Counter((n, one // n) for (one, _), crossed in zip(ends, left, strict=True) for n in crossed)
        rates = [next((rate for n, rate in inner if one // n == other // n), top) for one, other in ends]
        for (one, _), crossed in zip(ends, left, strict=True):
            rates += [
                x.uplink_bytes_per_s / sending[x.devices, one // x.devices]
                for x in cluster.links
                if x.uplink_bytes_per_s is not None and x.devices in crossed
            ]
        found.append(min(rates))
    return found, is_whole


def test_borders_have_the_links_of_where_their_devices_lie() -> None:
    """Of stages that are spread none is charged less than in order without gaps. A half of the clusters has uplinks: of
    groups smaller than a stage, all devices count as sending."""
    exact = spread = within = shared = 0
    for number, (cluster, size, stages) in enumerate(random_pipelines(2000)):
        used = with_uplinks(number, cluster) if number % 2 else cluster
        enumerated = enumerated_borders(used, size, stages)
        if enumerated is None:
            continue
        found, is_whole = enumerated
        charged, is_exact = border_rates(used, size, stages), is_whole and (used is cluster or shares_alike(used, size))
        assert charged == found if is_exact else all(x <= y for x, y in zip(charged, found, strict=True))
        exact, spread = exact + is_whole * len(found), spread + (not is_whole) * len(found)
        within += is_whole * sum(rate > cluster.links[-1].bandwidth_bytes_per_s for rate in found)
        shared += used is not cluster and is_exact and found != border_rates(cluster, size, stages)
    assert min(exact, within) > 1000
    assert spread > 100
    assert shared > 50


def shares_alike(cluster: Cluster, size: int) -> bool:
    """Whether a stage is in one group of each level."""
    return size <= (cluster.links[0].devices or cluster.devices)


def with_uplinks(seed: int, cluster: Cluster) -> Cluster:
    rng = Random(f"uplinks {seed}")
    inner = (replace(link, uplink_bytes_per_s=float(rng.randint(1, 100))) for link in cluster.links[:-1])
    return replace(cluster, links=(*inner, cluster.links[-1]))


def test_borders_on_several_kinds_have_the_links_of_where_their_devices_lie() -> None:
    """Stages of two kinds in any order, each with nodes of its own: 100 placements, enumerated for each kind."""
    rng, draws, placements, within = Random("kinds"), random_pipelines(2000), 0, 0
    while placements < 100:
        (one, *of_one), (other, *of_other) = next(draws), next(draws)
        drawn = {"a": (with_uplinks(placements, one), of_one[0], of_one[1]), "b": (other, of_other[0], of_other[1])}
        found = {kind: enumerated_borders(*those) for kind, those in drawn.items() if shares_alike(*those[:2])}
        left = {kind: x[0] for kind, x in found.items() if x is not None and x[1]}
        if len(left) < 2:
            continue
        placements += 1
        cluster = Cluster.of_kinds([DeviceKind(kind, own) for kind, (own, _, _) in drawn.items()], 0.25)
        order = [kind for kind, (_, _, stages) in drawn.items() for _ in range(stages)]
        rng.shuffle(order)
        plan = Plan(tuple(Stage((k,), drawn[kind][1], 1, {k: "plain"}, kind) for k, kind in enumerate(order)))
        expected = []
        for place, (here, ahead) in enumerate(pairwise(order)):
            expected.append(left[here][order[place + 1 :].count(here) - 1] if here == ahead else 0.25)
        within += sum(rate > 0.25 for rate in expected)
        if any(len(x.links) > 1 for x in cluster.alike):
            assert plan_border_rates(cluster, plan) == expected
            charged = stage_borders(cluster, plan, Schedule(ScheduleName.ONE_F_ONE_B))
            assert [border.bandwidth_bytes_per_s for border in charged] == expected
    assert within > 100


@pytest.mark.long
def test_rings_have_the_links_of_where_their_replicas_lie() -> None:
    """64 of 72: eight replicas of eight devices share a domain, whatever else divides it. All who charge a ring charge
    the same, and none less than where its devices lie, put down one by one."""
    domains = Cluster(5 * 72, 1.0, (Link(1800.0, 72), Link(100.0)))
    assert [domains.replicas_link(8, 8, p).bandwidth_bytes_per_s for p in (1, 5)] == [1800.0, 1800.0]
    assert [domains.replicas_link(d, 8, 1).bandwidth_bytes_per_s for d in (16, 32, 40)] == [800.0] * 3
    assert domains.replicas_link(8, 8).bandwidth_bytes_per_s == 100.0
    rng, whole, runs = Random("whole rings"), 0, 0
    for number, (drawn, size, stages) in enumerate(random_pipelines(1200)):
        cluster = with_uplinks(number, drawn) if number % 2 else drawn
        degrees = [d for d in range(2, size + 1) if size % d == 0]
        if not degrees:
            continue
        instance, d = equal_chain(2).replace(cluster=cluster), rng.choice(degrees)
        t = size // d
        expected = float(ring_where_stages_lie(instance, d, t, stages))
        charged, used = (
            cluster.replicas_link(d, t, stages).bandwidth_bytes_per_s,
            (cluster, size * stages, d, t, stages),
        )
        assert charged == replicas_bytes_per_s(*used) == simulated_bytes_per_s(*used)
        assert charged == pytest.approx(expected, rel=1e-12)
        found = max(_shares_of_placements(instance, d, t, stages))
        assert expected <= found
        before = float(ring(instance, size * stages, d, t))
        assert expected >= before
        is_whole = bool(whole_groups(instance, size, stages))
        whole, runs = whole + (is_whole and expected > before), runs + (not is_whole and expected > before)
    assert min(whole, runs) > 50


def _shares_of_placements(instance: Instance, d: int, t: int, stages: int) -> Iterator[float]:
    """What the slowest ring of a plan has, for each way to put its stages down, device by device: whole in groups; or
    with n of their replicas in each; or in order without gaps."""
    size, whole = d * t, whole_groups(instance, d * t, stages)
    bounds = [min(devices, instance.devices) for devices, _ in groups(instance, size * stages)]
    rates = [max(link.bandwidth_bytes_per_s for link in instance.cluster.links[k:]) for k in range(len(bounds))]
    ways = (
        [(n, bounds[-2:-1]) for n in range(1, d + 1) if d % n == 0 and n * t <= bounds[-2:-1][0]] if bounds[1:] else []
    )
    for n, kept in [(d, whole)] if whole else [(d, []), *ways]:
        first = starts(bounds[-1], n * t, kept)[: stages * d // n]
        if len(first) == stages * d // n:
            at = [one + k * t for one in first for k in range(n)]
            rings = [at[stage * d : (stage + 1) * d] for stage in range(stages)]
            yield min([max(rates), *(share for ring in rings for share in _shares(ring, bounds, rates))])


def test_certificates_know_where_replicas_lie() -> None:
    """Heavy weights, groups that no block of replicas divides: what is proved is the optimum, and no more."""
    nearer = 0
    for d, size, devices in ((6, 4, 12), (3, 4, 8), (10, 6, 12), (4, 3, 9)):
        instance = equal_chain(3).replace(microbatches=2 * d)
        heavy = [{1: tuple(replace(x, weights_bytes=8.0 * instance.bandwidth_bytes_per_s) for x in y.tmpcs[1])} for y in
                 instance.layers]  # fmt: skip
        layers = tuple(replace(layer, tmpcs=row) for layer, row in zip(instance.layers, heavy, strict=True))
        slow = instance.bandwidth_bytes_per_s
        cluster = Cluster(devices, instance.memory_bytes, (Link(50.0 * slow, size), Link(slow)))
        made = replace(instance, layers=layers, cluster=cluster)
        found = piper_ray.solve(made, schedule="1f1b", options=ONE_THREAD)
        expected = flush_brute_force(made, "1f1b")
        assert expected is not None
        assert found.plan is not None
        assert found.time_per_sample_s == pytest.approx(expected.batch_s / made.microbatches, rel=1e-9)
        certificate = piper_ray.certify(made, found, threads=1)
        assert piper_ray.verify_certificate(made, certificate, threads=1).bound_s == pytest.approx(
            found.time_per_sample_s, rel=1e-8
        )
        more = replace(certificate, bound_s=certificate.bound_s * 1.001)
        with pytest.raises(CertificateRefused):
            piper_ray.verify_certificate(made, more, threads=1)
        first = found.plan.stages[0]
        degrees = first.data_parallel_degree, first.tensor_parallel_degree
        rings = cluster.replicas_link(*degrees, len(found.plan.stages)), cluster.spread().replicas_link(*degrees)
        nearer += rings[0].bandwidth_bytes_per_s > rings[1].bandwidth_bytes_per_s
    assert nearer > 0


def test_a_plan_needs_the_room_that_its_borders_count_on() -> None:
    """Four stages of three devices: on nodes of 8 they lie whole from 14 devices on."""
    instance = equal_chain(4)
    cluster = Cluster(18, instance.memory_bytes, (Link(50.0, 8), Link(1.0)))
    instance = instance.replace(cluster=cluster, microbatches=6)
    restrictions = Restrictions(constraints=(SameDegrees(), DataParallelDegrees((3,)), StageCount(4)))
    points = piper_ray.frontier(instance, schedule="1f1b", restrictions=restrictions, options=ONE_THREAD).points()
    for point in points:
        on = instance.replace(devices=point.devices)
        expected = piper_ray.solve(on, schedule="1f1b", restrictions=restrictions, options=ONE_THREAD)
        assert_as_fast(point.time_per_sample_s, expected.time_per_sample_s)
    assert [x.devices for x in points if x.is_step] == [12, 14]


def test_no_ring_is_charged_less_than_where_its_devices_lie() -> None:
    """Ranks put on devices one by one, the largest blocks first; each ring by the groups that its devices are in. Where
    the charge counts on all that share a group, it is the same."""
    rng, exact = Random("placements"), 0
    for _ in range(100):
        sizes = rng.choice([(4,), (8,), (12,), (72,), (4, 8), (6, 12), (8, 72)])
        rates = sorted((float(rng.randint(1, 50)) for _ in range(len(sizes) + 1)), reverse=True)
        groups = [*sizes, sizes[-1] * rng.choice([2, 3, 5])]
        links = (*map(Link, rates[:-1], sizes), Link(rates[-1]))
        cluster = Cluster(groups[-1], 1.0, links).spread()
        d, t = rng.choice([1, 2, 3, 4, 6, 8, 16]), rng.choice([1, 2, 4, 8])
        block = max(cluster.shared_blocks(d, t), default=1)
        for first in range(0, groups[-1] // (d * t) * d * t, d * t):  # blocks of one size divide groups: none is cut
            for size in (x for x in sizes if block <= x):
                assert all(at // size == (at + block - 1) // size for at in range(first, first + d * t, block))
            ring_devices = [first + replica * t for replica in range(d)]
            found = min([rates[0], *_shares(ring_devices, groups, rates)])
            charged = cluster.replicas_link(d, t).bandwidth_bytes_per_s
            assert d == 1 or charged <= found
            exact += charged == found
    assert exact > 100


def _shares(devices: list[int], groups: list[int], rates: list[float]) -> Iterator[float]:
    """What a ring has at each level that it crosses: a link of each of its devices in a group that it leaves."""
    for size, outer, rate in zip([1, *groups], groups, rates, strict=False):
        for whole in {at // outer for at in devices}:
            inside = Counter(at // size for at in devices if at // outer == whole)
            if len(inside) > 1:
                yield min(inside.values()) * rate
