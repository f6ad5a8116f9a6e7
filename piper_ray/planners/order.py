"""The order of layers that equal runs are cut from, and which layers of it repeat."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from piper_ray.model.instance import Instance, Layer


@dataclass(frozen=True)
class RunOrder:
    """layers: all layer ids, every edge running forwards. The runs are cut from the layers between the first ``before``
    and the last ``after``.

    repeated: those are one layer repeated; if not, they are all layers.
    """

    layers: tuple[int, ...]
    before: int
    after: int
    repeated: bool

    @property
    def between(self) -> int:
        return len(self.layers) - self.before - self.after


def run_order(instance: Instance) -> RunOrder:
    """The repeated layers in order, with those before and after them; without any, a topological order of all.

    Repeated layers, the transformer layers of a language model, are told by the workload: layers of one kind, each
    with an edge to the next and no other layer between them, that hold at least half of the work (the least t * p of
    each layer). A kind is a name or, if no name repeats in this way, all figures at all degrees. "After" are the
    layers that need a repeated one, "before" all others.
    """
    order = topological_order(instance)
    predecessors = {layer: before for layer, (before, _) in instance.neighbours.items()}
    successors = {layer: after for layer, (_, after) in instance.neighbours.items()}
    for kind in (_name, _figures):
        chain = _heaviest_kind(instance, order, kind)
        if not chain or any(v not in successors[u] for u, v in pairwise(chain)):
            continue
        members = set(chain)
        after = _reached([chain[0]], successors) - members
        if after & _reached([chain[-1]], predecessors):
            continue
        before = [layer for layer in order if layer not in after and layer not in members]
        layers = (*before, *chain, *(layer for layer in order if layer in after))
        return RunOrder(layers, len(before), len(after), repeated=True)
    return RunOrder(tuple(order), 0, 0, repeated=False)


def topological_order(instance: Instance) -> list[int]:
    """Layer ids in the order of upstream's planner: Kahn's algorithm with a stack, layers and edges in file order."""
    missing = {layer: len(before) for layer, (before, _) in instance.neighbours.items()}
    ready = [layer for layer, count in missing.items() if count == 0]
    order = []
    while ready:
        layer = ready.pop()
        order.append(layer)
        for head in instance.neighbours[layer][1]:
            missing[head] -= 1
            if missing[head] == 0:
                ready.append(head)
    return order


def _heaviest_kind(instance: Instance, order: Iterable[int], kind: Callable[[Layer], Hashable]) -> list[int]:
    """The layers of the kind with the most work, in ``order``; none if that is one layer or less than half of all."""
    members: dict[Hashable, list[int]] = {}
    for layer in order:
        members.setdefault(kind(instance.layer_by_id[layer]), []).append(layer)
    work = {layer.id: _work_s(layer) for layer in instance.layers}
    heaviest = max(members.values(), key=lambda layers: (sum(work[layer] for layer in layers), len(layers)))
    half = 2.0 * sum(work[layer] for layer in heaviest) >= sum(work.values())
    return heaviest if half and len(heaviest) > 1 else []


def _name(layer: Layer) -> Hashable:
    return layer.name


def _figures(layer: Layer) -> Hashable:
    return tuple(
        (t, tmpc.id, tmpc.time_per_sample_s, tmpc.weights_bytes, tmpc.activation_bytes, tmpc.fixed_bytes)
        for t in sorted(layer.tmpcs)
        for tmpc in layer.tmpcs[t]
    )


def _work_s(layer: Layer) -> float:
    return min((t * tmpc.time_per_sample_s for t, tmpcs in layer.tmpcs.items() for tmpc in tmpcs), default=0.0)


def _reached(start: Sequence[int], heads: Mapping[int, Sequence[int]]) -> set[int]:
    found = set(start)
    pending = list(start)
    while pending:
        for head in heads[pending.pop()]:
            if head not in found:
                found.add(head)
                pending.append(head)
    return found
