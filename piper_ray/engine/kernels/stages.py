"""Kernel: all stages of a small lattice, listed, with what is known of their TMPC choices.

An evaluation asks for the same stages as the one before. How much more time a stage takes than with its fastest
choice, so that it fits with y microbatches in flight, depends on no threshold: it is found once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.compiled.jit import inner_kernel, kernel, leaf_kernel
from piper_ray.engine.kernels.bounds import is_subset
from piper_ray.engine.kernels.knapsack import TOO_HARD, least_cost
from piper_ray.engine.kernels.scan import jumping_s
from piper_ray.engine.kernels.selection import StepCache, relaxed_extra, stage_items, steps_slot
from piper_ray.engine.kernels.types import BitArray, FloatArray, IndexArray, StageKey, Tables

_FACTOR = 0x9E3779B97F4A7C15 & (2**40 - 1)
"""Of multiplicative hashing (Knuth, The Art of Computer Programming 3, section 6.4): 2^64 over the golden ratio."""

_LOW_BITS = 2**20 - 1


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


class Candidate(NamedTuple):
    """A listed stage, by its number among them, in a variant, with degree and microbatches in flight.

    divisor: the index of d among the divisors.
    """

    number: int
    stage: StageKey
    divisor: int
    y: int


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
    """Empty; ``slots`` is a power of two, at most 2^20."""
    return ChoiceCache(np.full(slots, -1, np.int64), np.zeros(slots), np.zeros(slots))


@leaf_kernel
def choice_slot(candidate: Candidate, tables: Tables, steps: StepCache, cache: ChoiceCache) -> int:
    """The slot with what is known of this stage when its fastest choice does not fit.

    First come the LP relaxation over classes of equal choices, from below, and its rounding, from above.
    """
    options, divisors = tables.options, tables.cluster.divisors.size
    r, y = candidate.stage.variant, candidate.y
    # Its extra time is the same at each d where weights and charges do not depend on the choice and nothing is shared.
    sharing = tables.costs.fast_shared.shape[0] > 0
    of_degree = candidate.divisor if options.uniform[r] == 0 or sharing else 0
    question = (np.int64(candidate.number) * options.degree.size + r) * divisors + of_degree
    key = question * (2**20) + y
    # The low 40 bits of key * _FACTOR, by parts: plain Python warns of products past 64 bits.
    product = (((question & _LOW_BITS) * (_FACTOR & _LOW_BITS)) << 20) + y * _FACTOR
    slot = (product >> 20) & (cache.key.size - 1)
    if cache.key[slot] != key:
        cache.key[slot] = key
        cache.low_s[slot], cache.high_s[slot] = _relaxed(candidate, tables, steps)
    return int(slot)


@leaf_kernel
def _relaxed(candidate: Candidate, tables: Tables, steps: StepCache) -> tuple[float, float]:
    lattice, costs, options, cluster = tables
    i, j, r = candidate.stage
    inner, outer = lattice.bits[j], lattice.bits[i]
    y, d = candidate.y, cluster.divisors[candidate.divisor]
    excess_bytes = (costs.fast_a[i, r] - costs.fast_a[j, r]) * y + costs.fast_b[i, r] - costs.fast_b[j, r]
    if costs.fast_shared.shape[0] > 0:
        excess_bytes += (costs.fast_shared[i, r] - costs.fast_shared[j, r]) / d
    excess_bytes -= cluster.memory_bytes
    if excess_bytes <= 0.0:
        return 0.0, 0.0 if options.uniform[r] == 1 else np.inf
    slot = steps_slot(steps, options, r, d, y)
    low_s, high_s = relaxed_extra(inner, outer, r, slot, excess_bytes, options, steps)
    return low_s, high_s if options.uniform[r] == 1 else np.inf


@inner_kernel
def settle_choice(
    candidate: Candidate, used_s: float, budget_s: float, slot: int, tables: Tables, cache: ChoiceCache
) -> bool:
    """Narrows the slot's bounds by the best choice within ``budget_s``; False if that is too hard to find.

    used_s: the stage's work and resynchronisation at this d on one device, without the extra time.
    """
    cluster = tables.cluster
    vertices, items = stage_items(candidate.stage, cluster.divisors[candidate.divisor], candidate.y, tables)
    choice = np.empty(vertices.size, np.int64)
    found_s = least_cost(items, cluster.memory_bytes, budget_s, False, choice)
    if found_s == TOO_HARD:
        found_s = least_cost(items, cluster.memory_bytes, budget_s, True, choice)
        if found_s == TOO_HARD:
            return False
        cache.high_s[slot] = max(found_s - used_s, cache.low_s[slot])
    elif found_s > budget_s:
        cache.low_s[slot] = max(cache.low_s[slot], budget_s - used_s)
    else:
        cache.low_s[slot] = cache.high_s[slot] = found_s - used_s
    return True
