"""What the chunks of any plan send and receive at least, in addition to their passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from piper_ray.engine.chunks.tables import DegreeTables
from piper_ray.engine.chunks.tasks import Task
from piper_ray.engine.kernels.chunk_bound import APART, BEFORE_HUB, BEHIND_HUB, FIGURE, HUB, LayerKinds
from piper_ray.engine.kernels.types import FloatArray, IndexArray

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
    known = _least_and_room_s(task, target_s)
    return sum(_least_between_pieces_s(chain, *known, 1)[1] for chain in _chains(task.tables))


class TowerPieces(NamedTuple):
    """The pieces of a chain. layers: its positions. transfers_s: what ranks send and receive at least between its
    pieces, in either direction, if it is in so many, by their number; the last is for at least so many."""

    layers: list[int]
    transfers_s: list[float]

    @classmethod
    def dearest(cls, task: Task, target_s: float) -> TowerPieces | None:
        """The chain whose edges cost the most together, in plans that take less than ``target_s``."""
        if not (chains := _chains(task.tables)):
            return None
        chain = max(chains, key=lambda x: sum(x.sent_s) + sum(x.received_s))
        return cls(chain.layers, _least_between_pieces_s(chain, *_least_and_room_s(task, target_s), task.shape.ranks))


def _least_and_room_s(task: Task, target_s: float) -> tuple[FloatArray, float]:
    """float64[n], the least time of each layer; and what a rank may take for a microbatch in plans that take less than
    ``target_s``."""
    tables = task.tables
    options_s = rank_seconds(tables.figures(task.data_parallel_degree), task)
    return np.minimum.reduceat(options_s, tables.option_start[:-1]), target_s / task.shape.microbatches * _A_LITTLE_MORE


def _least_between_pieces_s(chain: _Chain, least_of_s: FloatArray, room_s: float, most: int) -> list[float]:
    """The least transfers over all ways to cut a chain into pieces that each take at most ``room_s``, by the number of
    pieces up to ``most``, which is for at least so many; inf if there is none. least_of_s: float64[n], of layers."""
    layer_s, n = least_of_s[chain.layers].tolist(), len(chain.layers)
    sent_s, received_s = [*chain.sent_s, 0.0], [0.0, *chain.received_s]
    least_s = [[np.inf] * (most + 1) for _ in range(n + 1)]  # of the first layers, by their number and that of pieces
    least_s[0][0] = 0.0
    for first in range(n):
        piece_s = 2.0 * received_s[first]  # forward and backward
        for last in range(first, n):
            piece_s += layer_s[last]
            if piece_s > room_s:
                break
            if piece_s + 2.0 * sent_s[last] <= room_s:
                found = least_s[last + 1]
                for pieces, before_s in enumerate(least_s[first]):
                    to = min(pieces + 1, most)
                    found[to] = min(found[to], before_s + received_s[first] + sent_s[last])
    return least_s[n]


def least_of_ranks_s(task: Task, target_s: float) -> float:
    """What all ranks send and receive at least, in either direction, in plans that take less than ``target_s``."""
    known = task.tables.rank_transfers if task.shape.ranks > 1 and np.isfinite(target_s) else None
    return 0.0 if known is None else known.least_together_s(task.shape.ranks, target_s / task.shape.microbatches)


def mean_of_ranks_s(task: Task, target_s: float) -> float:
    """A bound on plans that take less than ``target_s``: the mean of what ranks do for a batch."""
    work_s = task.tables.least_s + 2.0 * least_of_ranks_s(task, target_s)
    sync_s = task.sync_s_per_byte * task.tables.least_weights_bytes
    return (task.shape.microbatches * work_s + sync_s) / task.shape.ranks


class ChunkTransfers(NamedTuple):
    """What chunks ``first_chunk`` to ``last_chunk`` send and receive together, in either direction."""

    seconds: float
    first_chunk: int
    last_chunk: int


class _Side(NamedTuple):
    """A chain in front of the hub's chunk or behind it: in chunks first to last, with the hub's chunk if the hub is in
    the chain.

    others: how many layers of no part in the chain may be in these chunks, but for the hub's. No chunk is empty, so at
    most as many of the chunks have no layer of the chain.
    """

    chain: _Chain
    first: int
    last: int
    others: int
    meets_hub: bool

    def least_s(self, apart: int | None) -> float:
        """The least that these chunks send and receive. apart: as in ``PipelineShape``.

        The chain passes from each chunk that has some of it to the next one. These two are on different ranks, unless
        ``apart`` - 1 chunks or more in between have no layer of it, or the middle of a V is in between.
        """
        alike = 0 if apart is None else 1 if apart == 1 else self.others // (apart - 1)
        costs_s = sorted(map(sum, zip(self.chain.sent_s, self.chain.received_s, strict=True)))
        return sum(costs_s[: max(0, self.last - self.first - self.others - alike)])


def transfers_beside_hub(task: Task, hub: int, crossing_s: FloatArray) -> list[ChunkTransfers]:
    """Transfers beyond ``crossing_s``, as in ``ShapeLimits``, up to the hub's chunk and from there on. The hub's own
    edges are left out."""
    if task.shape.ranks == 1:
        return []
    found = []
    sides = [*_sides(task, hub)]
    for first, last in ((0, hub), (hub, task.shape.stages - 1)):
        least_s = sum(x.least_s(task.shape.apart) for x in sides if first <= x.first and x.last <= last)
        least_s -= float(crossing_s[first : last + 1].sum())
        if least_s > 0.0:
            found.append(ChunkTransfers(least_s, first, last))
    return found


def further_beside_hub(
    task: Task, rank_of: IndexArray, kinds: LayerKinds, members: Sequence[IndexArray], hub: int
) -> FloatArray:
    """As ``DegreeTables.further_s``, of plans with the hub in chunk ``hub``. kinds: with these members.

    A chunk with a layer of a chain receives it from another rank, if some chunk in front has a layer of it for certain,
    and if none of the chunks that may be the last such one is on the same rank. It sends it likewise.
    """
    crossing_s, found = task.tables.crossing_s(rank_of), task.tables.further_s(rank_of, members)
    sizes = np.diff(kinds.option_start)
    for chain, first, last, others, meets_hub in _sides(task, hub):
        inside = [np.isin(positions, chain.layers) for positions in members]
        all_in, some_in = (np.repeat([of(one) for one in inside], sizes) for of in (np.all, np.any))
        for k in range(first, last + 1):
            before = np.arange(max(first, k - 1 - others), k)
            behind = np.arange(k + 1, min(last, k + 1 + others) + 1)
            for row, near, costs_s in ((0, behind, chain.sent_s), (1, before, chain.received_s)):
                surely = near.size > others or (meets_hub and hub in near)
                if surely and (rank_of[near] != rank_of[k]).all():
                    least_s = max(0.0, min(costs_s) - crossing_s[row, k])
                    found[row, k] = np.where(all_in, least_s, np.where(some_in, 0.0, np.inf))
    return found


def _sides(task: Task, hub: int) -> Iterator[_Side]:
    """hub: the hub's chunk."""
    order, stages = task.tables.order, task.shape.stages
    first, last = task.tables.windows(stages).T
    side = np.array(order.sides)
    first = np.where((side == HUB) | (side == BEHIND_HUB), np.maximum(first, hub), first)
    last = np.where((side == HUB) | (side == BEFORE_HUB), np.minimum(last, hub), last)
    for chain in _chains(task.tables):
        beside = np.ones(order.size, np.bool_)
        beside[chain.layers] = False
        meets_hub = not beside[side == HUB].any()
        for start, end in ((0, hub - 1), (hub + 1, stages - 1)):
            if start <= end:
                others = int(np.count_nonzero(beside & (first <= end) & (last >= start)))
                ends = (min(start, hub), max(end, hub)) if meets_hub else (start, end)
                yield _Side(chain, *ends, others, meets_hub)


def with_transfers(kinds: LayerKinds, transfers: Sequence[ChunkTransfers]) -> LayerKinds:
    """Replaces the kinds that stand for transfers: each is one more layer, which takes as long and may be shared out
    over these chunks."""
    layers, size = int(np.count_nonzero(kinds.counted)), len(transfers)
    options = int(kinds.option_start[layers])
    figures = np.zeros((size, len(FIGURE)))
    figures[:, FIGURE.forward_s] = figures[:, FIGURE.input_s] = [x.seconds for x in transfers]
    one, none = np.ones(size, np.int64), np.zeros(size, np.int64)
    return LayerKinds(
        np.append(kinds.layers[:layers], one),
        np.append(kinds.counted[:layers], none),
        np.append(kinds.first_chunk[:layers], np.array([x.first_chunk for x in transfers], np.int64)),
        np.append(kinds.last_chunk[:layers], np.array([x.last_chunk for x in transfers], np.int64)),
        np.append(kinds.side[:layers], none + APART),
        np.append(kinds.option_start[: layers + 1], options + np.arange(1, size + 1)),
        np.concatenate([kinds.figures[:options], figures]),
        np.append(kinds.units[:options], np.zeros(size)),
    )


def without_hub(kinds: LayerKinds) -> LayerKinds:
    """The same kinds where no layer knows of the hub: neither what its edges cost, nor on which side of it a layer is.
    Without these conditions plans can only be more, and take less."""
    figures = kinds.figures.copy()
    figures[:, [FIGURE.from_hub_s, FIGURE.to_hub_s]] = 0.0
    return kinds._replace(side=np.full(kinds.side.size, APART, np.int64), figures=figures)


def _chains(tables: DegreeTables) -> list[_Chain]:
    """Makes chains from the most expensive edges on."""
    order = tables.order
    after: dict[int, tuple[int, float, float]] = {}
    heads: set[int] = set()
    edges = tables.edge_seconds
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
