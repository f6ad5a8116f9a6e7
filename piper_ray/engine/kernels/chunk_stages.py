"""Kernels: the time and memory of a plan's chunks, and TMPCs that fit in a rank's memory.

A plan gives each layer its chunk, int64[n], and its option, int64[n]. No edge runs to an earlier chunk, and no chunk is
empty.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.compiled.jit import inner_kernel
from piper_ray.engine.kernels.chunk_bound import COLUMNS, FIGURE
from piper_ray.engine.kernels.chunk_program import ChunkProgram
from piper_ray.engine.kernels.types import FloatArray, IndexArray


class OrderedLayers(NamedTuple):
    """Layers in an order along edges, and their options at one (d, t). n layers, o options, h tensors.

    The option of a layer that takes the least time comes first.
    """

    option_start: IndexArray  # int64[n + 1]
    successor_start: IndexArray  # int64[n + 1]
    successor: IndexArray  # int64[..]: along all edges
    predecessor_start: IndexArray  # int64[n + 1]
    predecessor: IndexArray
    figures: FloatArray  # float64[o, COLUMNS]
    edge_tail: IndexArray  # int64[e]: positions; only edges that cost something
    edge_head: IndexArray
    tail_charge: IndexArray  # int64[e]: the start of the charges of the tail's options in charge_s
    head_charge: IndexArray
    charge_s: FloatArray  # (c + extra) / B in either direction, for each option of the layer at the end
    tensor_start: IndexArray  # int64[h + 1]
    tensor_layer: IndexArray  # int64[..], positions, ascending
    tensor_forward_s: FloatArray  # float64[h]
    tensor_backward_s: FloatArray


_ROUNDING = 1e-9
"""Relative: far more than the errors of sums of bytes."""


class ChunkModel(NamedTuple):
    """Everything that plans with chunks are made from, valued by and limited by.

    held: float64[s], the approximate microbatches of each chunk in flight: it only weighs the steps that make TMPCs
    fit.
    """

    layers: OrderedLayers
    program: ChunkProgram
    sync_s_per_byte: float
    memory_bytes: float
    held: FloatArray


@inner_kernel
def chunk_figures(layers: OrderedLayers, rank_of: IndexArray, chunk_of: IndexArray, choice: IndexArray) -> FloatArray:
    """Returns float64[s, COLUMNS]; the seconds include transfers between ranks."""
    found = np.zeros((rank_of.size, COLUMNS))
    for v in range(chunk_of.size):
        for column in range(COLUMNS):
            found[chunk_of[v], column] += layers.figures[choice[v], column]
    for e in range(layers.edge_tail.size):
        u, v = layers.edge_tail[e], layers.edge_head[e]
        a, b = chunk_of[u], chunk_of[v]
        if rank_of[a] != rank_of[b]:
            sent_s = layers.charge_s[layers.tail_charge[e] + choice[u] - layers.option_start[u]]
            received_s = layers.charge_s[layers.head_charge[e] + choice[v] - layers.option_start[v]]
            found[a, FIGURE.forward_s] += sent_s
            found[a, FIGURE.input_s] += sent_s
            found[b, FIGURE.forward_s] += received_s
            found[b, FIGURE.input_s] += received_s
    for h in range(layers.tensor_forward_s.size):
        first, end = layers.tensor_start[h], layers.tensor_start[h + 1]
        apart = False
        for n in range(first + 1, end):
            if rank_of[chunk_of[layers.tensor_layer[n]]] != rank_of[chunk_of[layers.tensor_layer[first]]]:
                apart = True
        for n in range(first, end):
            k = chunk_of[layers.tensor_layer[n]]
            for other in range(first, n):  # each chunk once
                if chunk_of[layers.tensor_layer[other]] == k:
                    k = -1
                    break
            if apart and k >= 0:
                found[k, FIGURE.forward_s] += layers.tensor_forward_s[h]
                found[k, FIGURE.input_s] += layers.tensor_backward_s[h]
    return found


@inner_kernel
def sync_of_ranks(program: ChunkProgram, figures: FloatArray, sync_s_per_byte: float) -> FloatArray:
    """Returns float64[p]: each rank's synchronisation."""
    sync_s = np.zeros(program.last.size)
    for k in range(program.rank_of.size):
        sync_s[program.rank_of[k]] += figures[k, FIGURE.weights] * sync_s_per_byte
    return sync_s


@inner_kernel
def peak_bytes(program: ChunkProgram, rank: int, activation: FloatArray, fixed: float) -> float:
    """Returns the most bytes that a rank holds at a time. activation: float64[v], bytes of a microbatch in each of its
    chunks."""
    return _peak(program, rank, activation, fixed)[0]


@inner_kernel
def _peak(program: ChunkProgram, rank: int, activation: FloatArray, fixed: float) -> tuple[float, int]:
    """Returns the most bytes that a rank holds at a time, and the moment; -1 if it holds activations at none."""
    most, at = 0.0, -1
    for n in range(program.held_start[rank], program.held_start[rank + 1]):
        total = 0.0
        for chunk in range(activation.size):
            total += program.held[n, chunk] * activation[chunk]
        if total > most:
            most, at = total, n
    return most + fixed, at


@inner_kernel
def rank_bytes(model: ChunkModel, rank: int, chunk_of: IndexArray, choice: IndexArray) -> tuple[FloatArray, float]:
    """Returns what the layers of a rank hold: float64[v], bytes of a microbatch in each of its chunks, and fixed
    bytes."""
    layers, program = model.layers, model.program
    activation, fixed = np.zeros(program.stage_of.shape[1]), 0.0
    for x in range(chunk_of.size):
        if program.rank_of[chunk_of[x]] == rank:
            activation[program.turn_of[chunk_of[x]]] += layers.figures[choice[x], FIGURE.activation]
            fixed += layers.figures[choice[x], FIGURE.fixed]
    return activation, fixed


@inner_kernel
def fit_rank(model: ChunkModel, rank: int, chunk_of: IndexArray, choice: IndexArray) -> bool:
    """Writes quick TMPCs that fit, one for each layer of a rank, to ``choice``. Returns False if none fit.

    All layers take their fastest option; then step by step those that save most bytes per second change. At last each
    layer that took a step, the last ones first, takes the quickest option that leaves room for the others.
    """
    layers, program, _, memory_bytes, held = model
    size = 0
    for x in range(chunk_of.size):
        if program.rank_of[chunk_of[x]] == rank:
            choice[x] = layers.option_start[x]
            size += 1
    activation, fixed = rank_bytes(model, rank, chunk_of, choice)
    if peak_bytes(program, rank, activation, fixed) <= memory_bytes:
        return True
    layer, chunk_at = np.empty(size, np.int64), np.empty(size, np.int64)
    n = 0
    for x in range(chunk_of.size):
        if program.rank_of[chunk_of[x]] == rank:
            layer[n], chunk_at[n] = x, program.turn_of[chunk_of[x]]
            n += 1
    # Takes the best of all layers' best steps, until all fits. A heap has the layers with a step, the best one on top.
    target, gain = np.full(size, -1, np.int64), np.zeros(size)
    heap, steps = np.empty(size, np.int64), 0
    for n in range(size):
        target[n], gain[n] = _best_step(layers, layer[n], choice[layer[n]], held[program.stage_of[rank, chunk_at[n]]])
        if target[n] >= 0:
            heap[steps] = n
            steps += 1
    for place in range(steps // 2 - 1, -1, -1):
        _sink(heap, steps, gain, place)
    most_held = np.zeros(activation.size)
    for moment in range(program.held_start[rank], program.held_start[rank + 1]):
        for k in range(activation.size):
            most_held[k] = max(most_held[k], program.held[moment, k])
    order = np.empty(4 * size + 64, np.int64)
    taken = 0
    left, saved = 0.0, 0.0  # bytes beyond the memory when they were counted last, and the most that was saved since
    while True:
        if saved >= left - _ROUNDING * memory_bytes:
            left, saved = peak_bytes(program, rank, activation, fixed) - memory_bytes, 0.0
            if left <= 0.0:
                break
        if steps == 0:
            return False
        best = heap[0]
        x, o, k = layer[best], target[best], chunk_at[best]
        change = layers.figures[o, FIGURE.activation] - layers.figures[choice[x], FIGURE.activation]
        change_fixed = layers.figures[o, FIGURE.fixed] - layers.figures[choice[x], FIGURE.fixed]
        activation[k] += change
        fixed += change_fixed
        saved += max(0.0, -change) * most_held[k] + max(0.0, -change_fixed)
        if taken < order.size:
            order[taken] = best
            taken += 1
        choice[x] = o
        target[best], gain[best] = _best_step(layers, x, o, held[program.stage_of[rank, k]])
        if target[best] < 0:
            steps -= 1
            heap[0] = heap[steps]
        _sink(heap, steps, gain, 0)
    most, fullest = _peak(program, rank, activation, fixed)
    for i in range(taken - 1, -1, -1):
        n = order[i]
        x, k = layer[n], chunk_at[n]
        now = choice[x]
        for o in range(layers.option_start[x], layers.option_start[x + 1]):
            if _time(layers, o) >= _time(layers, choice[x]):
                continue
            change = layers.figures[o, FIGURE.activation] - layers.figures[now, FIGURE.activation]
            change_fixed = layers.figures[o, FIGURE.fixed] - layers.figures[now, FIGURE.fixed]
            then = most + change_fixed + (program.held[fullest, k] * change if fullest >= 0 else 0.0)
            if then > memory_bytes * (1.0 + _ROUNDING):  # at one moment, and so at the fullest one
                continue
            activation[k] += change
            if peak_bytes(program, rank, activation, fixed + change_fixed) <= memory_bytes:
                choice[x] = o
            activation[k] -= change
        if choice[x] != now:
            activation[k] += layers.figures[choice[x], FIGURE.activation] - layers.figures[now, FIGURE.activation]
            fixed += layers.figures[choice[x], FIGURE.fixed] - layers.figures[now, FIGURE.fixed]
            most, fullest = _peak(program, rank, activation, fixed)
    return True


@inner_kernel
def _sink(heap: IndexArray, size: int, gain: FloatArray, place: int) -> None:
    """Restores the order of a heap from ``place`` down: the greatest gain is on top, of equal ones the least number."""
    while True:
        best, child = place, 2 * place + 1
        for other in range(child, min(child + 2, size)):
            a, b = heap[other], heap[best]
            if gain[a] > gain[b] or (gain[a] == gain[b] and a < b):
                best = other
        if best == place:
            return
        heap[place], heap[best] = heap[best], heap[place]
        place = best


@inner_kernel
def _time(layers: OrderedLayers, o: int) -> float:
    return float(
        layers.figures[o, FIGURE.forward_s] + layers.figures[o, FIGURE.input_s] + layers.figures[o, FIGURE.weight_s]
    )


@inner_kernel
def _best_step(layers: OrderedLayers, x: int, now: int, held: float) -> tuple[int, float]:
    """Returns the option of layer x that saves most bytes per additional second, and that ratio; -1 if none saves
    any."""
    best, most = -1, 0.0
    for o in range(layers.option_start[x], layers.option_start[x + 1]):
        saved = held * (layers.figures[now, FIGURE.activation] - layers.figures[o, FIGURE.activation])
        saved += layers.figures[now, FIGURE.fixed] - layers.figures[o, FIGURE.fixed]
        if saved <= 0.0:
            continue
        extra = _time(layers, o) - _time(layers, now)
        gain = saved / extra if extra > 0.0 else np.inf
        if best < 0 or gain > most:
            best, most = o, gain
    return best, most
