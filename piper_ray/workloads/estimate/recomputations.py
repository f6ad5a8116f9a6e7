"""Which selective recomputations a model is offered: those of its software that save memory worth naming."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from piper_ray.model.recomputation import CHEAP, EVERY_SECOND_PRODUCT, Recomputation
from piper_ray.workloads.estimate.memory import kept_bytes
from piper_ray.workloads.estimate.modes import Mode, recomputation_of
from piper_ray.workloads.estimate.operators import Architecture, LayerKind, LayerNode
from piper_ray.workloads.estimate.roofline import forward_s
from piper_ray.workloads.estimate.software import Stack

_LEAST_SAVED = 0.01
"""Of what a microbatch keeps in all layers: parts that save less are not offered by themselves."""


@dataclass(frozen=True)
class _Part:
    """saved_bytes, again_s: of a microbatch in all layers on one device."""

    name: str
    saved_bytes: float
    again_s: float


def offered_recomputations(
    architecture: Architecture, stack: Stack, asked: Sequence[Recomputation] = ()
) -> tuple[Recomputation, ...]:
    """None, full, what is asked for, and selective ones that each save more than the one before, and cost more.

    A runtime takes one list of parts for all layers. Of n parts that matter n lists are offered, the parts in the
    order of time for the memory that they save: those near the best trade-offs, where all 2^n would each be priced.
    """
    nodes = [node for node in architecture.nodes if node.kind.recomputable]
    found: list[Recomputation] = []
    if EVERY_SECOND_PRODUCT in stack.software.selective:
        found.append(Recomputation((EVERY_SECOND_PRODUCT,)))
    else:
        found += _growing(nodes, stack)
        if not found and stack.software.selective and any(CHEAP in node.kind.parts for node in nodes):
            found.append(Recomputation.SELECTIVE)  # a model that no runtime here has such switches for
    return tuple(dict.fromkeys((Recomputation.NONE, *asked, *found, Recomputation.FULL)))


def _growing(nodes: Sequence[LayerNode], stack: Stack) -> list[Recomputation]:
    kinds = [node.kind for node in nodes]
    least_bytes = _LEAST_SAVED * sum(kept_bytes(kind, Mode(1)) for kind in kinds)
    parts = [_part(name, kinds, stack) for name in stack.software.selective]
    worth = sorted((part for part in parts if part.saved_bytes > least_bytes), key=lambda x: x.again_s / x.saved_bytes)
    found: list[Recomputation] = []
    names: list[str] = []
    for part in worth:
        if any(_covers(name, part.name, kinds) for name in names):
            continue
        names = [name for name in names if not _covers(part.name, name, kinds)] + [part.name]
        found.append(Recomputation.of_parts(names))
    return found


def _part(name: str, kinds: Sequence[LayerKind], stack: Stack) -> _Part:
    saved_bytes = again_s = 0.0
    for kind in kinds:
        mode = Mode(1, recomputation=recomputation_of(kind, Recomputation((name,))))
        saved_bytes += kept_bytes(kind, Mode(1)) - kept_bytes(kind, mode)
        again_s += sum(mode.share_again(x) * forward_s(x, kind, mode, stack) for x in kind.operators)
    return _Part(name, saved_bytes, again_s)


def _covers(one: str, other: str, kinds: Sequence[LayerKind]) -> bool:
    """Whether the first part makes all again that the second does."""
    made = [saved.again for kind in kinds for operator in kind.operators for saved in operator.saved]
    return all(one in again for again in made if other in again)
