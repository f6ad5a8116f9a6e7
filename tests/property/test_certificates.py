"""What a certificate proves is true, and what it does not prove is refused."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_ray.certificate.certificate import Tails
from piper_ray.certificate.check import verify_certificate
from piper_ray.engine.certify import certify
from piper_ray.engine.solve import solve
from piper_ray.model.constraints import (
    DataParallelDegrees,
    KeepOrder,
    Recompute,
    Restrictions,
    TensorParallelDegrees,
    Unplaced,
)
from piper_ray.model.instance import Edge, Instance, Layer, Tensor, Tmpc
from piper_ray.model.plan_rules import in_order, with_fastest_borders
from tests.brute_force import brute_force, brute_force_on_all
from tests.certificate_support import (
    certificate_of,
    is_accepted,
    proves,
    with_state,
    with_tails,
    without_row,
)
from tests.instances import equal_chain, instances, named_instances, parallel_branches, random_instance, two_towers
from tests.lengths import long_after
from tests.link_rates import groups, with_levels
from tests.solver_support import ONE_THREAD

_RULES = [
    Restrictions(),
    Restrictions(tensor_parallelism=False),
    Restrictions(data_parallelism=False),
    Restrictions(recompute=Recompute.ALWAYS),
    Restrictions(recompute=Recompute.NEVER),
    Restrictions(recompute=Recompute.ALL_OR_NONE),
    Restrictions(constraints=[TensorParallelDegrees((1, 2))]),
    Restrictions(constraints=[DataParallelDegrees((1, 3))]),
]


def assert_proved(instance: Instance, restrictions: Restrictions = _RULES[0]) -> None:
    """The optimum's bound, and none above it."""
    certificate = certificate_of(instance, restrictions)
    expected = brute_force(instance, restrictions)
    found = verify_certificate(instance, certificate, threads=1)
    if expected is None:
        assert found.bound_s == math.inf
        return
    optimum = expected.time_per_sample_s
    assert Fraction(found.bound_s) <= optimum
    assert found.bound_s == pytest.approx(float(optimum), rel=2e-9, abs=0.0)
    gap = found.gap(float(optimum))
    assert gap is not None
    assert gap <= 2e-9
    if optimum > 0:
        for factor in (1.0 + 1e-9, 1.01, math.inf):
            assert not is_accepted(instance, replace(certificate, bound_s=float(optimum) * factor))


@pytest.mark.parametrize("name", named_instances())
def test_named_instances(name: str) -> None:
    assert_proved(named_instances()[name])


@given(instances(most_layers=4))
def test_small_instances(instance: Instance) -> None:
    assert_proved(instance)


@pytest.mark.parametrize("seed", long_after(2, range(4)))
def test_random_instances(seed: int, few: bool) -> None:
    for number in range(5 if few else 10):
        assert_proved(random_instance(50_000 + 10 * seed + number))


@pytest.mark.long
@given(instances(most_layers=4), st.sampled_from(_RULES))
def test_restrictions(instance: Instance, restrictions: Restrictions) -> None:
    assert_proved(instance, restrictions)


@pytest.mark.long
@given(instances(most_layers=4))
def test_plans_that_keep_the_order(instance: Instance) -> None:
    restrictions = Restrictions(constraints=[KeepOrder()])
    certificate = certificate_of(instance, restrictions)
    expected = brute_force(_with_tables(in_order(instance)))
    found = verify_certificate(instance, certificate, threads=1)
    optimum = math.inf if expected is None else float(expected.time_per_sample_s)
    assert found.bound_s == pytest.approx(optimum, rel=2e-9, abs=0.0)


@pytest.mark.parametrize("seed", long_after(3, range(12)))
def test_groups_with_links_of_their_own(seed: int) -> None:
    rng = random.Random(f"certified links {seed}")
    instance = random_instance(seed, most_layers=4)
    instance = instance.replace(devices=rng.choice([4, 6, 8, 12]), microbatches=rng.choice([4, 6, 8, 12]))
    instance = with_levels(rng, instance)
    certificate = certificate_of(instance)
    # Stages are checked with their borders at the fastest link, on each group and on all devices.
    levels = [instance.replace(devices=min(size, instance.devices)) for size, _ in groups(instance, instance.devices)]
    expected = [x for x in (brute_force_on_all(with_fastest_borders(level)) for level in levels) if x is not None]
    found = verify_certificate(instance, certificate, threads=1)
    optimum = min((float(x.time_per_sample_s) for x in expected), default=math.inf)
    if certificate.restrictions.has(Unplaced):
        best = brute_force(instance)
        assert best is not None
        assert not is_accepted(instance, replace(certificate, restrictions=Restrictions()))
        assert float(best.time_per_sample_s) > optimum
        optimum = float(best.time_per_sample_s)
    assert found.bound_s == pytest.approx(optimum, rel=2e-9, abs=0.0)
    if 0.0 < optimum < math.inf:
        assert not is_accepted(instance, replace(certificate, bound_s=optimum * (1.0 + 1e-9)))
    if len(certificate.tails) > 1:
        assert not is_accepted(instance, replace(certificate, tails=certificate.tails[1:]))


def with_free_layers(rng: random.Random, instance: Instance) -> Instance:
    """And layers that cost nothing parallel to those, between them and at their ends."""
    free = {t: (Tmpc("free", 0.0),) for t in instance.degrees}
    layers, edges = list(instance.layers), list(instance.edges)
    tensors = list(instance.tensors)
    for number in range(rng.randint(1, 3)):
        layer = 1000 + number
        place = rng.randint(0, len(layers))
        before = rng.sample(layers[:place], min(place, rng.randint(0, 2)))
        behind = rng.sample(layers[place:], min(len(layers) - place, rng.randint(0, 2)))
        size = rng.choice([0.0, 0.0, 2.0])
        edges += [Edge(x.id, layer, size) for x in before] + [Edge(layer, x.id, 0.0) for x in behind]
        if before and rng.random() < 0.3:
            tensors.append(Tensor((before[0].id, layer), 1.0, 1.0))
        layers.insert(place, Layer(layer, "free", free))
    return _with_tables(replace(instance, layers=tuple(layers), edges=tuple(edges), tensors=tuple(tensors)))


def _with_tables(instance: Instance) -> Instance:
    """Its sync tables name all neighbours."""
    layers = [
        replace(
            layer,
            tmpcs={
                t: tuple(_with_all_ends(x, layer.id, instance.edges) for x in row) for t, row in layer.tmpcs.items()
            },
        )
        for layer in instance.layers
    ]
    return replace(instance, layers=tuple(layers))


def _with_all_ends(tmpc: Tmpc, layer: int, edges: Iterable[Edge]) -> Tmpc:
    forward = {edge.source: tmpc.forward_sync_bytes.get(edge.source, 0.0) for edge in edges if edge.target == layer}
    backward = {edge.target: tmpc.backward_sync_bytes.get(edge.target, 0.0) for edge in edges if edge.source == layer}
    return replace(tmpc, forward_sync_bytes=forward, backward_sync_bytes=backward)


def _topological(instance: Instance) -> bool:
    place = {layer.id: index for index, layer in enumerate(instance.layers)}
    return all(place[edge.source] < place[edge.target] for edge in instance.edges)


@pytest.mark.parametrize("seed", long_after(4, range(8)))
def test_layers_that_share_a_stage_at_no_cost(seed: int) -> None:
    rng = random.Random(f"free layers {seed}")
    instance = equal_chain(rng.randint(2, 3), memory_bytes=rng.choice([25.0, 60.0]))
    instance = with_free_layers(rng, instance)
    assert _topological(instance)
    assert_proved(instance)


def _altered(rng: random.Random, tails: Tails) -> Tails:
    """In one of many ways."""
    row = rng.randrange(tails.used_devices.size)
    devices, total = int(tails.used_devices[row]), int(tails.data_parallel_sum[row])
    way = rng.randrange(5)
    if way == 0 and tails.used_devices.size > 1:
        return without_row(tails, row)
    if way == 1:
        return with_state(tails, row, devices + 1, total)
    if way == 2:
        return with_state(tails, row, devices, total + 1)
    if way == 3:
        return with_state(tails, row, max(0, devices - 1), total)
    return replace(tails, members=np.roll(tails.members, 1, axis=0))


@pytest.mark.parametrize("seed", long_after(4, range(14)))
def test_altered_certificates_are_judged_as_by_definition(seed: int) -> None:
    rng = random.Random(f"altered {seed}")
    instance = random_instance(seed + 900, most_layers=4)
    certificate = certificate_of(instance)
    expected = brute_force(instance)
    assert proves(instance, certificate)
    for _ in range(12):
        changed = certificate
        for _ in range(rng.randint(1, 2)):
            changed = with_tails(changed, _altered(rng, changed.tails[0]))
        if rng.random() < 0.5 and certificate.bound_s < math.inf:
            changed = replace(changed, bound_s=certificate.bound_s * rng.choice([0.5, 0.97, 1.03, 1.7]))
        accepted = is_accepted(instance, changed)
        assert accepted == proves(instance, changed)
        if accepted and expected is not None:
            assert Fraction(changed.bound_s) <= expected.time_per_sample_s


@pytest.mark.parametrize(
    "instance",
    [
        two_towers(3, devices=5, memory_bytes=40.0),
        parallel_branches(2, 2, devices=5, memory_bytes=45.0),
        equal_chain(9, devices=8, memory_bytes=22.0),
    ],
    ids=lambda instance: instance.name,
)
def test_no_row_may_be_left_out_or_raised(instance: Instance) -> None:
    certificate = certificate_of(instance)
    (tails,) = certificate.tails
    assert tails.used_devices.size > 5
    for row in range(tails.used_devices.size):
        devices, total = int(tails.used_devices[row]), int(tails.data_parallel_sum[row])
        assert not is_accepted(instance, with_tails(certificate, without_row(tails, row)))
        raised = with_state(tails, row, devices + 1, total + 1)
        assert not is_accepted(instance, with_tails(certificate, raised))


@given(instances(most_layers=4))
def test_a_bound_that_is_not_the_optimum_is_certified_too(instance: Instance) -> None:
    options = replace(ONE_THREAD, gap=0.3)
    solution = solve(instance, options=options, schedule="2bw")
    found = verify_certificate(instance, certify(instance, solution, threads=1), threads=1)
    assert found.bound_s == pytest.approx(solution.lower_bound_s, rel=2e-9, abs=0.0)
