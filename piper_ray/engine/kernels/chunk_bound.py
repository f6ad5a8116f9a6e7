"""Kernels: what every plan of a shape takes at least, by Lagrangian duality.

Whatever its chunks are, a batch takes at least as long as each path through the event graph of its schedule, and so at
least as long as any average of paths, which prices each chunk's forward seconds, gradients of inputs and of weights, and
the synchronisation of its rank. What a rank can hold is priced besides: mu (held - limit) <= 0 for all plans that matter,
with mu >= 0. Such limits are the bytes held at each moment of a rank, and, as layers are whole, the same in whole units:
for any unit of bytes the layers of a rank, each rounded down, are no more than the limit rounded down (Gomory, 1958).
So it is with time: a rank works m W + R seconds, in which no plan better than the best one known exceeds that one's time.
Where plans are told apart by the units of a rank, they may have to be some number at least, too. And no chunk is empty:
nu (1 - layers) <= 0 with nu >= 0. The least priced sum, in
which each layer chooses the chunk and the TMPC that are cheapest for it, then is a bound for any prices:
``least_priced_s`` computes it. ``better_prices`` looks for good ones, and need not be exact.

Transfers: each border between chunks costs a least amount. One layer, the hub, may be told apart that many others read
(an encoder's output, a mask): all layers that are on other ranks than the hub pay for its edge, and the bound is the least
over the chunks that the hub may be in. Where the hub's chunk is given, what comes before it by the edges is in no later
chunk, and what comes behind it in no earlier one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.compiled.jit import kernel, leaf_kernel
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
# Further columns of kinds.
FROM_HUB_S = 6  # in either direction, if it is on another rank than the hub
TO_HUB_S = 7  # the same, in the hub's chunk
KIND_COLUMNS = 8

# How a kind lies to the hub.
APART = 0
BEFORE_HUB = 1
BEHIND_HUB = 2
HUB = 3

NO_LIMIT = 1e18
"""Units that stand for no limit."""

_NEVER = -1e9
_MOST_WEIGHT = 1e3


class LayerKinds(NamedTuple):
    """Layers that are alike: which chunks they may be in, and what they may run."""

    count: IndexArray  # int64[kinds]
    first_chunk: IndexArray  # int64[kinds]: stages first_chunk .. last_chunk
    last_chunk: IndexArray
    side: IndexArray  # int64[kinds]: APART, BEFORE_HUB, BEHIND_HUB or HUB; at most one is the hub
    option_start: IndexArray  # int64[kinds + 1]
    figures: FloatArray  # float64[options, KIND_COLUMNS]
    units: FloatArray  # float64[options, s, units]: whole units of each sort that a layer is in each chunk


class ShapeLimits(NamedTuple):
    """What all plans of a shape share.

    crossing_s: float64[s], the least transfers of each chunk in either direction. held: float64[moments, s], microbatches
    of each chunk in flight at a moment of its rank; 0 in chunks of others.
    """

    crossing_s: FloatArray
    held: FloatArray
    moment_rank: IndexArray  # int64[moments]
    rank_of: IndexArray  # int64[s]
    sync_s_per_byte: float
    memory_bytes: float
    least_units: FloatArray  # float64[p, units]
    most_units: FloatArray


class Paths(NamedTuple):
    """Paths through the event graph. counts: float64[paths, s, PASSES]; rank: int64[paths], that each ends on."""

    counts: FloatArray
    rank: IndexArray


class Prices(NamedTuple):
    """path: float64[paths], parts of 1. memory: float64[moments], seconds for each byte, 0 or more. units: float64[p,
    units], seconds for each unit: above 0 where they are too many, below 0 where they are too few. filled: float64[s], seconds for each layer that a
    chunk has, 0 or more."""

    path: FloatArray
    memory: FloatArray
    units: FloatArray
    filled: FloatArray


class _Costs(NamedTuple):
    """Prices by chunk: of passes float64[s, PASSES], of synchronisation, activations in flight and fixed bytes float64[s]."""

    passes: FloatArray
    sync: FloatArray
    activation: FloatArray
    fixed: FloatArray


@kernel
def moments(program: ChunkProgram, most: int) -> tuple[FloatArray, IndexArray]:
    """``ShapeLimits.held`` and ``moment_rank``: of each rank at most so many moments, evenly chosen."""
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
    """No plan of the shape takes less, and the hub's chunk that this comes from (-1: no hub). inf if some kind has no
    place or no option."""
    s = limits.rank_of.size
    costs = _costs(limits, paths, prices.path, prices.memory)
    fixed_s = prices.filled.sum() - limits.memory_bytes * prices.memory.sum()
    for r in range(prices.units.shape[0]):
        for u in range(prices.units.shape[1]):
            price = prices.units[r, u]
            if price != 0.0:
                fixed_s -= price * (limits.most_units[r, u] if price > 0.0 else limits.least_units[r, u])
    for k in range(s):
        fixed_s += (costs.passes[k, 0] + costs.passes[k, 1]) * limits.crossing_s[k]
    first_hub, last_hub = -1, -1
    for c in range(kinds.count.size):
        if kinds.side[c] == HUB:
            first_hub, last_hub = kinds.first_chunk[c], kinds.last_chunk[c]
    best_s, best_hub = np.inf, first_hub
    for hub in range(first_hub, last_hub + 1):
        total_s = fixed_s
        for c in range(kinds.count.size):
            first, last = window(kinds, c, hub)
            least_s = np.inf
            for k in range(first, last + 1):
                for o in range(kinds.option_start[c], kinds.option_start[c + 1]):
                    least_s = min(least_s, _priced(kinds, o, k, hub, costs, prices, limits))
            total_s += kinds.count[c] * least_s
        if total_s < best_s:
            best_s, best_hub = total_s, hub
    return float(best_s), int(best_hub)


@kernel
def price_full_ranks(
    kinds: LayerKinds,
    limits: ShapeLimits,
    hub: int,
    paths: Paths,
    prices: Prices,
    first_option: int,
    end_option: int,
    layers: int,
    scale_s: float,
) -> None:
    """Sets the prices of units of time, in place, to the best if all layers were of the frequent kind.

    Its ``layers`` layers have the options first_option .. end_option - 1, of a unit each. They fill the ranks on which they
    are cheapest; what a rank is cheaper than the last one of these is the price of its units. Where there is no room for
    all, units cost more the more is missing, by ``scale_s`` for all.
    """
    p, s = limits.most_units.shape[0], limits.rank_of.size
    costs = _costs(limits, paths, prices.path, prices.memory)
    prices.units[:, 0] = 0.0
    cost = np.full(p, np.inf)
    for k in range(s):
        r = limits.rank_of[k]
        for o in range(first_option, end_option):
            cost[r] = min(cost[r], _priced(kinds, o, k, hub, costs, prices, limits))
    left = layers - limits.least_units[:, 0].sum()
    last_s, room = 0.0, False
    for r in np.argsort(cost):
        left -= limits.most_units[r, 0] - limits.least_units[r, 0]
        last_s = cost[r]
        if left <= 0.0:
            room = True
            break
    if not room:
        last_s += scale_s
    for r in range(p):
        if cost[r] < last_s or limits.least_units[r, 0] > 0.0:
            prices.units[r, 0] = last_s - cost[r]


@leaf_kernel
def window(kinds: LayerKinds, c: int, hub: int) -> tuple[int, int]:
    """The chunks that a kind may be in while the hub is in chunk ``hub``."""
    first, last = kinds.first_chunk[c], kinds.last_chunk[c]
    side = kinds.side[c]
    if side == HUB or side == BEHIND_HUB:
        first = max(first, hub)
    if side == HUB or side == BEFORE_HUB:
        last = min(last, hub)
    return first, last


@leaf_kernel
def _priced(kinds: LayerKinds, o: int, k: int, hub: int, costs: _Costs, prices: Prices, limits: ShapeLimits) -> float:
    """Of one layer with option o in chunk k."""
    figures, r = kinds.figures, limits.rank_of[k]
    cost = (
        costs.passes[k, 0] * figures[o, FORWARD_S]
        + costs.passes[k, 1] * figures[o, INPUT_S]
        + costs.passes[k, 2] * figures[o, WEIGHT_S]
        + costs.sync[k] * figures[o, WEIGHTS]
        + costs.activation[k] * figures[o, ACTIVATION]
        + costs.fixed[k] * figures[o, FIXED]
        - prices.filled[k]
    )
    for u in range(prices.units.shape[1]):
        cost += prices.units[r, u] * kinds.units[o, k, u]
    if hub >= 0 and limits.rank_of[hub] != r:
        cost += (costs.passes[k, 0] + costs.passes[k, 1]) * figures[o, FROM_HUB_S]
        cost += (costs.passes[hub, 0] + costs.passes[hub, 1]) * figures[o, TO_HUB_S]
    return float(cost)


@kernel
def _costs(limits: ShapeLimits, paths: Paths, path: FloatArray, memory: FloatArray) -> _Costs:
    """Paths weighted by ``path``, moments by ``memory``."""
    s, p = limits.rank_of.size, limits.most_units.shape[0]
    passes = np.zeros((s, 3))
    sync_of_rank, fixed_of_rank = np.zeros(p), np.zeros(p)
    activation = np.zeros(s)
    for i in range(path.size):
        if path[i] != 0.0:
            passes += path[i] * paths.counts[i]
            sync_of_rank[paths.rank[i]] += path[i] * limits.sync_s_per_byte
    for n in range(memory.size):
        if memory[n] != 0.0:
            activation += memory[n] * limits.held[n]
            fixed_of_rank[limits.moment_rank[n]] += memory[n]
    return _Costs(passes, sync_of_rank[limits.rank_of], activation, fixed_of_rank[limits.rank_of])


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
            break  # not a number
        shift = (total - 1.0) / kept
        if kept >= count:  # rounding may let one in again
            break
        count = kept
    for n in range(values.size):
        values[n] = max(0.0, values[n] - shift)


@kernel
def spread(
    kinds: LayerKinds, limits: ShapeLimits, share: FloatArray, hub: int
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """float64[s, COLUMNS], units float64[p, units] and layers float64[s]: what chunks hold when layers are spread over chunks and options by shares.

    share: float64[cells], for each kind, chunk of its window and option the part of its layers. The seconds hold what
    the hub makes layers pay, and no other transfers.
    """
    held = np.zeros((limits.rank_of.size, COLUMNS))
    units = np.zeros(limits.most_units.shape)
    layers_in = np.zeros(limits.rank_of.size)
    at = 0
    for c in range(kinds.count.size):
        for k in range(kinds.first_chunk[c], kinds.last_chunk[c] + 1):
            r = limits.rank_of[k]
            for o in range(kinds.option_start[c], kinds.option_start[c + 1]):
                if share[at] != 0.0:
                    layers = share[at] * kinds.count[c]
                    layers_in[k] += layers
                    for column in range(COLUMNS):
                        held[k, column] += layers * kinds.figures[o, column]
                    for u in range(units.shape[1]):
                        units[r, u] += layers * kinds.units[o, k, u]
                    if hub >= 0 and limits.rank_of[hub] != r:
                        for column in (FORWARD_S, INPUT_S):
                            held[k, column] += layers * kinds.figures[o, FROM_HUB_S]
                            held[hub, column] += layers * kinds.figures[o, TO_HUB_S]
                at += 1
    return held, units, layers_in


@kernel
def cells(kinds: LayerKinds) -> int:
    """How many shares there are."""
    total = 0
    for c in range(kinds.count.size):
        width = max(0, kinds.last_chunk[c] - kinds.first_chunk[c] + 1)
        total += width * (kinds.option_start[c + 1] - kinds.option_start[c])
    return total


@kernel
def better_prices(
    kinds: LayerKinds,
    limits: ShapeLimits,
    hub: int,
    paths: Paths,
    prices: Prices,
    share: FloatArray,
    scale_s: float,
    rounds: int,
    weight: float,
) -> float:
    """Moves prices and shares, in place, towards those of the best fractional plan under these paths alone.

    A primal-dual hybrid gradient (Chambolle and Pock, 2011) of min over shares, max over prices. hub: the chunk that the
    hub is in, -1 for none. scale_s: about what a batch takes. weight: how much longer the steps of prices are than those of
    shares, as it was returned before. Both become their averages over the rounds (Applegate and others, 2021).
    """
    s, p, sorts = limits.rank_of.size, limits.most_units.shape[0], limits.most_units.shape[1]
    by_pass = np.ascontiguousarray(paths.counts.transpose(1, 2, 0))
    step = 0.9 / _norm(kinds, limits, hub, paths, by_pass, share.size, scale_s)
    share_step, step = step / weight, step * weight
    began = share.copy()
    began_path, began_memory, began_units = prices.path.copy(), prices.memory.copy(), prices.units.copy()
    began_filled = prices.filled.copy()
    average = np.zeros(share.size)
    average_path, average_memory = np.zeros(prices.path.size), np.zeros(prices.memory.size)
    average_units, average_filled = np.zeros((p, sorts)), np.zeros(s)
    moved = share.copy()
    byte_s = scale_s / limits.memory_bytes
    for _ in range(rounds):
        costs = _costs(limits, paths, prices.path, prices.memory)
        at = 0
        for c in range(kinds.count.size):
            first = at
            first_chunk, last_chunk = window(kinds, c, hub)
            for k in range(kinds.first_chunk[c], kinds.last_chunk[c] + 1):
                for o in range(kinds.option_start[c], kinds.option_start[c + 1]):
                    cost = kinds.count[c] * _priced(kinds, o, k, hub, costs, prices, limits) / scale_s
                    inside = first_chunk <= k <= last_chunk
                    moved[at] = share[at] - share_step * cost if inside else _NEVER
                    at += 1
            _on_simplex(moved[first:at])
        for n in range(share.size):
            average[n] += moved[n]
            share[n], moved[n] = moved[n], 2.0 * moved[n] - share[n]
        held, units, layers_in = spread(kinds, limits, moved, hub)
        for k in range(s):
            held[k, FORWARD_S] += limits.crossing_s[k]
            held[k, INPUT_S] += limits.crossing_s[k]
        lengths, bytes_held = _lengths(limits, paths, by_pass, held)
        for i in range(prices.path.size):
            prices.path[i] += step * lengths[i] / scale_s
        _on_simplex(prices.path)
        for n in range(prices.memory.size):
            excess = bytes_held[n] / limits.memory_bytes - 1.0
            prices.memory[n] = max(0.0, prices.memory[n] / byte_s + step * excess) * byte_s
        for r in range(p):
            for u in range(sorts):
                most = limits.most_units[r, u]
                if most < NO_LIMIT:
                    of_all = max(1.0, most)
                    price = prices.units[r, u] * of_all / scale_s + step * units[r, u] / of_all
                    too_many = price - step * most / of_all
                    too_few = price - step * limits.least_units[r, u] / of_all
                    prices.units[r, u] = (max(0.0, too_many) + min(0.0, too_few)) * scale_s / of_all
        for k in range(s):
            prices.filled[k] = max(0.0, prices.filled[k] / scale_s + step * (1.0 - layers_in[k])) * scale_s
        average_path += prices.path
        average_memory += prices.memory
        average_units += prices.units
        average_filled += prices.filled
    prices.path[:] = average_path / average_path.sum()
    prices.memory[:] = average_memory / rounds
    prices.units[:] = average_units / rounds
    prices.filled[:] = average_filled / rounds
    share[:] = average / rounds
    moved_prices = ((prices.path - began_path) ** 2).sum() + ((prices.memory - began_memory) ** 2).sum() / byte_s**2
    moved_prices += ((prices.filled - began_filled) ** 2).sum() / scale_s**2
    for r in range(p):
        for u in range(sorts):
            if limits.most_units[r, u] < NO_LIMIT:
                unit_s = scale_s / max(1.0, limits.most_units[r, u])
                moved_prices += ((prices.units[r, u] - began_units[r, u]) / unit_s) ** 2
    moved_shares = ((share - began) ** 2).sum()
    if moved_prices <= 0.0 or moved_shares <= 0.0:
        return weight
    return min(_MOST_WEIGHT, max(1.0 / _MOST_WEIGHT, np.sqrt(weight * np.sqrt(moved_prices / moved_shares))))


@kernel
def _lengths(limits: ShapeLimits, paths: Paths, by_pass: FloatArray, held: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Seconds along each path, and the bytes of each moment. by_pass: float64[s, PASSES, paths], the paths' counts."""
    s, p = limits.rank_of.size, limits.most_units.shape[0]
    weights, fixed = np.zeros(p), np.zeros(p)
    for k in range(s):
        weights[limits.rank_of[k]] += held[k, WEIGHTS]
        fixed[limits.rank_of[k]] += held[k, FIXED]
    lengths = np.empty(paths.rank.size)
    for i in range(paths.rank.size):
        lengths[i] = weights[paths.rank[i]] * limits.sync_s_per_byte
    for k in range(s):
        for column in range(3):
            seconds = held[k, column]
            for i in range(paths.rank.size):  # the innermost, as this one is run on several at once
                lengths[i] += by_pass[k, column, i] * seconds
    bytes_held = np.empty(limits.moment_rank.size)
    for n in range(limits.moment_rank.size):
        total = fixed[limits.moment_rank[n]]
        for k in range(s):
            total += limits.held[n, k] * held[k, ACTIVATION]
        bytes_held[n] = total
    return lengths, bytes_held


@kernel
def _norm(
    kinds: LayerKinds, limits: ShapeLimits, hub: int, paths: Paths, by_pass: FloatArray, size: int, scale_s: float
) -> float:
    """About the largest singular value of the map from shares to lengths, bytes and units, by the power method."""
    p, sorts = limits.most_units.shape
    x = np.full(size, 1.0 / np.sqrt(size))
    norm = 1.0
    for _ in range(10):
        held, units, layers_in = spread(kinds, limits, x, hub)
        lengths, bytes_held = _lengths(limits, paths, by_pass, held)
        prices = Prices(
            lengths / scale_s,
            bytes_held * (scale_s / limits.memory_bytes**2),
            np.zeros((p, sorts)),
            -layers_in * scale_s,
        )
        for r in range(p):
            for u in range(sorts):
                if limits.most_units[r, u] < NO_LIMIT:
                    prices.units[r, u] = units[r, u] * scale_s / max(1.0, limits.most_units[r, u]) ** 2
        costs = _costs(limits, paths, prices.path, prices.memory)
        at = 0
        for c in range(kinds.count.size):
            for k in range(kinds.first_chunk[c], kinds.last_chunk[c] + 1):
                for o in range(kinds.option_start[c], kinds.option_start[c + 1]):
                    x[at] = kinds.count[c] * _priced(kinds, o, k, hub, costs, prices, limits) / scale_s
                    at += 1
        norm = np.sqrt((x * x).sum())
        if norm <= 0.0:
            return 1.0
        x /= norm
    return float(np.sqrt(norm)) * 1.05
