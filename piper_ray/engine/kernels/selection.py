"""Kernels: is there a TMPC choice with which a stage keeps both the threshold and the memory limit?"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.compiled.jit import inlined_kernel, kernel, leaf_kernel, shared_kernel
from piper_ray.cost.stage import held_bytes, one_device_s
from piper_ray.engine.kernels.bounds import crosses_border, has, lowest_position, members
from piper_ray.engine.kernels.knapsack import TOO_HARD, hull_steps, least_cost
from piper_ray.engine.kernels.types import (
    BitArray,
    CostArrays,
    FloatArray,
    IndexArray,
    Items,
    LatticeArrays,
    OptionArrays,
    StageKey,
    Tables,
)

NO, YES, UNKNOWN = 0, 1, 2
TOO_SHORT, ENOUGH = 0, 1
_SLOTS = 1024
_FITS = ((64, 4093), (256, 65521))
_MANY_FITS = 262139
"""Slots for answers, up to this many downsets, and for more. They are primes, since slots are remainders of a
division."""

_MOST_IN_FLIGHT = 2**24

GUARD = 1e-12
"""Relative to a stage's time. Sums round differently with d. So if a question is closer than this to a known answer, it
is computed anew, and no answer depends on earlier questions."""


class FitCache(NamedTuple):
    """How much more time than the least stages need to fit in memory. Successive evaluations ask about mostly the same
    stages.
    """

    key: IndexArray  # int64[slots, 2]: outer * m + inner of the slot's stage, and 1 more; 0 if there is none. Then its
    # variant and y, and d where that matters
    more_s: FloatArray  # float64[slots, 2]: with so much more time on one device it does not fit; with so much it does


class StepCache(NamedTuple):
    """Hull steps of all classes for recently used (variant, d, y), and stages known to fit or not. It belongs to one
    thread, and is valid for all evaluations of a problem, at any threshold, while the memory limit stays the same.

    A step is what one vertex of a class saves by moving to its next option, best ratio first. Steps depend on d only if
    options differ in the bytes that replicas share out; otherwise d is stored as 0.
    """

    y: IndexArray  # int64[slots]: the y that the slot holds; 0 if none
    d: IndexArray  # int64[slots]
    steps: IndexArray  # int64[slots]: their number
    step_class: IndexArray  # int64[slots, steps]
    extra_s: FloatArray  # float64[slots, steps]
    saved_bytes: FloatArray  # float64[slots, steps]
    place: IndexArray  # int64[slots, steps]: by choice, in the order of classes, the place of its step; -1: none
    least_price: FloatArray  # float64[slots], s per byte: of the first step; infinite if there is none
    of_class: IndexArray  # int64[classes]: number of vertices of the current stage; 0 between calls
    wanted: BitArray  # uint64[words]: the steps of their classes; 0 between calls
    fits: FitCache


def make_step_cache(tables: Tables) -> StepCache:
    """Returns an empty cache with room for the variant with most choices. Not a kernel: numpy's zeros are free until
    used."""
    options, downsets = tables.options, tables.lattice.bits.shape[0]
    most = max(1, int(np.diff(options.choice_start[options.class_start]).max(initial=0)))
    slots = options.degree.size * _SLOTS
    fits = next((slots for most, slots in _FITS if downsets <= most), _MANY_FITS)
    return StepCache(
        y=np.zeros(slots, np.int64),
        d=np.zeros(slots, np.int64),
        steps=np.zeros(slots, np.int64),
        step_class=np.empty((slots, most), np.int64),
        extra_s=np.empty((slots, most)),
        saved_bytes=np.empty((slots, most)),
        place=np.empty((slots, most), np.int64),
        least_price=np.empty(slots),
        of_class=np.zeros(options.choice_start.size - 1, np.int64),
        wanted=np.zeros(most // 64 + 1, np.uint64),
        fits=FitCache(np.zeros((fits, 2), np.int64), np.zeros((fits, 2))),
    )


@inlined_kernel
def steps_slot(cache: StepCache, options: OptionArrays, r: int, d: int, y: int) -> int:
    """Returns the slot that holds the steps of (r, d, y), and fills it if needed."""
    of_degree = d if options.choices_share[r] == 1 else 0
    slot = r * _SLOTS + (y + 31 * of_degree) % _SLOTS
    if cache.y[slot] != y or cache.d[slot] != of_degree:
        fill_slot(cache, options, slot, r, of_degree, y)
    return slot


@shared_kernel
def fill_slot(cache: StepCache, options: OptionArrays, slot: int, r: int, d: int, y: int) -> None:
    """Puts the steps of (r, d, y) into the slot. d: 0 if it makes no difference."""
    first, last = options.class_start[r], options.class_start[r + 1]
    classes, first_choice = last - first, options.choice_start[first]
    start = np.zeros(classes + 1, np.int64)
    for c in range(classes):
        choices = options.choice_start[first + c + 1] - options.choice_start[first + c]
        start[c + 1] = start[c] + 1 + choices
    cost = np.zeros(start[classes])
    memory = np.zeros(start[classes])
    owner = np.zeros(start[classes], np.int64)
    for c in range(classes):
        owner[start[c]] = first + c
        for o in range(start[c] + 1, start[c + 1]):
            owner[o] = first + c
            choice = options.choice_start[first + c] + o - start[c] - 1
            cost[o] = options.choice_p_s[choice]
            memory[o] = options.choice_a[choice] * y + options.choice_b[choice]
            if d > 0:
                memory[o] += options.choice_shared[choice] / d
    reached, extra, saved = hull_steps(Items(start, cost, memory), start[:classes])
    cache.y[slot], cache.d[slot] = y, d
    cache.steps[slot] = reached.size
    cache.least_price[slot] = extra[0] / saved[0] if reached.size > 0 else np.inf
    for choice in range(options.choice_start[last] - first_choice):
        cache.place[slot, choice] = -1
    for k in range(reached.size):
        of_class = owner[reached[k]]
        cache.step_class[slot, k] = of_class
        cache.extra_s[slot, k] = extra[k]
        cache.saved_bytes[slot, k] = saved[k]
        # Each class has one item; its options are its choices and the fastest one.
        cache.place[slot, reached[k] - (of_class - first) - 1] = k


@inlined_kernel
def relaxed_extra(
    inner: BitArray, outer: BitArray, r: int, slot: int, excess_bytes: float, options: OptionArrays, cache: StepCache
) -> tuple[float, float]:
    """Bounds the extra time, in s, of the stage ``outer`` without ``inner`` over its fastest options if it must save
    ``excess_bytes`` > 0. Every choice takes at least the first value; if the variant is uniform, some choice takes at
    most the second. Both are infinite if no choice saves as much.

    ``slot`` has the steps of the stage's (variant, d, y). The values come from the LP relaxation over classes, and from
    rounding it up.
    """
    of_class, wanted = cache.of_class, cache.wanted
    first_choice = options.choice_start[options.class_start[r]]
    for word in range(outer.size):
        rest = outer[word] & ~inner[word]
        while rest != 0:
            low = rest & (~rest + np.uint64(1))
            rest ^= low
            c = options.class_of[r, 64 * word + lowest_position(low)]
            if c < 0:
                continue
            if of_class[c] == 0:
                for choice in range(options.choice_start[c] - first_choice, options.choice_start[c + 1] - first_choice):
                    k = cache.place[slot, choice]
                    if k >= 0:
                        wanted[k >> 6] |= np.uint64(1) << np.uint64(k & 63)
            of_class[c] += 1
    spent_s, least_s, rounded_s = 0.0, np.inf, np.inf
    for word in range((cache.steps[slot] + 63) >> 6):
        rest = wanted[word]
        wanted[word] = 0
        while rest != 0 and least_s == np.inf:
            low = rest & (~rest + np.uint64(1))
            rest ^= low
            k = 64 * word + lowest_position(low)
            count = of_class[cache.step_class[slot, k]]
            extra_s, saved_bytes = cache.extra_s[slot, k], cache.saved_bytes[slot, k]
            if count * saved_bytes >= excess_bytes:
                share = excess_bytes / saved_bytes
                least_s, rounded_s = spent_s + share * extra_s, spent_s + np.ceil(share) * extra_s
            excess_bytes -= count * saved_bytes
            spent_s += count * extra_s
    for word in range(outer.size):
        rest = outer[word] & ~inner[word]
        while rest != 0:
            low = rest & (~rest + np.uint64(1))
            rest ^= low
            c = options.class_of[r, 64 * word + lowest_position(low)]
            if c >= 0:
                of_class[c] = 0
    return least_s, rounded_s


@kernel
def stage_items(stage: StageKey, d: int, y: int, tables: Tables) -> tuple[IndexArray, Items]:
    """Returns the stage's vertices, and the cost (s, on one device) and memory (bytes) of each option in this stage.

    The cost of tensors, which is the same for all choices, is included in that of the first vertex.
    """
    lattice, options, r = tables.lattice, tables.options, stage.variant
    inner, outer = lattice.bits[stage.inner], lattice.bits[stage.outer]
    vertices = members(outer, inner)
    start = np.zeros(vertices.size + 1, np.int64)
    for k in range(vertices.size):
        v = vertices[k]
        start[k + 1] = start[k] + options.option_start[r, v + 1] - options.option_start[r, v]
    cost, memory = np.empty(start[-1]), np.empty(start[-1])
    at = 0
    for v in vertices:
        for o in range(options.option_start[r, v], options.option_start[r, v + 1]):
            total = one_device_s(options.option_p_s[o], options.option_resync_s[o], d)
            charge = options.charge_start[o]
            for e in range(options.in_start[v], options.in_start[v + 1]):
                if not has(outer, lattice.edge_tail[options.in_edge[e]]):
                    total += options.charge_s[charge]
                charge += 1
            for e in range(options.out_start[v], options.out_start[v + 1]):
                if has(inner, lattice.edge_head[options.out_edge[e]]):
                    total += options.charge_s[charge]
                charge += 1
            cost[at] = total
            memory[at] = held_bytes(options.option_a[o], options.option_b[o], options.option_shared[o], y, d)
            at += 1
    if vertices.size > 0 and lattice.tensor_bits.shape[0] > 0:
        tensors_s = cut_tensors_s(inner, outer, lattice, tables.costs)
        for o in range(start[1]):
            cost[o] += tensors_s
    return vertices, Items(start, cost, memory)


@leaf_kernel
def cut_tensors_s(inner: BitArray, outer: BitArray, lattice: LatticeArrays, costs: CostArrays) -> float:
    """Returns what the stage pays for tensors with ends both in it and outside."""
    total_s = 0.0
    for tensor in range(lattice.tensor_bits.shape[0]):
        if crosses_border(lattice.tensor_bits[tensor], outer, inner):
            total_s += 0.5 * costs.both_s[0, lattice.edge_tail.size + tensor]
    return total_s


@inlined_kernel
def fit_slot(fits: FitCache, stage: StageKey, d: int, y: int, tables: Tables) -> int:
    """Returns the slot for what is known of this stage. If it holds another stage, it is cleared."""
    i, j, r = stage
    sharing = tables.costs.least_shared.shape[0] > 0
    of_degree = d if sharing or tables.options.uniform[r] == 0 else 0
    which = i * tables.lattice.bits.shape[0] + j + 1
    how = (of_degree * tables.options.degree.size + r) * _MOST_IN_FLIGHT + y
    slots = fits.key.shape[0]
    slot = (31 * (which % slots) + how) % slots
    if fits.key[slot, 0] != which or fits.key[slot, 1] != how:
        fits.key[slot, 0], fits.key[slot, 1] = which, how
        fits.more_s[slot, TOO_SHORT], fits.more_s[slot, ENOUGH] = -np.inf, np.inf
    return int(slot)


@shared_kernel
def exact_fit(stage: StageKey, d: int, y: int, tables: Tables, budget_s: float) -> tuple[int, float]:
    """Whether some choice of the stage takes at most ``budget_s`` (on one device) and fits in memory; and its time.

    UNKNOWN if there are too many partial choices.
    """
    vertices, items = stage_items(stage, d, y, tables)
    choice = np.empty(vertices.size, np.int64)
    found = least_cost(items, tables.cluster.memory_bytes, budget_s, True, choice)
    if found == TOO_HARD:
        return UNKNOWN, found
    return (YES if found <= budget_s else NO), found
