"""Kernels: cuts of an order of the layers into chunks that take about as long as each other, with their transfers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.compiled.jit import kernel
from piper_ray.engine.kernels.types import FloatArray, IndexArray


class EdgesAlong(NamedTuple):
    """Edges by the places of their ends in an order, sorted by their heads. sent_s, received_s: what the chunks of tail
    and head take for both directions, if their ranks differ. all_sent_s: float64[n], of all edges of each tail.
    crossing_s: float64[n + 1], of all edges across the border in front of each place, both chunks together."""

    start: IndexArray  # int64[n + 1]: of the edges of each head
    tail: IndexArray
    sent_s: FloatArray
    received_s: FloatArray
    all_sent_s: FloatArray
    crossing_s: FloatArray


class CutPlaces(NamedTuple):
    """The places where each of the cuts 0 .. s may be, ascending. The first one is at 0, the last one at n."""

    start: IndexArray  # int64[s + 2]: of the places of each cut
    place: IndexArray


@kernel
def cut_places(seconds: FloatArray, crossing_s: FloatArray, chunks: int, most: int) -> CutPlaces:
    """Returns places that are at most a chunk of equal work away from where equal work has the cut. If they are more
    than ``most``, each of so many equal parts of them has its cheapest one. seconds: float64[n], by place."""
    n = seconds.size
    end_s = np.cumsum(seconds)
    start, place = np.zeros(chunks + 2, np.int64), np.empty(chunks * most + 2, np.int64)
    place[0], count = 0, 1
    chunk_s = end_s[n - 1] / chunks
    for k in range(1, chunks):
        start[k] = count
        first = min(max(k, np.searchsorted(end_s, chunk_s * (k - 1)) + 1), n - chunks + k)
        last = max(first, min(n - chunks + k, np.searchsorted(end_s, chunk_s * (k + 1)) + 1))
        size = last + 1 - first
        parts = min(size, most)
        for part in range(parts):
            best = first + part * size // parts
            for x in range(best + 1, first + (part + 1) * size // parts):
                if crossing_s[x] < crossing_s[best]:
                    best = x
            place[count] = best
            count += 1
    start[chunks] = count
    place[count], start[chunks + 1] = n, count + 1
    return CutPlaces(start, place[: count + 1].copy())


@kernel
def level_cuts(
    seconds: FloatArray,
    slower_s: FloatArray,
    edges: EdgesAlong,
    share: FloatArray,
    rank_of: IndexArray,
    most_places: int,
    squarings: int,
) -> IndexArray:
    """Returns int64[s + 1]: the cuts, each at one of its ``cut_places``, for which the sum of the chunks' times, each
    squared so often, is the least; no cuts if there are none at these places.

    A layer of chunk k takes ``seconds`` and ``share[k]`` of ``slower_s``, each float64[n], by place. A cut between two
    chunks of one rank costs nothing. All others cost what they do if all chunks are on different ranks.
    """
    s = share.size
    usual_s = seconds + share.mean() * slower_s
    cuts = cut_places(usual_s, edges.crossing_s, s, most_places)
    most_s = max(usual_s.sum() + 2.0 * edges.crossing_s.max(), 1e-300)  # about the most that any chunk takes
    least, before = np.full(cuts.place.size, np.inf), np.zeros(cuts.place.size, np.int64)
    least[0] = 0.0
    for k in range(s):
        for a in range(cuts.start[k], cuts.start[k + 1]):
            if least[a] == np.inf:
                continue
            first = x = cuts.place[a]
            work_s, received_s, sent_s = 0.0, 0.0, 0.0
            for b in range(cuts.start[k + 1], cuts.start[k + 2]):
                if cuts.place[b] <= first:
                    continue
                while x < cuts.place[b]:
                    work_s += seconds[x] + share[k] * slower_s[x]
                    sent_s += edges.all_sent_s[x]
                    for e in range(edges.start[x], edges.start[x + 1]):
                        if edges.tail[e] < first:
                            received_s += edges.received_s[e]
                        else:
                            sent_s -= edges.sent_s[e]
                    x += 1
                chunk_s = work_s
                if k > 0 and rank_of[k - 1] != rank_of[k]:
                    chunk_s += received_s
                if k < s - 1 and rank_of[k + 1] != rank_of[k]:
                    chunk_s += sent_s
                found = max(0.0, chunk_s) / most_s
                for _ in range(squarings):
                    found *= found
                found += least[a]
                if found < least[b]:
                    least[b], before[b] = found, a
    at = cuts.place.size - 1
    if least[at] == np.inf:
        return np.empty(0, np.int64)
    chosen = np.empty(s + 1, np.int64)
    for k in range(s, -1, -1):
        chosen[k] = cuts.place[at]
        at = before[at]
    return chosen
