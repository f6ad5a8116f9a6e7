"""Kernels: for each border of a lattice one that stands in for it. See ``flush.stand_ins``, which has the proof."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.compiled.jit import inner_kernel, kernel, leaf_kernel
from piper_ray.engine.kernels.bounds import has, is_subset, members
from piper_ray.engine.kernels.types import BitArray, BoolArray, FloatArray, IndexArray


class BorderFigures(NamedTuple):
    """What decides whether a border may stand in for another. Columns: forward seconds, backward seconds, and both
    passes together with the synchronisation. The last three are sums over the layers of a downset."""

    into: FloatArray  # float64[m, 3]: of the edges that cross the border, for the stage behind it
    out_of: FloatArray  # float64[m, 3]: for the stage in front of it
    to_behind: FloatArray  # float64[m, 3]: the most that a layer adds to a stage behind, to which it is moved
    to_ahead: FloatArray  # float64[m, 3]: the same for a stage in front
    least: FloatArray  # float64[m, 3]: the least that a layer takes


@kernel
def nearest_stand_ins(bits: BitArray, order: IndexArray, figures: BorderFigures) -> IndexArray:
    """Returns int64[m]: for each downset one with whose border neither a stage behind it nor one in front of it takes
    longer, as far as no short edge is lost (``near_ends``); itself if there is none. The nearest one counts, first of
    those that contain it, and then what stands in for that one. order: int64[m], downsets by their work.

    The empty downset and that of all vertices stand in for themselves alone.
    """
    m = bits.shape[0]
    found = np.arange(m)
    edges_s = figures.into[:, 0] + figures.out_of[:, 0]
    for at in range(m):
        j = order[at]
        if j == 0 or j == m - 1:
            continue
        for step in (1, -1):
            k = at + step
            while found[j] == j and 0 <= k < m:
                h = order[k]
                k += step
                if step * (figures.least[h, 0] - figures.least[j, 0]) > edges_s[j]:
                    break  # more is moved than can be saved
                if edges_s[h] >= edges_s[j] or h == 0 or h == m - 1:
                    continue
                inner, outer = (j, h) if step > 0 else (h, j)
                if is_subset(bits[inner], bits[outer]) and _relieves(j, h, inner, outer, figures):
                    found[j] = h
    for j in range(m):
        while found[found[j]] != found[j]:
            found[j] = found[found[j]]
    return found


@inner_kernel
def _relieves(j: int, h: int, inner: int, outer: int, figures: BorderFigures) -> bool:
    """Whether neither stage at border j takes longer with h in its place. inner, outer: the smaller of both, and the
    larger one."""
    for column in range(3):
        least_s = figures.least[outer, column] - figures.least[inner, column]
        if h == outer:
            behind_s, ahead_s = figures.to_behind[h, column] - figures.to_behind[j, column], -least_s
        else:
            behind_s, ahead_s = -least_s, figures.to_ahead[j, column] - figures.to_ahead[h, column]
        if figures.into[h, column] + behind_s > figures.into[j, column]:
            return False
        if figures.out_of[h, column] + ahead_s > figures.out_of[j, column]:
            return False
    return True


@kernel
def near_ends(
    bits: BitArray,
    stand_in: IndexArray,
    tail: IndexArray,
    head: IndexArray,
    is_short: BoolArray,
    lengthwise: tuple[IndexArray, IndexArray, IndexArray, IndexArray],
) -> tuple[BitArray, BitArray]:
    """Returns uint64[m, words] twice. A stage behind a downset's border that has all of the first ones, or one in front
    of it that has all of the second ones, is passed by no short edge that ends in it with the stand-in in its place.

    tail, head: int64[e]. is_short: bool[e]. lengthwise: where the edges that leave each vertex start, and these; the
    same of those that enter it.
    """
    out_start, out_edge, in_start, in_edge = lengthwise
    m, words = bits.shape
    behind, ahead = np.zeros((m, words), np.uint64), np.zeros((m, words), np.uint64)
    for j in range(m):
        h = stand_in[j]
        if h == j:
            continue
        for v in members(bits[h], bits[j]):
            for k in range(out_start[v], out_start[v + 1]):
                e = out_edge[k]
                if is_short[e] and has(bits[j], head[e]):
                    _add(behind[j], head[e])
        for v in members(bits[j], bits[h]):
            for k in range(in_start[v], in_start[v + 1]):
                e = in_edge[k]
                if is_short[e] and not has(bits[j], tail[e]):
                    _add(ahead[j], tail[e])
    return behind, ahead


@kernel
def conflicts(
    bits: BitArray, order: IndexArray, stand_in: IndexArray, behind: BitArray, ahead: BitArray
) -> tuple[BoolArray, BoolArray]:
    """Looks at all stages. Returns bool[m], downsets whose stand-ins are not nested as they are themselves; and bool[g,
    g], for which outer and inner ones of the downsets that stand for themselves, ascending, nothing is known of a stage
    between downsets for which they stand in. order: int64[m], downsets by their work. behind, ahead: see ``near_ends``.
    """
    m = bits.shape[0]
    number, standing = np.zeros(m, np.int64), 0
    for j in range(m):
        if stand_in[j] == j:
            number[j], standing = standing, standing + 1
    is_unlike, is_open = np.zeros(m, np.bool_), np.zeros((standing, standing), np.bool_)
    # The words of ``behind`` and ``ahead`` that are not zero: there are one or two.
    ranges = np.zeros((m, 4), np.int64)
    for j in range(m):
        ranges[j, 0], ranges[j, 1] = _words_of(behind[j])
        ranges[j, 2], ranges[j, 3] = _words_of(ahead[j])
    for at in range(m):
        outer = order[at]
        of_outer = stand_in[outer]
        for below in range(at):
            inner = order[below]
            of_inner = stand_in[inner]
            if of_outer == outer and of_inner == inner:
                continue
            known, nested = of_outer != of_inner, True
            if known:
                for word in range(ranges[outer, 0], ranges[outer, 1]):
                    known = known and (behind[outer, word] & bits[inner, word]) == 0
                for word in range(ranges[inner, 2], ranges[inner, 3]):
                    known = known and (ahead[inner, word] & ~bits[outer, word]) == 0
                nested = is_subset(bits[of_inner], bits[of_outer])
            if (known and nested) or not is_subset(bits[inner], bits[outer]):
                continue
            if not nested:
                is_unlike[outer if is_subset(bits[of_inner], bits[outer]) else inner] = True
            is_open[number[of_outer], number[of_inner]] = True
    return is_unlike, is_open


@leaf_kernel
def _add(found: BitArray, v: int) -> None:
    found[v >> 6] |= np.uint64(1) << np.uint64(v & 63)


@leaf_kernel
def _words_of(bits: BitArray) -> tuple[int, int]:
    """Returns the first word that is not zero, and the end of these."""
    first, end = bits.size, 0
    for word in range(bits.size):
        if bits[word] != 0:
            first, end = min(first, word), word + 1
    return min(first, end), end
