"""Microbatches to train on: from the factory, the same on every rank; or a training loop's batch, divided into
microbatches of the example's shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from piper_ray.model.errors import Fault, InputError, UsageError
from piper_ray.run.stages import input_name
from piper_ray.workloads.measure.factory import Declared, Factory, Inputs, TrainableModel
from piper_ray.workloads.measure.meta import filled

_CPU = torch.device("cpu")
_NO_TENSORS = "without tensors"


@dataclass(frozen=True)
class PassInputs:
    """inputs: the arguments of a call of the model. tensors: the tensors in them, by the names that stages use."""

    inputs: Inputs
    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, inputs: Inputs) -> PassInputs:
        leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
        return cls(inputs, {input_name(number): leaf for number, leaf in enumerate(leaves)})

    def on(self, device: torch.device) -> PassInputs:
        """The same inputs on a device."""
        return PassInputs.of(moved(self.inputs, device))


def moved(inputs: Inputs, device: torch.device) -> Inputs:
    """The inputs with all tensors on a device."""
    found: Inputs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), inputs)
    return found


class Data:
    """A sequence of microbatches: random ones if inputs were declared, the factory's own if it returns an iterator, and
    otherwise its example repeatedly."""

    def __init__(self, factory: Factory, model: TrainableModel, declared: Sequence[Declared], microbatch: int) -> None:
        self._factory, self._declared, self._size = factory, declared, microbatch
        # Does not keep the model, most of which is freed. A model without values has inputs without values.
        self._example = pytree.tree_map_only(torch.Tensor, lambda one: filled(one, _CPU), model.inputs)
        self._further = model.further
        self._steps = 0
        self._form = _form(model.inputs)

    def batch(self, microbatches: int) -> list[PassInputs]:
        """The next step's microbatches. Raises InputError for inputs that differ from the first in more than their
        values."""
        self._steps += 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._steps)
            given = list(self._given(microbatches))
        for inputs in given:
            if _form(inputs) != self._form:
                what = f"gives inputs of {_form(inputs)[0]} after {self._form[0]}; expected all microbatches alike"
                raise InputError(self._factory.spec, [Fault("", what)])
        return [PassInputs.of(inputs) for inputs in given]

    def _given(self, microbatches: int) -> Iterator[Inputs]:
        for _ in range(microbatches):
            if self._declared:
                yield self._factory.fitted(tuple(one.tensor(self._size) for one in self._declared), self._size)
            elif self._further is not None:
                yield self._factory.fitted(self._factory.next_of(self._further), self._size)
            else:
                yield self._example


def _form(inputs: Inputs) -> tuple[str, object]:
    """Shapes and types in words, and the containers."""
    leaves, spec = pytree.tree_flatten(inputs)
    shapes = [
        f"{tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}"
        if isinstance(leaf, torch.Tensor)
        else repr(leaf)
        for leaf in leaves
    ]
    return ", ".join(shapes), spec


def in_order_of(example: Inputs, given: Inputs) -> Inputs:
    """Inputs with their names in the example's order. Raises UsageError for other inputs, and for plain values that
    differ from those with which the model was traced."""
    if len(given[0]) != len(example[0]) or given[1].keys() != example[1].keys():
        raise UsageError(f"step was given {_names(given)}; expected {_names(example)}, as build was given")
    ordered: Inputs = given[0], {name: given[1][name] for name in example[1]}
    for traced, value in zip(_plain(example), _plain(ordered), strict=False):
        if traced != value:
            raise UsageError(f"step was given {value!r} where the model was traced with {traced!r}; expected the same")
    return ordered


def divided(what: str, example: Any, given: Any, count: int) -> list[Any]:
    """A step's arguments, divided into microbatches. what: "inputs" or "target".

    Tensors ``count`` times as long as the example's are divided along their first side; tensors of the example's shape
    are the same for each microbatch, and so are plain values. Raises UsageError for other shapes and containers, and
    for a batch that is only one microbatch.
    """
    wanted, spec = pytree.tree_flatten(example)
    leaves, own_spec = pytree.tree_flatten(given)
    if own_spec != spec or [_type_of(leaf) for leaf in leaves] != [_type_of(leaf) for leaf in wanted]:
        expected = _words(example)
        alike = "no tensors" if expected == _NO_TENSORS else f"{expected} for each microbatch"
        raise UsageError(
            f"step was given the {what} {_words(given)}; expected {alike}, in the same containers as build was"
        )
    columns, whole = [], 0
    for one, leaf in zip(wanted, leaves, strict=True):
        same = not isinstance(leaf, torch.Tensor) or leaf.shape == one.shape
        whole += isinstance(leaf, torch.Tensor) and same
        if not same and (one.dim() == 0 or tuple(leaf.shape) != (count * one.shape[0], *one.shape[1:])):
            longer = f"{(count * one.shape[0], *one.shape[1:])} for {count} microbatches" if one.dim() else "it"
            raise UsageError(
                f"step: a tensor of the {what} has the shape {tuple(leaf.shape)} where build was given "
                f"{tuple(one.shape)}; expected {longer}"
            )
        columns.append([leaf] * count if same else list(leaf.chunk(count)))
    tensors = sum(isinstance(leaf, torch.Tensor) for leaf in leaves)
    if count > 1 and tensors and whole == tensors:
        raise UsageError(f"step was given the {what} of one microbatch; expected those of {count}")
    return [pytree.tree_unflatten([column[k] for column in columns], spec) for k in range(count)]


def _type_of(leaf: object) -> object:
    return leaf.dtype if isinstance(leaf, torch.Tensor) else None


def _plain(inputs: Inputs) -> list[object]:
    return [leaf for leaf in pytree.tree_leaves(inputs) if not isinstance(leaf, torch.Tensor)]


def _names(inputs: Inputs) -> str:
    args, kwargs = inputs
    names = [*([f"{len(args)} by position"] if args else []), *kwargs]
    return f"the inputs {', '.join(names)}" if names else "no inputs"


def _words(value: object) -> str:
    """The types and shapes of tensors in a value."""
    leaves = pytree.tree_leaves(value)
    tensors = [
        f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}" for leaf in leaves if _type_of(leaf) is not None
    ]
    return ", ".join(tensors) or _NO_TENSORS
