"""Finds layers that can join a neighbour before the lattice is built, without losing the best plan.

Each step merges a layer z that costs nothing into a neighbour v:

Forward rule: z has an edge to v, and every other successor of z comes behind v too. Take any plan. Moving z from its
stage T into v's stage S (a later one, or the same) keeps every edge forwards. z adds no time, weights or memory to S:
in each variant in which v can run, z has a TMPC without any of these, and it is given that one. If z was all of T, that
stage disappears and frees its devices. The communication changes as follows:
- the edge from z to v is no longer charged, in T or in S;
- the other edges of z must cost nothing, whatever TMPCs their ends use, so that the place of z does not matter;
- of a tensor with z and v among its ends, T paid for it, as v was outside, and pays no more than before; S paid for it,
  as z was outside, and pays no more than before; z is outside all other stages before and after;
- a tensor with z and without v must cost nothing.
So no stage gets slower or larger.

Backward rule: the same with directions reversed.

If memory cannot bind, because a device can hold all layers together in their largest form, a layer that takes only
memory costs nothing.

A layer that has a single neighbour is always merged. Other merges change which of equally good plans is found, so they
are made only if the lattice is large without them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from piper_ray.cost.bounds import ceiling_bytes
from piper_ray.cost.variants import Variant
from piper_ray.model.instance import Instance, Tmpc, reached


@dataclass(frozen=True)
class Contraction:
    """``keeper[z] = v`` for each merged layer id. Chains are resolved, so v itself is never merged.

    ample_memory: memory cannot bind, so that a layer which takes only memory counts as free.
    """

    keeper: Mapping[int, int]
    ample_memory: bool = False

    def members(self, instance: Instance) -> dict[int, tuple[int, ...]]:
        """Returns for each kept layer id all layer ids that it stands for, in file order."""
        groups: dict[int, list[int]] = {layer.id: [] for layer in instance.layers if layer.id not in self.keeper}
        for layer in instance.layers:
            groups[self.keeper.get(layer.id, layer.id)].append(layer.id)
        return {kept: tuple(ids) for kept, ids in groups.items()}

    def free_tmpc(self, tmpcs: Sequence[Tmpc]) -> Tmpc | None:
        """Returns the first TMPC that costs nothing, if there is one."""
        return next((tmpc for tmpc in tmpcs if _is_free(tmpc, self.ample_memory)), None)


def memory_is_ample(instance: Instance) -> bool:
    """Whether one device holds all layers in their largest form, with as many microbatches as can be in flight.

    False, without a test, if no layer takes only memory.
    """
    tmpcs = (tmpc for layer in instance.layers for listed in layer.tmpcs.values() for tmpc in listed)
    if not any(_is_free(tmpc, True) and not _is_free(tmpc, False) for tmpc in tmpcs):
        return False
    return ceiling_bytes(instance, instance.data_parallel_limit) <= instance.memory_bytes


def contract(instance: Instance, variants: Sequence[Variant], *, all_that_is_free: bool = False) -> Contraction:
    """Applies both rules until none applies. Without ``all_that_is_free``, only layers with one neighbour and no memory
    merge."""
    ample_memory = all_that_is_free and memory_is_ample(instance)
    if not any(_is_free(x, ample_memory) for variant in variants for xs in variant.tmpcs.values() for x in xs):
        return Contraction({}, ample_memory)
    most_neighbours = len(instance.layers) if all_that_is_free else 1
    return _Contracting(instance, variants, most_neighbours, ample_memory).run()


def without_contraction() -> Contraction:
    """Returns a contraction that merges no layers: the slow twin of ``contract``."""
    return Contraction({})


def _is_free(tmpc: Tmpc, ample_memory: bool) -> bool:
    if tmpc.time_per_sample_s != 0.0 or tmpc.weights_bytes != 0.0:
        return False
    return ample_memory or tmpc.activation_bytes == tmpc.fixed_bytes == tmpc.shared_bytes == 0.0


class _Contracting:
    """Groups of layers while they are merged, each under the id of the layer that is kept."""

    def __init__(
        self, instance: Instance, variants: Sequence[Variant], most_neighbours: int, ample_memory: bool
    ) -> None:
        self._most_neighbours = most_neighbours
        self._ids = [layer.id for layer in instance.layers]
        self._ample_memory = ample_memory
        self._runs_in = {v: frozenset(r for r, variant in enumerate(variants) if variant.tmpcs[v]) for v in self._ids}
        self._free_in = {
            v: frozenset(
                r for r, variant in enumerate(variants) if any(_is_free(x, ample_memory) for x in variant.tmpcs[v])
            )
            for v in self._ids
        }
        self._successors: dict[int, set[int]] = {v: set() for v in self._ids}
        self._predecessors: dict[int, set[int]] = {v: set() for v in self._ids}
        for edge in instance.edges:
            self._successors[edge.source].add(edge.target)
            self._predecessors[edge.target].add(edge.source)
        # The neighbours to which a layer has an edge that costs something.
        self._dear: dict[int, set[int]] = {v: set() for v in self._ids}
        for source, target in _dear_edges(instance):
            self._dear[source].add(target)
            self._dear[target].add(source)
        self._tensors: dict[int, list[set[int]]] = {v: [] for v in self._ids}
        for tensor in instance.tensors:
            if tensor.forward_bytes + tensor.backward_bytes > 0.0:
                ends = set(tensor.layers)
                for v in ends:
                    self._tensors[v].append(ends)

    def run(self) -> Contraction:
        keeper: dict[int, int] = {}
        pending = list(self._ids)
        while pending:
            z = pending.pop()
            if z in keeper or not self._free_in[z]:
                continue
            v = self._home(z)
            if v is None:
                continue
            keeper[z] = v
            pending += [v, *self._merge(z, v)]

        def resolve(layer_id: int) -> int:
            while layer_id in keeper:
                layer_id = keeper[layer_id]
            return layer_id

        return Contraction({z: resolve(z) for z in keeper}, self._ample_memory)

    def _home(self, z: int) -> int | None:
        """Returns the neighbour that z may join, if there is one."""
        if len(self._successors[z]) + len(self._predecessors[z]) > self._most_neighbours:
            return None
        for ahead in (self._successors, self._predecessors):
            v = _nearest(ahead[z], ahead)
            if (
                v is not None
                and self._runs_in[v] <= self._free_in[z]
                and self._dear[z] <= {v}
                and all(v in ends or len(ends) == 1 for ends in self._tensors[z])
            ):
                return v
        return None

    def _merge(self, z: int, v: int) -> Iterable[int]:
        """Makes z's neighbours those of v, and returns them."""
        for ahead, back in ((self._successors, self._predecessors), (self._predecessors, self._successors)):
            for x in ahead[z]:
                back[x].discard(z)
                if x != v:
                    ahead[v].add(x)
                    back[x].add(v)
        self._dear[v].discard(z)
        for ends in self._tensors[z]:
            ends.discard(z)
        return (self._successors[z] | self._predecessors[z]) - {v}


def _nearest(candidates: Iterable[int], ahead: Mapping[int, set[int]]) -> int | None:
    """Returns the candidate from which paths lead to all others, if there is one."""
    listed = sorted(candidates)
    if len(listed) == 1:
        return listed[0]
    nearest: int | None = None
    behind: set[int] = set()
    for v in listed:
        # A candidate behind another is not the nearest. One that is not must have all earlier ones behind it, or there
        # is none.
        if v not in behind:
            nearest, behind = v, reached(v, ahead)
    return nearest if all(v in behind for v in listed) else None


def _dear_edges(instance: Instance) -> Iterable[tuple[int, int]]:
    """Yields the edges that cost a stage something with some TMPC of one of their ends."""
    extras = {
        layer.id: (
            {u for xs in layer.tmpcs.values() for x in xs for u, size in x.forward_sync_bytes.items() if size > 0.0},
            {w for xs in layer.tmpcs.values() for x in xs for w, size in x.backward_sync_bytes.items() if size > 0.0},
        )
        for layer in instance.layers
    }
    for edge in instance.edges:
        forward, backward = extras[edge.target][0], extras[edge.source][1]
        if edge.communication_bytes > 0.0 or edge.source in forward or edge.target in backward:
            yield edge.source, edge.target
