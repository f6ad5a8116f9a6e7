"""Kernels: what each rank does, in order, under schedules with chunks. Sources: see ``cost.chunk_schedules``.

A list is int64[n, 3]: kind of pass, chunk on the rank (0 is nearest the input), microbatch. Where
torch.distributed.pipelining has the schedule the lists are the same.
"""

from __future__ import annotations

import numpy as np

from piper_ray.compiled.jit import inlined_kernel, kernel
from piper_ray.engine.kernels.types import IndexArray

# Kinds of passes: forward; backward, whole; its two parts, gradients of the inputs and of the weights.
FORWARD = 0
BACKWARD = 1
INPUTS = 2
WEIGHTS = 3

# ChunkSchedule.code
INTERLEAVED = 0
LOOPED_BFS = 1
ZB_H1 = 2
ZB_V = 3
DUALPIPE_V = 4


@kernel
def rank_list(schedule: int, p: int, r: int, m: int, v: int, group: int) -> IndexArray:
    """The list of rank r of p. group: as in ``PipelineShape``."""
    if schedule == LOOPED_BFS:
        return _looped_bfs(m, v)
    if schedule == INTERLEAVED:
        return _interleaved(p, r, m, v, group)
    if schedule == ZB_H1:
        return _zero_bubble(p, r, m, v, group)
    if schedule == ZB_V:
        return _zb_v(p, r, m)
    return _dualpipe_v(p, r, m)


@kernel
def _looped_bfs(m: int, v: int) -> IndexArray:
    actions = np.empty((2 * m * v, 3), np.int64)
    for i in range(m * v):
        actions[i, 0], actions[i, 1], actions[i, 2] = FORWARD, i // m, i % m
        n = 2 * m * v - 1 - i
        actions[n, 0], actions[n, 1], actions[n, 2] = BACKWARD, i // m, i % m
    return actions


@kernel
def _grouped(m: int, v: int, group: int) -> IndexArray:
    """int64[m v, 2]: chunk and microbatch of the forward passes, group after group and chunk after chunk."""
    order = np.empty((m * v, 2), np.int64)
    n = 0
    for first in range(0, m, group):
        for chunk in range(v):
            for microbatch in range(first, min(first + group, m)):
                order[n, 0], order[n, 1] = chunk, microbatch
                n += 1
    return order


@kernel
def _interleaved(p: int, r: int, m: int, v: int, group: int) -> IndexArray:
    order = _grouped(m, v, group)
    ahead = min((v - 1) * group + 2 * (p - 1 - r), m * v)
    actions = np.empty((2 * m * v, 3), np.int64)
    forwards, backwards = 0, 0
    for n in range(2 * m * v):
        # ``ahead`` forward passes first, then forward and backward by turns while there are forward passes.
        if forwards < m * v and (forwards < ahead or forwards - ahead == backwards):
            actions[n, 0], actions[n, 1], actions[n, 2] = FORWARD, order[forwards, 0], order[forwards, 1]
            forwards += 1
        else:
            actions[n, 0], actions[n, 1], actions[n, 2] = BACKWARD, v - 1 - order[backwards, 0], order[backwards, 1]
            backwards += 1
    return actions


@kernel
def _zero_bubble(p: int, r: int, m: int, v: int, group: int) -> IndexArray:
    """As interleaved with fewer passes ahead; gradients of weights lag behind by r, and fill the end."""
    order = _grouped(m, v, group)
    ahead = min((v - 1) * group + p - 1 - r, m * v)
    actions = np.empty((3 * m * v, 3), np.int64)
    n = 0
    for i in range(ahead):
        actions[n, 0], actions[n, 1], actions[n, 2] = FORWARD, order[i, 0], order[i, 1]
        n += 1
    for i in range(m * v + r):
        if i < m * v:
            if ahead + i < m * v:
                actions[n, 0], actions[n, 1], actions[n, 2] = FORWARD, order[ahead + i, 0], order[ahead + i, 1]
                n += 1
            actions[n, 0], actions[n, 1], actions[n, 2] = INPUTS, v - 1 - order[i, 0], order[i, 1]
            n += 1
        if 0 <= i - r < m * v:
            actions[n, 0], actions[n, 1], actions[n, 2] = WEIGHTS, v - 1 - order[i - r, 0], order[i - r, 1]
            n += 1
    return actions


@inlined_kernel
def _add(actions: IndexArray, state: IndexArray, kind: int, chunk: int) -> None:
    """state: int64[9], passes listed so far of each (kind, chunk) at 2 * kind + chunk, and of all at 8."""
    counted = INPUTS if kind == BACKWARD else kind
    n = state[8]
    actions[n, 0], actions[n, 1], actions[n, 2] = kind, chunk, state[2 * counted + chunk]
    state[2 * counted + chunk] += 1
    if kind == BACKWARD:
        state[2 * WEIGHTS + chunk] += 1
    state[8] = n + 1


@kernel
def _within(actions: IndexArray, m: int) -> IndexArray:
    return actions[actions[:, 2] < m]


@kernel
def _zb_v(p: int, r: int, m: int) -> IndexArray:
    """Written for at least 2 p - 1 microbatches; of fewer those that are not there are left out."""
    length = max(2 * p - 1, m)
    actions = np.empty((6 * length, 3), np.int64)
    state = np.zeros(9, np.int64)
    for _ in range(2 * (p - r) - 1):
        _add(actions, state, FORWARD, 0)
    for _ in range(r):
        _add(actions, state, FORWARD, 1)
        _add(actions, state, FORWARD, 0)
    for _ in range(p - r):
        _add(actions, state, FORWARD, 1)
        _add(actions, state, INPUTS, 1)
        _add(actions, state, WEIGHTS, 1)
    while state[2 * FORWARD + 1] < state[2 * FORWARD] or state[2 * FORWARD] < length:
        if state[2 * FORWARD] < length:
            _add(actions, state, FORWARD, 0)
        _add(actions, state, INPUTS, 0)
        _add(actions, state, WEIGHTS, 0)
        _add(actions, state, FORWARD, 1)
        _add(actions, state, INPUTS, 1)
        _add(actions, state, WEIGHTS, 1)
    for _ in range(r):
        _add(actions, state, INPUTS, 0)
        _add(actions, state, INPUTS, 1)
    for _ in range(p - r):
        _add(actions, state, INPUTS, 0)
        _add(actions, state, WEIGHTS, 0)
    for chunk in (1, 0):
        while state[2 * WEIGHTS + chunk] < state[2 * INPUTS + chunk]:
            _add(actions, state, WEIGHTS, chunk)
    return _within(actions[: state[8]], m)


@kernel
def _dualpipe_v(p: int, r: int, m: int) -> IndexArray:
    """Passes that are run as one (a forward of one chunk with a backward of the other) stand one after the other."""
    actions = np.empty((6 * m + 6 * p, 3), np.int64)
    state = np.zeros(9, np.int64)
    waiting = np.empty(6 * m + 6 * p, np.int64)  # chunks whose gradients of weights are due
    first, end = 0, 0
    for _ in range(2 * (p - r - 1)):
        _add(actions, state, FORWARD, 0)
    for _ in range(r + 1):
        _add(actions, state, FORWARD, 0)
        _add(actions, state, FORWARD, 1)
    for _ in range(p - r - 1):
        _add(actions, state, INPUTS, 1)
        _add(actions, state, WEIGHTS, 1)
        _add(actions, state, FORWARD, 1)
    for _ in range(m - 2 * p + r + 1):
        _add(actions, state, FORWARD, 0)
        _add(actions, state, BACKWARD, 1)
        _add(actions, state, FORWARD, 1)
        _add(actions, state, BACKWARD, 0)
    for _ in range(p - r - 1):
        _add(actions, state, BACKWARD, 1)
        _add(actions, state, FORWARD, 1)
        _add(actions, state, BACKWARD, 0)
    # From the middle of what is left on the weights wait: chunk 1 first on odd ranks, chunk 0 on even ones.
    split = False
    for i in range(r + 1):
        middle = i == (r + 1) // 2
        split = split or (middle and r % 2 == 1)
        for chunk in (1, 0):
            _add(actions, state, INPUTS if split else BACKWARD, chunk)
            if split:
                waiting[end] = chunk
                end += 1
            split = split or middle
    for _ in range(p - r - 1):
        if first < end:
            _add(actions, state, WEIGHTS, waiting[first])
            first += 1
        _add(actions, state, INPUTS if split else BACKWARD, 0)
        if split:
            waiting[end] = 0
            end += 1
    while first < end:
        _add(actions, state, WEIGHTS, waiting[first])
        first += 1
    return _within(actions[: state[8]], m)
