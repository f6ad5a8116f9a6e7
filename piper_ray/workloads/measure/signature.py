"""Which layers are equal: the same modules and operations on inputs of equal shapes take the same time and memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from piper_ray.workloads.measure.graph import TracedLayer
from piper_ray.workloads.measure.tracer import attribute

_PLAIN = (bool, int, float, str, type(None))
_POSITIONS = ("idx", "index", "layer_id", "layer_number")


def signature_of(layer: TracedLayer, gradients: Iterable[bool]) -> str:
    """A hash that equal layers share. gradients: for each input, whether its gradient is asked for.

    It has the types of modules, their settings (attributes that are plain values, but not those that say which layer
    it is), shapes and types of parameters and inputs, and the operations with their constants. Values of tensors are
    not in it, nor is what a module keeps in other objects.
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
    """Type, settings and tensors of a module and all in it."""
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
    """The arguments with the nodes in them by number."""
    return repr(fx.node.map_arg(arguments, lambda node: f"%{number[node]}"))
