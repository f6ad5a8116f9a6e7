"""Kernel: blocks of live downsets of a finished level, with bounds over their members."""

from __future__ import annotations

import numpy as np

from piper_ray.compiled.jit import kernel, leaf_kernel
from piper_ray.engine.kernels.types import BlockArrays, CostArrays, FrontArrays, LatticeArrays

BLOCK_SIZE = 32


@kernel
def add_level(
    first: int,
    last: int,
    device_cost: int,
    lattice: LatticeArrays,
    costs: CostArrays,
    fronts: FrontArrays,
    blocks: BlockArrays,
) -> None:
    """Groups the live downsets among first .. last - 1 by least cost, in id order, into blocks of up to 32."""
    live = np.empty(last - first, np.int64)
    key = np.empty(last - first, np.int64)
    count = 0
    for i in range(first, last):
        if fronts.states[i] > 0:
            live[count] = i
            key[count] = fronts.cost[fronts.start[i] + fronts.states[i] - 1]
            count += 1
    level = np.searchsorted(lattice.level_start, first)
    blocks.level_first[level] = blocks.used[0]
    order = np.argsort(key[:count], kind="mergesort")
    block = blocks.used[0] - 1
    at = blocks.member_start[blocks.used[0]]
    for position in range(count):
        i = live[order[position]]
        cost = key[order[position]]
        if position == 0 or cost != blocks.least_cost[block] or at - blocks.member_start[block] == BLOCK_SIZE:
            block += 1
            _open(block, cost, device_cost, lattice, blocks)
        blocks.member[at] = i
        at += 1
        blocks.member_start[block + 1] = at
        _widen(block, i, lattice, costs, fronts, blocks)
    blocks.used[0] = block + 1


@leaf_kernel
def _open(block: int, cost: int, device_cost: int, lattice: LatticeArrays, blocks: BlockArrays) -> None:
    blocks.least_cost[block] = cost
    blocks.least_devices[block] = cost // device_cost
    blocks.least_sum[block] = np.int64(2**62)
    for word in range(lattice.bits.shape[1]):
        blocks.meet[block, word] = ~np.uint64(0)
        blocks.join[block, word] = 0
    for r in range(blocks.cap_s.shape[0]):
        blocks.cap_s[r, block] = -np.inf
        blocks.resync_s[block, r] = -np.inf
        blocks.least_a[block, r] = -np.inf
        blocks.least_b[block, r] = -np.inf
        if blocks.least_shared.shape[0] > 0:
            blocks.least_shared[block, r] = -np.inf
        blocks.missing[block, r] = 0


@leaf_kernel
def _widen(
    block: int, i: int, lattice: LatticeArrays, costs: CostArrays, fronts: FrontArrays, blocks: BlockArrays
) -> None:
    blocks.least_sum[block] = min(blocks.least_sum[block], fronts.data_parallel_sum[fronts.start[i]])
    for word in range(lattice.bits.shape[1]):
        blocks.meet[block, word] &= lattice.bits[i, word]
        blocks.join[block, word] |= lattice.bits[i, word]
    for r in range(costs.need_s.shape[1]):
        blocks.cap_s[r, block] = max(blocks.cap_s[r, block], costs.cap_s[i, r])
        blocks.resync_s[block, r] = max(blocks.resync_s[block, r], costs.resync_s[i, r])
        blocks.least_a[block, r] = max(blocks.least_a[block, r], costs.least_a[i, r])
        blocks.least_b[block, r] = max(blocks.least_b[block, r], costs.least_b[i, r])
        if blocks.least_shared.shape[0] > 0:
            blocks.least_shared[block, r] = max(blocks.least_shared[block, r], costs.least_shared[i, r])
        blocks.missing[block, r] = max(blocks.missing[block, r], costs.missing[i, r])


def empty_blocks(capacity: int, lattice: LatticeArrays, costs: CostArrays) -> BlockArrays:
    """Room for ``capacity`` blocks."""
    downsets, words = lattice.bits.shape
    levels, variants = lattice.level_start.size - 1, costs.missing.shape[1]
    sharing = costs.least_shared.shape[0] > 0
    return BlockArrays(
        np.zeros(1, np.int64),
        np.full(levels, 2**62, np.int64),
        np.zeros(capacity + 1, np.int64),
        np.empty(downsets, np.int64),
        np.empty(capacity, np.int64),
        np.empty(capacity, np.int64),
        np.empty(capacity, np.int64),
        np.empty((capacity, words), np.uint64),
        np.empty((capacity, words), np.uint64),
        np.empty((variants, capacity)),
        np.empty((capacity, variants)),
        np.empty((capacity, variants)),
        np.empty((capacity, variants)),
        np.empty((capacity if sharing else 0, variants)),
        np.empty((capacity, variants), np.int64),
    )
