"""Kernels: which tails leave enough memory to the stages in front of them, exactly, and a plan that fits.

More stages behind a stage are more microbatches in flight there, so what fits in front of a tail also fits in front of
a shorter one of the same layers. The most stages of a tail follow from those of the tails that a stage makes of it.
Times play no part.
"""

from __future__ import annotations

import numpy as np

from piper_ray.compiled.jit import inlined_kernel, inner_kernel, kernel, leaf_kernel
from piper_ray.engine.kernels.bounds import has, is_subset
from piper_ray.engine.kernels.flush_closing import StageList
from piper_ray.engine.kernels.flush_mixes import may_be_first
from piper_ray.engine.kernels.flush_stages import AheadArrays, in_flight
from piper_ray.engine.kernels.flush_types import GPIPE, LEAST_TIME, SUM, FlushTables, FlushTask
from piper_ray.engine.kernels.types import BitArray, FloatArray, IndexArray


@kernel
def tails_with_room(tables: FlushTables, task: FlushTask, held_bytes: FloatArray) -> IndexArray:
    """Returns int64[m]: the most stages of a tail of each downset in front of which the other layers fit; -1: there is
    none. held_bytes: of ``least_held_bytes``."""
    m = tables.bits.shape[0]
    most = np.full(m, -1, np.int64)
    most[m - 1] = task.most_stages
    for j in range(m - 2, -1, -1):
        found = 0
        for r in task.variants:
            room_bytes, i = task.memory_bytes[r], m - 1
            while found < task.most_stages and i > j:
                held = held_bytes[r, _column(found, task)]
                i = _last_that_fits(i, j, found, held, room_bytes, tables.bits, most)
                if i > j and tables.sums[r, i, SUM.missing] == tables.sums[r, j, SUM.missing]:
                    found += 1
                else:
                    i -= 1
        most[j] = found - 1
    return most


@leaf_kernel
def _last_that_fits(
    last: int, j: int, behind: int, held_bytes: FloatArray, room_bytes: float, bits: BitArray, most: IndexArray
) -> int:
    """Returns the last downset up to ``last`` that makes, without j, a stage that fits with ``behind`` stages behind
    it; j if there is none. held_bytes: float64[m]."""
    most_bytes = held_bytes[j] + room_bytes
    for i in range(last, j, -1):
        if most[i] > behind and held_bytes[i] <= most_bytes and is_subset(bits[j], bits[i]):
            return i
    return j


@kernel
def fitting_stages(
    tables: FlushTables, task: FlushTask, ahead: AheadArrays, held_bytes: FloatArray, most: IndexArray
) -> StageList:
    """Returns a plan of stages of about equal work that fits; no stages if there is none, or if the links at borders
    leave none. most: of ``tails_with_room``."""
    m = tables.bits.shape[0]
    outers, inners = np.empty(task.most_stages, np.int64), np.empty(task.most_stages, np.int64)
    variants, stages, j = np.empty(task.most_stages, np.int64), 0, 0
    while j < m - 1 and stages <= most[j]:
        best_s, left = np.inf, task.most_stages - stages - 1
        for i in range(j + 1, m):
            if most[i] <= stages or not is_subset(tables.bits[j], tables.bits[i]):
                continue
            slowest_s = max(ahead.own_s[i] - ahead.own_s[j], ahead.ahead_s[i] / max(1, left))
            if slowest_s >= best_s:
                continue
            for r in task.variants:
                cell = task.next_cell[stages, task.move[r]]
                if cell < 0 or (i == m - 1 and (task.is_whole[cell] == 0 or not may_be_first(r, task))):
                    continue
                if _fits(i, j, r, stages, held_bytes, tables, task):
                    best_s = slowest_s
                    outers[stages], inners[stages], variants[stages] = i, j, r
        if best_s == np.inf:
            break
        j = outers[stages]
        stages += 1
    if j < m - 1:
        stages = 0
    front = np.arange(stages - 1, -1, -1)
    return StageList(outers[front], inners[front], variants[front], np.full(stages, LEAST_TIME), np.zeros((stages, 3)))


@kernel
def least_held_bytes(tables: FlushTables, task: FlushTask) -> FloatArray:
    """Returns float64[r, y, m]: what the layers of each downset hold at least with 1, 2, ... microbatches in flight;
    under GPipe with all of them, the only column."""
    m, layers = tables.bits.shape[0], tables.option_start.shape[1] - 1
    counts = 1 if task.schedule == GPIPE else _column(task.most_stages - 1, task) + 1
    found = np.zeros((tables.sums.shape[0], counts, m))
    for r in task.variants:
        for column in range(counts):
            y = task.microbatches if task.schedule == GPIPE else column + 1
            of_layer = _least_of_layers(r, y, tables, task)
            for i in range(m):
                for v in range(layers):
                    if has(tables.bits[i], v):
                        found[r, column, i] += of_layer[v]
    return found


@inner_kernel
def _least_of_layers(r: int, y: int, tables: FlushTables, task: FlushTask) -> FloatArray:
    found = np.zeros(tables.option_start.shape[1] - 1)
    for v in range(found.size):
        first, end = tables.option_start[r, v], tables.option_start[r, v + 1]
        least = np.inf if first < end else 0.0
        for o in range(first, end):
            shared = tables.option_shared[o] / task.data_parallel_degree
            least = min(least, tables.option_activation[o] * y + tables.option_fixed[o] + shared)
        found[v] = least
    return found


@inlined_kernel
def _column(behind: int, task: FlushTask) -> int:
    return 0 if task.schedule == GPIPE else in_flight(task.schedule, task.microbatches, behind) - 1


@inlined_kernel
def _fits(i: int, j: int, r: int, behind: int, held_bytes: FloatArray, tables: FlushTables, task: FlushTask) -> bool:
    """Whether the stage of downset i without j has a choice that fits with ``behind`` stages behind it."""
    if tables.sums[r, i, SUM.missing] != tables.sums[r, j, SUM.missing]:
        return False
    held = held_bytes[r, _column(behind, task)]
    return bool(held[i] - held[j] <= task.memory_bytes[r])
