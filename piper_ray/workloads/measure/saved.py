"""Bytes that a layer holds: its parameters, and what autograd keeps between its forward and its backward pass."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import saved_tensors_hooks

from piper_ray.workloads.measure.graph import TracedLayer


@dataclass(frozen=True)
class Held:
    """A parameter or buffer. number_bytes: of each of its numbers."""

    shape: tuple[int, ...]
    number_bytes: int
    trainable: bool

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Kept:
    """Bytes for each microbatch. saved: without recomputation; of it ``saved_inputs`` are the layer's inputs.

    inputs: all that recomputation needs. Each storage counts once, with its whole size.
    """

    saved: int
    saved_inputs: int
    inputs: int


def parameters_of(module: torch.nn.Module) -> list[Held]:
    """What the layer holds whether or not a microbatch is in flight; buffers are not trained."""
    held = [Held(tuple(tensor.shape), tensor.element_size(), tensor.requires_grad) for tensor in module.parameters()]
    return held + [Held(tuple(tensor.shape), tensor.element_size(), False) for tensor in module.buffers()]


def kept_of(layer: TracedLayer, given: Sequence[torch.Tensor]) -> tuple[Kept, list[bool]]:
    """What one forward pass on ``given`` keeps, and which of its outputs have gradients.

    Parameters and buffers are not counted: they are there anyway.
    """
    there = _storages([*layer.module.parameters(), *layer.module.buffers()])
    inputs = _storages(given)
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found.update(_storages([tensor]))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = layer.module(*given)  # held until all is counted, so that no address is used twice
    saved = {address: size for address, size in found.items() if address not in there}
    kept = Kept(
        saved=sum(saved.values()),
        saved_inputs=sum(size for address, size in saved.items() if address in inputs),
        inputs=sum(inputs.values()),
    )
    return kept, [bool(output.requires_grad) for output in outputs]


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
