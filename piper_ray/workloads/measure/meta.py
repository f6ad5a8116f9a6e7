"""Models that do not fit on a device or on this machine. They are traced as a whole on torch's meta device, which has
shapes but no values, and get values one part at a time.

Weights are new random values, from each module's ``reset_parameters`` if it has that; they hardly change the time of
passes.
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

_NAMES = frozenset({"cpu", "cpu:0", "meta"})
"""Names that code uses for the device of a trace."""

_SPREAD = 0.02
"""Standard deviation of values that replace others."""

_SHARE = 0.5
"""The share of a memory that a whole model may use; the rest is for gradients, activations and other programs."""


def room_bytes(device: torch.device, processes: int = 1) -> float:
    """The largest size of a model that each of ``processes`` processes builds on the CPU and then moves to the
    device."""
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / processes
    device_bytes = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else host_bytes
    return _SHARE * float(min(host_bytes, device_bytes))


def on_device(layer: TracedLayer, device: torch.device) -> TracedLayer:
    """The layer with values. If it has none, a copy gets them, so that they are freed with it."""
    if not any(one.is_meta for one in [*layer.inputs, *layer.module.parameters(), *layer.module.buffers()]):
        return layer
    module = copy.deepcopy(layer.module)
    materialise(module, device)
    move_graph(module, device)
    return replace(layer, module=module, inputs=tuple(filled(one, device) for one in layer.inputs))


def materialise(module: nn.Module, device: torch.device) -> None:
    """Gives values to tensors that have none, with a fixed seed, so that replicas begin alike. Shared parameters stay
    shared."""
    made: dict[int, torch.Tensor] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for part in module.modules():
            bare = False
            for held in (part._parameters, part._buffers):
                for name, tensor in held.items():
                    if tensor is not None and tensor.is_meta:
                        bare = True
                        held[name] = made.setdefault(id(tensor), filled(tensor, device))
            if bare and callable(reset := getattr(part, "reset_parameters", None)):
                reset()


def filled(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the same form with values near zero; a tensor that has values is moved to the device."""
    if not tensor.is_meta:
        return tensor.to(device)
    found = torch.zeros_like(tensor, device=device, requires_grad=False)
    if found.is_floating_point():
        found.normal_(0.0, _SPREAD)
    return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found


def move_graph(layer: Any, device: torch.device) -> None:
    """Replaces the device of the trace by this one in a traced layer's graph, also for tensors that the graph holds."""

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
