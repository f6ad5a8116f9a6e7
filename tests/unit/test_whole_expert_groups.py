"""Stages of whole groups of the devices that experts are spread over, as Megatron asks for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from piper_ray import solve
from piper_ray.model.constraints import Restrictions, SameDegrees, WholeExpertGroups, WholePieces
from piper_ray.model.instance import Instance
from piper_ray.model.mode import Mode
from tests.instances import build, tmpc


def mixture(layers: int) -> Instance:
    """Of layers whose experts are spread over 2 ranks, on 3 devices a layer, which hold one each: 6 microbatches allow
    d = 3."""
    one = replace(tmpc(4.0, fixed=10.0), mode=Mode(experts=2), least_data_parallel_degree=2)
    edges = {(v, v + 1): 1e-3 for v in range(layers - 1)}
    return build({v: {1: [one]} for v in range(layers)}, edges, devices=3 * layers, microbatches=6, memory_bytes=15.0)


@pytest.mark.parametrize(("name", "layers"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2)])
def test_no_stage_has_a_part_of_a_group(name: str, layers: int) -> None:
    instance, rule = mixture(layers), WholeExpertGroups()
    free = solve(instance, schedule=name, restrictions=Restrictions(constraints=[SameDegrees()]), threads=1)
    kept = solve(instance, schedule=name, restrictions=Restrictions(constraints=[SameDegrees(), rule]), threads=1)
    assert free.plan is not None
    assert free.plan.stages[0].devices % 2 == 1
    assert "ranks are not whole groups of 2 that share experts" in next(rule.violations(instance, free.plan))
    assert kept.plan is not None
    assert {stage.devices % 2 for stage in kept.plan.stages} == {0}
    assert not [*rule.violations(instance, kept.plan)]


def test_pieces_of_layers_spread_experts_as_their_layers_do() -> None:
    """A piece of both layers, which would have d = 3 if its experts were forgotten."""
    instance, rule = mixture(2).replace(devices=3), WholeExpertGroups()
    asked = SameDegrees(), WholePieces(((0, 1),))
    roomy = instance.replace(memory_bytes=30.0)
    free, kept = (
        solve(roomy, schedule="1f1b", restrictions=Restrictions(constraints=rules), threads=1)
        for rules in (asked, (*asked, rule))
    )
    assert free.plan is not None
    assert [stage.devices for stage in free.plan.stages] == [3]
    assert kept.plan is not None
    assert [stage.devices for stage in kept.plan.stages] == [2]
