"""A frontier is one solve for each point: the same values, and the same plans to the byte."""

from __future__ import annotations

from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.evaluation.evaluations import Evaluations
from piper_ray.engine.frontier.frontier import Frontier, frontier
from piper_ray.engine.search.planning import Planning
from piper_ray.engine.search.search import Search
from piper_ray.engine.solve import solve
from piper_ray.evaluate import evaluate
from piper_ray.model.constraints import Recompute
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.solution import Status
from tests.instances import instances, parallel_branches, random_instance, two_towers
from tests.solver_support import ONE_THREAD, PROOF, tables

NO_RESTRICTION = Restrictions()


@pytest.fixture(params=["listed", "by evaluations"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of a search: stages listed, and a lattice that is too large for that."""
    name: str = request.param
    if name == "by evaluations":
        monkeypatch.setattr("piper_ray.engine.frontier.listed.MOST_DOWNSETS", 0)
    return name


def assert_one_solve_for_each_point(
    instance: Instance, restrictions: Restrictions = NO_RESTRICTION, found: Frontier | None = None
) -> None:
    found = found or frontier(instance, restrictions=restrictions, options=ONE_THREAD)
    values = found.by_devices()
    for point in found.points():
        expected = solve(instance.replace(devices=point.devices), restrictions=restrictions, options=ONE_THREAD)
        assert point.status is expected.status, point
        plan = found.plan(point.devices)
        if expected.time_per_sample_s is None:
            assert plan is None
            assert values[point.devices] is None
            continue
        assert values[point.devices] == pytest.approx(expected.time_per_sample_s, rel=2 * PROOF, abs=1e-99)
        assert plan is not None
        assert expected.plan is not None
        assert plan.to_dict() == expected.plan.to_dict()
        assert point.lower_bound_s <= expected.time_per_sample_s
        assert point.gap is not None
        assert point.gap <= PROOF * (1 + 1e-6)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("seed", range(12))
def test_random_instances(seed: int) -> None:
    for number in range(6):
        assert_one_solve_for_each_point(random_instance(100 * seed + number).replace(devices=9))


@given(instances(most_layers=4, most_degrees=3))
def test_small_instances(instance: Instance) -> None:
    assert_one_solve_for_each_point(instance.replace(devices=8))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", ["towers", "branches"])
def test_parallel_graphs(name: str) -> None:
    towers = two_towers(6, devices=14, microbatches=12, memory_bytes=80.0)
    assert_one_solve_for_each_point(towers if name == "towers" else parallel_branches(3, 3).replace(devices=12))


@pytest.mark.parametrize(
    "restrictions",
    [
        Restrictions(tensor_parallelism=False),
        Restrictions(data_parallelism=False),
        Restrictions(recompute=Recompute.ALL_OR_NONE),
        Restrictions(recompute=Recompute.NEVER),
    ],
    ids=repr,
)
def test_restrictions(restrictions: Restrictions) -> None:
    for seed in range(12):
        assert_one_solve_for_each_point(random_instance(seed, most_layers=4).replace(devices=7), restrictions)


@given(instances(most_layers=4), st.sets(st.integers(1, 60), min_size=1, max_size=4))
def test_any_numbers_of_devices(instance: Instance, devices: set[int]) -> None:
    wanted = tuple(sorted(devices))
    found = frontier(instance, devices=wanted, options=ONE_THREAD)
    assert [point.devices for point in found.points()] == list(wanted)
    assert_one_solve_for_each_point(instance, found=found)


def time_with_budget(instance: Instance, budget: int) -> float | None:
    """One search of its own, with the sum of data-parallel degrees bounded by ``budget``."""
    made = tables(instance)
    problem = made.problem.with_cluster(made.problem.cluster._replace(data_parallel_limit=budget))
    with closing(LocalBackend(1)) as backend:
        search = Search(Planning(instance, made.contraction), problem, Evaluations(backend))
        search.run()
    return None if search.incumbent is None else search.incumbent.time_per_sample_s


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("seed", range(25))
def test_bounds_on_the_sum(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "piper_ray.engine.search.chain._CHAIN_SHARE", 10**9
    )  # solve's chains know no bound but the instance's
    instance = random_instance(seed).replace(devices=9)
    if any(not any(t <= 9 for t in layer.tmpcs) for layer in instance.layers):
        return
    values = frontier(instance, devices=[9], options=ONE_THREAD).by_budget()
    assert list(values) == list(range(1, instance.data_parallel_limit + 1))
    for budget, value in values.items():
        expected = time_with_budget(instance, budget)
        assert value == (None if expected is None else pytest.approx(expected, rel=2 * PROOF, abs=1e-99)), budget


@pytest.mark.parametrize("seed", range(6))
def test_threads_change_no_byte(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piper_ray.engine.frontier.closing._LEAST_STRETCH", 4)
    instance = random_instance(seed, most_layers=7).replace(devices=40, microbatches=12)
    alone, together = (frontier(instance, options=SolveOptions(threads=threads)) for threads in (1, 3))
    assert alone.points() == together.points()
    assert alone.budget_points() == together.budget_points()
    assert alone.stats.evaluations == together.stats.evaluations
    for point in alone.points():
        one, other = alone.plan(point.devices), together.plan(point.devices)
        assert (one and one.to_dict()) == (other and other.to_dict())


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("seed", range(10))
def test_a_gap_holds(seed: int) -> None:
    instance = random_instance(seed, most_layers=6).replace(devices=12)
    proved = frontier(instance, options=ONE_THREAD).by_devices()
    rough = frontier(instance, options=SolveOptions(threads=1, gap=0.1))
    for point in rough.points():
        value = proved[point.devices]
        if value is None:
            assert point.status is Status.INFEASIBLE
            continue
        assert point.time_per_sample_s is not None
        assert point.gap is not None
        assert point.gap <= 0.1 + PROOF
        assert point.lower_bound_s <= value * (1 + PROOF)
        assert value <= point.time_per_sample_s * (1 + PROOF)
        plan = rough.plan(point.devices)
        assert plan is not None
        taken_s = evaluate(instance.replace(devices=point.devices), plan).time_per_sample_s
        assert taken_s <= point.time_per_sample_s * (1 + PROOF)
