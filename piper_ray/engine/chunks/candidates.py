"""Plans of one task: cut after fractional plans, with TMPCs that fit, then made better by moves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, islice, pairwise

import numpy as np

from piper_ray.engine.chunks.relaxation import Relaxation
from piper_ray.engine.chunks.shapes import PipelineShape
from piper_ray.engine.chunks.tables import DegreeTables
from piper_ray.engine.chunks.tasks import Task
from piper_ray.engine.kernels.chunk_bound import FORWARD_S, WEIGHT_S
from piper_ray.engine.kernels.chunk_moves import DRAWS, anneal, batch_seconds, fit_all
from piper_ray.engine.kernels.chunk_stages import OrderedLayers
from piper_ray.engine.kernels.types import FloatArray, IndexArray
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.schedule import V_SHAPED

_MOST_TURNS = 70
_HEAT = 0.003
"""Relative: by how much a move may make a plan worse at first."""


@dataclass(frozen=True)
class Candidate:
    """A plan of a task that fits. cuts, choice: as in ``kernels.chunk_stages``. batch_s: simulated."""

    task: Task
    tables: DegreeTables
    cuts: IndexArray
    choice: IndexArray
    batch_s: float

    def plan(self) -> Plan:
        """Its chunks as stages, layers in file order."""
        order = self.task.tables.order
        file_position = {layer.id: index for index, layer in enumerate(order.instance.layers)}
        stages = []
        for first, end in pairwise(self.cuts.tolist()):
            tmpc_ids = {
                order.layers[x]: self.tables.tmpcs[x][int(self.choice[x] - self.tables.option_start[x])].id
                for x in range(first, end)
            }
            layers = tuple(sorted(tmpc_ids, key=file_position.__getitem__))
            stages.append(
                Stage(
                    layers,
                    self.task.data_parallel_degree,
                    self.task.tensor_parallel_degree,
                    {layer: tmpc_ids[layer] for layer in layers},
                )
            )
        return Plan(tuple(stages))


class Candidates:
    """Keeps the best plan of a task for each of its choices. lock: one at a time may look for plans."""

    def __init__(self, relaxation: Relaxation) -> None:
        self._relaxation = relaxation
        task = relaxation.task
        self._layers = [tables.layers(task.data_parallel_degree) for tables in task.choices]
        self._best: list[Candidate | None] = [None] * len(task.choices)
        self._held = relaxation.mean_held
        self._tried_even = False
        self._random = np.random.default_rng(0)
        self.lock = threading.Lock()

    @property
    def best(self) -> Candidate | None:
        return min((x for x in self._best if x is not None), key=lambda x: x.batch_s, default=None)

    def cut(self, layers_in: FloatArray) -> None:
        """Plans after a fractional plan, float64[stages], and after equal work."""
        task = self._relaxation.task
        s = task.shape.stages
        even = np.ones(task.tables.order.size)
        for index, (tables, layers) in enumerate(zip(task.choices, self._layers, strict=True)):
            self._take(index, self._valued(tables, layers, _cuts(even, layers_in, s)))
            if not self._tried_even:
                fastest_s = layers.figures[layers.option_start[:-1], FORWARD_S : WEIGHT_S + 1].sum(axis=1)
                wanted = [(size, x) for size in (fastest_s, even) for x in _even_sizes(task.shape, even.size)]
                for size, x in wanted:
                    self._take(index, self._valued(tables, layers, _cuts(size, x, s)))
        self._tried_even = True

    def move(self, moves: int, control: FloatArray) -> None:
        """So many moves for the best plan of each choice that has one."""
        relaxation = self._relaxation
        for index, found in enumerate(self._best):
            if found is None:
                continue
            cuts, choice = found.cuts.copy(), found.choice.copy()
            batch_s = anneal(
                self._layers[index],
                relaxation.program,
                relaxation.task.sync_s_per_byte,
                self._held,
                relaxation.task.memory_bytes,
                cuts,
                choice,
                self._random.random((moves, DRAWS)),
                _HEAT,
                control,
            )
            self._take(index, Candidate(found.task, found.tables, cuts, choice, float(batch_s)))

    def _take(self, index: int, found: Candidate | None) -> None:
        best = self._best[index]
        if found is not None and (best is None or found.batch_s < best.batch_s):
            self._best[index] = found

    def _valued(self, tables: DegreeTables, layers: OrderedLayers, cuts: IndexArray) -> Candidate | None:
        relaxation, task = self._relaxation, self._relaxation.task
        choice = layers.option_start[:-1].copy()
        if not fit_all(layers, relaxation.program, cuts, self._held, task.memory_bytes, choice):
            return None
        scratch = np.empty(choice.size, np.int64), np.empty(relaxation.program.kind.size + 1)
        batch_s = batch_seconds(layers, relaxation.program, task.sync_s_per_byte, cuts, choice, *scratch)
        return Candidate(task, tables, cuts, choice, float(batch_s))


def _even_sizes(shape: PipelineShape, layers: int) -> Iterator[FloatArray]:
    """What chunks may want of the layers, float64[stages]: all the same.

    Where ranks take turns also: all of a turn the same, and some turns a layer more than others, as a turn goes at the
    pace of its largest chunk.
    """
    yield np.ones(shape.stages)
    if shape.schedule.name in V_SHAPED or shape.chunks == 1:
        return
    least, more = divmod(layers // shape.ranks, shape.chunks)
    for turns in islice(combinations(range(shape.chunks), more), _MOST_TURNS):
        if more:
            sizes = np.full(shape.chunks, float(least))
            sizes[list(turns)] += 1.0
            yield np.repeat(sizes, shape.ranks)


def _cuts(size: FloatArray, wanted: FloatArray, chunks: int) -> IndexArray:
    """int64[chunks + 1]: runs of layers of given sizes whose parts are about those wanted; none is empty."""
    ends = np.cumsum(size)
    middles = ends - size / 2.0
    targets = np.cumsum(wanted)[:-1] / wanted.sum() * ends[-1]
    cuts = np.concatenate([[0], np.searchsorted(middles, targets), [size.size]]).astype(np.int64)
    for k in range(1, chunks):
        cuts[k] = max(cuts[k], cuts[k - 1] + 1)
    for k in range(chunks - 1, 0, -1):
        cuts[k] = min(cuts[k], cuts[k + 1] - 1)
    return cuts
