"""Finding the layers of a model: choice of modules, graph, equal layers; and what cannot be followed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from piper_ray.model.errors import InputError, UsageError
from piper_ray.workloads.measure.factory import TrainableModel, find_factory
from piper_ray.workloads.measure.graph import TensorSource, TracedLayer, chosen, layers_of, signature_of
from tests.lengths import long_after
from tests.profile_models import GPT, HERE

CPU = torch.device("cpu")


def model_of(spec: str, **arguments: object) -> TrainableModel:
    return find_factory(spec if ":" in spec else f"{HERE}:{spec}", arguments).build(4, CPU, ())


def traced(spec: str, patterns: Sequence[str] = (), **arguments: object) -> list[TracedLayer]:
    return layers_of(spec, model_of(spec, **arguments), patterns)


def edges(layers: Sequence[TracedLayer]) -> set[tuple[int, int]]:
    return {(s.layer, v) for v, layer in enumerate(layers) for s in layer.sources if s.layer is not None}


def kinds(layers: Sequence[TracedLayer]) -> list[int]:
    """For each layer the first one of its signature."""
    signatures = [signature_of(layer, [tensor.is_floating_point() for tensor in layer.inputs]) for layer in layers]
    return [signatures.index(signature) for signature in signatures]


def test_a_gpt_is_embeddings_blocks_and_head() -> None:
    layers = traced(GPT, layers=5)
    assert [layer.path for layer in layers] == [
        "word_embedding", "position_embedding", *(f"blocks.{i}" for i in range(5)), "norm", "head",
    ]  # fmt: skip
    assert edges(layers) == {(i, i + 1) for i in range(8)}
    assert kinds(layers) == [0, 1, 2, 2, 2, 2, 2, 7, 8]
    assert layers[0].sources == (TensorSource(None, 0),)


def test_a_resnet_is_its_blocks_and_what_stands_beside_them() -> None:
    layers = traced("small_resnet")
    assert [layer.name for layer in layers] == ["Conv2d", "BatchNorm2d", *["Bottle"] * 4, "Linear"]
    assert kinds(layers) == [0, 1, 2, 2, 4, 5, 6]
    called = [node.target for node in layers[1].module.graph.nodes if node.op == "call_module"]
    assert called == ["norm", "relu"]  # activations go with the layer before them


def test_two_towers_join_and_skip_with_tuples_dicts_and_keywords_between() -> None:
    layers = traced("two_towers")
    assert [layer.path for layer in layers][3:6] == ["towers.image.encoders.2", "towers.text.enter",
                                                     "towers.text.encoders.0"]  # fmt: skip
    assert edges(layers) == {(0, 1), (0, 2), (1, 2), (0, 3), (2, 3), (4, 5), (4, 6), (5, 6), (3, 7), (6, 7)}
    assert kinds(layers) == [0, 1, 2, 3, 4, 5, 6, 7]  # the last of a tower also pools


@pytest.mark.parametrize("spec", long_after(1, [GPT, "small_resnet", "two_towers"]))
def test_the_layers_together_do_what_the_model_does(spec: str) -> None:
    model = model_of(spec)
    model.module.eval()  # normalisation over the batch would depend on how often it has run
    args, kwargs = model.inputs
    with torch.no_grad():
        expected = model.module(*args, **kwargs)
        found: list[tuple[torch.Tensor, ...]] = []
        for layer in layers_of(spec, model, ()):
            given = [
                tensor if source.layer is None else found[source.layer][source.output]
                for source, tensor in zip(layer.sources, layer.inputs, strict=True)
            ]
            found.append(layer.module(*given))
    whole = expected["score"] if isinstance(expected, dict) else expected
    assert any(torch.equal(output, whole) for output in found[-1])


def test_every_parameter_is_in_one_layer() -> None:
    for spec in (GPT, "small_resnet", "two_towers"):
        model = model_of(spec)
        layers = layers_of(spec, model, ())
        numbers = [parameter.numel() for layer in layers for parameter in layer.module.parameters()]
        assert sum(numbers) == sum(parameter.numel() for parameter in model.module.parameters())


def test_layers_can_be_named() -> None:
    layers = traced(GPT, ["blocks.*.attention", "blocks.*.mlp", "head"], layers=2)
    assert [layer.path for layer in layers] == [
        "blocks.0.attention", "blocks.0.mlp", "blocks.1.attention", "blocks.1.mlp", "head",
    ]  # fmt: skip
    assert edges(layers) == {(0, 1), (1, 2), (2, 3), (3, 4)}  # x + mlp(...) joins the layer that it reads last
    everything = sum(p.numel() for layer in layers for p in layer.module.parameters())
    assert everything >= sum(p.numel() for p in model_of(GPT, layers=2).module.parameters())
    with pytest.raises(UsageError, match=r"--layers blocks\.9: no such module; SmallGpt has word_embedding, "):
        traced(GPT, ["blocks.9"], layers=2)
    with pytest.raises(UsageError, match=r"--layers embed: no such module; Linear has no modules in it; expected a"):
        chosen(torch.nn.Linear(4, 4), ["embed"])


def test_settings_tell_layers_apart_and_positions_do_not() -> None:
    class Part(torch.nn.Module):
        def __init__(self, layer_idx: int, power: int) -> None:
            super().__init__()
            self.layer_idx, self.power = layer_idx, power
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.pow(x, self.power) @ self.linear.weight

    parts = [Part(0, 2), Part(1, 2), Part(2, 3)]
    module = torch.nn.Sequential(*parts)
    parts[1].linear.bias.requires_grad_(False)
    frozen = layers_of("parts", TrainableModel(module, ((torch.randn(2, 4),), {})), ())
    assert kinds(frozen) == [0, 1, 2]
    parts[1].linear.bias.requires_grad_(True)
    assert kinds(layers_of("parts", TrainableModel(module, ((torch.randn(2, 4),), {})), ())) == [0, 0, 2]


def test_python_may_branch_on_sizes_and_types() -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
            self.shift = torch.nn.Parameter(torch.zeros(3, 4))
            self.mask: torch.Tensor
            self.register_buffer("mask", torch.ones(8, 8).tril())

        def forward(self, x: torch.Tensor, *more: Any, last: bool = True) -> Any:
            assert x.dim() == 3
            assert x.dtype is torch.float32
            samples, tokens = x.shape[:2]
            if len(x) != samples or not x.is_floating_point() or more:
                raise ValueError
            x = self.first(x) + self.shift[:tokens] + torch.zeros(tokens, 4, device=x.device)
            left, right = x.chunk(2, dim=-1)
            x = torch.cat([part * float(x.size(-1)) ** -0.5 for part in (left, right)], dim=-1)
            x[:, 0] = x[:, 0] * 2.0
            x.add_(1.0)
            weights = self.mask[:tokens, :tokens].masked_fill(self.mask[:tokens, :tokens] == 0, 0.0)
            return (self.second(weights @ x), None) if last else None

    module, x = Odd(), torch.randn(2, 3, 4)
    layers = layers_of("odd", TrainableModel(module, ((x,), {})), ())
    assert [layer.path for layer in layers] == ["first", "second"]
    assert edges(layers) == {(0, 1)}
    assert {name for name, _ in layers[0].module.named_parameters()} == {"first.weight", "first.bias", "shift"}
    (between,) = layers[0].module(x)
    assert torch.equal(layers[1].module(between)[0], module(x)[0])


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("wrapping", "0: returns a Holder; expected tensors, or tuples, lists and dicts of them"),
        ("returning_an_object", "0: returns a Holder; expected tensors"),
        ("without_layers", "Linear calls no submodule that could be a layer; expected a model of several modules"),
        ("of_wrong_shape", r"cannot be multiplied \(4x5 and 8x8\); the inputs have the shapes \(4, 5\)"),
        ("branching", r"profile_models.py:\d+: Branching.forward cannot be followed here: TraceError: .* --layers"),
    ],
)
def test_what_cannot_be_followed_is_said_with_its_place(spec: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        traced(spec)


def test_stacks_of_torch_are_looked_into() -> None:
    block = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.TransformerEncoder(block, 3), torch.nn.Linear(8, 8))
    layers = layers_of("stack", TrainableModel(model.train(), ((torch.randn(2, 3, 8),), {})), ())
    assert [layer.path for layer in layers] == ["0", "1.layers.0", "1.layers.1", "1.layers.2", "2"]
    assert kinds(layers) == [0, 1, 1, 1, 0]
    whole = torch.nn.Transformer(8, 2, 2, 2, 16, batch_first=True)
    layers = layers_of("whole", TrainableModel(whole, ((torch.randn(2, 3, 8), torch.randn(2, 4, 8)), {})), ())
    assert [layer.path for layer in layers if "layers" in layer.path] == [
        "encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1",
    ]  # fmt: skip


def test_naming_layers_is_a_way_around_code_that_cannot_be_followed() -> None:
    assert [layer.path for layer in traced("branching", ["first", "inner"])] == ["first", "inner"]
