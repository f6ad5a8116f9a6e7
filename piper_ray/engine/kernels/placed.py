"""Kernels: the tails of plans under 2bw whose stages lie in order on nodes, at a threshold.

A tail has a *place*, the number of devices up to its front, idle ones included, and it *promises* a rate at its front
border: that of a size of group in which its first stage and the stage in front both lie whole, or the outermost. For
each downset, rate and place only the least sum of d is kept: with it the stages in front need least memory.

**Dominance.** A tail of no larger sum and no later place dominates another one of the same promise

- of the outermost rate: the stages in front keep their places;
- of a group: if its place is also no later in its group, and the group no later in each larger one. The stages in front
  that lie whole in the other tail's group move into this tail's group, those in the next larger group into that of this
  tail, and so on; all keep their order, what they share, and their places within the smallest group that moves. The
  stages that lie in no such group keep their places.
"""

from __future__ import annotations

from typing import NamedTuple

from piper_ray.compiled.jit import inlined_kernel, kernel, leaf_kernel
from piper_ray.cost.stage import in_flight
from piper_ray.engine.kernels import scan, selection
from piper_ray.engine.kernels.bounds import first_divisor_by_memory, first_divisor_by_time, is_subset
from piper_ray.engine.kernels.level import stage_fits
from piper_ray.engine.kernels.tails import NO_TAIL, TOO_HARD, FrontTails, OpenTails
from piper_ray.engine.kernels.types import IndexArray, StageKey, StageWork, Tables


class PlaceArrays(NamedTuple):
    """Where stages may lie. Rates are numbered, the fastest first; the last is the outermost."""

    groups: IndexArray  # int64[levels]: devices, each a multiple of the one before
    size: IndexArray  # int64[rates - 1]: of the groups that have a rate, all of them in ``groups``
    blocks: IndexArray  # int64[r, divisors, levels]: see ``Cluster.place_blocks``
    behind: IndexArray  # int64[r]: the rate of a variant's border behind
    ahead: IndexArray  # int64[r]: of that in front


class PlaceLimits(NamedTuple):
    """Limits on a tail, so that the rest is possible at the threshold."""

    threshold_s: float
    place: IndexArray  # int64[m]
    data_parallel_sum: IndexArray  # int64[m]


class StageAhead(NamedTuple):
    """A stage in front of a tail. total: the sum of d with it. most: the devices up to its front at most."""

    state: int
    variant: int
    devices: int
    total: int
    most: int


@leaf_kernel
def least_place(at: int, devices: int, within: int, groups: IndexArray, blocks: IndexArray) -> int:
    """Returns the first place from ``at`` on for a stage: whole in a group of ``within`` devices (0: of none), with its
    blocks whole in groups. Each step is the least that its reason allows."""
    moved = True
    while moved:
        moved = False
        if within > 0 and at // within != (at + devices - 1) // within:
            at, moved = (at // within + 1) * within, True
        for level in range(groups.size):
            group, block = groups[level], blocks[level]
            if at // group != (at + devices - 1) // group and at % block > 0:
                at, moved = (at // block + 1) * block, True
    return at


@kernel
def find_placed_tails(
    i: int,
    tables: Tables,
    places: PlaceArrays,
    limits: PlaceLimits,
    tails: FrontTails,
    found: OpenTails,
    steps: selection.StepCache,
) -> int:
    """Finds the undominated tails of downset i. Returns their number, or TOO_HARD if a TMPC choice is too hard."""
    lattice, costs, options, cluster = tables
    divisors, outermost, last = cluster.divisors, places.size.size, lattice.bits.shape[0] - 1
    for rate in range(outermost + 1):
        for place in range(found.sums.shape[1]):
            found.sums[rate, place] = NO_TAIL
    for j in range(i):
        if tails.start[j, 0] == tails.start[j, outermost + 1] or not is_subset(lattice.bits[j], lattice.bits[i]):
            continue
        for r in range(options.degree.size):
            behind, ahead = places.behind[r], places.ahead[r]
            begin, end = tails.start[j, behind], tails.start[j, behind + 1]
            # There is no stage in front of all layers, which counts as the outermost border.
            if begin == end or costs.missing[i, r] > costs.missing[j, r] or (i == last and ahead != outermost):
                continue
            work_s = costs.need_s[i, r] - costs.cap_s[j, r] - scan.jumping_s(i, r, lattice.bits, j, lattice, costs)
            resync_s = max(0.0, costs.resync_s[i, r] - costs.resync_s[j, r])
            by_time = first_divisor_by_time(
                work_s, resync_s, limits.threshold_s, cluster.divisor_at_least, divisors.size
            )
            a_bytes, b_bytes = costs.least_a[i, r] - costs.least_a[j, r], costs.least_b[i, r] - costs.least_b[j, r]
            shared_bytes, t = 0.0, options.degree[r]
            if costs.least_shared.shape[0] > 0:
                shared_bytes = costs.least_shared[i, r] - costs.least_shared[j, r]
            least, most_devices = max(by_time, cluster.first_divisor[r]), limits.place[i]
            if min(behind, ahead) < outermost:  # there is a neighbour in the group too
                most_devices = min(most_devices, places.size[min(behind, ahead)] - 1)
            for state in range(begin, end):
                later_sum = tails.sums[state]
                index = max(least, first_divisor_by_memory(a_bytes, b_bytes, shared_bytes, later_sum, cluster))
                is_least = True
                while index < cluster.end_divisor[r]:
                    d, blocks = divisors[index], places.blocks[r, index]
                    stage = StageAhead(state, r, t * d, later_sum + d, limits.place[i])
                    at = tails.cell[state]
                    if (
                        stage.total > limits.data_parallel_sum[i]
                        or at + stage.devices > limits.place[i]
                        or stage.devices > most_devices
                    ):
                        break
                    if _extend(stage, blocks, places, tails, found, False):
                        key, work, y = StageKey(i, j, r), StageWork(work_s, resync_s), in_flight(later_sum, d)
                        fits = stage_fits(key, d, y, work, tables, limits.threshold_s, steps)
                        if fits == selection.UNKNOWN:
                            return TOO_HARD
                        if fits != selection.YES:
                            index += 1
                            continue
                        _extend(stage, blocks, places, tails, found, True)
                        if is_least:  # no smaller one fits, nor does it later: sums rise, so stages need more memory
                            least = index
                    is_least = False
                    # With smaller blocks a larger degree may end further back, unless this one lies without a gap.
                    if least_place(at, stage.devices, 0, places.groups, blocks) == at:
                        break
                    index += 1
    return keep_least(places, found)


@inlined_kernel
def _extend(
    stage: StageAhead,
    blocks: IndexArray,
    places: PlaceArrays,
    tails: FrontTails,
    found: OpenTails,
    is_kept: bool,
) -> bool:
    """Whether the stage leads to a tail of less sum than known, which is kept if ``is_kept``.

    Of the places in one group the first is the best. So a stage that shares a group with the one in front is tried at
    the first place, and in the next group of each size that is no smaller.
    """
    state, variant, devices, total, most = stage
    at, behind, ahead, outermost = tails.cell[state], places.behind[variant], places.ahead[variant], places.size.size
    within = places.size[ahead] if ahead < outermost else 0
    adds = False
    for level in range(-1, places.groups.size if ahead < outermost else 0):
        begin = at
        if level >= 0:
            if places.groups[level] < within:
                continue
            begin = (at // places.groups[level] + 1) * places.groups[level]
        first = least_place(begin, devices, within, places.groups, blocks)
        end = first + devices
        if behind < outermost:
            group = places.size[behind]
            if (at - 1) // group != first // group or first // group != (end - 1) // group:
                continue
        if end > most or (ahead < outermost and end % within == 0) or found.sums[ahead, end] <= total:
            continue
        adds = True
        if is_kept:
            found.sums[ahead, end], found.behind[ahead, end], found.variant[ahead, end] = total, state, variant
    return adds


@kernel
def keep_least(places: PlaceArrays, found: OpenTails) -> int:
    """Drops tails that others dominate. Returns the number of the others."""
    left, outermost = 0, places.size.size
    for rate in range(outermost + 1):
        within = places.size[rate] if rate < outermost else 0
        for place in range(found.sums.shape[1]):
            least, inside = NO_TAIL, place - 1
            if within == 0 and place > 0:
                least = found.least[rate, place - 1]
            elif within > 0 and place > 0:
                if inside % within > 0:
                    least = found.least[rate, place - 1]
                group = within
                for level in range(places.groups.size):
                    if places.groups[level] <= group:
                        continue
                    if inside % places.groups[level] >= group:
                        least = min(least, found.least[rate, place - group])
                    group = places.groups[level]
                if inside >= group:
                    least = min(least, found.least[rate, place - group])
            own = found.sums[rate, place]
            found.least[rate, place] = min(own, least)
            if own < least:
                left += 1
            else:
                found.sums[rate, place] = NO_TAIL
    return left
