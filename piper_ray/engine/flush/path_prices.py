"""Prices of each second and each byte at each position of a pipeline, and the bounds that they give.

However the layers are cut, a batch takes as long as the longest path through its passes. A path is a sum of the stages'
forward and backward seconds, each a number of times, and of some stage's synchronisation (``flush.paths``). A stage's
position is the number q of stages behind it. For any weighted mean of such paths,

    batch >= sum over q of  forward_q f_q + backward_q b_q + sync_q R_q.

Positions in front of the first stage are empty, which changes no path. A stage fits, y_q a + b <= M. So for any prices
memory_q >= 0 of a byte, with each layer at the position and with the choice that cost least,

    batch >= sum over layers of min over q and choices (forward_q f + backward_q b + sync_q R + memory_q (y_q a + b))
             - M times sum of memory_q.

The same holds with a given tail of the plan and only the layers in front of it placed freely (``path_bounds``). Good
prices come from linear programming (``flush.position_program``); any prices give a bound.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.cost.products import dot
from piper_ray.engine.flush.paths import longest_paths
from piper_ray.engine.kernels.downsets import member_sums
from piper_ray.engine.kernels.flush_stages import in_flight
from piper_ray.engine.kernels.flush_types import TWO_BW, FlushTables, FlushTask, PathBounds
from piper_ray.engine.kernels.types import FloatArray, IndexArray, frozen

_ROUNDING = 1e-9
"""Relative rounding error of sums."""

_PRICES = (0.0, 0.3, 1.0, 3.0, 1e6)
"""Prices of all bytes, relative to the work of all layers."""

_MOST_FIGURES = 30_000_000
"""Largest number of figures in ``PathBounds``."""


class PathPrices(NamedTuple):
    """Prices by the number of stages behind: float64[most_stages] each. memory_s: of a byte. bound_s: no batch takes
    less."""

    forward: FloatArray
    backward: FloatArray
    sync: FloatArray
    memory_s: FloatArray
    bound_s: float


def even_prices(task: FlushTask) -> PathPrices | None:
    """Returns the mean of the longest paths of equal stages. It is good if memory does not bind and layers are small.
    None under a schedule without paths.
    """
    if task.schedule == TWO_BW:
        return None
    even, none = np.ones(task.most_stages), np.zeros(task.most_stages)
    paths = longest_paths(task.schedule, task.microbatches, even, even, none)
    forward, backward, sync = (np.mean(often, axis=0) for often in zip(*paths, strict=True))
    return frozen(PathPrices(forward, backward, sync, none, 0.0))


class LayerChoices(NamedTuple):
    """Choices of layers, with equal layers once. of_vertex: int64[n], the layer of each vertex. copies:
    float64[layers], how many vertices have it. The others: one value per choice, ascending by layer; seconds, bytes for
    each microbatch in flight (a) and once (b).
    """

    of_vertex: IndexArray
    copies: FloatArray
    layer: IndexArray
    forward_s: FloatArray
    backward_s: FloatArray
    sync_s: FloatArray
    a_bytes: FloatArray
    b_bytes: FloatArray

    @classmethod
    def of(cls, tables: FlushTables, task: FlushTask) -> LayerChoices:
        kinds: dict[bytes, int] = {}
        used: list[FloatArray] = []
        of_vertex = []
        for rows in _rows(tables, task):
            kind = kinds.setdefault(rows.tobytes(), len(kinds))
            if kind == len(used):
                used.append(rows)
            of_vertex.append(kind)
        layer = np.repeat(np.arange(len(used)), [len(rows) for rows in used])
        numbers = np.array(of_vertex, np.int64)
        copies = np.bincount(numbers, minlength=len(used)).astype(np.float64)
        return cls(numbers, copies, layer, *np.concatenate(used).T.copy())

    @property
    def has_all(self) -> bool:
        """Whether each layer has at least one choice."""
        return self.copies.size == np.unique(self.layer).size

    def least_held(self, at_once: FloatArray) -> FloatArray:
        """Returns float64[positions, layers]: the least bytes of each layer. at_once: float64[positions], microbatches
        in flight."""
        return self.least(self.a_bytes * at_once[:, None] + self.b_bytes)

    def least_sync_s(self) -> FloatArray:
        """Returns float64[layers]: the least seconds of synchronisation."""
        found: FloatArray = self.least(self.sync_s[None, :])[0]
        return found

    def least_s(self, prices: PathPrices, at_once: FloatArray) -> FloatArray:
        """Returns float64[positions, layers]: the least cost at the prices. at_once: float64[positions], microbatches
        in flight."""
        held = self.a_bytes * at_once[:, None] + self.b_bytes
        priced_s = self.forward_s * prices.forward[:, None] + self.backward_s * prices.backward[:, None]
        priced_s += self.sync_s * prices.sync[:, None] + held * prices.memory_s[:, None]
        return self.least(priced_s)

    def in_pieces(self, at_once: FloatArray, count: int) -> LayerChoices:
        """Cuts a chain of all layers into at most ``count`` pieces of about the same work, each taken as a layer. Its
        choices are the quickest ones at several prices of a byte, from zero up.
        """
        least_s = self.least((self.forward_s + self.backward_s)[None, :])[0][self.of_vertex]
        at = (np.cumsum(least_s) - 0.5 * least_s) / max(least_s.sum(), 1e-300)
        piece = np.unique(np.minimum((at * count).astype(np.int64), count - 1), return_inverse=True)[1]
        figures = np.stack([self.forward_s, self.backward_s, self.sync_s, self.a_bytes, self.b_bytes], axis=1)
        of_piece = []
        for y in np.unique(at_once[[0, at_once.size // 2, -1]]).tolist():
            held = self.a_bytes * y + self.b_bytes
            a_byte_s = least_s.sum() / max(held.sum(), 1e-300)
            for price in _PRICES:
                priced_s = self.forward_s + self.backward_s + price * a_byte_s * held
                order = np.lexsort((priced_s, self.layer))
                chosen = order[np.searchsorted(self.layer[order], np.arange(self.copies.size))][self.of_vertex]
                of_piece.append(np.stack([np.bincount(piece, column) for column in figures[chosen].T], axis=1))
        some = [np.unique(of_one, axis=0) for of_one in np.stack(of_piece, axis=1)]
        layer = np.repeat(np.arange(len(some)), [len(of_one) for of_one in some])
        return LayerChoices(np.arange(len(some)), np.ones(len(some)), layer, *np.concatenate(some).T.copy())

    def least(self, of_choices: FloatArray) -> FloatArray:
        """Returns float64[rows, layers]: the least over the choices of each layer. of_choices: float64[rows,
        choices]."""
        first = np.flatnonzero(np.diff(self.layer, prepend=-1))
        found: FloatArray = np.minimum.reduceat(of_choices, first, axis=1)
        return found


def _rows(tables: FlushTables, task: FlushTask) -> list[FloatArray]:
    """Returns for each vertex float64[choices, 5], with all variants of the task: the columns are those of
    ``LayerChoices``."""
    figures = np.stack(
        [
            tables.option_forward_s,
            tables.option_backward_s,
            tables.option_weights * task.sync_s_per_byte[task.bounding[0]],
            tables.option_activation,
            tables.option_fixed + tables.option_shared / task.data_parallel_degree,
        ],
        axis=1,
    )
    starts = tables.option_start[task.bounding]
    vertices = starts.shape[1] - 1
    return [np.concatenate([figures[start[v] : start[v + 1]] for start in starts]) for v in range(vertices)]


def bounded(choices: LayerChoices, task: FlushTask, prices: PathPrices) -> PathPrices:
    """Returns the prices with the bound that they give."""
    of_layers = float(dot(choices.copies, choices.least_s(prices, in_flight_at(task)).min(axis=0)))
    room_s = float(prices.memory_s.sum()) * task.most_memory_bytes
    return frozen(prices._replace(bound_s=of_layers - room_s - _ROUNDING * (of_layers + room_s)))


NO_BOUNDS: PathBounds = frozen(PathBounds(*(np.zeros(0) for _ in range(5)), *(np.zeros((0, 0)) for _ in range(2))))


def path_bounds(
    tables: FlushTables, task: FlushTask, prices: PathPrices | None, choices: LayerChoices | None = None
) -> PathBounds:
    """Returns the bounds that the prices give for each downset; ``NO_BOUNDS`` if there are no prices, a layer has no
    choice, or there are too many figures. choices: those of the task, if they are known.
    """
    positions, downsets = task.most_stages, tables.bits.shape[0]
    if prices is None or downsets * (2 * positions + 1) > _MOST_FIGURES:
        return NO_BOUNDS
    choices = choices or LayerChoices.of(tables, task)
    if not choices.has_all:
        return NO_BOUNDS
    at_once = in_flight_at(task)
    cost_s = choices.least_s(prices, at_once)[:, choices.of_vertex]
    ahead_s = np.minimum.accumulate(cost_s[::-1])[::-1]
    inside_s = member_sums(tables.bits, np.concatenate([cost_s, ahead_s]).T.copy())
    of_stage, behind_s = inside_s[:, :positions], inside_s[:, positions:]
    room_s = prices.memory_s * task.most_memory_bytes
    rooms_s = np.append(np.cumsum(room_s[::-1])[::-1], 0.0)
    a_second = np.minimum.accumulate((prices.forward + prices.backward)[::-1])[::-1]
    ahead = np.zeros((downsets, positions + 1))
    ahead[:, :positions] = behind_s[-1] - behind_s + _leaving_s(tables, task)[:, None] * a_second
    ahead[:-1, positions] = np.inf
    ahead -= rooms_s + _ROUNDING * (behind_s[-1].max() + rooms_s[0])
    first_sync = np.append(np.cumsum(prices.sync[::-1])[::-1], 0.0)[1:]
    return frozen(
        PathBounds(
            prices.forward, prices.backward, prices.sync, first_sync, room_s, np.ascontiguousarray(of_stage), ahead
        )
    )


def in_flight_at(task: FlushTask) -> FloatArray:
    """Returns float64[positions]: the microbatches in flight."""
    return np.array([in_flight(task.schedule, task.microbatches, q) for q in range(task.most_stages)], np.float64)


def _leaving_s(tables: FlushTables, task: FlushTask) -> FloatArray:
    """Returns float64[m]: the least that the stage in front of a downset pays for what crosses to it, in each
    direction."""
    downsets = tables.bits.shape[0]
    of_edge = np.repeat(np.arange(downsets), np.diff(tables.crossing_start))
    of_variants = [np.bincount(of_edge, tables.edge_out_s[r][tables.crossing], downsets) for r in task.bounding]
    found: FloatArray = np.min(of_variants, axis=0)
    return found
