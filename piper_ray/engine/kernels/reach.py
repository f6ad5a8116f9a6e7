"""Kernels: the downsets that states can reach at a threshold, made as they are reached.

They start from the empty set. A downset J that takes a number of devices leads to I by every stage I \\ J that keeps
the threshold and, by the dual prices of ``kernels.cover``, leaves enough devices for the rest. A stage is only bounded
here, by least work and least memory, and those in front of it by work and by what crosses to them. So the downsets
reached include all useful ones.

Stages are the paths of an automaton that labels the vertices one by one (``lattice.labelling``). For each of its states
and each amount of time left, it is known how much price the rest of a path can add. So, except for the inexact grid of
times, no path is followed that does not end in such a stage.
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
"""Factors of multiplicative hashing. Products of halves stay below 2^64."""


class StagePaths(NamedTuple):
    """The automaton, by states: those before each vertex, in order, then those at the end."""

    order: IndexArray  # int64[n]: vertices
    state_start: IndexArray  # int64[n + 2]: first state before each vertex, and at the end
    target: IndexArray  # int64[states, 3]: the state to which a label leads; -1 if the label is not allowed
    charge_s: FloatArray  # float64[r, states, 3]: paid by the stage
    front_s: FloatArray  # float64[r, states, 3]: paid by the stages in front of it, for edges to it or past it


class ReachKinds(NamedTuple):
    """Kinds of stages that a plan may have: pairs of a variant and a degree. q: their number."""

    variant: IndexArray  # int64[q]
    degree: IndexArray  # int64[q]: d
    devices: IndexArray  # int64[q]: t d
    weight_s: FloatArray  # float64[q, n], see ``cover.StageKinds``
    budget_s: FloatArray  # float64[q]
    least_a: FloatArray  # float64[n, r], bytes
    least_b: FloatArray
    least_shared: FloatArray


class ReachLimits(NamedTuple):
    """Limits of plans and stages. price: float64[n], devices. spare: devices left after each vertex has its price.
    early: how many of these may be wasted beyond the share of the vertices that are done; equal to ``spare`` without a
    beam. in_flight: the most microbatches that a stage has in flight.

    devices: of all stages together. share: the least devices that each vertex takes by its time alone; first_share: in
    the first stage of a plan. front: what each label makes the stages in front of it pay.
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
    """The downsets that were reached, within the room."""

    used: IndexArray  # int64[1]: their number
    steps: IndexArray  # int64[1]: labels tried, a measure of the work
    bits: BitArray  # uint64[room, words]
    size: IndexArray  # int64[room]: vertices
    devices: IndexArray  # int64[room]: the fewest devices of a plan for it, at least
    least_sum: IndexArray  # int64[room]: its least sum of data-parallel degrees, at least
    slot: IndexArray  # int64[slots]: a hash table of ids, -1 if free; slots: a power of two, at least twice the room


@inlined_kernel
def _slot_of(reached: Reached, wanted: BitArray) -> int:
    """Returns the slot of a downset, or the free one where it belongs."""
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
    """Records a way to a downset. Returns False if it is new and there is no room."""
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
    """Enters all downsets into an empty hash table."""
    for i in range(reached.used[0]):
        reached.slot[_slot_of(reached, reached.bits[i])] = i


@inner_kernel
def _price_ahead(
    q: int, paths: StagePaths, kinds: ReachKinds, price: FloatArray, meet: BitArray, join: BitArray
) -> FloatArray:
    """Returns float64[states, cells]: the most price that vertices after a state can add to a stage, if it has the time
    of that many cells of its budget left; negative if no path of such a stage leads on.

    meet, join: what is behind the stage has all vertices of ``meet``, and none outside ``join``.

    Paths whose times are in the same cell are merged into one with the highest price and the shortest time.
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


class UnfinishedPath(NamedTuple):
    """A path through the automaton, by the number of labelled vertices."""

    labelled: IndexArray  # int64[1]: their number when a call ended within a pair; -1 if it ended between two pairs
    state: IndexArray  # int64[n + 1]
    label: IndexArray  # int64[n + 1]: the next label to try for the following vertex
    outer: BitArray  # uint64[n + 1, words]: the stage so far, with all vertices behind it
    size: IndexArray  # int64[n + 1]: vertices of the stage
    price: FloatArray  # float64[n + 1]
    spent_s: FloatArray  # float64[n + 1]
    in_front: FloatArray  # float64[n + 1]: the least devices of the stages in front
    a_bytes: FloatArray  # float64[n + 1]
    b_bytes: FloatArray
    shared_bytes: FloatArray


@kernel
def empty_path(n: int, words: int) -> UnfinishedPath:
    """Returns the path of no pair. n: vertices."""
    return UnfinishedPath(
        labelled=np.full(1, -1, np.int64),
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
    path: UnfinishedPath,
    end_steps: int,
    reached: Reached,
) -> bool:
    """Records all downsets to which a stage of kind q in front of downset j leads, from ``path`` on if it is of this
    pair. Returns False, with the path so far, if there is no room or ``end_steps`` are done.

    ahead: the result of ``_price_ahead`` for this kind.
    """
    n, words = paths.order.size, reached.bits.shape[1]
    r, d, devices, budget_s = kinds.variant[q], kinds.degree[q], kinds.devices[q], kinds.budget_s[q]
    used, later = reached.devices[j], reached.least_sum[j]
    if later + d > limits.data_parallel_sum:
        return True
    k = path.labelled[0]
    if k < 0:
        k, path.label[0] = 0, 0
        for word in range(words):
            path.outer[0, word] = reached.bits[j, word]
    own = 0.0
    for v in range(n):
        if has(path.outer[0], v):
            own += limits.price[v]
    # The stage's vertices have at least this price.
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
    while k >= 0:
        path.labelled[0] = k
        if reached.steps[0] >= end_steps:
            return False
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
    path.labelled[0] = -1
    return True


@kernel
def reach_from(
    sources: IndexArray,
    first: int,
    most_steps: int,
    paths: StagePaths,
    kinds: ReachKinds,
    limits: ReachLimits,
    path: UnfinishedPath,
    reached: Reached,
) -> int:
    """Records all downsets to which a stage in front of one of the sources leads, by kind and then by source. Starts
    with pair number ``first``, and stops after ``most_steps`` steps or if there is no room for a downset.

    Returns the number of the next pair, or of the one that ``path`` is of: that of the kinds times the sources at the
    end. Similar sources together take least time.
    """
    words = reached.bits.shape[1]
    meet, join = np.full(words, ~np.uint64(0)), np.zeros(words, np.uint64)
    for j in sources:
        for word in range(words):
            meet[word] &= reached.bits[j, word]
            join[word] |= reached.bits[j, word]
    end_steps = reached.steps[0] + most_steps
    number = first
    while number < kinds.degree.size * sources.size:
        q = number // sources.size
        ahead = _price_ahead(q, paths, kinds, limits.price, meet, join)
        while number < (q + 1) * sources.size:
            j = sources[number - q * sources.size]
            if not _reach_from(j, q, paths, kinds, ahead, limits, path, end_steps, reached):
                return number
            number += 1
    return number
