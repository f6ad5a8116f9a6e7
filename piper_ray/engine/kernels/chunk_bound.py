"""Kernels: what every plan of a shape takes at least, by Lagrangian duality.

Whatever its chunks are, a batch takes at least as long as each path through the event graph of its schedule, and so at
least as long as any average of paths, which prices each chunk's forward seconds, gradients of inputs and of weights, and
the synchronisation of its rank. Memory limits are priced besides: mu (bytes held - limit) <= 0 for plans that fit, with
mu >= 0 and bytes held at any average of the moments of a rank. The least priced sum, in which each layer chooses the
chunk and the TMPC that are cheapest for it, then is a bound for any prices. ``least_priced_s`` computes it;
``better_prices`` looks for good ones, and need not be exact.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.compiled.jit import kernel
from piper_ray.engine.kernels.chunk_program import ChunkProgram
from piper_ray.engine.kernels.types import FloatArray, IndexArray

# Columns of a TMPC's figures.
FORWARD_S = 0
INPUT_S = 1
WEIGHT_S = 2
WEIGHTS = 3  # bytes
ACTIVATION = 4  # bytes for each microbatch in flight
FIXED = 5  # bytes, with the rank's part of what replicas share out
COLUMNS = 6


class LayerKinds(NamedTuple):
    """Layers that are alike: which chunks they may be in, and what they may run."""

    count: IndexArray  # int64[kinds]
    first_chunk: IndexArray  # int64[kinds]: stages first_chunk .. last_chunk
    last_chunk: IndexArray
    option_start: IndexArray  # int64[kinds + 1]
    figures: FloatArray  # float64[options, COLUMNS]


class ShapeLimits(NamedTuple):
    """What all plans of a shape share.

    crossing_s: float64[s], the least transfers of each chunk in either direction. held: float64[s], microbatches of each
    chunk in flight, averaged over the moments at which its rank holds the most.
    """

    crossing_s: FloatArray
    held: FloatArray
    sync_s_per_byte: float
    memory_bytes: float


class Paths(NamedTuple):
    """Paths through the event graph. counts: float64[paths, s, PASSES]; rank: int64[paths], that each ends on."""

    counts: FloatArray
    rank: IndexArray


class Prices(NamedTuple):
    """path: float64[paths], parts of 1. memory: float64[p], seconds for each byte, 0 or more."""

    path: FloatArray
    memory: FloatArray


@kernel
def mean_held(program: ChunkProgram) -> FloatArray:
    """``ShapeLimits.held``"""
    held = np.zeros(program.rank_of.size)
    for r in range(program.last.size):
        first, end = program.held_start[r], program.held_start[r + 1]
        for chunk in range(program.stage_of.shape[1]):
            held[program.stage_of[r, chunk]] = program.held[first:end, chunk].mean()
    return held


@kernel
def least_priced_s(kinds: LayerKinds, limits: ShapeLimits, rank_of: IndexArray, paths: Paths, prices: Prices) -> float:
    """No plan of the shape takes less. inf if some kind has no place or no option."""
    s = rank_of.size
    passes, sync = _passes_priced(paths, prices.path, prices.memory.size)
    total_s = -limits.memory_bytes * prices.memory.sum()
    for k in range(s):
        total_s += (passes[k, 0] + passes[k, 1]) * limits.crossing_s[k]
    for c in range(kinds.count.size):
        least_s = np.inf
        for k in range(kinds.first_chunk[c], kinds.last_chunk[c] + 1):
            r = rank_of[k]
            for o in range(kinds.option_start[c], kinds.option_start[c + 1]):
                least_s = min(least_s, _priced(kinds, o, passes[k], sync[r], prices.memory[r], limits, k))
        total_s += kinds.count[c] * least_s
    return float(total_s)


@kernel
def _priced(
    kinds: LayerKinds, o: int, passes: FloatArray, sync: float, memory: float, limits: ShapeLimits, k: int
) -> float:
    """Of one layer with option o in chunk k."""
    figures = kinds.figures
    return (
        passes[0] * figures[o, FORWARD_S]
        + passes[1] * figures[o, INPUT_S]
        + passes[2] * figures[o, WEIGHT_S]
        + sync * limits.sync_s_per_byte * figures[o, WEIGHTS]
        + memory * (limits.held[k] * figures[o, ACTIVATION] + figures[o, FIXED])
    )


@kernel
def _passes_priced(paths: Paths, path: FloatArray, p: int) -> tuple[FloatArray, FloatArray]:
    """float64[s, PASSES], float64[p]: how often each chunk's passes, and each rank's synchronisation, count on average."""
    passes = np.zeros(paths.counts.shape[1:])
    sync = np.zeros(p)
    for i in range(path.size):
        if path[i] > 0.0:
            passes += path[i] * paths.counts[i]
            sync[paths.rank[i]] += path[i]
    return passes, sync


@kernel
def _on_simplex(values: FloatArray) -> None:
    """The nearest point whose entries are 0 or more and sum to 1 (Michelot, 1986), in place."""
    n = values.size
    count, shift = n, (values.sum() - 1.0) / n
    while True:
        total, kept = 0.0, 0
        for x in values:
            if x > shift:
                total += x
                kept += 1
        if kept == 0:
            break
        found = (total - 1.0) / kept
        if kept == count:
            shift = found
            break
        count, shift = kept, found
    for n in range(values.size):
        values[n] = max(0.0, values[n] - shift)


@kernel
def spread_s(kinds: LayerKinds, limits: ShapeLimits, share: FloatArray, s: int) -> FloatArray:
    """float64[s, COLUMNS]: what each chunk holds when layers are spread over chunks and options by shares.

    share: float64[..], for each kind its chunks' options: of kind c, s * (option - its first) + chunk apart.
    """
    held = np.zeros((s, COLUMNS))
    at = 0
    for c in range(kinds.count.size):
        for k in range(kinds.first_chunk[c], kinds.last_chunk[c] + 1):
            for o in range(kinds.option_start[c], kinds.option_start[c + 1]):
                if share[at] > 0.0:
                    layers = share[at] * kinds.count[c]
                    for column in range(COLUMNS):
                        held[k, column] += layers * kinds.figures[o, column]
                at += 1
    for k in range(s):
        held[k, FORWARD_S] += limits.crossing_s[k]
        held[k, INPUT_S] += limits.crossing_s[k]
    return held


@kernel
def cells(kinds: LayerKinds) -> int:
    """How many shares there are."""
    total = 0
    for c in range(kinds.count.size):
        width = kinds.last_chunk[c] - kinds.first_chunk[c] + 1
        total += width * (kinds.option_start[c + 1] - kinds.option_start[c])
    return total


@kernel
def better_prices(
    kinds: LayerKinds,
    limits: ShapeLimits,
    rank_of: IndexArray,
    paths: Paths,
    prices: Prices,
    share: FloatArray,
    scale_s: float,
    rounds: int,
) -> FloatArray:
    """Moves prices and shares, in place, towards those of the best fractional plan under these paths alone.

    A primal-dual hybrid gradient (Chambolle and Pock, 2011) of min over shares, max over prices. scale_s: about what a
    batch takes. Returns the average of the shares over the rounds.
    """
    p, s = prices.memory.size, rank_of.size
    norm = _norm(kinds, limits, rank_of, paths, share.size, p, scale_s)
    step = 0.9 / norm
    average = np.zeros(share.size)
    average_path, average_memory = np.zeros(prices.path.size), np.zeros(p)
    moved = share.copy()
    memory_unit = scale_s / limits.memory_bytes
    for _ in range(rounds):
        passes, sync = _passes_priced(paths, prices.path, p)
        at = 0
        for c in range(kinds.count.size):
            first = at
            for k in range(kinds.first_chunk[c], kinds.last_chunk[c] + 1):
                r = rank_of[k]
                for o in range(kinds.option_start[c], kinds.option_start[c + 1]):
                    cost = kinds.count[c] * _priced(kinds, o, passes[k], sync[r], prices.memory[r], limits, k)
                    moved[at] = share[at] - step * cost / scale_s
                    at += 1
            _on_simplex(moved[first:at])
        for n in range(share.size):
            average[n] += moved[n]
            share[n], moved[n] = moved[n], 2.0 * moved[n] - share[n]
        held = spread_s(kinds, limits, moved, s)
        lengths, bytes_held = _lengths(limits, rank_of, paths, held, p)
        for i in range(prices.path.size):
            prices.path[i] += step * lengths[i] / scale_s
        _on_simplex(prices.path)
        for r in range(p):
            excess = bytes_held[r] / limits.memory_bytes - 1.0
            prices.memory[r] = max(0.0, prices.memory[r] / memory_unit + step * excess) * memory_unit
        average_path += prices.path
        average_memory += prices.memory
    prices.path[:] = average_path / average_path.sum()
    prices.memory[:] = average_memory / rounds
    return average / rounds


@kernel
def _lengths(
    limits: ShapeLimits, rank_of: IndexArray, paths: Paths, held: FloatArray, p: int
) -> tuple[FloatArray, FloatArray]:
    """Seconds along each path, and the bytes of each rank."""
    weights, bytes_held = np.zeros(p), np.zeros(p)
    for k in range(rank_of.size):
        weights[rank_of[k]] += held[k, WEIGHTS]
        bytes_held[rank_of[k]] += limits.held[k] * held[k, ACTIVATION] + held[k, FIXED]
    lengths = np.empty(paths.rank.size)
    for i in range(paths.rank.size):
        total = weights[paths.rank[i]] * limits.sync_s_per_byte
        for k in range(rank_of.size):
            for column in range(3):
                total += paths.counts[i, k, column] * held[k, column]
        lengths[i] = total
    return lengths, bytes_held


@kernel
def _norm(
    kinds: LayerKinds, limits: ShapeLimits, rank_of: IndexArray, paths: Paths, size: int, p: int, scale_s: float
) -> float:
    """About the largest singular value of the map from shares to path lengths and bytes, by the power method."""
    s = rank_of.size
    no_crossing = ShapeLimits(np.zeros(s), limits.held, limits.sync_s_per_byte, limits.memory_bytes)
    x = np.full(size, 1.0 / np.sqrt(size))
    norm = 1.0
    for _ in range(10):
        held = spread_s_any(kinds, x, s)
        lengths, bytes_held = _lengths(no_crossing, rank_of, paths, held, p)
        passes, sync = _passes_priced_any(paths, lengths / scale_s, p)
        at = 0
        for c in range(kinds.count.size):
            for k in range(kinds.first_chunk[c], kinds.last_chunk[c] + 1):
                r = rank_of[k]
                for o in range(kinds.option_start[c], kinds.option_start[c + 1]):
                    memory = bytes_held[r] / limits.memory_bytes * scale_s / limits.memory_bytes
                    x[at] = kinds.count[c] * _priced(kinds, o, passes[k], sync[r], memory, limits, k) / scale_s
                    at += 1
        norm = np.sqrt((x * x).sum())
        if norm <= 0.0:
            return 1.0
        x /= norm
    return float(np.sqrt(norm)) * 1.05


@kernel
def spread_s_any(kinds: LayerKinds, share: FloatArray, s: int) -> FloatArray:
    held = np.zeros((s, COLUMNS))
    at = 0
    for c in range(kinds.count.size):
        for k in range(kinds.first_chunk[c], kinds.last_chunk[c] + 1):
            for o in range(kinds.option_start[c], kinds.option_start[c + 1]):
                layers = share[at] * kinds.count[c]
                for column in range(COLUMNS):
                    held[k, column] += layers * kinds.figures[o, column]
                at += 1
    return held


@kernel
def _passes_priced_any(paths: Paths, path: FloatArray, p: int) -> tuple[FloatArray, FloatArray]:
    passes = np.zeros(paths.counts.shape[1:])
    sync = np.zeros(p)
    for i in range(path.size):
        passes += path[i] * paths.counts[i]
        sync[paths.rank[i]] += path[i]
    return passes, sync
