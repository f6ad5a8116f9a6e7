"""Checks whether layers of a certificate may share a neighbour's stage at no cost.

Let z cost nothing: in each way in which a stage may run v, z has a configuration without time, weights and memory. Take
any plan, and move z from its stage to v's.

*Forwards*: there is an edge from z to v, and v is, or comes before, every other layer to which z has an edge. Then v's
stage is z's or a later one, none of z's edges runs backwards, and layers that read z are in no earlier stage.
*Backwards* is the same with all edges reversed.

If of z's edges only the one to v costs anything, and each tensor of z that costs anything has v among its ends, no
stage pays more: z's stage and v's no longer have the cut between them, and for other stages nothing changes. If z was
all of its stage, the stage disappears, and less is in flight in front of it. So some best plan has z where v is. They
then count as one layer, and the next may join.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from piper_ray.certificate.certificate import StageWay
from piper_ray.certificate.paths import reached
from piper_ray.model.errors import CertificateRefused
from piper_ray.model.instance import Instance, Tmpc


def check_joined(
    instance: Instance, ways: Sequence[StageWay], joined: Mapping[int, int], *, ample_memory: bool
) -> None:
    """Raises CertificateRefused unless all of these layers may join, some after others. ample_memory: memory counts as
    free.

    joined: layer ids, each with that of the layer it ends up with, which joins none.
    """
    ids = {layer.id for layer in instance.layers}
    for z, v in joined.items():
        if z not in ids or v not in ids or v in joined:
            raise CertificateRefused(f"layer {z} is said to share the stage of {v}, which it cannot")
    graph = _JoinedGraph(instance)
    free = {z: {n for n, way in enumerate(ways) if any(_is_free(x, ample_memory) for x in way.tmpcs[z])} for z in ids}
    runs = {v: {n for n, way in enumerate(ways) if way.tmpcs[v]} for v in ids}
    left = set(joined)
    while left:
        found = next(
            (
                (z, v)
                for z in sorted(left)
                for v in graph.neighbours(z)
                if joined.get(v, v) == joined[z] and runs[v] <= free[z] and graph.may_join(z, v)
            ),
            None,
        )
        if found is None:
            some = ", ".join(map(str, sorted(left)[:5]))
            raise CertificateRefused(f"layers such as {some} cost something where they are said to share a stage")
        graph.join(*found)
        left.remove(found[0])


def memory_is_ample(instance: Instance) -> bool:
    """Whether a device holds all layers at their largest, with the most microbatches in flight."""
    largest = [
        max(
            (x.activation_bytes * instance.data_parallel_limit + x.fixed_bytes + x.shared_bytes for x in _all(tmpcs)),
            default=0.0,
        )
        for tmpcs in (layer.tmpcs for layer in instance.layers)
    ]
    return sum(largest) <= instance.memory_bytes


def edge_charges(instance: Instance) -> dict[tuple[int, int], float]:
    """Returns the most bytes that an edge, given by its ends, can cost a stage."""
    found: dict[tuple[int, int], float] = {}
    for edge in instance.edges:
        source, target = instance.layer_by_id[edge.source], instance.layer_by_id[edge.target]
        more = max(
            *(x.forward_sync_bytes.get(edge.source, 0.0) for x in _all(target.tmpcs)),
            *(x.backward_sync_bytes.get(edge.target, 0.0) for x in _all(source.tmpcs)),
            0.0,
        )
        ends = edge.source, edge.target
        found[ends] = found.get(ends, 0.0) + edge.communication_bytes + more
    return found


def _all(tmpcs: Mapping[int, tuple[Tmpc, ...]]) -> Iterable[Tmpc]:
    return (tmpc for row in tmpcs.values() for tmpc in row)


def _is_free(tmpc: Tmpc, ample_memory: bool) -> bool:
    costs = [tmpc.time_per_sample_s, tmpc.weights_bytes]
    if not ample_memory:
        costs += [tmpc.activation_bytes, tmpc.fixed_bytes, tmpc.shared_bytes]
    return not any(costs)


class _JoinedGraph:
    """Layers, some of which have been joined to others."""

    def __init__(self, instance: Instance) -> None:
        ids = [layer.id for layer in instance.layers]
        self._after: dict[int, set[int]] = {v: set() for v in ids}
        self._before: dict[int, set[int]] = {v: set() for v in ids}
        self._dear: dict[int, set[int]] = {v: set() for v in ids}
        for (u, v), size in edge_charges(instance).items():
            self._after[u].add(v)
            self._before[v].add(u)
            if size > 0.0:
                self._dear[u].add(v)
                self._dear[v].add(u)
        self._tensors = [set(x.layers) for x in instance.tensors if x.forward_bytes + x.backward_bytes > 0.0]

    def neighbours(self, z: int) -> list[int]:
        return sorted(self._after[z] | self._before[z])

    def may_join(self, z: int, v: int) -> bool:
        """Whether moving z to v's stage never costs anything; z has free configurations."""
        if not self._dear[z] <= {v} or any(z in ends and v not in ends and len(ends) > 1 for ends in self._tensors):
            return False
        return any(v in ahead[z] and ahead[z] <= reached(v, ahead) for ahead in (self._after, self._before))

    def join(self, z: int, v: int) -> None:
        for ahead, back in ((self._after, self._before), (self._before, self._after)):
            for x in ahead.pop(z):
                back[x].discard(z)
                if x != v:
                    ahead[v].add(x)
                    back[x].add(v)
        self._dear.pop(z)
        self._dear[v].discard(z)
        for ends in self._tensors:
            if z in ends:
                ends.remove(z)
                ends.add(v)
