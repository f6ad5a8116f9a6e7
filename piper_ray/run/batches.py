"""A replica's batch, as a training loop has it, taken apart into microbatches of the example's shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from piper_ray.model.errors import UsageError
from piper_ray.workloads.measure.factory import Inputs

_NONE = "without tensors"


def in_order_of(example: Inputs, given: Inputs) -> Inputs:
    """Inputs with their names in the example's order. Raises UsageError for other inputs, and for plain values that are
    not those with which the model was traced."""
    if len(given[0]) != len(example[0]) or given[1].keys() != example[1].keys():
        raise UsageError(f"step was given {_names(given)}; expected {_names(example)}, as build was given")
    ordered: Inputs = given[0], {name: given[1][name] for name in example[1]}
    for traced, value in zip(_plain(example), _plain(ordered), strict=False):
        if traced != value:
            raise UsageError(f"step was given {value!r} where the model was traced with {traced!r}; expected the same")
    return ordered


def divided(what: str, example: Any, given: Any, count: int) -> list[Any]:
    """What a step is given, microbatch by microbatch. what: "inputs" or "target".

    Tensors ``count`` times as long as the example's are divided along their first side; those of its shape are the same
    for each microbatch, as plain values are. Raises UsageError for other shapes and containers, and for a batch that is
    but one microbatch.
    """
    wanted, spec = pytree.tree_flatten(example)
    leaves, own_spec = pytree.tree_flatten(given)
    if own_spec != spec or [_kind(leaf) for leaf in leaves] != [_kind(leaf) for leaf in wanted]:
        expected = _words(example)
        alike = "no tensors" if expected == _NONE else f"{expected} for each microbatch"
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


def _kind(leaf: object) -> object:
    return leaf.dtype if isinstance(leaf, torch.Tensor) else None


def _plain(inputs: Inputs) -> list[object]:
    return [leaf for leaf in pytree.tree_leaves(inputs) if not isinstance(leaf, torch.Tensor)]


def _names(inputs: Inputs) -> str:
    args, kwargs = inputs
    names = [*([f"{len(args)} by position"] if args else []), *kwargs]
    return f"the inputs {', '.join(names)}" if names else "no inputs"


def _words(value: object) -> str:
    """Tensors by their types and shapes."""
    leaves = pytree.tree_leaves(value)
    tensors = [
        f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}" for leaf in leaves if _kind(leaf) is not None
    ]
    return ", ".join(tensors) or _NONE
