"""Microbatches to train on: what the factory gives, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils import _pytree as pytree

from piper_ray.model.errors import Fault, InputError
from piper_ray.run.stages import input_name
from piper_ray.workloads.measure.factory import Factory, Inputs, TrainableModel
from piper_ray.workloads.measure.inputs import Declared


@dataclass(frozen=True)
class Microbatch:
    """inputs: of a call of the model. tensors: those in it, by the names that stages know."""

    inputs: Inputs
    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, inputs: Inputs) -> Microbatch:
        leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
        return cls(inputs, {input_name(number): leaf for number, leaf in enumerate(leaves)})

    def on(self, device: torch.device) -> Microbatch:
        """On a device."""
        return Microbatch.of(moved(self.inputs, device))


def moved(inputs: Inputs, device: torch.device) -> Inputs:
    """With all tensors on a device."""
    found: Inputs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), inputs)
    return found


class Data:
    """Microbatch after microbatch: random ones where inputs were declared, the factory's own where it gives an
    iterator, and else its example again and again."""

    def __init__(self, factory: Factory, model: TrainableModel, declared: Sequence[Declared], microbatch: int) -> None:
        self._factory, self._declared, self._size = factory, declared, microbatch
        self._example, self._further = model.inputs, model.further  # and not the model, most of which is let go
        self._steps = 0
        self._form = _form(model.inputs)

    def batch(self, microbatches: int) -> list[Microbatch]:
        """The next step's. Raises InputError for inputs that differ from the first in more than their numbers."""
        self._steps += 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._steps)
            given = list(self._given(microbatches))
        for inputs in given:
            if _form(inputs) != self._form:
                what = f"gives inputs of {_form(inputs)[0]} after {self._form[0]}; expected all microbatches alike"
                raise InputError(self._factory.spec, [Fault("", what)])
        return [Microbatch.of(inputs) for inputs in given]

    def _given(self, microbatches: int) -> Iterator[Inputs]:
        for _ in range(microbatches):
            if self._declared:
                yield self._factory.fitted(tuple(one.tensor(self._size) for one in self._declared), self._size)
            elif self._further is not None:
                yield self._factory.fitted(self._factory.next_of(self._further), self._size)
            else:
                yield self._example


def _form(inputs: Inputs) -> tuple[str, object]:
    """Shapes and types in words; and the containers."""
    leaves, spec = pytree.tree_flatten(inputs)
    shapes = [
        f"{tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}"
        if isinstance(leaf, torch.Tensor)
        else repr(leaf)
        for leaf in leaves
    ]
    return ", ".join(shapes), spec
