"""Kernels: what is left to do in front of each downset at least, for one (d, t)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.compiled.jit import kernel, leaf_kernel
from piper_ray.engine.kernels.arrays import stable_order
from piper_ray.engine.kernels.flush_stages import in_flight
from piper_ray.engine.kernels.flush_types import (
    LEAST_ACTIVATION,
    LEAST_FIXED,
    LEAST_FORWARD_S,
    LEAST_S,
    LEAST_SHARED,
    SLACK,
    FlushTables,
    FlushTask,
)
from piper_ray.engine.kernels.types import BitArray, FloatArray, IndexArray


class AheadArrays(NamedTuple):
    """What is left to do in front of each downset at least, and the downsets by their own least time."""

    own_s: FloatArray  # float64[m]: least forward and backward seconds of the layers
    ahead_s: FloatArray  # float64[m]: of the layers outside, and of what crosses into the downset
    ahead_forward_s: FloatArray  # float64[m]
    ahead_activation: FloatArray  # float64[m], bytes: least of the layers outside, for each microbatch in flight
    ahead_fixed: FloatArray  # float64[m], bytes
    ahead_shared: FloatArray  # float64[m], bytes
    order: IndexArray  # int64[m]: downsets by own_s
    ordered_s: FloatArray  # float64[m]: own_s in that order
    ordered_bits: BitArray  # uint64[m, words]
    rank: IndexArray  # int64[m]: where a downset is in that order


@kernel
def look_ahead(tables: FlushTables, task: FlushTask) -> AheadArrays:
    """Sums over the layers outside of each downset."""
    m = tables.bits.shape[0]
    own, ahead, ahead_forward = np.full(m, np.inf), np.full(m, np.inf), np.full(m, np.inf)
    activation, fixed, shared = np.zeros(m), np.zeros(m), np.zeros(m)
    for r in task.variants:
        sums = tables.sums[r]
        for i in range(m):
            own[i] = min(own[i], sums[i, LEAST_S])
            crossing_s = 0.0
            for k in range(tables.crossing_start[i], tables.crossing_start[i + 1]):
                crossing_s += tables.edge_out_s[r, tables.crossing[k]]
            ahead[i] = min(ahead[i], sums[m - 1, LEAST_S] - sums[i, LEAST_S] + 2.0 * crossing_s)
            forward_s = sums[m - 1, LEAST_FORWARD_S] - sums[i, LEAST_FORWARD_S] + crossing_s
            ahead_forward[i] = min(ahead_forward[i], forward_s)
            activation[i] = sums[m - 1, LEAST_ACTIVATION] - sums[i, LEAST_ACTIVATION]
            fixed[i] = sums[m - 1, LEAST_FIXED] - sums[i, LEAST_FIXED]
            shared[i] = sums[m - 1, LEAST_SHARED] - sums[i, LEAST_SHARED]
    if tables.tensor_bits.shape[0] > 0:
        for i in range(m):
            for k in range(tables.cut_start[i], tables.cut_start[i + 1]):
                ahead[i] += tables.tensor_forward_s[tables.cut[k]] + tables.tensor_backward_s[tables.cut[k]]
                ahead_forward[i] += tables.tensor_forward_s[tables.cut[k]]
    # With several variants each layer may be in a stage of its best one; of their memory nothing is promised then.
    if task.variants.size > 1:
        for i in range(m):
            own[i], ahead[i], ahead_forward[i] = _mixed_sums(i, tables, task)
            activation[i], fixed[i], shared[i] = 0.0, 0.0, 0.0
    for i in range(m):  # rounding of sums
        ahead[i] = max(0.0, ahead[i] * (1.0 - SLACK))
        ahead_forward[i] = max(0.0, ahead_forward[i] * (1.0 - SLACK))
    ahead[m - 1], ahead_forward[m - 1] = 0.0, 0.0
    order = stable_order(own, m)
    rank = np.empty(m, np.int64)
    for k in range(m):
        rank[order[k]] = k
    return AheadArrays(
        own, ahead, ahead_forward, activation, fixed, shared, order, own[order], tables.bits[order], rank
    )


@leaf_kernel
def _mixed_sums(i: int, tables: FlushTables, task: FlushTask) -> tuple[float, float, float]:
    """own, ahead and ahead_forward where each layer may be in a stage of another variant."""
    own, ahead, ahead_forward = 0.0, 0.0, 0.0
    bits = tables.bits[i]
    for v in range(tables.option_start.shape[1] - 1):
        least, least_forward = np.inf, np.inf
        for r in task.variants:
            for o in range(tables.option_start[r, v], tables.option_start[r, v + 1]):
                least = min(least, tables.option_forward_s[o] + tables.option_backward_s[o])
                least_forward = min(least_forward, tables.option_forward_s[o])
        if not np.isfinite(least):
            continue
        if (bits[v >> 6] >> np.uint64(v & 63)) & np.uint64(1):
            own += least
        else:
            ahead += least
            ahead_forward += least_forward
    return own, ahead, ahead_forward


@leaf_kernel
def most_behind(i: int, task: FlushTask, ahead: AheadArrays) -> int:
    """The most stages that a tail of downset i can have so that the memory of those in front may do for the rest; 0 if
    not even one.

    The more stages are behind, the fewer are left, and the more they have in flight.
    """
    low, high = 0, task.most_stages
    while low < high:
        middle = (low + high + 1) >> 1
        if _rest_fits(i, middle, task, ahead):
            low = middle
        else:
            high = middle - 1
    return low


@leaf_kernel
def _rest_fits(i: int, behind: int, task: FlushTask, ahead: AheadArrays) -> bool:
    """Whether the layers outside may fit into the stages that are left, if layers could be cut to pieces.

    It takes the least memory in all to give the stages with the fewest microbatches in flight as many activations as
    they hold.
    """
    left = task.most_stages - behind
    needed = ahead.ahead_fixed[i] + ahead.ahead_shared[i] / task.data_parallel_degree
    rest = ahead.ahead_activation[i]
    room = left * task.memory_bytes * (1.0 + 1e-9)
    for k in range(left):
        if rest <= 0.0 or needed > room:
            break
        y = in_flight(task.schedule, task.microbatches, behind + k)
        part = min(rest, task.memory_bytes / y)
        needed += part * y
        rest -= part
    return bool(needed <= room and rest <= ahead.ahead_activation[i] * 1e-9)
