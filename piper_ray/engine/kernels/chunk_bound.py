"""Kernels: a lower bound on every plan of a shape, by Lagrangian duality.

Whatever its chunks are, a batch takes at least as long as each path through the event graph of its schedule, and so as
any average of paths. An average prices each chunk's forward seconds, its gradients of inputs and of weights, and the
synchronisation of the rank at its end. All of that is a sum over layers, and so are the limits of a plan:

- at each moment a rank holds no more bytes than its memory;
- no plan that is better than the best one known lets a rank work longer than that one's batch takes: m W + R seconds.
  Layers are whole, so that holds in whole units of time, too: the layers of a rank, each rounded down, take no more
  than the limit rounded down (Gomory, 1958). If cases are distinguished by their fullest rank, it has a least number,
  too;
- no chunk is empty: 1 - layers <= 0;
- if plans are divided by counts of layers, each chunk has its least and its most number of layers of a kind.

A limit (held - limit) <= 0 times a price >= 0 is at most 0, so it may be added to a plan's time for a lower bound. The
least priced sum, in which each layer chooses the chunk and the TMPC that are cheapest for it, is then a bound for any
prices: ``least_priced_s`` computes it, for all plans that are better than the best one known. Good prices come from
``chunks.share_program``, and need not be exact.

Transfers: each border between chunks costs a least amount. One layer that many others read (an encoder's output, a
mask) may be distinguished as the hub: all layers on other ranks than the hub pay for its edge, and the bound is the
least over the chunks that the hub may be in. For a given chunk of the hub, layers that come before it along edges are
in no later chunk, and layers behind it in no earlier one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.compiled.jit import kernel, leaf_kernel
from piper_ray.engine.kernels.chunk_program import ChunkProgram
from piper_ray.engine.kernels.types import FloatArray, IndexArray


class FigureColumns(NamedTuple):
    """Columns of a TMPC's figures; kinds have two further ones."""

    forward_s: int = 0
    input_s: int = 1
    weight_s: int = 2
    weights: int = 3  # bytes
    activation: int = 4  # bytes for each microbatch in flight
    fixed: int = 5  # bytes, with the rank's share of what replicas share out
    from_hub_s: int = 6  # of kinds: in either direction, if on another rank than the hub
    to_hub_s: int = 7  # of kinds: the same, in the hub's chunk


FIGURE = FigureColumns()
COLUMNS = FIGURE.from_hub_s

# The position of a kind relative to the hub.
APART = 0
BEFORE_HUB = 1
BEHIND_HUB = 2
HUB = 3

NO_LIMIT = 1e18
"""A number of units that stands for no limit."""


class LayerKinds(NamedTuple):
    """Layers that are alike: the chunks that they may be in, and their options."""

    layers: IndexArray  # int64[kinds]: their number
    counted: IndexArray  # int64[kinds]: 1 for layers, which chunks have whole; 0 for what stands for transfers
    first_chunk: IndexArray  # int64[kinds]: stages first_chunk .. last_chunk
    last_chunk: IndexArray
    side: IndexArray  # int64[kinds]: APART, BEFORE_HUB, BEHIND_HUB or HUB; at most one is the hub
    option_start: IndexArray  # int64[kinds + 1]
    figures: FloatArray  # float64[options, len(FIGURE)]
    units: FloatArray  # float64[options]: whole units of time that a layer takes


class ShapeLimits(NamedTuple):
    """The limits that all plans of a shape share.

    crossing_s: float64[s], the least transfers of each chunk in either direction. held: float64[moments, s],
    microbatches of each chunk in flight at a moment of its rank; 0 in chunks of others.
    """

    crossing_s: FloatArray
    held: FloatArray
    moment_rank: IndexArray  # int64[moments]
    rank_of: IndexArray  # int64[s]
    sync_s_per_byte: float
    memory_bytes: float
    least_units: FloatArray  # float64[p], whole units of time
    most_units: FloatArray  # float64[p]; NO_LIMIT: any number


class Paths(NamedTuple):
    """Paths through the event graph. counts: float64[paths, s, PASSES]. rank: int64[paths], the rank at the end of
    each."""

    counts: FloatArray
    rank: IndexArray


class Prices(NamedTuple):
    """path: float64[paths], shares that sum to 1. memory: float64[moments], seconds per byte, at least 0.

    units: float64[p], seconds per unit: positive if there are too many, negative if too few. filled: float64[s],
    seconds per layer of a chunk, at least 0. layers: float64[kinds, s], seconds per layer of a kind in a chunk, whose
    number is limited: positive if there are too many, negative if too few; no rows if no number is.
    """

    path: FloatArray
    memory: FloatArray
    units: FloatArray
    filled: FloatArray
    layers: FloatArray


class Costs(NamedTuple):
    """Prices by chunk, float64[s]: of synchronisation, activations in flight and fixed bytes; of passes [s, PASSES]."""

    passes: FloatArray
    sync: FloatArray
    activation: FloatArray
    fixed: FloatArray


@kernel
def moments(program: ChunkProgram, most: int) -> tuple[FloatArray, IndexArray]:
    """Returns ``ShapeLimits.held`` and ``moment_rank``: for each rank at most ``most`` moments, evenly chosen."""
    p, v = program.stage_of.shape
    held = np.zeros((p * most, program.rank_of.size))
    rank = np.empty(p * most, np.int64)
    count = 0
    for r in range(p):
        first, listed = program.held_start[r], program.held_start[r + 1] - program.held_start[r]
        chosen = min(listed, most)
        for n in range(chosen):
            moment = first + n * listed // chosen
            for chunk in range(v):
                held[count, program.stage_of[r, chunk]] = program.held[moment, chunk]
            rank[count] = r
            count += 1
    return held[:count].copy(), rank[:count].copy()


@kernel
def least_priced_s(kinds: LayerKinds, limits: ShapeLimits, paths: Paths, prices: Prices) -> tuple[float, int]:
    """Returns a lower bound on plans of the shape, and the hub's chunk for which it is least (-1: no hub). inf if some
    kind has no place or no option. What the limits of ``prices.layers`` give is not subtracted."""
    s = limits.rank_of.size
    costs = costs_of(limits, paths, prices.path, prices.memory)
    fixed_s = -limits.memory_bytes * prices.memory.sum()
    for k in range(s):
        fixed_s += prices.filled[k]
    for r in range(prices.units.size):
        price = prices.units[r]
        if price != 0.0:
            fixed_s -= price * (limits.most_units[r] if price > 0.0 else limits.least_units[r])
    for k in range(s):
        fixed_s += (costs.passes[k, 0] + costs.passes[k, 1]) * limits.crossing_s[k]
    first_hub, last_hub = -1, -1
    for c in range(kinds.layers.size):
        if kinds.side[c] == HUB:
            first_hub, last_hub = kinds.first_chunk[c], kinds.last_chunk[c]
    total_s = np.full(last_hub - first_hub + 1, fixed_s)  # by the hub's chunk
    least_s, up_to_s, from_s = np.empty(s), np.empty(s), np.empty(s)
    for c in range(kinds.layers.size):
        pays_hub = False
        for o in range(kinds.option_start[c], kinds.option_start[c + 1]):
            pays_hub = pays_hub or kinds.figures[o, FIGURE.from_hub_s] > 0.0 or kinds.figures[o, FIGURE.to_hub_s] > 0.0
        for hub in range(first_hub, last_hub + 1):
            if pays_hub or hub == first_hub:
                # The least of each chunk; of all chunks up to it, and of all from it on, wherever the hub is.
                for k in range(kinds.first_chunk[c], kinds.last_chunk[c] + 1):
                    least_s[k] = np.inf
                    for o in range(kinds.option_start[c], kinds.option_start[c + 1]):
                        cost_s = priced_s(kinds, o, k, hub, costs, prices, limits) - prices.filled[k] * kinds.counted[c]
                        least_s[k] = min(least_s[k], cost_s)
                    if prices.layers.shape[0]:
                        least_s[k] += prices.layers[c, k]
                of_all_s = np.inf
                for k in range(kinds.first_chunk[c], kinds.last_chunk[c] + 1):
                    of_all_s = min(of_all_s, least_s[k])
                    up_to_s[k] = of_all_s
                of_all_s = np.inf
                for k in range(kinds.last_chunk[c], kinds.first_chunk[c] - 1, -1):
                    of_all_s = min(of_all_s, least_s[k])
                    from_s[k] = of_all_s
            first, last = window(kinds, c, hub)
            if first > last:
                found_s = np.inf
            elif first == last:
                found_s = least_s[first]
            else:  # not the hub itself, so that one end is that of all chunks
                found_s = up_to_s[last] if first == kinds.first_chunk[c] else from_s[first]
            total_s[hub - first_hub] += kinds.layers[c] * found_s
    best_s, best_hub = np.inf, first_hub
    for hub in range(first_hub, last_hub + 1):
        if total_s[hub - first_hub] < best_s:
            best_s, best_hub = total_s[hub - first_hub], hub
    return float(best_s), int(best_hub)


@leaf_kernel
def window(kinds: LayerKinds, c: int, hub: int) -> tuple[int, int]:
    """Returns the range of chunks that a kind may be in if the hub is in chunk ``hub``."""
    first, last = kinds.first_chunk[c], kinds.last_chunk[c]
    side = kinds.side[c]
    if side in (HUB, BEHIND_HUB):
        first = max(first, hub)
    if side in (HUB, BEFORE_HUB):
        last = min(last, hub)
    return first, last


@leaf_kernel
def priced_s(kinds: LayerKinds, o: int, k: int, hub: int, costs: Costs, prices: Prices, limits: ShapeLimits) -> float:
    """Returns the price of one layer with option o in chunk k, without that of the numbers of layers in chunks."""
    figures, r = kinds.figures, limits.rank_of[k]
    cost = (
        costs.passes[k, 0] * figures[o, FIGURE.forward_s]
        + costs.passes[k, 1] * figures[o, FIGURE.input_s]
        + costs.passes[k, 2] * figures[o, FIGURE.weight_s]
        + costs.sync[k] * figures[o, FIGURE.weights]
        + costs.activation[k] * figures[o, FIGURE.activation]
        + costs.fixed[k] * figures[o, FIGURE.fixed]
        + prices.units[r] * kinds.units[o]
    )
    if hub >= 0 and limits.rank_of[hub] != r:
        cost += (costs.passes[k, 0] + costs.passes[k, 1]) * figures[o, FIGURE.from_hub_s]
        cost += (costs.passes[hub, 0] + costs.passes[hub, 1]) * figures[o, FIGURE.to_hub_s]
    return float(cost)


@kernel
def costs_of(limits: ShapeLimits, paths: Paths, path: FloatArray, memory: FloatArray) -> Costs:
    """Returns the prices of paths weighted by ``path`` and moments weighted by ``memory``."""
    s, p = limits.rank_of.size, limits.most_units.size
    passes = np.zeros((s, 3))
    sync_of_rank, fixed_of_rank = np.zeros(p), np.zeros(p)
    activation = np.zeros(s)
    for i in range(path.size):
        if path[i] != 0.0:
            for k in range(s):
                for column in range(3):
                    passes[k, column] += path[i] * paths.counts[i, k, column]
            sync_of_rank[paths.rank[i]] += path[i] * limits.sync_s_per_byte
    for n in range(memory.size):
        if memory[n] != 0.0:
            for k in range(s):
                activation[k] += memory[n] * limits.held[n, k]
            fixed_of_rank[limits.moment_rank[n]] += memory[n]
    sync, fixed = np.empty(s), np.empty(s)
    for k in range(s):
        sync[k], fixed[k] = sync_of_rank[limits.rank_of[k]], fixed_of_rank[limits.rank_of[k]]
    return Costs(passes, sync, activation, fixed)
