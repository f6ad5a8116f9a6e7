"""A graph whose vertices merge into blocks while it stays acyclic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

_GAP = -1
"""Fills the places in the order that merging left empty."""


class Quotient:
    """Blocks of vertices 0..n-1 with the tensors between them; a block goes by the number of one of its vertices.

    Invariant: ``_order`` lists the blocks so that every edge runs forwards, hence blocks never form a cycle. Two
    blocks joined by an edge can merge unless another path leads from one to the other; two blocks without any edge
    always can.
    """

    def __init__(self, size: int, edges: Iterable[tuple[int, int, float]]) -> None:
        """edges: (tail, head, bytes) of a graph without cycles; parallel ones are added up."""
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
        """The members of each block, front to back; every edge between blocks runs forwards in this order."""
        return [self.members[v] for v in self._order if v != _GAP]

    def merge(self, tail: int, head: int) -> bool:
        """Merges ``head`` into ``tail`` along their edge; False, and nothing done, if another path joins them."""
        first, last = self._place[tail], self._place[head]
        beyond = self._reached(tail, head, last)
        if beyond is None:
            return False
        # Between the two, what the tail reaches moves behind the merged block; the rest needs neither of them.
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
        """Merges two blocks of which neither has an edge."""
        self._order[self._place.pop(other)] = _GAP
        self._absorb(one, other)

    def _reached(self, tail: int, head: int, last: int) -> set[int] | None:
        """What lies behind ``tail`` and before the place ``last``; None if ``head`` is reached on the way."""
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
    """The vertices, each before its successors; depth first, so that what belongs together stays close."""
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
