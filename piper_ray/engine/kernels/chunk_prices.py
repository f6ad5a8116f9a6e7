"""Kernels: prices that make the bound of ``chunk_bound`` high, and the fractional plans that go with them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.compiled.jit import inner_kernel, kernel, leaf_kernel
from piper_ray.engine.kernels.chunk_bound import (
    COLUMNS,
    FIGURE,
    NO_LIMIT,
    LayerKinds,
    Paths,
    Prices,
    ShapeLimits,
    costs_of,
    priced_s,
    window,
)
from piper_ray.engine.kernels.types import FloatArray

_NEVER = -1e9
_MOST_WEIGHT = 1e3


@inner_kernel
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
    """What chunks hold when layers are spread by shares: float64[s, COLUMNS], units float64[p] and layers float64[s].

    share: float64[cells], for each kind, chunk of its window and option the part of its layers. The seconds hold what
    the hub makes layers pay, and no other transfers.
    """
    held = np.zeros((limits.rank_of.size, COLUMNS))
    units = np.zeros(limits.most_units.size)
    layers_in = np.zeros(limits.rank_of.size)
    at = 0
    for c in range(kinds.layers.size):
        for k in range(kinds.first_chunk[c], kinds.last_chunk[c] + 1):
            r = limits.rank_of[k]
            for o in range(kinds.option_start[c], kinds.option_start[c + 1]):
                if share[at] != 0.0:
                    layers = share[at] * kinds.layers[c]
                    layers_in[k] += layers
                    for column in range(COLUMNS):
                        held[k, column] += layers * kinds.figures[o, column]
                    units[r] += layers * kinds.units[o]
                    if hub >= 0 and limits.rank_of[hub] != r:
                        for column in (FIGURE.forward_s, FIGURE.input_s):
                            held[k, column] += layers * kinds.figures[o, FIGURE.from_hub_s]
                            held[hub, column] += layers * kinds.figures[o, FIGURE.to_hub_s]
                at += 1
    return held, units, layers_in


class PriceSteps(NamedTuple):
    """scale_s: about what a batch takes. weight: how much longer the steps of prices are than those of shares."""

    scale_s: float
    rounds: int
    weight: float


@kernel
def better_prices(
    kinds: LayerKinds,
    limits: ShapeLimits,
    hub: int,
    paths: Paths,
    prices: Prices,
    share: FloatArray,
    steps: PriceSteps,
) -> float:
    """Moves prices and shares, in place, towards those of the best fractional plan under these paths alone.

    A primal-dual hybrid gradient (Chambolle and Pock, 2011) of min over shares, max over prices. hub: the chunk that
    the hub is in, -1 for none. Both become their averages over the rounds (Applegate and others, 2021). Returns the
    weight for further rounds.
    """
    scale_s, rounds, weight = steps
    s, p = limits.rank_of.size, limits.most_units.size
    by_pass = np.empty((s, 3, paths.rank.size))
    for i in range(paths.rank.size):
        for k in range(s):
            for column in range(3):
                by_pass[k, column, i] = paths.counts[i, k, column]
    step = 0.9 / _norm(kinds, limits, hub, paths, by_pass, share.size, scale_s)
    share_step, step = step / weight, step * weight
    began = share.copy()
    before = Prices(prices.path.copy(), prices.memory.copy(), prices.units.copy(), prices.filled.copy())
    average = np.zeros(share.size)
    averages = Prices(np.zeros(prices.path.size), np.zeros(prices.memory.size), np.zeros(p), np.zeros(s))
    moved = share.copy()
    byte_s = scale_s / limits.memory_bytes
    alike = float(kinds.layers.max())
    for _ in range(rounds):
        costs = costs_of(limits, paths, prices.path, prices.memory)
        at = 0
        for c in range(kinds.layers.size):
            first = at
            first_chunk, last_chunk = window(kinds, c, hub)
            for k in range(kinds.first_chunk[c], kinds.last_chunk[c] + 1):
                for o in range(kinds.option_start[c], kinds.option_start[c + 1]):
                    cost = kinds.layers[c] * priced_s(kinds, o, k, hub, costs, prices, limits) / scale_s
                    inside = first_chunk <= k <= last_chunk
                    moved[at] = share[at] - share_step * cost if inside else _NEVER
                    at += 1
            _on_simplex(moved[first:at])
        for n in range(share.size):
            average[n] += moved[n]
            share[n], moved[n] = moved[n], 2.0 * moved[n] - share[n]
        held, units, layers_in = spread(kinds, limits, moved, hub)
        for k in range(s):
            held[k, FIGURE.forward_s] += limits.crossing_s[k]
            held[k, FIGURE.input_s] += limits.crossing_s[k]
        lengths, bytes_held = _lengths(limits, paths, by_pass, held)
        for i in range(prices.path.size):
            prices.path[i] += step * lengths[i] / scale_s
        _on_simplex(prices.path)
        for n in range(prices.memory.size):
            excess = bytes_held[n] / limits.memory_bytes - 1.0
            prices.memory[n] = max(0.0, prices.memory[n] / byte_s + step * excess) * byte_s
        for r in range(p):
            most = limits.most_units[r]
            if most < NO_LIMIT:
                of_all = max(1.0, most)
                price = prices.units[r] * of_all / scale_s + step * units[r] / of_all
                too_many = price - step * most / of_all
                too_few = price - step * limits.least_units[r] / of_all
                prices.units[r] = (max(0.0, too_many) + min(0.0, too_few)) * scale_s / of_all
        for k in range(s):
            price = prices.filled[k] * alike / scale_s + step * (1.0 - layers_in[k]) / alike
            prices.filled[k] = max(0.0, price) * scale_s / alike
        for part in range(len(prices)):
            _add(averages[part], prices[part])
    for part in range(len(prices)):
        _divide(averages[part], float(rounds) if part > 0 else averages.path.sum(), prices[part])
    _divide(average, float(rounds), share)
    moved_prices = _square_distance(prices.path, before.path)
    moved_prices += _square_distance(prices.memory, before.memory) / byte_s**2
    moved_prices += _square_distance(prices.filled, before.filled) * (alike / scale_s) ** 2
    for r in range(p):
        if limits.most_units[r] < NO_LIMIT:
            unit_s = scale_s / max(1.0, limits.most_units[r])
            moved_prices += ((prices.units[r] - before.units[r]) / unit_s) ** 2
    moved_shares = _square_distance(share, began)
    if moved_prices <= 0.0 or moved_shares <= 0.0:
        return weight
    return float(min(_MOST_WEIGHT, max(1.0 / _MOST_WEIGHT, np.sqrt(weight * np.sqrt(moved_prices / moved_shares)))))


@leaf_kernel
def _add(total: FloatArray, values: FloatArray) -> None:
    for n in range(total.size):
        total[n] += values[n]


@leaf_kernel
def _divide(total: FloatArray, by: float, found: FloatArray) -> None:
    for n in range(total.size):
        found[n] = total[n] / by


@leaf_kernel
def _square_distance(one: FloatArray, other: FloatArray) -> float:
    total = 0.0
    for n in range(one.size):
        total += (one[n] - other[n]) ** 2
    return total


@inner_kernel
def _lengths(limits: ShapeLimits, paths: Paths, by_pass: FloatArray, held: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Seconds along each path, and the bytes of each moment. by_pass: float64[s, PASSES, paths], the paths' counts."""
    s, p = limits.rank_of.size, limits.most_units.size
    weights, fixed = np.zeros(p), np.zeros(p)
    for k in range(s):
        weights[limits.rank_of[k]] += held[k, FIGURE.weights]
        fixed[limits.rank_of[k]] += held[k, FIGURE.fixed]
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
            total += limits.held[n, k] * held[k, FIGURE.activation]
        bytes_held[n] = total
    return lengths, bytes_held


@inner_kernel
def _norm(
    kinds: LayerKinds, limits: ShapeLimits, hub: int, paths: Paths, by_pass: FloatArray, size: int, scale_s: float
) -> float:
    """About the largest singular value of the map from shares to lengths, bytes and units, by the power method."""
    p = limits.most_units.size
    x = np.full(size, 1.0 / np.sqrt(size))
    norm = 1.0
    alike = float(kinds.layers.max())
    for _ in range(10):
        held, units, layers_in = spread(kinds, limits, x, hub)
        lengths, bytes_held = _lengths(limits, paths, by_pass, held)
        prices = Prices(
            lengths / scale_s,
            bytes_held * (scale_s / limits.memory_bytes**2),
            np.zeros(p),
            -layers_in * (scale_s / alike**2),
        )
        for r in range(p):
            if limits.most_units[r] < NO_LIMIT:
                prices.units[r] = units[r] * scale_s / max(1.0, limits.most_units[r]) ** 2
        costs = costs_of(limits, paths, prices.path, prices.memory)
        at = 0
        for c in range(kinds.layers.size):
            for k in range(kinds.first_chunk[c], kinds.last_chunk[c] + 1):
                for o in range(kinds.option_start[c], kinds.option_start[c + 1]):
                    x[at] = kinds.layers[c] * priced_s(kinds, o, k, hub, costs, prices, limits) / scale_s
                    at += 1
        squares = 0.0
        for value in x:
            squares += value * value
        norm = np.sqrt(squares)
        if norm <= 0.0:
            return 1.0
        _divide(x, norm, x)
    return float(np.sqrt(norm)) * 1.05
