"""Layers that share a neighbour's stage at no cost: which may, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from piper_ray.certificate.certificate import ways_of
from piper_ray.certificate.joined import check_joined, memory_is_ample
from piper_ray.model.constraints import Restrictions
from piper_ray.model.errors import CertificateRefused
from piper_ray.model.instance import Instance, Tensor, Tmpc
from tests.instances import build, tmpc

FREE = {1: [Tmpc("free", 0.0)]}
DEAR = {1: [tmpc(4, 1, 1, 1)]}


def chain(middle: dict[int, list[Tmpc]], first: float = 0.0, second: float = 0.0) -> Instance:
    """Layers 0 -> 1 -> 2, with bytes on the edges."""
    return build({0: DEAR, 1: middle, 2: DEAR}, {(0, 1): first, (1, 2): second})


def may_join(instance: Instance, joined: dict[int, int], *, ample_memory: bool = False) -> bool:
    try:
        check_joined(instance, ways_of(instance, Restrictions()), joined, ample_memory=ample_memory)
    except CertificateRefused:
        return False
    return True


def test_free_layers_join_a_neighbour() -> None:
    assert may_join(chain(FREE), {1: 0})
    assert may_join(chain(FREE), {1: 2})


def test_with_the_one_it_pays_for_alone() -> None:
    assert may_join(chain(FREE, first=3.0), {1: 0})
    assert not may_join(chain(FREE, first=3.0), {1: 2})
    assert not may_join(chain(FREE, first=3.0, second=3.0), {1: 0})


@pytest.mark.parametrize(
    "figure", ["time_per_sample_s", "weights_bytes", "activation_bytes", "fixed_bytes", "shared_bytes"]
)
def test_what_costs_something_joins_nobody(figure: str) -> None:
    middle = {1: [replace(FREE[1][0], **{figure: 1.0})]}  # type: ignore[arg-type] # any of its figures
    assert not may_join(chain(middle), {1: 0})
    only_memory = figure not in ("time_per_sample_s", "weights_bytes")
    assert may_join(chain(middle), {1: 0}, ample_memory=True) == only_memory


def test_in_each_way_that_the_neighbour_is_run() -> None:
    instance = chain(FREE)
    wide = replace(instance.layers[0], tmpcs={1: instance.layers[0].tmpcs[1], 2: (tmpc(3),)})
    assert not may_join(replace(instance, layers=(wide, *instance.layers[1:])), {1: 0})
    assert may_join(replace(instance, layers=(wide, *instance.layers[1:])), {1: 2})


def test_only_neighbours() -> None:
    instance = build({0: DEAR, 1: DEAR, 2: FREE, 3: DEAR}, {(0, 1): 0, (1, 2): 0, (2, 3): 0})
    assert not may_join(instance, {2: 0})


def test_past_nobody() -> None:
    """0 -> 1 -> {2, 3}, side by side: with 2, layer 1 would come too late for 3, if that is in front of 2."""
    apart = build({0: DEAR, 1: FREE, 2: DEAR, 3: DEAR}, {(0, 1): 0, (1, 2): 0, (1, 3): 0})
    assert not may_join(apart, {1: 2})
    assert may_join(apart, {1: 0})
    in_turn = build({0: DEAR, 1: FREE, 2: DEAR, 3: DEAR}, {(0, 1): 0, (1, 2): 0, (1, 3): 0, (2, 3): 0})
    assert may_join(in_turn, {1: 2})
    assert not may_join(in_turn, {1: 3})


def test_tensors() -> None:
    instance = chain(FREE)
    with_both = replace(instance, tensors=(Tensor((0, 1), 1.0, 1.0),))
    assert may_join(with_both, {1: 0})
    assert not may_join(with_both, {1: 2})
    free = replace(instance, tensors=(Tensor((0, 1), 0.0, 0.0),))
    assert may_join(free, {1: 2})


def test_one_after_the_other() -> None:
    instance = build({0: DEAR, 1: FREE, 2: FREE, 3: DEAR}, {(0, 1): 0, (1, 2): 5, (2, 3): 0})
    assert may_join(instance, {1: 0, 2: 0})
    assert may_join(instance, {1: 3, 2: 3})
    assert not may_join(instance, {1: 0, 2: 3})


@pytest.mark.parametrize("joined", [{1: 1}, {1: 9}, {9: 1}, {1: 2, 2: 1}, {1: 2, 2: 0}])
def test_what_makes_no_sense(joined: dict[int, int]) -> None:
    assert not may_join(chain(FREE), joined)


def test_ample_memory() -> None:
    """Three layers hold 1 y + 1 each: with 4 microbatches in flight 5 bytes."""
    instance = chain(DEAR)
    assert memory_is_ample(instance.replace(memory_bytes=15.0))
    assert not memory_is_ample(instance.replace(memory_bytes=14.0))
