"""What crosses the borders of a cut model: one microbatch is run through all stages, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from piper_ray.model.errors import Fault, InputError
from piper_ray.run.stages import StageModule
from piper_ray.workloads.measure.places import place_of, words_of


@dataclass(frozen=True)
class Border:
    """What a stage receives and sends: tensors without data (device meta) that say whether they have gradients.

    written: numbers of the received tensors that its layers write into. idle: some of its parameters get no gradient.
    """

    received: tuple[torch.Tensor, ...]
    sent: tuple[torch.Tensor, ...]
    written: frozenset[int]
    idle: bool

    @property
    def received_bytes(self) -> int:
        """Of a microbatch."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.received)

    @property
    def sent_bytes(self) -> int:
        """Of a microbatch."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.sent)


def borders_of(
    spec: str,
    stages: Sequence[StageModule],
    inputs: Mapping[str, torch.Tensor],
    loss: Callable[[tuple[torch.Tensor, ...]], torch.Tensor],
) -> list[Border]:
    """Those of all stages. loss: of what the last one sends. Raises InputError."""
    borders = []
    received: tuple[torch.Tensor, ...] = ()
    for number, stage in enumerate(stages, start=1):
        leaves = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in received)
        what = f"stage {number}"
        try:
            with torch.enable_grad():
                given = [leaf.clone() for leaf in leaves]
                versions = [tensor._version for tensor in given]
                sent = stage.run(given, inputs)
                ends = sent
                if number == len(stages):
                    what = "the loss"
                    ends = (loss(sent),)
        except InputError:
            raise
        except Exception as error:
            where = place_of(error)
            fault = Fault(what, words_of(error) + (f" ({where})" if where else ""))
            raise InputError(spec, [fault]) from error
        written = frozenset(i for i, tensor in enumerate(given) if tensor._version != versions[i])
        idle = not _reached(ends) >= {id(one) for one in stage.parameters() if one.requires_grad}
        borders.append(Border(_shapes(received), _shapes(sent), written, idle))
        received = sent
    return borders


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Passes within leave buffers and random numbers as they were."""
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with torch.random.fork_rng(devices=[]):
        yield
    with torch.no_grad():
        for buffer, before in kept:
            buffer.copy_(before)


def _reached(ends: Sequence[torch.Tensor]) -> set[int]:
    """Ids of the parameters that ends have gradients for."""
    found: set[int] = set()
    seen: set[object] = set()
    open_nodes: list[Any] = [end.grad_fn for end in ends if end.grad_fn is not None]
    while open_nodes:
        node = open_nodes.pop()
        if node not in seen:
            seen.add(node)
            found.add(id(getattr(node, "variable", None)))
            open_nodes += [before for before, _ in node.next_functions if before is not None]
    return found


def _shapes(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)
        for tensor in tensors
    )
