"""Kernels: the tails of plans under 2bw on devices of several kinds, at a threshold.

A tail has a *mix* of devices, a number of each kind; the kind of its first stage; and the kind that it promises for the
stage in front, as rates of borders depend on both (``engine/flush/mixes.py``). The last two are its *front*. For each
downset, front and mix only the least sum of d is kept: with it the stages in front need least memory.
"""

from __future__ import annotations

from typing import NamedTuple

from piper_ray.compiled.jit import kernel
from piper_ray.cost.stage import in_flight
from piper_ray.engine.kernels import scan, selection
from piper_ray.engine.kernels.bounds import first_divisor_by_memory, first_divisor_by_time, is_subset
from piper_ray.engine.kernels.level import stage_fits
from piper_ray.engine.kernels.tails import NO_TAIL, TOO_HARD, FrontTails, OpenTails
from piper_ray.engine.kernels.types import FloatArray, IndexArray, StageKey, StageWork, Tables


class MixArrays(NamedTuple):
    """The mixes of g kinds, numbered as cells of a grid."""

    counts: IndexArray  # int64[cells, g]: devices of each kind
    stride: IndexArray  # int64[g]: from a cell to the one with a device more of a kind
    devices: IndexArray  # int64[g]: K of each kind
    share: FloatArray  # float64[cells]: see ``MixedLimits``
    kind: IndexArray  # int64[r]: of a variant's devices
    behind: IndexArray  # int64[r]: of the stage behind it
    ahead: IndexArray  # int64[r]: of the stage in front


class MixedLimits(NamedTuple):
    """Limits on a tail, so that the rest is possible at the threshold. share: of all devices; a kind's share is larger
    if all work would take longer on it."""

    threshold_s: float
    share: FloatArray  # float64[m]
    data_parallel_sum: IndexArray  # int64[m]


@kernel
def find_tails(
    i: int,
    tables: Tables,
    mixes: MixArrays,
    limits: MixedLimits,
    tails: FrontTails,
    found: OpenTails,
    steps: selection.StepCache,
) -> int:
    """Finds the undominated tails of downset i, by devices of each kind and sum of d within a front. Returns their
    number, or TOO_HARD if a TMPC choice is too hard."""
    lattice, costs, options, cluster = tables
    divisors, kinds, last = cluster.divisors, mixes.stride.size, lattice.bits.shape[0] - 1
    for front in range(kinds * kinds):
        for cell in range(found.sums.shape[1]):
            found.sums[front, cell] = NO_TAIL
    for j in range(i):
        if tails.start[j, 0] == tails.start[j, kinds * kinds] or not is_subset(lattice.bits[j], lattice.bits[i]):
            continue
        for r in range(options.degree.size):
            kind, from_front = mixes.kind[r], mixes.behind[r] * kinds + mixes.kind[r]
            begin, end = tails.start[j, from_front], tails.start[j, from_front + 1]
            # There is no stage in front of all layers: it counts as being on the same kind.
            if begin == end or costs.missing[i, r] > costs.missing[j, r] or (i == last and mixes.ahead[r] != kind):
                continue
            work_s = costs.need_s[i, r] - costs.cap_s[j, r] - scan.jumping_s(i, r, lattice.bits, j, lattice, costs)
            resync_s = max(0.0, costs.resync_s[i, r] - costs.resync_s[j, r])
            by_time = first_divisor_by_time(
                work_s, resync_s, limits.threshold_s, cluster.divisor_at_least, divisors.size
            )
            index, fits_upto, end_divisor = max(by_time, cluster.first_divisor[r]), 0, cluster.end_divisor[r]
            a_bytes, b_bytes = costs.least_a[i, r] - costs.least_a[j, r], costs.least_b[i, r] - costs.least_b[j, r]
            shared_bytes = 0.0
            if costs.least_shared.shape[0] > 0:
                shared_bytes = costs.least_shared[i, r] - costs.least_shared[j, r]
            front, t = kind * kinds + mixes.ahead[r], options.degree[r]
            # Sums rise, and more stages behind never need less memory: so the least d that fits only rises too.
            for state in range(begin, end):
                later_sum, cell = tails.sums[state], tails.cell[state]
                while index < end_divisor:
                    d = divisors[index]
                    total, grown = later_sum + d, cell + mixes.stride[kind] * t * d
                    if (
                        total > limits.data_parallel_sum[i]
                        or mixes.counts[cell, kind] + t * d > mixes.devices[kind]
                        or mixes.share[grown] > limits.share[i]
                        or found.sums[front, grown] <= total
                    ):
                        break
                    by_memory = first_divisor_by_memory(a_bytes, b_bytes, shared_bytes, later_sum, cluster)
                    if by_memory > index:
                        index, fits_upto = by_memory, 0
                        continue
                    y = in_flight(later_sum, d)
                    if y > fits_upto:
                        stage = StageKey(i, j, r)
                        work = StageWork(work_s, resync_s)
                        fits = stage_fits(stage, d, y, work, tables, limits.threshold_s, steps)
                        if fits == selection.UNKNOWN:
                            return TOO_HARD
                        if fits != selection.YES:
                            index, fits_upto = index + 1, 0
                            continue
                        fits_upto = y
                    found.sums[front, grown], found.behind[front, grown] = total, state
                    found.variant[front, grown] = r
                    break
    return _keep_least(mixes, found)


@kernel
def _keep_least(mixes: MixArrays, found: OpenTails) -> int:
    """Drops tails that others of their front dominate. Returns the number of the others."""
    left = 0
    for front in range(found.sums.shape[0]):
        for cell in range(found.sums.shape[1]):
            least = NO_TAIL
            for kind in range(mixes.stride.size):
                if mixes.counts[cell, kind] > 0:
                    least = min(least, found.least[front, cell - mixes.stride[kind]])
            own = found.sums[front, cell]
            found.least[front, cell] = min(own, least)
            if own < least:
                left += 1
            else:
                found.sums[front, cell] = NO_TAIL
    return left
