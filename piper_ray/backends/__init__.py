"""Executors of one level of an evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from piper_ray.kernels.types import BlockArrays, FrontArrays, IndexArray, Target
from piper_ray.problem import Problem

Heartbeat = Callable[[int], None]


class LevelStates(NamedTuple):
    """Fronts of consecutive downsets: states of each, then all costs and all data-parallel sums, in id order."""

    counts: IndexArray
    costs: IndexArray
    sums: IndexArray
    tested: IndexArray  # int64[COUNTERS], see kernels/level.py


class Backend(Protocol):
    """Computes the fronts of a range of downsets of one level; every backend returns the same arrays."""

    @property
    def threads(self) -> int:
        """How many downsets are worked on at a time."""
        ...

    def evaluate_level(
        self,
        problem: Problem,
        target: Target,
        fronts: FrontArrays,
        blocks: BlockArrays,
        first: int,
        last: int,
        heartbeat: Heartbeat,
    ) -> LevelStates:
        """Fronts of downsets first .. last - 1, given those of all lower levels.

        Calls ``heartbeat`` about ten times a second with the number of downsets done; what it raises ends the level.
        """
        ...
