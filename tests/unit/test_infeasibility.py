"""Why there is no plan, and the least memory with which there is one."""

from __future__ import annotations

import pytest
from hypothesis import given

from piper_ray.engine.solve import solve
from piper_ray.model.constraints import Recompute, Restrictions
from piper_ray.model.errors import ChoiceTooHard
from piper_ray.model.instance import Instance
from piper_ray.model.solution import Infeasibility, Status
from piper_ray.model.stop import StoppedBy, StopSearch
from tests.brute_force import brute_force
from tests.instances import build, instances, named_instances, random_instance, tmpc
from tests.lengths import long_after
from tests.solver_support import ONE_THREAD

NO_RESTRICTION = Restrictions()


def infeasibility_of(instance: Instance, restrictions: Restrictions = NO_RESTRICTION) -> Infeasibility:
    solution = solve(instance, restrictions=restrictions, options=ONE_THREAD)
    assert solution.status is Status.INFEASIBLE
    assert (solution.plan, solution.time_per_sample_s, solution.gap) == (None, None, None)
    assert solution.lower_bound_s == float("inf")
    assert solution.stopped_by is None
    assert solution.infeasibility is not None
    return solution.infeasibility


def test_a_layer_without_a_degree_that_the_devices_allow() -> None:
    instance = build({0: {1: [tmpc(1)]}, 7: {4: [tmpc(1)], 8: [tmpc(1)]}}, {(0, 7): 1}, devices=3)
    found = infeasibility_of(instance)
    assert found.least_memory_bytes is None
    assert 'layer 7 ("layer7")' in found.reason
    assert "4, 8" in found.reason
    assert "devices" in found.reason


def test_a_layer_that_a_restriction_leaves_without_a_degree() -> None:
    instance = build({0: {1: [tmpc(1)]}, 1: {2: [tmpc(1)]}}, {(0, 1): 1}, devices=8)
    assert solve(instance, options=ONE_THREAD).status is Status.OPTIMAL
    found = infeasibility_of(instance, Restrictions(tensor_parallelism=False))
    assert 'layer 1 ("layer1")' in found.reason
    assert found.least_memory_bytes is None


def test_a_layer_that_does_not_fit_alone() -> None:
    # The smallest: recomputed on two devices, 1 y + 4 bytes; two such stages hold y = 1 and 2, one stage of both 10.
    found = infeasibility_of(named_instances()["does not fit"].replace(memory_bytes=4.9, devices=4))
    assert found.least_memory_bytes == pytest.approx(6.0, rel=1e-9)
    assert "alone needs 5 bytes" in found.reason


def test_layers_that_fit_alone_but_not_together() -> None:
    # The least is 5 bytes a layer at t = 2; so both in one stage of two devices take 10. At t = 1 it is 9 and 10.
    found = infeasibility_of(named_instances()["does not fit"].replace(memory_bytes=9.5))
    assert "every layer fits alone" in found.reason
    assert "2 devices" in found.reason
    assert found.least_memory_bytes == pytest.approx(10.0, rel=1e-9)


def test_no_memory_helps() -> None:
    instance = named_instances()["no degree in common"].replace(devices=2)
    found = infeasibility_of(instance)
    assert found.least_memory_bytes is None
    assert "whatever the memory" in found.reason
    assert "2 devices" in found.reason


def test_too_few_microbatches_for_the_stages() -> None:
    """N = 1 allows one stage only; layers without a degree in common need two."""
    found = infeasibility_of(named_instances()["no degree in common"].replace(devices=50, microbatches=1))
    assert found.least_memory_bytes is None


PARTS = 12
"""What replicas share out is divided by up to four: memory is a whole number of twelfths when all figures are whole."""


def least_whole_memory(instance: Instance, restrictions: Restrictions) -> float | None:
    """The least number of bytes with a plan, among the multiples of 1 / PARTS."""
    if brute_force(instance.replace(memory_bytes=1e6), restrictions) is None:
        return None
    low, high = 0, PARTS * 1_000_000
    while high - low > 1:
        middle = (low + high) // 2
        # Just above the multiple: a third of a byte is no float.
        if brute_force(instance.replace(memory_bytes=middle / PARTS * (1 + 1e-12)), restrictions) is None:
            low = middle
        else:
            high = middle
    return high / PARTS


@given(instances(most_layers=3, most_devices=4))
def test_least_memory_against_brute_force(instance: Instance) -> None:
    assert_least_memory(instance.replace(memory_bytes=0.5), NO_RESTRICTION)


@pytest.mark.parametrize(
    "restrictions", [Restrictions(data_parallelism=False), Restrictions(recompute=Recompute.NEVER)]
)
@given(instance=instances(most_layers=2, most_devices=4))
def test_least_memory_under_restrictions(restrictions: Restrictions, instance: Instance) -> None:
    assert_least_memory(instance.replace(memory_bytes=0.5), restrictions)


def assert_least_memory(instance: Instance, restrictions: Restrictions) -> None:
    if brute_force(instance, restrictions) is not None:
        return  # needs no memory at all
    found = infeasibility_of(instance, restrictions)
    expected = least_whole_memory(instance, restrictions)
    assert found.least_memory_bytes == (None if expected is None else pytest.approx(expected, rel=1e-9))


@pytest.mark.parametrize("seed", long_after(5, range(20)))
def test_least_memory_of_arbitrary_figures(seed: int) -> None:
    """With it there is a plan, with a little less there is none."""
    instance = random_instance(seed, most_layers=6, most_devices=8).replace(memory_bytes=1e-3)
    solution = solve(instance, options=ONE_THREAD)
    if solution.infeasibility is None or solution.infeasibility.least_memory_bytes is None:
        return
    least = solution.infeasibility.least_memory_bytes
    assert solve(instance.replace(memory_bytes=least), options=ONE_THREAD).status is Status.OPTIMAL
    assert solve(instance.replace(memory_bytes=least * (1 - 1e-6)), options=ONE_THREAD).status is Status.INFEASIBLE


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), StopSearch(StoppedBy.TIME_LIMIT), ChoiceTooHard()])
def test_what_stops_the_search_for_the_memory_leaves_the_proof(
    stop: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> Infeasibility:
        raise stop

    monkeypatch.setattr("piper_ray.engine.layers.explain", stopped)
    found = infeasibility_of(build({0: {1: [tmpc(1, 0, 5, 5)]}}, {}, devices=1, memory_bytes=1.0))
    assert found.least_memory_bytes is None
    assert "stopped" in found.reason
