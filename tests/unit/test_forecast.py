"""What a solve will take is known before it starts, and what does not fit is refused before it starts."""

from __future__ import annotations

from random import Random

import pytest

from piper_ray.engine.lattice.downsets import Lattice
from piper_ray.engine.lattice.layer_graph import LayerGraph
from piper_ray.engine.preparation import prepare
from piper_ray.engine.preview import forecast_solve
from piper_ray.engine.solve import solve
from piper_ray.model.constraints import Restrictions
from piper_ray.model.errors import LimitError
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.solution import Status
from tests.instances import build, equal_chain, named_instances, tmpc, two_towers
from tests.lengths import long_after
from tests.solver_support import graph_only, random_graph


def test_counts_are_those_of_the_solve() -> None:
    for instance in [*named_instances().values(), two_towers(6), equal_chain(10)]:
        known, stats = forecast_solve(instance), solve(instance).stats
        assert known.downsets == stats.downsets, instance.name


def test_pairs() -> None:
    assert forecast_solve(graph_only(range(3), [])).pairs == 3**3 - 2**3
    assert forecast_solve(graph_only(range(4), [(0, 1), (1, 2), (2, 3)])).pairs == 5 * 4 // 2


def test_after_contraction() -> None:
    instance = build({0: {1: [tmpc(0)]}, 1: {1: [tmpc(1)]}, 2: {1: [tmpc(0)]}}, {(0, 1): 1, (1, 2): 1})
    assert forecast_solve(instance).downsets == 2


def test_larger_lattices_take_more() -> None:
    small, large = forecast_solve(two_towers(10)), forecast_solve(two_towers(100))
    assert small.memory_bytes is not None
    assert small.seconds is not None
    assert large.memory_bytes is not None
    assert large.seconds is not None
    assert 0 < small.memory_bytes < large.memory_bytes
    assert 0 < small.seconds < large.seconds
    fewer_variants = forecast_solve(two_towers(100), Restrictions(tensor_parallelism=False))
    assert fewer_variants.memory_bytes is not None
    assert fewer_variants.memory_bytes < large.memory_bytes


@pytest.mark.long
def test_what_cannot_be_counted_is_not_guessed() -> None:
    known = forecast_solve(random_graph(Random(5), 200, 0.03))
    assert (known.downsets, known.pairs, known.memory_bytes, known.seconds) == (None, None, None, None)


def test_a_limit_that_the_forecast_keeps_is_kept() -> None:
    instance = two_towers(60)
    memory_bytes = forecast_solve(instance).memory_bytes
    assert memory_bytes is not None
    options = SolveOptions(threads=1, memory_limit_bytes=memory_bytes * 1.001)
    assert solve(instance, options=options).status is Status.OPTIMAL
    with pytest.raises(LimitError):
        prepare(instance, Restrictions(), memory_bytes * 0.99)


def no_enumeration(graph: LayerGraph, limit: int) -> Lattice:
    raise AssertionError(f"began to enumerate {graph.size} layers up to {limit}")


@pytest.mark.parametrize(
    ("instance", "downsets"),
    [
        (graph_only(range(60), []), 2**60),
        (graph_only(range(120), [(v, v + 1) for v in range(119) if (v + 1) % 5]), 6**24),
    ],
    ids=["independent layers", "independent chains"],
)
def test_a_lattice_that_cannot_fit_is_refused_before_it_is_enumerated(
    instance: Instance, downsets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("piper_ray.engine.preparation.build_lattice", no_enumeration)
    with pytest.raises(LimitError) as refusal:
        prepare(instance, Restrictions(), 4.0 * 2**30)
    text = str(refusal.value)
    assert f"{downsets:,} downsets" in text
    assert "the limit is 4.0 GiB" in text
    assert "--memory-limit" in text
    assert refusal.value.exit_code == 5


def test_a_limit_of_little_is_not_told_as_none() -> None:
    with pytest.raises(LimitError, match=r"the limit is 1\.0 MiB\."):
        prepare(graph_only(range(12), []), Restrictions(), 2.0**20)


def test_without_a_limit_the_machine_is_the_limit() -> None:
    with pytest.raises(LimitError, match=r"1,152,921,504,606,846,976 downsets, which take about .* GiB"):
        prepare(graph_only(range(60), []), Restrictions())


def test_a_lattice_that_cannot_be_counted_is_refused_when_it_outgrows_the_limit() -> None:
    instance = random_graph(Random(5), 200, 0.03)
    limit_bytes = forecast_solve(two_towers(50)).memory_bytes
    with pytest.raises(LimitError, match=r"more than [\d,]+ downsets, all that fit into .*--memory-limit"):
        prepare(instance, Restrictions(), limit_bytes)


@pytest.mark.parametrize("schedule", long_after(1, ["1f1b", "gpipe"]))
@pytest.mark.parametrize(
    "instance",
    [
        graph_only(range(60), []),
        graph_only(range(120), [(v, v + 1) for v in range(119) if (v + 1) % 5]),
    ],
    ids=["independent layers", "independent chains"],
)
def test_no_graph_is_without_a_plan_under_a_flush(instance: Instance, schedule: str) -> None:
    """These fill all devices evenly, with any order of the layers."""
    assert_planned(instance, schedule)


@pytest.mark.long
def test_nor_is_one_that_cannot_be_counted() -> None:
    assert_planned(random_graph(Random(5), 200, 0.03), "1f1b")


def assert_planned(instance: Instance, schedule: str) -> None:
    solution = solve(instance, schedule=schedule)
    assert solution.status is Status.OPTIMAL
    assert solution.plan is not None


@pytest.mark.long
def test_under_2bw_what_plans_can_use_is_enough() -> None:
    rng = Random(3)
    edges = {(0, 1 + 8 * tower): 1 for tower in range(3)} | {(8 + 8 * tower, 25): 1 for tower in range(3)}
    edges |= {(v, v + 1): 1 for v in range(1, 24) if v % 8}
    times = {v: {1: [tmpc(rng.uniform(5, 10), activation=1)]} for v in range(26)}
    instance = build(times, edges, devices=12, microbatches=16, memory_bytes=1000)
    memory_bytes = forecast_solve(instance).memory_bytes
    assert memory_bytes is not None
    whole = solve(instance, options=SolveOptions(threads=1))
    third_bytes = 170e6 + (memory_bytes - 170e6) / 3
    found = solve(instance, options=SolveOptions(threads=1, memory_limit_bytes=third_bytes))
    assert (found.status, found.time_per_sample_s) == (Status.OPTIMAL, whole.time_per_sample_s)
    assert found.plan == whole.plan
    assert found.stats.downsets < whole.stats.downsets / 3
