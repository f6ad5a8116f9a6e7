"""What it costs a rank at least that its memory is limited, if only the numbers of layers in its chunks are known.

A layer's options trade seconds for bytes: with recomputation it takes longer and holds less. At each moment a rank
holds no more than its memory. So its layers take at least as long as parts of options do that fit at that moment, of
which the best ones are found by the price of a byte, the cheapest bytes first.
"""

from __future__ import annotations

import numpy as np

from piper_ray.engine.kernels.chunk_bound import FIGURE, LayerKinds
from piper_ray.engine.kernels.chunk_cover import ByteSavings, add_memory_seconds
from piper_ray.engine.kernels.types import BoolArray, FloatArray, IndexArray

_ROUNDING = 1e-9
"""Relative: more than the errors of sums of seconds and of bytes."""


def fastest_options(kinds: LayerKinds) -> LayerKinds:
    """The same kinds with a single option each: of every figure the least of all options."""
    first = kinds.option_start[:-1]
    size = first.size
    return kinds._replace(
        option_start=np.arange(size + 1),
        figures=np.minimum.reduceat(kinds.figures, first),
        units=np.minimum.reduceat(kinds.units, first),
    )


def passes_that_differ(kinds: LayerKinds) -> IndexArray:
    """int64[..]: the kinds of passes in which the options of some kind take different times."""
    first, seconds = kinds.option_start[:-1], kinds.figures[:, FIGURE.forward_s : FIGURE.weight_s + 1]
    least, most = (of.reduceat(seconds, first) for of in (np.minimum, np.maximum))
    found: IndexArray = np.flatnonzero((least < most).any(axis=0))
    return found


def memory_seconds(
    counts: IndexArray, kinds: LayerKinds, held: FloatArray, memory_bytes: float
) -> tuple[FloatArray, BoolArray]:
    """float64[patterns]: what a microbatch takes at least beyond the least time of each pass of each layer;
    bool[patterns], whether the layers fit.

    counts: int64[patterns, v, kinds], the numbers of layers in the chunks of a rank. kinds: with figures on this rank.
    held: float64[moments, v], microbatches of each chunk in flight.
    """
    found, fits = np.zeros(len(counts)), np.ones(len(counts), np.bool_)
    for moment in _fullest(held):
        add_memory_seconds(counts, _at_moment(kinds, moment), memory_bytes * (1.0 + _ROUNDING), found, fits)
    return found * (1.0 - _ROUNDING), fits


def _fullest(held: FloatArray) -> FloatArray:
    """The moments at which no other one holds at least as much of each chunk."""
    rows = np.unique(held, axis=0)
    covers = (rows[:, None] <= rows).all(axis=2)  # [moment, other one]
    found: FloatArray = rows[covers.sum(axis=1) == 1]
    return found


def _at_moment(kinds: LayerKinds, held: FloatArray) -> ByteSavings:
    """held: float64[v]."""
    passes_s, first = kinds.figures[:, FIGURE.forward_s : FIGURE.weight_s + 1], kinds.option_start[:-1]
    least_s = np.minimum.reduceat(passes_s, first).sum(axis=1)
    more_s = np.maximum(passes_s.sum(axis=1) - np.repeat(least_s, np.diff(kinds.option_start)), 0.0)
    held_bytes = held[:, None] * kinds.figures[:, FIGURE.activation] + kinds.figures[:, FIGURE.fixed]  # [v, options]
    bytes_, seconds = (np.zeros((held.size, first.size)) for _ in range(2))
    savings = list[tuple[float, int, int, float]]()
    for kind, (start, end) in enumerate(zip(first.tolist(), kinds.option_start[1:].tolist(), strict=True)):
        for turn in range(held.size):
            options = sorted(zip(more_s[start:end].tolist(), held_bytes[turn, start:end].tolist(), strict=True))
            now_s, now_bytes = options[0]
            seconds[turn, kind], bytes_[turn, kind] = now_s, now_bytes
            while smaller := [one for one in options if one[1] < now_bytes]:
                price, to_s, to_bytes = min(((s - now_s) / (now_bytes - b), s, b) for s, b in smaller)
                savings.append((price, turn, kind, now_bytes - to_bytes))
                now_s, now_bytes = to_s, to_bytes
    savings.sort()
    price, turns, of_kind, each = np.array(savings, np.float64).reshape(-1, 4).T.copy()
    return ByteSavings(bytes_, seconds, turns.astype(np.int64), of_kind.astype(np.int64), each, price)
