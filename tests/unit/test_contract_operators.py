"""Thousands of operators: refused one by one, planned in blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

import piper_ray
from piper_ray import LimitError, SolveOptions, Status
from piper_ray.engine.preview import forecast_solve, lattice_input
from piper_ray.model.options import Contract
from tests.instances import build, tmpc
from tests.operator_graphs import transformer_operators

BY_BLOCKS = SolveOptions(contract=Contract.OPERATORS)
SIX_TOWERS = Path(__file__).resolve().parents[2] / "inputs" / "imagebind-huge.toml"


@pytest.mark.long
def test_thousands_of_operators_are_refused_and_then_planned() -> None:
    instance = transformer_operators()
    assert len(instance.layers) == 4468
    with pytest.raises(LimitError, match="--contract operators"):
        piper_ray.solve(instance, options=SolveOptions(memory_limit_bytes=171e6))
    solution = piper_ray.solve(instance.replace(memory_bytes=8e9), options=BY_BLOCKS)
    assert solution.status is Status.FEASIBLE
    assert solution.stopped_by == "blocks of operators"
    assert solution.plan is not None
    assert piper_ray.evaluate(instance, solution.plan).time_per_sample_s == solution.time_per_sample_s
    assert len(solution.plan.stages) > 2
    assert {layer for stage in solution.plan.stages for layer in stage.layers} == {x.id for x in instance.layers}
    blocks = solution.blocks
    assert blocks is not None
    assert blocks.downsets_before is None
    assert blocks.downsets <= 20_000
    assert blocks.proved
    assert blocks.largest_share < 0.02
    work_s = sum(layer.tmpcs[1][0].time_per_sample_s for layer in instance.layers)
    assert solution.lower_bound_s == pytest.approx(work_s / instance.devices)


@pytest.mark.long
def test_six_towers_are_planned_in_blocks() -> None:
    instance = piper_ray.load(SIX_TOWERS)
    solution = piper_ray.solve(instance, options=BY_BLOCKS, schedule="2bw")
    assert solution.plan is not None
    assert solution.gap is not None
    assert solution.gap < 0.15
    assert piper_ray.evaluate(instance, solution.plan, schedule="2bw").time_per_sample_s == solution.time_per_sample_s
    assert solution.blocks is not None
    assert solution.blocks.downsets_before == 28_704_376
    planned = lattice_input(instance, Contract.OPERATORS)
    assert planned.blocks is not None
    assert planned.forecast.downsets == planned.blocks.downsets == solution.blocks.downsets


def test_what_is_narrow_enough_stays_as_it_is() -> None:
    instance = piper_ray.load(SIX_TOWERS.parent / "bert32-a100.toml")
    solution = piper_ray.solve(instance, options=BY_BLOCKS)
    assert solution.blocks is None
    exact = piper_ray.solve(instance)
    assert (solution.status, solution.plan, solution.lower_bound_s) == (exact.status, exact.plan, exact.lower_bound_s)
    planned = lattice_input(instance, Contract.OPERATORS)
    assert (planned.forecast, planned.blocks) == (forecast_solve(instance), None)


def test_layers_that_no_device_can_run_are_not_merged() -> None:
    instance = build({v: {2: [tmpc(1)]} for v in range(2)}, {(0, 1): 1}, devices=1)
    assert lattice_input(instance, Contract.OPERATORS).blocks is None
    assert piper_ray.solve(instance, options=BY_BLOCKS).status is Status.INFEASIBLE


def test_blocks_that_do_not_fit_prove_nothing() -> None:
    instance = transformer_operators(blocks=3, devices=2).replace(memory_bytes=1e8)
    solution = piper_ray.solve(instance, options=BY_BLOCKS)
    assert (solution.status, solution.plan, solution.infeasibility) == (Status.UNKNOWN, None, None)
    assert solution.blocks is not None
    assert solution.blocks.time_per_sample_s is None
