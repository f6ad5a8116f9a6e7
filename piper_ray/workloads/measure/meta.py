"""Models that a device, or this machine, does not hold: traced whole on torch's meta device, which has shapes and no
numbers, and given numbers a part at a time.

Weights are drawn anew, by each module's ``reset_parameters`` where it has that: passes hardly take longer or less by
them.
"""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx.node import map_aggregate

from piper_ray.workloads.measure.graph import TracedLayer

META = torch.device("meta")

_NAMES = frozenset({"cpu", "cpu:0", "meta"})
"""Texts by which code names the device of a trace."""

_SPREAD = 0.02
"""Standard deviation of numbers that stand for others."""

_SHARE = 0.5
"""Of a memory, what a whole model may take: gradients, activations and other programs have the rest."""


def room_bytes(device: torch.device, processes: int = 1) -> float:
    """What a model may take that is built on the CPU by each of so many processes, and then brought to the device."""
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / processes
    device_bytes = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else host_bytes
    return _SHARE * float(min(host_bytes, device_bytes))


def on_device(layer: TracedLayer, device: torch.device) -> TracedLayer:
    """The layer with numbers, where it has none: a copy, so that they go with it."""
    if not any(one.is_meta for one in [*layer.inputs, *layer.module.parameters(), *layer.module.buffers()]):
        return layer
    module = copy.deepcopy(layer.module)
    materialise(module, device)
    move_graph(module, device)
    return replace(layer, module=module, inputs=tuple(filled(one, device) for one in layer.inputs))


def materialise(module: nn.Module, device: torch.device) -> None:
    """Gives numbers to what has none; of one seed, so that replicas begin alike. Parameters that are shared stay so."""
    made: dict[int, torch.Tensor] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for part in module.modules():
            bare = False
            for held in (part._parameters, part._buffers):
                for name, tensor in held.items():
                    if tensor is not None and tensor.is_meta:
                        bare = True
                        held[name] = made.setdefault(id(tensor), filled(tensor, device))  # type: ignore[assignment]
            if bare and callable(reset := getattr(part, "reset_parameters", None)):
                reset()


def filled(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the same form with numbers, near zero; the tensor itself on the device, if it has its own."""
    if not tensor.is_meta:
        return tensor.to(device)
    found = torch.zeros_like(tensor, device=device, requires_grad=False)
    if found.is_floating_point():
        found.normal_(0.0, _SPREAD)
    return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found


def move_graph(layer: Any, device: torch.device) -> None:
    """Where a traced layer's graph names the device of the trace, it names this one; so for tensors that it holds."""

    def moved(argument: Any) -> Any:
        is_text = isinstance(argument, str) and argument in _NAMES
        return device if is_text or isinstance(argument, torch.device) else argument

    for node in layer.graph.nodes:
        node.args, node.kwargs = map_aggregate(node.args, moved), map_aggregate(node.kwargs, moved)
        if node.op == "get_attr":
            owner, _, name = str(node.target).rpartition(".")
            held = getattr(layer.get_submodule(owner), name)
            if isinstance(held, torch.Tensor) and not isinstance(held, nn.Parameter):
                setattr(layer.get_submodule(owner), name, filled(held, device))
    layer.recompile()
