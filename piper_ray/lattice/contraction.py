"""Layers that can join a neighbour before the lattice is built, without losing the best plan.

Each rule merges a layer z that costs nothing into its only neighbour v:

Source rule: z has no predecessor and one successor v. Take any plan. Moving z from its stage into v's (a later one,
or the same) keeps every edge forwards: z has no other edge. Its old stage loses the outgoing tensor z -> v, v's stage
the incoming one; nothing else changes, because z has no time, weights or memory in any variant that v can run in. If
z was a stage of its own, that stage goes away and frees its devices. So no stage gets slower or larger.

Sink rule: the same with directions reversed, for a layer with one predecessor and no successor.

"Costs nothing" is asked in each variant that v can run in: z must have a TMPC there with p = w = a = b = 0; that one it
is given in the plan. What it sends along the merged edge no longer crosses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from piper_ray.model import Instance, Tmpc
from piper_ray.variants import Variant


@dataclass(frozen=True)
class Contraction:
    """``keeper[z] = v`` for each merged layer id; chains are resolved, so v itself is never merged."""

    keeper: Mapping[int, int]

    def members(self, instance: Instance) -> dict[int, tuple[int, ...]]:
        """For each kept layer id, all layer ids that stand for it, in file order."""
        groups: dict[int, list[int]] = {layer.id: [] for layer in instance.layers if layer.id not in self.keeper}
        for layer in instance.layers:
            groups[self.keeper.get(layer.id, layer.id)].append(layer.id)
        return {kept: tuple(ids) for kept, ids in groups.items()}


def free_tmpc(tmpcs: Sequence[Tmpc]) -> Tmpc | None:
    """The first TMPC that takes no time and no memory, if there is one."""
    for tmpc in tmpcs:
        if tmpc.time_per_sample_s == tmpc.weights_bytes == tmpc.activation_bytes == tmpc.fixed_bytes == 0.0:
            return tmpc
    return None


def contract(instance: Instance, variants: Sequence[Variant]) -> Contraction:
    """Applies both rules until none applies."""
    predecessors: dict[int, set[int]] = {layer.id: set() for layer in instance.layers}
    successors: dict[int, set[int]] = {layer.id: set() for layer in instance.layers}
    for edge in instance.edges:
        successors[edge.source].add(edge.target)
        predecessors[edge.target].add(edge.source)

    def is_free_beside(z: int, v: int) -> bool:
        return all(free_tmpc(variant.tmpcs[z]) is not None for variant in variants if variant.tmpcs[v])

    keeper: dict[int, int] = {}
    pending = [layer.id for layer in instance.layers]
    while pending:
        z = pending.pop()
        if z in keeper or len(predecessors[z]) + len(successors[z]) != 1:
            continue
        (v,) = predecessors[z] or successors[z]
        if not is_free_beside(z, v):
            continue
        keeper[z] = v
        predecessors[v].discard(z)
        successors[v].discard(z)
        pending.append(v)

    def resolve(layer_id: int) -> int:
        while layer_id in keeper:
            layer_id = keeper[layer_id]
        return layer_id

    return Contraction({z: resolve(z) for z in keeper})


def without_contraction() -> Contraction:
    """Every layer for itself: the slow twin of ``contract``."""
    return Contraction({})
