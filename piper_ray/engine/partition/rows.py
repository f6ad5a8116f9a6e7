"""Tables of some downsets that stay, and of others that come by: guests, whose fronts are sought over those."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.cost.stage import transfer_s_per_byte
from piper_ray.engine.kernels.sums import member_sums
from piper_ray.engine.kernels.types import BitArray, CostArrays, FloatArray, IndexArray, LatticeArrays, Tables, frozen
from piper_ray.engine.lattice.downsets import part_of_lattice
from piper_ray.engine.partition.setting import PartitionSetting
from piper_ray.engine.tables.problem import Problem
from piper_ray.engine.tables.stage_sums import build_sums, cost_arrays

_AT_ONCE = 65536
"""Of the downsets that stay: what is in between takes memory too."""


class GuestSums(NamedTuple):
    """Sums over guests, float64[g] each: ``StageSums.device_work_s`` and ``replica_work_s``."""

    device_work_s: FloatArray
    replica_work_s: FloatArray


class DownsetRows:
    """Rows 0 .. own - 1 are the downsets that stay, in order; then there is room for guests; the last row is V's.

    problem: of the same setting, on a chain. own: uint64[m, words], the empty set first. guests: at most so many.
    """

    def __init__(self, setting: PartitionSetting, problem: Problem, own: BitArray, guests: int) -> None:
        self._setting, self._problem = setting, problem
        self.own, self.guests = own.shape[0], guests
        rows = self.own + guests + 1
        self._bits = np.zeros((rows, own.shape[1]), np.uint64)
        self._crossing_start, self._crossing = np.zeros(rows + 1, np.int64), np.zeros(0, np.int64)
        has_tensors = bool(setting.graph.tensors)
        self._cut_start, self._cut = np.zeros(rows + 1 if has_tensors else 1, np.int64), np.zeros(0, np.int64)
        self._costs = problem.costs._replace(
            **{
                name: np.zeros((rows if values.shape[0] else 0, *values.shape[1:]), values.dtype)
                for name, values in problem.costs._asdict().items()
                if name != "both_s"
            }
        )
        sizes = np.bitwise_count(own).sum(axis=1, dtype=np.int64)
        self.level_start = np.searchsorted(sizes, np.arange(setting.graph.size + 2)).astype(np.int64)
        for first in range(0, self.own, _AT_ONCE):
            self._write(first, own[first : first + _AT_ONCE])
        self._write(rows - 1, problem.lattice.bits[-1:])

    @property
    def arrays(self) -> list[np.ndarray]:
        """Of all rows."""
        starts, values = [self._crossing_start, self._cut_start], [self._crossing, self._cut]
        return [self._bits, *starts, *values, *self._costs]

    def put_guests(self, bits: BitArray) -> GuestSums:
        """In place of those that were there: uint64[g, words], downsets in order."""
        if bits.shape[0] > self.guests:
            raise AssertionError(f"{bits.shape[0]} guests, and room for {self.guests}")
        return self._write(self.own, bits)

    def bits(self, row: int) -> BitArray:
        """uint64[words], a copy."""
        bits: BitArray = self._bits[row].copy()
        return bits

    def own_of(self, size: int) -> BitArray:
        """uint64[.., words], a copy: of the downsets that stay those of this size."""
        return self._bits[self.level_start[size] : self.level_start[size + 1]].copy()

    def potential_of_guests(self, guests: int, of_vertex: FloatArray) -> FloatArray:
        """float64[guests]: sums over them."""
        found: FloatArray = member_sums(self._bits[self.own : self.own + guests], of_vertex[:, None].copy())
        return found[:, 0]

    @property
    def tables(self) -> Tables:
        """Of all rows, as the kernels take them: to be taken anew when guests have come."""
        whole = self._problem.lattice
        lattice = LatticeArrays(
            bits=_seen(self._bits),
            level_start=_seen(self.level_start),
            crossing_start=_seen(self._crossing_start),
            crossing=_seen(self._crossing),
            edge_tail=whole.edge_tail,
            edge_head=whole.edge_head,
            vertex_level=whole.vertex_level,
            tensor_bits=whole.tensor_bits,
            cut_start=_seen(self._cut_start),
            cut=_seen(self._cut),
        )
        costs = CostArrays(*(_seen(values) for values in self._costs))
        return Tables(lattice, costs, self._problem.options, self._problem.cluster)

    def _write(self, first: int, bits: BitArray) -> GuestSums:
        """Rows from ``first`` on. Those before are written already; what came behind crosses nothing."""
        last = first + bits.shape[0]
        part = part_of_lattice(self._setting.graph, bits)
        sums = build_sums(part, self._setting.options)
        costs = cost_arrays(
            sums,
            self._setting.options,
            self._problem.resync_s_per_byte,
            transfer_s_per_byte(self._setting.instance),
        )
        self._bits[first:last] = bits
        for name, values in costs._asdict().items():
            kept = getattr(self._costs, name)
            if name != "both_s" and kept.shape[0]:
                kept[first:last] = values
        arrays = part.arrays
        self._crossing = _append(first, arrays.crossing_start, arrays.crossing, self._crossing_start, self._crossing)
        if self._cut_start.size > 1:
            self._cut = _append(first, arrays.cut_start, arrays.cut, self._cut_start, self._cut)
        return GuestSums(sums.device_work_s, sums.replica_work_s)


def _append(
    first: int, start: IndexArray, values: IndexArray, all_start: IndexArray, all_values: IndexArray
) -> IndexArray:
    """Puts runs behind those of the rows before ``first``; returns all values, with more room if need be."""
    at = int(all_start[first])
    end = at + values.size
    if end > all_values.size:
        all_values = np.concatenate((all_values[:at], np.zeros(max(values.size, at // 4), np.int64)))
    all_values[at:end] = values
    all_start[first + 1 : first + start.size] = at + start[1:]
    all_start[first + start.size :] = end
    return all_values


def _seen(values: np.ndarray) -> np.ndarray:
    """What kernels may read, and we still write."""
    (seen,) = frozen((values.view(),))
    return seen
