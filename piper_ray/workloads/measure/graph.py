"""From a traced pass to layers: it is cut where a layer's module is called, and what is between joins the layer before.

Numbers of layers go up along the pass: a call of a layer's module takes the next number, everything else the largest
of what it reads. So every edge goes from a smaller number to a larger one, and the layers are a directed acyclic graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from piper_ray.workloads.formats.documents import refuse
from piper_ray.workloads.measure.choice import ModuleChoice, chosen
from piper_ray.workloads.measure.factory import TrainableModel
from piper_ray.workloads.measure.tracer import trace


@dataclass(frozen=True)
class Source:
    """Where an input of a layer comes from: output number ``output`` of a layer, or the model's inputs (None)."""

    layer: int | None
    output: int


@dataclass(frozen=True)
class TracedLayer:
    """A layer as a module of its own, with example inputs.

    path: of the module it was cut at. ``module(*inputs)`` gives a tuple of ``outputs`` tensors.
    """

    path: str
    name: str
    module: fx.GraphModule
    sources: tuple[Source, ...]
    inputs: tuple[torch.Tensor, ...]
    outputs: int


@dataclass(frozen=True)
class TracedModel:
    """A model as its layers, in the order of the pass.

    outputs: where the tensors come from that it returns; None: from no layer, and from no input as it is.
    result: what it returns, with a ``Slot`` for each of them.
    """

    layers: list[TracedLayer]
    outputs: tuple[Source | None, ...]
    result: object


def layers_of(spec: str, model: TrainableModel, patterns: Sequence[str]) -> list[TracedLayer]:
    """The layers in the order of the pass. Raises UsageError and InputError."""
    return traced_model(spec, model, patterns).layers


def traced_model(spec: str, model: TrainableModel, patterns: Sequence[str]) -> TracedModel:
    """The layers in the order of the pass, and what the model returns. Raises UsageError and InputError."""
    choice = chosen(model.module, patterns)
    graph, values, result = trace(spec, model, choice.leaves)
    number = _numbers(graph, choice)
    if not number:
        refuse(spec, "", f"{type(model.module).__name__} calls no submodule that could be a layer; expected a model of "
                         "several modules (--layers names them)")  # fmt: skip
    heads = [node for node in graph.nodes if _is_layer(node, choice)]
    outputs = _outputs(number, len(heads))
    place = {node: Source(layer, index) for layer, nodes in enumerate(outputs) for index, node in enumerate(nodes)}
    place |= {node: Source(None, i) for i, node in enumerate(n for n in graph.nodes if n.op == "placeholder")}
    layers = []
    for layer, head in enumerate(heads):
        for node in outputs[layer]:
            if not isinstance(values[node], torch.Tensor):
                refuse(spec, str(head.target), f"returns a {type(values[node]).__name__}; expected tensors, or tuples, "
                                               "lists and dicts of them")  # fmt: skip
        part, read = _extracted(graph, number, layer, outputs[layer])
        module = model.module.get_submodule(str(head.target))
        layers.append(
            TracedLayer(
                path=str(head.target),
                name=type(module).__name__,
                module=fx.GraphModule(model.module, part),
                sources=tuple(place[node] for node in read),
                inputs=tuple(values[node] for node in read),
                outputs=len(outputs[layer]),
            )
        )
    (returned,) = (node.args[0] for node in graph.nodes if node.op == "output")
    return TracedModel(layers, tuple(place.get(node) for node in returned), result)


def _is_layer(node: fx.Node, choice: ModuleChoice) -> bool:
    return node.op == "call_module" and node.target in choice.layers


def _numbers(graph: fx.Graph, choice: ModuleChoice) -> dict[fx.Node, int]:
    """The layer of each node that needs one; what depends on the model's inputs alone has none."""
    number: dict[fx.Node, int] = {}
    count = 0
    for node in graph.nodes:
        read = [number[source] for source in node.all_input_nodes if source in number]
        if _is_layer(node, choice):
            number[node] = count
            count += 1
        elif node.op != "output" and read:
            number[node] = max(read)
    return number


def _outputs(number: Mapping[fx.Node, int], count: int) -> list[list[fx.Node]]:
    """Of each layer, the nodes that other layers, or the model's caller, get."""
    outputs: list[list[fx.Node]] = [[] for _ in range(count)]
    for node, layer in number.items():
        if any(user.op == "output" or number.get(user, layer) != layer for user in node.users):
            outputs[layer].append(node)
    return outputs


def _extracted(
    graph: fx.Graph, number: Mapping[fx.Node, int], layer: int, outputs: Sequence[fx.Node]
) -> tuple[fx.Graph, list[fx.Node]]:
    """The layer's own graph, and the nodes outside that it reads, in the order of its arguments."""
    wanted: set[fx.Node] = set()
    read: set[fx.Node] = set()
    open_nodes = [node for node in graph.nodes if number.get(node) == layer]
    while open_nodes:
        node = open_nodes.pop()
        if node in wanted or node in read:
            continue
        if node.op == "placeholder" or number.get(node, layer) != layer:
            read.add(node)
        else:
            wanted.add(node)
            open_nodes += node.all_input_nodes
    part = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    arguments = [node for node in graph.nodes if node in read]
    for index, node in enumerate(arguments):
        copies[node] = part.placeholder(f"input_{index}")
    for node in graph.nodes:
        if node in wanted:
            copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(tuple(copies[node] for node in outputs))
    return part, arguments
