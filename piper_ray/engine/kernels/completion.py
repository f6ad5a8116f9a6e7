"""Kernels: how few devices the layers outside a downset need, at a threshold whose states are known.

g[V] = 0, and g[J] is the least of g[I] + t d over stages I \\ J, computed from V down. The memory left to a stage
depends on what is behind it, of which only the least sum of d is used here: so g is a lower bound, at this threshold
and at every lower one. A state of J with more than K - g[J] devices cannot be completed.
"""

from __future__ import annotations

from piper_ray.compiled.jit import inlined_kernel, leaf_kernel
from piper_ray.cost.stage import in_flight
from piper_ray.engine.kernels import scan
from piper_ray.engine.kernels.bounds import first_divisor_by_memory, first_divisor_by_time, is_subset
from piper_ray.engine.kernels.level import stage_fits
from piper_ray.engine.kernels.selection import NO
from piper_ray.engine.kernels.types import IndexArray, StageKey, StageWork, StateArrays


@inlined_kernel
def _stage_devices(stage: StageKey, work_s: float, below: int, arrays: StateArrays, scratch: scan.Scratch) -> int:
    """Returns the fewest devices of a stage, less than ``below``, with the least sum of d behind it that J can have;
    else UNREACHABLE."""
    i, j, r = stage
    tables, target, fronts = arrays.tables, arrays.target, arrays.fronts
    _, costs, options, cluster = tables
    # States are in order of rising sums.
    later_sum = fronts.data_parallel_sum[fronts.start[j]]
    resync_s = max(0.0, costs.resync_s[i, r] - costs.resync_s[j, r])
    by_time = first_divisor_by_time(
        work_s, resync_s, target.threshold_s, cluster.divisor_at_least, cluster.divisors.size
    )
    by_memory = first_divisor_by_memory(
        costs.least_a[i, r] - costs.least_a[j, r],
        costs.least_b[i, r] - costs.least_b[j, r],
        costs.least_shared[i, r] - costs.least_shared[j, r] if costs.least_shared.shape[0] > 0 else 0.0,
        later_sum,
        cluster,
    )
    work = StageWork(work_s, resync_s)
    for index in range(max(by_time, by_memory, cluster.first_divisor[r]), cluster.end_divisor[r]):
        d = cluster.divisors[index]
        devices = options.degree[r] * d
        if devices >= below:
            break
        scratch.tested[scan.STAGES_COSTED] += 1
        if stage_fits(stage, d, in_flight(later_sum, d), work, tables, target.threshold_s, scratch.steps) != NO:
            return int(devices)
    return int(scan.UNREACHABLE)


@inlined_kernel
def _push(i: int, bucket: int, touches: bool, outside: IndexArray, arrays: StateArrays, scratch: scan.Scratch) -> bool:
    """Lowers g of a bucket's members, by stages between them and I. Returns whether any was lowered."""
    lattice, costs, options, cluster = arrays.tables
    buckets = arrays.buckets
    lowered = False
    left = cluster.devices - outside[i] - buckets.least_devices[bucket]
    for k in range(buckets.member_start[bucket], buckets.member_start[bucket + 1]):
        j = arrays.members.downset[k]
        if outside[i] + 1 >= outside[j] or not is_subset(lattice.bits[j], lattice.bits[i]):
            continue
        scratch.tested[scan.CANDIDATES_TESTED] += 1
        if touches and scan.crosses_much(i, lattice, costs):
            scan.find_jumping(i, lattice.bits, j, lattice, costs, scratch)
        for r in range(options.degree.size):
            if costs.missing[i, r] > costs.missing[j, r]:
                continue
            work_s = costs.need_s[i, r] - costs.cap_s[j, r]
            if touches:
                work_s -= scan.jumped_s(i, r, lattice.bits, j, lattice, costs, scratch)
            below = min(outside[j] - outside[i], left + 1)
            devices = _stage_devices(StageKey(i, j, r), work_s, below, arrays, scratch)
            if devices != scan.UNREACHABLE:
                outside[j] = outside[i] + devices
                lowered = True
    return lowered


@leaf_kernel
def _most(values: IndexArray, begin: int, end: int) -> int:
    most = values[begin]
    for at in range(begin + 1, end):
        most = max(most, values[at])
    return int(most)


@inlined_kernel
def _settle(
    i: int,
    level: int,
    arrays: StateArrays,
    scratch: scan.Scratch,
    outside: IndexArray,
    most_outside: IndexArray,
    device_limit: IndexArray,
) -> None:
    """Computes the limit of a downset in ``level``, and lowers g of downsets below it, by stages between them and
    it."""
    target, fronts, buckets, groups = arrays.target, arrays.fronts, arrays.buckets, arrays.groups
    cluster = arrays.tables.cluster
    device_limit[i] = 0
    if fronts.states[i] == 0 or outside[i] == scan.UNREACHABLE:
        return
    fewest = fronts.tally[fronts.start[i] + fronts.states[i] - 1] // target.device_weight
    if fewest + outside[i] > cluster.devices:
        return
    device_limit[i] = cluster.devices - outside[i]
    in_groups, listed = scratch.open_groups, scratch.open_buckets
    scan.list_jumps(i, arrays.tables.lattice, scratch)
    grouped, opened = 0, 0
    last_group = min(groups.level_first[level], groups.used[0])
    scratch.tested[scan.BUCKETS_TESTED] += last_group
    grouped = scan.open_among(i, groups, 0, last_group, arrays, scratch, in_groups, grouped)
    for at in range(grouped):
        group = in_groups.number[at]
        begin, end = groups.bucket_start[group], groups.bucket_start[group + 1]
        stage = (in_groups.tally[at] - groups.least_tally[group]) // target.device_weight
        if outside[i] + stage < _most(most_outside, begin, end):
            scratch.tested[scan.BUCKETS_TESTED] += end - begin
            opened = scan.open_among(i, buckets, begin, end, arrays, scratch, listed, opened)
    if opened > 0 and scan.crosses_much(i, arrays.tables.lattice, arrays.tables.costs):
        scan.sum_crossing(i, arrays.tables.lattice, arrays.tables.costs, scratch)
    for at in range(opened):
        bucket = listed.number[at]
        stage = (listed.tally[at] - buckets.least_tally[bucket]) // target.device_weight
        if outside[i] + stage >= most_outside[bucket]:
            continue
        tally, _, touches = scan.refine(i, bucket, arrays, scratch)
        if tally == scan.UNREACHABLE:
            continue
        stage = (tally - buckets.least_tally[bucket]) // target.device_weight
        if outside[i] + stage >= most_outside[bucket]:
            continue
        stage = scan.priced_devices(i, bucket, touches, arrays, scratch)
        if stage == scan.UNREACHABLE or outside[i] + stage + buckets.least_devices[bucket] > cluster.devices:
            continue
        if outside[i] + stage < most_outside[bucket] and _push(i, bucket, touches, outside, arrays, scratch):
            most_outside[bucket] = 0
            for k in range(buckets.member_start[bucket], buckets.member_start[bucket + 1]):
                most_outside[bucket] = max(most_outside[bucket], outside[arrays.members.downset[k]])


@leaf_kernel
def bound_completions(
    first: int,
    last: int,
    arrays: StateArrays,
    scratch: scan.Scratch,
    outside: IndexArray,
    most_outside: IndexArray,
    device_limit: IndexArray,
) -> None:
    """Settles the downsets last - 1 .. first; those above are settled already. ``arrays`` has all states at a
    threshold.

    scratch: of the calling thread, with room for all buckets.
    outside: int64[m], g, UNREACHABLE if none is known. most_outside: int64[buckets], the largest g of a bucket's
    members. device_limit: int64[m], writable, the target's own: becomes K - g, or 0 for downsets that cannot be
    completed.
    """
    level_start = arrays.tables.lattice.level_start
    level = level_start.size - 2
    for i in range(last - 1, first - 1, -1):
        while level_start[level] > i:
            level -= 1
        _settle(i, level, arrays, scratch, outside, most_outside, device_limit)
