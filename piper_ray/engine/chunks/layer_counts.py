"""Divides plans by how many layers of a kind chunks have.

Shares of layers may be spread evenly over chunks, but whole layers may not. If 24 layers are in 23 chunks, some chunk
has two, and all ranks wait for it. So plans differ in the first chunk that has at least some number of layers of a
kind. Often some chunk has to have so many; if not, the plans in which none has are one more part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from piper_ray.engine.chunks.rank_cover import is_small
from piper_ray.engine.kernels.chunk_bound import FIGURE, LayerKinds
from piper_ray.engine.kernels.types import FloatArray, IndexArray

_NEAR = 1e-6
"""Shares of layers this small count as none."""


def counted_kinds(kinds: LayerKinds) -> IndexArray:
    """int64[..]: the kinds that divide plans: of several layers that are not small."""
    found: IndexArray = np.flatnonzero((kinds.layers > 1) & (kinds.counted > 0) & ~is_small(kinds))
    return found


@dataclass(frozen=True, eq=False)
class LayerCounts:
    """Says which plans belong to a part. least, most: int64[kinds, s], of the layers of each kind in each chunk."""

    least: IndexArray
    most: IndexArray

    @classmethod
    def any(cls, kinds: LayerKinds, stages: int) -> LayerCounts:
        """All plans. kinds: with the windows of a given hub."""
        chunk = np.arange(stages)
        inside = (kinds.first_chunk[:, None] <= chunk) & (chunk <= kinds.last_chunk[:, None])
        return cls(np.zeros(inside.shape, np.int64), inside * kinds.layers[:, None])

    def parts(self, kinds: LayerKinds, layers_in: FloatArray) -> list[LayerCounts]:
        """Parts that together have all of these plans; none if no division helps. layers_in: float64[kinds, s], of a
        fractional plan, which no part should have.

        The choice is the kind and the number of layers for which the chunk that is the nearest to that number needs the
        most more time, and where it is not certain that some chunk has so many, the time that chunks have beyond it.
        """
        passes_s = kinds.figures[:, FIGURE.forward_s : FIGURE.weight_s + 1].sum(axis=1)
        layer_s = np.minimum.reduceat(passes_s, kinds.option_start[:-1])
        best_s, best = _NEAR * layer_s.max(), (-1, 0)
        for kind in counted_kinds(kinds).tolist():
            for number in self._numbers(kind, int(kinds.layers[kind]), layers_in[kind]):
                few = self._may_be_first(kind, number)
                more = (number - layers_in[kind, few]).min(initial=np.inf)
                if not self._is_certain(kind, number, int(kinds.layers[kind])):
                    more = min(more, np.maximum(0.0, layers_in[kind, few] - (number - 1)).sum())
                if more * layer_s[kind] > best_s:
                    best_s, best = more * layer_s[kind], (kind, number)
        kind, number = best
        return [] if kind < 0 else [*self._divided(kind, number, int(kinds.layers[kind]))]

    def _numbers(self, kind: int, layers: int, layers_in: FloatArray) -> Iterator[int]:
        """Numbers of layers by which plans may be divided."""
        certain = 1
        while self._is_certain(kind, certain + 1, layers):
            certain += 1
        yield certain
        above = int(np.floor(layers_in.max() + _NEAR)) + 1
        if above > certain:
            yield above

    def _may_be_first(self, kind: int, number: int) -> IndexArray:
        """The chunks that may have so many layers, and may have fewer."""
        found: IndexArray = np.flatnonzero((self.least[kind] < number) & (number <= self.most[kind]))
        return found

    def _is_certain(self, kind: int, number: int, layers: int) -> bool:
        """Whether some chunk that may have fewer has to have at least so many layers."""
        least, most = self.least[kind], self.most[kind]
        return bool(np.where(least >= number, most, np.minimum(most, number - 1)).sum() < layers)

    def _divided(self, kind: int, number: int, layers: int) -> Iterator[LayerCounts]:
        """Plans by the first chunk that has at least so many layers, and those in which none has."""
        least, most = self.least.copy(), self.most.copy()
        for chunk in self._may_be_first(kind, number).tolist():
            least[kind, chunk] = number
            if least[kind].sum() <= layers <= most[kind].sum():
                yield LayerCounts(least.copy(), most.copy())
            least[kind, chunk], most[kind, chunk] = self.least[kind, chunk], number - 1
        if layers <= most[kind].sum():
            yield LayerCounts(least, most)
