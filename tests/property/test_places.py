"""Plans under 2bw whose stages lie in order on nodes: the search, and all who value them, against all places."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

import piper_ray
from piper_ray.cost.plan import cost_of
from piper_ray.engine import placed
from piper_ray.evaluate import evaluate
from piper_ray.model.cluster import Cluster, Link
from piper_ray.model.errors import InvalidPlan
from piper_ray.model.instance import Edge, Instance, Layer, Tmpc
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.plan_rules import stage_borders
from piper_ray.model.schedule import PAPERS_SCHEDULE
from piper_ray.model.solution import Solution, Status
from piper_ray.report.page.pictures import placements
from tests.brute_force import brute_force
from tests.instances import equal_chain
from tests.lengths import long_after
from tests.places_brute_force import border_rate, faster_with_places, lies_whole
from tests.property.test_links import assert_valued_alike, levelled


def bordered(seed: int) -> Instance:
    """A few layers with much to send, on few devices in groups: places make the best plan of one in five faster."""
    rng = Random(f"bordered {seed}")
    count, degrees = rng.choice([3, 4, 5]), rng.choice([[1], [1], [1, 2], [1, 3]])
    edges = [Edge(v, v + 1, float(rng.choice([0.5, 1, 4, 8, 8]))) for v in range(count - 1)]
    if rng.random() < 0.3:
        edges.append(Edge(0, count - 1, float(rng.choice([0, 1, 2]))))

    def tmpc(layer: int, name: str, t: int) -> Tmpc:
        figures = rng.randint(1, 6) / t, rng.choice([0, 0, 1, 3]), rng.choice([0, 0, 0, 1]), rng.choice([2, 3, 4])
        time_s, weights, activations, fixed = map(float, figures)
        into = {x.source: float(rng.choice([0, 0, 1])) for x in edges if x.target == layer}
        out = {x.target: float(rng.choice([0, 0, 1])) for x in edges if x.source == layer}
        return Tmpc(name, time_s, weights, activations, fixed, forward_sync_bytes=into, backward_sync_bytes=out)

    layers = [
        Layer(v, str(v), {t: tuple(tmpc(v, name, t) for name in "ab"[: rng.choice([1, 1, 2])]) for t in degrees})
        for v in range(count)
    ]
    sizes = rng.choice([(2,), (2,), (3,), (4,), (2, 4), (2, 6), (1, 3)])
    links = [Link(rng.choice([2.0, 4.0, 8.0, 100.0]), sizes[-1])]
    links = [Link(links[0].bandwidth_bytes_per_s * rng.choice([0.5, 2, 4]), size) for size in sizes[:-1]] + links
    cluster = Cluster(rng.randint(5, 9), float(rng.choice([5, 6, 7, 8, 10])), (*links, Link(1.0)))
    microbatches, memory_bytes = rng.choice([1, 1, 2, 3]), cluster.memory_bytes
    instance = Instance(tuple(layers), tuple(edges), cluster.devices, microbatches, memory_bytes, 1.0)
    return instance.replace(cluster=cluster)


def solved(instance: Instance, threads: int = 1) -> Solution:
    return piper_ray.solve(instance, schedule="2bw", threads=threads)


@pytest.mark.parametrize("seeds", long_after(1, [range(start, start + 10) for start in range(0, 30, 10)]), ids=str)
def test_no_plan_at_any_places_is_faster(seeds: range, few: bool) -> None:
    for seed in seeds[:5] if few else seeds:
        other = levelled(seed, 3)
        for instance in (bordered(seed), other.replace(devices=min(other.devices, 6))):
            found, plain = solved(instance), brute_force(instance)
            time_s = found.time_per_sample_s
            assert found.status is (Status.INFEASIBLE if plain is None else Status.OPTIMAL)
            assert faster_with_places(instance, None if time_s is None else time_s * (1.0 - 1e-8)) is None
            assert_valued_alike(instance, found, "2bw")
            if time_s is not None and plain is not None:
                assert time_s <= float(plain.time_per_sample_s) * (1.0 + 1e-9)


def placed_plan(rng: Random) -> tuple[Instance, Plan]:
    """On groups, at random places, many of which no stages can have."""
    inner, count = rng.choice([2, 3, 4, 8]), rng.choice([2, 3, 4])
    sizes = [inner, *rng.choice([[], [2 * inner], [3 * inner]])]
    links = [Link(rng.choice([2.0, 4.0, 8.0]), size) for size in sizes]
    layers, stages, places, at = equal_chain(count).layers, list[Stage](), list[int](), 0
    for layer in reversed(layers):
        d = rng.choice([1, 2, 4])
        stages.insert(0, Stage((layer.id,), d, 1, {layer.id: layer.tmpcs[1][0].id}))
        places.insert(0, at + rng.choice([0, 0, 0, 1, 2]))
        at = places[0] + d
    cluster = Cluster(at + rng.choice([0, 1, 5]), 1e9, (*links, Link(1.0)))
    return equal_chain(count).replace(cluster=cluster, microbatches=64), Plan(tuple(stages), places=tuple(places))


def test_all_who_value_places_agree(few: bool) -> None:
    """The referee, the simulation and the solver's formulas. They refuse exactly the places at which a ring would lie
    otherwise than it is charged, and borders have the links of where their devices lie."""
    rng, valid = Random("places"), 0
    for _ in range(90 if few else 200):
        instance, plan = placed_plan(rng)
        assert plan.places is not None
        where = list(zip(plan.stages, plan.places, strict=True))
        if not all(lies_whole(instance, plan.span, x.data_parallel_degree, 1, at) for x, at in where):
            with pytest.raises(InvalidPlan, match="do not hold its blocks"):
                evaluate(instance, plan)
            continue
        valid += 1
        value_s = evaluate(instance, plan).time_per_sample_s
        assert cost_of(instance, plan) == (value_s, None)
        promised_s = piper_ray.simulate(instance, plan, PAPERS_SCHEDULE).promised_s
        assert promised_s == pytest.approx(value_s * instance.microbatches, rel=1e-12)
        rates = [x.bandwidth_bytes_per_s for x in stage_borders(instance.cluster, plan, PAPERS_SCHEDULE)]
        pairs = pairwise(where)
        assert rates == [border_rate(instance, plan.span, back, at + x.devices) for (x, at), (_, back) in pairs]
    assert valid > 50


@pytest.mark.parametrize(
    ("places", "text"),
    [
        ((1, 0), "stage 2: its devices 0 to 1 are not all below 1"),
        ((7, 0), "stage 1: its devices 7 to 8 are not all below 8"),
        ((3, 0), "stage 1: at place 3 groups of devices do not hold its blocks of 2 whole"),
        ((0,), "the plan has 1 place for 2 stages"),
    ],
)
def test_places_that_no_stages_can_have_are_refused(places: tuple[int, ...], text: str) -> None:
    instance = equal_chain(2).replace(cluster=Cluster(8, 1e9, (Link(8.0, 4), Link(1.0))), microbatches=4)
    stages = tuple(Stage((x.id,), 2, 1, {x.id: x.tmpcs[1][0].id}) for x in instance.layers)
    with pytest.raises(InvalidPlan, match=re.escape(text)):
        evaluate(instance, Plan(stages, places=places))


def test_a_flush_places_stages_itself() -> None:
    instance, plan = placed_plan(Random("places"))
    alike = replace(plan, stages=tuple(replace(stage, data_parallel_degree=1) for stage in plan.stages))
    assert evaluate(instance, alike, schedule="1f1b") == evaluate(
        instance, replace(alike, places=None), schedule="1f1b"
    )


@pytest.mark.parametrize(("devices", "first", "last"), [(8, "2-3", "6-7"), (7, "4-5", "0-1")])
def test_a_page_draws_stages_where_they_lie(devices: int, first: str, last: str) -> None:
    """From the back of the last node, as far as there are whole nodes."""
    instance = equal_chain(2).replace(cluster=Cluster(devices, 1e9, (Link(8.0, 4), Link(1.0))), microbatches=4)
    stages = tuple(Stage((x.id,), 2, 1, {x.id: x.tmpcs[1][0].id}) for x in instance.layers)
    plan = Plan(stages, places=(4, 0))
    (drawn,) = placements(instance, plan, piper_ray.simulate(instance, plan, PAPERS_SCHEDULE))
    assert f"stage 1: devices {first}" in drawn.picture
    assert f"stage 2: devices {last}" in drawn.picture


def test_a_file_keeps_places() -> None:
    instance, plan = placed_plan(Random(1))
    assert piper_ray.load_plan(plan.to_dict(), instance) == plan


FASTER = 12
"""A seed of ``bordered`` whose best plan has places."""


def test_two_threads_find_the_same_plan() -> None:
    one, two = solved(bordered(FASTER)), solved(bordered(FASTER), 2)
    assert one.plan is not None
    assert one.plan.places is not None
    assert (one.plan, one.time_per_sample_s, one.lower_bound_s) == (two.plan, two.time_per_sample_s, two.lower_bound_s)


def test_faster_links_within_groups_cost_no_time() -> None:
    for seed in range(8):
        instance, before_s = bordered(seed), float("inf")
        for factor in (1.0, 1.5, 4.0):
            inner = [link.times(factor) for link in instance.cluster.links[:-1]]
            cluster = replace(instance.cluster, links=(*inner, instance.cluster.links[-1]))
            now_s = solved(instance.replace(cluster=cluster)).time_per_sample_s
            assert (now_s or 0.0) <= before_s * (1.0 + 1e-9)
            before_s = now_s or 0.0


def test_too_many_downsets_leave_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = solved(bordered(FASTER))
    monkeypatch.setattr(placed, "_MOST_DOWNSETS", 1)
    found = solved(bordered(FASTER))
    assert found.plan is not None
    assert found.plan.places is None
    assert found.status is Status.FEASIBLE
    assert exact.time_per_sample_s is not None
    assert found.time_per_sample_s is not None
    assert 0.0 < found.lower_bound_s <= exact.time_per_sample_s < found.time_per_sample_s


def test_certificates_prove_a_bound_for_plans_with_places() -> None:
    for seed in range(6):
        instance = bordered(seed)
        found = solved(instance)
        proved = piper_ray.verify_certificate(instance, piper_ray.certify(instance, found, threads=1))
        if found.time_per_sample_s is not None:
            assert 0.0 < proved.bound_s <= found.time_per_sample_s
