"""Kernel: the downsets that states can reach at a threshold, made as they are reached.

Forwards from the empty set: a downset J that takes so many devices leads to I by every stage I \\ J that keeps the
threshold and, by the dual prices of ``kernels.cover``, leaves the rest enough devices. Stages are only bounded here, by
least work and least memory, and those in front of them by work and by what crosses to them: so what is reached holds
all that a plan can use.

Stages are the paths of an automaton that labels the vertices one by one (``lattice.labelling``). Of each state on the
way is known, for whatever time is left, how much price the rest of a path can add: so no path is followed that
does not end in such a stage, but for the grid of times.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.compiled.jit import inlined_kernel, inner_kernel, kernel
from piper_ray.cost.stage import held_bytes, in_flight
from piper_ray.engine.kernels.bounds import has
from piper_ray.engine.kernels.types import BitArray, FloatArray, IndexArray

_CELLS_A_DEVICE, _FEWEST_CELLS, _MOST_CELLS = 64, 128, 2048
_GUARD = 1e-9
_NONE = -1.0
_BEHIND, _INSIDE, _IN_FRONT = 0, 1, 2
_LOW, _HALF = np.uint64(2**32 - 1), np.uint64(32)
_FACTOR, _OTHER = np.uint64(0x9E3779B1), np.uint64(0x85EBCA77)
"""Of multiplicative hashing; products of halves stay below 2^64."""


class StagePaths(NamedTuple):
    """The automaton, by states: those before a vertex, vertex after vertex, then those at the end."""

    order: IndexArray  # int64[n]: vertices
    state_start: IndexArray  # int64[n + 2]: first state before each vertex, and at the end
    target: IndexArray  # int64[states, 3]: the state that a label leads to; -1 where it may not have that
    charge_s: FloatArray  # float64[r, states, 3]: what the stage pays for it
    front_s: FloatArray  # float64[r, states, 3]: and those in front of it, for what leaves them to it or past it


class ReachKinds(NamedTuple):
    """Kinds of stages that a plan may have, a variant with a degree each. q: how many."""

    variant: IndexArray  # int64[q]
    degree: IndexArray  # int64[q]: d
    devices: IndexArray  # int64[q]: t d
    weight_s: FloatArray  # float64[q, n], see ``cover.StageKinds``
    budget_s: FloatArray  # float64[q]
    least_a: FloatArray  # float64[n, r], bytes
    least_b: FloatArray
    least_shared: FloatArray


class ReachLimits(NamedTuple):
    """price: float64[n], devices. spare: those that are left once each vertex has its price. early: so many of
    these may be wasted before the vertices that are done have their share in them; ``spare`` for all there are.
    in_flight: no stage has more microbatches in flight.

    devices: of all stages together. share, front: what each vertex takes of them at least by its time alone, and what
    each label makes the stages in front of it pay. first_share: of a vertex in the first stage of all.
    """

    devices: int
    share: FloatArray  # float64[n], devices
    first_share: FloatArray  # float64[n], devices
    front: FloatArray  # float64[states, 3], devices
    price: FloatArray
    spare: float
    early: float
    data_parallel_sum: int
    memory_bytes: float
    in_flight: int


class Reached(NamedTuple):
    """Downsets that were reached, as far as there is room."""

    used: IndexArray  # int64[1]: how many
    steps: IndexArray  # int64[1]: labels tried, a measure of the work
    bits: BitArray  # uint64[room, words]
    size: IndexArray  # int64[room]: vertices
    devices: IndexArray  # int64[room]: no plan for it takes fewer
    least_sum: IndexArray  # int64[room]: nor has a smaller sum of data-parallel degrees
    slot: IndexArray  # int64[slots]: a hash table of ids, -1 where free; slots: a power of two, twice the room at least


@inlined_kernel
def _slot_of(reached: Reached, wanted: BitArray) -> int:
    """The slot of a downset, or the free one where it would go."""
    mixed = np.uint64(0)
    for word in range(wanted.size):
        mixed ^= wanted[word]
        mixed = ((mixed & _LOW) * _FACTOR) ^ ((mixed >> _HALF) * _OTHER)
        mixed ^= mixed >> np.uint64(29)
    at = np.int64(mixed & np.uint64(reached.slot.size - 1))
    while reached.slot[at] >= 0:
        same = True
        for word in range(wanted.size):
            if reached.bits[reached.slot[at], word] != wanted[word]:
                same = False
                break
        if same:
            break
        at = (at + 1) & (reached.slot.size - 1)
    return int(at)


@inlined_kernel
def _arrive(reached: Reached, wanted: BitArray, size: int, devices: int, least_sum: int) -> bool:
    """Notes a way to a downset; False if it is new and there is no room."""
    at = _slot_of(reached, wanted)
    i = reached.slot[at]
    if i < 0:
        i = reached.used[0]
        if i == reached.devices.size:
            return False
        reached.used[0] += 1
        reached.slot[at] = i
        for word in range(wanted.size):
            reached.bits[i, word] = wanted[word]
        reached.size[i], reached.devices[i], reached.least_sum[i] = size, devices, least_sum
    else:
        reached.devices[i] = min(reached.devices[i], devices)
        reached.least_sum[i] = min(reached.least_sum[i], least_sum)
    return True


@kernel
def file_reached(reached: Reached) -> None:
    """Enters all downsets into a hash table that has none of them."""
    for i in range(reached.used[0]):
        reached.slot[_slot_of(reached, reached.bits[i])] = i


@inner_kernel
def _price_ahead(
    q: int, paths: StagePaths, kinds: ReachKinds, price: FloatArray, meet: BitArray, join: BitArray
) -> FloatArray:
    """float64[states, cells]: the most price that what comes after a state adds to a stage within the so manyth
    cell of its budget; negative where no path of such a stage leads on.

    meet, join: what is behind the stage has these vertices, and no others than those.

    Of ways whose times differ by less than a cell one is kept, with the price of the best and the time of the
    shortest.
    """
    n = paths.order.size
    states = paths.state_start[n + 1]
    budget_s = kinds.budget_s[q]
    cells = min(max(_CELLS_A_DEVICE * kinds.devices[q], _FEWEST_CELLS), _MOST_CELLS)
    per_cell = cells / budget_s
    ahead = np.full((states, cells), _NONE)
    shortest_s = np.empty((states, cells))
    for state in range(paths.state_start[n], states):
        ahead[state, 0], shortest_s[state, 0] = 0.0, 0.0
    for k in range(n - 1, -1, -1):
        v = paths.order[k]
        for state in range(paths.state_start[k], paths.state_start[k + 1]):
            for label in range(3):
                target = paths.target[state, label]
                if target < 0 or (has(meet, v) if label != _BEHIND else not has(join, v)):
                    continue
                extra_s = paths.charge_s[kinds.variant[q], state, label]
                gain = 0.0
                if label == _INSIDE:
                    extra_s += kinds.weight_s[q, v]
                    gain = price[v]
                for cell in range(cells):
                    if ahead[target, cell] < 0.0:
                        continue
                    total_s = shortest_s[target, cell] + extra_s
                    if total_s > budget_s:
                        break
                    at = min(int(total_s * per_cell), cells - 1)
                    if ahead[state, at] < 0.0:
                        ahead[state, at], shortest_s[state, at] = ahead[target, cell] + gain, total_s
                    else:
                        ahead[state, at] = max(ahead[state, at], ahead[target, cell] + gain)
                        shortest_s[state, at] = min(shortest_s[state, at], total_s)
    for state in range(states):
        for cell in range(1, cells):
            ahead[state, cell] = max(ahead[state, cell], ahead[state, cell - 1])
    return ahead


class _Path(NamedTuple):
    """A path through the automaton, by how many vertices are labelled."""

    state: IndexArray  # int64[n + 1]
    label: IndexArray  # int64[n + 1]: the next one to try for the vertex that comes then
    outer: BitArray  # uint64[n + 1, words]: the stage so far, with all that is behind it
    size: IndexArray  # int64[n + 1]: vertices of the stage
    price: FloatArray  # float64[n + 1]
    spent_s: FloatArray  # float64[n + 1]
    in_front: FloatArray  # float64[n + 1]: devices that the stages in front take at least
    a_bytes: FloatArray  # float64[n + 1]
    b_bytes: FloatArray
    shared_bytes: FloatArray


@inner_kernel
def _empty_path(n: int, words: int) -> _Path:
    return _Path(
        state=np.zeros(n + 1, np.int64),
        label=np.zeros(n + 1, np.int64),
        outer=np.zeros((n + 1, words), np.uint64),
        size=np.zeros(n + 1, np.int64),
        price=np.zeros(n + 1),
        spent_s=np.zeros(n + 1),
        in_front=np.zeros(n + 1),
        a_bytes=np.zeros(n + 1),
        b_bytes=np.zeros(n + 1),
        shared_bytes=np.zeros(n + 1),
    )


@inner_kernel
def _reach_from(
    j: int,
    q: int,
    paths: StagePaths,
    kinds: ReachKinds,
    ahead: FloatArray,
    limits: ReachLimits,
    path: _Path,
    reached: Reached,
) -> bool:
    """Notes all that a stage of kind q in front of downset j leads to; False if there is no room.

    ahead: as ``_price_ahead`` has it for this kind.
    """
    n, words = paths.order.size, reached.bits.shape[1]
    r, d, devices, budget_s = kinds.variant[q], kinds.degree[q], kinds.devices[q], kinds.budget_s[q]
    used, later = reached.devices[j], reached.least_sum[j]
    if later + d > limits.data_parallel_sum:
        return True
    own = 0.0
    for word in range(words):
        path.outer[0, word] = reached.bits[j, word]
    for v in range(n):
        if has(path.outer[0], v):
            own += limits.price[v]
    # So much price it has at least.
    least = devices - (limits.spare - (used - own)) - _GUARD
    if limits.early < limits.spare:
        spared = limits.spare / limits.price.sum()
        least = max(least, (used + devices - own - limits.early - spared * own) / (1.0 + spared))
    share = limits.first_share if used + devices == limits.devices - 1 else limits.share
    in_front_at_most = (limits.devices - used - devices) * (1.0 + _GUARD) + _GUARD
    y = min(in_flight(later, d), limits.in_flight)
    most_bytes = limits.memory_bytes * (1.0 + _GUARD)
    cells = ahead.shape[1]
    per_cell = cells / budget_s
    path.label[0] = 0
    k = 0
    while k >= 0:
        reached.steps[0] += 1
        if k == n:
            if path.size[k] > 0 and not _arrive(
                reached, path.outer[k], reached.size[j] + path.size[k], used + devices, later + d
            ):
                return False
            k -= 1
            continue
        v, state, label = paths.order[k], path.state[k], path.label[k]
        path.label[k] = label + 1
        if label > _IN_FRONT:
            k -= 1
            continue
        target = paths.target[state, label]
        if target < 0 or (label == _BEHIND) != has(path.outer[0], v):
            continue
        spent_s = path.spent_s[k] + paths.charge_s[r, state, label]
        price = path.price[k]
        in_front = path.in_front[k] + limits.front[state, label]
        if label == _IN_FRONT:
            in_front += share[v]
        if in_front > in_front_at_most:
            continue
        a_bytes, b_bytes, shared_bytes = path.a_bytes[k], path.b_bytes[k], path.shared_bytes[k]
        if label == _INSIDE:
            spent_s += kinds.weight_s[q, v]
            price += limits.price[v]
            a_bytes += kinds.least_a[v, r]
            b_bytes += kinds.least_b[v, r]
            shared_bytes += kinds.least_shared[v, r]
            if held_bytes(a_bytes, b_bytes, shared_bytes, y, d) > most_bytes:
                continue
        left_s = budget_s * (1.0 + _GUARD) - spent_s
        if left_s < 0.0:
            continue
        added = ahead[target, min(int(left_s * per_cell), cells - 1)]
        if added < 0.0 or price + added < least:
            continue
        above = k + 1
        path.state[above], path.label[above] = target, 0
        path.price[above], path.spent_s[above], path.in_front[above] = price, spent_s, in_front
        path.a_bytes[above], path.b_bytes[above], path.shared_bytes[above] = a_bytes, b_bytes, shared_bytes
        path.size[above] = path.size[k]
        for word in range(words):
            path.outer[above, word] = path.outer[k, word]
        if label == _INSIDE:
            path.size[above] += 1
            path.outer[above, v >> 6] |= np.uint64(1) << np.uint64(v & 63)
        k = above
    return True


@kernel
def reach_from(
    sources: IndexArray,
    first: int,
    most_steps: int,
    paths: StagePaths,
    kinds: ReachKinds,
    limits: ReachLimits,
    reached: Reached,
) -> int:
    """Notes all downsets that a stage in front of one of the sources leads to, by kind and then by source from number
    ``first`` on, until so many steps are done or there is no room for one.

    Returns the number that comes next: that of the kinds times the sources at the end. What it says again is known.
    Sources that are alike take least time together.
    """
    n, words = paths.order.size, reached.bits.shape[1]
    meet, join = np.full(words, ~np.uint64(0)), np.zeros(words, np.uint64)
    for j in sources:
        for word in range(words):
            meet[word] &= reached.bits[j, word]
            join[word] |= reached.bits[j, word]
    path = _empty_path(n, words)
    end_steps = reached.steps[0] + most_steps
    number = first
    while number < kinds.degree.size * sources.size:
        q = number // sources.size
        ahead = _price_ahead(q, paths, kinds, limits.price, meet, join)
        while number < (q + 1) * sources.size:
            if not _reach_from(sources[number - q * sources.size], q, paths, kinds, ahead, limits, path, reached):
                return number
            number += 1
            if reached.steps[0] > end_steps:
                return number
    return number
