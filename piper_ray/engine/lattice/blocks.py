"""Chooses layers to merge, so that the blocks have few enough downsets for a solve in seconds.

Blocks grow along the most expensive edges first, since a stage is seldom cut there. Each grows up to a cap on its share
of all work and of all memory; the cap rises until the blocks have few enough downsets. So no block is larger than
needed, to within a factor of ``_RISE`` of the cap, and a stage's border moves by at most the size of a block.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise, permutations
from operator import and_

from piper_ray.cost.variants import Variant
from piper_ray.engine.lattice.contraction import Contraction
from piper_ray.engine.lattice.layer_graph import LayerGraph, count_downsets, number_graph
from piper_ray.model.errors import LimitError
from piper_ray.model.instance import Instance

_GAP = -1
"""Marks places in the order that merging has left empty."""


class Quotient:
    """Blocks of vertices 0..n-1 with the edges between them. A block has the number of one of its vertices.

    Invariant: in ``_order`` every edge between blocks runs forwards, so blocks never form a cycle. Two blocks joined by
    an edge can merge unless another path leads from one to the other; two blocks without any edge always can.
    """

    def __init__(self, size: int, edges: Iterable[tuple[int, int, float]]) -> None:
        """edges: (tail, head, bytes) of a graph without cycles. Parallel edges are added up."""
        self.members: dict[int, list[int]] = {v: [v] for v in range(size)}
        self.successors: dict[int, dict[int, float]] = {v: {} for v in range(size)}
        self.predecessors: dict[int, dict[int, float]] = {v: {} for v in range(size)}
        for tail, head, size_bytes in edges:
            self.successors[tail][head] = self.successors[tail].get(head, 0.0) + size_bytes
            self.predecessors[head][tail] = self.predecessors[head].get(tail, 0.0) + size_bytes
        self._order = topological_order(self.successors, self.predecessors)
        self._place = {v: place for place, v in enumerate(self._order)}

    def __len__(self) -> int:
        return len(self.members)

    def blocks(self) -> list[list[int]]:
        """Returns the members of each block, front to back; every edge between blocks runs forwards in this order."""
        return [self.members[v] for v in self._order if v != _GAP]

    def merge(self, tail: int, head: int) -> bool:
        """Merges ``head`` into ``tail`` along their edge. Returns False, and does nothing, if another path joins
        them."""
        first, last = self._place[tail], self._place[head]
        beyond = self._reached(tail, head, last)
        if beyond is None:
            return False
        # Between the two, blocks that the tail reaches move behind the merged block; the others depend on neither.
        between = [v for v in self._order[first : last + 1] if v not in (_GAP, tail, head)]
        renewed = [v for v in between if v not in beyond] + [tail] + [v for v in between if v in beyond]
        for place in range(first, last + 1):
            v = renewed[place - first] if place - first < len(renewed) else _GAP
            self._order[place] = v
            if v != _GAP:
                self._place[v] = place
        del self._place[head]
        self._absorb(tail, head)
        return True

    def merge_apart(self, one: int, other: int) -> None:
        """Merges two blocks that have no edges."""
        self._order[self._place.pop(other)] = _GAP
        self._absorb(one, other)

    def _reached(self, tail: int, head: int, last: int) -> set[int] | None:
        """Returns the blocks behind ``tail`` and before the place ``last``; None if ``head`` is reached from one of
        them."""
        reached: set[int] = set()
        pending = [v for v in self.successors[tail] if v != head and self._place[v] < last]
        while pending:
            v = pending.pop()
            if v in reached:
                continue
            reached.add(v)
            for after in self.successors[v]:
                if after == head:
                    return None
                if self._place[after] < last and after not in reached:
                    pending.append(after)
        return reached

    def _absorb(self, kept: int, gone: int) -> None:
        self.members[kept] += self.members.pop(gone)
        for ahead, back in ((self.successors, self.predecessors), (self.predecessors, self.successors)):
            for other, size_bytes in ahead.pop(gone).items():
                del back[other][gone]
                if other != kept:
                    total = ahead[kept].get(other, 0.0) + size_bytes
                    ahead[kept][other] = back[other][kept] = total


def topological_order(
    successors: Mapping[int, Iterable[int]], predecessors: Mapping[int, Sequence[int] | Mapping[int, float]]
) -> list[int]:
    """Returns the vertices, each before its successors; depth first, so that related vertices stay close."""
    missing = {v: len(before) for v, before in predecessors.items()}
    ready = [v for v in reversed(list(missing)) if missing[v] == 0]
    order = []
    while ready:
        v = ready.pop()
        order.append(v)
        for after in successors[v]:
            missing[after] -= 1
            if missing[after] == 0:
                ready.append(after)
    return order


MOST_DOWNSETS = 20_000
"""Largest number of downsets of the blocks. A solve on this many takes seconds on any cluster."""

_COUNTING_VISITS = 200_000
_FIRST_CAP = 2.0**-12
_RISE = 2.0**0.5


@dataclass(frozen=True)
class Blocks:
    """The members (layer ids, in file order) of each block, front to back.

    downsets: the number of downsets of the blocks. largest_share: the largest share of a block in the work of all
    layers, or in their memory.
    """

    members: tuple[tuple[int, ...], ...]
    downsets: int
    largest_share: float


def find_blocks(
    instance: Instance, variants: Sequence[Variant], contraction: Contraction, most_downsets: int = MOST_DOWNSETS
) -> Blocks:
    """Returns blocks with at most ``most_downsets`` downsets; single layers if these have few enough.

    If that suffices, only layers with the same tensor-parallel degrees are merged. Raises LimitError if there are too
    many downsets after all allowed merges.
    """
    groups = list(contraction.members(instance).values())
    for mixed in (False, True):
        found = _grow(_Growth(instance, variants, groups, mixed), most_downsets)
        if found is not None:
            return found
    raise LimitError(
        f"no blocks of operators have at most {most_downsets:,} downsets: layers that share no tensor-parallel degree "
        "cannot be merged. Give them a degree in common."
    )


def _grow(growth: _Growth, most_downsets: int) -> Blocks | None:
    counted = len(growth.quotient) + 1
    for cap in _caps():
        if cap is not None:
            growth.merge_below(cap)
        if len(growth.quotient) < counted:
            counted = len(growth.quotient)
            downsets = count_downsets(growth.graph(), _COUNTING_VISITS)
            if downsets is not None and downsets <= most_downsets:
                return growth.result(downsets)
    return None


def _caps() -> Iterator[float | None]:
    """Yields None for no merging at all, then 0 for layers that cost nothing, and so on to more than everything."""
    yield from (None, 0.0)
    cap = _FIRST_CAP
    while cap < 2.0:
        yield cap
        cap *= _RISE


class _Growth:
    """Blocks while they grow, from groups of layers that can be merged without loss."""

    def __init__(
        self, instance: Instance, variants: Sequence[Variant], groups: Sequence[tuple[int, ...]], mixed: bool
    ) -> None:
        number = {layer_id: v for v, group in enumerate(groups) for layer_id in group}
        self._position = {layer.id: index for index, layer in enumerate(instance.layers)}
        self._groups = groups
        self._mixed = mixed
        edges = [
            (number[edge.source], number[edge.target], size_bytes)
            for edge, size_bytes in zip(instance.edges, _edge_bytes(instance), strict=True)
            if number[edge.source] != number[edge.target]
        ]
        self.quotient = Quotient(len(groups), edges)
        work, memory = _shares(instance, variants)
        self._work = {v: sum(work[layer_id] for layer_id in group) for v, group in enumerate(groups)}
        self._memory = {v: sum(memory[layer_id] for layer_id in group) for v, group in enumerate(groups)}
        choices = [[bool(variant.tmpcs[layer.id]) for variant in variants] for layer in instance.layers]
        mask = [sum(1 << r for r, has in enumerate(row) if has) for row in choices]
        self._variants = {
            v: reduce(and_, (mask[self._position[layer_id]] for layer_id in group)) for v, group in enumerate(groups)
        }

    def merge_below(self, cap: float) -> None:
        """Merges along edges, the most expensive first, and blocks without edges, the smallest first, up to ``cap``."""
        heap: list[tuple[float, float, int, int]] = []

        def offer(tail: int, head: int) -> None:
            share = self._share(tail, head)
            if share <= cap and self._may_merge(tail, head):
                heapq.heappush(heap, (-self.quotient.successors[tail][head], share, tail, head))

        for tail, heads in self.quotient.successors.items():
            for head in heads:
                offer(tail, head)
        while heap:
            _, share, tail, head = heapq.heappop(heap)
            current = self.quotient.successors.get(tail, {})
            # If a block has grown since this merge was offered, the merge was offered again.
            if head not in current or share != self._share(tail, head) or not self.quotient.merge(tail, head):
                continue
            self._add(tail, head)
            for before in self.quotient.predecessors[tail]:
                offer(before, tail)
            for after in self.quotient.successors[tail]:
                offer(tail, after)
        self._merge_apart(cap)

    def _merge_apart(self, cap: float) -> None:
        quotient = self.quotient
        alone = [v for v in quotient.members if not quotient.successors[v] and not quotient.predecessors[v]]
        alone.sort(key=lambda v: (self._variants[v], max(self._work[v], self._memory[v]), v))
        for one, other in pairwise(alone):
            if self._share(one, other) <= cap and self._may_merge(one, other):
                quotient.merge_apart(other, one)
                self._add(other, one)

    def graph(self) -> LayerGraph:
        """Returns the graph of the blocks, numbered for counting."""
        blocks = sorted(self.quotient.members)
        position = {v: index for index, v in enumerate(blocks)}
        edges = [(position[tail], position[head], 0) for tail in blocks for head in self.quotient.successors[tail]]
        return number_graph(blocks, edges)

    def result(self, downsets: int) -> Blocks:
        members = [
            tuple(sorted((layer for v in block for layer in self._groups[v]), key=self._position.__getitem__))
            for block in self.quotient.blocks()
        ]
        largest = max(max(self._work[v], self._memory[v]) for v in self.quotient.members)
        return Blocks(tuple(members), downsets, largest)

    def _share(self, one: int, other: int) -> float:
        return max(self._work[one] + self._work[other], self._memory[one] + self._memory[other])

    def _may_merge(self, one: int, other: int) -> bool:
        if self._mixed:
            return self._variants[one] & self._variants[other] != 0
        return self._variants[one] == self._variants[other]

    def _add(self, kept: int, gone: int) -> None:
        self._work[kept] += self._work.pop(gone)
        self._memory[kept] += self._memory.pop(gone)
        self._variants[kept] &= self._variants.pop(gone)


def _shares(instance: Instance, variants: Sequence[Variant]) -> tuple[dict[int, float], dict[int, float]]:
    """Returns each layer's share of the least work of all layers (devices times seconds), and of their least memory."""
    work, memory = {}, {}
    for layer in instance.layers:
        options = [(variant.degree, tmpc) for variant in variants for tmpc in variant.tmpcs[layer.id]]
        work[layer.id] = min(t * tmpc.time_per_sample_s for t, tmpc in options)
        memory[layer.id] = min(t * (x.activation_bytes + x.fixed_bytes + x.shared_bytes) for t, x in options)
    return _normalised(work), _normalised(memory)


def _normalised(figures: dict[int, float]) -> dict[int, float]:
    total = sum(figures.values())
    return {key: figure / total if total > 0.0 else 0.0 for key, figure in figures.items()}


def _edge_bytes(instance: Instance) -> Iterable[float]:
    """Yields the bytes that cross each edge, with the extras of its ends' first TMPCs and the tensors between its
    ends."""
    first = {
        layer.id: next(iter(next(tmpcs for _, tmpcs in sorted(layer.tmpcs.items()) if tmpcs)))
        for layer in instance.layers
    }
    between: dict[tuple[int, int], float] = {}
    for tensor in instance.tensors:
        for ends in permutations(tensor.layers, 2):
            between[ends] = between.get(ends, 0.0) + tensor.forward_bytes + tensor.backward_bytes
    for edge in instance.edges:
        forward = first[edge.target].forward_sync_bytes.get(edge.source, 0.0)
        backward = first[edge.source].backward_sync_bytes.get(edge.target, 0.0)
        shared = between.get((edge.source, edge.target), 0.0)
        yield 2.0 * edge.communication_bytes + forward + backward + shared
