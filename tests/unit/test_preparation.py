"""Solves that share a preparation answer as those that do not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_ray.engine.preparation import PointShape, prepare
from piper_ray.engine.solve import solve
from piper_ray.model.constraints import Recompute, Restrictions
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.solution import Solution
from tests.instances import equal_chain, named_instances, two_towers

INSTANCES = list(named_instances().values())


def figures(solution: Solution) -> tuple[object, ...]:
    stats = solution.stats
    plan = None if solution.plan is None else json.dumps(solution.plan.to_dict())
    size = (stats.layers, stats.contracted_layers, stats.downsets, stats.levels, stats.pairs)
    return solution.status, solution.time_per_sample_s, solution.lower_bound_s, plan, solution.infeasibility, size


@given(
    instance=st.sampled_from(INSTANCES),
    clusters=st.lists(
        st.tuples(st.integers(1, 6), st.integers(1, 6), st.sampled_from([8.0, 20.0, 60.0])), min_size=1, max_size=4
    ),
    restrictions=st.builds(Restrictions, st.booleans(), st.booleans(), st.sampled_from(Recompute)),
)
def test_shared_or_not_the_answers_are_the_same(
    instance: Instance, clusters: list[tuple[int, int, float]], restrictions: Restrictions
) -> None:
    kept = {}
    for devices, microbatches, memory_bytes in clusters:
        point = instance.replace(devices=devices, microbatches=microbatches, memory_bytes=memory_bytes)
        shape = PointShape.of(point, restrictions)
        if shape not in kept:
            kept[shape] = prepare(point, restrictions)
        shared = solve(point, restrictions=restrictions, prepared=kept[shape])
        assert figures(shared) == figures(solve(point, restrictions=restrictions))


@pytest.mark.parametrize(
    ("instance", "restrictions"),
    [
        (two_towers(2), Restrictions()),
        (equal_chain(4), Restrictions()),  # equal, but not the same layers: nobody compares a thousand of them
        (None, Restrictions(tensor_parallelism=False)),
        (None, Restrictions(recompute=Recompute.NEVER)),
    ],
)
def test_of_another_graph_or_shape_it_is_refused(instance: Instance | None, restrictions: Restrictions) -> None:
    chain = equal_chain(4)
    prepared = prepare(chain, Restrictions())
    with pytest.raises(UsageError, match="another graph, or under other restrictions"):
        solve(instance or chain, restrictions=restrictions, prepared=prepared)


def test_devices_count_only_where_they_forbid_a_degree() -> None:
    chain = equal_chain(4)
    prepared = prepare(chain, Restrictions())
    assert prepared.serves(chain.replace(devices=100, microbatches=7, memory_bytes=1.0), Restrictions())
    assert prepared.serves(chain, Restrictions(data_parallelism=False))
    assert not prepared.serves(chain.replace(devices=1), Restrictions())
