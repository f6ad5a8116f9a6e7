"""A curve of least times with its proofs: a bracket for each number of devices, or for each bound on the sum of d."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from piper_ray.cost.tolerances import PROOF, RESOLUTION
from piper_ray.engine.kernels.types import FloatArray, IndexArray
from piper_ray.engine.tables.problem import Problem

BoolArray: TypeAlias = npt.NDArray[np.bool_]


@dataclass
class Curve:
    """Brackets at rising ``positions``: numbers of devices K, or with ``by_sum`` bounds on the sum of d at one K.

    lower_s, upper_s: float64[positions]; no plan is faster, and the best plan known. upper_s is inf where no plan is
    known, lower_s where there is none. More devices and a larger sum never hurt, so both fall along the curve; what is
    proved at one position says something of all others. other_limit: of what the curve does not run along.
    """

    by_sum: bool
    positions: IndexArray
    other_limit: int
    lower_s: FloatArray
    upper_s: FloatArray
    gap: float = 0.0  # relative; a bracket as narrow as this is closed

    @classmethod
    def along_devices(cls, problem: Problem, devices: Sequence[int], gap: float = 0.0) -> Curve:
        """The sum of d is bounded by N alone: d t devices are at least d."""
        limit = problem.cluster.data_parallel_limit
        positions = np.array(devices, np.int64)
        sums = problem.workload.sums
        lower_s = np.maximum(sums.device_work_s[-1] / positions, sums.replica_work_s[-1] / np.minimum(positions, limit))
        return cls._new(False, positions, limit, lower_s, problem, gap)

    @classmethod
    def along_sums(cls, problem: Problem, sums: Sequence[int], gap: float = 0.0) -> Curve:
        """On all devices of the problem."""
        positions = np.array(sums, np.int64)
        lower_s = problem.workload.sums.replica_work_s[-1] / positions
        return cls._new(True, positions, problem.cluster.devices, lower_s, problem, gap)

    @classmethod
    def _new(
        cls, by_sum: bool, positions: IndexArray, other_limit: int, lower_s: FloatArray, problem: Problem, gap: float
    ) -> Curve:
        lower_s = np.maximum(lower_s * (1.0 - 1e-12), problem.lower_bound_s())
        return cls(by_sum, positions, other_limit, lower_s, np.full(positions.size, np.inf), gap)

    @classmethod
    def without_plans(cls, by_sum: bool, positions: Sequence[int], other_limit: int) -> Curve:
        """Where it is known beforehand that there is none."""
        nothing = np.full(len(positions), np.inf)
        return cls(by_sum, np.array(positions, np.int64), other_limit, nothing, nothing.copy())

    def part(self, indices: IndexArray, gap: float) -> Curve:
        """A copy of some positions, with another gap."""
        return Curve(
            self.by_sum,
            self.positions[indices],
            self.other_limit,
            self.lower_s[indices],
            self.upper_s[indices],
            gap,
        )

    def limits(self, index: int) -> tuple[int, int]:
        """Devices and sum of d at a position."""
        position = int(self.positions[index])
        return (self.other_limit, position) if self.by_sum else (position, self.other_limit)

    def is_closed(self, index: int) -> bool:
        """Whether nothing is left to find out there."""
        return bool(self.closed()[index])

    def closed(self) -> BoolArray:
        """bool[positions]: proved, within the gap asked for, or without a plan."""
        return self._within(max(PROOF, self.gap))

    def proved(self) -> BoolArray:
        """bool[positions]: proved, or without a plan."""
        return self._within(PROOF)

    def _within(self, gap: float) -> BoolArray:
        # An unknown plan is no proof: inf * (1 - gap) is inf, which only a lower bound of inf reaches.
        return np.asarray((self.lower_s >= self.upper_s * (1.0 - gap)) | (self.upper_s <= RESOLUTION))

    def record_infeasible(self, index: int, threshold_s: float) -> None:
        """No plan keeps the threshold at this position, so none does before it."""
        self.lower_s[: index + 1] = np.maximum(self.lower_s[: index + 1], threshold_s)

    def record_without_plan(self, index: int) -> None:
        """There is no plan at all, at any threshold."""
        self.lower_s[: index + 1] = np.inf

    def record_plan(self, position: int, value_s: float) -> None:
        """A plan that needs no more than ``position``."""
        index = int(np.searchsorted(self.positions, position))
        self.upper_s[index:] = np.minimum(self.upper_s[index:], value_s)

    def share_bounds(self) -> None:
        """What is known at one position, at all others."""
        self.upper_s[:] = np.minimum.accumulate(self.upper_s)
        self.lower_s[:] = np.maximum.accumulate(self.lower_s[::-1])[::-1]
