"""Schemes of plain PyTorch modules, and what cannot be traced."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils import _pytree as pytree

from piper_ray.cli import main
from piper_ray.model.errors import UsageError
from piper_ray.workloads.estimate.build import EstimateRequest
from piper_ray.workloads.estimate.costs import Setting
from piper_ray.workloads.estimate.hardware import load_hardware
from piper_ray.workloads.measure.factory import find_factory
from piper_ray.workloads.measure.operators import _Trace, _TracedValue, exported_module, shares, traced_layers
from piper_ray.workloads.schemes.check import faults_of
from piper_ray.workloads.schemes.document import in_full
from piper_ray.workloads.schemes.frontier import find_traced
from piper_ray.workloads.schemes.graph import OperatorFamily, OperatorGraph
from piper_ray.workloads.schemes.layers import BORDERS
from piper_ray.workloads.schemes.names import known_divisions, name_of
from piper_ray.workloads.schemes.prices import TracedGraph, TracedPrices
from piper_ray.workloads.schemes.program import SchemeProgram
from piper_ray.workloads.schemes.scheme import PricedGraph
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
    "grouped": {"s": 16, "qkv": 2, "into": 64},
    "mamba": {"s": 16, "decay": 2},
    "experts": {"s": 16, "into": 4},
    "state_space": {"s": 16, "into": 64},
    "unet": {"down": 4},
    "cross": {"s": 16, "z": 24, "q": 4},
    "encoder": {"s": 16, "self_attn": 4, "linear1": 64},
    "vit": {"layer.qkv": 4, "layer.up": 128},
    "latent": {"s": 16, "q": 4},
    "window": {"s": 16, "o 1": 2},
    "scan": {"s": 16, "decay": 64},
    "routed": {"s": 16, "gate": 4},
}
"""By family the axes that a layer is divided along, and what shards of them divide: heads, groups of them, channels."""


@pytest.mark.parametrize("family", long_after(1, _AXES))
def test_axes_are_those_that_the_code_means(family: str) -> None:
    (layer,) = _layers(family)
    assert _AXES[family].items() <= layer.graph.sizes.items()
    assert not list(layer.unruled(_setting()))


@pytest.mark.parametrize(
    ("family", "border"), long_after(1, [(family, number % len(BORDERS)) for number, family in enumerate(_AXES)])
)
def test_schemes_of_families_hold_by_the_rule_table(family: str, border: int) -> None:
    (layer,) = _layers(family)
    prices = TracedPrices(2, _setting(), layer)
    program = SchemeProgram(layer.graph, 2, prices, BORDERS[border])
    scheme = program.fastest(8.0, (1.0, 3.0)[border] * 1.001 * program.least_held_bytes(8.0))
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


def test_a_device_has_its_share_of_each_part() -> None:
    assert shares([4, 2, 2], 2) == [0, 1, 4, 6, 2, 3, 5, 7]
    assert shares([6], 3) == [0, 1, 2, 3, 4, 5]


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
        ("choosing", "how much index makes depends on numbers in its inputs"),
        ("branching", "expected code that does the same for all numbers in its inputs"),
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
def test_strict_refuses_an_operator_without_a_rule(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has imported torch."""
    asked = ["schemes", f"{_FILE}:unruled", "--gpu", "A100-80", "-t", "2", "--strict"]
    monkeypatch.setattr("sys.argv", ["piper-ray", *asked])
    assert main() == 2
    assert "no rule divides linalg_matrix_exp" in capsys.readouterr().err


class _Dependence(fx.Interpreter):
    """Of each operator on real numbers: whether the first of two devices' share of its result along an axis that may be
    divided depends on no more than that device's shares of inputs along it. looked: how often; wrong: where not."""

    def __init__(self, exported: Any, trace: _Trace, graph: OperatorGraph) -> None:
        super().__init__(exported.graph_module)
        self.trace, self.sizes = trace, graph.sizes
        self.along = {name: step.along for step in graph.steps for name in step.outputs}
        self.looked, self.wrong = 0, list[str]()

    def run_node(self, n: fx.Node) -> Any:
        made = self.trace.made.get(n)
        if n.op != "call_function" or not isinstance(made, _TracedValue) or not made.learned:
            return super().run_node(n)
        if not made.name.startswith(n.name):  # a view
            return super().run_node(n)
        args, _ = self.fetch_args_kwargs_from_env(n)
        leaves: list[torch.Tensor] = []

        def leaf(x: object) -> object:
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                leaves.append(x.detach().requires_grad_())
                return leaves[-1]
            return x

        with torch.enable_grad():
            found = n.target(*pytree.tree_map(leaf, args), **n.kwargs)
        read = [self.trace.made[x] for x in n.all_input_nodes if self.env[x].is_floating_point()]
        for side, (name, length, parts) in enumerate(self.trace.sides(made) if found.requires_grad else ()):
            if name not in self.sizes or name in (*self.along[made.name], *self.along.get(n.name, ())):
                continue
            half = found.index_select(side, torch.tensor(shares(parts, 2)[: length // 2]))
            back = torch.autograd.grad(half.square().sum(), leaves, allow_unused=True, retain_graph=True)
            for one, gradient in zip(read, back, strict=True):
                assert isinstance(one, _TracedValue)
                for place, (own, size, pieces) in enumerate(self.trace.sides(one)):
                    if own != name or gradient is None:
                        continue
                    self.looked += 1
                    others = torch.tensor(shares(pieces, 2)[size // 2 :])
                    if gradient.index_select(place, others).abs().max() > 1e-9:
                        self.wrong.append(f"{n.name} of {one.name} along {name}")
        return found.detach()


@pytest.mark.parametrize("family", long_after(1, ["unet", *(name for name in _AXES if name != "unet")]))
def test_shards_depend_on_shards_alone(family: str) -> None:
    """The first convolution of the U-Net's lower half has one axis for what goes in and what comes out."""
    model = find_factory(f"{_FILE}:{family}", {}).build(2, torch.device("cpu"), ())
    model.module.eval()
    exported, trace = exported_module(_FILE, family, model), _Trace(family)
    given = iter(model.inputs[0])
    numbers: list[object] = []
    for node in exported.graph.nodes:
        trace.follow(node, exported)
        if node.op == "placeholder":
            path = exported.graph_signature.inputs_to_parameters.get(node.name)
            constant = exported.graph_signature.inputs_to_lifted_tensor_constants.get(node.name)
            known = exported.constants.get(constant) if constant else None
            numbers.append(exported.state_dict[path].detach() if path else next(given) if known is None else known)
    look = _Dependence(exported, trace, trace.finished(_FILE).graph)
    look.run(*numbers)
    assert look.wrong == []
    assert look.looked > 4
