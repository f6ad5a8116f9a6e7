"""Schemes of plain PyTorch modules, and what cannot be traced."""

from __future__ import annotations

from functools import cache

import pytest

pytest.importorskip("torch")

from piper_ray.model.errors import UsageError
from piper_ray.workloads.estimate.build import EstimateRequest
from piper_ray.workloads.estimate.costs import Setting
from piper_ray.workloads.estimate.hardware import load_hardware
from piper_ray.workloads.measure.operators import traced_layers
from piper_ray.workloads.schemes.check import faults_of
from piper_ray.workloads.schemes.document import in_full
from piper_ray.workloads.schemes.frontier import BORDERS, find_traced
from piper_ray.workloads.schemes.graph import OperatorFamily
from piper_ray.workloads.schemes.names import known_divisions, name_of
from piper_ray.workloads.schemes.program import SchemeProgram
from piper_ray.workloads.schemes.scheme import PricedGraph
from piper_ray.workloads.schemes.traced import TracedGraph, TracedPrices
from tests.cli_cases import run
from tests.lengths import long_after

_FILE = "tests/scheme_modules.py"


@cache
def _setting() -> Setting:
    hardware = load_hardware(None, lambda _: None)
    stack = EstimateRequest(nodes=1).stack(hardware.gpu("A100-80"))
    return Setting(stack, hardware.training, 8, 0.0, 0.0, 1)


@cache
def _layers(family: str) -> list[TracedGraph]:
    return traced_layers(f"{_FILE}:{family}", 2)


_AXES = {
    "gpt": {"s": 16, "qkv": 4, "up": 128},
    "llama": {"s": 16, "q": 2, "gate": 64},
    "experts": {"s": 16, "into": 4},
    "state_space": {"s": 16, "into": 64},
    "unet": {"down": 4},
    "cross": {"s": 16, "z": 24, "q": 4},
    "vit": {"layer.qkv": 4, "layer.up": 128},
}
"""By family the axes that a layer is divided along, and what shards of them divide: heads, groups of them, channels."""


@pytest.mark.parametrize("family", _AXES)
def test_axes_are_those_that_the_code_means(family: str) -> None:
    (layer,) = _layers(family)
    assert _AXES[family].items() <= layer.graph.sizes.items()
    assert not list(layer.unruled(_setting()))


@pytest.mark.parametrize("family", long_after(1, _AXES))
def test_schemes_of_families_hold_by_the_rule_table(family: str) -> None:
    (layer,) = _layers(family)
    prices = TracedPrices(2, _setting(), layer)
    for border in BORDERS:
        program = SchemeProgram(layer.graph, 2, prices, border)
        for share in (1.0, 3.0):
            scheme = program.fastest(8.0, share * 1.001 * program.least_held_bytes(8.0))
            assert scheme is not None
            assert faults_of(in_full(scheme, PricedGraph(layer.graph, prices))) == []


def test_megatrons_schemes_of_a_users_own_layer_have_their_names() -> None:
    (layer,) = _layers("gpt")
    prices = TracedPrices(2, _setting(), layer)
    for name in ("tensor parallelism", "tensor and sequence parallelism"):
        border, only = known_divisions(layer.graph, 2)[name]
        scheme = SchemeProgram(layer.graph, 2, prices, border, only).fastest(1.0)
        assert scheme is not None
        assert name_of(scheme, layer.graph).startswith(name)
        assert scheme.weights["qkv.weight"].axis == "qkv"
        assert scheme.weights["down.weight"].axis == "up"


def test_a_model_is_cut_into_its_layers_equal_ones_once() -> None:
    words, block, head = _layers("language")
    assert block.graph.name == "blocks.0"
    assert words.graph.steps[0].family is OperatorFamily.LOOKUP
    assert head.graph.leaving == ()
    assert {step.family for step in head.graph.steps} >= {OperatorFamily.LOSS}


@pytest.mark.parametrize(
    ("family", "told"),
    [
        ("twice", "again.weight is read by two operators"),
        ("branching", "expected code that does the same whatever the numbers in its inputs"),
    ],
)
def test_what_is_no_graph_is_refused_in_words(family: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        traced_layers(f"{_FILE}:{family}", 2)


def test_a_degree_that_divides_no_axis_is_told() -> None:
    (layer,) = _layers("llama")
    found = find_traced(layer, _setting(), 5, (1.0,), lambda _: None)
    assert found.refused == "t = 5 divides none of its axes (q 2, gate 64, s 16)"


def test_an_operator_without_a_rule_is_told_with_its_cost_or_refused() -> None:
    (layer,) = _layers("unruled")
    (told,) = layer.unruled(_setting())
    assert told == "Unruled: no rule divides linalg_matrix_exp (linalg_matrix_exp): each device does all of it, 4.00 us"


@pytest.mark.long
def test_strict_refuses_an_operator_without_a_rule() -> None:
    found = run("schemes", f"{_FILE}:unruled", "--gpu", "A100-80", "-t", "2", "--strict")
    assert found.returncode == 2
    assert "no rule divides linalg_matrix_exp" in found.stderr
