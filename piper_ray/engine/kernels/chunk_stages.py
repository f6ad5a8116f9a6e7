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
    most = 0.0
    for n in range(program.held_start[rank], program.held_start[rank + 1]):
        total = 0.0
        for chunk in range(activation.size):
            total += program.held[n, chunk] * activation[chunk]
        most = max(most, total)
    return most + fixed


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
    # Takes the best of all layers' best steps, until all fits.
    target, gain = np.full(size, -1, np.int64), np.zeros(size)
    for n in range(size):
        target[n], gain[n] = _best_step(layers, layer[n], choice[layer[n]], held[program.stage_of[rank, chunk_at[n]]])
    order = np.empty(4 * size + 64, np.int64)
    taken = 0
    while peak_bytes(program, rank, activation, fixed) > memory_bytes:
        best = -1
        for n in range(size):
            if target[n] >= 0 and (best < 0 or gain[n] > gain[best]):
                best = n
        if best < 0:
            return False
        x, o = layer[best], target[best]
        activation[chunk_at[best]] += (
            layers.figures[o, FIGURE.activation] - layers.figures[choice[x], FIGURE.activation]
        )
        fixed += layers.figures[o, FIGURE.fixed] - layers.figures[choice[x], FIGURE.fixed]
        if taken < order.size:
            order[taken] = best
            taken += 1
        choice[x] = o
        target[best], gain[best] = _best_step(layers, x, o, held[program.stage_of[rank, chunk_at[best]]])
    for i in range(taken - 1, -1, -1):
        n = order[i]
        x, k = layer[n], chunk_at[n]
        now = choice[x]
        for o in range(layers.option_start[x], layers.option_start[x + 1]):
            if _time(layers, o) >= _time(layers, choice[x]):
                continue
            change = layers.figures[o, FIGURE.activation] - layers.figures[now, FIGURE.activation]
            change_fixed = layers.figures[o, FIGURE.fixed] - layers.figures[now, FIGURE.fixed]
            activation[k] += change
            if peak_bytes(program, rank, activation, fixed + change_fixed) <= memory_bytes:
                choice[x] = o
            activation[k] -= change
        activation[k] += layers.figures[choice[x], FIGURE.activation] - layers.figures[now, FIGURE.activation]
        fixed += layers.figures[choice[x], FIGURE.fixed] - layers.figures[now, FIGURE.fixed]
    return True


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
