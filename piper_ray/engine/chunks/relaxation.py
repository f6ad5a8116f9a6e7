"""The bound of one task: prices of paths, improved against the fractional plans that they lead to."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from piper_ray.engine.chunks.tasks import Task
from piper_ray.engine.kernels.chunk_bound import (
    FORWARD_S,
    WEIGHT_S,
    WEIGHTS,
    LayerKinds,
    Paths,
    Prices,
    ShapeLimits,
    better_prices,
    cells,
    least_priced_s,
    mean_held,
    spread_s,
)
from piper_ray.engine.kernels.chunk_program import PASSES, ChunkProgram, build_program, critical_path, simulate_chunks
from piper_ray.engine.kernels.types import FloatArray

_MOST_PATHS = 160
_SLOWER = 0.25
_ROUNDING = 1e-9
"""Relative: what sums of prices and seconds may be off."""


@dataclass
class Relaxation:
    """``lower_s``: no batch of the task takes less; it rises. ``layers_in``: how many layers each chunk has in the best
    fractional plan so far, which has to keep the memory limit only about."""

    task: Task
    program: ChunkProgram
    limits: ShapeLimits
    exact_kinds: LayerKinds
    kinds: LayerKinds
    lower_s: float
    layers_in: FloatArray = field(init=False)

    def __post_init__(self) -> None:
        p, s = self.task.shape.ranks, self.task.shape.stages
        self._counts = np.zeros((_MOST_PATHS, s, PASSES))
        self._rank = np.zeros(_MOST_PATHS, np.int64)
        self._path = np.zeros(_MOST_PATHS)
        self._memory = np.zeros(p)
        self._end_s = np.empty(self.program.kind.size + 1)
        self._paths = 0
        self._share = _even_shares(self.kinds)
        self.layers_in = self._count_layers(self._share)
        # The path of each rank that has more to do than others, where all else is even.
        held = spread_s(self.kinds, self.limits, self._share, s)
        even = np.broadcast_to(held.mean(axis=0), held.shape)
        for rank in range(p):
            slower = even.copy()
            slower[self.program.stage_of[rank]] *= 1.0 + _SLOWER
            self._add_paths(slower)
        self._path[: self._paths] = 1.0 / self._paths

    @classmethod
    def of(cls, task: Task) -> Relaxation | None:
        """None if the schedule cannot run so: its ranks would wait for each other."""
        shape = task.shape
        runs, program = build_program(
            shape.schedule.code, shape.ranks, shape.chunks, shape.microbatches, shape.group
        )
        if not runs:
            return None
        d = task.data_parallel_degree
        limits = ShapeLimits(
            task.tables.crossing_s(program.rank_of), mean_held(program), task.sync_s_per_byte, task.memory_bytes
        )
        exact = task.tables.kinds(shape.stages, d, rounded=False)
        return cls(task, program, limits, exact, task.tables.kinds(shape.stages, d, rounded=True), task.lower_s)

    def improve(self, looks: int, rounds: int) -> None:
        """Looks for better prices ``looks`` times, and adds the longest paths of the fractional plans on the way."""
        for _ in range(looks):
            paths = Paths(self._counts[: self._paths], self._rank[: self._paths])
            prices = Prices(self._path[: self._paths], self._memory)
            average = better_prices(
                self.kinds,
                self.limits,
                self.program.rank_of,
                paths,
                prices,
                self._share,
                self.task.lower_s,
                rounds,
            )
            found_s = least_priced_s(self.exact_kinds, self.limits, self.program.rank_of, paths, prices)
            self.lower_s = max(self.lower_s, found_s * (1.0 - _ROUNDING))
            self.layers_in = self._count_layers(average)
            self._make_room()
            self._add_paths(spread_s(self.kinds, self.limits, average, self.program.rank_of.size))

    def _add_paths(self, held: FloatArray) -> None:
        """The longest of what the chunks hold: two where there are several."""
        weights = np.bincount(self.program.rank_of, held[:, WEIGHTS], self._memory.size)
        sync_s = weights * self.limits.sync_s_per_byte
        simulate_chunks(self.program, held[:, FORWARD_S : WEIGHT_S + 1], sync_s, self._end_s)
        for along_rank in (True, False):
            at = self._paths
            if at == _MOST_PATHS:
                return
            self._rank[at] = critical_path(self.program, sync_s, self._end_s, along_rank, self._counts[at])
            if any(np.array_equal(self._counts[at], self._counts[other]) for other in range(max(0, at - 8), at)):
                continue
            self._path[at] = 0.0
            self._paths += 1

    def _make_room(self) -> None:
        """Drops the paths of the least price, so that two more find room."""
        if self._paths + 2 <= _MOST_PATHS:
            return
        kept = np.sort(np.argsort(-self._path[: self._paths], kind="stable")[: _MOST_PATHS * 3 // 4])
        count = kept.size
        self._counts[:count] = self._counts[kept]
        self._rank[:count] = self._rank[kept]
        self._path[:count] = self._path[kept]
        self._paths = count

    def _count_layers(self, share: FloatArray) -> FloatArray:
        """float64[s]"""
        found = np.zeros(self.task.shape.stages)
        at = 0
        for count, first, last, options in zip(
            self.kinds.count.tolist(),
            self.kinds.first_chunk.tolist(),
            self.kinds.last_chunk.tolist(),
            np.diff(self.kinds.option_start).tolist(),
            strict=True,
        ):
            width = last - first + 1
            found[first : last + 1] += count * share[at : at + width * options].reshape(width, options).sum(axis=1)
            at += width * options
        return found


def _even_shares(kinds: LayerKinds) -> FloatArray:
    """Each layer evenly over the chunks that it may be in, with its fastest option."""
    share = np.zeros(cells(kinds))
    at = 0
    for first, last, options in zip(
        kinds.first_chunk.tolist(), kinds.last_chunk.tolist(), np.diff(kinds.option_start).tolist(), strict=True
    ):
        width = last - first + 1
        share[at : at + width * options : options] = 1.0 / width
        at += width * options
    return share
