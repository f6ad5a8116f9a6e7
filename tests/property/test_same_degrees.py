"""One d and one t for all stages under Piper's own schedule: exact, against the free search held to each pair."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from piper_ray.engine.solve import solve
from piper_ray.evaluate import evaluate
from piper_ray.model.constraints import Constraint, Restrictions, SameDegrees, TensorParallelDegrees
from piper_ray.model.instance import Instance, divisors
from piper_ray.model.plan import Plan
from piper_ray.model.solution import Status
from tests.instances import random_instance
from tests.lengths import long_after
from tests.solver_support import ONE_THREAD


@dataclass(frozen=True)
class OneReplication(Constraint):
    """Every stage has this d."""

    degree: int

    def admits_data_parallel_degree(self, degree: int) -> bool:
        return degree == self.degree

    def violations(self, instance: Instance, plan: Plan) -> Iterator[str]:  # noqa: ARG002
        yield from (
            f"d={stage.data_parallel_degree}" for stage in plan.stages if stage.data_parallel_degree != self.degree
        )


def free_search_of_each_pair(instance: Instance) -> float | None:
    values = []
    for d in divisors(instance.microbatches):
        for t in instance.degrees:
            if d * t > instance.devices:
                continue
            held = Restrictions(constraints=(TensorParallelDegrees((t,)), OneReplication(d)))
            values.append(solve(instance, restrictions=held, options=ONE_THREAD).time_per_sample_s)
    return min((value for value in values if value is not None), default=None)


@pytest.mark.parametrize("seed", long_after(6, range(24)))
def test_no_pair_of_degrees_is_better(seed: int) -> None:
    instance = random_instance(seed)
    solution = solve(instance, restrictions=Restrictions(constraints=[SameDegrees()]), options=ONE_THREAD)
    expected = free_search_of_each_pair(instance)
    if expected is None:
        assert solution.status is Status.INFEASIBLE
        return
    assert solution.status is Status.OPTIMAL
    assert solution.plan is not None
    assert solution.time_per_sample_s == pytest.approx(expected, rel=1e-9, abs=1e-99)
    found = evaluate(instance, solution.plan, restrictions=Restrictions(constraints=[SameDegrees()]))
    assert found.time_per_sample_s == pytest.approx(expected, rel=1e-9, abs=1e-99)
