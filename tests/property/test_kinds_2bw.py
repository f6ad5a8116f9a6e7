"""Under 2bw on devices of several kinds, each stage with d, t and a kind of its own: the value is that of all plans."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

import piper_ray
from piper_ray.model.cluster import Cluster, DeviceKind, Link
from piper_ray.model.constraints import Restrictions, SameDegrees, SameDegreesByKind
from piper_ray.model.errors import LimitError
from piper_ray.model.instance import Instance
from piper_ray.model.solution import Solution, Status
from tests.certificate_support import is_accepted, without_row
from tests.kinds_brute_force import least_sample_s, levelled_kinds, random_kinds
from tests.lengths import long_after


def small(seeds: range, kinds: int = 2) -> list[Instance]:
    """Of three layers at most."""
    return [made for made in (random_kinds(seed, kinds) for seed in seeds) if len(made.layers) <= 3]


def solved(instance: Instance, restrictions: Restrictions = Restrictions()) -> Solution:
    return piper_ray.solve(instance, schedule="2bw", restrictions=restrictions, threads=1)


def assert_best(instance: Instance, restrictions: Restrictions = Restrictions()) -> bool:
    """Whether there is a plan."""
    expected_s, found = least_sample_s(instance, restrictions), solved(instance, restrictions)
    if expected_s is None:
        assert found.status is Status.INFEASIBLE
        return False
    assert found.status is Status.OPTIMAL
    assert found.plan is not None
    assert found.time_per_sample_s == pytest.approx(expected_s, rel=1e-9)
    evaluated = piper_ray.evaluate(instance, found.plan, schedule="2bw", restrictions=restrictions)
    assert evaluated.time_per_sample_s == pytest.approx(expected_s, rel=1e-9)
    return True


@pytest.mark.parametrize("seeds", long_after(1, [range(20), range(20, 40)]), ids=str)
def test_two_kinds(seeds: range) -> None:
    """Seed 4 has an edge whose rate no single stage tells."""
    assert sum([assert_best(made) for made in small(seeds)]) > 10


@pytest.mark.long
@pytest.mark.parametrize("seeds", long_after(1, [range(start, start + 9) for start in range(0, 18, 9)]), ids=str)
def test_three_kinds(seeds: range) -> None:
    assert sum([assert_best(made) for made in small(seeds, kinds=3)]) > 3


@pytest.mark.parametrize("kinds", long_after(1, [2, 3]))
def test_certificates_prove_the_optimum_and_no_more(kinds: int) -> None:
    """Seed 4 of two kinds is proved in parts, by the kind of a layer. Without a row or a part nothing is."""
    parts = 0
    for seed in range(6):
        made = levelled_kinds(seed) if seed % 3 == 2 else random_kinds(seed, kinds)
        solution = solved(made)
        certificate = piper_ray.certify(made, solution, threads=1)
        bound_s = piper_ray.verify_certificate(made, certificate, threads=1).bound_s
        assert bound_s == pytest.approx(solution.time_per_sample_s or math.inf, rel=3e-9)
        tails, parts = certificate.tails, parts + (len(certificate.tails) > 1)
        unproved = [replace(certificate, tails=(*tails[1:], without_row(tails[0], seed % len(tails[0].used_devices))))]
        unproved += [replace(certificate, tails=tails[1:])]
        if solution.plan is not None:
            unproved += [replace(certificate, bound_s=bound_s * (1 + off)) for off in (1e-8, 0.1, math.inf)]
        for changed in unproved:
            assert not is_accepted(made, changed)
    assert parts > 0


def test_a_certificate_on_kinds_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = random_kinds(4)
    certificate = piper_ray.certify(made, solved(made), threads=1)
    piper_ray.write_certificate(certificate, tmp_path / "proof")
    read = piper_ray.read_certificate(tmp_path / "proof")
    assert [tails.kinds for tails in read.tails] == [tails.kinds for tails in certificate.tails]
    assert is_accepted(made, read)


def test_a_faster_link_between_kinds_than_within_each() -> None:
    """Seed 3 has an edge whose rate no single stage tells."""
    for made in small(range(3, 6)):
        assert_best(replace(made, cluster=Cluster.of_kinds(made.cluster.kinds, 100.0)))


@pytest.mark.long
def test_nodes_with_a_link_of_their_own() -> None:
    for made in small(range(16)):
        kinds = [
            DeviceKind(kind.name, replace(kind.cluster, devices=4, links=(Link(50.0, 2), *kind.cluster.links)))
            for kind in made.cluster.kinds
        ]
        cluster = Cluster.of_kinds(kinds, made.cluster.between_bytes_per_s or 0.0)
        assert_best(replace(made, cluster=cluster).checked_as(made))


@pytest.mark.long
@pytest.mark.parametrize("rule", [SameDegrees(), SameDegreesByKind()], ids=repr)
def test_one_d_for_all_stages(rule: SameDegrees | SameDegreesByKind) -> None:
    assert sum([assert_best(made, Restrictions(constraints=[rule])) for made in small(range(20))]) > 5


def test_more_devices_are_no_slower() -> None:
    for made in small(range(20)):
        best_s = solved(made).time_per_sample_s
        first, second = made.cluster.kinds
        more = DeviceKind(first.name, replace(first.cluster, devices=first.cluster.devices + 2))
        cluster = Cluster.of_kinds([more, second], made.cluster.between_bytes_per_s or 0.0)
        more_s = solved(replace(made, cluster=cluster).checked_as(made)).time_per_sample_s
        if best_s is not None:
            assert more_s is not None
            assert more_s <= best_s * (1 + 1e-9)


def test_too_many_mixes_are_said() -> None:
    made = random_kinds(0, kinds=3)
    kinds = [DeviceKind(kind.name, replace(kind.cluster, devices=200)) for kind in made.cluster.kinds]
    cluster = Cluster.of_kinds(kinds, made.cluster.between_bytes_per_s or 0.0)
    with pytest.raises(LimitError, match="mixes of 3 kinds of devices are too many"):
        solved(replace(made, cluster=cluster).checked_as(made))
