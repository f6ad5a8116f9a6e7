"""Transfers that no good plan can do without, as its ranks have not the time for whole chains of layers."""

from __future__ import annotations

import numpy as np

from piper_ray.engine.chunks.tables import DegreeTables
from piper_ray.engine.chunks.tasks import Task
from piper_ray.engine.kernels.chunk_bound import APART, FORWARD_S, INPUT_S, KIND_COLUMNS, WEIGHT_S, WEIGHTS, LayerKinds

_A_LITTLE_MORE = 1.0 + 1e-9
"""Than a rank has time for, as sums are rounded."""


def forced_transfers_s(task: Task, target_s: float) -> float:
    """What chunks send and receive at least, in either direction, in plans that take less than ``target_s``.

    Chains are paths through the graph, no layer of which is in two. Consecutive layers of a chain on one rank take no
    longer than that rank's part of a batch; so a chain is in so many pieces at least, and between two of them an edge
    is sent from a rank to another. The hub's edges are left out.
    """
    if not np.isfinite(target_s):
        return 0.0
    tables, m = task.tables, task.shape.microbatches
    figures = tables.figures(task.data_parallel_degree)
    layer_s = figures[:, FORWARD_S : WEIGHT_S + 1].sum(axis=1) + figures[:, WEIGHTS] * task.sync_s_per_byte / m
    least_s = np.minimum.reduceat(layer_s, tables.option_start[:-1])
    room_s = target_s / m * _A_LITTLE_MORE
    total_s = 0.0
    for layers, edges_s in _chains(tables):
        pieces, piece_s = 1, 0.0
        for x in layers:
            if piece_s > 0.0 and piece_s + least_s[x] > room_s:
                pieces, piece_s = pieces + 1, 0.0
            piece_s += least_s[x]
        total_s += sum(sorted(edges_s)[: pieces - 1])
    return total_s


def with_transfers(kinds: LayerKinds, transfers_s: float, stages: int) -> LayerKinds:
    """The kinds and one more layer, that takes as long as the transfers and may be in any chunk: each of them is."""
    if transfers_s <= 0.0:
        return kinds
    figures = np.zeros((1, KIND_COLUMNS))
    figures[0, [FORWARD_S, INPUT_S]] = transfers_s
    return LayerKinds(
        np.append(kinds.layers, 1),
        np.append(kinds.first_chunk, 0),
        np.append(kinds.last_chunk, stages - 1),
        np.append(kinds.side, APART),
        np.append(kinds.option_start, kinds.option_start[-1] + 1),
        np.concatenate([kinds.figures, figures]),
        np.append(kinds.units, 0.0),
    )


def _chains(tables: DegreeTables) -> list[tuple[list[int], list[float]]]:
    """Positions of layers along each, and the seconds of the edges between them; the dearest edges first come in."""
    order = tables.order
    after: dict[int, tuple[int, float]] = {}
    heads: set[int] = set()
    for seconds, tail, head in sorted(tables.edge_seconds(), reverse=True):
        if order.layers[tail] != order.hub and tail not in after and head not in heads:
            after[tail] = head, seconds
            heads.add(head)
    found = []
    for first in sorted(after.keys() - heads):
        layers, edges_s = [first], []
        while layers[-1] in after:
            x, seconds = after[layers[-1]]
            layers.append(x)
            edges_s.append(seconds)
        found.append((layers, edges_s))
    return found
