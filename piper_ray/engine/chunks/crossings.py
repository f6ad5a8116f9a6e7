"""What the chunks of any plan send and receive at least, in addition to their passes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.engine.chunks.tables import DegreeTables
from piper_ray.engine.chunks.tasks import Task
from piper_ray.engine.kernels.chunk_bound import APART, FIGURE, LayerKinds
from piper_ray.engine.kernels.types import FloatArray

_A_LITTLE_MORE = 1.0 + 1e-9
"""A factor on the time of a rank, because sums are rounded."""


class _Chain(NamedTuple):
    """layers: positions along it. sent_s, received_s: by the ends of the edges between them, in either direction."""

    layers: list[int]
    sent_s: list[float]
    received_s: list[float]


def forced_transfers_s(task: Task, target_s: float) -> float:
    """What chunks send and receive at least, in either direction, in plans that take less than ``target_s``.

    Chains are paths through the graph; no layer is in two of them. Consecutive layers of a chain on one rank take no
    longer, with what they receive and send, than that rank's part of a batch. So a chain is in pieces, and an edge
    between two pieces is sent from one rank to another. The hub's edges are left out.
    """
    if not np.isfinite(target_s):
        return 0.0
    tables = task.tables
    layer_s = rank_seconds(tables.figures(task.data_parallel_degree), task)
    least_s = np.minimum.reduceat(layer_s, tables.option_start[:-1])
    room_s = target_s / task.shape.microbatches * _A_LITTLE_MORE
    return sum(_least_between_pieces_s([least_s[x] for x in chain.layers], chain, room_s) for chain in _chains(tables))


def _least_between_pieces_s(layer_s: list[float], chain: _Chain, room_s: float) -> float:
    """The least transfers over all ways to cut a chain into pieces that each take at most ``room_s``; inf if there is
    none."""
    n = len(layer_s)
    sent_s, received_s = [*chain.sent_s, 0.0], [0.0, *chain.received_s]
    least_s = [0.0] + [np.inf] * n  # of the first layers, by their number, in pieces
    for first in range(n):
        piece_s = 2.0 * received_s[first]  # forward and backward
        for last in range(first, n):
            piece_s += layer_s[last]
            if piece_s > room_s:
                break
            if piece_s + 2.0 * sent_s[last] <= room_s:
                least_s[last + 1] = min(least_s[last + 1], least_s[first] + received_s[first] + sent_s[last])
    return least_s[n]


def with_transfers(kinds: LayerKinds, transfers_s: float, stages: int) -> LayerKinds:
    """Adds one more layer to the kinds, which takes as long as the transfers and may be in any chunk, as each of them
    may."""
    if transfers_s <= 0.0:
        return kinds
    figures = np.zeros((1, len(FIGURE)))
    figures[0, [FIGURE.forward_s, FIGURE.input_s]] = transfers_s
    return LayerKinds(
        np.append(kinds.layers, 1),
        np.append(kinds.counted, 0),
        np.append(kinds.first_chunk, 0),
        np.append(kinds.last_chunk, stages - 1),
        np.append(kinds.side, APART),
        np.append(kinds.option_start, kinds.option_start[-1] + 1),
        np.concatenate([kinds.figures, figures]),
        np.append(kinds.units, 0.0),
    )


def _chains(tables: DegreeTables) -> list[_Chain]:
    """Makes chains from the most expensive edges on."""
    order = tables.order
    after: dict[int, tuple[int, float, float]] = {}
    heads: set[int] = set()
    edges = tables.edge_seconds()
    for edge in sorted(edges, key=lambda edge: (-edge.sent_s - edge.received_s, edge.tail, edge.head)):
        if order.layers[edge.tail] != order.hub and edge.tail not in after and edge.head not in heads:
            after[edge.tail] = edge.head, edge.sent_s, edge.received_s
            heads.add(edge.head)
    found = []
    for first in sorted(after.keys() - heads):
        chain = _Chain([first], [], [])
        while chain.layers[-1] in after:
            x, sent_s, received_s = after[chain.layers[-1]]
            chain.layers.append(x)
            chain.sent_s.append(sent_s)
            chain.received_s.append(received_s)
        found.append(chain)
    return found


def rank_seconds(figures: FloatArray, task: Task) -> FloatArray:
    """float64[options]: seconds of the rank for a microbatch, with its part of the synchronisation."""
    sync_s = figures[:, FIGURE.weights] * task.sync_s_per_byte
    passes_s = figures[:, FIGURE.forward_s : FIGURE.weight_s + 1].sum(axis=1)
    found: FloatArray = passes_s + sync_s / task.shape.microbatches
    return found
