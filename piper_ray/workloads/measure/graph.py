"""From a traced pass to layers. The pass is cut where a layer's module is called; operations in between join the layer
before them.

Layers are numbered along the pass: a call of a layer's module takes the next number, any other node the largest number
that it reads. So every edge goes from a smaller number to a larger one, and the layers form a directed acyclic graph.

``chosen`` decides which modules of a model are layers, and which the tracer enters. ``signature_of`` tells which layers
are equal: the same modules and operations on inputs of equal shapes take the same time and memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import fx, nn

from piper_ray.model.errors import UsageError
from piper_ray.workloads.formats.documents import refuse
from piper_ray.workloads.measure.factory import TrainableModel
from piper_ray.workloads.measure.tracer import attribute, trace

_CONTAINERS = (
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder,
)  # fmt: skip


@dataclass(frozen=True)
class ModuleChoice:
    """Paths of modules. layers: modules whose calls each start a layer. leaves: these, and all others that the tracer
    does not enter."""

    layers: frozenset[str]
    leaves: frozenset[str]


def chosen(model: nn.Module, patterns: Sequence[str]) -> ModuleChoice:
    """The modules that ``patterns`` (``blocks.*``) match, or else the model's own submodules: see ``_own_layers``.

    The tracer does not enter modules of torch.nn, except containers. Raises UsageError for a pattern that matches no
    module.
    """
    paths = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    if patterns:
        layers: set[str] = set()
        for pattern in patterns:
            matched = {path for path in paths if fnmatchcase(path, pattern) and _same_depth(path, pattern)}
            if not matched:
                raise UsageError(f"--layers {pattern}: no such module; {_modules_of(model, paths)}")
            layers |= matched
    else:
        layers = set(_own_layers(model, ""))
    leaves = {path for path, module in model.named_modules(remove_duplicate=False) if path and _of_torch(module)}
    return ModuleChoice(frozenset(layers), frozenset(layers | leaves))


def _modules_of(model: nn.Module, paths: Sequence[str]) -> str:
    name = type(model).__name__
    if not paths:
        return f"{name} has no modules in it; expected a model of several"
    return f"{name} has {', '.join(paths[:20])}" + (" ..." if len(paths) > 20 else "")


def _same_depth(path: str, pattern: str) -> bool:
    return path.count(".") == pattern.count(".")


def _own_layers(module: nn.Module, path: str) -> list[str]:
    """The topmost submodules that are not containers and hold no stack of blocks. Modules of torch.nn count only if
    they have parameters.

    So the items of ``ModuleList([Block, ...])`` and of ``Sequential(Block, ...)`` are layers, however they are nested;
    a block's own parts are not, and activations and the like belong to the layer before them.
    """
    found: list[str] = []
    for name, child in module.named_children():
        below = f"{path}.{name}" if path else name
        if isinstance(child, _CONTAINERS) or (
            holds_stack(child) and not isinstance(module, (nn.Sequential, nn.ModuleList))
        ):
            found += _own_layers(child, below)
        elif not _of_torch(child) or any(True for _ in child.parameters()):
            found.append(below)
    return found


def holds_stack(module: nn.Module) -> bool:
    """Whether it contains, at any depth, a container of composite modules."""
    return not _of_torch(module) and any(
        isinstance(part, (nn.Sequential, nn.ModuleList)) and any(_is_composite(item) for item in part.children())
        for part in module.modules()
    )


def _is_composite(module: nn.Module) -> bool:
    return not isinstance(module, _CONTAINERS) and not _of_torch(module) and any(True for _ in module.children())


def _of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn") and not isinstance(module, _CONTAINERS)


@dataclass(frozen=True)
class TensorSource:
    """The origin of a layer's input: output number ``output`` of a layer, or of the model's inputs (None)."""

    layer: int | None
    output: int


@dataclass(frozen=True)
class TracedLayer:
    """A layer as a module of its own, with example inputs.

    path: the path of the module at which it was cut. ``module(*inputs)`` returns a tuple of ``outputs`` tensors.
    """

    path: str
    name: str
    module: fx.GraphModule
    sources: tuple[TensorSource, ...]
    inputs: tuple[torch.Tensor, ...]
    outputs: int


@dataclass(frozen=True)
class TracedModel:
    """A model as its layers, in the order of the pass.

    outputs: the origin of each tensor that the model returns; None if it is neither a layer's output nor an input.
    result: the model's result, with a ``Slot`` in place of each tensor.
    """

    layers: list[TracedLayer]
    outputs: tuple[TensorSource | None, ...]
    result: object


def layers_of(spec: str, model: TrainableModel, patterns: Sequence[str]) -> list[TracedLayer]:
    """The layers in the order of the pass. Raises UsageError and InputError."""
    return traced_model(spec, model, patterns).layers


def traced_model(spec: str, model: TrainableModel, patterns: Sequence[str]) -> TracedModel:
    """The layers in the order of the pass, and the model's result. Raises UsageError and InputError."""
    choice = chosen(model.module, patterns)
    graph, values, result = trace(spec, model, choice.leaves)
    number = _numbers(graph, choice)
    if not number:
        refuse(spec, "", f"{type(model.module).__name__} calls no submodule that could be a layer; expected a model of "
                         "several modules (--layers names them)")  # fmt: skip
    heads = [node for node in graph.nodes if _is_layer(node, choice)]
    outputs = _outputs(number, len(heads))
    place = {
        node: TensorSource(layer, index) for layer, nodes in enumerate(outputs) for index, node in enumerate(nodes)
    }
    place |= {node: TensorSource(None, i) for i, node in enumerate(n for n in graph.nodes if n.op == "placeholder")}
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
    """The layer of each node that needs one. A node that only depends on the model's inputs has none."""
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
    """The nodes of each layer that other layers or the model's caller use."""
    outputs: list[list[fx.Node]] = [[] for _ in range(count)]
    for node, layer in number.items():
        if any(user.op == "output" or number.get(user, layer) != layer for user in node.users):
            outputs[layer].append(node)
    return outputs


def _extracted(
    graph: fx.Graph, number: Mapping[fx.Node, int], layer: int, outputs: Sequence[fx.Node]
) -> tuple[fx.Graph, list[fx.Node]]:
    """The layer's own graph, and the outside nodes that it reads, in the order of its arguments."""
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


_PLAIN = (bool, int, float, str, type(None))
_POSITIONS = ("idx", "index", "layer_id", "layer_number")


def signature_of(layer: TracedLayer, gradients: Iterable[bool]) -> str:
    """A hash that equal layers share. gradients: for each input, whether its gradient is required.

    It covers the types of modules, their settings (attributes with plain values, except those that state which layer it
    is), shapes and types of parameters and inputs, and the operations with their constants. It covers neither the
    values of tensors nor what a module keeps in other objects.
    """
    number = {node: index for index, node in enumerate(layer.module.graph.nodes)}
    inputs = [[*_shape(tensor), bool(wanted)] for tensor, wanted in zip(layer.inputs, gradients, strict=True)]
    steps = [
        [node.op, _target(layer.module, node), _constants(node.args, number), _constants(node.kwargs, number)]
        for node in layer.module.graph.nodes
    ]
    text = json.dumps([layer.name, inputs, steps], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _shape(tensor: torch.Tensor) -> list[object]:
    return [list(tensor.shape), list(tensor.stride()), str(tensor.dtype)]


def _target(root: fx.GraphModule, node: fx.Node) -> object:
    if node.op == "call_module":
        return _module(root.get_submodule(str(node.target)))
    if node.op == "get_attr":
        value = attribute(root, str(node.target))
        return [*_shape(value), value.requires_grad] if isinstance(value, torch.Tensor) else repr(value)
    if callable(node.target):
        return f"{getattr(node.target, '__module__', '')}.{getattr(node.target, '__qualname__', node.target)}"
    return "" if node.op in ("placeholder", "output") else str(node.target)


def _module(module: torch.nn.Module) -> list[object]:
    """The type, settings and tensors of a module and of all modules in it."""
    return [
        [
            path,
            f"{type(part).__module__}.{type(part).__qualname__}",
            part.extra_repr(),
            sorted((key, repr(value)) for key, value in vars(part).items() if _is_setting(key, value)),
            [[key, *_shape(tensor), tensor.requires_grad] for key, tensor in part.named_parameters(recurse=False)],
            [[key, *_shape(tensor)] for key, tensor in part.named_buffers(recurse=False)],
        ]
        for path, part in module.named_modules()
    ]


def _is_setting(key: str, value: object) -> bool:
    plain = isinstance(value, _PLAIN) or (
        isinstance(value, (tuple, list)) and all(isinstance(item, _PLAIN) for item in value)
    )
    return plain and not key.endswith(_POSITIONS)


def _constants(arguments: Any, number: dict[fx.Node, int]) -> str:
    """The arguments as a text in which each node is replaced by its number."""
    return repr(fx.node.map_arg(arguments, lambda node: f"%{number[node]}"))
