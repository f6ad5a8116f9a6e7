"""Kernel: all stages of a small lattice, listed, with what is known of their TMPC choices.

An evaluation asks for the same stages as the one before. How much more time a stage takes than with its fastest
choice, so that it fits with y microbatches in flight, depends on no threshold: it is found once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.compiled.jit import kernel, leaf_kernel
from piper_ray.engine.kernels.bounds import is_subset
from piper_ray.engine.kernels.knapsack import TOO_HARD, least_cost
from piper_ray.engine.kernels.scan import jumping_s
from piper_ray.engine.kernels.selection import StepCache, stage_items, steps_slot
from piper_ray.engine.kernels.types import BitArray, FloatArray, IndexArray, Tables

_UNKNOWN = -1.0


class StageArrays(NamedTuple):
    """Stages I \\ J for all J < I: by I, in id order of J."""

    start: IndexArray  # int64[m + 1]
    inner: IndexArray  # int64[stages]: J
    work_s: FloatArray  # float64[stages, r]: least work and communication on one device; inf without an option


class ChoiceCache(NamedTuple):
    """Bounds on the extra time of (stage, variant, d, y): one entry for each slot. Private to one thread."""

    key: IndexArray  # int64[slots], -1: empty
    low_s: FloatArray  # float64[slots]: no choice that fits takes less; inf: none fits
    high_s: FloatArray  # float64[slots]: some choice that fits takes this; inf: none is known


@kernel
def count_stages(bits: BitArray) -> int:
    """How many nested pairs J < I there are."""
    count = 0
    for i in range(bits.shape[0]):
        for j in range(i):
            count += is_subset(bits[j], bits[i])
    return count


@kernel
def list_stages(tables: Tables, count: int) -> StageArrays:
    """All ``count`` stages with their least work."""
    lattice, costs, options, _ = tables
    downsets, variants = lattice.bits.shape[0], options.degree.size
    start = np.zeros(downsets + 1, np.int64)
    inner = np.empty(count, np.int64)
    work_s = np.full((count, variants), np.inf)
    at = 0
    for i in range(downsets):
        for j in range(i):
            if not is_subset(lattice.bits[j], lattice.bits[i]):
                continue
            inner[at] = j
            for r in range(variants):
                if costs.missing[i, r] == costs.missing[j, r]:
                    least_s = costs.need_s[i, r] - costs.cap_s[j, r]
                    work_s[at, r] = least_s - jumping_s(i, r, lattice.bits, j, lattice, costs)
            at += 1
        start[i + 1] = at
    return StageArrays(start, inner, work_s)


@kernel
def make_choice_cache(slots: int) -> ChoiceCache:
    """Empty; ``slots`` is a power of two."""
    return ChoiceCache(np.full(slots, -1, np.int64), np.zeros(slots), np.zeros(slots))


@leaf_kernel
def choice_slot(
    i: int, j: int, stage: int, r: int, index: int, y: int, tables: Tables, steps: StepCache, cache: ChoiceCache
) -> int:
    """The slot with what is known of this stage when its fastest choice does not fit. index: of d among the divisors.

    First come the LP relaxation over classes of equal choices, from below, and its rounding, from above.
    """
    options, divisors = tables.options, tables.cluster.divisors.size
    # Its extra time is the same at each d where weights and charges do not depend on the choice and nothing is shared.
    sharing = tables.costs.fast_shared.shape[0] > 0
    of_degree = index if options.uniform[r] == 0 or sharing else 0
    key = ((np.int64(stage) * options.degree.size + r) * divisors + of_degree) * (2**20) + y
    slot = ((key * np.int64(-7046029254386353131)) >> 20) & (cache.key.size - 1)
    if cache.key[slot] != key:
        cache.key[slot] = key
        cache.low_s[slot], cache.high_s[slot] = _relaxed(i, j, r, index, y, tables, steps)
    return int(slot)


@leaf_kernel
def _relaxed(i: int, j: int, r: int, index: int, y: int, tables: Tables, steps: StepCache) -> tuple[float, float]:
    lattice, costs, options, cluster = tables
    bits = lattice.bits
    d = cluster.divisors[index]
    excess_bytes = (costs.fast_a[i, r] - costs.fast_a[j, r]) * y + costs.fast_b[i, r] - costs.fast_b[j, r]
    if costs.fast_shared.shape[0] > 0:
        excess_bytes += (costs.fast_shared[i, r] - costs.fast_shared[j, r]) / d
    excess_bytes -= cluster.memory_bytes
    if excess_bytes <= 0.0:
        return 0.0, 0.0 if options.uniform[r] == 1 else np.inf
    slot = steps_slot(steps, options, r, d, y)
    spent_s = 0.0
    for k in range(steps.steps[slot]):
        v = steps.step_vertex[slot, k]
        count = 0
        if v >= 0:
            count = int(((bits[i, v >> 6] & ~bits[j, v >> 6]) >> np.uint64(v & 63)) & np.uint64(1))
        else:
            for word in range(bits.shape[1]):
                rest = bits[i, word] & ~bits[j, word] & options.class_bits[steps.step_class[slot, k], word]
                while rest != 0:
                    rest &= rest - np.uint64(1)
                    count += 1
        if count == 0:
            continue
        extra_s, saved_bytes = steps.extra_s[slot, k], steps.saved_bytes[slot, k]
        if count * saved_bytes >= excess_bytes:
            share = excess_bytes / saved_bytes
            rounded_s = spent_s + np.ceil(share) * extra_s
            return spent_s + share * extra_s, rounded_s if options.uniform[r] == 1 else np.inf
        excess_bytes -= count * saved_bytes
        spent_s += count * extra_s
    return np.inf, np.inf


@kernel
def settle_choice(
    i: int,
    j: int,
    r: int,
    index: int,
    y: int,
    used_s: float,
    budget_s: float,
    slot: int,
    tables: Tables,
    cache: ChoiceCache,
) -> bool:
    """Narrows the slot's bounds by the best choice within ``budget_s``; False if that is too hard to find.

    used_s: the stage's work and resynchronisation at this d on one device, without the extra time.
    """
    bits, cluster = tables.lattice.bits, tables.cluster
    vertices, start, cost, memory = stage_items(bits[j], bits[i], tables, r, cluster.divisors[index], y)
    choice = np.empty(vertices.size, np.int64)
    found_s = least_cost(start, cost, memory, cluster.memory_bytes, budget_s, False, choice)
    if found_s == TOO_HARD:
        found_s = least_cost(start, cost, memory, cluster.memory_bytes, budget_s, True, choice)
        if found_s == TOO_HARD:
            return False
        cache.high_s[slot] = max(found_s - used_s, cache.low_s[slot])
    elif found_s > budget_s:
        cache.low_s[slot] = max(cache.low_s[slot], budget_s - used_s)
    else:
        cache.low_s[slot] = cache.high_s[slot] = found_s - used_s
    return True
